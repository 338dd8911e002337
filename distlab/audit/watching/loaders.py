"""DataLoaders: which samples each batch has, and which random numbers they were given.

A sample is known by its index and by a digest of its content. In a worker process the
digest goes into a file of the run's folder, because nobody reads the log there.
"""

from __future__ import annotations

import json
import os
import random
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Subset, dataloader
from torch.utils.data._utils import fetch

from distlab.audit.fingerprints import digest_of
from distlab.audit.log import Memory, current
from distlab.audit.places import Place
from distlab.audit.source import attribute_set_at
from distlab.audit.watching.patches import Patches

_FEW = 20  # items of a list that is looked into
_DEEP = 3  # attributes of a dataset's attributes that may be generators


def watch(patches: Patches) -> None:
    """Install the hooks."""
    patches.observe(DataLoader, "__init__", after=_made)
    patches.replace(DataLoader, "__iter__", _counted_iter)
    base = dataloader._BaseDataLoaderIter
    patches.replace(base, "_next_index", _noted_indices)
    patches.replace(base, "__next__", _noted_batches)
    patches.replace(fetch._BaseDatasetFetcher, "__init__", _recording)
    for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
        patches.replace(kind, "fetch", _noted_draws)


def _made(memory: Memory, _: None, loader: Any, *args: Any, **kwargs: Any) -> None:
    sampler = _innermost(loader)
    memory.log.add(
        "loader",
        number=memory.number("loader", loader),
        drop_last=bool(loader.drop_last),
        distributed=_is_distributed(sampler),
        replicas=int(getattr(sampler, "num_replicas", 1) or 1),
        padded=not getattr(sampler, "drop_last", True),
        shuffle=bool(getattr(sampler, "shuffle", False)),
        random=type(sampler).__name__ in ("RandomSampler", "SubsetRandomSampler"),
        replacement=bool(getattr(sampler, "replacement", False)),
        weighted=type(sampler).__name__ == "WeightedRandomSampler",
    )


def _innermost(loader: Any) -> Any:
    """Return the sampler that deals out the indices, inside of a batch sampler."""
    sampler = loader.sampler
    found = getattr(loader, "batch_sampler", None)
    for _ in range(_DEEP):
        found = getattr(found, "sampler", None) or getattr(found, "batch_sampler", None)
        if found is not None and _is_distributed(found):
            return found
    return sampler


def _is_distributed(sampler: Any) -> bool:
    return hasattr(sampler, "set_epoch") and hasattr(sampler, "num_replicas")


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def _root_indices(dataset: Any, indices: list[int]) -> list[int]:
    while isinstance(dataset, Subset):
        indices = [int(dataset.indices[index]) for index in indices]
        dataset = dataset.dataset
    return indices


def _counted_iter(original: Any) -> Any:
    def begin(self: Any) -> Any:
        memory = current()
        if memory is None:
            return original(self)
        number = memory.number("loader", self)
        key = f"epochs of {number}"
        epoch = memory.counts[key]
        memory.counts[key] += 1
        length = _length(self.dataset)
        part = None
        if length is not None and isinstance(self.dataset, Subset):
            part = _root_indices(self.dataset, list(range(length)))
        memory.log.add(
            "epoch",
            loader=number,
            epoch=epoch,
            length=length,
            part=part,
        )
        memory.loader = (number, epoch)
        if self._iterator is not None:  # persistent workers: it begins again
            self._iterator.__dict__.pop("_distlab_audit", None)
        iterator = original(self)
        iterator._distlab_loader = self
        iterator._distlab_audit = (number, epoch, deque(), self.dataset)
        return iterator

    return begin


def _noted_indices(original: Any) -> Any:
    def _next_index(self: Any) -> Any:
        indices = original(self)
        noted = getattr(self, "_distlab_audit", None)
        if noted is None:  # workers ask ahead while the iterator is being made
            self.__dict__.setdefault("_distlab_early", deque()).append(indices)
        else:
            noted[2].append(indices)
        return indices

    return _next_index


def _noted_batches(original: Any) -> Any:
    def next_batch(self: Any) -> Any:
        memory = current()
        noted = getattr(self, "_distlab_audit", None)
        if memory is None or noted is None:
            return original(self)
        number, epoch, asked, dataset = noted
        early = self.__dict__.pop("_distlab_early", None)
        if early:
            asked.extendleft(reversed(early))
        memory.loader = (number, epoch)
        try:
            batch = original(self)
        except StopIteration:
            memory.log.add("epoch_end", loader=number, epoch=epoch)
            _expect_lengths(memory, self._distlab_loader)
            raise
        indices = asked.popleft() if asked else None
        if isinstance(indices, int):
            indices = [indices]
        known = isinstance(indices, list) and all(isinstance(i, int) for i in indices)
        memory.log.add(
            "batch",
            loader=number,
            epoch=epoch,
            indices=_root_indices(dataset, indices) if known and indices else None,
            rows=_rows_of(batch),
        )
        return batch

    return next_batch


def _expect_lengths(memory: Memory, loader: Any) -> None:
    """Look out for tensors as long as a padded data set, and as it truly is."""
    sampler, length = _innermost(loader), _length(loader.dataset)
    if _is_distributed(sampler) and length:
        padded = int(getattr(sampler, "total_size", length))
        if padded > length:
            memory.lengths |= {length, padded}


def _rows_of(batch: Any) -> int:
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 1
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, (list, tuple)) and batch:
        return _rows_of(batch[0])
    return 0


# ── content, and random numbers ─────────────────────────────────────────────────────


def _recording(original: Any) -> Any:
    def init(self: Any, dataset: Any, auto: Any, collate: Any, drop: Any) -> None:
        if current() is None:
            original(self, dataset, auto, collate, drop)
            return

        def recorded(data: Any) -> Any:
            samples = data if auto and isinstance(data, list) else [data]
            self._distlab_content = [digest_of(sample) for sample in samples]
            return collate(data)

        original(self, dataset, auto, recorded, drop)

    return init


def _noted_draws(original: Any) -> Any:
    def fetch(self: Any, index: Any) -> Any:
        memory = current()
        if memory is None:
            return original(self, index)
        before = dict(_generators(self.dataset))
        data = original(self, index)
        after = dict(_generators(self.dataset))
        drawn = {
            name: [state, owner]
            for name, (state, owner) in before.items()
            if after.get(name, (None,))[0] != state
        }
        content = self.__dict__.pop("_distlab_content", None)
        info = torch.utils.data.get_worker_info()
        note = {
            "loader": memory.loader[0],
            "epoch": memory.loader[1],
            "worker": info.id if info else None,
            "content": content,
            "drawn": {name: state for name, (state, _) in drawn.items()},
            "made": {
                name: memory.seeded.get(name) or place
                for name, (_, place) in drawn.items()
            },
        }
        _write(memory, note)
        return data

    return fetch


def _write(memory: Memory, note: dict[str, Any]) -> None:
    if note["worker"] is None:
        memory.log.add("fetch", **note)
        return
    path = Path(memory.log.folder) / f"rank{memory.log.rank}-{os.getpid()}.jsonl"
    note["made"] = {k: p and [p.file, p.line] for k, p in note["made"].items()}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(note) + "\n")


Source = tuple[str, tuple[str, Place | None]]
"""A generator's name, its state, and the line that made it."""


def _generators(dataset: Any) -> Iterator[Source]:
    """Return everything that a sample may draw from."""
    import numpy as np

    yield "torch", (digest_of(torch.get_rng_state()), None)
    yield "random", (digest_of(repr(random.getstate())), None)
    yield "numpy", (digest_of(_numpy_state(np.random.get_state())), None)
    yield from _held(dataset, "dataset", _DEEP, set(), None)


def _numpy_state(state: Any) -> list[Any]:
    return [state[1], state[2]]


def _held(
    thing: Any, name: str, depth: int, seen: set[int], made: Place | None
) -> Iterator[Source]:
    if id(thing) in seen or depth < 0:
        return
    seen.add(id(thing))
    state = _state_of(thing)
    if state:
        yield name, (state, made)
    elif isinstance(thing, (list, tuple)) and len(thing) < _FEW:
        for number, item in enumerate(thing):
            yield from _held(item, f"{name}[{number}]", depth - 1, seen, made)
    elif hasattr(thing, "__dict__") and not isinstance(thing, (type, torch.nn.Module)):
        for key, item in list(vars(thing).items()):
            place = attribute_set_at(type(thing), key) or made
            yield from _held(item, f"{name}.{key}", depth - 1, seen, place)


def _state_of(thing: Any) -> str:
    """Return a digest of a generator's state, "" for anything else."""
    import numpy as np

    if isinstance(thing, torch.Generator):
        return digest_of(thing.get_state())
    if isinstance(thing, np.random.Generator):
        return digest_of(repr(thing.bit_generator.state))
    if isinstance(thing, np.random.RandomState):
        return digest_of(_numpy_state(thing.get_state()))
    if isinstance(thing, random.Random):
        return digest_of(repr(thing.getstate()))
    return ""
