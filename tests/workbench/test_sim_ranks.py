"""Simulated ranks: what each has to itself, and how the failure of one is told."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path

import pytest
import torch

from distlab.comm import ANY, PeerLost
from distlab.runner import Limits, RankContext
from distlab.sim import run


def zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.float64)


def neighbors(ctx: RankContext) -> tuple[int, int]:
    return (ctx.rank - 1) % ctx.world_size, (ctx.rank + 1) % ctx.world_size


def idle(ctx: RankContext) -> int:
    return ctx.rank


# ── what each rank has to itself ────────────────────────────────────────────────────


def grad_modes(ctx: RankContext) -> list[bool]:
    """Rank 0 waits inside no_grad, rank 1 outside; neither sees the other's mode."""
    left, right = neighbors(ctx)
    seen = [torch.is_grad_enabled()]
    with torch.set_grad_enabled(ctx.rank % 2 == 1):
        for _ in range(3):
            ctx.comm.sendrecv(zeros(1), right, zeros(1), left)
            seen.append(torch.is_grad_enabled())
    return [*seen, torch.is_grad_enabled()]


def test_each_rank_has_its_own_grad_mode() -> None:
    with torch.no_grad():
        values = run(grad_modes, 4).values
        assert not torch.is_grad_enabled()
    assert values == [[True, *[rank % 2 == 1] * 3, True] for rank in range(4)]


def ends_with_gradients_off(ctx: RankContext) -> bool:
    """Rank 0 and every third rank end at once, and leave the mode changed."""
    if ctx.rank % 3 == 0:
        torch.set_grad_enabled(False)
    elif ctx.rank % 3 == 1:
        ctx.comm.send(zeros(1), ctx.rank + 1)
    else:
        ctx.comm.recv(zeros(1), ctx.rank - 1)
    return torch.is_grad_enabled()


@pytest.mark.parametrize("carrier", ["greenlets", "threads"])
def test_a_rank_that_ends_takes_its_grad_mode_along(carrier: str) -> None:
    values = run(ends_with_gradients_off, 6, carrier=carrier).values  # type: ignore[arg-type]
    assert values == [False, True, True] * 2
    assert torch.is_grad_enabled()


def received_into_a_leaf(ctx: RankContext) -> bool:
    """A message is no operation that autograd sees."""
    weight = torch.nn.Parameter(torch.full((2,), float(ctx.rank)))
    if ctx.rank == 0:
        ctx.comm.send(weight, 1)
    else:
        ctx.comm.recv(weight, 0)
    return bool((weight == 0).all()) and weight.grad_fn is None


def test_a_parameter_can_be_sent_and_received_into() -> None:
    assert run(received_into_a_leaf, 2).values == [True, True]


def random_numbers(ctx: RankContext) -> list[float]:
    left, right = neighbors(ctx)
    numbers = []
    for _ in range(3):
        numbers.append(float(torch.rand(1)))
        ctx.comm.sendrecv(zeros(1), right, zeros(1), left)
    return numbers


def test_each_rank_has_its_own_random_numbers() -> None:
    torch.manual_seed(99)
    before = torch.get_rng_state()
    values = run(random_numbers, 3, seed=7).values
    assert torch.equal(torch.get_rng_state(), before)
    for rank in range(3):
        generator = torch.Generator().manual_seed(7 + rank)
        alone = [float(torch.rand(1, generator=generator)) for _ in range(3)]
        assert values[rank] == alone


def talks(ctx: RankContext) -> None:
    left, right = neighbors(ctx)
    print("before", ctx.rank)
    ctx.comm.sendrecv(zeros(1), right, zeros(1), left)
    print("after", ctx.rank, file=sys.stderr)
    sys.stdout.close()


def test_what_a_rank_prints_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    done = run(talks, 3)
    assert [record.output for record in done.ranks] == [
        f"before {rank}\nafter {rank}\n" for rank in range(3)
    ]
    print("still printed")
    assert capsys.readouterr().out == "still printed\n"


def floods(ctx: RankContext) -> None:
    for _ in range(100):
        print("x" * 100)


def test_what_is_kept_of_a_flood_has_an_end() -> None:
    done = run(floods, 2, limits=Limits(output_bytes=250))
    assert [len(record.output) for record in done.ranks] == [250, 250]


def fills(ctx: RankContext, box: torch.Tensor) -> float:
    box += ctx.rank
    return float(box[0])


def test_each_rank_has_its_own_arguments() -> None:
    box = zeros(1)
    assert run(fills, 3, box).values == [0.0, 1.0, 2.0]
    assert float(box[0]) == 0.0


# ── failures ────────────────────────────────────────────────────────────────────────


def one_fails_then_another(ctx: RankContext) -> None:
    """Rank 2 fails; rank 0 gives up on it and fails because of that; rank 1 waits."""
    if ctx.rank == 2:
        ctx.comm.recv(zeros(1), 0)
        raise KeyError("momentum")
    if ctx.rank == 0:
        ctx.comm.send(zeros(1), 2)
        try:
            ctx.comm.recv(zeros(1), 2, timeout_s=0.5)
        except PeerLost:
            raise RuntimeError("no state") from None
    ctx.comm.recv(zeros(1), 2)


def test_the_cause_is_told_from_what_follows_from_it() -> None:
    done = run(one_fails_then_another, 3)
    assert done.outcome == "raised"
    first = done.primary()
    assert first is not None
    assert (first.rank, first.failed_s) == (2, done.trace[0].end_ps * 1e-12)
    errors = [record.error for record in done.ranks]
    assert [error and error.peer_lost for error in errors] == [True, None, False]
    told, after = done.explanation.split("; ")
    assert told.startswith("rank 2 ")
    assert "KeyError" in told
    assert "'momentum'" in told
    assert Path(__file__).name in told
    assert after.startswith("rank 1 ")


def refuses_to_end(ctx: RankContext) -> None:
    while True:
        try:
            ctx.comm.recv(zeros(1), ANY)
        except BaseException:
            print("never")


def test_a_rank_that_catches_everything_cannot_keep_us() -> None:
    done = run(refuses_to_end, 2)
    assert done.outcome == "deadlock"
    assert [record.output for record in done.ranks] == ["", ""]
    assert [event["k"] for event in done.ranks[0].journal] == ["enter"]


def sends_in_a_hook(ctx: RankContext) -> None:
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(lambda grad: ctx.comm.send(grad, 1))
    weight.sum().backward()


def test_waiting_inside_backward_is_refused() -> None:
    done = run(sends_in_a_hook, 2, carrier="greenlets")
    assert done.outcome == "raised"
    assert re.search(r"backward\(\).*\bthreads\b", done.explanation)


def sends_in_a_thread(ctx: RankContext) -> list[str]:
    told: list[str] = []

    def helper() -> None:
        try:
            ctx.comm.send(zeros(1), 1 - ctx.rank)
        except RuntimeError as error:
            told.append(str(error))

    thread = threading.Thread(target=helper)
    thread.start()
    thread.join()
    return told


def test_a_thread_of_the_program_is_refused() -> None:
    for told in run(sends_in_a_thread, 2).values:
        assert "thread" in told[0]


def interrupted(ctx: RankContext) -> None:
    raise KeyboardInterrupt


def test_the_keyboard_ends_the_run_not_a_rank() -> None:
    with pytest.raises(KeyboardInterrupt):
        run(interrupted, 2)
    assert run(idle, 2).values == [0, 1]
