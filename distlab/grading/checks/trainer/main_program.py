"""Checks of task 1.16, `trainer.main`: torch.distributed alone.

Most of it is seen in warm ranks, which find in their environment what torchrun would
have put there; at the end once under torchrun's own agent, see main_torchrun.py.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distlab.grading.checks.trainer.main_reference import (
    keep_few_samples,
    right_weights,
    suspects_of,
)
from distlab.grading.checks.trainer.main_torchrun import (
    expect_clean_end,
    under_torchrun,
)
from distlab.grading.clause import clause
from distlab.grading.kit.flat import flat, weights_of
from distlab.grading.kit.nodes import local_rank
from distlab.grading.kit.stuck import name_of_stuck
from distlab.grading.kit.torchrun_env import (
    keep_wrappers,
    like_torchrun,
    watch_groups,
    watch_samples,
)
from distlab.grading.kit.values import expect_equal_bits, expect_values, same_everywhere
from distlab.grading.runs import Runs, RunSpec, launched, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext, Run
from distlab.runner.autopsy import Evidence
from distlab.terminal import ranks_in_words

WORLDS = (3, 2, 4, 7, 1)
TORCHRUN_WORLD = 2
_STILL_OLD = "the end of an older file"
PATIENCE_S = 4.0  # a rank waits this long in one call; gloo: 30 min
FILE = "trained.pt"  # not the default: a path typed in would be seen
OLD = b"an older file, longer than the weights " * 2000  # there already, on rank 0


def main_once(
    context: RankContext, unit: ModuleType, seed: int, num_epochs: int
) -> dict[str, Any]:
    """One call of main in surroundings like torchrun's."""
    like_torchrun(context, PATIENCE_S)
    keep_few_samples(unit)
    seen: dict[str, Any] = {"groups": [], "samples": 0, "first": None}
    keep_wrappers()
    watch_groups(seen)
    watch_samples(unit, seen)
    before = set(os.listdir("."))
    if context.rank == 0:
        Path(FILE).write_bytes(OLD)
    model = unit.main(num_epochs=num_epochs, path=FILE)
    left = dist.is_initialized()
    files = sorted(set(os.listdir(".")) - before)
    if FILE in files and Path(FILE).read_bytes() == OLD:
        files.remove(FILE)
    return {
        "weights": weights_of(model) if isinstance(model, nn.Module) else None,
        "files": files,
        "saved": _saved() if FILE in files else {"problem": "", "state": None},
        "left": left,
        **{name: seen[name] for name in ("groups", "samples", "first")},
    }


def _saved() -> dict[str, Any]:
    if Path(FILE).read_bytes().endswith(OLD[-40:]):
        return {"problem": _STILL_OLD, "state": None}
    try:
        state = torch.load(FILE, weights_only=True)
    except Exception as error:
        return {"problem": type(error).__name__, "state": None}
    if not isinstance(state, dict):
        return {"problem": f"a {type(state).__name__}", "state": None}
    plain = {str(name): t for name, t in state.items() if isinstance(t, torch.Tensor)}
    return {"problem": "", "state": plain}


def _epochs(world_size: int) -> int:
    """Two where the order of epochs is looked at, else one: many ranks take long."""
    return 2 if world_size == 1 else 1


def _main_runs(world_size: int) -> list[RunSpec]:
    return [on_ranks(main_once, num_epochs=_epochs(world_size))]


@clause("trainer.main", "C1", worlds=WORLDS, runs=_main_runs)
def weights_of_one_process(runs: Runs) -> str | None:
    """The ranks share the work, and arrive where one process does."""
    run = _finished(runs)
    try:
        _expect_right_weights(run, _epochs(runs.world_size))
    except NotYetError as error:
        # The other clauses take seconds, and can wait.
        raise error.but(fatal=True) from error
    return None


def _expect_right_weights(run: Run, epochs: int) -> None:
    n = run.world_size
    _expect_own_place(run)
    weights = [value["weights"] for value in run.values]
    silent = [rank for rank, flat in enumerate(weights) if flat is None]
    if silent:
        raise NotYetError(
            f"main returned no model on rank {silent[0]}, expected the trained model "
            "on every rank",
            slug="returned-none",
            rule="return the trained model, on every rank",
        )
    expected = same_everywhere(right_weights(epochs), n)
    what = f"the weights after {epochs} epoch{'s' * (epochs != 1)}"
    expect_values(
        weights,
        expected,
        what=what,
        verb="are",
        suspects=lambda: suspects_of(
            epochs, n, [value["first"] for value in run.values]
        ),
    )
    expect_equal_bits(
        weights,
        what=what,
        verb="are",
        rule="every rank must apply the very same gradient",
    )
    _expect_shared_work(run, epochs)


@clause("trainer.main", "C2", worlds=WORLDS, runs=_main_runs)
def one_rank_saves(runs: Runs) -> str | None:
    """Rank 0's folder has the file, with what the model holds; no other has one."""
    run = _finished(runs)
    files = [value["files"] for value in run.values]
    evidence = tuple(
        Evidence(r, "wrote", ", ".join(own) or "no file") for r, own in enumerate(files)
    )
    savers = [rank for rank, own in enumerate(files) if own]
    on_nodes = [r for r in range(run.world_size) if not local_rank(r, run.world_size)]
    if 1 < len(savers) < run.world_size and savers == on_nodes:
        raise NotYetError(
            f"{ranks_in_words(savers)}, with LOCAL_RANK 0, each wrote a file, "
            "expected only rank 0 to write one",
            evidence=evidence,
            rule="LOCAL_RANK is 0 once on each machine, RANK on one rank of all",
        )
    if len(savers) > 1:
        raise NotYetError(
            f"{ranks_in_words(savers)} each wrote a file, expected only rank 0 to "
            "write one",
            slug="every-rank-writes",
            evidence=evidence,
            rule="on a real machine they write the same file at the same time: let "
            "one rank save",
        )
    if savers != [0] or FILE not in files[0]:
        wrote = "where an older file is, no rank wrote a file"
        if savers:
            wrote = f"rank {savers[0]} wrote {files[savers[0]][0]}"
        raise NotYetError(
            f"with path={FILE!r}, {wrote}, expected rank 0 to write that file",
            evidence=evidence,
            rule="rank 0: torch.save(model.state_dict(), path)",
        )
    _expect_saved_state(run.values[0])
    return None


UNDER_TORCHRUN = launched(under_torchrun, world_size=TORCHRUN_WORLD)


@clause("trainer.main", "C3", worlds=WORLDS, runs=_main_runs, later=[UNDER_TORCHRUN])
def ends_cleanly(runs: Runs) -> str | None:
    """No group is left; the file runs under torchrun where there is no distlab."""
    run = _finished(runs)
    left = [rank for rank, value in enumerate(run.values) if value["left"]]
    if left:
        raise NotYetError(
            f"after main, the process group still exists on {ranks_in_words(left)}, "
            "expected it to be destroyed",
            slug="group-not-destroyed",
            rule="dist.destroy_process_group() at the end, on every rank",
        )
    if runs.world_size != TORCHRUN_WORLD:
        return None
    try:
        weights_of_one_process(runs)
        one_rank_saves(runs)
    except NotYetError:
        raise NotJudgedError("torchrun takes seconds: first pass C1 and C2") from None
    expect_clean_end(runs, UNDER_TORCHRUN)
    return "under torchrun, with 2 ranks and without distlab"


def _finished(runs: Runs) -> Run:
    """Main's run; how it got stuck is told from torch's errors and from its lines."""
    try:
        return runs.finished(*_main_runs(runs.world_size))
    except NotYetError as error:
        run = error.run
        named = name_of_stuck(run, runs.source, PATIENCE_S) if run else None
        raise named or error from error


def _expect_own_place(run: Run) -> None:
    for record in run.ranks:
        for place in record.value["groups"]:
            if tuple(place) != (record.rank, run.world_size):
                raise NotYetError(
                    f"rank {record.rank} joined the process group as rank {place[0]} "
                    f"of {place[1]}, expected rank {record.rank} of {run.world_size}",
                    slug="typed-in-rank",
                    rule="take rank and world size from what torchrun has set",
                )


def _expect_shared_work(run: Run, epochs: int) -> None:
    samples = [value["samples"] for value in run.values]
    whole = max(samples)
    if run.world_size > 1 and min(samples) == whole > 0:
        raise NotYetError(
            f"each of the {run.world_size} ranks read all samples of {epochs} "
            f"epoch{'s' * (epochs != 1)}, expected them to share the samples",
            slug="nothing-shared",
            evidence=[
                (rank, "read", f"{count} samples") for rank, count in enumerate(samples)
            ],
            rule="every rank takes its own samples of each global batch",
        )


def _expect_saved_state(value: dict[str, Any]) -> None:
    problem, state = value["saved"]["problem"], value["saved"]["state"]
    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    if problem == _STILL_OLD:
        raise NotYetError(
            "rank 0's file still ends with the bytes of a longer file that was there "
            "before, expected only the new state_dict",
            rule="torch.save(model.state_dict(), path) replaces the file",
        )
    if problem or state is None:
        raise NotYetError(
            "rank 0's file holds no state_dict: torch.load(path, weights_only=True) "
            f"gave {problem or 'nothing'}, expected tensors by name",
            rule="save model.state_dict(), tensors by name, not the model itself",
        )
    if list(state) != names:
        keys = ", ".join([*state][:2]) or "no key"
        raise NotYetError(
            f"the saved state_dict has {keys}{', …' * (len(state) > 2)}, expected the "
            f"keys of the unwrapped model: {', '.join(names)}",
            rule="for a wrapped model save model.module.state_dict()",
        )
    saved = flat(state)
    if value["weights"] is not None and not torch.equal(saved, value["weights"]):
        raise NotYetError(
            "rank 0's file holds other weights than the model it returned, expected "
            "the same",
            rule="save once, after the last step",
        )
