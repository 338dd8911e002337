"""Checks of task 4.17, `checkpoint_port.saver`: torch's checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distlab.grading.checks.checkpoint_port.saver_runs import (
    FAILING,
    FAILING_TOO,
    FIRST,
    LATER,
    NEXT,
    SECOND,
    WORLDS,
    baseline,
    in_background,
    own_loaded,
    own_of,
    sizes_of,
    steps_of,
    three_lives,
)
from distlab.grading.checks.checkpoint_port.which_step import (
    expect_later,
    expect_second,
)
from distlab.grading.clause import clause
from distlab.grading.kit.torch_group import finished
from distlab.grading.kit.values import Suspect, expect_values, same_everywhere
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner.autopsy import Evidence

BOTH = "get_state_dict and set_state_dict, of model and optimizer"
OWN_NAME = 'a name for each rank: f"own of rank {dist.get_rank()}"'
ASYNC = "dcp.async_save: it copies the state, and its own thread writes the copy"
GROUP = "dist.new_group() once, and async_save(…, process_group=…)"
FORGET = "last, self.last = self.last, None; then last.result(): it is raised once"
SHARDS = "no full_state_dict, no full_tensor(): DCP takes the DTensors themselves"
ONE = "begin with wait(): the future of the last save, and its result()"

LIVES = [on_ranks(three_lives).when("when 3 ranks save, 2 load and save, and 3 load")]
SAVES = [on_ranks(in_background).when("when saves run in the background")]


def _lives(runs: Runs) -> list[list[dict[str, Any]]]:
    """By life: what each of its ranks found."""
    values = finished(runs, three_lives).values
    sizes = sizes_of(runs.world_size)
    return [[values[r][life] for r in range(n)] for life, n in enumerate(sizes)]


def _told(texts: Sequence[str], state: str = "has") -> tuple[Evidence, ...]:
    return tuple(Evidence(rank, state, text) for rank, text in enumerate(texts))


# ── C1: weights and optimizer ───────────────────────────────────────────────────────


@clause("checkpoint_port.saver", "C1", worlds=WORLDS, runs=LIVES)
def continues(runs: Runs) -> str | None:
    """One more step on other ranks, as if the ranks had changed in between."""
    n, seed = runs.world_size, runs.seed
    sizes = sizes_of(n)
    known = [
        ("all", "", "the model kept its new weights, expected the saved ones"),
        (
            "optimizer",
            "optimizer-kept-its-own",
            "the optimizer kept its new state, expected the saved one",
        ),
        (
            "settings",
            "optimizer-kept-its-own",
            "the optimizer has the saved state, but kept its own settings, expected "
            "the saved learning rate and momentum",
        ),
        (
            "momentum",
            "optimizer-kept-its-own",
            "the optimizer has the saved state and learning rate, but kept its own "
            "momentum of 0.9, expected the saved 0.7",
        ),
        (
            "frozen",
            "",
            "the frozen parameter kept its new values, expected the saved ones",
        ),
    ]
    for life, ranks in enumerate(_lives(runs)):
        size = sizes[life]
        if life and ranks[0]["step"] != (None, FIRST, SECOND)[life]:
            break  # another checkpoint, or none: that is C5
        before = _moved(sizes[life - 1], size) if life else ""
        expect_values(
            [found["weights"] for found in ranks],
            same_everywhere(baseline(seed, n, life), size),
            what=f"{before}the weights after a step",
            verb="are",
            suspects=[
                Suspect(
                    slug=slug,
                    values=same_everywhere(baseline(seed, n, life, lost), size),
                    sentence=f"{before}{sentence}",
                    rule=BOTH if slug else "",
                )
                for lost, slug, sentence in known
                if life
            ],
        )
        _expect_buffer(ranks, life, before)
        _expect_shards_read(ranks)
    return (
        f"{', '.join(map(str, sizes))} ranks: each continues what the last ones saved"
    )


def _moved(saved_by: int, loaded_by: int) -> str:
    return f"when {saved_by} ranks save and {loaded_by} load, "


def _expect_buffer(ranks: list[dict[str, Any]], life: int, before: str) -> None:
    """The number of steps is in a buffer of the model."""
    expected = sum(len(steps_of(past)) for past in range(life + 1))
    counts = [found["steps"] for found in ranks]
    if any(count != expected for count in counts):
        wrong = next(rank for rank, count in enumerate(counts) if count != expected)
        raise NotYetError(
            f"{before}the buffer that counts steps is {counts[wrong]} on rank {wrong} "
            f"a step later, expected {expected}",
            evidence=_told([f"{count}   expected {expected}" for count in counts]),
            rule=BOTH,
        )


def _expect_shards_read(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        if found["read"] > max(found["shard"], len(found["own"])):
            raise NotYetError(
                f"load() on rank {rank} reads {found['read']} elements of one tensor, "
                f"expected at most {found['shard']}, its largest shard",
                slug="whole-model-on-a-rank",
                evidence=_told([_elements(one, "read") for one in ranks], "reads"),
                rule=SHARDS,
            )


def _elements(found: dict[str, Any], key: str) -> str:
    return f"{found[key]} elements of one tensor, its shard has {found['shard']}"


# ── C2: what is another tensor on each rank ─────────────────────────────────────────


@clause("checkpoint_port.saver", "C2", worlds=WORLDS, runs=LIVES)
def own_tensors(runs: Runs) -> str | None:
    """The tensor of each rank, after load."""
    n = runs.world_size
    sizes = sizes_of(n)
    for life, ranks in enumerate(_lives(runs)):
        if life and ranks[0]["step"] != (None, FIRST, SECOND)[life]:
            break
        owns = [found["own"] for found in ranks]
        savers = range(sizes[life - 1] if life else 0)
        saved = [own_loaded(n, life - 1, rank) + 50 for rank in savers]
        expected = [own_loaded(n, life, rank) for rank in range(sizes[life])]
        if all(map(torch.equal, owns, expected)):
            continue
        raise _other_own(owns, expected, saved)
    return "each rank has its own tensor again"


def _other_own(
    owns: list[Tensor], expected: list[Tensor], saved: list[Tensor]
) -> NotYetError:
    saved_by = len(saved)
    texts = [
        f"{own.tolist()}   expected {right.tolist()}"
        for own, right in zip(owns, expected, strict=True)
    ]
    wrong = [r for r, own in enumerate(owns) if not torch.equal(own, expected[r])]
    of_one = saved_by > 1 and any(
        all(torch.equal(own, right) for own in owns[:saved_by]) for right in saved
    )
    if of_one:
        return NotYetError(
            f"when {saved_by} ranks each saved their `own` tensor, {len(owns)} ranks "
            "loaded the same one, expected each rank's own",
            slug="one-name-for-all-ranks",
            evidence=_told(texts),
            rule=OWN_NAME,
        )
    rank = wrong[0]
    when = _moved(saved_by, len(owns)) if saved_by else "when nothing was saved, "
    return NotYetError(
        f"{when}`own` on rank {rank} is {owns[rank].tolist()}, expected "
        f"{expected[rank].tolist()}",
        evidence=_told(texts),
    )


# ── C3: training goes on ────────────────────────────────────────────────────────────


@clause("checkpoint_port.saver", "C3", worlds=WORLDS, runs=SAVES)
def training_goes_on(runs: Runs) -> str | None:
    """Who writes, what is saved, and through which group the ranks agree."""
    values = finished(runs, in_background).values
    for rank, found in enumerate(values):
        if found["by_caller"] or found["in_vain"]:
            raise NotYetError(
                f"save() on rank {rank} returns only when the state is written, "
                "expected it to return while a thread writes",
                slug="saved-synchronously",
                evidence=_told([_waited(value) for value in values], "saves"),
                rule=ASYNC,
            )
        if found["shared"]:
            raise NotYetError(
                f"rank {rank}'s background save uses training's default process group, "
                "expected a group of its own",
                slug="training-group-shared",
                rule=GROUP,
            )
        if found["wrote"] > max(found["shard"], len(own_of(0, rank))):
            raise NotYetError(
                f"rank {rank} writes {found['wrote']} elements of one tensor, expected "
                f"at most {found['shard']}, its largest shard",
                slug="whole-model-on-a-rank",
                evidence=_told([_elements(one, "wrote") for one in values], "writes"),
                rule=SHARDS,
            )
    if any("loaded" not in found for found in values):
        raise NotJudgedError("nothing was loaded: see C4")
    _expect_copied(values)
    return "a copy is written while training goes on, with its own process group"


def _waited(found: dict[str, Any]) -> str:
    if found["by_caller"]:
        return "the thread that calls save() writes"
    return "waits for its writer" if found["in_vain"] else "returns"


def _expect_copied(values: Sequence[dict[str, Any]]) -> None:
    if any(found["loaded"]["raised"] for found in values):
        return  # C5
    if any(found["loaded"]["step"] != SECOND for found in values):
        return
    expect_values(
        [found["loaded"]["weights"] for found in values],
        [found["saved"] for found in values],
        what="the weights of the checkpoint",
        verb="are",
        suspects=[
            Suspect(
                slug="saved-while-training",
                values=[found["later"] for found in values],
                sentence="the checkpoint has the weights of a step after save(), "
                "expected those at save()",
                rule=ASYNC,
            )
        ],
    )
    for rank, found in enumerate(values):
        own, saved = found["loaded"]["own"], own_of(0, rank)
        if torch.equal(own, saved + 50):
            raise NotYetError(
                f"the checkpoint has rank {rank}'s `own` from after save(), expected "
                "it as it was at save()",
                slug="saved-while-training",
                rule=ASYNC,
            )


# ── C4: one save at a time ──────────────────────────────────────────────────────────


@clause("checkpoint_port.saver", "C4", worlds=WORLDS, runs=SAVES)
def one_at_a_time(runs: Runs) -> str | None:
    """What a second save does, what wait() waits for; and a full disk."""
    values = finished(runs, in_background).values
    for rank, found in enumerate(values):
        if found["together"]:
            raise NotYetError(
                f"rank {rank} begins to save step {SECOND} while step {FIRST} is still "
                "being written, expected it to wait first",
                slug="two-saves-at-once",
                rule=ONE,
            )
        if found["unwritten"] > 0:
            raise NotYetError(
                f"wait() on rank {rank} returned before step {SECOND} was written, "
                "expected it to wait for that",
                evidence=_told([f"{v['unwritten']} to write" for v in values]),
            )
        if found["early"]:
            raise NotYetError(
                f"saving step {SECOND} on rank {rank} raised {found['early']}, "
                "expected no error",
            )
    for rank, found in enumerate(values):
        if not found.get("next", "-"):
            raise NotYetError(
                f"after saving step {FAILING} failed on rank {len(values) - 1}'s full "
                f"disk, the next save() on rank {rank} raised nothing, expected the "
                "error",
                slug="save-error-lost",
                evidence=_told([v.get("next") or "no error" for v in values], "got"),
                rule=ONE,
            )
    _expect_goes_on(values)
    return "one save at a time; the error of a full disk is raised once, on all ranks"


def _expect_goes_on(values: Sequence[dict[str, Any]]) -> None:
    """After the error."""
    past = f"after save() of step {NEXT} reported the failed save of step {FAILING},"
    for rank, found in enumerate(values):
        if found.get("after"):
            raise NotYetError(
                f"{past} save() of step {LATER} on rank {rank} raised the same error "
                "again, expected no error",
                slug="error-raised-again",
                evidence=_told([v["after"] or "no error" for v in values], "got"),
                rule=FORGET,
            )
    if not all(found.get("added", True) for found in values):
        raise NotYetError(
            f"{past} save() of step {LATER} wrote no complete checkpoint, expected a "
            "complete one",
            slug="no-save-after-error",
            rule=FORGET,
        )
    for rank, found in enumerate(values):
        if not found.get("waited", "-"):
            raise NotYetError(
                f"after saving step {FAILING_TOO} failed on a full disk, wait() on "
                f"rank {rank} raised nothing, expected the error",
                slug="save-error-lost",
                evidence=_told([v.get("waited") or "no error" for v in values], "got"),
                rule=ONE,
            )
        if found.get("again"):
            raise NotYetError(
                f"after wait() reported the failed save of step {FAILING_TOO}, a "
                f"second wait() on rank {rank} raised the same error again, expected "
                "no error",
                slug="error-raised-again",
                evidence=_told([v["again"] or "no error" for v in values], "got"),
                rule=FORGET,
            )


# ── C5: which checkpoint ────────────────────────────────────────────────────────────


@clause("checkpoint_port.saver", "C5", worlds=WORLDS, runs=LIVES + SAVES)
def newest_complete(runs: Runs) -> str | None:
    """The step that load returns."""
    for life, ranks in enumerate(_lives(runs)):
        steps = [found["step"] for found in ranks]
        expected = (None, FIRST, SECOND)[life]
        if any(step != expected for step in steps):
            there = ("nothing", f"step {FIRST}", f"steps {FIRST} and {SECOND}")[life]
            rank = next(rank for rank, step in enumerate(steps) if step != expected)
            raise NotYetError(
                f"with {there} saved, load() on rank {rank} returned {steps[rank]}, "
                f"expected {expected}",
                evidence=_told([f"{step}   expected {expected}" for step in steps]),
            )
    values = finished(runs, in_background).values
    for rank, found in enumerate(values):
        failed = f", then a failed save of step {FAILING}"
        for key, when in (("loaded", ""), ("reloaded", failed)):
            if key in found:
                expect_second(rank, found[key], found, when)
    for rank, found in enumerate(values):
        if "resumed" in found:
            when = f"when step {LATER} was saved after a failed save"
            expect_later(rank, found["resumed"], found, when)
    for rank, found in enumerate(values):
        if "copied" in found:
            when = f"in a copied folder where step {LATER}'s files are the oldest"
            expect_later(rank, found["copied"], found, when, slug="newest-by-time")
    _expect_listed(_lives(runs)[-1])
    return f"of the complete steps the largest: {FIRST}, {SECOND}, then {LATER}"


def _expect_listed(ranks: list[dict[str, Any]]) -> None:
    if any("unlisted" in found for found in ranks):
        raise NotYetError(
            "for a file in place of the folder, load() raised nothing, expected an "
            "OSError",
            rule="glob() finds nothing in what it can't list: list the folder first",
        )
