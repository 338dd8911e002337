"""`distlab bench monitor` must be able to fail: each bar rejects a planted figure."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import _monitor_faults as faults
from benchmarks import monitor
from benchmarks._bars import missed
from benchmarks._monitor_cpu import Cost

STRAGGLER, _, _, HANG = faults.FAULTS
RIGHT = faults.Named(ranks=(STRAGGLER.rank,), seconds=4.9, steps=30)
PLAIN = Cost(ranks_s=0.1, monitor_s=0.0, parent_s=0.001)


@pytest.mark.parametrize(
    ("named", "is_missed"),
    [
        (RIGHT, False),
        (replace(RIGHT, seconds=6.0, steps=3), False),
        (replace(RIGHT, seconds=5.1), True),  # too late, both ways
        (replace(RIGHT, ranks=(STRAGGLER.rank + 1,)), True),
        (replace(RIGHT, ranks=(0, STRAGGLER.rank)), True),
        (replace(RIGHT, others=("desync (2,)",)), True),
        (faults.Named(), True),
    ],
)
def test_only_the_right_rank_in_time_is_named(
    named: faults.Named, is_missed: bool
) -> None:
    line = monitor.of_fault(STRAGGLER, named)
    assert missed([line]) == ["named_straggler"] * is_missed
    assert monitor.BENCH.text([line])[0].endswith("MISSED") == is_missed


def test_the_share_is_barred_with_its_upper_bound() -> None:
    watched = Cost(ranks_s=0.1005, monitor_s=0.0005, parent_s=0.0012)
    lines = monitor.of_costs([(watched, PLAIN)] * 5)
    assert (lines[0]["value"], missed(lines)) == (0.007, [])
    dear = replace(watched, parent_s=0.002)  # 1.5 %
    lines = monitor.of_costs([(watched, PLAIN)] * 3 + [(dear, PLAIN)] * 2)
    assert lines[0]["value"] == 0.007
    assert missed(lines) == ["overhead_share"]


@pytest.mark.parametrize("name", ["false_alarms", "leftover_processes"])
def test_one_is_too_many(name: str) -> None:
    assert missed([monitor.result(name, 1)]) == [name]
    assert missed([monitor.result(name, 0)]) == []


def test_every_fault_has_its_bar_and_its_place_in_the_trainer(tmp_path: Path) -> None:
    for fault in faults.FAULTS:
        compile(fault.trainer(tmp_path / "began"), "trainer.py", "exec")
    names = {"named_straggler", "named_desync", "named_nan", "named_hang"}
    assert set(monitor.AT_LEAST) == names
    with pytest.raises(ValueError, match=HANG.name):
        replace(HANG, line="    no such line\n").trainer(tmp_path / "began")


def test_the_exit_code_says_whether_all_bars_are_met(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["monitor.py", "--json"])
    for value, code in ((0, 0), (2, 1)):
        results = [monitor.result("false_alarms", value)]
        assert monitor.BENCH.main(lambda results=results: results) == code
        assert json.loads(capsys.readouterr().out)["results"] == results
