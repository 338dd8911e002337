"""Who waits for any of several is stuck only if all of those are."""

from __future__ import annotations

import pytest
import torch

from distlab.comm import ANY
from distlab.runner import RankContext
from distlab.sim import run
from distlab.sim.knots import find_knot, tied_up


@pytest.mark.parametrize(
    ("waits_for", "any_of", "tied", "cycle"),
    [
        # The pictures at the top of the module.
        ({0: (1, 2), 1: (0,), 2: (0,)}, {0}, {0, 1, 2}, (0, 1)),
        ({0: (1, 2), 1: (0,)}, {0}, set(), ()),
        # The same with a rank that waits for both: one is enough to hold it.
        ({0: (1, 2), 1: (0,)}, set(), {0, 1}, (0, 1)),
        # A chain into a knot, and a chain that ends at a rank that moves.
        ({0: (1,), 1: (2,), 2: (1,), 3: (4,)}, set(), {0, 1, 2}, (1, 2)),
        # Two alternatives in two circles: both hold.
        ({0: (1, 3), 1: (2,), 2: (1,), 3: (4,), 4: (3,)}, {0}, {0, 1, 2, 3, 4}, (1, 2)),
        # Something nobody awaits (a timer, a message under way) holds nobody.
        ({0: (), 1: (0,)}, set(), set(), ()),
    ],
)
def test_who_is_tied_up(
    waits_for: dict[int, tuple[int, ...]],
    any_of: set[int],
    tied: set[int],
    cycle: tuple[int, ...],
) -> None:
    assert tied_up(waits_for, any_of) == tied
    assert find_knot(waits_for, any_of) == cycle


def all_from_anyone(ctx: RankContext, last_leaves: bool) -> None:
    box = torch.zeros(1)
    if ctx.rank == 0:
        ctx.comm.recv(box, ANY)
    elif not (last_leaves and ctx.rank == ctx.world_size - 1):
        ctx.comm.recv(box, 0)


def test_a_knot_is_a_circle_and_a_way_out_is_none() -> None:
    knot = run(all_from_anyone, 4, False)
    assert (knot.outcome, knot.cycle) == ("deadlock", (0, 1))
    assert {r.waiting["op"] for r in knot.ranks if r.waiting} == {"recv"}
    way_out = run(all_from_anyone, 4, True)
    assert (way_out.outcome, way_out.cycle) == ("deadlock", ())
    assert way_out.waits_for[0] == (1, 2, 3)
    assert [record.status for record in way_out.ranks] == [
        *["waiting"] * 3,
        "finished",
    ]


def test_a_large_ring_is_looked_through_at_once() -> None:
    waits_for = {rank: ((rank + 1) % 4096,) for rank in range(4096)}
    assert find_knot(waits_for, ()) == tuple(range(4096))
