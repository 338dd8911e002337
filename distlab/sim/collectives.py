"""The collectives of the simulated cluster, which the kernel itself carries out.

The k-th collectives of all members of a group belong together. They start when the last
member has arrived, take the time of a bandwidth-optimal algorithm, and then all members
have the result. If members make different calls, they never meet, as on a real
transport. If some never arrive at a broadcast, it may still end for others, see
`broadcast`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from distlab.comm import ReduceOp
from distlab.sim.broadcast import Tree
from distlab.sim.kernel import Flight, GaveUp, Kernel
from distlab.sim.net.links import Wires
from distlab.sim.payload import Sized

Act = tuple[str, int | None]  # which collective, and its root


class HoldsBack(Protocol):
    """Something that may delay the start of a collective."""

    def together_ps(self, members: Sequence[int], now_ps: int) -> int:
        """Return when a collective can start for which all members are ready."""


class Part(NamedTuple):
    """The input of one member, and the place for its result; sizes may do."""

    act: Act
    op: ReduceOp
    sent: Tensor | Sized | None
    received: Tensor | Sized | None


class CollectivePart(Flight):
    """One member's part in the group's k-th collective."""

    __slots__ = ("act", "collectives", "index", "owner")

    def __init__(
        self, collectives: Collectives, act: Act, owner: int, index: int
    ) -> None:
        super().__init__()
        self.collectives, self.act = collectives, act
        self.owner, self.index = owner, index

    def awaited(self) -> tuple[int, ...]:
        """Implement `Flight.awaited`."""
        return self.collectives.awaited(self.owner, self.index)

    def call(self) -> dict[str, Any]:
        """Implement `Flight.call`."""
        return {"n": self.index + 1, "op": self.act[0], "root": self.act[1]}


class Collectives:
    """The collectives of one group; `gone` holds the members that have given it up."""

    def __init__(
        self,
        kernel: Kernel,
        wires: Wires,
        members: tuple[int, ...],
        gone: set[int],
        conditions: HoldsBack | None = None,
    ) -> None:
        self._conditions = conditions
        self._kernel, self._wires = kernel, wires
        self._members, self._gone = members, gone
        self._num_joined: defaultdict[int, int] = defaultdict(int)
        self._open: dict[int, dict[int, tuple[Part, CollectivePart]]] = {}
        self._free_ps = 0  # one after the other: they would share the same links
        self._trees: dict[tuple[int, int], Tree] = {}  # by index and root
        kernel.when_idle.append(self._let_through)

    def join(self, owner: int, part: Part) -> CollectivePart:
        """Take part in this member's next collective."""
        index = self._num_joined[owner]
        self._num_joined[owner] += 1
        meeting = CollectivePart(self, part.act, owner, index)
        members = self._open.setdefault(index, {})
        members[owner] = (part, meeting)
        kernel = self._kernel
        if self._gone:
            kernel.end(meeting, GaveUp())
        elif len(members) == len(self._members) and self._acts(index) == 1:
            num_bytes = part.sent.nbytes if part.sent is not None else 0
            op, n = part.act[0], len(members)
            took = self._wires.collective(op, n, num_bytes, self._members)
            start = max(kernel.now_ps, self._free_ps)
            if self._conditions is not None:
                start = self._conditions.together_ps(self._members, start)
            self._free_ps = start + took
            kernel.at(self._free_ps, self._finish, index)
        return meeting

    def leave(self) -> None:
        """Fail all open collectives, because a member has gone."""
        for members in self._open.values():
            for _, meeting in members.values():
                if not meeting.done:
                    self._kernel.end(meeting, GaveUp())

    def awaited(self, owner: int, index: int) -> tuple[int, ...]:
        """Return the members that haven't arrived, or are in another collective."""
        parts = {i: part.act for i, (part, _) in self._open.get(index, {}).items()}
        return tuple(
            r for i, r in enumerate(self._members) if parts.get(i) != parts[owner]
        )

    def _acts(self, index: int) -> int:
        return len({part.act for part, _ in self._open[index].values()})

    def _let_through(self) -> bool:
        """End the broadcasts that are over for some, once nothing else can happen."""
        over = [] if self._gone else [m for i in self._open for m in self._over(i)]
        for meeting in over:
            self._kernel.end(meeting)
        return bool(over)

    def _over(self, index: int) -> list[CollectivePart]:
        members = self._open[index]
        acts = {part.act for part, _ in members.values() if part.act[0] == "broadcast"}
        over = []
        for act in sorted(acts):
            come = {i: part for i, (part, _) in members.items() if part.act == act}
            over += [members[i][1] for i in self._handed_down(index, come)]
        return [meeting for meeting in over if not meeting.done]

    def _handed_down(self, index: int, come: dict[int, Part]) -> list[int]:
        """Pass a broadcast as far as it can go; return the members that are done."""
        root = next(iter(come.values())).act[1] or 0
        key = (index, root)
        if key not in self._trees:
            self._trees[key] = Tree(len(self._members), root)
        tree = self._trees[key]
        tree.hand_down({i: p.sent for i, p in come.items() if p.sent is not None})
        return tree.through(come)

    def _finish(self, index: int) -> None:
        members = self._open.pop(index)
        if self._gone:  # one died meanwhile; the others know already
            return
        parts = [members[i][0] for i in range(len(members))]
        tree = self._trees.pop((index, parts[0].act[1] or 0), None)
        if tree is not None:  # some are through already, and their tensors are theirs
            tree.hand_down(dict(enumerate(_sent(parts))))
        # Of unlike parts nothing comes, and the journals show why.
        elif _have_data(parts) and _alike(parts):
            _RESULTS[parts[0].act[0]](parts)
        for _, meeting in members.values():
            if not meeting.done:
                self._kernel.end(meeting)


def _have_data(parts: Sequence[Part]) -> bool:
    """Whether there is anything to compute: not if a tensor is a size alone."""
    return not any(
        type(part.sent) is Sized or type(part.received) is Sized for part in parts
    )


def _alike(parts: list[Part]) -> bool:
    """Return True if all members put in equally many elements of one dtype."""
    sent = _sent(parts)
    return len({(tensor.numel(), tensor.dtype) for tensor in sent}) <= 1


def _nothing(parts: list[Part]) -> None:
    """Do nothing, because a barrier has no result."""


def _broadcast(parts: list[Part]) -> None:
    sent = _sent(parts)
    root = parts[0].act[1] or 0
    for into in _received(parts):
        if into is not sent[root]:
            into.copy_(sent[root])


def _all_reduce(parts: list[Part]) -> None:
    total = _combined(parts)
    for into in _received(parts):
        into.copy_(total)


def _reduce(parts: list[Part]) -> None:
    _received(parts)[parts[0].act[1] or 0].copy_(_combined(parts))


def _all_gather(parts: list[Part]) -> None:
    gathered = torch.cat(_sent(parts))
    for into in _received(parts):
        into.copy_(gathered)


def _reduce_scatter(parts: list[Part]) -> None:
    chunks = _combined(parts).chunk(len(parts)) if _sent(parts)[0].numel() else ()
    for into, chunk in zip(_received(parts), chunks, strict=False):
        into.copy_(chunk)


def _all_to_all(parts: list[Part]) -> None:
    n = len(parts)
    rows = [sent.clone().view(n, -1) for sent in _sent(parts) if sent.numel()]
    for rank, into in enumerate(_received(parts)):
        if rows:
            into.copy_(torch.cat([row[rank] for row in rows]))


_RESULTS = {
    "barrier": _nothing,
    "new_group": _nothing,
    "broadcast": _broadcast,
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


def _sent(parts: list[Part]) -> list[Any]:
    return [part.sent for part in parts if part.sent is not None]


def _received(parts: list[Part]) -> list[Any]:
    return [part.received for part in parts if part.received is not None]


def _combined(parts: list[Part]) -> Tensor:
    """Return the reduction, in rank order from 0 on, as a new tensor."""
    first, *rest = _sent(parts)
    op = parts[0].op
    total: Tensor = first.clone()
    for tensor in rest:
        if op is ReduceOp.MIN:
            torch.minimum(total, tensor, out=total)
        elif op is ReduceOp.MAX:
            torch.maximum(total, tensor, out=total)
        elif op is ReduceOp.PRODUCT:
            total *= tensor
        else:
            total += tensor
    if op is ReduceOp.AVG:
        is_whole = not (total.is_floating_point() or total.is_complex())
        total.div_(len(parts), rounding_mode="trunc" if is_whole else None)
    return total
