"""Checks of task 2.15: which ranks form which groups, and who makes them.

The groups are first made on a comm that only writes down what it is asked for: what
would hang for real is there seen at once. Then, where there is a table with more than
one row and one column, for real.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from distlab.comm import Call, Comm, Wrapper
from distlab.grading.checks.tensor_parallel.shared import attempt, expect_refusal
from distlab.grading.clause import clause
from distlab.grading.runs import Runs, RunSpec, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext, Run
from distlab.runner.autopsy import Evidence, place
from distlab.terminal import ranks_in_words

NAMES = ("tensor", "data")
WORLDS = (6, 4, 3, 2, 1)  # with 2 × 2, rows and columns are too much alike
RULE = "quotient and remainder of the rank by tensor_size give row and column"


class Group(Wrapper):
    """A group that was only asked for: who is in it, and where this rank stands."""

    def __init__(self, inner: Comm, members: Sequence[int], number: int) -> None:
        super().__init__(inner)
        self.members, self.number = list(members), number

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self.members.index(self._inner.rank)

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""
        return len(self.members)


class Draft(Wrapper):
    """A comm that makes no groups, but remembers which were asked for."""

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self.asked: list[list[int]] = []
        self.where: list[str] = []

    def _around(self, call: Call, proceed: Callable[[], Any]) -> Any:
        return proceed()

    def new_group(self, ranks: Sequence[int]) -> Comm | None:
        """A stand-in for the group; None to those who are not in it."""
        members = [int(rank) for rank in ranks]
        caller = sys._getframe(1)
        self.where.append(place((caller.f_code.co_filename, caller.f_lineno)))
        self.asked.append(members)
        if self.rank not in members:
            return None
        return Group(self._inner, members, len(self.asked) - 1)


# ── what runs in the ranks ──────────────────────────────────────────────────────────


def places_once(context: RankContext, unit: ModuleType, seed: int) -> dict[int, Any]:
    """The coordinates of all ranks, by tensor_size, for each that fits."""
    n = context.world_size
    sizes = (size for size in range(1, n + 1) if n % size == 0)
    return {
        s: [_as_pair(unit.coordinates(rank, s)) for rank in range(n)] for s in sizes
    }


def draft_meshes(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """A mesh of each kind that these ranks can form, and of some that they cannot."""
    n = context.world_size
    meshes = {}
    for size in (size for size in range(1, n + 1) if n % size == 0):
        comm = Draft(context.comm)
        mesh = unit.make_mesh(comm, size)
        meshes[size] = {
            "asked": comm.asked,
            "where": comm.where,
            "groups": [_members(mesh, name) for name in NAMES],
            "numbers": [_number(mesh, name) for name in NAMES],
        }
    refused = {}
    for size in (*(size for size in range(2, n + 2) if n % size), 0, -1, -n):
        comm = Draft(context.comm)
        raised = attempt(lambda c=comm, s=size: unit.make_mesh(c, s))  # type: ignore[misc]
        refused[size] = {"raised": raised, "asked": comm.asked}
    return {"meshes": meshes, "refused": refused}


def real_mesh(
    context: RankContext, unit: ModuleType, seed: int, tensor_size: int
) -> list[list[int]]:
    """The ranks of both groups, as these tell it themselves."""
    mesh = unit.make_mesh(context.comm, tensor_size)
    found = []
    for group in (mesh.tensor, mesh.data):
        mine = torch.tensor([context.rank], device=context.comm.device)
        output = torch.empty(group.world_size, dtype=mine.dtype, device=mine.device)
        group.all_gather(output, mine)
        found.append(output.tolist())
    return found


def _members(mesh: object, name: str) -> list[int] | None:
    group = getattr(mesh, name, None)
    return group.members if isinstance(group, Group) else None


def _number(mesh: object, name: str) -> int | None:
    """Which of the groups that were asked for, counted from 0."""
    group = getattr(mesh, name, None)
    return group.number if isinstance(group, Group) else None


def _as_pair(value: Any) -> list[int]:
    try:
        return [int(part) for part in value]
    except (TypeError, ValueError):
        return []


# ── C1 coordinates ──────────────────────────────────────────────────────────────────


@clause("tensor_parallel.mesh", "C1", worlds=WORLDS, runs=[on_ranks(places_once)])
def neighbors_share_a_model(runs: Runs) -> str | None:
    """The coordinates of every rank, for every size that fits."""
    n = runs.world_size
    for size, places in runs.finished(places_once).values[0].items():
        expected = [[rank // size, rank % size] for rank in range(n)]
        if places == expected:
            continue
        start = _with(n, size)
        message = f"{start} the coordinates come as (shard, replica)"
        message += ", expected (replica, shard)"
        if places != [pair[::-1] for pair in expected]:
            pairs = enumerate(zip(places, expected, strict=True))
            rank, (got, right) = next((r, p) for r, p in pairs if p[0] != p[1])
            message = (
                f"{start} rank {rank}'s coordinates are {tuple(got)}, "
                f"expected {tuple(right)}"
            )
        raise NotYetError(
            message,
            evidence=[
                (
                    rank,
                    "as expected" if pair == right else "wrong",
                    f"got {tuple(pair)}   expected {tuple(right)}",
                )
                for rank, (pair, right) in enumerate(zip(places, expected, strict=True))
            ],
            rule=RULE,
        )
    return None


def _with(n: int, size: int) -> str:
    return f"with {n} rank{'s' * (n > 1)} and tensor_size {size},"


# ── C2 the groups of a rank ─────────────────────────────────────────────────────────


@clause("tensor_parallel.mesh", "C2", worlds=WORLDS, runs=[on_ranks(draft_meshes)])
def each_rank_has_its_two_groups(runs: Runs) -> str | None:
    """The members of both groups on each rank, for every size that fits."""
    n = runs.world_size
    run = runs.finished(draft_meshes)
    for size in run.values[0]["meshes"]:
        found = [value["meshes"][size]["groups"] for value in run.values]
        expected = [_right_groups(n, size, rank) for rank in range(n)]
        if found != expected:
            raise _wrong_groups(n, size, found, expected)
    return None


def _right_groups(n: int, size: int, rank: int) -> list[list[int]]:
    replica, shard = divmod(rank, size)
    row = list(range(replica * size, (replica + 1) * size))
    return [row, list(range(shard, n, size))]


def _transposed(n: int, size: int, rank: int) -> list[list[int]]:
    num_replicas = n // size
    shard, replica = divmod(rank, num_replicas)
    return [
        list(range(replica, n, num_replicas)),
        list(range(shard * num_replicas, (shard + 1) * num_replicas)),
    ]


def _wrong_groups(
    n: int, size: int, found: list[Any], expected: list[Any]
) -> NotYetError:
    start = _with(n, size)
    everybody = list(range(n))
    message, slug, rule = f"{start} {_first_wrong(found, expected)}", "", RULE
    if all(groups == [None, None] for groups in found):
        message = f"{start} make_mesh returned no groups from comm.new_group"
        message += ", expected two on each rank"
        rule = "return Mesh(tensor=…, data=…), each from comm.new_group(…)"
    elif all(
        groups == right[::-1] for groups, right in zip(found, expected, strict=True)
    ):
        message = f"{start} `tensor` and `data` are swapped: "
        message += _first_wrong(found, expected)
        rule = "tensor: the ranks of one replica; data: the ranks with the same shard"
    elif found == [_transposed(n, size, rank) for rank in range(n)]:
        message = f"{start} neighboring ranks are in different replicas: "
        message += _first_wrong(found, expected)
        slug = "mesh-transposed"
        rule = "neighboring ranks share a replica: they communicate in every layer"
    elif any(
        one == everybody != right and len(everybody) > 1
        for groups, rights in zip(found, expected, strict=True)
        for one, right in zip(groups, rights, strict=True)
    ):
        rank, name, right = next(
            (rank, name, right)
            for rank, groups in enumerate(zip(found, expected, strict=True))
            for name, one, right in zip(NAMES, *groups, strict=True)
            if one == everybody != right
        )
        message = (
            f"{start} rank {rank}'s group `{name}` contains all {n} ranks, expected "
            f"{right}"
        )
        slug = "group-of-all-ranks"
        rule = "a sum over all ranks would mix different shards and different samples"
    elif all(
        one is not None and sorted(one) == right
        for groups, rights in zip(found, expected, strict=True)
        for one, right in zip(groups, rights, strict=True)
    ):
        message = f"{start} {_first_wrong(found, expected)}, in this order"
        rule = "new_group numbers its ranks in the order of the list"
    return NotYetError(
        message,
        slug=slug,
        evidence=[
            (
                rank,
                "as expected" if groups == right else "wrong",
                f"tensor {groups[0]}, data {groups[1]}   "
                f"expected {right[0]} and {right[1]}",
            )
            for rank, (groups, right) in enumerate(zip(found, expected, strict=True))
        ],
        rule=rule,
    )


def _first_wrong(found: list[Any], expected: list[Any]) -> str:
    """Say which rank's group is the first wrong one, and of whom it should be."""
    for rank, groups in enumerate(zip(found, expected, strict=True)):
        for name, got, right in zip(NAMES, *groups, strict=True):
            if got != right:
                who = f"rank {rank}'s group `{name}`"
                return f"{who} contains ranks {got}, expected {right}"
    raise AssertionError("no group is wrong")


# ── C3 who makes them ───────────────────────────────────────────────────────────────


def _real(world_size: int) -> list[RunSpec]:
    proper = [s for s in range(2, world_size) if world_size % s == 0]
    return [on_ranks(real_mesh, tensor_size=size) for size in proper[-1:]]


@clause(
    "tensor_parallel.mesh",
    "C3",
    worlds=WORLDS,
    runs=lambda n: [on_ranks(draft_meshes), *_real(n)],
)
def all_make_the_same_groups(runs: Runs) -> str | None:
    """Every rank asks for the same lists in the same order; then for real."""
    n = runs.world_size
    run = runs.finished(draft_meshes)
    for size in run.values[0]["meshes"]:
        asked = [value["meshes"][size]["asked"] for value in run.values]
        _expect_alike(n, size, asked)
        _expect_one_of_each(n, size, [value["meshes"][size] for value in run.values])
    right = [value["meshes"] for value in run.values]
    for spec in _real(n):
        size = dict(spec.values)["tensor_size"]
        expected = [_right_groups(n, size, rank) for rank in range(n)]
        if [meshes[size]["groups"] for meshes in right] != expected:
            raise NotJudgedError("a rank's groups are wrong: see C2")
        found = runs.finished(spec).values
        if found != expected:
            raise _wrong_groups(n, size, found, expected)
    sizes = {size: len(mesh["asked"]) for size, mesh in right[0].items()}
    told = ", ".join(f"{count} for {size}" for size, count in sizes.items())
    return f"n = {n}: groups created, by tensor_size: {told}"


def _expect_alike(n: int, size: int, asked: list[list[list[int]]]) -> None:
    for number, one in enumerate(asked):
        if one == asked[0]:
            continue
        own_only = all(
            rank in group for rank, groups in enumerate(asked) for group in groups
        )
        how = "creates other groups than rank 0, expected the same on every rank"
        if sorted(one) == sorted(asked[0]):
            how = "creates its groups in another order than rank 0, expected the same"
        if own_only:
            how = "creates only the groups that it is in, expected all groups"
        raise NotYetError(
            f"{_with(n, size)} rank {number} {how}",
            slug="own-groups-only" if own_only else "different-order",
            evidence=[
                (
                    rank,
                    "asked for",
                    ", ".join(map(str, groups[:4]))
                    + (", …" if len(groups) > 4 else ""),
                )
                for rank, groups in enumerate(asked)
            ],
            rule="new_group is a collective: every rank must call it for every group, "
            "in the same order, also for groups that the rank is not in",
        )


def _expect_one_of_each(n: int, size: int, meshes: list[dict[str, Any]]) -> None:
    """Groups with the same members are made once, so all members have the same one."""
    start = _with(n, size)
    rule = "each call of new_group creates a new group, also for the same ranks"
    asked, where = meshes[0]["asked"], meshes[0]["where"]
    for kind, name in enumerate(NAMES):
        for rank, mesh in enumerate(meshes):
            group, number = mesh["groups"][kind], mesh["numbers"][kind]
            if group is None or not 0 <= group[0] < n:
                continue
            first = meshes[group[0]]
            if first["groups"][kind] == group and first["numbers"][kind] != number:
                raise NotYetError(
                    f"{start} `{name}` of ranks {group[0]} and {rank} comes from "
                    "different calls of new_group, expected one call for both",
                    slug="group-made-twice",
                    evidence=_numbers(meshes, kind),
                    rule=rule,
                )
    for number, members in enumerate(asked):
        if n > 1 and members in asked[:number]:
            raise NotYetError(
                f"{start} rank 0 creates {asked.count(members)} groups for "
                f"{ranks_in_words(members)}, expected one",
                slug="group-made-twice",
                evidence=tuple(
                    Evidence(
                        rank=0, state="asked for", text=str(members), where=where[call]
                    )
                    for call, one in enumerate(asked)
                    if one == members
                ),
                rule=rule,
            )


def _numbers(meshes: list[dict[str, Any]], kind: int) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(
            rank=rank,
            state="has",
            text=f"{mesh['groups'][kind]} of call #{mesh['numbers'][kind] + 1} of "
            "new_group",
            where=mesh["where"][mesh["numbers"][kind]],
        )
        for rank, mesh in enumerate(meshes)
        if mesh["numbers"][kind] is not None
    )


# ── C4 what does not fit ────────────────────────────────────────────────────────────


@clause("tensor_parallel.mesh", "C4", worlds=WORLDS, runs=[on_ranks(draft_meshes)])
def what_does_not_fit_is_refused(runs: Runs) -> str | None:
    """A ValueError, before any group was made."""
    n = runs.world_size
    run = runs.finished(draft_meshes)
    for size in run.values[0]["refused"]:
        tried = [value["refused"][size] for value in run.values]
        setting = f"tensor_size {size} on {n} rank{'s' if n > 1 else ''}"
        what = f"make_mesh with {setting}"
        rule = "raise ValueError with both numbers if comm.world_size % tensor_size"
        rule = rule if size > 0 else "look at it before you divide by it"
        expect_refusal(run, [one["raised"] for one in tried], what, rule)
        if any(one["asked"] for one in tried):
            raise NotYetError(
                f"make_mesh refused {setting} only after it had created groups, "
                "expected the check first",
                evidence=_asked(run, size),
                rule="check first, then create groups",
            )
    return None


def _asked(run: Run, size: int) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(rank, "asked for", str(value["refused"][size]["asked"]))
        for rank, value in enumerate(run.values)
    )
