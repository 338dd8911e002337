"""The short way through sendrecv is the long one, only shorter."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from distlab.comm import Comm
from distlab.runner import RankContext
from distlab.sim import AlphaBeta, SimRun, run
from distlab.sim.comm import SimComm
from distlab.sim.fast import FastExchange
from distlab.sim.payload import Sized

NET = AlphaBeta(alpha_s=2e-6, bytes_per_s=1e9)
Step = tuple[str, int, int, int]  # what, how many elements, and two offsets of ranks


def long_way(patch: pytest.MonkeyPatch) -> None:
    """From now on every sendrecv goes through `exchange`."""
    patch.setattr(FastExchange, "_pair_of", lambda self, dst, src: None)


def counted(patch: pytest.MonkeyPatch) -> list[int]:
    """The rank of every sendrecv that took the long way."""
    ranks: list[int] = []
    exchange = SimComm.exchange

    def counting(self: SimComm, *args: Any) -> None:
        ranks.append(self.rank)
        exchange(self, *args)

    patch.setattr(SimComm, "exchange", counting)
    return ranks


def perform(context: RankContext, plan: list[list[Step]], sized: bool) -> list[Any]:
    """Go through a plan: what each rank has received and drawn, and at what time."""
    comm, seen = context.comm, []
    n, rank = comm.world_size, comm.rank
    for what, size, one, other in plan[rank]:
        dst, src = (rank + one) % n, (rank + other) % n
        sent: Any = Sized(size) if sized else torch.full((size,), float(rank))
        box: Any = Sized(size) if sized else torch.zeros(size)
        if what == "any":
            seen.append(comm.recv(box))
        elif what == "draw":
            seen.append(torch.randn(one).sum().item())
        elif what == "sleep":
            context.clock.sleep(1e-6 * one)
        elif what == "grad mode":
            torch.set_grad_enabled(bool(one % 2))
        else:
            try:
                talk(comm, what, sent, dst, box, src)
            except RuntimeError as error:
                if rank % 2:
                    raise
                seen.append(str(error))
        seen += [sized or box.sum().item(), comm.time(), torch.is_grad_enabled()]
    return [*seen, context.traffic.messages, context.traffic.sent_bytes]


def talk(comm: Comm, what: str, sent: Any, dst: int, box: Any, src: int) -> None:
    """One call that names its peers."""
    if what == "sendrecv":
        comm.sendrecv(sent, dst, box, src)
    elif what == "limited":
        comm.sendrecv(sent, dst, box, src, timeout_s=1.0)
    elif what == "too large":
        comm.sendrecv(sent, dst, box if type(box) is Sized else box[1:], src)
    elif what == "send":
        comm.send(sent, dst)
    elif what == "recv":
        comm.recv(box, src)
    else:
        comm.isend(sent, dst)


def a_plan(seed: int, n: int) -> list[list[Step]]:
    """Mostly exchanges in which all agree; now and then one does something else."""
    draw = random.Random(seed)
    oddities = ["limited", "send", "recv", "any", "isend", "too large", "sendrecv"]
    oddity_share = draw.choice([0.0, 0.0, 0.02, 0.1])
    plan: list[list[Step]] = [[] for _ in range(n)]
    for _ in range(draw.randrange(1, 15)):
        shift, size = draw.randrange(1, n), draw.choice([1, 1, 5, 300])
        for rank, steps in enumerate(plan):
            if draw.random() < 0.15:
                what = draw.choice(["draw", "sleep", "grad mode"])
                steps.append((what, 1, draw.choice([1, 2, 3, 624]), 0))
            if draw.random() < oddity_share:
                one, other = draw.randrange(1, n), draw.randrange(1, n)
                steps.append((draw.choice(oddities), size, one, other))
            else:
                mine = size + (rank % 3 if draw.random() < 0.1 else 0)
                steps.append(("sendrecv", mine, shift, -shift))
    return plan


def story(done: SimRun) -> dict[str, Any]:
    """All that can be seen of a run."""
    ranks = [
        (r.status, r.value, r.failed_s, str(r.error and r.error.message), r.waiting)
        for r in done.ranks
    ]
    run_ = (done.outcome, done.waits_for, done.cycle, done.seconds, done.explanation)
    return {"ranks": ranks, "run": run_, "trace": done.trace_hash, "links": done.links}


@pytest.mark.parametrize("sized", [False, True], ids=["tensors", "sizes"])
def test_both_ways_and_both_carriers_tell_one_story(
    sized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: dict[str, Any] = {"net": NET, "journal": False}
    for seed in range(60):
        n = 2 + seed % 5
        args = (a_plan(seed, n), sized)
        short = story(run(perform, n, *args, **kinds))
        threads = story(run(perform, n, *args, carrier="threads", **kinds))
        with monkeypatch.context() as patch:
            long_way(patch)
            long = story(run(perform, n, *args, **kinds))
        assert long == short == threads, seed


def test_the_plans_end_in_all_ways() -> None:
    outcomes = set()
    for seed in range(60):
        n = 2 + seed % 5
        outcomes.add(run(perform, n, a_plan(seed, n), False, journal=False).outcome)
    assert outcomes == {"finished", "deadlock", "raised"}


@pytest.mark.parametrize("sized", [False, True], ids=["tensors", "sizes"])
def test_a_ring_takes_the_short_way(
    sized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_the_long_way = counted(monkeypatch)
    plan = [[("sendrecv", 4, 1, -1)] * 6 for _ in range(5)]
    done = run(perform, 5, plan, sized, journal=False)
    assert done.outcome == "finished"
    assert len(done.trace) == 30
    assert on_the_long_way == []


def test_what_is_special_takes_the_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    on_the_long_way = counted(monkeypatch)
    plan = [[("limited", 4, 1, -1), ("sendrecv", 4, 1, -1)] for _ in range(3)]
    run(perform, 3, plan, False, journal=False).require_finished()
    assert sorted(on_the_long_way) == [0, 1, 2]
    run(perform, 3, plan, False, journal=False, eager_bytes=8).require_finished()
    assert sorted(on_the_long_way) == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_pairs_of_unlike_kinds_in_turn() -> None:
    """An address looked up for one call is not used by the next one."""

    def program(context: RankContext) -> list[float]:
        comm, boxes = context.comm, []
        right, left = (comm.rank + 1) % 3, (comm.rank - 1) % 3
        for step in range(4):
            box = torch.full((3,), -1.0)
            mine = torch.full((3,), float(comm.rank))
            kinds: Any = (Sized(12), Sized(12)) if step % 2 else (mine, box)
            comm.sendrecv(kinds[0], right, kinds[1], left)
            boxes.append(box[0].item())
        return boxes

    done = run(program, 3, journal=False)
    assert done.values[1] == [0.0, -1.0, 0.0, -1.0]


def test_a_tensor_whose_memory_was_given_back() -> None:
    """It has a size and no address: nothing is read from there."""

    def program(context: RankContext) -> None:
        comm = context.comm
        empty, box = torch.ones(4), torch.ones(4)
        empty.untyped_storage().resize_(0)
        comm.sendrecv(
            empty if comm.rank else box, 1 - comm.rank, torch.ones(4), 1 - comm.rank
        )

    with pytest.raises(Exception, match=r"storage|memory|access|data"):
        run(program, 2, journal=False).require_finished()


def test_a_receive_from_anyone_takes_the_exchange_that_was_posted_first() -> None:
    def program(context: RankContext) -> list[int]:
        comm, box = context.comm, torch.ones(1)
        context.clock.sleep([5e-6, 2e-6, 1e-6][comm.rank])
        if comm.rank:
            comm.sendrecv(torch.ones(1), 0, box, 0)
            return []
        order = [comm.recv(box), comm.recv(box)]
        comm.send(box, 1)
        comm.send(box, 2)
        return order

    assert run(program, 3, journal=False).values[0] == [2, 1]


@pytest.mark.parametrize("count", [1, 2, 16, 624, 1248, 15])
def test_numbers_drawn_between_exchanges_are_each_ranks_own(count: int) -> None:
    """624 numbers are all that the generator makes at once, and 1 of a pair stays."""

    def program(context: RankContext) -> list[float]:
        comm, drawn = context.comm, []
        right, left = (comm.rank + 1) % 4, (comm.rank - 1) % 4
        for step in range(9):
            if step % 4 != 1:  # in some turns nothing is drawn
                drawn.append(torch.randn(count).sum().item())
            comm.sendrecv(torch.ones(1), right, torch.ones(1), left)
        return drawn

    alone = []
    for rank in range(4):
        own = torch.Generator().manual_seed(rank)
        alone.append([torch.randn(count, generator=own).sum().item() for _ in range(7)])
    assert list(run(program, 4, journal=False).values) == alone
