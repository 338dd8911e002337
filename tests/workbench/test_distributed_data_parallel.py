"""Overlap in virtual time, torch's own class beside it, other transports and hooks."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import _ddp_ranks as bench_ranks
from benchmarks._bars import Bench
from distlab.comm import Comm, Work, leave_default_group
from distlab.curriculum.units import load
from distlab.grading.checks.distributed_data_parallel import watch as watch
from distlab.grading.checks.distributed_data_parallel.departures import untimely
from distlab.grading.checks.distributed_data_parallel.hooks import LAYERS_MIB
from distlab.grading.checks.distributed_data_parallel.joined import BATCHES, run_out
from distlab.grading.checks.distributed_data_parallel.unused import Found, used
from distlab.grading.kit.flat import flat
from distlab.grading.kit.values import close
from distlab.models.transformer import make_transformer, next_token_loss
from distlab.runner import Cluster, RankContext
from distlab.sim import run
from distlab.walkthroughs import bucket_lanes as lanes
from tests.corpora.beside_torch import ddp as beside
from tests.corpora.both_ways import SMALL, leave, meet
from tests.workbench.golden import Golden

SEED = 3
PARITY_STEPS, SMALL_MIB = 20, 0.02


@pytest.fixture(scope="module")
def unit() -> ModuleType:
    return load("distributed_data_parallel", "reference")


def picoseconds(seconds: float) -> int:
    return round(1e12 * seconds)


# ── virtual time ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("num_buckets", "milliseconds"),
    [(1, 24.28), (2, 19.56), (5, 17.4), (10, 17.8), (25, 21.4), (50, 28.2)],
)
def test_the_step_takes_what_the_formula_says(
    num_buckets: int, milliseconds: float
) -> None:
    told = lanes.lanes("reference", num_buckets, 8)
    assert picoseconds(told.step_s) == picoseconds(milliseconds / 1000)
    assert picoseconds(told.step_s) == picoseconds(lanes.step_s(num_buckets, 8))
    due = told.ready_s[lanes.NUM_LAYERS // num_buckets - 1 :: 50 // num_buckets]
    assert told.left_s == due  # each bucket with its last gradient


def test_torchs_own_takes_as_long_at_8_ranks() -> None:
    ours = lanes.lanes("reference", 5, 8).step_s
    assert picoseconds(lanes.torchs_step_s(5, 8)) == picoseconds(ours)


def test_at_64_ranks_the_messages_hide_just_as_well() -> None:
    told = lanes.lanes("reference", 5, 64)
    assert picoseconds(told.step_s) == picoseconds(lanes.step_s(5, 64))


def test_what_distlab_sim_plays_is_a_step_with_overlap(unit: ModuleType) -> None:
    settings = {"num_bytes": 8 << 10}
    done = run(partial(lanes.play, unit=unit, settings=settings), 4)
    done.require_finished()
    assert done.values == [" ".join(["256"] * lanes.PLAYED_LAYERS)] * 4
    entered = [e for e in done.ranks[0].journal if e.get("op") == "all_reduce"]
    assert len(entered) == lanes.PLAYED_LAYERS // 2
    waited = [e["t"] for e in done.ranks[0].journal if e["k"] == "wait"]
    assert entered[0]["t"] < entered[-1]["t"] <= waited[0]


def test_layers_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\b50 layers\b.* 7\b"):
        lanes.lanes("reference", 7, 2)


# ── torch's own, on real processes ──────────────────────────────────────────────────


def parity(context: RankContext, folder: str) -> dict[str, float]:
    comm = meet(context, folder)
    unit = load("distributed_data_parallel", "reference")
    model = make_transformer(SMALL, seed=0)
    ours = unit.DistributedDataParallel(
        copy.deepcopy(model), comm, bucket_size_mib=SMALL_MIB
    )
    torchs = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=SMALL_MIB)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (ours, torchs)]
    loss_gap, losses = 0.0, [0.0, 0.0]
    for step in range(PARITY_STEPS):
        tokens = bench_ranks.tokens_of(SMALL, 4, 1000 * step + context.rank)
        for place, ddp in enumerate((ours, torchs)):
            optimizers[place].zero_grad()
            loss = next_token_loss(ddp(tokens), tokens)
            loss.backward()
            optimizers[place].step()
            losses[place] = float(loss.detach())
        loss_gap = max(loss_gap, abs(losses[0] - losses[1]))
    pairs = zip(ours.parameters(), torchs.parameters(), strict=True)
    gap = max(float((a - b).detach().abs().max()) for a, b in pairs)
    leave()
    return {"loss": loss_gap, "parameters": gap, "buckets": len(ours.buckets)}


def test_losses_and_parameters_are_those_of_torchs_ddp(
    cluster: Cluster, tmp_path: Path
) -> None:
    cluster.warm("torch._dynamo")
    done = cluster.run(parity, 3, str(tmp_path))
    for told in done.require_finished().values:
        assert told["buckets"] > 4
        assert told["loss"] <= 1e-10
        assert told["parameters"] <= 1e-10


def branches_by_torch(context: RankContext, folder: str) -> list[Found]:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=context.rank,
        world_size=context.world_size,
    )

    found = branches(
        context,
        partial(nn.parallel.DistributedDataParallel, find_unused_parameters=True),
    )
    leave_default_group()
    return found


def branches_by_ours(context: RankContext) -> list[Found]:
    unit = load("distributed_data_parallel", "reference")
    made = unit.DistributedDataParallel
    return branches(
        context, lambda model: made(model, context.comm, find_unused_parameters=True)
    )


def branches(
    context: RankContext, wrapped: Callable[[nn.Module], nn.Module]
) -> list[Found]:
    """The gradients of two steps, with other layers used on other ranks."""
    model = watch.Branches(SEED)
    ddp = wrapped(model)
    found = []
    for step in range(2):
        model.zero_grad()
        inputs = watch.make_inputs(SEED, step, context.rank)
        watch.loss_of(ddp(inputs, used(context.rank, step))).backward()
        found.append(watch.gradients(model))
    return found


def test_unused_parameters_get_what_torchs_ddp_gives_them(
    cluster: Cluster, tmp_path: Path
) -> None:
    mine = cluster.run(branches_by_ours, 3).require_finished()
    theirs = cluster.run(branches_by_torch, 3, str(tmp_path)).require_finished()
    for own, other in zip(mine.values, theirs.values, strict=True):
        pairs = zip(
            own,
            other,
            strict=True,
        )
        for ours, torchs in pairs:
            for name, gradient in torchs.items():
                if gradient is None:
                    assert ours[name] is None
                else:
                    assert close(ours[name], gradient)


@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("batch norm, own buffers", 3),
        ("channels_last", 2),
        ("transposed weight", 2),
        ("parameters on the model", 2),
        ("branching, a forward alone", 3),
        ("dataclass output", 3),
        ("checkpoint of 2.5", 2),
        ("reentrant checkpoint", 3),
        ("deepcopy", 2),
        ("error before the gradients", 2),
        ("branching, two forwards", 3),
        ("loss beside the output", 2),
        ("a layer checkpointed twice", 2),
        ("error in backward", 3),
    ],
)
def test_a_sample_of_the_comparison(cluster: Cluster, name: str, n: int) -> None:
    cluster.warm("torch._dynamo")
    assert beside.largest(cluster, name, n) <= 1e-12


def test_the_comparison_sees_a_difference() -> None:
    assert beside.gap([torch.ones(2)], [torch.tensor([1.0, 1.5])]) == 0.5
    assert beside.gap([None], [torch.zeros(2)]) == float("inf")
    assert {case.num_ranks for case in beside.cases()} == {2, 3}


# ── other transports, other hooks ───────────────────────────────────────────────────


def one_step(context: RankContext, hook: str = "") -> Tensor:
    unit = load("distributed_data_parallel", "reference")
    hooks = {"": None, "ring": by_ring, "bf16": in_bfloat16}
    model = watch.Chain(SEED)
    ddp = unit.DistributedDataParallel(
        model, context.comm, bucket_size_mib=LAYERS_MIB, comm_hook=hooks[hook]
    )
    watch.loss_of(ddp(watch.make_inputs(SEED, 0, context.rank))).backward()
    found = {k: g for k, g in watch.gradients(model).items() if g is not None}
    return flat(found)


class Done:
    """A transfer that has already come to its end, or does so in `finish`."""

    def __init__(self, finish: Any = lambda: None) -> None:
        self.wait = finish


def by_ring(comm: Comm, bucket: Any) -> Work:
    """The all-reduce of unit 3.3, which waits."""
    load("ring_allreduce", "reference").all_reduce(comm, bucket.flat)
    return Done()


def in_bfloat16(comm: Comm, bucket: Any) -> Work:
    """A quarter of the bytes."""
    small = bucket.flat.to(torch.bfloat16)
    work = comm.all_reduce(small, async_op=True)
    assert work is not None

    def finish() -> None:
        work.wait()
        bucket.flat.copy_(small)

    return Done(finish)


def mean(n: int) -> Tensor:
    return flat(watch.mean_of(watch.chain_gradients(SEED, 0, n)))


@pytest.mark.parametrize("backend", ["gloo", "tcp"])
def test_the_gradient_is_the_mean_on_real_transports(
    cluster: Cluster, backend: str
) -> None:
    done = cluster.run(one_step, 3, backend=backend).require_finished()
    assert all(close(gradient, mean(3)) for gradient in done.values)


@pytest.mark.parametrize("hook", ["", "ring"])
def test_in_the_simulator_and_with_the_ring_as_hook(hook: str) -> None:
    done = run(one_step, 8, hook)
    done.require_finished()
    assert all(close(gradient, mean(8)) for gradient in done.values)


def test_a_hook_that_compresses_sends_a_quarter(cluster: Cluster) -> None:
    plain = cluster.run(one_step, 2).require_finished()
    small = cluster.run(one_step, 2, "bf16").require_finished()
    parameters = list(watch.Chain(SEED).parameters())
    weights = sum(p.numel() * p.element_size() for p in parameters)
    narrow = sum(p.numel() * 2 for p in parameters if p.element_size() == 2)
    # Rank 1 sends no weights: what is left are the gradients.
    sent = [done.ranks[1].sent_bytes for done in (plain, small)]
    assert sent[0] <= weights
    assert sent[1] == narrow + (sent[0] - narrow) / 4
    assert all(close(gradient, mean(2), 2e-2) for gradient in small.values)


def test_ranks_that_run_out_are_awaited_by_nobody_at_16_ranks(unit: ModuleType) -> None:
    done = run(partial(run_out, unit=unit, seed=SEED), 16)
    done.require_finished()
    told = [len(value["yielded"]) for value in done.values]
    assert told == [3 - count for count in BATCHES] * 4
    assert all(
        torch.equal(value["after"], done.values[0]["after"]) for value in done.values
    )


# ── what is refused ─────────────────────────────────────────────────────────────────


def refusals(context: RankContext, unit: ModuleType) -> list[tuple[str, str]]:
    made, said = unit.DistributedDataParallel, list[tuple[str, str]]()
    inputs = watch.make_inputs(SEED, 0, 0)

    def attempt(act: Any) -> None:
        try:
            act()
        except (ValueError, RuntimeError, TypeError) as error:
            said.append((type(error).__name__, str(error)))

    def branches(**options: Any) -> Any:
        return made(watch.Branches(SEED), context.comm, **options)

    def fail(_: Tensor) -> None:
        raise RuntimeError("somewhere in backward()")

    def two_forwards(ddp: Any) -> None:
        watch.loss_of(ddp(inputs, "ab"), ddp(inputs, "cd")).backward()

    ddp, finding = branches(), branches(find_unused_parameters=True)
    attempt(lambda: made(nn.Linear(2, 2).requires_grad_(False), context.comm))
    attempt(lambda: branches(bucket_size_mib=0))
    attempt(lambda: made(nn.ModuleList([nn.Embedding(2, 2, sparse=True)]), None))
    attempt(lambda: pickle.dumps(ddp))
    attempt(lambda: next(ddp.join()))
    attempt(lambda: watch.loss_of(ddp(inputs, "acd")).backward())
    attempt(lambda: ddp(inputs, "abcd"))
    attempt(lambda: two_forwards(finding))
    broken = branches()
    broken.module.layers["a"].weight.register_hook(fail)
    outputs = broken(inputs, "abcd")
    for _ in range(2):
        attempt(lambda: watch.loss_of(outputs).backward(retain_graph=True))
    return said


REFUSED = [  # in this order: the error, and what it names
    ("ValueError", ""),
    ("ValueError", r"^bucket_size_mib\b.* 0\b"),
    ("ValueError", r"^0 .*\bsparse\b"),
    ("TypeError", r"^DistributedDataParallel\b.*\bstate_dict\(\)"),
    ("ValueError", r"^join\(\).*\bfind_unused_parameters=True$"),
    ("RuntimeError", r"^1 .*\blayers\.b\.weight\b.*\bfind_unused_parameters=True$"),
    ("RuntimeError", r"\bbackward\(\)"),
    ("SecondGradientError", r"^layers\.b\.weight\b"),
    ("RuntimeError", r"^somewhere\b"),  # of the hook
    ("SecondGradientError", r"^layers\.d\.weight\b"),
]


def test_mistakes_of_the_caller_are_named(unit: ModuleType, golden: Golden) -> None:
    done = run(partial(refusals, unit=unit), 2)
    done.require_finished()
    told = done.values[0]
    assert [kind for kind, _ in told] == [kind for kind, _ in REFUSED]
    for (_, message), (_, named) in zip(told, REFUSED, strict=True):
        assert re.search(named, message)
    golden("units/ddp-refusals", "\n".join(map(": ".join, told)))


# ── the oracle and the benchmark can say no ─────────────────────────────────────────


def test_the_oracle_of_order_sees_early_late_and_missing_departures() -> None:
    buckets = [["d", "c"], ["b", "a"]]
    call = ["call", "all_reduce", 9, False]
    d, c, b, a = (["gradient", name] for name in "dcba")
    assert untimely([d, c, call, b, a, call], buckets) == ("", "")
    wrong: dict[str, list[watch.Happened]] = {
        "bucket-leaves-too-early": [d, call, c, b, a, call],
        "bucket-leaves-too-late": [d, c, b, call, a, call],
        "reduced-after-backward": [d, c, b, a, call, call],
        "no-messages": [d, c, b, a],
        "": [d, c, call, b, a],
    }
    for slug, events in wrong.items():
        flaw, found = untimely(events, buckets)
        assert flaw
        assert found == slug


def test_a_ratio_is_met_by_its_upper_bound_not_by_its_median() -> None:
    steady = [[(1.0, 1.0), (1.02, 1.0), (0.99, 1.0)] * 5] * 5
    spread = [[(0.5, 1.0)] * 7, [(1.0, 1.0)] * 7, [(1.5, 1.0)] * 7] * 2
    bench = Bench("x", None, at_most={"x": 1.05})
    good, bad = bench.ratio("x", steady, "peer"), bench.ratio("x", spread, "peer")
    assert good["value"] == bad["value"] == 1.0
    assert good["met"]
    assert not bad["met"]
    assert bench.ratio("without a bar", steady, "peer")["upper"] <= 1.02
