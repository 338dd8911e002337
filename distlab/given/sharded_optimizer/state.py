"""The optimizer's state by name: collect it from all ranks, and cut it for this one."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from distlab.given.sharded_optimizer.buckets import Bucket, flatten
from distlab.given.sharded_optimizer.uneven import is_per_element, parameters_of, split

Entry = dict[str, Any]  # start, stop, and what the optimizer keeps for this range
RANGE = ("start", "stop")


def saved_groups(
    optimizer: torch.optim.Optimizer, buckets: list[Bucket]
) -> list[dict[str, Any]]:
    """Return each group's settings and the names of all its parameters."""
    bucket_of = dict(parameters_of(buckets))
    found = []
    for group in optimizer.param_groups:
        own = {id(b): b for p in group["params"] if (b := bucket_of.get(p))}
        names = [name for bucket in own.values() for name in bucket.names]
        settings = {key: deepcopy(v) for key, v in group.items() if key != "params"}
        found.append({**settings, "names": names})
    return found


def load_groups(
    optimizer: torch.optim.Optimizer,
    buckets: list[Bucket],
    saved: Sequence[dict[str, Any]],
) -> None:
    """Give each group its saved settings.

    Raises:
        ValueError: the groups have other parameters than those that were saved.
    """
    now = [group["names"] for group in saved_groups(optimizer, buckets)]
    if [set(names) for names in now] != [set(group["names"]) for group in saved]:
        raise ValueError("the saved parameter groups have other parameters than these")
    for group, settings in zip(optimizer.param_groups, saved, strict=True):
        group.update({k: deepcopy(v) for k, v in settings.items() if k != "names"})


def entries_for(bucket: Bucket, states: Sequence[dict[str, Entry]]) -> list[Entry]:
    """Collect the saved state for each range of this rank's shard; set nothing yet.

    Raises:
        ValueError: the states lack elements of a parameter, or have some twice.
    """
    return [
        _entry(states, bucket.names[number], start, stop, bucket.sizes[number])
        for number, start, stop in bucket.shard_ranges
    ]


def load_bucket(
    optimizer: torch.optim.Optimizer, bucket: Bucket, entries: list[Entry]
) -> None:
    """Set the optimizer's state for this rank's shard of the bucket."""
    if not bucket.pieces and not all(_is_like(entry, entries[0]) for entry in entries):
        split(optimizer, bucket)
    if bucket.pieces:
        for piece, entry in zip(bucket.pieces, entries, strict=True):
            optimizer.state[piece] = _on(bucket, entry)
    else:
        optimizer.state[bucket.shard] = _on(bucket, _joined(bucket, entries))


def _entry(
    states: Sequence[dict[str, Entry]], name: str, start: int, stop: int, size: int
) -> Entry:
    saved = [one[name] for one in states if name in one]
    saved.sort(key=lambda entry: (int(entry["start"]), int(entry["stop"])))
    ends = [0, *(int(entry["stop"]) for entry in saved)]
    if [int(entry["start"]) for entry in saved] != ends[:-1] or ends[-1] != size:
        whose = "; each rank's is needed once" if len(states) > 1 else ""
        raise ValueError(f"{name} is incomplete in these states{whose}")
    found: Entry = {}
    for key, value in saved[0].items() if saved else ():  # or it has no elements
        if is_per_element(value):
            found[key] = torch.cat([entry[key] for entry in saved])[start:stop].clone()
        elif key not in RANGE:
            found[key] = deepcopy(value)
    return found


def _joined(bucket: Bucket, entries: list[Entry]) -> Entry:
    joined: Entry = dict(entries[0]) if entries else {}
    for key, value in joined.items():
        if is_per_element(value):
            parts = [entry[key] for entry in entries]
            joined[key] = flatten(parts, bucket.shard.numel())
    return joined


def _is_like(one: Entry, other: Entry) -> bool:
    """Return True if two entries have the same keys and the same single numbers."""
    return one.keys() == other.keys() and all(
        is_per_element(value) or bool(value == other[key]) for key, value in one.items()
    )


def _on(bucket: Bucket, entry: Entry) -> Entry:
    """Return the entry with all vectors on the bucket's device."""
    device = bucket.flat.device
    return {
        key: value.to(device)
        if isinstance(value, Tensor) and is_per_element(value)
        else value
        for key, value in entry.items()
    }
