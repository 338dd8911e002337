"""Checks of 4.13, `fault_tolerance.async_save`: real ranks, saves that are held up."""

from __future__ import annotations

from distlab.grading.checks.fault_tolerance.async_runs import (
    KEPT,
    SAVED,
    keep_some,
    lose_messages,
    save_again,
    save_and_train,
    save_in_turn,
    wait_for_the_end,
)
from distlab.grading.clause import clause, judged_after
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import Run

TASK = "fault_tolerance.async_save"
WORLDS = (3, 2, 1)


@clause(
    TASK,
    "C1",
    worlds=WORLDS,
    runs=[on_ranks(save_and_train), on_ranks(save_again)],
)
def the_values_of_the_call(runs: Runs) -> str | None:
    """The shards, although training changes tensors and meta at once."""
    run = runs.finished(save_and_train)
    for rank, value in enumerate(run.values):
        for step, flaw in enumerate(value["flaws"], 1):
            if not flaw:
                continue
            is_later = "values of later" in flaw or "99" in flaw
            raise NotYetError(
                f"tensors and meta are changed after save({step}) has returned; the "
                f"checkpoint of rank {rank}: {flaw}",
                slug="not-copied" if is_later else "",
                rule="copy the tensors and the meta before the thread starts"
                if is_later
                else "",
            )
        if value["read_later"]:
            raise NotYetError(
                f"rank {rank}: another thread reads the tensors or the meta that save "
                "was given, while training may change them",
                slug="not-copied",
                rule="copy the tensors and the meta before the thread starts",
            )
    _expect_own_copies(runs.finished(save_again))
    return "tensors of six kinds, and the meta, changed while the disk is held up"


def _expect_own_copies(run: Run) -> None:
    """The copies of one save are not written over by the next."""
    for rank, value in enumerate(run.values):
        if value["two"]:
            return  # two threads at a time: C3 says so
        if value["flaw"]:
            what = "the values of step 2" if value["is_second"] else value["flaw"]
            raise NotYetError(
                f"save(2) is called while save(1) is under way: the checkpoint of "
                f"step 1 has on rank {rank} {what}",
                rule="wait for the save before, and then copy: self.copies uses its "
                "memory again"
                if value["is_second"]
                else "",
            )


@clause(
    TASK,
    "C2",
    worlds=WORLDS,
    runs=[on_ranks(save_and_train), on_ranks(save_again), on_ranks(keep_some)],
)
def returns_at_once(runs: Runs) -> str | None:
    """What the disk has been asked for when save returns."""
    run = runs.finished(save_and_train)
    for rank, value in enumerate(run.values):
        if value["waits"]:
            raise NotYetError(
                f"rank {rank}: save returned only when its files were written",
                slug="waits-for-the-disk",
                rule="start a thread that saves, and return",
            )
    with judged_after(the_values_of_the_call, runs, "C1"):
        _expect_manifests(run)
        _expect_keep(runs.finished(keep_some))
    return f"keep = {KEPT[0]} and {KEPT[1]}"


def _expect_keep(run: Run) -> None:
    default = list(SAVED[-2:])
    for keep, steps in zip(KEPT, run.values[0], strict=True):
        right = list(SAVED[-keep:])
        if steps != right:
            raise NotYetError(
                f"AsyncSaver(…, keep={keep}) has saved the steps {list(SAVED)}: "
                f"rank 0's disk has the manifests of {steps}, expected {right}",
                rule="give self.keep to save" if steps == default else "",
            )


def _expect_manifests(run: Run) -> None:
    names = run.values[0]["manifests"]
    if names != ["step-1.json", "step-2.json"]:
        raise NotYetError(
            f"after wait() rank 0's disk has the manifests {names}, expected those of "
            "steps 1 and 2"
        )


@clause(
    TASK,
    "C3",
    worlds=WORLDS,
    runs=[
        on_ranks(wait_for_the_end),
        on_ranks(lose_messages),
        on_ranks(save_in_turn),
    ],
)
def one_at_a_time(runs: Runs) -> str | None:
    """What wait() waits for; which call raises the error of a save, and when."""
    _expect_the_end(runs.finished(wait_for_the_end))
    run = runs.ended(save_in_turn)
    if run.outcome == "finished":
        _expect_turns(run)
    _expect_any_error(runs.finished(lose_messages))
    run = runs.finished(save_in_turn)
    bad = f"rank {runs.world_size - 1}"
    for rank, value in enumerate(run.values):
        said, where = value["said"], f"the disk of {bad} was full in save(3): on rank"
        if bad not in said[1]:
            raise NotYetError(
                f"{where} {rank} the next call, save(4), "
                + (f'raises "{said[1]}"' if said[1] else "raises no error"),
                slug="" if said[1] else "error-lost",
                rule="" if said[1] else "keep the thread's error, and raise it in wait",
            )
        if value["has_4"]:
            raise NotYetError(
                f"{where} {rank} save(4) raises that error, and writes step 4 as well"
            )
        if said[2] or said[3]:
            raise NotYetError(
                f"{where} {rank} save(4) raises the error, and a later call does so "
                f'again: "{said[2] or said[3]}"',
                slug="raised-twice",
                rule="forget the error when you raise it",
            )
        if bad not in said[5]:
            raise NotYetError(
                f"the disk of {bad} was full in save(6): on rank {rank} wait() "
                + (f'raises "{said[5]}"' if said[5] else "raises no error"),
                slug="" if said[5] else "error-lost",
            )
        if any(said[6:]):
            raise NotYetError(
                f"the disk of {bad} was full in save(6): on rank {rank} wait() raises "
                "the error, and a later call does so again",
                slug="raised-twice",
                rule="forget the error when you raise it",
            )
        if value["missing"]:
            raise NotYetError(
                f"rank {rank}: step {value['missing'][0]} is not saved after an error "
                "of the save before was raised"
            )
    return "two saves in a row; a full disk on the last rank; lost messages"


def _expect_the_end(run: Run) -> None:
    for rank, value in enumerate(run.values):
        if value["is_early"]:
            raise NotYetError(
                f"rank {rank}: wait() ends while the disk still holds up save(1)",
                rule="wait for the end of the thread, without a time limit",
            )


def _expect_turns(run: Run) -> None:
    for rank, value in enumerate(run.values):
        if value["two"]:
            raise NotYetError(
                f"rank {rank}: save(2) writes while save(1) is held up by the disk",
                slug="two-at-a-time",
                rule="call self.wait() first",
            )
        if value["skipped"]:
            raise NotYetError(
                f"rank {rank}: save(2) is called while save(1) is held up by the disk; "
                "after wait() step 2 is not saved, and no error says so",
                rule="wait for the save before; a step is not left out",
            )


def _expect_any_error(run: Run) -> None:
    for rank, rows in enumerate(run.values):
        for row in rows:
            if not row["failed"]:
                continue
            where = (
                f"a message of a save raised {row['kind']} in its thread, which has "
                f"ended: on rank {rank} the next call, {row['call']},"
            )
            if not row["said"]:
                raise NotYetError(
                    f"{where} raises no error",
                    slug="error-lost",
                    rule="keep every Exception of the thread, and raise it in wait",
                )
            if "was lost" in row["said"] and row["text"] not in row["said"]:
                raise NotYetError(f"{where} raises the error of another save")
            if row.get("again"):
                raise NotYetError(
                    f"{where} raises it, and wait() does so again",
                    slug="raised-twice",
                    rule="forget the error when you raise it",
                )
