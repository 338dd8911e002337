"""`distlab bench hang` must be able to fail: a hang that is not named is counted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import hang
from benchmarks._bars import missed
from distlab.grading.hostile_cases import FOLDER, read_cases
from tests.corpora.hangs import HANGS

ROOT = Path(__file__).parents[2]
CASES = {case.id: case for case in read_cases(ROOT / FOLDER)}


@pytest.mark.slow
def test_right_expectations_have_no_wrong_verdict_and_wrong_ones_have() -> None:
    good, bad = HANGS[0], replace(HANGS[0], call="send → 3")
    off = replace(CASES["HH06"], rank=2)  # rank 2 sends to 0, not to 1
    report = hang.measure([CASES["HF12"], CASES["HH06"], off], [good, bad])
    values = {result["name"]: result["value"] for result in report["results"]}
    assert values["hangs"] == 4
    assert values["hostile_cases"] == 3
    assert values["wrong_verdicts"] == 2
    assert values["leftover_processes"] == 0
    wrong = [line for line in report["cases"] if line["problems"]]
    assert [line["id"] for line in wrong] == ["HH06", "chain"]
    for line, expected in zip(
        wrong, ("rank 2, send → 1", "rank 2, send → 3"), strict=True
    ):
        assert expected in line["problems"][0]
    assert {"wrong_verdicts", "hangs", "hostile_cases"} <= set(
        missed(report["results"])
    )


@pytest.mark.parametrize(
    ("name", "value", "is_missed"),
    [
        ("autopsy_max_s", 1.5, False),
        ("autopsy_max_s", 1.6, True),
        ("leftover_processes", 1, True),
        ("wrong_verdicts", 0, False),
        ("hostile_cases", 39, True),
        ("hangs", 25, False),
        ("autopsy_p50_s", 9.0, False),  # shown, not barred
    ],
)
def test_a_bar_that_is_missed_is_named(
    name: str, value: float, is_missed: bool
) -> None:
    assert missed([hang.BENCH.line(name, value)]) == [name] * is_missed


def test_there_are_enough_hangs() -> None:
    assert len(HANGS) + sum(bool(c.call) for c in CASES.values()) >= 25
    assert all(h.place.startswith("hangs.py:") for h in HANGS)


def test_the_command_knows_the_benchmarks_and_not_their_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from distlab.cli.bench import bench

    monkeypatch.chdir(ROOT)
    with pytest.raises(ValueError, match=r"\bhang, ") as caught:
        bench("nothing")
    assert "_hangs" not in str(caught.value)
