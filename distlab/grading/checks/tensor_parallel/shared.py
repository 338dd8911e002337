"""What the checks of `tensor_parallel` share: the expected f and g, and marks.

A task is judged with these f and g, not with the learner's: a mistake in 2.16 is
reported there. What is sent is read from the journal, between the scenario's marks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from distlab.comm import Call, Comm, CommRefusedError, Event, Wrapper
from distlab.grading.kit.messages import numbers
from distlab.grading.verdict import NotYetError
from distlab.runner import RankRecord, Run
from distlab.runner.autopsy import Evidence, describe, describe_tensor, place_of

WORLDS = (3, 2, 4, 5, 1)
DIVIDED = (3, 2, 4, 5)  # one rank has nothing to refuse


class CountedComm(Wrapper):
    """A comm that counts its calls, and those of its groups."""

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self.count = 0

    def _around(self, call: Call, proceed: Callable[[], Any]) -> Any:
        self.count += 1
        return proceed()


class RightEnter(torch.autograd.Function):
    """f as it should be."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, x: Tensor) -> Tensor:
        """See `copy_to_region` of the solution."""
        ctx.comm = comm
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        """The sum of all ranks' gradients."""
        total = gradient.clone(memory_format=torch.contiguous_format)
        ctx.comm.all_reduce(total)
        return None, total


class RightLeave(torch.autograd.Function):
    """g as it should be."""

    @staticmethod
    def forward(ctx: Any, comm: Comm, x: Tensor) -> Tensor:
        """The sum of all ranks' x."""
        total = x.clone(memory_format=torch.contiguous_format)
        comm.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        """The gradient as it is."""
        return None, gradient


def enter(comm: Comm, x: Tensor) -> Tensor:
    """f, to be handed to what is judged."""
    return RightEnter.apply(comm, x)  # type: ignore[no-untyped-call,no-any-return]


def leave(comm: Comm, x: Tensor) -> Tensor:
    """g, to be handed to what is judged."""
    return RightLeave.apply(comm, x)  # type: ignore[no-untyped-call,no-any-return]


def drawn(seed: int, rank: int, *shape: int) -> Tensor:
    """Random numbers of this shape; the same for the same seed and rank."""
    return numbers(seed, rank, int(torch.Size(shape).numel())).reshape(shape)


def as_tensor(value: object) -> Tensor:
    """What was returned, without history; an empty tensor stands for no tensor."""
    return value.detach().clone() if isinstance(value, Tensor) else torch.empty(0)


def flat(tensors: Sequence[object]) -> Tensor:
    """Several tensors end to end."""
    return torch.cat([as_tensor(tensor).reshape(-1) for tensor in tensors])


# ── refusals ────────────────────────────────────────────────────────────────────────


def attempt(action: Callable[[], object]) -> list[str]:
    """What `action` raises, as its type and its message; nothing if it returns."""
    try:
        action()
    except NotImplementedError:
        raise
    except CommRefusedError as error:  # a ValueError too, but not the learner's
        return ["a refusal by comm", str(error)]
    except Exception as error:
        kind = ValueError if isinstance(error, ValueError) else type(error)
        return [kind.__name__, str(error)]
    return []


def expect_refusal(run: Run, tried: Sequence[list[str]], what: str, rule: str) -> None:
    """On every rank the attempt must have ended with a ValueError.

    Raises:
        NotYetError: it did not.
    """
    for rank, raised in enumerate(tried):
        if raised and raised[0] == "ValueError":
            continue
        if not raised:
            happened, slug = "raised nothing", "not-refused"
        else:
            happened, slug = f"raised {raised[0]}", ""
        raise NotYetError(
            f"{what} {happened} on rank {rank}, expected a ValueError",
            slug=slug,
            evidence=[
                (number, "tried", _told(one)) for number, one in enumerate(tried)
            ],
            rule=rule,
        )


def expect_nothing_done(
    happened: str, done: Sequence[object], tried: Sequence[list[str]], whose: str
) -> None:
    """What was refused must be unchanged: `done` has what each rank did before.

    Raises:
        NotYetError: one of them did something; `happened` says what was refused, when.
    """
    if any(done):
        rank = next(rank for rank, one in enumerate(done) if one)
        raise NotYetError(
            f"rank {rank} {happened}, expected the check first",
            evidence=[
                (rank, "refused", raised[1][:70]) for rank, raised in enumerate(tried)
            ],
            rule=f"check first: {whose} that is refused must be unchanged",
        )


def _told(raised: list[str]) -> str:
    return f"{raised[0]}: {raised[1]}"[:70] if raised else "no error"


# ── what was sent ───────────────────────────────────────────────────────────────────


def between(record: RankRecord, marks: Sequence[int]) -> list[Event]:
    """The calls of a rank from the first mark to the second."""
    return record.calls()[marks[0] : marks[1]]


def expect_calls(
    run: Run,
    phases: Sequence[tuple[str, str, Sequence[str]]],
    *,
    slug: str = "",
    rule: str = "",
) -> None:
    """In each phase every rank must have made these calls and no others, in any order.

    A phase: its name in words, the key of its marks in the values, the operations.

    Raises:
        NotYetError: a rank made others.
    """
    if run.world_size == 1:
        return  # alone there is nothing to send, and sending it is no mistake
    for words, key, ops in phases:
        for record, value in zip(run.ranks, run.values, strict=True):
            calls = between(record, value["marks"][key])
            if sorted(call["op"] for call in calls) != sorted(ops):
                raise NotYetError(
                    f"on rank {record.rank}, {words} makes "
                    f"{_listed([c['op'] for c in calls])}, expected {_listed(ops)}",
                    slug=slug if len(calls) > len(ops) else "",
                    evidence=_evidence(run, key),
                    rule=rule,
                )


def _listed(ops: Sequence[str]) -> str:
    if not ops:
        return "no call"
    counts = {op: list(ops).count(op) for op in ops}
    told = " and ".join(f"{count} {op}" for op, count in counts.items())
    return f"{told} call{'s' * (len(ops) > 1)}"


def _evidence(run: Run, key: str) -> tuple[Evidence, ...]:
    lines = []
    for record, value in zip(run.ranks, run.values, strict=True):
        calls = between(record, value["marks"][key])
        text = ", ".join(f"{describe(c)} {describe_tensor(c)}" for c in calls[:3])
        lines.append(
            Evidence(
                rank=record.rank,
                state="called",
                text=(text or "no call") + (", …" if len(calls) > 3 else ""),
                where=place_of(calls[0]) if calls else "",
            )
        )
    return tuple(lines)
