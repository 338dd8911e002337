"""What 1.3 and 1.17 have in common: the values, and that n - 1 messages are enough.

How it gets from rank to rank is what they differ in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from distlab.comm import Comm
from distlab.grading.kit.any_tensor import (
    emptied,
    expect_each,
    finished_with_each,
    with_each,
)
from distlab.grading.kit.messages import (
    calls_of_each,
    expect_bytes,
    expect_messages,
    numbers,
    received,
)
from distlab.grading.kit.values import (
    Suspect,
    all_close,
    expect_values,
    same_everywhere,
)
from distlab.grading.runs import Runs, RunSpec, Scenario, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext, Run


@dataclass(frozen=True, kw_only=True)
class Broadcast:
    """A task's scenarios, and its rules in words.

    `scenario` is `(context, unit, seed, src, again)`, `with_any` without the last two.
    """

    scenario: Scenario
    with_any: Scenario
    rule: str
    rule_of_source: str
    rule_of_messages: str

    def runs(self, world_size: int) -> list[RunSpec]:
        """From every source, and on three ranks a second time and with any tensor."""
        twice = on_ranks(self.scenario, src=1, again=True).when(
            "in two calls, the first with float32 and the second with float64"
        )
        again = [twice, on_ranks(self.with_any)]
        once = [on_ranks(self.scenario, src=src) for src in sources(world_size)]
        return once + (again if world_size == 3 else [])


def broadcast_with(
    function: Callable[[Comm, Tensor, int], None],
    context: RankContext,
    seed: int,
    src: int,
    again: bool,
) -> dict[str, Any]:
    """One broadcast of a 2 × 3 tensor; with `again`, after one of another dtype."""
    if again:
        other = numbers(seed + 1, context.rank, 6, "float32").reshape(2, 3)
        function(context.comm, other.to(context.comm.device), src)
    tensor = numbers(seed, context.rank, 6).reshape(2, 3).to(context.comm.device)
    before = tensor.clone()
    function(context.comm, tensor, src)
    return {"before": before, "after": tensor}


def any_from_2(
    function: Callable[[Comm, Tensor, int], None], context: RankContext, seed: int
) -> list[list[Tensor]]:
    """Broadcasts from rank 2, of tensors of other dtypes and shapes; to nan."""

    def call(tensor: Tensor) -> None:
        given = tensor if context.rank == 2 else emptied(tensor)
        function(context.comm, given, 2)

    return with_each(context, seed, call)


def sources(world_size: int) -> tuple[int, ...]:
    """All with three ranks, one that is neither 0 nor obvious with other numbers."""
    return (1, 0, 2) if world_size == 3 else (world_size // 2,)


def finished(task: Broadcast, runs: Runs, src: int) -> Run:
    """The finished run; if it did not finish, first of all: did the right rank send?"""
    try:
        return runs.finished(task.scenario, src=src)
    except NotYetError as found:
        run = runs.ended(task.scenario, src=src)
        failure = _with_src(src, run.world_size, _in_vain(run, src, found))
        first = [record.calls()[:1] for record in run.ranks]
        sends = [bool(c) and c[0]["op"] in ("send", "isend") for c in first]
        if src == 0:
            raise failure from found
        if not sends[0] or sends[src]:
            raise _only_from(task, runs, src, failure) from found
        raise NotYetError(
            f"with src = {src}, rank 0 begins by sending, expected rank {src} to be "
            "the sender",
            slug="source-ignored",
            evidence=failure.evidence,
            rule=task.rule_of_source,
            kind=failure.kind,
            fatal=True,
            output=failure.output,
        ) from found


def _with_src(src: int, n: int, failure: NotYetError) -> NotYetError:
    """With the situation, unless the same would happen in any other."""
    if failure.slug == "collective-not-here":
        return failure
    ranks = "" if f"{n} ranks" in failure.message else f" on {n} ranks"
    return failure.but(situation=f"with src = {src}{ranks}")


def _in_vain(run: Run, src: int, failure: NotYetError) -> NotYetError:
    """Say so if a rank waits for one to receive that already has the tensor."""
    for record in run.ranks if failure.slug == "peer-finished" else ():
        calls = record.calls()
        if not calls or calls[-1]["op"] != "send":
            continue
        dst = calls[-1]["dst"]
        if record.status == "finished" or run.ranks[dst].status != "finished":
            continue
        why = "is the source" if dst == src else "already has the tensor"
        if dst == src or received(run.ranks[dst]):
            return failure.but(
                message=f"rank {record.rank} waits in send to rank {dst}, but it "
                f"{why} and has finished"
            )
    return failure


def _only_from(
    task: Broadcast, runs: Runs, src: int, failure: NotYetError
) -> NotYetError:
    """The same, but if from rank 0 all goes well, the source is what makes it fail."""
    if runs.world_size != 3:
        return failure
    try:
        run = runs.finished(task.scenario, src=0)
    except NotYetError:
        return failure
    values = [value["after"] for value in run.values]
    if not all_close(values, same_everywhere(run.values[0]["before"], 3)):
        return failure
    return failure.but(
        situation=f"with src = {src} (src = 0 works)",
        slug="" if failure.slug == "send-to-self" else failure.slug,
        rule=task.rule_of_source,
    )


def expect_everywhere(task: Broadcast, run: Run, src: int) -> None:
    """Every rank has what `src` had.

    Raises:
        NotYetError: some rank has not.
    """
    n = run.world_size
    before = [value["before"] for value in run.values]
    after = [value["after"] for value in run.values]
    came = all_close(after, same_everywhere(before[src], n))
    expect_messages(
        run,
        f"every rank has rank {src}'s tensor, but not through comm"
        if came
        else f"not every rank has rank {src}'s tensor",
    )
    arrived = [received(record) for record in run.ranks if record.rank != src]
    expect_values(
        after,
        same_everywhere(before[src], n),
        what=f"the tensor after a broadcast from rank {src}",
        suspects=[
            Suspect(
                slug="not-in-place" if all(arrived) else "",
                values=before,
                sentence=f"with src = {src}, every rank's tensor is unchanged"
                + (
                    ": the values were received into another tensor"
                    if all(arrived)
                    else f", expected rank {src}'s values in it"
                ),
                rule="receive into the argument itself: comm.recv(tensor, …)",
            ),
            Suspect(
                slug="source-ignored",
                values=same_everywhere(before[0], n),
                sentence=f"with src = {src}, every rank has rank 0's values, expected "
                f"rank {src}'s",
                rule=task.rule_of_source,
            ),
        ],
        rule=task.rule,
    )


def expect_it_again(task: Broadcast, runs: Runs) -> None:
    """A second call, after one with another dtype, is as right as the first.

    And so are calls with tensors of other shapes.
    """
    run = runs.finished(task.scenario, src=1, again=True)
    expect_values(
        [value["after"] for value in run.values],
        same_everywhere(run.values[1]["before"], run.world_size),
        what="in a second call in the same process, the tensor",
    )
    expect_each(
        finished_with_each(runs, task.with_any),
        lambda before: same_everywhere(before[2], len(before)),
        "the tensor broadcast from rank 2",
    )


def expect_few_messages(task: Broadcast, runs: Runs) -> None:
    """Expect n - 1 messages, since each rank but src receives once.

    Raises:
        NotYetError: there are more, or fewer and yet all ranks have it.
        NotJudgedError: there are fewer because not all ranks were reached.
    """
    n = runs.world_size
    for src in sources(n):
        run = runs.finished(task.scenario, src=src)
        total = sum(record.messages for record in run.ranks)
        sent = same_everywhere(run.values[src]["before"], n)
        is_right = all_close([value["after"] for value in run.values], sent)
        if total < n - 1:
            if is_right:
                raise NotYetError(
                    f"with {n} ranks, all have the tensor after only {total} "
                    f"message{'s' * (total != 1)}, expected {n - 1}: one to each rank "
                    "except src",
                    evidence=calls_of_each(run),
                    rule="only a message of comm counts",
                )
            raise NotJudgedError("some ranks were not reached: see C1")
        if total > n - 1:
            raise NotYetError(
                f"with {n} ranks, {total} messages were sent, expected {n - 1}: one to "
                "each rank except src",
                slug="extra-messages",
                evidence=calls_of_each(run),
                rule=task.rule_of_messages,
            )
        if is_right:
            expect_bytes(run, (n - 1) * sent[0].nbytes, "every rank has the tensor")
