"""A few ranks that execute the program, and many that do as one of those does.

With fake tensors, ranks differ in nothing but their number, and most programs make
little of that. So it's enough that some ranks are played: they execute the program.
Every other rank follows one of them. It takes part in the same collectives at the same
times, in its own group where its leader's is only one of several:

    mesh of 2 x 3, rank 0 is played      rows 0 1 2 | 3 4 5      columns 0 3 | 1 4 | 2 5
    rank 0 joins its row: ranks 1 and 2 join it too, 3 to 5 join theirs
    rank 0 joins its column: 3 joins it too, 1 and 4 join theirs, 2 and 5 as well

Whether the others would really do the same, only playing them can tell. `unlike` says
whether those that are played do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from distlab.runner import RankRecord
from distlab.sim.channels import Group
from distlab.sim.collectives import Part
from distlab.sim.payload import Sized

Formed = tuple[str, tuple[int, ...]]  # a group: its name and its members
_FEW = 16  # ranks that are all played


class Cast:
    """Who plays, and who follows whom.

    Raises:
        ValueError: a rank is to be played that there is not, or none is.
    """

    def __init__(
        self, world_size: int, played: Collection[int], apart: Collection[int] = ()
    ) -> None:
        self.played = sorted({*played, *apart})
        if not self.played or not 0 <= self.played[0] <= self.played[-1] < world_size:
            raise ValueError(
                f"the ranks to play are {sorted(played)}; name some of "
                f"0 … {world_size - 1}"
            )
        leaders = [rank for rank in self.played if rank not in apart] or self.played
        self.followers: dict[int, list[int]] = {rank: [] for rank in self.played}
        self.leader_of = list(range(world_size))
        for rank in sorted(set(range(world_size)) - set(self.played)):
            leader = max((one for one in leaders if one < rank), default=leaders[0])
            self.followers[leader].append(rank)
            self.leader_of[rank] = leader
        self._played = frozenset(self.played)
        self._twins: dict[tuple[str, int], tuple[Group, int] | None] = {}
        self._names: dict[int, dict[str, str]] = defaultdict(dict)  # of twins, by rank

    def is_played(self, rank: int) -> bool:
        """Whether it executes the program."""
        return rank in self._played

    def join(
        self, leader: int, formed: Sequence[Formed], world: Group, name: str, part: Part
    ) -> None:
        """Have the followers of `leader` do what it does: join a collective.

        `formed` are the groups of `world` that it knows of, `name` is the one it is in
        here; another name is the world's.
        """
        own: Part | None = None
        at = next((i for i, (known, _) in enumerate(formed) if known == name), None)
        for rank in self.followers[leader]:
            twin = (world, rank) if at is None else self._twin(rank, formed, world, at)
            if twin is not None:
                own = own or _followers_part(part)
                group, place = twin
                group.collectives.join(place, own)

    def _twin(
        self, rank: int, formed: Sequence[Formed], world: Group, at: int
    ) -> tuple[Group, int] | None:
        """What group `at` is to its leader is this one to `rank`; it may be none.

        With the place of `rank` in it.
        """
        name, members = formed[at]
        key = (name, rank)
        if key not in self._twins:
            if rank in members:
                found = [(0, name, members)]
            else:
                found = [
                    (abs(i - at), other, ranks)
                    for i, (other, ranks) in enumerate(formed)
                    if rank in ranks
                    and len(ranks) == len(members)
                    and not set(ranks) & set(members)
                ]
            self._twins[key] = None
            if found:
                _, other, ranks = min(found)
                group = world.subgroup(("torch", other, ranks), ranks)
                self._twins[key] = group, group.members.index(rank)
                self._names[rank][name] = other
        return self._twins[key]

    def everyone(self, ranks: Sequence[RankRecord]) -> tuple[RankRecord, ...]:
        """The records of all, those of followers being like their leaders'."""
        return tuple(
            ranks[rank] if rank == leader else self._like(ranks[leader], rank)
            for rank, leader in enumerate(self.leader_of)
        )

    def _like(self, leader: RankRecord, rank: int) -> RankRecord:
        names = self._names.get(rank, {})
        if all(own == name for name, own in names.items()):
            return replace(leader, rank=rank)
        journal = [
            {**event, "group": names.get(event["group"], event["group"])}
            if event.get("group") in names
            else event
            for event in leader.journal
        ]
        return replace(leader, rank=rank, journal=journal)

    def unlike(self, ranks: Sequence[RankRecord]) -> list[tuple[int, int]]:
        """Neighbors among those that are played whose calls differ."""
        calls = [list(_calls(ranks[rank])) for rank in self.played]
        pairs = zip(self.played, self.played[1:], calls, calls[1:], strict=False)
        return [(a, b) for a, b, mine, theirs in pairs if mine != theirs]


def _calls(record: RankRecord) -> Iterator[tuple[Any, ...]]:
    for event in record.journal:
        yield event["k"], event["n"], event.get("op"), event.get("bytes")


def default_cast(world_size: int, per_node: int) -> list[int]:
    """The ranks to play: all if they are few, or else those that are likely to differ.

    The first and the second rank, the last one of the first node and the first one of
    the second, the one in the middle and the last one.
    """
    if world_size <= _FEW:
        return list(range(world_size))
    picked = {0, 1, per_node - 1, per_node, world_size // 2, world_size - 1}
    return sorted(rank for rank in picked if rank < world_size)


def _followers_part(part: Part) -> Part:
    """What a follower brings: the same; where its result goes, nobody looks."""
    received = part.received
    if isinstance(received, Tensor):
        received = torch.empty_like(received)
    elif received is not None:
        received = Sized(received.nbytes)
    return part._replace(received=received)
