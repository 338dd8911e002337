"""Runs as on a measured machine: what is charged, and which pattern a message is in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from distlab.runner import RankContext
from distlab.sim import AlphaBeta, Faults, run
from distlab.sim.calibration import trains
from distlab.sim.calibration.charge import run_charged
from distlab.sim.net.piecewise import Piecewise
from distlab.sim.plans.replay import record

NOW = AlphaBeta(alpha_s=0, bytes_per_s=float("inf"))
ONE_S = AlphaBeta(alpha_s=1, bytes_per_s=float("inf"))


def close_to(seconds: float) -> Any:
    return pytest.approx(seconds, rel=1e-9)


def charged_s(program: Callable[..., Any], *args: Any, **options: Any) -> float:
    """Virtual seconds, at a second per byte of an operation and 0.5 for one of none."""
    options = {"net": NOW, "operation_s": lambda size: size or 0.5, **options}
    done = run_charged(program, 2, *args, **options)
    done.require_finished()
    return done.time_s


# ── what ranks compute is charged ───────────────────────────────────────────────────


def add(context: RankContext, tensor: Tensor) -> None:
    tensor += tensor


def look(context: RankContext, tensor: Tensor) -> None:
    tensor.view(-1)
    torch.empty(1000)


def sum_up(context: RankContext, tensor: Tensor) -> None:
    tensor.sum()


@pytest.mark.parametrize(("program", "seconds"), [(add, 40), (look, 1), (sum_up, 40)])
def test_an_operation_costs_what_the_table_says(program: Any, seconds: float) -> None:
    assert charged_s(program, torch.ones(10)) == close_to(seconds)


def pass_on(context: RankContext, tensor: Tensor) -> list[float]:
    """Rank 0 computes and sends; rank 1 computes with what came."""
    comm = context.comm
    times = [comm.time()]
    if comm.rank == 0:
        tensor += 1
        comm.send(tensor, 1)
    else:
        comm.recv(tensor, 0)
        times.append(comm.time())
        tensor += 1
    return [*times, comm.time()]


def test_a_message_waits_for_what_was_computed_and_copying_it_is_free() -> None:
    done = run_charged(pass_on, 2, torch.ones(1), net=ONE_S, operation_s=float)
    assert done.values == [[0, 5], [0, 5, 9]]
    assert done.time_s == close_to(9)


def overlap(context: RankContext, tensor: Tensor) -> None:
    comm, box = context.comm, torch.ones(2)
    work = comm.isend(box, 1) if comm.rank == 0 else comm.irecv(box, 0)
    tensor += 1
    work.wait()


def test_computing_hides_behind_a_message() -> None:
    at_once = {"operation_s": lambda size: size / 100}
    both = charged_s(overlap, torch.ones(1), net=ONE_S, **at_once)
    assert both == close_to(1.08)  # to make the box, then the message
    both = charged_s(overlap, torch.ones(50), net=ONE_S, **at_once)
    assert both == close_to(2.08)  # to make the box, then the adding


def test_threads_are_charged_like_greenlets_and_stragglers_more() -> None:
    tensor = torch.ones(10)
    assert charged_s(add, tensor, carrier="threads") == close_to(40)
    slow = Faults(straggler={1: 2.5})
    assert charged_s(add, tensor, faults=slow) == close_to(100)


def in_a_group(context: RankContext, tensor: Tensor) -> None:
    group = context.comm.new_group([1, 0])
    assert group is not None
    tensor += 1
    group.barrier()
    context.clock.sleep(2)
    tensor += 1


def test_groups_and_the_clock_know_the_rank_that_computes() -> None:
    assert charged_s(in_a_group, torch.ones(1)) == close_to(10)


# ── patterns ────────────────────────────────────────────────────────────────────────

MACHINE = Piecewise(
    table=((0, 3.0), (100, 13.0)),
    back_and_forth_s=(2.0, 12.0),
    both_ways_s=(1.0, 16.0),
)


def repeat(context: RankContext, name: str, sizes: list[int]) -> float:
    """Seconds of three pieces in a row."""
    tensor, box = (torch.zeros(size, dtype=torch.uint8) for size in sizes)
    for _ in range(3):
        trains.STEPS[name](context.comm, tensor, box)
    return context.comm.time()


@pytest.mark.parametrize(
    ("name", "sizes", "seconds"),
    [
        (trains.ONE_WAY, [0, 0], 9),
        (trains.ONE_WAY, [100, 100], 39),
        (trains.BACK_AND_FORTH, [0, 0], 3 + 5 * 2),  # the first was not asked for
        (trains.BACK_AND_FORTH, [50, 50], 8 + 5 * 7),
        (trains.BOTH_WAYS, [0, 0], 3),
        (trains.BOTH_WAYS, [100, 100], 48),
    ],
)
def test_a_train_takes_the_time_of_its_pattern(
    name: str, sizes: list[int], seconds: float
) -> None:
    done = run_charged(repeat, 2, name, sizes, net=MACHINE, operation_s=lambda _: 0.0)
    assert max(done.values) == close_to(seconds)


def unequal(context: RankContext, here: int, there: int) -> None:
    sizes = (here, there) if context.rank == 0 else (there, here)
    tensor, box = (torch.zeros(size, dtype=torch.uint8) for size in sizes)
    context.comm.sendrecv(tensor, 1 - context.rank, box, 1 - context.rank)


def test_what_two_messages_do_not_have_in_common_goes_one_way() -> None:
    done = run_charged(unequal, 2, 100, 20, net=MACHINE, operation_s=lambda _: 0.0)
    # 20 bytes cross in 1 + 3 s; the other 80 take as long as they do one way.
    assert done.time_s == close_to(4 + 8)


def test_a_stragglers_exchange_is_one_too() -> None:
    options = {"net": MACHINE, "operation_s": lambda _: 0.0}
    slow = Faults(straggler={1: 5})
    done = run_charged(unequal, 2, 20, 20, faults=slow, **options)
    assert done.time_s == close_to(4 + 8)  # 100 bytes' worth, of which 20 were said


def test_a_run_that_is_not_charged_takes_every_message_one_way() -> None:
    assert run(unequal, 2, 100, 100, net=MACHINE).time_s == close_to(13)


def test_patterns_depend_on_the_past_so_they_are_not_replayed() -> None:
    with pytest.raises(ValueError, match="replayed"):
        record(unequal, 2, 100, 100, net=MACHINE)
