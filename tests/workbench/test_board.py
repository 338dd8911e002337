"""Who is stuck, decided from events alone: no process, no clock."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from distlab.comm import ANY, Event
from distlab.runner.board import Board, find_cycle


class Story:
    """Journals of `world_size` ranks, told line by line in any order."""

    def __init__(self, world_size: int, limit_s: float = 10.0) -> None:
        self.board = Board(world_size, limit_s)
        self.alive = set(range(world_size))
        self._world = list(range(world_size))
        self._numbers = [itertools.count(1) for _ in self._world]

    def start(self, rank: int, op: str, **facts: Any) -> int:
        return self._tell("enter", rank, op, facts)

    def post(self, rank: int, op: str, **facts: Any) -> int:
        return self._tell("post", rank, op, facts)

    def _tell(self, kind: str, rank: int, op: str, facts: Event) -> int:
        number = next(self._numbers[rank])
        event: Event = {
            "dst": None,
            "src": None,
            "root": None,
            "tag": 0,
            "group": "world",
        }
        event |= {"members": self._world, "timeout_s": None, **facts}
        self.board.record(rank, {"k": kind, "n": number, "op": op, **event})
        return number

    def then(self, rank: int, number: int, kind: str, **facts: Any) -> None:
        self.board.record(rank, {"k": kind, "n": number, "refused": False, **facts})

    def done(self, rank: int, op: str, **facts: Any) -> None:
        self.then(rank, self.start(rank, op, **facts), "exit")

    def finished(self, rank: int) -> None:
        self.alive.discard(rank)

    def stuck(self) -> dict[int, tuple[int, ...]] | None:
        return self.board.stuck(sorted(self.alive))


# ── point to point ──────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("n", [2, 3, 7])
@pytest.mark.parametrize("op", ["send", "recv"])
def test_a_ring_of_one_kind_is_stuck_once_all_are_in_it(n: int, op: str) -> None:
    story = Story(n)
    for rank in range(n):
        assert story.stuck() is None
        story.start(rank, op, **{"dst" if op == "send" else "src": (rank + 1) % n})
    assert story.stuck() == {rank: ((rank + 1) % n,) for rank in range(n)}
    assert find_cycle(story.stuck() or {}) == tuple(range(n))


def test_a_matched_pair_can_go_on() -> None:
    story = Story(2)
    story.start(0, "send", dst=1)
    story.start(1, "recv", src=0)
    assert story.stuck() is None


def test_a_rank_that_is_in_no_call_can_go_on() -> None:
    story = Story(2)
    story.start(0, "recv", src=1)
    story.done(1, "send", dst=0)
    assert story.stuck() is None


def test_a_finished_peer_answers_no_more() -> None:
    story = Story(2)
    story.finished(1)
    story.start(0, "recv", src=1)
    assert story.stuck() == {0: (1,)}
    assert find_cycle(story.stuck() or {}) == ()


def test_a_finished_peer_whose_isend_was_posted_has_answered() -> None:
    story = Story(2)
    story.post(1, "isend", dst=0)
    story.finished(1)
    story.start(0, "recv", src=1)
    assert story.stuck() is None


def test_tags_must_agree() -> None:
    story = Story(2)
    story.start(0, "send", dst=1, tag=1)
    story.start(1, "recv", src=0, tag=2)
    assert story.stuck() == {0: (1,), 1: (0,)}


def test_groups_must_agree() -> None:
    story = Story(2)
    story.start(0, "send", dst=1, group="world/1:0,1", members=[0, 1])
    story.start(1, "recv", src=0)
    assert story.stuck() == {0: (1,), 1: (0,)}


def test_messages_of_two_groups_are_counted_apart() -> None:
    pair = {"group": "world/1:0,1", "members": [0, 1]}
    story = Story(2)
    story.post(0, "isend", dst=1)  # for the world; nobody has asked for it yet
    story.start(0, "send", dst=1, **pair)
    number = story.start(1, "recv", src=0, **pair)
    story.then(1, number, "exit")
    story.start(1, "barrier")
    assert story.stuck() is None  # rank 0's send is on its way out


def test_messages_match_in_order() -> None:
    story = Story(2)
    story.done(0, "send", dst=1)
    story.done(1, "recv", src=0)
    story.start(0, "send", dst=1)
    story.start(1, "send", dst=0)
    assert story.stuck() == {0: (1,), 1: (0,)}


def test_isend_then_wait() -> None:
    story = Story(2)
    numbers = [story.post(rank, "isend", dst=1 - rank) for rank in (0, 1)]
    assert story.stuck() is None  # nobody waits yet
    for rank in (0, 1):
        story.then(rank, numbers[rank], "wait")
    assert story.stuck() == {0: (1,), 1: (0,)}
    assert (story.board.blocked_in(1) or {})["op"] == "isend"


def test_irecv_lets_the_others_send_finish() -> None:
    story = Story(2)
    story.post(1, "irecv", src=0)
    story.start(1, "send", dst=0)
    story.start(0, "send", dst=1)
    assert story.stuck() is None


def test_a_second_wait_for_the_same_work_is_no_wait() -> None:
    story = Story(2)
    number = story.post(0, "isend", dst=1)
    story.then(0, number, "wait")
    story.then(0, number, "exit")
    story.then(0, number, "wait")
    story.start(1, "recv", src=0, tag=9)
    assert story.stuck() is None
    assert story.board.blocked_in(0) is None


# ── sendrecv ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_ring_of_sendrecv_can_go_on(n: int) -> None:
    story = Story(n)
    for rank in range(n):
        story.start(rank, "sendrecv", dst=(rank + 1) % n, src=(rank - 1) % n)
    assert story.stuck() is None


def test_sendrecv_with_only_one_half_matched_is_stuck() -> None:
    story = Story(2)
    story.start(0, "sendrecv", dst=1, src=1)
    story.start(1, "recv", src=0)
    assert story.stuck() is None  # rank 1 gets its message and goes on
    story.then(1, 1, "exit")
    assert story.stuck() is None
    story.start(1, "recv", src=0)
    assert story.stuck() == {0: (1,), 1: (0,)}


def test_a_half_of_sendrecv_can_serve_a_third_rank() -> None:
    """0 sendrecv(→1, ←2), 1 recv(←0), 2 waits for 1, which goes on to serve it."""
    story = Story(3)
    story.start(0, "sendrecv", dst=1, src=2)
    story.start(2, "recv", src=1)
    story.start(1, "recv", src=0)
    assert story.stuck() is None
    story.then(1, 1, "exit")
    story.start(1, "send", dst=2)
    assert story.stuck() is None
    story.then(1, 2, "exit")
    story.then(2, 1, "exit")
    story.start(2, "send", dst=0)
    assert story.stuck() is None


def test_finished_neighbors_leave_a_sendrecv_stuck() -> None:
    story = Story(3)
    story.start(1, "sendrecv", dst=2, src=0)
    story.finished(0)
    story.finished(2)
    assert story.stuck() == {1: (0, 2)}


# ── any source ──────────────────────────────────────────────────────────────────────


def test_any_source_is_met_by_whoever_sends() -> None:
    story = Story(3)
    story.start(0, "recv", src=ANY)
    story.start(1, "recv", src=0)
    story.start(2, "recv", src=0)
    assert story.stuck() == {0: (1, 2), 1: (0,), 2: (0,)}
    story.then(2, 1, "error")
    story.start(2, "send", dst=0)
    assert story.stuck() is None


def test_any_source_takes_one_message_only() -> None:
    story = Story(3)
    for rank in (1, 2):
        story.start(rank, "send", dst=0)
    number = story.start(0, "recv", src=ANY)
    assert story.stuck() is None
    story.then(0, number, "exit", src=2)
    story.then(2, 1, "exit")
    story.finished(2)
    story.start(0, "recv", src=2)  # but it is rank 1 that still sends
    assert story.stuck() == {0: (2,), 1: (0,)}


def test_any_source_with_another_tag_is_stuck() -> None:
    story = Story(2)
    story.start(0, "recv", src=ANY, tag=1)
    story.start(1, "send", dst=0, tag=2)
    assert story.stuck() == {0: (1,), 1: (0,)}


def test_any_source_in_a_group_waits_for_its_members_only() -> None:
    pair = {"group": "world/1:0,2", "members": [0, 2]}
    story = Story(3)
    story.start(0, "recv", src=ANY, **pair)
    story.start(1, "send", dst=0)
    story.start(2, "barrier")
    assert story.stuck() == {0: (2,), 1: (0,), 2: (0, 1)}


# ── collectives ─────────────────────────────────────────────────────────────────────


def test_a_collective_missing_on_one_rank() -> None:
    story = Story(3)
    for rank in (0, 2):
        story.start(rank, "all_reduce")
    assert story.stuck() is None
    story.finished(1)
    assert story.stuck() == {0: (1,), 2: (1,)}


def test_a_collective_that_all_have_joined_can_go_on() -> None:
    story = Story(3)
    for rank in range(3):
        story.start(rank, "all_reduce")
    assert story.stuck() is None


@pytest.mark.parametrize(
    ("mine", "yours"),
    [
        (("all_reduce", None), ("barrier", None)),
        (("broadcast", 0), ("broadcast", 1)),
        (("reduce", 0), ("reduce", 1)),
        (("broadcast", 0), ("all_gather", None)),
    ],
)
def test_different_collectives_do_not_match(mine: Any, yours: Any) -> None:
    story = Story(2)
    for rank, (op, root) in enumerate((mine, yours)):
        story.start(rank, op, root=root)
    assert story.stuck() == {0: (1,), 1: (0,)}


def test_collectives_match_in_order() -> None:
    """Rank 1 is one barrier behind: it can go on, and then so can rank 0."""
    story = Story(2)
    story.done(0, "barrier")
    story.start(0, "barrier")
    story.start(1, "barrier")
    assert story.stuck() is None


def test_collectives_of_a_group_concern_its_members_only() -> None:
    pair = {"group": "world/1:0,1", "members": [0, 1]}
    story = Story(3)
    story.start(0, "all_reduce", **pair)
    story.start(2, "recv", src=0)
    story.start(1, "recv", src=2)
    assert story.stuck() == {0: (1,), 1: (2,), 2: (0,)}
    assert find_cycle(story.stuck() or {}) == (0, 1, 2)


def test_a_collective_against_a_message() -> None:
    story = Story(2)
    story.start(0, "barrier")
    story.start(1, "recv", src=0)
    assert story.stuck() == {0: (1,), 1: (0,)}


def test_a_posted_collective_counts_from_its_post() -> None:
    story = Story(2)
    first, second = (story.post(rank, "all_reduce") for rank in (0, 1))
    story.then(0, first, "wait")
    story.start(1, "barrier")
    assert story.stuck() is None  # rank 0's reduction needs nothing more
    story.then(0, first, "exit")
    story.start(0, "barrier")
    assert story.stuck() is None
    story.then(1, second, "wait")
    assert story.stuck() is None


def test_a_posted_collective_that_one_rank_never_posts() -> None:
    story = Story(2)
    number = story.post(0, "all_reduce")
    story.start(1, "recv", src=0)
    assert story.stuck() is None
    story.then(0, number, "wait")
    assert story.stuck() == {0: (1,), 1: (0,)}


# ── what is not certain is not stuck ────────────────────────────────────────────────


def test_a_call_with_its_own_limit_is_not_stuck() -> None:
    story = Story(2, limit_s=10.0)
    story.start(0, "recv", src=1, timeout_s=0.5)
    story.start(1, "recv", src=0)
    assert story.stuck() is None


def test_a_limit_beyond_the_runs_is_none() -> None:
    story = Story(2, limit_s=10.0)
    story.start(0, "recv", src=1, timeout_s=10.0)
    story.start(1, "recv", src=0)
    assert story.stuck() == {0: (1,), 1: (0,)}


def test_the_limit_of_a_wait_counts_too() -> None:
    story = Story(2)
    number = story.post(0, "irecv", src=1)
    story.then(0, number, "wait", timeout_s=0.5)
    story.start(1, "recv", src=0)
    assert story.stuck() is None


def test_a_refused_call_never_happened() -> None:
    story = Story(2)
    number = story.start(0, "send", dst=1)
    story.then(0, number, "error", refused=True)
    story.start(0, "recv", src=1)
    story.start(1, "recv", src=0)
    assert story.stuck() == {0: (1,), 1: (0,)}
    other = Story(2)
    number = other.start(0, "barrier")
    other.then(0, number, "error", refused=True)
    other.start(0, "all_reduce")
    other.start(1, "all_reduce")
    assert other.stuck() is None


@pytest.mark.parametrize(
    ("failing", "answer"), [("recv", "send"), ("send", "recv"), ("barrier", "barrier")]
)
def test_after_a_failed_call_the_matching_is_uncertain(
    failing: str, answer: str
) -> None:
    """The retry may pair with the peer's first: the failed one may not have counted."""
    facts = {"send": {"dst": 1}, "recv": {"src": 1}, "barrier": {}}
    theirs = {"send": {"dst": 0}, "recv": {"src": 0}, "barrier": {}}
    story = Story(2)
    number = story.start(0, failing, **facts[failing])
    story.then(0, number, "error")
    story.start(0, failing, **facts[failing])
    story.start(1, answer, **theirs[answer])
    assert story.stuck() is None


def test_a_thread_that_is_elsewhere_may_still_act() -> None:
    story = Story(2)
    story.start(0, "recv", src=1, thread=10, threads=2)
    story.start(1, "recv", src=0)
    assert story.stuck() is None
    story.start(0, "recv", src=1, thread=11, threads=2)
    assert story.stuck() == {0: (1,), 1: (0,)}


def test_one_thread_that_can_go_on_is_enough() -> None:
    story = Story(2)
    story.start(0, "recv", src=1, tag=1, thread=10, threads=2)
    story.start(0, "recv", src=1, tag=2, thread=11, threads=2)
    story.start(1, "send", dst=0, tag=1)
    assert story.stuck() is None


def test_nobody_alive_is_not_stuck() -> None:
    assert Story(2).board.stuck([]) is None


def test_the_board_forgets_what_is_over() -> None:
    story = Story(2)
    for _ in range(100):
        story.done(0, "send", dst=1)
        story.done(1, "recv", src=0)
    assert (story.board._calls, story.board._needs) == ({}, {})


# ── circles ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("waits_for", "circle"),
    [
        ({}, ()),
        ({0: (1,)}, ()),
        ({0: (1,), 1: (0,)}, (0, 1)),
        ({2: (0,), 0: (1,), 1: (2,)}, (0, 1, 2)),
        ({0: (2,), 2: (1,), 1: (0,)}, (0, 2, 1)),
        ({3: (1,), 1: (2,), 2: (1,)}, (1, 2)),
        ({0: (1,), 1: (2,), 2: (3,)}, ()),  # a chain that ends in a finished rank
        ({0: (1,), 1: (2, 0)}, (0, 1)),  # not only through the first of several
        ({0: (), 1: (0,)}, ()),
        ({0: (1, 2), 1: (2,), 2: (0,)}, (0, 2)),  # the shortest way round
    ],
)
def test_find_cycle(waits_for: Any, circle: tuple[int, ...]) -> None:
    assert find_cycle(waits_for) == circle
