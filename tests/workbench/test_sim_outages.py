"""Restarts, freezes, crashes in the middle of a call, and several partitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distlab.comm import Disk, PeerLost, ServiceContext
from distlab.runner import Cluster, RankContext
from distlab.sim import AlphaBeta, Faults, SimRun, run, run_apart

NET = AlphaBeta(alpha_s=1e-3, bytes_per_s=1e9)
CARRIERS = pytest.mark.parametrize("carrier", ["greenlets", "threads"])


# ── a rank that restarts ────────────────────────────────────────────────────────────


def lives_again(ctx: RankContext) -> Any:
    """Notes each life on its disk, synced or not; says what it finds."""
    assert ctx.disk
    if ctx.rank == 1:
        return "other"
    found = {name: ctx.disk.read(name) for name in ctx.disk.names()}
    ctx.disk.append("lives", b"1")
    ctx.disk.sync("lives")
    ctx.disk.sync_folder()
    print("life", len(ctx.disk.read("lives")))
    ctx.clock.sleep(1.0)
    return found, ctx.clock.now_s(), torch.rand(1).item()


@CARRIERS
def test_memory_is_gone_and_the_disk_stays(carrier: Any) -> None:
    faults = Faults(restart=((0, 0.25, 0.5), (0, 0.75, 1.0)))
    done = run(lives_again, 2, net=NET, faults=faults, carrier=carrier)
    found, now_s, drawn = done.values[0]
    assert (done.outcome, found, now_s) == ("finished", {"lives": b"11"}, 2.0)
    assert drawn == run(lives_again, 2, net=NET).values[0][2]
    assert done.ranks[0].output == "life 3\n"
    assert [(one.kind, one.node, one.at_ps * 1e-12) for one in done.struck] == [
        ("crash", 0, pytest.approx(0.25)),
        ("restart", 0, pytest.approx(0.5)),
        ("crash", 0, pytest.approx(0.75)),
        ("restart", 0, pytest.approx(1.0)),
    ]
    assert done.explanation.endswith(str(done.struck[-1]))


def test_who_is_done_or_killed_does_not_restart() -> None:
    done = run(lives_again, 2, faults=Faults(restart=((1, 0.5, 0.6),)))
    assert (done.outcome, done.struck) == ("finished", ())
    both = Faults(restart=((0, 0.2, 0.6),), kill={0: 0.4})
    done = run(lives_again, 2, faults=both)
    assert (done.outcome, done.ranks[0].status) == ("died", "died")
    assert [one.kind for one in done.struck] == ["crash"]


def keeps_a_promise(ctx: RankContext, synced: bool) -> Any:
    assert ctx.disk
    if "a" in ctx.disk.names():
        return ctx.disk.read("a")
    if ctx.clock.now_s() > 0.3:
        return b"nothing"
    ctx.disk.write("a", b"promised")
    if synced:
        ctx.disk.sync("a")
        ctx.disk.sync_folder()
    ctx.clock.sleep(0.3)
    return b"too late"


def test_only_what_was_synced_is_sure_to_stay() -> None:
    def left(synced: bool) -> set[bytes]:
        return {
            run(
                keeps_a_promise,
                1,
                synced,
                faults=Faults(restart=((0, 0.25, 0.5),), seed=seed),
            ).values[0]
            for seed in range(40)
        }

    assert left(True) == {b"promised"}
    found = left(False)
    assert {b"nothing", b"promised", b""} < found
    assert all(len(data) <= 8 for data in found)


def loses_its_part(ctx: RankContext) -> list[str]:
    told = []
    box = torch.zeros(1)
    for _ in range(2):
        try:
            if ctx.rank == 0:
                ctx.comm.recv(box, 1)
            else:
                ctx.clock.sleep(0.7)
                ctx.comm.send(box, 0)
            told.append("met")
        except PeerLost as error:
            told.append(f"lost {error.peer}")
    return told


@CARRIERS
def test_a_comm_does_not_come_back(carrier: Any) -> None:
    faults = Faults(restart=((1, 0.5, 0.6),))
    done = run(loses_its_part, 2, net=NET, faults=faults, carrier=carrier)
    assert done.values == [["lost 1"] * 2, ["lost 0"] * 2]


def serves_and_restarts(ctx: RankContext) -> Any:
    """Rank 0 serves from its disk; rank 1 asks until it is answered."""
    assert ctx.endpoint
    assert ctx.disk
    disk = ctx.disk
    if ctx.rank == 0:

        def handle(peer: int, message: bytes) -> bytes:
            disk.append("log", message)
            disk.sync("log")
            return disk.read("log")

        if not disk.names():
            disk.write("log", b"")
            disk.sync("log")
            disk.sync_folder()
        ctx.endpoint.serve(handle)
        ctx.clock.sleep(3.0)
        return disk.read("log")
    told: list[Any] = []
    while len([one for one in told if isinstance(one, bytes)]) < 3:
        try:
            told.append(ctx.endpoint.call(0, b"%d" % len(told), 0.5))
        except PeerLost as error:
            told.append(error.waited_s)
        ctx.clock.sleep(0.2)
    return told


def test_calls_reach_the_new_process() -> None:
    faults = Faults(restart=((0, 0.3, 0.7),))
    done = run(serves_and_restarts, 2, net=NET, faults=faults)
    assert done.values[0] == b"014"
    assert done.values[1][:2] == [b"0", b"01"]
    assert done.values[1][2:4] == [pytest.approx(2e-3), pytest.approx(2e-3)]


# ── freezing ────────────────────────────────────────────────────────────────────────


@CARRIERS
def test_a_frozen_rank_answers_late_what_has_come(carrier: Any) -> None:
    faults = Faults(freeze=((0, 0.3, 1.3),))
    done = run(serves_and_restarts, 2, net=NET, faults=faults, carrier=carrier)
    # "2" and "3" timed out at the caller, and are handled all the same.
    assert done.values[1][2] == 0.5
    assert done.values[0].startswith(b"0123")
    assert [one.at_ps * 1e-12 for one in done.struck] == pytest.approx([0.3, 1.3])


def sleeps_often(ctx: RankContext) -> list[float]:
    times = []
    for _ in range(4):
        ctx.clock.sleep(0.25)
        times.append(ctx.clock.now_s())
    return times


def test_a_frozen_rank_goes_on_when_it_thaws() -> None:
    done = run(sleeps_often, 2, faults=Faults(freeze=((0, 0.3, 0.6),)))
    assert done.values[1] == [0.25, 0.5, 0.75, 1.0]
    assert done.values[0] == pytest.approx([0.25, 0.6, 0.85, 1.1])


def test_a_process_that_restarts_is_not_frozen() -> None:
    faults = Faults(freeze=((0, 0.1, 9.0),), restart=((0, 0.2, 0.3),))
    done = run(sleeps_often, 1, faults=faults)
    assert done.values[0] == pytest.approx([0.55, 0.8, 1.05, 1.3])


def asks_the_frozen(ctx: RankContext) -> Any:
    assert ctx.endpoint
    if ctx.rank == 1:
        ctx.endpoint.serve(lambda peer, message: message)
        ctx.clock.sleep(2.0)
        return None
    ctx.clock.sleep(0.1)
    return ctx.endpoint.call(1, b"?", 0.5), ctx.clock.now_s()


def test_a_reply_that_came_while_it_was_frozen_is_in_time() -> None:
    """As after SIGSTOP: what lies in the socket is read before the clock is."""
    done = run(asks_the_frozen, 2, net=NET, faults=Faults(freeze=((0, 0.1005, 1.0),)))
    assert done.values[0] == (b"?", 1.0)


# ── several partitions ──────────────────────────────────────────────────────────────


def test_partitions_may_follow_and_overlap() -> None:
    cuts = (((0,), 0.0, 0.4), ((1, 2), 0.3, 0.8), ((3,), 0.0, 2.0))
    done = run(meets, 3, net=NET, faults=Faults(partitions=cuts[:2]))
    assert done.values[0] == pytest.approx(0.8, rel=0.1)
    done = run(meets, 4, net=NET, faults=Faults(partitions=cuts))
    assert done.values[0] == pytest.approx(2.0, rel=0.1)


def meets(ctx: RankContext) -> float:
    ctx.comm.all_reduce(torch.zeros(1))
    return ctx.clock.now_s()


# ── the store ───────────────────────────────────────────────────────────────────────


def uses_the_store(ctx: RankContext) -> list[Any]:
    assert ctx.store
    told: list[Any] = []
    for k in range(4):
        try:
            told.append(ctx.store.add("n", 1))
        except PeerLost as error:
            told.append(error.peer)
        ctx.clock.sleep(0.25)
        del k
    return told


def test_the_store_is_no_ranks_and_forgets_when_it_restarts() -> None:
    assert run(uses_the_store, 1).values == [[1, 2, 3, 4]]
    faults = Faults(restart=(("store", 0.2, 0.45),))
    assert run(uses_the_store, 1, faults=faults).values == [[1, "store", 1, 2]]
    frozen = run(uses_the_store, 1, faults=Faults(freeze=(("store", 0.2, 0.45),)))
    assert frozen.values == [[1, 2, 3, 4]]
    assert frozen.time_s == pytest.approx(1.2)
    cut = Faults(partitions=(((0, 1), 0.2, 0.45),))
    assert run(uses_the_store, 2, net=NET, faults=cut).time_s > 1.2


# ── in the middle of a call ─────────────────────────────────────────────────────────


class TwoFiles:
    """Writes two files at each call, with a sync between."""

    def __init__(self, context: ServiceContext) -> None:
        self.disk = context.disk

    def handle(self, peer: int, message: bytes) -> bytes | None:
        if message == b"names":
            return " ".join(self.disk.names()).encode()
        two_files(self.disk, message.decode())
        return b"done"


def two_files(disk: Disk, name: str) -> None:
    disk.write(f"{name}1", b"x")
    disk.sync_folder()
    disk.write(f"{name}2", b"x")
    disk.sync_folder()


def writes_twice(ctx: RankContext) -> str:
    assert ctx.endpoint
    ctx.clock.sleep(0.1)
    try:
        ctx.endpoint.call("files", b"a", 1.0)
    except PeerLost:
        ctx.clock.sleep(1.0)
    return ctx.endpoint.call("files", b"names", 1.0).decode()


def torn(seed: int) -> SimRun:
    faults = Faults(torn=(("files", 0.05, 0.5),), seed=seed)
    return run(writes_twice, 1, net=NET, faults=faults, services={"files": TwoFiles})


def test_a_service_crashes_in_the_middle_of_a_call() -> None:
    found = {torn(seed).values[0] for seed in range(30)}
    assert {"", "a1", "a1 a2"} <= found
    assert [one.kind for one in torn(0).struck] == ["crash", "restart"]
    late = Faults(torn=(("files", 0.5, 0.9),))
    done = run(writes_twice, 1, net=NET, faults=late, services={"files": TwoFiles})
    assert (done.values, done.struck) == (["a1 a2"], ())


def writes_itself(ctx: RankContext) -> list[str]:
    assert ctx.disk
    if ctx.clock.now_s() < 0.2:
        ctx.clock.sleep(0.1)
        try:
            two_files(ctx.disk, "a")
        except BaseException:
            print("it noticed")
            raise
        ctx.clock.sleep(0.1)
    return ctx.disk.names()


@CARRIERS
def test_a_rank_crashes_in_the_middle_of_an_operation(carrier: Any) -> None:
    found = set()
    for seed in range(20):
        faults = Faults(torn=((0, 0.05, 0.5),), seed=seed)
        done = run(writes_itself, 1, faults=faults, carrier=carrier)
        assert (done.outcome, done.ranks[0].output) == ("finished", "")
        found.add(tuple(done.values[0]))
    assert {(), ("a1",), ("a1", "a2")} <= found


# ── apart ───────────────────────────────────────────────────────────────────────────


def test_services_and_outages_travel(cluster: Cluster) -> None:
    faults = Faults(
        restart=(("files", 0.05, 0.2),),
        freeze=((0, 0.01, 0.02),),
        partitions=(((0, "files"), 0.0, 0.01),),
    )
    how: dict[str, Any] = {
        "net": NET,
        "faults": faults,
        "services": {"files": TwoFiles},
    }
    here = run(writes_twice, 1, **how)
    apart = run_apart(cluster, writes_twice, 1, **how)
    assert apart.struck == here.struck != ()
    assert apart.trace_hash == here.trace_hash
    assert apart.values == here.values
