"""Pipelines: the time of their formulas at full size, and torch's own beside them."""

from __future__ import annotations

import math
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm import Call, Comm, Wrapper, leave_default_group
from distlab.curriculum.units import load
from distlab.grading.checks.pipeline_parallel import clock as clock
from distlab.grading.checks.pipeline_parallel.cases import keys_watched
from distlab.grading.checks.pipeline_parallel.race import (
    CountedStage,
    Meter,
    Timed,
    race,
)
from distlab.models.transformer import (
    TransformerConfig,
    make_transformer,
    next_token_loss,
)
from distlab.runner import Cluster, RankContext
from distlab.sim import AlphaBeta, SimRun, run
from distlab.sim.plans import closed_forms as forms
from tests.workbench.judging import ROOT

FREE = AlphaBeta(alpha_s=0.0, bytes_per_s=math.inf)
STAGES, MICROBATCHES = 8, 32
FORWARD_S, BACKWARD_S = 1e-3, 2e-3  # of `Timed`


@pytest.fixture(scope="module")
def unit() -> ModuleType:
    return load("pipeline_parallel", "reference")


def simulated(program: Any, n: int) -> SimRun:
    done = run(program, n, net=FREE, journal=False)
    done.require_finished()
    return done


def picoseconds(seconds: float) -> int:
    return round(1e12 * seconds)


# ── virtual time ────────────────────────────────────────────────────────────────────


def test_gpipe_and_1f1b_take_the_same_time_and_1f1b_keeps_less(
    unit: ModuleType,
) -> None:
    def program(context: RankContext) -> Any:
        return race(context, unit, seed=0, m=MICROBATCHES)

    gpipe, in_turns = zip(*simulated(program, STAGES).values, strict=True)
    for told in (gpipe, in_turns):
        formula_s = forms.gpipe_s(STAGES, MICROBATCHES, FORWARD_S, BACKWARD_S)
        assert {picoseconds(rank["time_s"]) for rank in told} == {
            picoseconds(formula_s)
        }
    assert [rank["peak"] for rank in gpipe] == [MICROBATCHES] * STAGES
    assert [rank["peak"] for rank in in_turns] == [
        STAGES - rank for rank in range(STAGES)
    ]


class Sent(Wrapper):
    """Counts the tensors that were sent and are still there."""

    def __init__(self, inner: Comm) -> None:
        super().__init__(inner)
        self.alive = self.peak = 0

    def _around(self, call: Call, proceed: Callable[[], Any]) -> Any:
        if call.op == "isend":
            self.alive += 1
            self.peak = max(self.peak, self.alive)
            weakref.finalize(call.sent, self._freed)
        return proceed()

    def _freed(self) -> None:
        self.alive -= 1


def test_gradients_that_have_arrived_are_freed(unit: ModuleType) -> None:
    def program(context: RankContext) -> int:
        comm, x = Sent(context.comm), torch.ones(1, 1, dtype=torch.float64)
        n, m = context.world_size, MICROBATCHES
        unit.execute(
            comm,
            [unit.ModelChunk(Timed(context.clock.sleep), x[0])],
            unit.one_f_one_b(context.rank, n, m),
            lambda output, target: (output - target).square().mean(),
            [(x, x)] * m,
        )
        return comm.peak

    # The outputs of those in flight, and a gradient that is not taken yet.
    peaks = simulated(program, STAGES).values
    assert max(peaks) <= STAGES < MICROBATCHES
    assert peaks[-1] == 1


def chunked(context: RankContext, unit: ModuleType, v: int) -> tuple[float, int]:
    """Interleaved 1F1B of stages that take their time."""
    x, meter = torch.ones(1, 1, dtype=torch.float64), Meter()
    chunks = [
        unit.ModelChunk(CountedStage(Timed(context.clock.sleep), meter), x[0])
        for _ in range(v)
    ]
    n = context.world_size
    schedule = unit.interleaved(context.rank, n, MICROBATCHES, v)
    unit.execute(
        context.comm,
        chunks,
        schedule,
        lambda output, target: (output - target).square().mean(),
        [(x, x)] * MICROBATCHES,
    )
    return context.comm.time(), meter.peak


def test_interleaved_takes_what_its_formula_says(unit: ModuleType) -> None:
    v = 2
    done = simulated(partial(chunked, unit=unit, v=v), STAGES)
    formula_s = forms.interleaved_s(STAGES, MICROBATCHES, v, FORWARD_S, BACKWARD_S)
    assert picoseconds(done.time_s) == picoseconds(formula_s)
    assert formula_s < v * forms.gpipe_s(STAGES, MICROBATCHES, FORWARD_S, BACKWARD_S)
    bounds = [(v - 1) * STAGES + 2 * (STAGES - 1 - r) + 1 for r in range(STAGES)]
    assert [peak for _, peak in done.values] == bounds


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((4, 6, 2, 1.0, 1.0), r"^6 microbatches\b.*\b4\b"),
        ((4, 8, 0, 1.0, 1.0), r"^0 chunks\b"),
    ],
)
def test_the_formula_refuses_what_it_does_not_hold_for(
    arguments: tuple[Any, ...], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        forms.interleaved_s(*arguments)


def test_the_clock_of_the_checks_and_the_drawing_agree(unit: ModuleType) -> None:
    for n, m, v in ((4, 8, 1), (3, 6, 2), (2, 2, 3), (1, 4, 1)):
        if v == 1:
            lists = [unit.one_f_one_b(rank, n, m) for rank in range(n)]
        else:
            lists = [unit.interleaved(rank, n, m, v) for rank in range(n)]
        assert [list(map(tuple, own)) for own in lists] == clock.in_turns(n, m, v)
        played = clock.play_schedules(clock.in_turns(n, m, v), v, 1, 2)
        assert unit.draw(lists).splitlines()[-1].startswith(f"{played.time} ")


def test_the_clock_tells_ranks_that_wait_for_ever() -> None:
    there, back = [("F", 0, 0), ("F", 1, 0)], [("B", 0, 0), ("B", 1, 0)]
    unfit = [[there[0], back[0], there[1], back[1]], [*there, *back]]
    assert [where for where, *_ in clock.play_schedules(unfit, 1, 1, 1).stuck] == [0, 1]


@pytest.mark.slow
def test_the_file_draws_its_schedules() -> None:
    path = ROOT / "solutions/phase2_advanced/pipeline_parallel.py"
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )
    ends = [line for line in done.stdout.splitlines() if line.startswith("33 ")]
    assert len(ends) == 2


# ── what execute gives to free ──────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("kept", "sends", "named"),
    [
        ({0: None}, {}, r"\bkept\b.* 0\b.*\(chunk, microbatch\)"),
        ({(0, 0): None}, {0: None}, r"\bsends\b.* 0\b.*\baction\b"),
        ({}, {}, r"\bkept\b.*\(0, 0\)"),
    ],
)
def test_wrong_keys_are_told_before_a_spliced_free_stumbles(
    unit: ModuleType, kept: Any, sends: Any, named: str
) -> None:
    learners = ModuleType("learners")
    learners.__file__ = "template.py"
    learners.free = unit.free  # type: ignore[attr-defined]
    with keys_watched(learners), pytest.raises(TypeError, match=named):
        learners.free(unit.Action("B", 0), kept, sends)
    assert learners.free is unit.free


# ── torch's own ─────────────────────────────────────────────────────────────────────

CONFIG = TransformerConfig(vocab_size=11, context=6, dim=8, num_heads=2, num_layers=2)
BATCH, PARTS = 8, 4


def make_tokens() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    shape = BATCH, CONFIG.context
    return torch.randint(0, CONFIG.vocab_size, shape, generator=generator)


def cut(v: int, n: int, rank: int) -> list[nn.Sequential]:
    """Chunks c · n + rank of the four layers, as the unit's partition cuts them."""
    layers = list(make_transformer(CONFIG, seed=3))
    partition = load("model_parallel", "reference").partition
    stages = partition([1.0] * len(layers), n * v)
    return [nn.Sequential(*(layers[i] for i in s)) for s in stages[rank::n]]


def gradients(chunks: list[nn.Sequential]) -> list[Tensor]:
    found = [p.grad for chunk in chunks for p in chunk.parameters()]
    return [gradient for gradient in found if gradient is not None]


def one_process() -> tuple[Tensor, list[list[Tensor]]]:
    """The loss, and the gradients layer by layer."""
    model, tokens = make_transformer(CONFIG, seed=3), make_tokens()
    loss = next_token_loss(model(tokens), tokens)
    loss.backward()
    return loss.detach(), [gradients([nn.Sequential(layer)]) for layer in model]


def torchs(context: RankContext, name: str, v: int, path: str) -> Any:
    """One batch through a schedule of torch.distributed.pipelining."""
    from torch.distributed import pipelining

    n, rank = context.world_size, context.rank
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=n
    )
    chunks, tokens = cut(v, n, rank), make_tokens()
    cpu = torch.device("cpu")
    stages = [
        pipelining.PipelineStage(chunk, c * n + rank, n * v, cpu)
        for c, chunk in enumerate(chunks)
    ]
    kind = getattr(pipelining, name)
    schedule = kind(stages if v > 1 else stages[0], PARTS, loss_fn=next_token_loss)
    losses: list[Tensor] = []
    given = [tokens] if rank == 0 else []
    wanted = {"target": tokens, "losses": losses} if rank == n - 1 else {}
    schedule.step(*given, **wanted)
    found = gradients(chunks)
    leave_default_group()
    return found, [loss.detach() for loss in losses]


def ours(context: RankContext, name: str, v: int) -> Any:
    """The same through the unit's."""
    unit = load("pipeline_parallel", "reference")
    n, rank = context.world_size, context.rank
    values = (rank, n, PARTS, v) if v > 1 else (rank, n, PARTS)
    example = torch.empty(CONFIG.context, CONFIG.dim, dtype=torch.float64)
    parts = cut(v, n, rank)
    loss = unit.execute(
        context.comm,
        [unit.ModelChunk(part, example) for part in parts],
        getattr(unit, name)(*values),
        next_token_loss,
        [(part, part) for part in make_tokens().chunk(PARTS)],
    )
    return gradients(parts), loss


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("mine", "theirs", "n", "v"),
    [
        ("gpipe", "ScheduleGPipe", 2, 1),
        ("one_f_one_b", "Schedule1F1B", 4, 1),
        ("interleaved", "ScheduleInterleaved1F1B", 2, 2),
    ],
)
def test_losses_and_gradients_are_those_of_torchs_pipelining_and_of_one_process(
    cluster: Cluster, tmp_path: Path, mine: str, theirs: str, n: int, v: int
) -> None:
    cluster.warm("torch.distributed.pipelining")
    own = cluster.run(ours, n, mine, v).require_finished()
    path = str(tmp_path / "meeting")
    other = cluster.run(torchs, n, theirs, v, path).require_finished()
    loss, layers = one_process()
    assert [told for _, told in own.values] == pytest.approx([float(loss)] * n)
    losses = other.values[-1][1]
    assert len(losses) == PARTS
    assert float(torch.stack(losses).mean()) == pytest.approx(float(loss), rel=1e-12)
    for rank in range(n):
        stages = [layers[i : i + 4 // (n * v)] for i in range(0, 4, 4 // (n * v))]
        mine_are = [layer for stage in stages[rank::n] for layer in stage]
        expected = [gradient for layer in mine_are for gradient in layer]
        for found in (own.values[rank][0], other.values[rank][0]):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
