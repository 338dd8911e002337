"""torch.distributed code that goes wrong, and a process that is left as it was."""

from __future__ import annotations

import ctypes
import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.parallel import DistributedDataParallel

from distlab.runner import RunnerError
from distlab.runner.autopsy import error_text
from distlab.sim import torch as sim_torch


def line_of(function: Callable[..., Any], text: str) -> int:
    """The number of the first line of `function` with this text in it."""
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


# ── what goes wrong ─────────────────────────────────────────────────────────────────


def forgets_all_reduce() -> None:
    if dist.get_rank() != 2:
        dist.all_reduce(torch.ones(3))  # rank 2 forgets it


def forgets_backward() -> None:
    model = DistributedDataParallel(nn.Linear(3, 3))
    loss = model(torch.ones(2, 3)).sum()
    if dist.get_rank() != 1:
        loss.backward()


def ring_of_sends() -> None:
    rank, n = dist.get_rank(), dist.get_world_size()
    dist.send(torch.ones(1), (rank + 1) % n)
    dist.recv(torch.ones(1), (rank - 1) % n)


@pytest.mark.parametrize("journal", [True, False])
@pytest.mark.parametrize(
    ("program", "line", "op", "waits_for"),
    [
        (forgets_all_reduce, "dist.all_reduce", "all_reduce", {0: (2,), 1: (2,)}),
        (forgets_backward, "loss.backward", "all_reduce", {0: (1,), 2: (1,)}),
        (ring_of_sends, "dist.send", "send", {0: (1,), 1: (2,), 2: (0,)}),
    ],
)
def test_a_hang_is_a_verdict_with_its_line(
    program: Any, line: str, op: str, waits_for: Any, journal: bool
) -> None:
    done = sim_torch.run(program, 3, journal=journal)
    assert (done.outcome, done.waits_for) == ("deadlock", waits_for)
    waiting = done.ranks[0].waiting
    assert waiting is not None
    place = (waiting["op"], waiting["file"], waiting["line"])
    assert place == (op, __file__, line_of(program, line))


def unlike_tensors() -> None:
    dist.all_reduce(torch.ones(3 + dist.get_rank() % 2))


def test_tensors_that_do_not_fit_are_refused_where_they_are() -> None:
    done = sim_torch.run(unlike_tensors, 2)
    error = done.ranks[1].error
    assert error is not None
    text = error_text(error)
    named = ("rank 1", "all_reduce", "[4] float32", "rank 0", "[3] float32")
    places = [text.index(name) for name in named]
    assert places == sorted(places)
    assert error.frames[-1] is not None
    assert done.ranks[0].status == "waiting"


def unknown_reduction() -> None:
    dist.all_reduce(torch.ones(3, dtype=torch.int64), op=dist.ReduceOp.BXOR)


def wrong_rank() -> None:
    dist.init_process_group("gloo", "tcp://10.0.0.1:1", rank=5, world_size=9)


@pytest.mark.parametrize(
    ("program", "named"),
    [
        (unknown_reduction, r"ReduceOp\.BXOR\b.*\bSUM, AVG"),
        (wrong_rank, r"init_process_group\(rank=5, world_size=9\).*\b0\b.*\b2\b"),
    ],
)
def test_what_cannot_be_is_named(program: Any, named: str) -> None:
    error = sim_torch.run(program, 2).ranks[0].error
    assert error is not None
    assert re.search(named, error.message)


# ── one process, many worlds ────────────────────────────────────────────────────────


def own_world() -> tuple[Any, ...]:
    was_there = dist.is_initialized()
    dist.init_process_group(backend="gloo", init_method="env://")
    rank = dist.get_rank()
    os.environ["MINE"] = str(rank)
    dist.barrier()
    seen = os.environ["MINE"], os.environ["RANK"], os.environ["WORLD_SIZE"]
    backend = dist.get_backend()
    pair = dist.new_group([0, 2])
    size = dist.get_world_size(pair) if rank in (0, 2) else 0
    dist.destroy_process_group()
    return was_there, seen, backend, size, dist.is_initialized()


def test_each_rank_has_its_own_groups_and_environment() -> None:
    done = sim_torch.run(own_world, 3)
    for rank, value in enumerate(done.require_finished().values):
        mine = (str(rank), str(rank), "3")
        assert value == (True, mine, "gloo", 0 if rank == 1 else 2, False)


def process_state() -> list[Any]:
    """What is kept once per process and replaced during a run."""
    backend: Any = dist.Backend
    tables = ("_plugins", "backend_list", "backend_type_map", "backend_capability")
    return [
        vars(c10d)["_world"],
        vars(c10d)["_new_process_group_helper"],
        vars(c10d)["rendezvous"],
        vars(c10d)["_backend"],
        vars(os.environ)["_data"],
        sys.excepthook,
        torch.get_num_threads(),
        torch.default_generator.get_state().tolist(),
        dict(os.environ),
        *(list(getattr(backend, table)) for table in tables),
        dict(backend.default_device_backend_map),
        hasattr(backend, "DISTLAB_SIM"),
        vars(ShardingPropagator)["_propagate_tensor_meta_non_cached"],
        vars(_fsdp_param)["_chunk_with_empty"],
    ]


def raises() -> None:
    os.environ["LEFT"] = "behind"
    raise KeyError("on purpose")


def test_what_a_rank_sets_is_not_inherited_by_programs_started_later() -> None:
    sim_torch.run(raises, 2)
    find = ctypes.CDLL(None).getenv
    find.restype = ctypes.c_char_p
    assert find(b"LEFT") is None
    assert find(b"PATH") == os.environb[b"PATH"]


def nested() -> None:
    sim_torch.run(raises, 2)


@pytest.mark.parametrize("program", [own_world, raises, forgets_backward, nested])
def test_the_process_is_as_before_afterwards(program: Any) -> None:
    before = process_state()
    done = sim_torch.run(program, 3)
    after = process_state()
    assert all(a is b or a == b for a, b in zip(before, after, strict=True))
    assert done.outcome in ("finished", "raised", "deadlock")


def test_a_run_that_cannot_start_leaves_nothing_behind() -> None:
    before = process_state()
    with pytest.raises(ValueError, match=r"^0 ranks"):
        sim_torch.run(own_world, 0)
    with pytest.raises(ValueError, match=r"\bflops_per_s\b.* 0\b"):
        sim_torch.run(own_world, 2, flops_per_s=0)
    with pytest.raises(ValueError, match=r"\bcarrier\b"):
        sim_torch.run(own_world, 2, carrier="greenlets")
    assert all(a is b or a == b for a, b in zip(before, process_state(), strict=True))
    assert sim_torch.run(own_world, 3).outcome == "finished"


def test_a_run_inside_of_a_run_is_refused() -> None:
    error = sim_torch.run(nested, 2).ranks[0].error
    assert error is not None
    assert error_text(error).startswith("ValueError: ")
    assert sim_torch.run.__name__ in error_text(error)


def test_a_group_of_the_process_itself_is_still_there() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert sim_torch.run(own_world, 3).outcome == "finished"
        mine = torch.ones(2)
        dist.all_reduce(mine)
        assert (dist.get_world_size(), mine.tolist()) == (1, [1.0, 1.0])
    finally:
        dist.destroy_process_group()


def test_the_clock_belongs_to_a_simulated_rank() -> None:
    with pytest.raises(ValueError, match=r"\bclock\b"):
        sim_torch.now_s()


def test_an_untested_version_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.1+cpu")
    with pytest.raises(RunnerError) as refused:
        sim_torch.run(own_world, 2)
    (line,) = str(refused.value).splitlines()
    assert all(version in line for version in (*sim_torch.TESTED, "2.99.1+cpu"))
    monkeypatch.setenv("DISTLAB_SIM_TORCH", "force")
    assert sim_torch.run(own_world, 3).outcome == "finished"


def test_this_version_is_a_tested_one() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sim_torch.require_tested(torch.__version__)
