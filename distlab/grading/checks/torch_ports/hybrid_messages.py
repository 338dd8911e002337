"""Checks of task 3.27, C3: which messages a step of a sharded model sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distlab.grading.checks.torch_ports.hybrid_runs import (
    MIXED,
    WORLDS,
    node_of,
    replicas_of,
    shard_size,
    sharded_steps,
)
from distlab.grading.clause import clause
from distlab.grading.kit.shard_training import make_model
from distlab.grading.kit.torch_group import finished
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner.autopsy import Evidence

UNEVEN = 1.1  # columns may be sharded instead, with a little more padding

Sent = dict[str, list[dict[str, Any]]]


@clause("torch_ports.hybrid_shard", "C3", worlds=WORLDS, runs=[on_ranks(sharded_steps)])
def layer_by_layer(runs: Runs) -> str | None:
    """Which tensors went through which group, in which dtype."""
    n = runs.world_size
    run = finished(runs, sharded_steps)
    for rank, both in enumerate(run.values):
        value = both["mixed"]
        sent = {
            kind: [record for record in value["sent"] if kind in record["name"]]
            for kind in ("allgather", "reduce_scatter", "allreduce")
        }
        _expect_dtypes(rank, value, sent)
        _expect_groups(rank, n, sent)
        _expect_sizes(rank, n, sent)
    return f"n = {n}: bfloat16 is gathered, float32 is summed, layer by layer"


def _expect_dtypes(rank: int, value: dict[str, Any], sent: Sent) -> None:
    narrow, wide = map(str, MIXED)
    if value["computed"] != narrow:
        raise NotYetError(
            f"in forward on rank {rank}, the last layer computes in "
            f"{value['computed']}, "
            f"expected {narrow}",
            evidence=(_told(rank, value["sent"]),),
        )
    for kind, records in sent.items():
        expected = narrow if kind == "allgather" else wide
        dtypes = {record["dtype"] for record in records}
        if dtypes - {expected}:
            raise NotYetError(
                f"rank {rank} calls {kind} with {', '.join(sorted(dtypes))}, expected "
                f"{expected}",
                slug="summed-in-16-bits" if narrow in dtypes else "",
                evidence=(_told(rank, value["sent"]),),
                rule="MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce)",
            )


def _expect_groups(rank: int, n: int, sent: Sent) -> None:
    node, size = node_of(rank, n), n // replicas_of(n)
    rail = tuple(range(rank % size, n, size))
    for kind, records in sent.items():
        expected = rail if kind == "allreduce" else node
        groups = {record["ranks"] for record in records}
        if groups - {expected}:
            raise NotYetError(
                f"rank {rank} calls {kind} in the group of ranks {_names(groups)}, "
                f"expected ranks {', '.join(map(str, expected))}",
                evidence=(_told(rank, [r for own in sent.values() for r in own]),),
            )


def _expect_sizes(rank: int, n: int, sent: Sent) -> None:
    size = n // replicas_of(n)
    layers = [size * shard_size(layer, size) for layer in make_model(0)]  # padded
    records = [record for own in sent.values() for record in own]
    largest = max((record["elements"] for record in sent["allgather"]), default=0)
    if size > 1 and not 0 < largest <= UNEVEN * max(layers):
        raise NotYetError(
            f"rank {rank} gathers {largest} elements at once, expected at most the "
            f"{max(layers)} of the largest layer",
            slug="layers-gathered-together" if largest > 0.8 * sum(layers) else "",
            evidence=(_told(rank, records),),
            rule="fully_shard for each layer first, then for the model",
        )
    for kind, ranks, expected in (
        ("reduce_scatter", size, sum(layers)),
        ("allreduce", n // size, sum(layers) // size),
    ):
        count = sum(record["elements"] for record in sent[kind])
        if ranks > 1 and not count <= UNEVEN * expected <= UNEVEN * UNEVEN * count:
            raise NotYetError(
                f"in a step, rank {rank} sends {count} elements through {kind}, "
                "expected "
                f"{expected}",
                evidence=(_told(rank, records),),
            )


def _names(groups: set[tuple[int, ...]]) -> str:
    return " and in that of ranks ".join(
        ", ".join(map(str, group)) for group in sorted(groups)
    )


def _told(rank: int, records: Sequence[dict[str, Any]]) -> Evidence:
    kinds = {(r["name"].strip("_"), r["dtype"], r["ranks"]) for r in records}
    texts = [f"{name} {dtype} {list(ranks)}" for name, dtype, ranks in sorted(kinds)]
    return Evidence(rank, "sent", "; ".join(texts) or "nothing")
