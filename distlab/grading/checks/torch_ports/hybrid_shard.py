"""Checks of task 3.27, `torch_ports.hybrid_shard`: fully_shard, and its checkpoint.

A first run trains in float64 and must equal a single process. A second one computes in
bfloat16, and its messages are read. In a third one 2 of 4 ranks load what all 4 saved.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor, nn

from distlab.comm import leave_default_group
from distlab.grading.clause import clause
from distlab.grading.kit.torch_group import finished, join
from distlab.grading.kit.torch_wire import Wire
from distlab.grading.kit.values import (
    Suspect,
    expect_values,
    same_everywhere,
)
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext, Run
from distlab.runner.autopsy import Evidence

WORLDS = (4, 3)
STEPS, SAMPLES = 2, 3
WIDTHS = (6, 5, 7, 3)
LEARNING_RATE, MOMENTUM = 0.1, 0.9
FEWER = 2  # ranks that continue
UNEVEN = 1.3  # rows are sharded, and 5 rows on 2 ranks are 3 and 2
COARSE = 0.05  # what bfloat16 leaves
EXACT = {"compute": "float64", "reduce": "float64"}
MIXED = {"compute": "bfloat16", "reduce": "float32"}
MESH = "init_device_mesh with the shape (replicas, n // replicas), for each layer"


def replicas_of(n: int) -> int:
    """4 ranks store two replicas, others one."""
    return 2 if n == 4 else 1


def make_model(seed: int) -> nn.Sequential:
    """Three layers in float64, (N, 6) to (N, 3)."""
    model = nn.Sequential(
        nn.Sequential(nn.Linear(WIDTHS[0], WIDTHS[1]), nn.Tanh()),
        nn.Sequential(nn.Linear(WIDTHS[1], WIDTHS[2]), nn.Tanh()),
        nn.Linear(WIDTHS[2], WIDTHS[3]),
    ).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            shape = parameter.shape
            parameter.copy_(torch.randn(shape, generator=generator).double() * 0.5)
    return model


def batch_of(seed: int, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Inputs (samples, 6) and targets (samples, 3)."""
    generator = torch.Generator().manual_seed(seed * 7919 + step * 101 + rank)
    drawn = torch.randn(SAMPLES, WIDTHS[0] + WIDTHS[-1], generator=generator)
    inputs, targets = drawn.double().split([WIDTHS[0], WIDTHS[-1]], 1)
    return inputs, targets


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Whatever the dtype of the outputs is."""
    return (outputs.double() - targets).square().mean()


def optimizer_of(model: nn.Module) -> torch.optim.SGD:
    """SGD with momentum: its state counts from the second step on."""
    return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)


def one_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]
) -> None:
    """Forward, backward, step."""
    optimizer.zero_grad()
    loss_of(model(batch[0]), batch[1]).backward()
    optimizer.step()


def full_weights(model: nn.Module) -> Tensor:
    """All in one flat tensor; every rank takes part."""
    found = [getattr(p, "full_tensor", p.detach)() for p in model.parameters()]
    return torch.cat([weight.detach().flatten() for weight in found]).clone()


def _held(model: nn.Module) -> int:
    return sum(getattr(p, "to_local", p.detach)().numel() for p in model.parameters())


def sharded_steps(
    context: RankContext, unit: ModuleType, seed: int, compute: str, reduce: str
) -> dict[str, Any]:
    """Some steps; what each rank stores, and sends in the first step."""
    join(context)
    n, rank = context.world_size, context.rank
    model = make_model(seed)
    dtypes = getattr(torch, compute), getattr(torch, reduce)
    unit.hybrid_shard(model, replicas_of(n), *dtypes)
    optimizer, wire = optimizer_of(model), Wire()
    computed: list[str] = []
    model[-1].register_forward_hook(lambda *_: computed.append(str(_[2].dtype)))
    found: dict[str, Any] = {"held": _held(model)}
    found["stored"] = sorted({str(parameter.dtype) for parameter in model.parameters()})
    for step in range(STEPS):
        if step == 0:
            with wire:
                one_step(model, optimizer, batch_of(seed, step, rank))
        else:
            one_step(model, optimizer, batch_of(seed, step, rank))
    found |= {"weights": full_weights(model), "sent": wire.records}
    found["computed"] = computed[0]
    leave_default_group()
    return found


def continued(context: RankContext, unit: ModuleType, seed: int) -> Tensor | None:
    """All ranks train and save; the first ones load into a new model and go on."""
    join(context)
    n, rank = context.world_size, context.rank
    folder = str(Path.cwd().parent / "checkpoint")
    model = make_model(seed)
    unit.hybrid_shard(model, replicas_of(n), torch.float64, torch.float64)
    optimizer = optimizer_of(model)
    for step in range(STEPS):
        one_step(model, optimizer, batch_of(seed, step, rank))
    unit.save(model, optimizer, folder)
    store = c10d._get_default_store()
    dist.barrier()
    leave_default_group()
    if rank >= FEWER:
        return None
    os.environ["WORLD_SIZE"] = str(FEWER)
    again = dist.PrefixStore("again", store)
    dist.init_process_group("gloo", store=again, rank=rank, world_size=FEWER)
    model = make_model(seed + 1)
    unit.hybrid_shard(model, 1, torch.float64, torch.float64)
    optimizer = optimizer_of(model)
    unit.load(model, optimizer, folder)
    one_step(model, optimizer, batch_of(seed, STEPS, rank))
    weights = full_weights(model)
    leave_default_group()
    return weights


# ── what is right ───────────────────────────────────────────────────────────────────


@lru_cache(maxsize=32)
def one_process(seed: int, ranks: tuple[int, ...], steps: int = STEPS) -> Tensor:
    """The weights after steps with the batches of these ranks."""
    model = make_model(seed)
    _baseline_steps(model, optimizer_of(model), seed, ranks, range(steps))
    return full_weights(model)


def _baseline_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    seed: int,
    ranks: Sequence[int],
    steps: range,
) -> None:
    for step in steps:
        batches = [batch_of(seed, step, rank) for rank in ranks]
        inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        one_step(model, optimizer, (inputs, targets))


@lru_cache(maxsize=16)
def _continued_baseline(seed: int, n: int, keeps: tuple[bool, bool]) -> Tensor:
    """`keeps`: whether weights and momentum of the first steps are there."""
    model, other = make_model(seed), make_model(seed + 1)
    optimizer = optimizer_of(model)
    _baseline_steps(model, optimizer, seed, range(n), range(STEPS))
    if not keeps[0]:
        model.load_state_dict(other.state_dict())
    if not keeps[1]:
        optimizer = optimizer_of(model)
    _baseline_steps(model, optimizer, seed, range(FEWER), range(STEPS, STEPS + 1))
    return full_weights(model)


# ── C1: values ──────────────────────────────────────────────────────────────────────

TRAINED = [on_ranks(sharded_steps, **EXACT), on_ranks(sharded_steps, **MIXED)]


@clause("torch_ports.hybrid_shard", "C1", worlds=WORLDS, runs=TRAINED)
def weights_of_one_process(runs: Runs) -> str | None:
    """V: exactly in float64, roughly in bfloat16."""
    n, seed = runs.world_size, runs.seed
    expected = same_everywhere(one_process(seed, tuple(range(n))), n)
    for spec, tolerance in zip(TRAINED, (1e-10, COARSE), strict=True):
        dtype = dict(spec.values)["compute"]
        run = finished(runs, sharded_steps, **dict(spec.values))
        expect_values(
            [value["weights"] for value in run.values],
            expected,
            what=f"computed in {dtype}, the weights after {STEPS} steps",
            verb="are",
            suspects=_suspects(seed, n),
            tolerance=tolerance,
        )
    return f"n = {n}: the weights of the baseline after {STEPS} steps"


def _suspects(seed: int, n: int) -> list[Suspect]:
    nodes = [one_process(seed, _node(rank, n)) for rank in range(n)]
    alone = [one_process(seed, (rank,)) for rank in range(n)]
    return [
        Suspect(
            slug="replicas-apart",
            values=nodes,
            sentence="each replica takes the mean over its own ranks: the replicas "
            "differ",
            rule=MESH,
        ),
        Suspect(
            slug="own-gradient-only",
            values=alone,
            sentence="every rank trains alone, with its own gradients",
            rule=MESH,
        ),
    ]


def _node(rank: int, n: int) -> tuple[int, ...]:
    """The ranks that store one replica together with `rank`."""
    size = n // replicas_of(n)
    return tuple(range(rank - rank % size, rank - rank % size + size))


# ── C2: memory ──────────────────────────────────────────────────────────────────────


@clause("torch_ports.hybrid_shard", "C2", worlds=WORLDS, runs=TRAINED)
def stored_in_shards(runs: Runs) -> str | None:
    """M: elements of the parameters on each rank, and their dtype."""
    n = runs.world_size
    size, replicas = len(full_weights(make_model(0))), replicas_of(n)
    run = finished(runs, sharded_steps, **MIXED)
    held = [value["held"] for value in run.values]
    evidence = tuple(
        Evidence(rank=rank, state="holds", text=f"{count} of {size} elements")
        for rank, count in enumerate(held)
    )
    if sum(held) != replicas * size or max(held) > UNEVEN * size * replicas / n:
        slug = "weights-not-cut" if min(held) == size else ""
        slug = "one-replica-only" if sum(held) == size < replicas * size else slug
        raise NotYetError(
            f"the ranks store {sum(held)} elements, {max(held)} on one rank; expected "
            f"{replicas} × {size}, about {size * replicas // n} on each of {n} ranks",
            slug=slug,
            evidence=evidence,
            rule=MESH if slug else "",
        )
    stored = {dtype for value in run.values for dtype in value["stored"]}
    if stored != {"torch.float64"}:
        raise NotYetError(
            f"the stored weights are {', '.join(sorted(stored))}: they were float64",
            slug="weights-narrowed",
            rule="MixedPrecisionPolicy(param_dtype=…) narrows the gathered copy only",
        )
    return f"n = {n}: {replicas} × {size} elements, at most {max(held)} on a rank"


# ── C3: messages ────────────────────────────────────────────────────────────────────


@clause("torch_ports.hybrid_shard", "C3", worlds=WORLDS, runs=TRAINED)
def layer_by_layer(runs: Runs) -> str | None:
    """J: which tensors went through which group, in which dtype."""
    n = runs.world_size
    run = finished(runs, sharded_steps, **MIXED)
    for rank, value in enumerate(run.values):
        sent = {
            kind: [record for record in value["sent"] if kind in record["name"]]
            for kind in ("allgather", "reduce_scatter", "allreduce")
        }
        _expect_dtypes(rank, value, sent)
        _expect_groups(rank, n, sent)
        _expect_sizes(rank, n, sent)
    return f"n = {n}: bfloat16 is gathered, float32 is summed, layer by layer"


Sent = dict[str, list[dict[str, Any]]]


def _expect_dtypes(rank: int, value: dict[str, Any], sent: Sent) -> None:
    wide = f"torch.{MIXED['reduce']}", f"torch.{MIXED['compute']}"
    if value["computed"] != wide[1]:
        raise NotYetError(
            f"the last layer computes in {value['computed']}: expected {wide[1]}",
            evidence=(_told(rank, value["sent"]),),
        )
    for kind, records in sent.items():
        expected = wide[1] if kind == "allgather" else wide[0]
        dtypes = {record["dtype"] for record in records}
        if dtypes - {expected}:
            raise NotYetError(
                f"{kind} of {', '.join(sorted(dtypes))} on rank {rank}: expected "
                f"{expected}",
                slug="summed-in-16-bits" if wide[1] in dtypes else "",
                evidence=(_told(rank, value["sent"]),),
                rule="MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)",
            )


def _expect_groups(rank: int, n: int, sent: Sent) -> None:
    node, size = _node(rank, n), n // replicas_of(n)
    rail = tuple(range(rank % size, n, size))
    for kind, records in sent.items():
        expected = rail if kind == "allreduce" else node
        groups = {record["ranks"] for record in records}
        if groups - {expected}:
            raise NotYetError(
                f"rank {rank} has a {kind} with ranks {_names(groups)}: expected "
                f"{', '.join(map(str, expected))}",
                evidence=(_told(rank, [r for own in sent.values() for r in own]),),
            )


def _expect_sizes(rank: int, n: int, sent: Sent) -> None:
    layers = [sum(p.numel() for p in layer.parameters()) for layer in make_model(0)]
    records = [record for own in sent.values() for record in own]
    largest = max((record["elements"] for record in sent["allgather"]), default=0)
    if not 0 < largest <= UNEVEN * max(layers):
        raise NotYetError(
            f"rank {rank} gathers {largest} elements at once; the largest layer has "
            f"{max(layers)}",
            slug="layers-gathered-together" if largest >= sum(layers) else "",
            evidence=(_told(rank, records),),
            rule="fully_shard for each layer first, then for the model",
        )
    for kind, share in (("reduce_scatter", 1.0), ("allreduce", replicas_of(n) / n)):
        if kind == "allreduce" and replicas_of(n) == 1:
            continue
        count = sum(record["elements"] for record in sent[kind])
        expected = share * sum(layers)
        if not expected <= count <= UNEVEN * expected:
            raise NotYetError(
                f"in a step rank {rank} has {count} elements in {kind}: expected about "
                f"{expected:.0f}",
                evidence=(_told(rank, records),),
            )


def _names(groups: set[tuple[int, ...]]) -> str:
    return " | ".join(", ".join(map(str, group)) for group in sorted(groups))


def _told(rank: int, records: Sequence[dict[str, Any]]) -> Evidence:
    kinds = {(r["name"].strip("_"), r["dtype"], r["ranks"]) for r in records}
    texts = [f"{name} {dtype} {list(ranks)}" for name, dtype, ranks in sorted(kinds)]
    return Evidence(rank=rank, state="sent", text="; ".join(texts) or "nothing")


# ── C4: the checkpoint ──────────────────────────────────────────────────────────────


@clause("torch_ports.hybrid_shard", "C4", worlds=(4,), runs=[on_ranks(continued)])
def goes_on_with_fewer(runs: Runs) -> str | None:
    """R: one more step on 2 ranks, as if the 4 ranks had become 2."""
    n, seed = runs.world_size, runs.seed
    run: Run = finished(runs, continued)
    known = [
        ("", (False, False), "nothing was loaded: the new model has its own weights"),
        ("", (False, True), "the momentum was loaded, but not the weights"),
        ("momentum-lost", (True, False), "the weights were loaded, but no momentum"),
    ]
    expect_values(
        run.values[:FEWER],
        same_everywhere(_continued_baseline(seed, n, (True, True)), FEWER),
        what=f"saved on {n} ranks, loaded on {FEWER}: the weights one step later",
        verb="are",
        suspects=[
            Suspect(
                slug=slug,
                values=same_everywhere(_continued_baseline(seed, n, keeps), FEWER),
                sentence=sentence,
                rule="get_state_dict and set_state_dict, of model and optimizer",
            )
            for slug, keeps, sentence in known
        ],
    )
    return f"saved on {n} ranks, continued on {FEWER}"
