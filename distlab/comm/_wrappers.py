"""Three wrappers that log every call, count its bytes, or refuse collectives."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor

from distlab.comm._call import COLLECTIVES, Call, Wrapper
from distlab.comm._protocol import Comm, CommRefusedError, Work

T = TypeVar("T")
Event = dict[str, Any]
"""One line of a journal; its keys are described in `Journal`."""

_NO_RANK = -2  # unlike ANY, which is -1
_COMM_FOLDER = str(Path(__file__).parent)
_DISTLAB_FOLDER = str(Path(__file__).parent.parent)
_TORCH_FOLDER = str(Path(sys.modules["torch"].__file__ or "").parent)


class Journal(Wrapper):
    """Log each call before it starts and after it ends.

    The line written *before* a call makes a hang readable, because the last line of a
    rank that hangs says where it waits, and for whom. `sink` gets one `Event` at a
    time; ranks in it are those of the outermost group.

    Events by their key `k` (`n` is the call's number, from 1, on this rank):
        enter  a blocking call starts; with op, dst, src, root, tag, group, members,
               shape, dtype, bytes (of what is sent), into_shape, into_dtype (of what
               is received into), ptr, file, line, via (file and line that called
               the function it is in, or None), t (seconds), timeout_s (the call's
               own limit), thread (which one calls), threads (how many the rank has)
        post   the same for a call that returns at once (isend, irecv, async_op)
        wait   the rank starts to wait for the posted call n; with file, line, t,
               timeout_s, thread, threads
        exit   the call n is complete, at t; `src` says who sent, after recv(ANY)
        error  the call n was refused or failed, at t; with type and message
    """

    def __init__(
        self,
        inner: Comm,
        sink: Callable[[Event], None],
        *,
        group: str = "world",
        members: Sequence[int] | None = None,
        counter: Iterator[int] | None = None,
    ) -> None:
        super().__init__(inner)
        self._sink = sink
        self._group = group
        self._members = list(members or range(inner.world_size))
        self._counter = counter or itertools.count(1)
        self._num_groups = 0

    def _around(self, call: Call, proceed: Callable[[], T]) -> T:
        number = next(self._counter)
        event = self._describe(call)
        self._sink({"k": "enter" if call.blocking else "post", "n": number, **event})
        try:
            result = proceed()
        except BaseException as error:
            self._failed(number, error)
            raise
        # Counted on non-members too: the number is part of the group's name, which
        # must be the same on all its members.
        self._num_groups += call.op == "new_group"
        if not call.blocking:
            return _JournalledWork(result, self, number)  # type: ignore[return-value,arg-type]
        done: Event = {"k": "exit", "n": number, "t": time.monotonic()}
        if call.op == "recv" and isinstance(result, int):
            done["src"] = self._members[result]
        self._sink(done)
        return result

    def _wrap_group(self, group: Comm, ranks: Sequence[int]) -> Comm:
        members = [self._members[rank] for rank in ranks]
        name = f"{self._group}/{self._num_groups}:{','.join(map(str, members))}"
        return Journal(
            group, self._sink, group=name, members=members, counter=self._counter
        )

    def _describe(self, call: Call) -> Event:
        return {
            "op": call.op,
            "dst": self._outer(call.dst),
            "src": self._outer(call.src),
            "root": self._outer(call.root),
            "tag": call.tag,
            "group": self._group,
            "members": self._members,
            "reduce": call.reduce_op.value if call.reduce_op else None,
            **_facts(call.sent, "shape", "dtype"),
            **_facts(call.received, "into_shape", "into_dtype"),
            "bytes": _bytes(call.sent),
            "ptr": _address(call.sent),
            **call_site(sys._getframe(1)),
            "t": time.monotonic(),
            "timeout_s": call.timeout_s,
            **_who_calls(),
        }

    def _outer(self, rank: int | None) -> int | None:
        if rank is None:
            return None
        if not isinstance(rank, int):
            return _NO_RANK  # a tensor, say: the transport will refuse it
        if not 0 <= rank < len(self._members):
            return rank  # ANY, and ranks that do not exist, stay as they were written
        return self._members[rank]

    def _failed(self, number: int, error: BaseException) -> None:
        self._sink(
            {
                "k": "error",
                "n": number,
                "t": time.monotonic(),
                "type": type(error).__name__,
                "message": str(error),
                "refused": isinstance(error, CommRefusedError),
            }
        )


class _JournalledWork:
    """A Work whose `wait` is logged as well."""

    def __init__(self, work: Work, journal: Journal, number: int) -> None:
        self._work, self._journal, self._number = work, journal, number

    def wait(self, timeout_s: float | None = None) -> None:
        """Implement `Work.wait`."""
        self._journal._sink(
            {
                "k": "wait",
                "n": self._number,
                **call_site(sys._getframe(1)),
                "t": time.monotonic(),
                "timeout_s": timeout_s,
                **_who_calls(),
            }
        )
        try:
            self._work.wait(timeout_s)
        except BaseException as error:
            self._journal._failed(self._number, error)
            raise
        self._journal._sink({"k": "exit", "n": self._number, "t": time.monotonic()})

    def is_completed(self) -> bool:
        """Implement `Work.is_completed`."""
        return self._work.is_completed()


@dataclass
class Traffic:
    """One rank's traffic so far, including its subgroups.

    If `before_call` is set, we call it before each call begins. When a blocking call
    begins, or when the rank starts to wait for a call that it posted, `note` gets the
    call's name and its start time. When the call ends, `note` gets an empty name.
    """

    messages: int = 0
    sent_bytes: float = 0.0
    in_calls_s: float = 0.0
    before_call: Callable[[], None] | None = None
    note: Callable[[str, float], None] | None = None

    def add(self, copies: float, num_bytes: int) -> None:
        """Count a call that sends `num_bytes` this many times."""
        self.messages += copies > 0
        self.sent_bytes += copies * num_bytes

    @contextmanager
    def timed(self, op: str = "") -> Iterator[None]:
        """Add the seconds spent in the block to `in_calls_s`; note `op`, if any."""
        started = time.monotonic()
        if op and self.note:
            self.note(op, started)
        try:
            yield
        finally:
            self.in_calls_s += time.monotonic() - started
        if op and self.note:
            self.note("", started)


class ByteMeter(Wrapper):
    """Counts the messages and bytes a rank sends, and the seconds its calls take.

    We count point-to-point calls as they are. A library collective hides how it moves
    its data, so we count the bytes of a bandwidth-optimal algorithm. For n ranks, and S
    bytes in the tensor sent, these are all_reduce 2(n-1)/n S, reduce_scatter and
    all_to_all (n-1)/n S, all_gather and broadcast by its root (n-1) S, reduce S,
    barrier 0.
    """

    def __init__(self, inner: Comm, traffic: Traffic | None = None) -> None:
        super().__init__(inner)
        self.traffic = traffic or Traffic()

    def _around(self, call: Call, proceed: Callable[[], T]) -> T:
        if self.traffic.before_call:
            self.traffic.before_call()
        with self.traffic.timed(call.op if call.blocking else ""):
            result = proceed()
        copies = self._copies_sent(call)
        self.traffic.add(copies, _bytes(call.sent))
        if call.blocking:
            return result
        return _TimedWork(result, self.traffic, call.op)  # type: ignore[return-value,arg-type]

    def _wrap_group(self, group: Comm, ranks: Sequence[int]) -> Comm:
        return ByteMeter(group, self.traffic)

    def _copies_sent(self, call: Call) -> float:
        n = self.world_size
        if call.op in {"send", "isend"}:
            return 1.0
        if call.op == "sendrecv":
            return 0.0 if call.dst == self.rank else 1.0
        if call.op in {"broadcast", "reduce"}:
            return _rooted_copies(call, self.rank, n)
        per_rank = {
            "all_reduce": 2 * (n - 1) / n,
            "reduce_scatter": (n - 1) / n,
            "all_to_all": (n - 1) / n,
            "all_gather": float(n - 1),
        }
        return per_rank.get(call.op, 0.0)


class _TimedWork:
    def __init__(self, work: Work, traffic: Traffic, op: str) -> None:
        self._work, self._traffic, self._op = work, traffic, op

    def wait(self, timeout_s: float | None = None) -> None:
        """Implement `Work.wait`."""
        with self._traffic.timed(self._op):
            self._work.wait(timeout_s)

    def is_completed(self) -> bool:
        """Implement `Work.is_completed`."""
        return self._work.is_completed()


class PointToPointOnly(Wrapper):
    """Allows only send and recv, for the unit in which you build collectives."""

    def __init__(self, inner: Comm, *, building: str = "the collectives") -> None:
        super().__init__(inner)
        self._building = building

    def _around(self, call: Call, proceed: Callable[[], T]) -> T:
        if call.op in COLLECTIVES:
            raise CommRefusedError(
                f"this unit builds {self._building}: comm.{call.op} is not available "
                "here, only send, recv, isend, irecv and sendrecv",
                "collective",
            )
        return proceed()


def _rooted_copies(call: Call, rank: int, world_size: int) -> float:
    if call.op == "broadcast":
        return float(world_size - 1) if call.root == rank else 0.0
    return 0.0 if call.root == rank else 1.0


def _who_calls() -> Event:
    return {"thread": threading.get_ident(), "threads": threading.active_count()}


def _bytes(tensor: object) -> int:
    return tensor.numel() * tensor.element_size() if isinstance(tensor, Tensor) else 0


def _address(tensor: object) -> int:
    is_dense = isinstance(tensor, Tensor) and tensor.layout is torch.strided
    return tensor.data_ptr() if is_dense else 0  # type: ignore[attr-defined]


def _facts(tensor: object, shape: str, dtype: str) -> Event:
    if not isinstance(tensor, Tensor):
        return {shape: None, dtype: None}
    return {
        shape: list(tensor.shape),
        dtype: str(tensor.dtype).removeprefix("torch."),
    }


def call_site(frame: FrameType | None) -> Event:
    """Find the innermost line outside distlab and torch, or else outside distlab.comm.

    `via` is the file and line from which that line's function was called, if that is
    outside as well. A learner's own collective may be right but called in the wrong
    place, and then you need that line.
    """
    site: Event = {"file": "", "line": 0, "via": None}
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_DISTLAB_FOLDER, _TORCH_FOLDER)):
            outer, via = frame.f_back, None
            if outer and not outer.f_code.co_filename.startswith(_DISTLAB_FOLDER):
                via = [outer.f_code.co_filename, outer.f_lineno]
            return {"file": file, "line": frame.f_lineno, "via": via}
        if not site["file"] and not file.startswith((_COMM_FOLDER, _TORCH_FOLDER)):
            site = {"file": file, "line": frame.f_lineno, "via": None}
        frame = frame.f_back
    return site
