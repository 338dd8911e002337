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
                f"when `tensors` and `meta` change after save({step}) has returned, "
                f"{_flawed(rank, flaw)}",
                slug="not-copied" if is_later else "",
                rule="copy the tensors and the meta before the thread starts"
                if is_later
                else "",
            )
        if value["read_later"]:
            raise NotYetError(
                f"on rank {rank}, another thread reads the `tensors` or the `meta` "
                "given to save, expected that thread to read copies",
                slug="not-copied",
                rule="copy the tensors and the meta before the thread starts",
            )
    _expect_own_copies(runs.finished(save_again))
    return "tensors of six kinds, and the meta, changed while the disk is held up"


def _flawed(rank: int, flaw: str) -> str:
    """The flaw of a rank's checkpoint in a sentence."""
    if "values of later" in flaw:
        name = flaw.split('"')[1]
        return (
            f'rank {rank}\'s checkpoint has the new values of "{name}", expected the '
            "values when save was called"
        )
    return f"rank {rank}'s checkpoint {flaw}"


def _expect_own_copies(run: Run) -> None:
    """The copies of one save are not written over by the next."""
    for rank, value in enumerate(run.values):
        if value["two"]:
            return  # two threads at a time: C3 says so
        if value["flaw"]:
            what = value["flaw"]
            if value["is_second"]:
                what = "has the values of step 2, expected those of step 1"
            raise NotYetError(
                "when save(2) is called while save(1) is running, the checkpoint of "
                f"step 1 on rank {rank} {what}",
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
                f"on a slow disk, save on rank {rank} did not return until its files "
                "were written, expected it to return at once",
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
                f"after AsyncSaver(…, keep={keep}) saved the steps {list(SAVED)}, rank "
                f"0's disk has the manifests of {steps}, expected {right}",
                rule="give self.keep to save" if steps == default else "",
            )


def _expect_manifests(run: Run) -> None:
    names = run.values[0]["manifests"]
    if names != ["step-1.json", "step-2.json"]:
        raise NotYetError(
            f"after save(1), save(2) and wait(), rank 0's disk has the manifests "
            f"{names}, expected those of steps 1 and 2"
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
        said, where = value["said"], f"after {bad}'s disk was full in save(3), save(4)"
        if bad not in said[1]:
            raise NotYetError(
                f"{where} raised {_quoted(said[1])} on rank {rank}, expected an error "
                f"that names {bad}",
                slug="" if said[1] else "error-lost",
                rule="" if said[1] else "keep the thread's error, and raise it in wait",
            )
        if value["has_4"]:
            raise NotYetError(
                f"{where} raised the error on rank {rank} and wrote step 4 as well, "
                "expected it to write nothing"
            )
        if said[2] or said[3]:
            raise NotYetError(
                f"{where} raised the error on rank {rank} and a later call raised it "
                "again, expected the error only once",
                slug="raised-twice",
                rule="forget the error when you raise it",
            )
        if bad not in said[5]:
            raise NotYetError(
                f"after {bad}'s disk was full in save(6), wait() raised "
                f"{_quoted(said[5])} on rank {rank}, expected an error that names "
                f"{bad}",
                slug="" if said[5] else "error-lost",
            )
        if any(said[6:]):
            raise NotYetError(
                f"after {bad}'s disk was full in save(6), wait() raised the error on "
                f"rank {rank} and a later call raised it again, expected the error "
                "only once",
                slug="raised-twice",
                rule="forget the error when you raise it",
            )
        if value["missing"]:
            raise NotYetError(
                f"after the error of an earlier save was raised, rank {rank} didn't "
                "save "
                f"step {value['missing'][0]}, expected saves to continue"
            )
    return "two saves in a row; a full disk on the last rank; lost messages"


def _quoted(error: str) -> str:
    return f'"{error}"' if error else "no error"


def _expect_the_end(run: Run) -> None:
    for rank, value in enumerate(run.values):
        if value["is_early"]:
            raise NotYetError(
                f"while the disk held up save(1), wait() returned on rank {rank}, "
                "expected it to wait for the end of the save",
                rule="wait for the end of the thread, without a time limit",
            )


def _expect_turns(run: Run) -> None:
    for rank, value in enumerate(run.values):
        if value["two"]:
            raise NotYetError(
                f"while the disk held up save(1), save(2) wrote on rank {rank}, "
                "expected "
                "it to wait for save(1)",
                slug="two-at-a-time",
                rule="call self.wait() first",
            )
        if value["skipped"]:
            raise NotYetError(
                f"when save(2) was called during save(1), rank {rank} left out step 2 "
                "without an error, expected it to be saved",
                rule="wait for the save before; a step is not left out",
            )


def _expect_any_error(run: Run) -> None:
    for rank, rows in enumerate(run.values):
        for row in rows:
            if not row["failed"]:
                continue
            where = (
                f"after a message in save's thread raised {row['kind']}, "
                f"{row['call']} on rank {rank} raised"
            )
            if not row["said"]:
                raise NotYetError(
                    f"{where} no error, expected the thread's error",
                    slug="error-lost",
                    rule="keep every Exception of the thread, and raise it in wait",
                )
            if "was lost" in row["said"] and row["text"] not in row["said"]:
                raise NotYetError(
                    f"{where} the error of another save, expected the thread's error"
                )
            if row.get("again"):
                raise NotYetError(
                    f"{where} the error and a later wait() raised it again, expected "
                    "the error only once",
                    slug="raised-twice",
                    rule="forget the error when you raise it",
                )
