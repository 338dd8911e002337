"""ZeRO's stages beside torch's own, on one transformer: bytes, losses, another world.

Bytes per rank are those of the formula; ZeroRedundancyOptimizer and FSDP2 hold what
they hold, measured in the same way.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.curriculum import load
from distlab.grading.checks.sharded_optimizer import plan as plans
from distlab.grading.checks.sharded_optimizer.scenarios import (
    MOMENTUM,
    backward,
    make_batch,
    make_groups,
    make_model,
    make_optimizer,
    use_last_layer,
)
from distlab.grading.checks.sharded_optimizer.shards import Alone
from distlab.grading.kit.live_bytes import LiveBytes
from distlab.grading.kit.plain_sgd import PlainSGD
from distlab.runner import Cluster, Limits, RankContext
from distlab.sim import run as simulate
from tests.corpora import sharded as ranks
from tests.corpora.both_ways import leave, meet

SIDE = "reference"
KINDS = ("weights", "gradients", "state", "alive")
STEPS, SAVED_AT = 20, 7
GLOBAL_BATCH = 12  # divisible by 1, 2, 3 and 4 ranks


@pytest.fixture(scope="module", autouse=True)
def warm(cluster: Cluster) -> None:
    """Before ranks are forked: what each would import by itself."""
    cluster.warm("torch._dynamo", "torch.distributed.fsdp", "tests.corpora.sharded")


def ran(cluster: Cluster, program: Any, n: int, *values: Any) -> list[Any]:
    run = cluster.run(program, n, *values, limits=Limits(seconds=100))
    assert run.outcome == "finished", run.explanation
    return list(run.values)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bytes_per_rank_are_those_of_the_formula(
    cluster: Cluster, tmp_path: Path, stage: int
) -> None:
    values = ran(cluster, ranks.held, 3, str(tmp_path), SIDE, stage, True)
    for value in values:
        for kind in KINDS:
            right = value["formula"][kind]
            assert value["held"][kind] == pytest.approx(right, rel=0.01), kind


def test_torchs_two_hold_as_much_as_the_stages_they_are(
    cluster: Cluster, tmp_path: Path
) -> None:
    unit = load("sharded_optimizer", SIDE)
    model = ranks.make_transformer(ranks.SMALL)
    size = sum(p.numel() for p in model.parameters())
    found = ran(cluster, ranks.peers_held, 2, str(tmp_path), True)
    for name, stage in (("ZeroRedundancyOptimizer", 1), ("FSDP2", 3)):
        total = sum(sum(value[name].values()) for value in found)
        # Its ranks share whole parameters: fair on the average, not on each.
        assert total / 2 == pytest.approx(unit.bytes_per_rank(size, 2, stage), rel=0.02)


def parity(context: RankContext, folder: str, side: str) -> dict[str, list[float]]:
    comm, n = meet(context, folder), context.world_size
    contestants: dict[str, Any] = {
        f"stage{stage}": ranks.Ours(
            comm, ranks.make_transformer(ranks.SMALL), side, stage
        )
        for stage in (1, 2, 3)
    }
    contestants["ZeroRedundancyOptimizer"] = ranks.Zro(
        ranks.make_transformer(ranks.SMALL)
    )
    contestants["FSDP2"] = ranks.Fsdp2(ranks.make_transformer(ranks.SMALL))
    alone = ranks.Unsharded(ranks.make_transformer(ranks.SMALL))
    losses: dict[str, list[float]] = {name: [] for name in (*contestants, "unsharded")}
    for step in range(STEPS):
        tokens = ranks.tokens_of(ranks.SMALL, step, GLOBAL_BATCH, 0)
        for name, contestant in contestants.items():
            loss = torch.tensor(
                contestant.step(tokens.chunk(n)[context.rank]), dtype=torch.float64
            )
            losses[name].append(float(mean(loss)))
        losses["unsharded"].append(alone.step(tokens))
    leave()
    return losses


def mean(value: Tensor) -> Tensor:
    dist.all_reduce(value)
    return value / dist.get_world_size()


def save(context: RankContext, folder: str, side: str, count: int) -> list[float]:
    comm = meet(context, folder)
    ours = ranks.Ours(comm, ranks.make_transformer(ranks.SMALL), side, 2)
    losses = _losses(ours, range(count))
    torch.save(ours.zero.state_dict(), Path(folder) / f"state{context.rank}.pt")
    if context.rank == 0:
        torch.save(ours.model.state_dict(), Path(folder) / "weights.pt")
    leave()
    return losses


def go_on(context: RankContext, folder: str, side: str, count: int) -> list[float]:
    (Path(folder) / "again").mkdir(exist_ok=True)
    comm = meet(context, f"{folder}/again")
    model = ranks.make_transformer(ranks.SMALL)
    model.load_state_dict(torch.load(Path(folder) / "weights.pt", weights_only=True))
    ours = ranks.Ours(comm, model, side, 2)
    files = sorted(Path(folder).glob("state*.pt"))
    ours.zero.load_state_dict([torch.load(f, weights_only=True) for f in files])
    losses = _losses(ours, range(count, STEPS))
    leave()
    return losses


def _losses(ours: ranks.Ours, steps: range) -> list[float]:
    found = []
    for step in steps:
        tokens = ranks.tokens_of(ranks.SMALL, step, GLOBAL_BATCH, 0).chunk(
            dist.get_world_size()
        )
        loss = torch.tensor(ours.step(tokens[dist.get_rank()]), dtype=torch.float64)
        found.append(float(mean(loss)))
    return found


def alone() -> list[float]:
    one = ranks.Unsharded(ranks.make_transformer(ranks.SMALL))
    return [
        one.step(ranks.tokens_of(ranks.SMALL, s, GLOBAL_BATCH, 0)) for s in range(STEPS)
    ]


@pytest.mark.slow
def test_losses_are_those_of_unsharded_adamw_and_of_torchs_two(
    cluster: Cluster, tmp_path: Path
) -> None:
    right = alone()
    assert right[-1] < right[0] - 0.1
    for losses in ran(cluster, parity, 2, str(tmp_path), SIDE):
        assert len(losses) == 6
        for name, found in losses.items():
            assert found == pytest.approx(right, abs=1e-10), name


def test_saved_at_4_ranks_it_goes_on_at_3(cluster: Cluster, tmp_path: Path) -> None:
    right, folder = alone(), str(tmp_path)
    for losses in ran(cluster, save, 4, folder, SIDE, SAVED_AT):
        assert losses == pytest.approx(right[:SAVED_AT], abs=1e-10)
    for losses in ran(cluster, go_on, 3, folder, SIDE, SAVED_AT):
        assert losses == pytest.approx(right[SAVED_AT:], abs=1e-10)


# ── without ranks ───────────────────────────────────────────────────────────────────


def make_small() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


def make_zero(model: nn.Module, groups: Any, n: int = 2, stage: int = 1) -> Any:
    unit = load("sharded_optimizer", SIDE)
    factory = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    comm = Alone(0, n, torch.device("cpu"), 0)
    return unit.at_stage(stage, unit.ShardedOptimizer(comm, model, groups, factory))


def test_half_a_state_is_refused() -> None:
    model = make_small()
    zero = make_zero(model, [{"params": model.parameters()}])
    for bucket in zero.buckets:
        bucket.shard.grad = torch.ones_like(bucket.shard)
    zero.optimizer.step()
    state = zero.state_dict()
    state["param_groups"][0]["lr"] = 7.0
    for states in ([state], [state, state]):  # a rank is missing, or is there twice
        with pytest.raises(ValueError, match=r"\b0\.weight\b"):
            zero.load_state_dict(states)
    with pytest.raises(ValueError, match=r"\bsharded\b"):
        zero.load_state_dict([{}, {}])
    assert zero.param_groups[0]["lr"] == 0.1


def test_dtypes_of_a_layer_have_buckets_of_their_own() -> None:
    model = make_small()
    model[0].weight.data = model[0].weight.data.bfloat16()
    zero = make_zero(model, [{"params": model.parameters()}])
    dtypes = [bucket.flat.dtype for bucket in zero.buckets]
    assert dtypes == [torch.bfloat16, torch.float32, torch.float32]
    assert model[0].weight.dtype == torch.bfloat16


def test_live_bytes_sees_what_is_hidden_and_what_is_freed() -> None:
    """The oracle of memory by itself: views, a tensor nobody names, freed memory."""
    hidden: list[Any] = []
    with LiveBytes() as memory:
        whole = torch.zeros(100, dtype=torch.float64)
        part = whole[:10]
        del whole
        assert memory.live == 800
        hidden.append({"deep": [part.clone()]})
        assert memory.live == 880
        part.untyped_storage().resize_(0)
        assert memory.live == 80
        hidden.clear()
        assert memory.live == 0


def test_the_one_process_steps_as_torchs_sgd_does_to_the_bit() -> None:
    ours, torchs = make_model(3), make_model(3)
    steppers = (
        PlainSGD(make_groups(ours), lr=1.0, momentum=MOMENTUM),
        make_optimizer(make_groups(torchs)),
    )
    for step in range(4):
        for model, stepper in zip((ours, torchs), steppers, strict=True):
            stepper.zero_grad()
            use_last_layer(model, step > 1)  # it has no gradient before that
            backward(model, make_batch(3, step, 0))
            stepper.step()
    for mine, right in zip(ours.parameters(), torchs.parameters(), strict=True):
        assert torch.equal(mine, right)


def test_it_runs_in_the_simulated_cluster() -> None:
    run = simulate(simulated_steps, 3, 3, seed=1)
    assert run.outcome == "finished", run.explanation
    right = alone()[:3]
    for losses in run.values:
        assert losses == pytest.approx(right, abs=1e-10)


def simulated_steps(context: Any, stage: int) -> list[float]:
    model, losses = ranks.make_transformer(ranks.SMALL), []
    ours = ranks.Ours(context.comm, model, SIDE, stage)
    for step in range(3):
        tokens = ranks.tokens_of(ranks.SMALL, step, GLOBAL_BATCH, 0)
        loss = torch.tensor(
            ours.step(tokens.chunk(3)[context.rank]), dtype=torch.float64
        )
        context.comm.all_reduce(loss)
        losses.append(float(loss / 3))
    return losses


def test_ranges_that_are_places_in_the_vector_are_told_from_right_ones() -> None:
    for sizes, world_size in plans.cases(3):
        right = plans.right_plan(sizes, world_size)
        assert plans.counted_in_the_vector(sizes, right) is None
        begins = [sum(sizes[:which]) for which in range(len(sizes))]
        moved = [
            [(which, begins[which] + a, begins[which] + b) for which, a, b in shard]
            for shard in right
        ]
        found = plans.counted_in_the_vector(sizes, moved)
        assert (found is None) == (moved == right), (sizes, world_size)
