"""Sockets between processes: overlap, threads, losses, and the verdicts of gloo.

The clocks here only keep a hang from hanging the suite; nothing measures speed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from distlab.comm import PeerLost, TcpComm
from distlab.comm.tcp.engine import ExchangeDriver
from distlab.comm.tcp.poll import Portable
from distlab.runner import Cluster, Limits, Run
from tests.corpora.programs import hangs
from tests.corpora.programs.judge import verdict
from tests.workbench.conformance import overlap
from tests.workbench.conformance.meeting import ranks
from tests.workbench.naming import named, numbers

LIMITS = Limits(seconds=30)
JUDGED = [
    (hangs.ring_of_sends, 3),
    (hangs.waits_before_receiving, 2),
    (hangs.wrong_tag, 2),
    (hangs.any_of_nobody, 3),
    (hangs.sendrecv_one_leaves_out, 3),
    (hangs.different_collectives, 3),
    (hangs.subgroup_hangs, 3),
    (hangs.gives_up_then_goes_on, 2),
    (hangs.one_raises, 3),
    (hangs.odd_even, 5),
]


def on_tcp(cluster: Cluster, program: Any, n: int, *args: Any, **how: Any) -> Run:
    return cluster.run(program, n, *args, backend="tcp", limits=LIMITS, **how)


# ── the same verdict ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("program", "n"), JUDGED, ids=lambda case: getattr(case, "__name__", str(case))
)
def test_a_hang_is_judged_as_on_gloo(cluster: Cluster, program: Any, n: int) -> None:
    """Who waits for whom, in which line: the second thread of a rank is not counted."""
    gloo = cluster.run(program, n, limits=LIMITS)
    tcp = on_tcp(cluster, program, n)
    for what in ("outcome", "waits_for", "cycle", "values"):
        assert getattr(tcp, what) == getattr(gloo, what)
    assert [r.status for r in tcp.ranks] == [r.status for r in gloo.ranks]
    assert verdict(tcp) == verdict(gloo)


# ── while a rank does not wait ──────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("program", "n", "expected"),
    [
        (overlap.irecv_and_compute, 2, [True, True]),
        (overlap.isend_and_compute, 2, [1.0, 1.0]),
        (overlap.reduce_and_compute, 3, [1.0, 3.0, 3.0]),
    ],
)
def test_what_is_under_way_goes_on_while_a_rank_computes(
    cluster: Cluster, tmp_path: Path, program: Any, n: int, expected: list[Any]
) -> None:
    run = on_tcp(cluster, program, n, str(tmp_path))
    assert run.require_finished().values == expected


def test_threads_of_a_rank_may_wait_at_once(cluster: Cluster) -> None:
    run = on_tcp(cluster, overlap.threads_wait_at_once, 2)
    assert run.require_finished().values[0] == [1.0, 2.0, 3.0, 4.0]
    run = on_tcp(cluster, overlap.thread_waits_while_another_sends, 2)
    assert run.require_finished().values[0] == [5.0]


@pytest.mark.parametrize("n", [2, 4])
def test_receives_from_anyone_and_from_one_take_turns(cluster: Cluster, n: int) -> None:
    got = on_tcp(cluster, overlap.any_and_one, n).require_finished().values[0]
    assert len(got) == 20 * (n - 1)
    assert all(value == src + 10 * turn for src, value, turn in got)


def test_a_wish_that_is_read_while_sending_is_answered_once(cluster: Cluster) -> None:
    run = on_tcp(cluster, overlap.isend_to_one_who_takes_any, 2)
    assert run.require_finished().values == [5.0, 6.0]


def test_tensors_of_inference_mode_are_reduced(cluster: Cluster) -> None:
    run = on_tcp(cluster, overlap.in_inference_mode, 3)
    assert run.require_finished().values == [4000.0] * 3


# ── losses and misfits ──────────────────────────────────────────────────────────────


def test_a_death_anywhere_ends_a_collective_everywhere(cluster: Cluster) -> None:
    told: dict[int, Any] = {}
    run = on_tcp(
        cluster, overlap.a_stranger_to_the_ring_dies, 4, on_report=told.__setitem__
    )
    assert run.outcome == "died"
    assert told == {rank: [rank, None] for rank in range(3)}


def test_giving_up_a_group_leaves_the_world_as_it_is(cluster: Cluster) -> None:
    run = on_tcp(cluster, overlap.a_group_is_given_up, 3)
    assert run.require_finished().values == [[1, None, 3.0], [0, None, 3.0], [3.0]]


def test_what_does_not_fit_is_an_error_with_both_sizes(cluster: Cluster) -> None:
    run = on_tcp(cluster, overlap.too_long_a_message, 2)
    sent, received = run.require_finished().values
    assert sent == ""
    assert named(received, 20, 16)
    differ = on_tcp(cluster, overlap.sizes_differ, 2)
    assert [record.status for record in differ.ranks] == ["raised"] * 2
    first = differ.primary()
    assert first is not None
    assert first.error is not None
    assert first.error.type == "RuntimeError"
    assert len(numbers(first.error.message)) == 2  # the sizes


# ── in one process ──────────────────────────────────────────────────────────────────


def test_who_ends_as_it_should_spoils_nothing() -> None:
    """Rank 0 is through first and gone; the others' collective ends all the same."""

    def live(comm: TcpComm) -> list[float]:
        box = torch.full((3,), 7.0 - comm.rank)
        comm.broadcast(box, 0)
        if comm.rank == 0:
            comm.close()
        return box.tolist()

    for _ in range(10):
        assert ranks(live, 5) == [[7.0] * 3] * 5


def test_who_waits_for_one_that_has_closed_is_told() -> None:
    def live(comm: TcpComm) -> int | None:
        if comm.rank == 0:
            comm.close()
            comm.close()
        with pytest.raises(PeerLost) as lost:
            comm.recv(torch.zeros(1), 1 - comm.rank)
        return lost.value.peer

    assert ranks(live, 2) == [1, 0]


def test_it_works_where_there_is_no_epoll(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distlab.comm.tcp.engine.poller", Portable)

    def live(comm: TcpComm) -> float:
        box = torch.ones(200_000)
        work = comm.all_reduce(box, async_op=True)
        assert work is not None
        work.wait()
        return float(box.sum())

    assert ranks(live, 3) == [600_000.0] * 3


def test_an_engine_alone_starts_no_thread_and_closes() -> None:
    def live(comm: TcpComm) -> bool:
        comm.barrier()
        assert isinstance(comm.engine, ExchangeDriver)
        return not comm.engine._stands_by

    assert ranks(live, 1) == [True]


def test_reading_the_same_tag_for_ever_keeps_nothing() -> None:
    """Collectives leave no channel behind, however many there are."""

    def live(comm: TcpComm) -> int:
        for _ in range(50):
            comm.all_reduce(torch.zeros(5))
            comm.barrier()
        peers = comm.engine.exchange.peers.values()
        return sum(len(peer.channels) for peer in peers)

    assert max(ranks(live, 3)) <= 2 * 2  # at most what the slowest has yet to read


@pytest.mark.parametrize("tag", [1 << 63, "a", None])
def test_a_tag_is_a_number_of_64_bits(tag: Any) -> None:
    def live(comm: TcpComm) -> str:
        with pytest.raises(ValueError, match=r"\btag\b.*\b64\b"):
            comm.isend(torch.zeros(1), 1 - comm.rank, tag)
        return "refused"

    assert ranks(live, 2) == ["refused"] * 2
