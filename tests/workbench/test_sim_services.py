"""Clock, Store and Endpoint in virtual time, and what faults do to them."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch

from distlab.comm import PeerLost, RealClock
from distlab.runner import RankContext
from distlab.sim import AlphaBeta, Faults, run

NET = AlphaBeta(alpha_s=1e-3, bytes_per_s=1e9)


def computes(ctx: RankContext, seconds: float) -> list[float]:
    ctx.clock.sleep(seconds)
    ctx.comm.barrier()
    return [ctx.clock.now_s(), ctx.comm.time()]


def test_compute_takes_virtual_time() -> None:
    started = time.monotonic()
    done = run(computes, 4, 3600.0, net=NET)
    assert done.values == [[3600.002, 3600.002]] * 4
    slow = run(computes, 4, 10.0, net=NET, faults=Faults(straggler={2: 2.5}))
    assert slow.values[0] == [25.002, 25.002]
    assert time.monotonic() - started < 3600
    with pytest.raises(Exception, match=r"-1\.0\b.*\bseconds\b"):
        run(computes, 1, -1.0).require_finished()


def test_the_real_clock_goes_on() -> None:
    clock = RealClock()
    before = clock.now_s()
    clock.sleep(0.001)
    assert clock.now_s() > before


# ── calls ───────────────────────────────────────────────────────────────────────────


def counter(ctx: RankContext, calls: int, timeout_s: float) -> list[Any]:
    """Rank 0 counts what it is asked; rank 1 asks again and again."""
    assert ctx.endpoint
    handled: list[bytes] = []

    def handle(peer: int, message: bytes) -> bytes:
        print("handled", peer)
        handled.append(message)
        return str(len(handled)).encode()

    if ctx.rank == 0:
        ctx.endpoint.serve(handle)
        ctx.clock.sleep(100.0)
        return handled
    replies: list[Any] = []
    for k in range(calls):
        try:
            replies.append(ctx.endpoint.call(0, b"%d" % k, timeout_s))
        except PeerLost as error:
            replies.append(round(error.waited_s, 9))
    return replies


def test_a_call_takes_a_message_each_way() -> None:
    done = run(counter, 2, 3, 1.0, net=NET)
    assert done.values == [[b"0", b"1", b"2"], [b"1", b"2", b"3"]]
    assert done.ranks[0].output == "handled 1\n" * 3
    assert [m.tag for m in done.trace] == [-1] * 6
    assert done.trace[2].start_ps * 1e-12 == pytest.approx(2e-3 + 2e-9)


def test_a_lost_call_times_out() -> None:
    done = run(counter, 2, 40, 0.5, net=NET, faults=Faults(loss=0.2, seed=1))
    waited = [reply for reply in done.values[1] if isinstance(reply, float)]
    assert waited
    assert set(waited) == {0.5}
    assert len(waited) < 40
    # Some were handled, and only the reply was lost.
    assert len(done.values[0]) > 40 - len(waited)
    assert done.outcome == "finished"


def test_a_duplicate_call_is_delivered_twice() -> None:
    done = run(counter, 2, 3, 1.0, net=NET, faults=Faults(duplicate=1.0))
    assert sorted(done.values[0]) == [b"0", b"0", b"1", b"1", b"2", b"2"]
    assert len(done.values[1]) == 3
    assert done.num_duplicates == 3 + 6


def test_a_partition_heals() -> None:
    cut = Faults(partitions=(((0,), 0.0, 1.0),))
    done = run(counter, 2, 4, 0.4, net=NET, faults=cut)
    assert done.values[1] == [0.4, 0.4, 0.4, b"1"]


@pytest.mark.parametrize(("at_s", "waited_s"), [(0.5, 0.3), (0.1, 2e-3)])
def test_a_dead_server_is_known_at_once(at_s: float, waited_s: float) -> None:
    """Before its reply, or already when the call arrives."""
    done = run(asks_a_dead_one, 2, net=NET, faults=Faults(kill={0: at_s}))
    assert done.values[1] == pytest.approx(waited_s, rel=1e-3)


def asks_a_dead_one(ctx: RankContext) -> Any:
    assert ctx.endpoint
    if ctx.rank == 0:
        ctx.clock.sleep(10.0)
        return None
    ctx.clock.sleep(0.2)
    try:
        ctx.endpoint.call(0, b"?", 5.0)
    except PeerLost as error:
        return error.waited_s


def serves_late_or_badly(ctx: RankContext) -> Any:
    assert ctx.endpoint
    endpoint = ctx.endpoint

    def handle(peer: int, message: bytes) -> bytes:
        if message == b"wait":
            ctx.comm.barrier()
        raise KeyError(message.decode())

    if ctx.rank == 0:
        ctx.clock.sleep(0.1)
        endpoint.serve(handle)
        ctx.clock.sleep(0.1)
        return None
    told = []
    for message in (b"momentum", b"wait"):
        try:
            endpoint.call(0, message, 1.0)
        except RuntimeError as error:
            told.append(str(error))
    return told


def test_a_handler_that_fails_is_its_callers_error() -> None:
    done = run(serves_late_or_badly, 2, net=NET)
    first, second = done.values[1]
    assert first.startswith("rank 0 ")
    assert first.endswith("KeyError: 'momentum'")
    assert "RuntimeError: " in second


def nobody_serves(ctx: RankContext, peer: int) -> None:
    assert ctx.endpoint
    if ctx.rank == 1:
        ctx.endpoint.call(peer, b"?", float("inf"))


def test_calls_that_nobody_answers() -> None:
    done = run(nobody_serves, 2, 0)
    assert (done.outcome, done.waits_for) == ("deadlock", {1: (0,)})
    absent = run(nobody_serves, 2, 5)
    assert absent.outcome == "raised"
    assert re.search(r"\b5\b.*\b0 … 1\b", absent.explanation)


# ── the store ───────────────────────────────────────────────────────────────────────


def meets_in_the_store(ctx: RankContext) -> list[Any]:
    assert ctx.store
    store, n = ctx.store, ctx.world_size
    store.set(f"address{ctx.rank}", b"host%d" % ctx.rank)
    store.wait([f"address{r}" for r in range(n)])
    first = store.compare_set("leader", b"", b"%d" % ctx.rank)
    place = store.add("places", 1)
    if ctx.rank == n - 1:
        ctx.clock.sleep(1.0)
        store.set("go", b"!")
    return [store.get(f"address{n - 1}"), first, place, store.get("go")]


@pytest.mark.parametrize("faults", [Faults(), Faults(loss=0.5, duplicate=0.5)])
def test_ranks_meet_in_the_store(faults: Faults) -> None:
    done = run(meets_in_the_store, 4, net=NET, faults=faults)
    assert [value[0] for value in done.values] == [b"host3"] * 4
    assert {value[1] for value in done.values} == {b"0"}
    assert sorted(value[2] for value in done.values) == [1, 2, 3, 4]
    assert [value[3] for value in done.values] == [b"!"] * 4
    assert done.time_s > 1.0


def waits_for_a_key(ctx: RankContext, timeout_s: float | None) -> Any:
    assert ctx.store
    if ctx.rank == 0:
        ctx.clock.sleep(0.3)
        return None
    try:
        return ctx.store.get("never", timeout_s=timeout_s)
    except PeerLost as error:
        return error.waited_s


def test_waiting_for_a_key_that_never_comes() -> None:
    assert run(waits_for_a_key, 2, 0.25).values[1] == 0.25
    done = run(waits_for_a_key, 2, None)
    assert (done.outcome, done.waits_for) == ("deadlock", {1: ()})
    waiting = done.ranks[1].waiting
    assert waiting is not None
    assert waiting["op"] == "store.get"
    killed = run(waits_for_a_key, 2, None, faults=Faults(kill={"store": 0.1}))
    assert killed.values[1] == pytest.approx(0.1)
    outlived = run(waits_for_a_key, 2, 0.25, faults=Faults(kill={0: 0.1}))
    assert outlived.values[1] == 0.25


def test_a_partition_delays_the_store() -> None:
    cut = Faults(partitions=(((0,), 0.0, 2.0),))
    assert run(meets_in_the_store, 4, net=NET, faults=cut).time_s > 3.0


def adds_to_a_word(ctx: RankContext) -> None:
    assert ctx.store
    ctx.store.set("word", b"seven")
    ctx.store.add("word", 1)


def test_only_numbers_can_be_added_to() -> None:
    done = run(adds_to_a_word, 1)
    assert done.outcome == "raised"
    assert "'word'" in done.explanation


def times_out_then_reuses(ctx: RankContext) -> float:
    """A timer of a call that is over says nothing about the next one."""
    box = torch.zeros(1)
    if ctx.rank == 0:
        ctx.comm.recv(box, 1, timeout_s=5.0)
        ctx.comm.recv(box, 1)
    else:
        ctx.comm.send(box, 0)
        ctx.clock.sleep(60.0)
        ctx.comm.send(box + 1, 0)
    return float(box)


def test_an_old_timer_does_not_ring() -> None:
    done = run(times_out_then_reuses, 2, net=NET, journal=False)
    assert (done.outcome, done.values[0]) == ("finished", 1.0)
