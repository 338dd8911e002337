"""Fake tensors in simulated ranks: the same run as with real ones, without memory."""

from __future__ import annotations

import copy
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from distlab.sim import AlphaBeta
from distlab.sim import torch as sim_torch
from distlab.sim.faults import Faults
from distlab.sim.torch.fake.unknown import Unknown
from distlab.sim.torch.played import default_cast
from tests.workbench import test_sim_torch as real
from tests.workbench.test_sim_torch_worlds import line_of, process_state

NET = AlphaBeta(alpha_s=1e-6, bytes_per_s=1e9)


def train_with_adam(model: nn.Module, width: int, steps: int = 2) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        loss = model(torch.randn(4, width)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def layers(width: int, count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))


def ddp(width: int = 64) -> None:
    train_with_adam(DistributedDataParallel(layers(width, 4)), width)


def fsdp2(width: int = 64) -> None:
    model = layers(width, 4)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    train_with_adam(model, width)


def calls(done: Any) -> list[Any]:
    """What the journals say about the calls, with their times."""
    kept = ("k", "n", "op", "t", "dtype", "shape", "line", "group")
    return [
        {key: event.get(key) for key in kept}
        for record in done.ranks
        for event in record.journal
    ]


@pytest.mark.parametrize(
    "program",
    [ddp, fsdp2, real.train_ddp, real.train_fsdp2, real.tensor_parallel, real.overlap],
)
def test_a_run_with_fake_tensors_is_the_run_with_real_ones(program: Any) -> None:
    args = (20_000,) if program is real.overlap else ()
    options: dict[str, Any] = {"net": NET, "flops_per_s": 1e9}
    mine, theirs = (
        sim_torch.run(program, 4, *args, fake=fake, **options) for fake in (True, False)
    )
    assert mine.outcome == theirs.outcome == "finished"
    assert mine.time_s == theirs.time_s > 0
    assert calls(mine) == calls(theirs)


def test_messages_between_two_ranks_carry_sizes() -> None:
    mine, theirs = (
        sim_torch.run(
            real.stage_of_a_pipeline, 3, 4, net=NET, fake=fake
        ).require_finished()
        for fake in (True, False)
    )
    assert mine.outcome == theirs.outcome == "finished"
    assert mine.time_s == theirs.time_s > 0


GIB = 1 << 30


def peak_of(sharded: bool) -> dict[str, int]:
    width, count = 16384, 4  # 1 GiB a layer
    model = layers(width, count)
    if sharded:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    train_with_adam(
        model if sharded else DistributedDataParallel(model), width, steps=2
    )
    return sim_torch.memory().at_peak()


def test_memory_is_accounted_and_not_taken() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    whole = sim_torch.run(peak_of, 4, False, fake=True).require_finished()
    parts = sim_torch.run(peak_of, 4, True, fake=True).require_finished()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) * 1024 < GIB / 2
    for peak in whole.values:
        model = 4 * GIB
        assert peak["parameters"] == peak["gradients"] == model
        assert peak["optimizer"] == 2 * model
        assert peak["gathered"] == 0
        assert peak["other"] >= model  # the buckets
    for peak in parts.values:
        assert peak["parameters"] == GIB
        assert 0 < peak["gradients"] <= GIB  # it is highest within backward()
        assert peak["optimizer"] == pytest.approx(2 * GIB, rel=1e-6)
        assert 0 < peak["gathered"] <= 2 * GIB


def built_on_meta() -> tuple[dict[str, int], float]:
    with torch.device("meta"):
        model = layers(16384, 2)
    for layer in model:
        fully_shard(layer)
    model.to_empty(device="cpu")
    train_with_adam(model, 16384)
    return sim_torch.memory().at_peak(), sim_torch.now_s()


def test_a_model_that_is_built_on_meta_takes_no_memory_either() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done = sim_torch.run(built_on_meta, 4, fake=True).require_finished()
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) * 1024 < GIB / 4
    for peak, _ in done.values:
        assert peak["parameters"] == GIB / 2


def copied_and_saved(folder: str) -> tuple[int, int]:
    layer = nn.Linear(16384, 16384, bias=False)
    layer.register_buffer("mean", torch.zeros(16384, 16384))
    copy.deepcopy(layer)
    path = Path(folder) / f"{dist.get_rank()}.pt"
    torch.save(layer.state_dict(), path)
    return sim_torch.memory().peak // GIB, path.stat().st_size


def test_copies_are_accounted_and_files_are_empty(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    done = sim_torch.run(copied_and_saved, 2, str(tmp_path), fake=True)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (after - before) * 1024 < GIB / 4
    assert done.require_finished().values == [(4, 0)] * 2


def attention(heads: int) -> float:
    query, key, value = torch.randn(3, 2, heads, 128, 64, requires_grad=True)
    functional.scaled_dot_product_attention(query, key, value).sum().backward()
    return sim_torch.now_s()


@pytest.mark.parametrize("fake", [True, False])
def test_attention_is_charged_for_its_scores(fake: bool) -> None:
    done = sim_torch.run(attention, 1, 4, fake=fake, flops_per_s=1e9)
    product = 2 * 2 * 4 * 128 * 128 * 64 / 1e9
    # Two products forward; backward has the scores once more, and four products.
    assert done.require_finished().values == [pytest.approx(7 * product)]


# ── values ──────────────────────────────────────────────────────────────────────────


def known_and_unknown() -> dict[str, Any]:
    ids = torch.tensor([3, 1, 2])
    loss = nn.Linear(8, 8)(torch.randn(2, 8)).sum()
    count = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(count)
    total = torch.zeros(())
    total += loss.detach()
    losses = [loss.item(), total.item(), *torch.ones(3).mul(loss.detach()).tolist()]
    return {
        "known": (ids.max().item(), count.item(), bool(ids[0] == 3)),
        "unknown": all(type(value) is Unknown for value in losses),
        "kinds": [type(sum(losses) / 2), type(-losses[0]), type(round(losses[0], 2))],
        "shown": f"{losses[0]:.3f} {losses[0]:>8.2f}|{losses[0]}",
    }


def test_what_the_program_states_is_known_and_the_rest_is_not() -> None:
    for value in (
        sim_torch.run(known_and_unknown, 3, fake=True).require_finished().values
    ):
        assert value["known"] == (3, 6.0, True)
        assert value["unknown"]
        assert value["kinds"] == [Unknown] * 3
        assert value["shown"].split("|") == ["?        ?", "?"]


def loss_of_a_layer() -> torch.Tensor:
    loss: torch.Tensor = nn.Linear(8, 8)(torch.randn(2, 8)).sum()
    return loss


def stops_early() -> None:
    loss = loss_of_a_layer().item()
    if loss < 0.1:  # nobody knows
        return


def asks_a_tensor() -> None:
    loss = loss_of_a_layer()
    if torch.isnan(loss):  # nobody knows
        return


def picks_by_value() -> None:
    outputs = torch.randn(64, 64)
    outputs[outputs > 0].sum()  # nobody knows


def counts_in_ints() -> None:
    range(int(loss_of_a_layer()))  # nobody knows


@pytest.mark.parametrize(
    ("program", "what"),
    [
        (stops_early, "<"),
        (asks_a_tensor, "bool()"),
        (picks_by_value, "aten."),
        (counts_in_ints, "int()"),
    ],
)
def test_control_flow_by_values_is_refused_with_its_line(
    program: Callable[[], None], what: str
) -> None:
    done = sim_torch.run(program, 2, fake=True)
    error = done.ranks[0].error
    assert error is not None
    assert error.type == "DataDependentError"
    assert re.match(rf"{re.escape(what)}.* in `.*# nobody knows`", error.message)
    line = line_of(program, "# nobody knows")
    assert f"test_sim_torch_fake.py:{line}: " in done.explanation


def raises() -> None:
    loss_of_a_layer().sum().backward()
    raise KeyError("on purpose")


def torchs_own() -> list[Any]:
    kinds = (torch.Tensor, torch.UntypedStorage)
    names = ("item", "tolist", "__bool__", "__repr__", "resize_", "nbytes", "clone")
    hooks = torch.nn.modules.module._global_parameter_registration_hooks
    return [
        *(vars(kind).get(name) for kind in kinds for name in names),
        len(hooks),
        torch.save,
    ]


def test_the_process_is_as_before_afterwards() -> None:
    before = [*process_state(), *torchs_own()]
    done = sim_torch.run(raises, 2, fake=True)
    assert done.outcome == "raised"
    for old, new in zip(before, [*process_state(), *torchs_own()], strict=True):
        assert old is new or old == new
    assert torch.ones(2).tolist() == [1.0, 1.0]


def test_memory_belongs_to_a_rank_with_fake_tensors() -> None:
    with pytest.raises(ValueError, match=r"\bfake\b"):
        sim_torch.memory()


# ── a few ranks that are played ─────────────────────────────────────────────────────


def hybrid(width: int = 63) -> None:
    """FSDP2 in rows of the mesh, replicas in its columns, and a group on top."""
    mesh = init_device_mesh("cpu", (3, 3), mesh_dim_names=("copies", "parts"))
    model = layers(width, 2)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    train_with_adam(model, width)
    dist.all_reduce(torch.ones(1000), group=mesh["copies"].get_group())
    count = torch.tensor(1.0)
    dist.all_reduce(count)
    assert count.item() == dist.get_world_size()


@pytest.mark.parametrize("played", [[0], [4, 7], [0, 1, 2, 3]])
@pytest.mark.parametrize(("program", "ranks"), [(ddp, 8), (fsdp2, 8), (hybrid, 9)])
def test_followers_take_part_as_if_they_were_played(
    program: Any, ranks: int, played: list[int]
) -> None:
    options: dict[str, Any] = {"net": NET, "flops_per_s": 1e9, "fake": True}
    every = sim_torch.run(program, ranks, **options)
    few = sim_torch.run(program, ranks, played=played, **options)
    assert every.outcome == few.outcome == "finished"
    assert few.time_s == every.time_s > 0
    assert calls(few) == calls(every)
    assert few.memory == every.memory
    assert (few.played, few.unlike) == (tuple(played), ())


def rank_one_logs() -> None:
    ddp(8)
    if dist.get_rank() != 1:
        dist.isend(torch.ones(1), 1) if dist.get_rank() == 0 else None
    else:
        dist.recv(torch.ones(1), 0)


def test_played_ranks_that_differ_are_named_and_messages_need_both_ends() -> None:
    done = sim_torch.run(rank_one_logs, 6, fake=True, played=[0, 1, 2, 5])
    assert done.outcome == "finished"
    assert done.unlike == ((0, 1), (1, 2))
    error = sim_torch.run(rank_one_logs, 6, fake=True, played=[0, 5]).ranks[0].error
    assert error is not None
    assert re.search(r"\brank 0\b.*\bsend\b.*\brank 1\b", error.message)


@pytest.mark.parametrize(
    "slow",
    [Faults(straggler={5: 3.0}), Faults(freeze=((5, 0.0, 0.5),))],
    ids=["straggler", "freeze"],
)
def test_a_rank_with_a_fault_is_played(slow: Faults) -> None:
    options: dict[str, Any] = {"net": NET, "flops_per_s": 1e9, "fake": True}
    few = sim_torch.run(ddp, 9, played=[0], faults=slow, **options)
    every = sim_torch.run(ddp, 9, faults=slow, **options)
    assert few.played == (0, 5)
    assert few.time_s == every.time_s > sim_torch.run(ddp, 9, **options).time_s


@pytest.mark.parametrize("played", [[], [9], [-1]])
def test_only_ranks_that_there_are_can_be_played(played: list[int]) -> None:
    with pytest.raises(ValueError, match=r"\bplay\b"):
        sim_torch.run(ddp, 4, fake=True, played=played)
    with pytest.raises(ValueError, match=r"\bfake\b"):
        sim_torch.run(ddp, 4, played=[0])


@pytest.mark.parametrize(
    ("ranks", "per_node", "played"),
    [(8, 8, [*range(8)]), (256, 8, [0, 1, 7, 8, 128, 255]), (64, 64, [0, 1, 32, 63])],
)
def test_who_is_played_by_default(ranks: int, per_node: int, played: list[int]) -> None:
    assert default_cast(ranks, per_node) == played
