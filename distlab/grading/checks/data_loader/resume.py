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

COUNTS_STEPS = "num_delivered counts steps, which all ranks take together"


def _run(runs: Runs) -> Record:
    found: Record = worked_out(runs, stop_and_go_on).values[0]
    if found["state"] is not None:
        raise NotYetError(
            f"state_dict gives {found['state']}; expected a dictionary",
            rule="return a dictionary: names, and the values that a new loader needs",
            fatal=True,
        )
    return found


@clause("data_loader.resume", "C1", worlds=(1,), runs=[on_ranks(stop_and_go_on)])
def goes_on_with_the_next(runs: Runs) -> str | None:
    """The stream of samples is the one without the stop."""
    found = _gone_on(runs)
    for case in (*found["same"], *found["over"], *found["used"]):
        if case["refused"]:
            raise NotYetError(
                f"{_setting(case)}, a new loader with the same settings raises "
                f"ValueError: {case['refused']:.60}",
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
                f"{_setting(case)}: the rest of the epoch is right, but the next epoch "
                "is not complete",
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
        return "when stopped at the end"
    return f"when stopped after {case['stop']} of {STEPS} steps"


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
            "the new loader continues in epoch 0",
            "the order depends on the epoch: save the epoch in the state",
        )
    if rank == 0 and rest == start:
        return (
            "resume-restarts-epoch",
            "the new loader begins with epoch 0, as if no state had been loaded",
            "load_state_dict must set the epoch and the position",
        )
    if stop and rest == whole:
        return (
            "resume-restarts-epoch",
            "the new loader restarts the epoch",
            "save the position in the state, and set it in load_state_dict",
        )
    if stop and rest == whole[stop - 1 :]:
        return (
            "resume-off-by-one",
            "the last batch before the stop is repeated",
            "num_delivered counts all batches that were returned, the last included",
        )
    if rest == whole[stop + 1 :] and stop < STEPS:
        return (
            "resume-off-by-one",
            "one batch is skipped",
            "num_delivered is the index of the next batch: indices start at 0",
        )
    if stop == STEPS:
        sentence = f"the new loader still gives {len(rest)} batches, expected none"
        return (
            "",
            sentence,
            "a state saved after the last batch leaves no batch",
        )
    ahead = len(whole) - len(rest)
    if not rest:
        sentence = f"rank {rank} gets no more steps, expected {STEPS - stop}"
        return "", sentence, COUNTS_STEPS
    if rest == whole[ahead:]:
        sentence = f"the new loader continues with step {ahead}, expected step {stop}"
        return "", sentence, COUNTS_STEPS
    return "", f"rank {rank} does not continue with its next sample", ""


def _rows(rank: int, rest: Batches, expected: Batches) -> tuple[Evidence, ...]:
    return (
        Evidence(rank, "continues", _flat(rest)),
        Evidence(rank, "expected", _flat(expected)),
    )


def _flat(batches: Batches) -> str:
    return listed([number for batch in batches for number in batch]) or "nothing"


@clause("data_loader.resume", "C2", worlds=(1,), runs=[on_ranks(stop_and_go_on)])
def state_is_a_snapshot(runs: Runs) -> str | None:
    """Plain, its own, and refused where the order is another."""
    found = _run(runs)
    if found["json"]:
        raise NotYetError(
            f"json cannot write the state: {found['json']}",
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
                    f"a loader with other num_workers raises {error}, although its "
                    "order is the same",
                    rule="refuse only what changes the order of the samples",
                )
        elif not error:
            raise NotYetError(
                f"the state of a loader with another {name} is accepted, but its "
                "position means other samples here",
                slug="foreign-state-accepted",
                rule="compare what the order depends on, and raise ValueError",
            )
        elif error != "ValueError":
            raise NotYetError(
                f"the state of a loader with another {name} raises {error}, expected a "
                "ValueError",
                rule="raise ValueError and name the setting that differs",
            )
        elif met["got"] != met["wanted"]:
            raise NotYetError(
                f"the state of a loader with another {name} is refused, but afterwards "
                "this loader gives other batches than before",
                evidence=_rows(0, met["got"], met["wanted"]),
                rule="compare all settings first; only then set epoch and position",
            )
    return None


@clause("data_loader.resume", "C3", worlds=(1,), runs=[on_ranks(stop_and_go_on)])
def fits_another_number_of_ranks(runs: Runs) -> str | None:
    """The steps after the stop are those of the new ranks without a stop."""
    found = _gone_on(runs)
    for case in found["moved"]:
        n, m = case["before"], case["after"]
        if case["refused"]:
            raise NotYetError(
                f"load_state_dict refuses a state of {n} ranks on {m}, with "
                f"ValueError: {case['refused']:.60}",
                rule="the order does not depend on the number of ranks",
            )
        stop = case["stop"]
        rest, expected = _by_step(case["rest"]), _by_step(case["whole"])[stop:]
        if rest != expected:
            raise NotYetError(
                f"{_setting(case)} on {n} rank{'s' * (n > 1)}, the new loaders on {m} "
                f"{_what_differs(rest, expected)}",
                slug="position-per-rank",
                evidence=[
                    (rank, "continues", _flat(batches))
                    for rank, batches in enumerate(case["rest"])
                ],
                rule="count global batches: that count fits any number of ranks",
            )
    if found["differing"]:
        raise NotYetError(
            f"after the same step, ranks have different {found['differing']:.60} in "
            "their states",
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
        return f"repeat {named(again)}"
    if lost:
        return f"never return {named(lost)}"
    return "return the remaining samples in other steps"
