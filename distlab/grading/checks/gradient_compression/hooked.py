"""What ranks do with a hook: several steps of two buckets, and who sees the calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from distlab.comm import Call, Comm, Work, Wrapper
from distlab.given.gradient_compression import FlatBucket, Residuals
from distlab.grading.kit.values import close
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext, Run
from distlab.runner.autopsy import Evidence

T = TypeVar("T")
WORLDS = (3, 2, 4, 1)
SHAPES: tuple[tuple[int, ...], ...] = ((5, 6), (6,), (4,))
"""Of a bucket's parameters; the second bucket has as many elements."""
NUM_BUCKETS = 2
STEPS = 4

Gradients = list[list[list[Tensor]]]
"""By step, bucket and rank: bucket.flat before the hook is called."""


class Mistake(NamedTuple):
    """What a verdict says of a known mistake."""

    slug: str
    sentence: str
    rule: str = ""


class Listener(Wrapper):
    """Writes down each call and wait: [op, waits, when, bytes, dtype].

    `when` is "call" while the hook runs, and "wait" while the wait() of its Work runs.
    """

    def __init__(self, inner: Comm, heard: list[list[Any]]) -> None:
        super().__init__(inner)
        self.heard, self.when = heard, "call"

    def _around(self, call: Call, proceed: Callable[[], T]) -> T:
        sent = call.sent
        size = sent.nbytes if isinstance(sent, Tensor) else 0
        dtype = str(sent.dtype)[6:] if isinstance(sent, Tensor) else ""
        self.heard.append([call.op, call.blocking, self.when, size, dtype])
        result = proceed()
        if call.blocking:
            return result
        return _Heard(result, self)  # type: ignore[return-value,arg-type]


class _Heard:
    def __init__(self, work: Work, listener: Listener) -> None:
        self._work, self._listener = work, listener

    def wait(self, timeout_s: float | None = None) -> None:
        """See `Work.wait`."""
        self._listener.heard.append(["wait()", True, self._listener.when, 0, ""])
        self._work.wait(timeout_s)

    def is_completed(self) -> bool:
        """See `Work.is_completed`."""
        return self._work.is_completed()


def make_buckets(device: torch.device, dtype: torch.dtype) -> list[FlatBucket]:
    """Two of them, each with parameters of its own."""
    buckets = []
    for _ in range(NUM_BUCKETS):
        parameters = [torch.zeros(shape, device=device) for shape in SHAPES]
        size = sum(parameter.numel() for parameter in parameters)
        flat = torch.zeros(size, dtype=dtype, device=device)
        buckets.append(FlatBucket(parameters, flat))
    return buckets


def take_steps(
    context: RankContext, hook: Any, gradients: Gradients
) -> dict[str, list[Any]]:
    """STEPS steps with both buckets in flight at once; each is waited for twice."""
    dtypes = [of_ranks[0].dtype for of_ranks in gradients[0]]
    made = [make_buckets(context.comm.device, dtype) for dtype in dtypes]
    buckets = [of_dtype[number] for number, of_dtype in enumerate(made)]
    heard: list[list[Any]] = []
    comm = Listener(context.comm, heard)
    sums: list[list[Tensor]] = []
    for of_buckets in gradients:
        for bucket, of_ranks in zip(buckets, of_buckets, strict=True):
            bucket.flat.copy_(of_ranks[context.rank])
        comm.when = "call"
        works = [hook(comm, bucket) for bucket in buckets]
        comm.when = "wait"
        for work in (*works, works[0]):
            if not hasattr(work, "wait"):
                return {"sums": sums, "heard": heard, "returned": [repr(work)[:60]]}
            work.wait()
        sums.append([bucket.flat.clone() for bucket in buckets])
    return {"sums": sums, "heard": heard, "returned": [], "kept": _kept(hook, buckets)}


def _kept(hook: Any, buckets: list[FlatBucket]) -> list[Tensor]:
    """What a checkpoint finds in hook.residuals, by bucket; [] without Residuals."""
    residuals = getattr(hook, "residuals", None)
    if not isinstance(residuals, Residuals):
        return []
    return [residuals.of(bucket) for bucket in buckets]


def expect_kept_in_residuals(
    run: Run, expected: list[list[Tensor]], near: float
) -> None:
    """By bucket and rank: what is left after the last step is in hook.residuals.

    Raises:
        NotYetError: it isn't, although the steps are right.
    """
    for rank, value in enumerate(run.values):
        kept = value["kept"]
        for bucket, of_ranks in enumerate(expected):
            right = of_ranks[rank]
            if kept and close(kept[bucket], right, near):
                continue
            is_empty = not kept or not bool(kept[bucket].any())
            has = "has nothing" if is_empty else "has other values"
            raise NotYetError(
                f"after {STEPS} steps, rank {rank}'s self.residuals {has} for bucket "
                f"{bucket}, expected the part that the rank has not sent yet",
                rule="self.residuals.keep(bucket, rest), and self.residuals.of(bucket)",
            )


def expect_work(run: Run) -> None:
    """The hook returns something with a wait()."""
    for record in run.ranks:
        if told := record.value["returned"]:
            raise NotYetError(
                f"on rank {record.rank}, the hook returned {told[0]}, expected a Work"
            )


def sums_of(run: Run, step: int, bucket: int) -> list[Tensor]:
    """What is in a bucket after the wait, on each rank.

    Raises:
        NotYetError: a hook returned no Work.
    """
    expect_work(run)
    return [value["sums"][step][bucket] for value in run.values]


def bytes_over(run: Run, num_steps: int, limit: float) -> tuple[int, float] | None:
    """The first rank that sends more bytes for a bucket than `limit`, and how many.

    Raises:
        NotYetError: a hook returned no Work.
    """
    expect_work(run)
    for record in run.ranks:
        sent = record.sent_bytes / num_steps / NUM_BUCKETS
        if sent > limit + 1e-6:
            return record.rank, sent
    return None


def expect_no_wait_in_call(run: Run) -> None:
    """No blocking call and no wait() before the hook returns.

    Raises:
        NotYetError: there is one, or a hook returned no Work.
    """
    expect_work(run)
    for record in run.ranks:
        if not any(when == "call" for _, _, when, *_ in record.value["heard"]):
            raise NotYetError(
                f"on rank {record.rank}, the hook returned without starting a message, "
                "expected it to send while backward() goes on",
                evidence=heard_lines(run),
                rule="start with async_op=True in the call, wait in wait()",
            )
        for op, waits, when, *_ in record.value["heard"]:
            if waits and when == "call":
                act = op if op == "wait()" else f"comm.{op}"
                raise NotYetError(
                    f"rank {record.rank} waits in {act} before the hook returns, "
                    "expected a wait in Work.wait() only",
                    slug="waits-in-hook",
                    evidence=heard_lines(run),
                    rule="start with async_op=True, wait in the wait() of your Work",
                )


def heard_lines(run: Run) -> tuple[Evidence, ...]:
    """The calls of each rank's first step in a line."""
    return tuple(
        Evidence(record.rank, "calls", _line(record.value["heard"]))
        for record in run.ranks[:4]
    )


def _line(heard: list[list[Any]]) -> str:
    words = [op if op == "wait()" else f"{op} of {n} B" for op, _, _, n, _ in heard]
    return ", ".join(words[:4]) + (" …" if len(words) > 4 else "")
