"""The unit on other transports, and beside torch's own DistributedDataParallel."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from distlab.comm import leave_default_group
from distlab.curriculum import load
from distlab.grading.checks.gradient_accumulation.microbatches import (
    FINE,
    LEVEL,
    RAGGED,
    Microbatch,
    Zoo,
    first_means,
    gradients_of,
    loss_of,
    make_microbatches,
)
from distlab.grading.kit.values import close
from distlab.runner import Cluster, Limits, RankContext
from distlab.saved_tensors import SavedTensors
from distlab.sim import run
from tests.workbench.judging import verdict_on_entry

SEED = 5
SAMPLES = 24  # on each rank
CUTS = (1, 2, 4, 8)
SIZE = sum(p.numel() for p in Zoo(SEED).parameters())


@pytest.fixture(scope="module")
def ranks(cluster: Cluster) -> Cluster:
    """With what each of them would import for itself."""
    cluster.warm("torch._dynamo", "distlab.grading.warmup:one_step", __name__)
    return cluster


def even(rank: int, count: int) -> list[Microbatch]:
    return make_microbatches(SEED, 0, rank, [SAMPLES // count] * count)


def with_ours(context: RankContext) -> list[dict[str, Any]]:
    """The same samples in 1, 2, 4 and 8 microbatches."""
    unit, done = load("gradient_accumulation"), []
    for count in CUTS:
        model, before = Zoo(SEED), context.traffic.sent_bytes
        batches = even(context.rank, count)
        unit.sync_once(context.comm, model, nn.functional.cross_entropy, batches)
        sent = context.traffic.sent_bytes - before
        done.append({"gradient": gradients_of(model), "sent": sent})
    return done


def with_torch(context: RankContext, store: str, held_back: bool) -> dict[str, Any]:
    """DistributedDataParallel with its no_sync(), and what its buckets hold."""
    n, rank = context.world_size, context.rank
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, n), rank=rank, world_size=n
    )
    model, elements = DistributedDataParallel(Zoo(SEED)), []

    def counted(state, bucket):  # type: ignore[no-untyped-def]  # torch reads these
        elements.append(bucket.buffer().numel())
        mean = bucket.buffer().div_(n)
        work = dist.all_reduce(mean, async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model.register_comm_hook(None, counted)
    *first, last = even(rank, 4)
    for batch in first:
        with model.no_sync() if held_back else nullcontext():
            (nn.functional.cross_entropy(model(batch[0]), batch[1]) / 4).backward()
    (nn.functional.cross_entropy(model(last[0]), last[1]) / 4).backward()
    gradient = gradients_of(model.module)
    leave_default_group()
    return {"gradient": gradient, "elements": sum(elements)}


@pytest.fixture(scope="module")
def ours(ranks: Cluster) -> list[list[dict[str, Any]]]:
    return ranks.run(with_ours, 2).require_finished().values


def test_bytes_of_a_step_do_not_grow_with_the_number_of_microbatches(
    ours: list[list[dict[str, Any]]],
) -> None:
    sent = [{step["sent"] for step in steps} for steps in ours]
    assert all(len(counts) == 1 for counts in sent)
    assert min(map(min, sent)) >= SIZE * 8  # float64; on two ranks each sends all


@pytest.mark.parametrize("held_back", [True, False])
def test_torch_with_no_sync_has_the_same_gradients_and_sends_as_much(
    ranks: Cluster,
    ours: list[list[dict[str, Any]]],
    tmp_path: Path,
    held_back: bool,
) -> None:
    where, limits = str(tmp_path / "store"), Limits(seconds=60)
    theirs = ranks.run(with_torch, 2, where, held_back, limits=limits)
    for own, other in zip(ours, theirs.require_finished().values, strict=True):
        assert other["elements"] == SIZE * (1 if held_back else 4)
        for step in own:
            assert close(step["gradient"], other["gradient"], 1e-12)


def ragged(context: RankContext) -> list[Tensor]:
    unit, model = load("gradient_accumulation"), Zoo(SEED)
    sizes = RAGGED[context.rank % len(RAGGED)]
    batches = make_microbatches(SEED, 0, context.rank, sizes)
    optimizer = SimpleNamespace(step=lambda: None)  # what it would step with is read
    norm = unit.clip(context.comm, model, optimizer, loss_of, batches, 1e-3)
    return [gradients_of(model), torch.tensor(norm, dtype=torch.float64)]


def test_simulated_ranks_hold_one_clipped_gradient() -> None:
    done = run(ragged, 7)
    mean = first_means(SEED, RAGGED).mean()
    for gradient, norm in done.values:
        assert close(norm, mean.norm())
        assert close(gradient, mean * (1e-3 / mean.norm()), 1e-13)


def test_two_mistakes_at_once_are_told_as_facts_without_a_rule(
    cluster: Cluster, tmp_path: Path
) -> None:
    verdict = verdict_on_entry(cluster, tmp_path, "GA56", worlds=(3,))
    failure = verdict.first_failure()
    assert failure is not None
    assert (failure.id, failure.slug, failure.rule) == ("C1", "", "")
    named = ("call 1", "max_norm 50", "rank 0")
    assert all(name in failure.message for name in named)
    found, expected = re.findall(r"\b\d\.\d[\d.e-]*", failure.message)[-2:]
    assert float(found) != float(expected)
    by_rank = [line for line in failure.evidence if line.rank >= 0]
    assert all("expected" in line.text for line in by_rank)


def test_the_finer_cut_has_the_same_samples() -> None:
    assert [sum(sizes) for sizes in FINE] == [sum(sizes) for sizes in LEVEL]
    assert {len(sizes) for sizes in LEVEL} == {3}
    assert {len(sizes) for sizes in FINE} == {5}
    assert close(first_means(SEED, FINE).mean(), first_means(SEED, LEVEL).mean())


def test_activations_are_counted_until_backward_frees_them() -> None:
    weight = nn.Parameter(torch.ones(3, 3))
    inputs = torch.ones(4, 3, requires_grad=True)
    with SavedTensors([weight]) as kept:
        middle = (inputs @ weight).tanh()
        assert kept.live == inputs.nbytes + middle.nbytes
        middle.sum().backward()
        assert kept.live == 0
        loss = (inputs @ weight).tanh().sum()
        assert kept.live == kept.peak > 0
        del loss
        assert kept.live == 0
