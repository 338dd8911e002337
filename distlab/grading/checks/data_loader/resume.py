"""Checks of task 1.15, `data_loader.resume`: stop, keep the state, go on elsewhere."""

from __future__ import annotations

from itertools import zip_longest

from distlab.grading.checks.data_loader.steps import Batches
from distlab.grading.checks.data_loader.stops import (
    EPOCH,
    MOVES,
    RANKS,
    STEPS,
    Record,
    stop_and_go_on,
)
from distlab.grading.clause import clause
from distlab.grading.kit.plans import listed, named, worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner.autopsy import Evidence

STOPPED = on_ranks(stop_and_go_on).when("when a loader is stopped and resumed")
COUNTS_STEPS = "num_delivered counts steps, which all ranks take together"


def _run(runs: Runs) -> Record:
    found: Record = worked_out(runs, stop_and_go_on).values[0]
    if found["state"] is not None:
        raise NotYetError(
            f"state_dict returned {found['state']}, expected a dictionary",
            rule="return a dictionary: names, and the values that a new loader needs",
            fatal=True,
        )
    return found


@clause("data_loader.resume", "C1", worlds=(1,), runs=[STOPPED])
def goes_on_with_the_next(runs: Runs) -> str | None:
    """The stream of samples is the one without the stop."""
    found = _gone_on(runs)
    for case in (*found["same"], *found["over"], *found["used"]):
        if case["refused"]:
            raise NotYetError(
                f"{_setting(case)}, a loader with the same settings refused the "
                f'state ("{case["refused"]:.60}"), expected it to continue',
                rule="refuse only a state with another data size, batch size, "
                "shuffle or seed",
                fatal=True,
            )
        stop = STEPS if case["stop"] is None else case["stop"]
        for rank, (rest, whole) in enumerate(
            zip(case["rest"], case["whole"], strict=True)
        ):
            if rest != whole[stop:]:
                raise _not_next(case, rank, rest, whole, stop)
        if case["later"] != case["others"][EPOCH + 1]:
            raise NotYetError(
                f"{_setting(case)}, the new loader delivers the rest of the epoch, but "
                "not all of the next one, expected every batch of both",
                evidence=_rows(0, case["later"], case["others"][EPOCH + 1]),
                rule="the loaded position applies to one epoch only",
            )
    sizes = ", ".join(map(str, sorted(RANKS)))
    return f"stopped after 0 to {STEPS} of {STEPS} steps, on {sizes} ranks"


def _gone_on(runs: Runs) -> Record:
    found = _run(runs)
    if found["same"] is None:
        raise NotJudgedError("the state is not plain data: no loader can load it")
    return found


def _setting(case: Record) -> str:
    if case["stop"] is None:
        return "after a stop at the end"
    return f"after a stop at step {case['stop']} of {STEPS}"


def _not_next(
    case: Record, rank: int, rest: Batches, whole: Batches, stop: int
) -> NotYetError:
    slug, sentence, rule = _named(case, rank, rest, whole, stop)
    return NotYetError(
        f"{_setting(case)} of epoch {EPOCH}, {sentence}",
        slug=slug,
        evidence=_rows(rank, rest, whole[stop:]),
        rule=rule,
    )


def _named(
    case: Record, rank: int, rest: Batches, whole: Batches, stop: int
) -> tuple[str, str, str]:
    start = case["others"][0]
    if rank == 0 and rest == start[stop:] and stop and rest:
        return (
            "state-without-epoch",
            f"the new loader continues in epoch 0, expected epoch {EPOCH}",
            "the order depends on the epoch: save the epoch in the state",
        )
    if rank == 0 and rest == start:
        return (
            "resume-restarts-epoch",
            "the new loader begins epoch 0, as if without a state, expected the rest "
            f"of epoch {EPOCH}",
            "load_state_dict must set the epoch and the position",
        )
    if stop and rest == whole:
        return (
            "resume-restarts-epoch",
            f"the new loader starts epoch {EPOCH} again, expected "
            + ("no more batches" if stop == STEPS else "only the remaining batches"),
            "save the position in the state, and set it in load_state_dict",
        )
    if stop and rest == whole[stop - 1 :]:
        return (
            "resume-off-by-one",
            f"the new loader repeats the last batch, expected step {stop} next",
            "num_delivered counts all batches that were returned, the last included",
        )
    if rest == whole[stop + 1 :] and stop < STEPS:
        return (
            "resume-off-by-one",
            f"the new loader skips a batch, expected step {stop} next",
            "num_delivered is the index of the next batch: indices start at 0",
        )
    if stop == STEPS:
        batches = "1 batch" if len(rest) == 1 else f"{len(rest)} batches"
        sentence = f"the new loader still gives {batches}, expected no more batches"
        return (
            "",
            sentence,
            "a state saved after the last batch leaves no batch",
        )
    ahead = len(whole) - len(rest)
    if not rest:
        sentence = f"rank {rank} gets no more steps, expected {STEPS - stop} more"
        return "", sentence, COUNTS_STEPS
    if rest == whole[ahead:]:
        sentence = f"the new loader continues with step {ahead}, expected step {stop}"
        return "", sentence, COUNTS_STEPS
    return "", f"rank {rank} {_first_odd(rest, whole[stop:], stop)}", ""


def _first_odd(rest: Batches, expected: Batches, stop: int) -> str:
    """What a rank gets in the first step in which it is not what it should be."""
    for step, (got, right) in enumerate(zip(rest, expected, strict=False), stop):
        if got != right:
            return (
                f"gets {named(got) if got else 'nothing'} in step {step}, expected "
                f"{named(right) if right else 'nothing'}"
            )
    return f"gets {len(rest)} more batches, expected {len(expected)}"


def _rows(rank: int, rest: Batches, expected: Batches) -> tuple[Evidence, ...]:
    return (
        Evidence(rank, "continues", _flat(rest)),
        Evidence(rank, "expected", _flat(expected)),
    )


def _flat(batches: Batches) -> str:
    return listed([number for batch in batches for number in batch]) or "nothing"


@clause("data_loader.resume", "C2", worlds=(1,), runs=[STOPPED])
def state_is_a_snapshot(runs: Runs) -> str | None:
    """Plain, its own, and refused where the order is another."""
    found = _run(runs)
    if found["json"]:
        raise NotYetError(
            f"json.dumps can't write the state ({found['json']}), expected plain "
            "numbers, strings, lists and dictionaries",
            slug="state-not-plain",
            rule="only numbers, strings, lists and dictionaries of them",
        )
    if found["snapshot"]:
        raise NotYetError(
            found["snapshot"],
            slug="state-not-a-snapshot",
            rule="return a new dictionary in each call, with the current values",
        )
    for name, met in found["refused"].items():
        error = met["error"]
        if name == "num_workers":
            if error:
                raise NotYetError(
                    f"load_state_dict raised {error} in a loader with another "
                    "num_workers, expected no error, as the order is the same",
                    rule="refuse only what changes the order of the samples",
                )
        elif not error:
            raise NotYetError(
                "load_state_dict accepted the state of a loader with another value of "
                f"{name}, expected a ValueError",
                slug="foreign-state-accepted",
                rule="compare what the order depends on, and raise ValueError",
            )
        elif error != "ValueError":
            raise NotYetError(
                f"load_state_dict raised {error} for the state of a loader with "
                f"another value of {name}, expected a ValueError",
                rule="raise ValueError and name the setting that differs",
            )
        elif met["got"] != met["wanted"]:
            raise NotYetError(
                "load_state_dict refused the state of a loader with another value of "
                f"{name}, but changed this loader's batches, expected them unchanged",
                evidence=_rows(0, met["got"], met["wanted"]),
                rule="compare all settings first; only then set epoch and position",
            )
    return None


@clause("data_loader.resume", "C3", worlds=(1,), runs=[STOPPED])
def fits_another_number_of_ranks(runs: Runs) -> str | None:
    """The steps after the stop are those of the new ranks without a stop."""
    found = _gone_on(runs)
    for case in found["moved"]:
        n, m = case["before"], case["after"]
        if case["refused"]:
            raise NotYetError(
                f"with {m} rank{'s' * (m > 1)}, load_state_dict refused a state saved "
                f'with {n} ("{case["refused"]:.60}"), expected it to continue',
                rule="the order does not depend on the number of ranks",
            )
        stop = case["stop"]
        rest, expected = _by_step(case["rest"]), _by_step(case["whole"])[stop:]
        if rest != expected:
            raise NotYetError(
                f"{_setting(case)} on {n} rank{'s' * (n > 1)}, the loaders on "
                f"{m} rank{'s' * (m > 1)} {_what_differs(rest, expected)}",
                slug="position-per-rank",
                evidence=[
                    (rank, "continues", _flat(batches))
                    for rank, batches in enumerate(case["rest"])
                ],
                rule="count global batches: that count fits any number of ranks",
            )
    if found["differing"]:
        raise NotYetError(
            "after the same step, the ranks' states have different values of "
            f'"{found["differing"]:.60}", expected one state that fits all ranks',
            rule="leave out rank, world size and all that depends on them: one state "
            "fits all ranks",
        )
    moves = ", ".join(f"{n} → {m}" for n, m in MOVES)
    return f"ranks before and after: {moves}"


def _by_step(ranks: list[Batches]) -> Batches:
    """The samples of each step on all ranks together."""
    return [
        sorted(number for part in parts for number in part)
        for parts in zip_longest(*ranks, fillvalue=[])
    ]


def _what_differs(rest: Batches, expected: Batches) -> str:
    got = [number for batch in rest for number in batch]
    wanted = [number for batch in expected for number in batch]
    again = sorted(set(got) - set(wanted))
    lost = sorted(set(wanted) - set(got))
    if again:
        return f"repeat {named(again)}, expected only the remaining ones"
    if lost:
        return f"never return {named(lost)}, expected all remaining ones"
    return "return the remaining samples in other steps, expected the steps as before"
