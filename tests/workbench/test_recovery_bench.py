"""`distlab bench recovery` must be able to fail: each bar rejects a planted figure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import recovery
from benchmarks._bars import Line, missed
from tests.corpora import recovery_jobs as jobs

TIMES = (10.02, 10.03, 10.05, 10.06, 10.1)
STAGES = dict(zip(recovery.STAGES, TIMES, strict=True))
KILL = jobs.Kill(rank=0, killed_s=10.0, recovered_s=10.1, lost_steps=0, stages=STAGES)
THEIRS = replace(KILL, recovered_s=14.0, lost_steps=37, stages={})
OWN, OTHER, EQUAL = [KILL] * 30, [THEIRS] * 3, [True] * 5


def late(seconds: float, num: int) -> list[jobs.Kill]:
    """Thirty kills, of which so many took this long."""
    slow = replace(KILL, recovered_s=KILL.killed_s + seconds)
    return [slow] * num + OWN[num:]


def test_figures_that_meet_all_bars() -> None:
    lines = recovery.of_kills(OWN, OTHER, EQUAL)
    assert missed(lines) == []
    values = {line["name"]: line["value"] for line in lines}
    assert values["p50_s"] == 0.1
    assert values["ratio_torchrun_over_ours"] == 40
    assert [values[name] for name in recovery.SEGMENTS] == pytest.approx(
        [0.02, 0.01, 0.02, 0.01, 0.04]
    )
    assert values["torchrun_lost_steps"] == 37  # shown: it has no bar
    assert not any(row.endswith("MISSED") for row in recovery.BENCH.text(lines))


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        (recovery.of_kills(OWN[1:], OTHER, EQUAL), ["kills"]),
        (recovery.of_kills(late(0.31, 16), OTHER, EQUAL), ["p50_s"]),
        (recovery.of_kills(late(0.7, 2), OTHER, EQUAL), ["p95_s"]),
        (
            recovery.of_kills([*OWN[1:], replace(KILL, lost_steps=1)], OTHER, EQUAL),
            ["lost_steps"],
        ),
        (recovery.of_kills(OWN, OTHER, [*EQUAL, False]), ["bit_equal"]),
        (
            recovery.of_kills(OWN, [replace(THEIRS, recovered_s=10.9)], EQUAL),
            ["ratio_torchrun_over_ours"],
        ),
    ],
)
def test_each_bar_rejects_a_planted_figure(lines: list[Line], names: list[str]) -> None:
    assert missed(lines) == names


def test_one_slow_kill_of_thirty_is_seen_in_the_maximum_only() -> None:
    lines = recovery.of_kills(late(0.7, 1), OTHER, EQUAL)
    assert missed(lines) == []
    assert next(line for line in lines if line["name"] == "max_s")["value"] == 0.7


def test_a_third_of_the_kills_is_rank_0() -> None:
    victims = recovery.victims(30)
    assert victims.count(0) == 10
    assert set(victims) == {0, 1, 2}


def test_recovered_is_the_first_step_by_all_with_the_new_process(
    tmp_path: Path,
) -> None:
    (tmp_path / "stamps").mkdir()
    stamps = {
        "0.10": "7 1.0\n8 1.1\n9 3.4\n10 3.",  # the last line is being written
        "1.11": "7 1.0\n8 1.1\n",  # killed at 2.0
        "2.12": "7 1.0\n8 1.1\n9 3.6\n",
        "1.13": "9 3.5\n",
    }
    for name, text in stamps.items():
        (tmp_path / "stamps" / name).write_text(text)
    job = jobs.Job(tmp_path, process=None)  # type: ignore[arg-type]
    assert job.newest() == {0: 10, 1: 13, 2: 12}
    assert job._next(1, 11, 2.0) == (9, 3.6)
    (tmp_path / "stamps" / "2.12").write_text("7 1.0\n8 1.1\n")
    assert job._next(1, 11, 2.0) is None  # rank 2 has not completed step 9 again


def test_what_is_kept_for_the_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "play_kills", lambda *_: (OWN[:2], OTHER[:1], EQUAL))
    file = tmp_path / "kept.json"
    report = recovery.measure(1, 2, 3, str(file))
    assert missed(report["results"]) == ["kills"]  # two are too few
    kept = json.loads(file.read_text())
    assert kept["ours"] == [[0.1, 0.02, 0.01, 0.02, 0.01, 0.04]] * 2
    assert kept["torchrun"] == [4.0]
