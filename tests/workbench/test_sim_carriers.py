"""Greenlets and threads carry the same run; threads also one that waits in hooks."""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

import pytest
import torch

from distlab.comm import ANY
from distlab.runner import RankContext
from distlab.sim import AlphaBeta, SimRun, run

BOTH = ("greenlets", "threads")
LOG: list[int] = []


def zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.float64)


def neighbors(ctx: RankContext) -> tuple[int, int]:
    return (ctx.rank - 1) % ctx.world_size, (ctx.rank + 1) % ctx.world_size


def mixture(ctx: RankContext) -> list[Any]:
    """Sends, receives from anyone, a time limit, random numbers, a group."""
    left, right = neighbors(ctx)
    with torch.set_grad_enabled(ctx.rank % 2 == 0):
        ctx.comm.sendrecv(zeros(9), right, zeros(9), left)
        seen: list[Any] = [torch.is_grad_enabled()]
    works = [ctx.comm.isend(zeros(ctx.rank + 1), right, tag=1)]
    works.append(ctx.comm.irecv(zeros(left + 1), left, tag=1))
    half = ctx.comm.new_group(range(ctx.rank % 2, ctx.world_size, 2))
    ctx.comm.new_group([0])
    for work in works:
        work.wait()
    total = torch.rand(2)
    if half is not None:
        half.all_reduce(total)
    ctx.comm.barrier()
    if ctx.rank:
        ctx.comm.send(torch.rand(2), 0, tag=9)
        return [*seen, total.tolist(), ctx.comm.time()]
    boxes = [torch.zeros(2) for _ in range(ctx.world_size - 1)]
    return seen + [(ctx.comm.recv(box, ANY, tag=9), box.tolist()) for box in boxes]


def test_the_trace_is_the_same_five_times_and_on_both_carriers() -> None:
    net = AlphaBeta(alpha_s=3e-6, bytes_per_s=2e9)
    runs = [
        run(mixture, 9, net=net, seed=4, carrier=carrier)
        for carrier in ("greenlets",) * 5 + ("threads",) * 5
    ]
    assert {done.carrier for done in runs} == set(BOTH)
    assert len({done.trace_hash for done in runs}) == 1
    assert len(runs[0].trace) == 9 + 9 + 8
    assert all(done.values == runs[0].values for done in runs)
    assert len({done.time_s for done in runs}) == 1
    slower = run(mixture, 9, net=AlphaBeta(alpha_s=4e-6), seed=4)
    assert slower.trace_hash != runs[0].trace_hash


# ── inside backward() ───────────────────────────────────────────────────────────────


def average_in_hooks(ctx: RankContext) -> list[float]:
    """What DDP does: each gradient is averaged as soon as it is there."""
    print("attempt")
    ctx.report("attempt")
    LOG.append(ctx.rank)
    weight = torch.ones(2, dtype=torch.float64, requires_grad=True)

    def average(grad: torch.Tensor) -> torch.Tensor:
        total = grad.clone()
        ctx.comm.all_reduce(total)
        return total / ctx.world_size

    weight.register_hook(average)
    (weight * ctx.rank).sum().backward()
    assert weight.grad is not None
    ctx.comm.barrier()
    return [float(g) for g in weight.grad]


def test_a_run_that_waits_inside_backward_starts_over_on_threads() -> None:
    LOG.clear()
    reports: list[tuple[int, str]] = []
    done = run(average_in_hooks, 4, on_report=lambda *told: reports.append(told))
    assert (done.outcome, done.carrier) == ("finished", "threads")
    assert done.values == [[1.5, 1.5]] * 4
    assert [record.output for record in done.ranks] == ["attempt\n"] * 4
    assert reports == [(rank, "attempt") for rank in range(4)]
    assert LOG == [0, 0, 1, 2, 3]  # the docstring says so: module globals leak


def waits_inside_a_hook(ctx: RankContext) -> None:
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(lambda grad: ctx.comm.recv(grad, ANY))  # THE HOOK
    weight.sum().backward()


def never_ends(ctx: RankContext) -> None:
    while True:
        try:
            ctx.comm.recv(zeros(1), ANY)
        except Exception:
            print("never")


def fails_while_others_wait(ctx: RankContext) -> None:
    if ctx.rank == 1:
        raise KeyError("momentum")
    ctx.comm.recv(zeros(1), 1)


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        (mixture, "finished"),
        (waits_inside_a_hook, "deadlock"),
        (never_ends, "deadlock"),
        (fails_while_others_wait, "raised"),
    ],
)
def test_no_thread_is_left(program: Any, outcome: str) -> None:
    before = threading.active_count()
    assert run(program, 5, carrier="threads").outcome == outcome
    assert threading.active_count() == before
    assert threading.stack_size() == 0


def test_autograd_works_after_a_run_that_ended_inside_it() -> None:
    done = run(waits_inside_a_hook, 3)
    with open(__file__) as file:
        line = [i for i, s in enumerate(file, 1) if s.endswith("# THE HOOK\n")]
    assert [(r.waiting or {})["line"] for r in done.ranks] == line * 3
    weight = torch.ones(1, requires_grad=True)
    weight.sum().backward()
    assert torch._C._current_graph_task_id() == -1


# ── the carriers alike ──────────────────────────────────────────────────────────────


def talks(ctx: RankContext) -> None:
    left, right = neighbors(ctx)
    print("before", ctx.rank)
    ctx.comm.sendrecv(zeros(1), right, zeros(1), left)
    print("after", ctx.rank, file=sys.stderr)


def ring_of_sends(ctx: RankContext) -> None:
    ctx.comm.send(zeros(1), (ctx.rank + 1) % ctx.world_size)


def told(done: SimRun) -> Any:
    places = [r.waiting and (r.waiting["file"], r.waiting["line"]) for r in done.ranks]
    outputs = [record.output for record in done.ranks]
    return done.outcome, done.explanation, done.waits_for, places, outputs


@pytest.mark.parametrize("journal", [True, False])
@pytest.mark.parametrize("program", [talks, ring_of_sends, fails_while_others_wait])
def test_both_tell_the_same(program: Any, journal: bool) -> None:
    first, second = (run(program, 3, carrier=c, journal=journal) for c in BOTH)
    assert told(first) == told(second)


def recursion(ctx: RankContext) -> None:
    class Deep(torch.nn.Module):
        def forward(self) -> None:
            self()

    Deep()()


@pytest.mark.parametrize("carrier", BOTH)
def test_endless_recursion_is_the_programs_error(carrier: Any) -> None:
    done = run(recursion, 2, carrier=carrier)
    assert "RecursionError" in done.explanation


def interrupted(ctx: RankContext) -> None:
    if ctx.rank == 1:
        raise KeyboardInterrupt
    ctx.comm.recv(zeros(1), 1)


@pytest.mark.parametrize("carrier", BOTH)
def test_the_keyboard_ends_the_run_not_a_rank(carrier: Any) -> None:
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        run(interrupted, 2, carrier=carrier)
    assert threading.active_count() == before


def spins(ctx: RankContext) -> None:
    if ctx.rank == 1:
        while True:
            pass
    ctx.comm.recv(zeros(1), 1)


@pytest.mark.parametrize("carrier", BOTH)
def test_ctrl_c_ends_a_rank_that_spins(carrier: Any) -> None:
    before = threading.active_count()
    timer = threading.Timer(0.2, _press_ctrl_c)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run(spins, 2, carrier=carrier)
    timer.join()
    assert threading.active_count() == before


def test_ctrl_c_while_a_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def interrupted_start(thread: threading.Thread) -> None:
        start(thread)  # which waits until the thread runs
        raise KeyboardInterrupt

    before = threading.active_count()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted_start)
        with pytest.raises(KeyboardInterrupt):
            run(spins, 2, carrier="threads")
    assert threading.active_count() == before


def _press_ctrl_c() -> None:
    main = threading.main_thread().ident
    signal.pthread_kill(main or 0, signal.SIGINT)


def test_an_unknown_carrier_is_refused() -> None:
    with pytest.raises(ValueError, match=r'"greenlets".*"threads"'):
        run(talks, 2, carrier="fibers")  # type: ignore[arg-type]
