"""`distlab chaos`: the judge of a cell, the tables, and real cells (slow)."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path
from typing import Any

import pytest

from distlab.chaos import plan as chaos_plan
from distlab.chaos import play
from distlab.chaos.campaign import Player, campaign_of
from distlab.chaos.judge import (
    FAILED,
    HUNG,
    LEFT,
    LOST,
    NO_EFFECT,
    NOT_FIRED,
    RECOVERED,
    REFUSED,
    SAMPLES,
    STOPPED,
    WEIGHTS,
    WENT_ON,
    CellResult,
    judge,
)
from distlab.chaos.kept import Kept, read_report
from distlab.chaos.matrix import FAULTS, MODES, MOMENTS, Cell, cells
from distlab.chaos.page import page
from distlab.chaos.plan import Setting, plan_of
from distlab.chaos.play import TRAIN, ChaosRun
from distlab.chaos.report import as_data, from_data, markdown, row, times
from distlab.cli import chaos as verb
from distlab.cli.chaos import chaos
from distlab.cli.demo_recovery import demo_recovery
from tests.workbench.course import ROOT
from tests.workbench.launching import linux

TINY = Setting(num_ranks=2, num_epochs=1, num_samples=8, global_batch_size=4)
(KILL,) = cells("kill-worker@forward/restart")
(SLOW,) = cells("slow@forward/restart")
(CUT,) = cells("cut-for-good@forward/restart")


# ── the judge, on written records ───────────────────────────────────────────────────


def line(what: str, t: float, rank: int, generation: int = 1, **more: Any) -> Any:
    head = {"what": what, "t": t, "rank": rank, "launch": 1, "generation": generation}
    return {**head, **more}


def lived(generation: int, first: int, t: float, weights: str = "w") -> list[Any]:
    """What two ranks write down from step `first` on; step 1 is saved."""
    lines = []
    for rank in (0, 1):
        own = rank, generation
        lines += [line("started", t, *own), line("met", t + 0.5, *own)]
        lines.append(line("resumed", t + 0.75, *own, step=first - 1, refused=[]))
        for step in range(first, 3):
            samples = [4 * (step - 1) + 2 * rank + k for k in (0, 1)]
            when = t + step
            lines.append(line("step", when, *own, step=step, samples=samples))
        if first == 1:
            lines.append(line("saved", t + 1.5, *own, step=1))
        lines.append(line("ended", t + 3, *own, step=2, weights=weights))
    return lines


def ordered(lines: list[Any]) -> list[Any]:
    return sorted(lines, key=lambda one: float(one["t"]))


def unbroken() -> ChaosRun:
    return ChaosRun(codes=[0], lines=ordered(lived(1, 1, 0.0)), launched=[0.0])


def broken(**changes: Any) -> ChaosRun:
    """Rank 1 is killed in step 2; both start again, from step 1."""
    before = [one for one in lived(1, 1, 0.0) if one["t"] < 2]
    run = ChaosRun(
        codes=[0],
        lines=ordered([*before, *lived(2, 2, 10.0)]),
        fired={"t": 2.0, "rank": 1, "step": 2, "what": "SIGKILL"},
        said=[(4.0, "[distlab] rank 1 was ended by SIGKILL; restart 1 of at most 2")],
        launched=[0.0],
    )
    vars(run).update(changes)
    return run


def status(run: ChaosRun, cell: Any = KILL) -> str:
    return judge(cell, TINY, run, unbroken()).status


def without(run: ChaosRun, **fields: Any) -> list[Any]:
    return [
        one
        for one in run.lines
        if any(one.get(name) != value for name, value in fields.items())
    ]


def test_a_run_that_ends_as_the_unbroken_one_has_recovered() -> None:
    result = judge(KILL, TINY, broken(), unbroken())
    assert (result.status, result.num_lost) == (RECOVERED, 0)
    assert [*result.segments.values()] == [2.0, 6.0, 0.5, 0.25, 1.25]
    assert result.recovery_s == 10.0
    assert status(broken(lines=unbroken().lines), SLOW) == WENT_ON


def test_other_weights_on_one_rank_are_found() -> None:
    run = broken()
    for one in run.lines:
        if one["what"] == "ended" and one["rank"] == 1:
            one["weights"] = "other"
    result = judge(KILL, TINY, run, unbroken())
    assert result.status == WEIGHTS
    assert status(broken(lines=ordered(lived(1, 1, 0.0, "v")))) == WEIGHTS
    run = broken()
    run.lines = without(run, what="ended", rank=1)
    assert status(run) == WEIGHTS


def test_another_number_of_ranks_ends_close_to_the_same_weights() -> None:
    (cell,) = cells("kill-worker@forward/elastic")
    for apart, wanted in ((1e-13, RECOVERED), (1e-6, WEIGHTS)):
        run, whole = broken(), unbroken()
        run.lines = without(run, what="ended", rank=1)
        for one in (*run.lines, *whole.lines):
            one |= {"size": 1, "projections": [1.0, 2.0]} if one["rank"] == 0 else {}
        run.lines[-1] |= {"weights": "v", "projections": [1.0, 2.0 + apart]}
        assert run.lines[-1]["what"] == "ended"
        assert judge(cell, TINY, run, whole).status == wanted


def test_a_sample_used_twice_or_never_is_found() -> None:
    run = broken()
    run.lines[-3]["samples"] = [0, 1]  # in place of its own, in the last step
    assert run.lines[-3]["what"] == "step"
    assert status(run) == SAMPLES
    run = broken()
    run.lines = without(run, what="step", step=2, rank=0)
    assert status(run) == SAMPLES


def test_a_checkpoint_that_nobody_loads_is_lost_unless_it_was_damaged() -> None:
    run = broken()
    run.lines.append(line("saved", 1.8, 0, step=2))
    run.lines = ordered(run.lines)
    assert status(run) == LOST
    assert run.fired is not None
    run.fired["damaged"] = 2
    assert status(run) == RECOVERED


@pytest.mark.parametrize(
    ("changes", "cell", "wanted"),
    [
        ({"is_hung": True}, KILL, HUNG),
        ({"fired": None}, KILL, NOT_FIRED),
        ({"left": ["17 python"]}, KILL, LEFT),
        ({"codes": [1], "said": []}, KILL, FAILED),
        ({"codes": [1], "said": [(1.0, "[distlab] gave up: rank 1")]}, KILL, FAILED),
        ({"codes": [1], "said": [(1.0, "distlab.launch: no agent")]}, CUT, REFUSED),
        ({"codes": [1], "said": [(1.0, "Traceback (most …")]}, CUT, FAILED),
        ({"lines": unbroken().lines}, KILL, NO_EFFECT),
        ({"lines": unbroken().lines}, CUT, NO_EFFECT),
        ({}, SLOW, STOPPED),
    ],
)
def test_every_other_end_has_its_name(
    changes: dict[str, Any], cell: Any, wanted: str
) -> None:
    assert status(broken(**changes), cell) == wanted


# ── the matrix, the tables ──────────────────────────────────────────────────────────


def test_each_cell_has_one_place_and_its_plan_is_drawn_from_the_seed() -> None:
    every = cells()
    assert len({cell.id for cell in every}) == len(every)
    assert {cell.moment for cell in every} == set(MOMENTS)
    assert {cell.mode for cell in every} == set(MODES)
    setting = Setting()
    for cell in every:
        if not cell.why_not:
            plan = plan_of(cell, setting, "folder")
            assert plan == plan_of(cell, setting, "folder")
            assert 0 <= plan.rank < setting.num_ranks
            assert 2 * setting.save_every < plan.step < setting.num_steps
    drawn = {plan_of(KILL, Setting(seed=seed), "").step for seed in range(20)}
    assert len(drawn) > 5
    with pytest.raises(ValueError, match=r"'kill-nobody'.*\bkill-worker\b"):
        cells("kill-nobody")


def test_a_report_is_read_back_and_shown_three_ways() -> None:
    campaign = campaign_of(cells("kill-worker"))
    first, second = (
        judge(KILL, TINY, broken(), unbroken()),
        cells("kill-worker@save")[0],
    )
    bad = CellResult(cell=second, status=WEIGHTS, why="<b>", evidence=("said",))
    data = as_data([first, bad], campaign, TINY)
    figures = {one["name"]: one for one in data["results"]}
    assert figures["wrong_weights"]["met"] is False
    assert figures["hung"] == {
        "name": "hung", "value": 0, "unit": "cells", "bar": 0, "met": True,
    }  # fmt: skip
    assert figures["recovery_s"]["p50"] == 10.0
    results, again = from_data(json.loads(json.dumps(data)))
    assert [one.status for one in results] == [RECOVERED, WEIGHTS]
    assert again.not_played.keys() == campaign.not_played.keys()
    text = markdown(results, again, data["machine"])
    (line_of_cells,) = (one for one in text.splitlines() if "| SIGKILL worker |" in one)
    assert line_of_cells.split(" | ")[1:] == ["recovered", "*", "*", "✗", "* |"]
    assert re.search(r"\b1 WRONG WEIGHTS", text)
    assert re.search(r"\bn = 1\b.*\b10\.00 s", text)
    told = row(KILL.fault, "restart", {first.cell.id: first})
    assert told.split() == ["SIGKILL", "worker", "10.0", "s", "*", "*", "*", "*"]
    assert max(len(row(fault, "restart", {})) for fault in FAULTS) <= 88
    assert times(results)[-1].split() == [
        "all",
        "10.00",
        "s",
        "10.00",
        "s",
        "10.00",
        "s",
    ]
    shown = page([first, bad], campaign, TINY)
    assert "10.0 s" in shown
    assert "&lt;b&gt;" in shown
    with pytest.raises(ValueError, match="report"):
        from_data({"cells": [{}]})


def test_the_verb_refuses_what_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="5 ranks"):
        chaos(n=5, only="", code="reference", seed=0, html="", out="", docs="")
    with pytest.raises(ValueError, match=r"mine.*reference"):
        chaos(n=2, only="", code="yours", seed=0, html="", out="", docs="")
    path = tmp_path / "no.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"no\.json.*JSON"):
        verb.write_docs(path)


class Counting:
    """Plays nothing, and counts."""

    def __init__(self) -> None:
        self.played: list[str] = []

    def play(self, cell: Cell) -> CellResult:
        self.played.append(cell.id)
        return CellResult(cell=cell, status=WENT_ON)


def test_a_campaign_goes_on_with_what_its_file_does_not_have(tmp_path: Path) -> None:
    chosen, path = cells("slow@"), tmp_path / "chaos.json"
    campaign, setting = campaign_of(chosen), Setting()
    for count in (2, 3):
        counting = Counting()
        kept = Kept(counting, path, campaign, setting)
        for cell in chosen[:count]:
            assert kept.play(cell).status == WENT_ON
        assert counting.played == [cell.id for cell in chosen[:count]][-(4 - count) :]
    with pytest.raises(ValueError, match=r"\b0\b.*\b1\b"):
        Kept(Counting(), path, campaign, Setting(seed=1))


def test_a_full_disk_leaves_the_earlier_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first, second, *_), path = cells("slow@"), tmp_path / "chaos.json"
    setting = Setting()
    kept = Kept(Counting(), path, campaign_of([first, second]), setting)
    kept.play(first)
    write_text = Path.write_text

    def fail_midway(path: Path, text: str, **how: Any) -> int:
        write_text(path, text[: len(text) // 2], **how)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail_midway)
    with pytest.raises(OSError, match="No space"):
        kept.play(second)
    assert [one["id"] for one in read_report(path)["cells"]] == [first.id]
    assert list(tmp_path.iterdir()) == [path]


def test_the_table_of_the_docs_has_a_place() -> None:
    text = (ROOT / "docs/chaos.md").read_text(encoding="utf-8")
    assert text.count(verb.BEGIN) == text.count(verb.END) == 1


def test_the_demo_judges_a_kill_by_the_unbroken_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = iter(("w", "w", "w", "other"))

    def play_cell(cell: Cell | None, *_: object) -> ChaosRun:
        run = broken() if cell else unbroken()
        now = next(weights)
        for one in run.lines:
            one |= {"weights": now} if one["what"] == "ended" else {}
        return run

    monkeypatch.setattr(play, "play_cell", play_cell)
    monkeypatch.setattr(chaos_plan, "Setting", lambda **_: TINY)
    code, data = demo_recovery(seed=5, quiet=True)
    assert (code, data["status"], data["repeated_steps"]) == (0, RECOVERED, 0)
    assert data["weights"] == data["weights_unbroken"] == "w"
    code, data = demo_recovery(seed=5, quiet=True)
    assert (code, data["status"]) == (1, WEIGHTS)


def test_the_demo_says_what_is_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    state = "4.3 fault_tolerance.save"
    assert demo_recovery(code="mine") == (0, {"missing": state})
    assert state in capsys.readouterr().out


# ── real cells ──────────────────────────────────────────────────────────────────────

# `make chaos` plays every cell; these are one of each mode, and share an unbroken run:
# without dropout, the number of ranks does not change what is computed.
REAL = (
    "kill-worker@save/restart",
    "kill-rank-0@optimizer/standby",
    "kill-worker@all-reduce/elastic",
)
SHORT = Setting(num_ranks=2, save_every=2, num_samples=384, dropout=0.0)


@pytest.fixture(scope="module")
def player() -> Player:
    return Player(SHORT)


@linux
@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_a_real_training_survives(name: str, player: Player) -> None:
    (cell,) = cells(name)
    result = player.play(cell)
    assert result.status == RECOVERED, (result.why, result.evidence)


RESTORES = "            self.step = found.step\n"
FORGETS = " " * 12 + "self.optimizer.state.clear()\n"


@linux
@pytest.mark.slow
def test_a_training_that_forgets_the_momentum_is_found(
    player: Player, tmp_path: Path
) -> None:
    text = TRAIN.read_text(encoding="utf-8")
    assert text.count(RESTORES) == 1
    script = tmp_path / "train.py"
    script.write_text(text.replace(RESTORES, RESTORES + FORGETS), encoding="utf-8")
    planted = Player(SHORT, script)
    planted._unbroken = player._unbroken
    (cell,) = cells("kill-worker@forward/restart")
    result = planted.play(cell)
    assert result.status == WEIGHTS, (result.why, result.evidence)
