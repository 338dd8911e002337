"""What goes wrong in a simulated run: the same each time, and named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distlab.comm import PeerLost
from distlab.runner import Cluster, RankContext
from distlab.sim import AlphaBeta, Faults, run, run_apart
from tests.workbench.golden import Golden
from tests.workbench.refusals import refusal

NET = AlphaBeta(alpha_s=3e-6, bytes_per_s=2e9)
ONE_S = NET.alpha_s + 8 / NET.bytes_per_s  # a message of one number


def zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.float64)


def counting(ctx: RankContext, count: int) -> list[float]:
    """Rank 0 sends 0, 1, 2 … to rank 1."""
    seen = []
    for k in range(count):
        if ctx.rank == 0:
            ctx.comm.send(zeros(1) + k, 1)
        elif ctx.rank == 1:
            box = zeros(1)
            try:
                ctx.comm.recv(box, 0)
            except PeerLost as error:
                return [*seen, -1.0, error.waited_s]
            seen.append(float(box))
    return seen


@pytest.mark.parametrize("journal", [True, False])
@pytest.mark.parametrize("eager_bytes", [0, 64])
def test_a_lost_message_is_named_and_none_takes_its_place(
    eager_bytes: int, journal: bool
) -> None:
    faults = Faults(loss=0.3, seed=2)
    done = run(counting, 2, 20, faults=faults, eager_bytes=eager_bytes, journal=journal)
    first = done.lost[0]
    waits_for = {1: (0,)} if eager_bytes else {0: (1,), 1: (0,)}
    assert (done.outcome, done.waits_for) == ("deadlock", waits_for)
    assert (first.src, first.dst) == (0, 1)
    assert len(done.trace) >= first.number
    assert f"; message {first.number} " in done.explanation
    again = run(
        counting, 2, 20, faults=faults, eager_bytes=eager_bytes, journal=journal
    )
    assert (again.lost, again.trace_hash) == (done.lost, done.trace_hash)


def test_only_lost_messages_are_missing() -> None:
    assert run(counting, 2, 20, faults=Faults(loss=0.0)).lost == ()
    assert run(counting, 2, 5, faults=Faults(loss=1.0)).lost[0].number == 1


def test_a_second_copy_is_known_by_its_number() -> None:
    done = run(counting, 2, 50, net=NET, faults=Faults(duplicate=0.4, seed=1))
    assert done.values[1] == [float(k) for k in range(50)]
    assert 5 < done.num_duplicates < 45
    everything = run(counting, 2, 50, faults=Faults(duplicate=1.0))
    assert everything.num_duplicates == 50


def test_a_straggler_slows_its_messages() -> None:
    done = run(counting, 2, 1, net=NET, faults=Faults(straggler={1: 5.0}))
    assert done.time_s == pytest.approx(NET.alpha_s + 5 * 8 / NET.bytes_per_s)


def reduces(ctx: RankContext) -> None:
    ctx.comm.all_reduce(zeros(600))


def test_a_straggler_slows_a_collective() -> None:
    normal, slow = (
        run(reduces, 4, net=NET, faults=Faults(straggler=s)).time_s
        for s in ({}, {2: 3.0})
    )
    bytes_s = 6 / 4 * 4800 / NET.bytes_per_s
    assert slow - normal == pytest.approx(2 * bytes_s)


@pytest.mark.parametrize("carrier", ["greenlets", "threads"])
def test_who_waits_for_a_dead_rank_is_told(carrier: Any) -> None:
    at_s = 4.5 * ONE_S
    faults = Faults(kill={0: at_s})
    done = run(counting, 2, 99, net=NET, faults=faults, carrier=carrier)
    first, second = done.ranks
    assert (done.outcome, first.status, second.status) == ("died", "died", "finished")
    assert second.value[:4] == [0.0, 1.0, 2.0, 3.0]
    assert done.explanation.startswith("rank 0 ")
    assert "SIGKILL" in done.explanation
    assert first.failed_s == pytest.approx(at_s)


def test_who_has_finished_cannot_be_killed() -> None:
    assert run(counting, 2, 3, faults=Faults(kill={1: 1.0})).outcome == "finished"


def test_a_dead_rank_ends_collectives_and_groups() -> None:
    done = run(meets_late, 3, faults=Faults(kill={2: 0.5}))
    assert [record.status for record in done.ranks] == ["finished", "finished", "died"]
    assert done.values[:2] == ["lost", "lost"]


def meets_late(ctx: RankContext) -> str:
    group = ctx.comm.new_group([0, 1, 2])
    assert group is not None
    if ctx.rank == 2:
        ctx.comm.recv(zeros(1), 0)
    try:
        group.all_reduce(zeros(1))
    except PeerLost:
        return "lost"
    return "met"


def test_a_late_rank_starts_late() -> None:
    done = run(counting, 2, 1, net=NET, faults=Faults(late={1: 0.25}))
    assert done.trace[0].start_ps == 250_000_000_000
    assert done.values[1] == [0.0]


def test_a_partition_heals() -> None:
    from_s, to_s = 2.5 * ONE_S, 1.0
    cut = Faults(partitions=(((0,), from_s, to_s),))
    done = run(counting, 3, 5, net=NET, faults=cut)
    starts_s = [message.start_ps * 1e-12 for message in done.trace]
    assert done.values[1] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert starts_s[:3] == pytest.approx([0, ONE_S, 2 * ONE_S])
    assert starts_s[3:] == pytest.approx([to_s, to_s + ONE_S])
    inside = Faults(partitions=(((0, 1), from_s, to_s),))
    assert run(counting, 3, 5, net=NET, faults=inside).time_s < 1e-3


def test_a_partition_holds_up_a_collective() -> None:
    cut = Faults(partitions=(((0,), 0.0, 1.0),))
    assert run(reduces, 4, net=NET, faults=cut).time_s > 1.0


def test_faults_travel_to_a_process_of_their_own(cluster: Cluster) -> None:
    faults = Faults(
        loss=0.3, seed=2, straggler={1: 2.0}, partitions=(((0,), 0.0, 1.0),)
    )
    how: dict[str, Any] = {"net": NET, "faults": faults, "eager_bytes": 64}
    here = run(counting, 2, 20, carrier="threads", **how)
    apart = run_apart(cluster, counting, 2, 20, carrier="threads", **how)
    assert apart.lost == here.lost != ()
    assert apart.trace_hash == here.trace_hash
    assert (apart.carrier, apart.explanation) == ("threads", here.explanation)


# ── eager messages ──────────────────────────────────────────────────────────────────


def all_send_first(ctx: RankContext, count: int) -> list[float]:
    n = ctx.world_size
    ctx.comm.send(zeros(count) + ctx.rank, (ctx.rank + 1) % n)
    box = zeros(count)
    ctx.comm.recv(box, (ctx.rank - 1) % n)
    return [float(box[0]), ctx.comm.time()]


def test_small_messages_go_off_by_themselves() -> None:
    assert run(all_send_first, 3, 8).outcome == "deadlock"
    done = run(all_send_first, 3, 8, net=NET, eager_bytes=64)
    one_s = NET.alpha_s + 64 / NET.bytes_per_s
    assert done.values == [[float((r - 1) % 3), pytest.approx(one_s)] for r in range(3)]
    assert run(all_send_first, 3, 9, eager_bytes=64).outcome == "deadlock"


def changes_early(ctx: RankContext, early: bool) -> float:
    box = zeros(1)
    if ctx.rank == 0:
        work = ctx.comm.isend(box, 1)
        if early:
            box += 1
        work.wait()
        box += 1
    else:
        ctx.comm.recv(box, 0)
    return float(box)


def test_a_tensor_that_changes_before_wait_is_exposed() -> None:
    done = run(changes_early, 2, True, eager_bytes=64)
    assert done.outcome == "raised"
    assert "#1 (isend → 1)" in done.explanation
    assert run(changes_early, 2, False, eager_bytes=64).values == [1.0, 0.0]


# ── what is refused ─────────────────────────────────────────────────────────────────


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"straggler": {3: 0.0}}, r"straggler.*rank 3\b.*\b0\.0"),
    ({"straggler": {3: float("nan")}}, r"straggler.*rank 3\b.*\bnan"),
    ({"kill": {3: -1.0}}, r"kill.*rank 3\b.* -1\.0 s"),
    ({"late": {3: float("inf")}}, r"late.*rank 3\b.* inf s"),
    ({"loss": 1.5}, r"loss.*\b1\.5\b"),
    ({"duplicate": -0.1}, r"duplicate.* -0\.1\b"),
    ({"partitions": (((), 0.0, 1.0),)}, "partition"),
    ({"partitions": (((1, 1), 0.0, 1.0),)}, "partition"),
    ({"partitions": (((1,), 2.0, 1.0),)}, r"partition.*\b1\.0 s"),
    ({"partitions": (((1,), -2.0, 1.0),)}, r"partition.* -2\.0 s"),
]


@pytest.mark.parametrize(("facts", "named"), IMPOSSIBLE)
def test_faults_that_cannot_be(facts: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Faults(**facts)


# There are the ranks 0 … 3.
ABSENT: list[tuple[dict[str, Any], str]] = [
    ({"straggler": {4: 2.0}}, r"straggler.*rank 4\b.*\b0 … 3\b"),
    ({"kill": {-1: 1.0}}, r"kill.*rank -1\b.*\b0 … 3\b"),
    ({"late": {9: 1.0}}, r"late.*rank 9\b.*\b0 … 3\b"),
    ({"partitions": (((4,), 0.0, 1.0),)}, r"partition.*rank 4\b.*\b0 … 3\b"),
]


@pytest.mark.parametrize(("facts", "named"), ABSENT)
def test_faults_of_ranks_that_are_not_there(facts: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        run(counting, 4, 1, faults=Faults(**facts))


def test_how_refusals_are_worded(golden: Golden) -> None:
    told = [refusal(ValueError, Faults, **facts) for facts, _ in IMPOSSIBLE]
    for facts, _ in ABSENT:
        faults = Faults(**facts)
        told.append(refusal(ValueError, run, counting, 4, 1, faults=faults))
    golden("sim/faults-that-cannot-be", "\n".join(told))


def test_other_numbers_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"eager_bytes.* -1\b"):
        run(counting, 2, 1, eager_bytes=-1)
    with pytest.raises(ValueError, match=r"wall_limit_s.* 0\.0\b"):
        run(counting, 2, 1, wall_limit_s=0.0)
    with pytest.raises(ValueError, match=r"turn_limit_s.* -1\.0\b"):
        run(counting, 2, 1, turn_limit_s=-1.0)
    with pytest.raises(ValueError, match=r"payload\b.*\bbytes\b"):
        run(counting, 2, 1, payload="bytes")  # type: ignore[arg-type]
