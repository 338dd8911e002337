"""However a program ends, the run ends truthfully, in bounded time, and leaves nothing.

The clocks here only keep a hang from hanging the suite; nothing measures speed.
"""

from __future__ import annotations

import functools
import os
import re
import socket
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distlab.processes.tree import descendants
from distlab.runner import Cluster, Limits, Run, RunCancelledError
from distlab.runner.autopsy import ended_by_transport
from distlab.runner.orders import Orders
from distlab.runner.posts import Post
from distlab.runner.supervisor import Supervisor
from distlab.runner.wire import encode
from tests.workbench.conformance import misbehaviour as programs
from tests.workbench.naming import named

PATIENCE_S = 30.0


def line_of(mark: str) -> int:
    lines = Path(str(programs.__file__)).read_text().splitlines()
    return next(i for i, line in enumerate(lines, 1) if f"# {mark}" in line)


def statuses(run: Run) -> list[str]:
    return [record.status for record in run.ranks]


def ranks_left(cluster: Cluster) -> list[int]:
    cluster.settle()
    assert cluster._process is not None
    return descendants(cluster._process.pid)


# ── how many, which program ─────────────────────────────────────────────────────────


@pytest.mark.parametrize("world_size", [0, -1, 65])
def test_impossible_world_sizes_are_refused(cluster: Cluster, world_size: int) -> None:
    with pytest.raises(ValueError, match=rf"^{world_size}\b.*\b1\b.*\b64\b"):
        cluster.run(programs.hello, world_size)


@pytest.mark.parametrize("world_size", [1, 64])
def test_the_smallest_and_the_largest_world(cluster: Cluster, world_size: int) -> None:
    run = cluster.run(programs.hello, world_size, limits=Limits(seconds=60))
    assert run.outcome == "finished"
    assert run.values == [[rank, world_size] for rank in range(world_size)]
    assert len({record.pid for record in run.ranks}) == world_size
    assert ranks_left(cluster) == []


def _nested() -> Callable[..., Any]:
    def inner(ctx: object) -> None:
        pass

    return inner


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (lambda ctx: None, "<lambda>"),
        (_nested(), "_nested.<locals>.inner"),
        (functools.partial(programs.hello), "lambda"),  # it has no name
        (Cluster.run, "Cluster.run"),
        ([].append, "append"),
    ],
    ids=["lambda", "nested", "partial", "method", "bound"],
)
def test_a_program_without_an_importable_name_is_refused(
    cluster: Cluster, program: Callable[..., Any], name: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(name)):
        cluster.run(program, 2)


def test_an_argument_that_cannot_travel_is_refused(cluster: Cluster) -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TypeError, match=r"\bset\b"):
        cluster.run(programs.give_back, 8, {1})
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert cluster.run(programs.hello, 1).values == [[0, 1]]


# ── what comes back ─────────────────────────────────────────────────────────────────


def test_values_reports_and_output_come_back(cluster: Cluster) -> None:
    told: dict[int, list[Any]] = {0: [], 1: []}
    run = cluster.run(
        programs.everything_plain, 2, on_report=lambda r, v: told[r].append(v)
    )
    for rank, record in enumerate(run.ranks):
        assert record.value["rank"] == rank
        assert record.value[3] == (1, [None, True])
        assert torch.equal(record.value["~tensor"], torch.ones(2))
        assert [report["n"] for report in told[rank]] == [0, 1, 2]
        assert torch.equal(told[rank][2]["x"], torch.full((2,), 2.0))
        assert record.output == f"out of {rank}: äöü\nerr of {rank}\n"


def test_arguments_arrive_as_they_were_given(cluster: Cluster) -> None:
    args = (1.5, "ö", [1, (2, 3)], {"a": None, 4: 5}, {"~tuple": 1})
    assert cluster.run(programs.give_back, 2, *args).values == [args, args]


def test_seeds_differ_by_rank_and_repeat_by_run(cluster: Cluster) -> None:
    one, same, other = (
        cluster.run(programs.random_numbers, 2, seed=seed).values for seed in (1, 1, 9)
    )
    assert one == same
    assert one[0] != one[1]
    assert one != other


def test_a_rank_lives_in_a_folder_that_goes_with_the_run(cluster: Cluster) -> None:
    folders = cluster.run(programs.own_folder, 2).values
    assert len(set(folders)) == 2
    cluster.settle()
    assert not any(Path(folder).exists() for folder in folders)


def test_an_error_in_on_report_ends_the_run(cluster: Cluster) -> None:
    def fail(rank: int, value: object) -> None:
        raise LookupError("parent")

    with pytest.raises(LookupError, match=r"^parent$"):
        cluster.run(programs.sleeps_long, 2, on_report=fail)
    assert ranks_left(cluster) == []
    assert cluster.run(programs.hello, 1).outcome == "finished"


# ── a rank raises ───────────────────────────────────────────────────────────────────


def test_the_rank_that_raised_is_named(cluster: Cluster) -> None:
    run = cluster.run(programs.one_raises, 3)
    assert run.outcome == "raised"
    assert statuses(run) == ["waiting", "raised", "waiting"]
    primary = run.primary()
    assert primary is not None
    assert (primary.rank, primary.error and primary.error.type) == (1, "KeyError")
    where = f"misbehaviour.py:{line_of('THE LINE OF ONE RAISES')}"
    values = ("rank 1", "KeyError", where, "'momentum'", 0, 2)
    assert named(run.explanation, *values), run.explanation


def test_one_mistake_on_all_ranks_is_one_mistake(cluster: Cluster) -> None:
    text = cluster.run(programs.all_raise, 3).explanation
    assert named(text, "every rank", "ZeroDivisionError")
    assert text.count("ZeroDivisionError") == 1


def test_the_first_failure_in_time_is_the_primary_one(cluster: Cluster) -> None:
    run = cluster.run(programs.raises_after_its_peer, 2)
    assert run.outcome == "raised"
    assert named(run.explanation, "rank 1", "KeyError", "'first'")
    assert run.explanation.startswith("rank 1 ")


def test_an_error_that_follows_from_a_lost_peer_is_secondary(cluster: Cluster) -> None:
    run = cluster.run(programs.wraps_its_loss, 2)
    assert (run.outcome, statuses(run)) == ("died", ["raised", "died"])
    primary = run.primary()
    assert primary is run.ranks[1]
    assert primary.exit_status is not None
    assert os.waitstatus_to_exitcode(primary.exit_status) == 9
    assert named(run.explanation, "rank 1", 9)
    assert run.ranks[0].error is not None
    assert run.ranks[0].error.peer_lost


def test_an_error_without_words_is_still_reported(cluster: Cluster) -> None:
    run = cluster.run(programs.cannot_say_why, 1)
    assert run.ranks[0].error is not None
    assert run.ranks[0].error.type == "Silent"
    assert named(run.explanation, "Silent", "ValueError")


def test_sys_exit_is_an_early_end(cluster: Cluster) -> None:
    run = cluster.run(programs.exits_politely, 2)
    assert (run.outcome, statuses(run)) == ("raised", ["finished", "raised"])
    assert re.search("SystemExit at .*: 0$", run.explanation)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = (1,\ndef f(:\n", "SyntaxError"),
        ("x = 1\ny = unknown_name\n", "NameError"),
        ("import no_such_module\n", "ModuleNotFoundError"),
    ],
)
def test_a_module_that_cannot_be_imported(
    cluster: Cluster, tmp_path: Path, text: str, says: str
) -> None:
    name = f"broken_{uuid.uuid4().hex}"
    (tmp_path / f"{name}.py").write_text(text)
    run = cluster.run(programs.imports, 2, str(tmp_path), name)
    assert run.outcome == "raised"
    assert run.ranks[0].error is not None
    assert run.ranks[0].error.type == says
    assert named(run.explanation, says)
    assert f"{name}.py:" in run.explanation


def test_a_program_that_ranks_cannot_find(cluster: Cluster) -> None:
    def stray(ctx: object) -> None: ...

    stray.__module__, stray.__qualname__ = "tests.no_such_module", "stray"
    run = cluster.run(stray, 2)
    assert run.outcome == "raised"
    assert "ModuleNotFoundError" in run.explanation


def test_a_result_that_cannot_travel_is_the_ranks_mistake(cluster: Cluster) -> None:
    run = cluster.run(programs.result_that_cannot_travel, 2)
    assert (run.outcome, statuses(run)) == ("raised", ["raised", "raised"])
    assert named(run.explanation, "TypeError", "set")


def test_a_failure_while_the_group_forms(cluster: Cluster) -> None:
    run = cluster.run(programs.hello, 2, backend="carrier pigeon")
    assert run.outcome == "raised"
    assert named(run.explanation, "'carrier pigeon'", "gloo", "nccl")


# ── a rank dies ─────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("status", [0, 3])
def test_an_exit_is_no_success(cluster: Cluster, status: int) -> None:
    run = cluster.run(programs.leaves, 2, status)
    assert (run.outcome, run.ranks[1].status) == ("died", "died")
    assert run.ranks[1].exit_status is not None
    assert os.waitstatus_to_exitcode(run.ranks[1].exit_status) == status
    assert named(run.explanation, "rank 1", status)


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSEGV", "SIGABRT"])
def test_a_killed_rank_is_named_with_its_signal(cluster: Cluster, how: str) -> None:
    run = cluster.run(programs.kills_itself, 2, how)
    assert (run.outcome, run.ranks[1].status) == ("died", "died")
    assert named(run.explanation, "rank 1", how)


def test_a_message_too_large_for_its_tensor_is_explained(cluster: Cluster) -> None:
    run = cluster.run(programs.too_small_a_box, 2)
    assert (run.outcome, run.ranks[1].status) == ("died", "died")
    assert ended_by_transport(run.ranks[1])
    assert named(run.explanation, "rank 1", "SIGABRT", "recv", "send")


def test_a_dead_rank_is_dead_though_its_child_lives(cluster: Cluster) -> None:
    run = cluster.run(programs.leaves_a_child_and_dies, 2, limits=Limits(seconds=60))
    assert run.outcome == "died"
    assert named(run.explanation, "rank 1", "SIGKILL")
    assert ranks_left(cluster) == []


def test_a_forked_child_does_not_answer_for_its_rank(cluster: Cluster) -> None:
    assert cluster.run(programs.forks_and_forgets, 2).values == ["rank"] * 2
    assert ranks_left(cluster) == []


def test_a_rank_that_dies_before_it_is_ready(tmp_path: Path) -> None:
    """The supervisor alone, with a zygote and ranks that are only sockets."""
    zygote, controls = socket.socketpair(), [socket.socketpair() for _ in range(2)]
    pipes = [os.pipe() for _ in range(2)]
    orders = Orders(["rank 0", "rank 1"], frozenset())
    supervisor = Supervisor(
        zygote[0],
        [Post(pair[0], pipe[0]) for pair, pipe in zip(controls, pipes, strict=True)],
        world_size=2,
        orders=orders,
        doors=[],
        folder=tmp_path,
        limits=Limits(seconds=PATIENCE_S),
        on_report=None,
    )
    never = 1 << 30  # a process number that none has
    zygote[1].sendall(encode({"k": "started", "pids": [never, never + 1]}))
    zygote[1].sendall(encode({"k": "exit", "pid": never + 1, "status": 9}))
    controls[1][1].sendall(b'{"k":"rea')  # it died in the middle of a word
    run = supervisor.watch()
    assert (run.outcome, statuses(run)) == ("died", ["running", "died"])
    assert named(run.explanation, "rank 1", "SIGKILL")
    orders.close()
    for pair in (zygote, *controls):
        pair[0].close()
        pair[1].close()
    for pipe in pipes:
        os.close(pipe[0])
        os.close(pipe[1])


def test_memory_is_capped_per_rank(cluster: Cluster) -> None:
    run = cluster.run(programs.eats_memory, 3)
    assert run.outcome == "raised"
    assert statuses(run) == ["finished", "raised", "finished"]
    assert run.ranks[1].error is not None
    assert run.ranks[1].error.type in ("RuntimeError", "MemoryError")
    assert named(run.explanation, "rank 1", "memory")


# ── hangs ───────────────────────────────────────────────────────────────────────────


def test_a_loop_meets_the_limit_and_is_shown(cluster: Cluster) -> None:
    run = cluster.run(programs.loops, 2, limits=Limits(seconds=0.5))
    assert (run.outcome, statuses(run)) == ("timeout", ["waiting", "running"])
    line = line_of("THE LINE OF THE LOOP")
    shown = run.explanation.rpartition("misbehaviour.py:")[2]
    assert int(shown) in (line - 1, line)  # the test of the loop or its body
    assert named(run.explanation, "rank 1", "0.5")


def test_a_run_that_nobody_wants_is_given_up(cluster: Cluster) -> None:
    cluster.is_unwanted = lambda: True
    try:
        with pytest.raises(RunCancelledError):
            cluster.run(programs.loops, 2, limits=Limits(seconds=600))
    finally:
        cluster.is_unwanted = None
    assert cluster.run(programs.ring_of_sends, 1).outcome == "raised"


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_deadlock_is_named_with_its_circle(cluster: Cluster, n: int) -> None:
    run = cluster.run(programs.ring_of_sends, n, limits=Limits(seconds=60))
    assert (run.outcome, run.cycle) == ("deadlock", tuple(range(n)))
    assert run.waits_for == {rank: ((rank + 1) % n,) for rank in range(n)}
    for record in run.ranks:
        assert record.waiting is not None
        assert record.waiting["op"] == "send"
        assert record.waiting["line"] == line_of("THE LINE OF THE SEND")


def test_a_collective_that_a_finished_rank_skipped(cluster: Cluster) -> None:
    run = cluster.run(programs.skips_the_barrier, 3, limits=Limits(seconds=60))
    assert run.outcome == "deadlock"
    assert statuses(run) == ["waiting", "finished", "waiting"]
    assert run.waits_for[0] == run.waits_for[2] == (1,)
    assert named(run.explanation, "rank 0", "barrier", "rank 1")


@pytest.mark.parametrize(
    ("program", "n", "args", "values"),
    [
        (programs.sleeps_first, 2, (0.5,), [2.0, 2.0]),
        (programs.waits_for_its_limit, 2, (), ["lost 1", "was let go"]),
        (programs.receives_in_a_thread, 2, (), [1.0, 1.0]),
        (programs.slow_broadcast, 3, (), ["through"] * 3),
        (programs.groups_of_different_ranks, 3, (), None),
    ],
    ids=["a sleeper", "a limit", "a thread", "a broadcast", "groups"],
)
def test_what_only_looks_like_a_deadlock_is_none(
    cluster: Cluster, program: Any, n: int, args: Any, values: Any
) -> None:
    run = cluster.run(program, n, *args, limits=Limits(seconds=60))
    run.require_finished()
    assert values is None or run.values == values
