"""The critical path of a run, exactly, and the story of one that stands still."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from distlab.runner import Run
from distlab.sim import AlphaBeta, run
from distlab.trace import critical_path
from distlab.trace.critical_path import Segment, seconds_by_kind
from distlab.trace.story import story
from tests.workbench.golden import Golden
from tests.workbench.naming import named, numbers
from tests.workbench.traces import (
    call,
    event,
    push,
    ring,
    run_of,
    stuck_ring,
    talk,
)

S = 10**12  # picoseconds
NET = AlphaBeta(alpha_s=2e-6, bytes_per_s=1e9)


def kinds(path: tuple[Segment, ...]) -> list[tuple[str, int, float, float]]:
    return [(s.kind, s.rank, s.start_ps / S, s.end_ps / S) for s in path]


# ── the critical path ───────────────────────────────────────────────────────────────


def test_it_stays_with_the_receiver_that_came_late_not_with_the_sender() -> None:
    done = run_of(
        [*call(1, "send", 0, 8, dst=1), *call(2, "recv", 8, 9, src=2)],
        # Works for 7 s before it receives: whoever follows each message back to its
        # sender would blame rank 0, which only waited.
        call(1, "recv", 7, 8, src=0),
        call(1, "send", 1, 9, dst=0),
    )
    assert kinds(critical_path(done)) == [
        ("work", 1, 0, 7),
        ("message", 0, 7, 8),
        ("message", 2, 8, 9),
    ]


def test_the_busiest_rank_and_the_longest_message_may_not_be_on_it() -> None:
    done = run_of(
        # Rank 0 is in calls all the time, and its message to 1 is the longest one.
        [*call(1, "send", 0, 5, dst=1), *call(2, "recv", 5, 10, src=2)],
        call(1, "recv", 0, 5, src=0),
        [*call(1, "recv", 0, 3, src=3), *call(2, "send", 9, 10, dst=0)],
        [*call(1, "send", 0, 3, dst=2)],
    )
    assert kinds(critical_path(done)) == [
        ("message", 3, 0, 3),
        ("work", 2, 3, 9),
        ("message", 2, 9, 10),
    ]


def test_it_passes_through_a_collective_by_the_rank_that_came_last() -> None:
    done = run_of(*(call(1, "barrier", start, 6) for start in (1, 5, 3)))
    assert kinds(critical_path(done)) == [("work", 1, 0, 4), ("call", 0, 4, 5)]


def test_it_shows_who_queues_for_a_link() -> None:
    for journal in (True, False):
        done = run(push, 4, 1000, net=NET, journal=journal)
        path = critical_path(done)
        assert [s.kind for s in path] == ["queue", "queue", "message"]
        assert seconds_by_kind(path) == pytest.approx({"queue": 8e-6, "message": 6e-6})


def test_a_run_that_stands_still_has_none() -> None:
    assert critical_path(stuck_ring()) == ()
    assert critical_path(run_of([])) == ()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("journal", [True, False])
def test_no_chain_of_messages_is_longer(seed: int, journal: bool) -> None:
    """On links that never fill, a run takes as many latencies as its longest chain."""
    chance = random.Random(seed)
    n = chance.randint(2, 7)
    talks = [tuple(chance.sample(range(n), 2)) for _ in range(40)]
    net = AlphaBeta(alpha_s=1e-6, bytes_per_s=1e18)
    path = critical_path(run(talk, n, talks, net=net, journal=journal))
    depth = [0] * n
    for src, dst in talks:
        depth[src] = depth[dst] = max(depth[src], depth[dst]) + 1
    assert sum(s.kind == "message" for s in path) == len(path) == max(depth)
    assert path[0].start_ps == 0
    for before, after in itertools.pairwise(path):
        assert before.end_ps == after.start_ps


def test_what_is_sent_eagerly_leaves_before_its_receiver_is_there() -> None:
    done = run(ring, 4, 100, net=NET, eager_bytes=1000)
    path = critical_path(done)
    assert (path[0].start_ps, path[-1].end_ps) == (0, round(done.seconds * S))
    for before, after in itertools.pairwise(path):
        assert before.end_ps == after.start_ps


# ── why nobody goes on ──────────────────────────────────────────────────────────────


def chain(*waits: Sequence[int], finished: int = 1) -> Run:
    """Rank i receives from its peers; ranks behind these have ended."""
    op = "all_reduce" if len(waits) == 1 else "recv"
    journals = [
        [event("enter", 1, op, **({} if op == "all_reduce" else {"src": peers[0]}))]
        for peers in waits
    ]
    return run_of(
        *journals,
        *([[]] * finished),
        outcome="deadlock",
        waits_for={rank: tuple(peers) for rank, peers in enumerate(waits)},
    )


def test_a_circle_is_told_rank_by_rank_and_a_large_one_shortened() -> None:
    told = story(stuck_ring())
    assert [numbers(line)[:2] for line in told[:3]] == [[0, 1], [1, 2], [2, 0]]
    assert all(named(line, "template_collectives.py:41") for line in told[:3])
    assert len(told) == 4  # and that it is a circle
    many = story(stuck_ring(1024))
    assert len(many) == 5
    assert numbers(many[3]) == [1021, 0]


def test_a_rank_that_has_ended_is_named_and_those_behind_it_are_counted() -> None:
    first, behind = story(chain([1], [2]))
    assert named(first, "Rank 1", "template_collectives.py:41", "rank 2", "rank 2")
    assert numbers(behind) == [1]
    assert story(run_of([])) == []


def test_a_collective_that_some_never_join() -> None:
    (told,) = story(chain([1, 2], finished=2))
    assert numbers(told)[-2:] == [1, 2]


def test_the_stories(golden: Golden) -> None:
    runs = {
        "circle": stuck_ring(),
        "large circle": stuck_ring(1024),
        "has ended": chain([1], [2]),
        "never join": chain([1, 2], finished=2),
    }
    texts = [f"{name}:\n" + "\n".join(story(run)) for name, run in runs.items()]
    golden("trace/stories", "\n\n".join(texts))
