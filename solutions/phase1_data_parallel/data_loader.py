"""Distributed data loading: decide which rank reads which samples, without messages.

Guide: phase1_data_parallel/guide/data_loader.md.
Source: Li et al., PyTorch Distributed (arXiv 2006.15704), section 2; torch.utils.data.
Symbols: N = num_samples, n = world_size, G = global_batch_size.
Cost: no communication, because every rank computes the same order and its own shard.

    one shuffle, the same on every rank      7 2 9 4 1 8 0 3 6 5
    sampler   rank 0 of 2                    7   9   1   0   6
              rank 1 of 2                      2   4   8   3   5
    loader, G = 4, rank 0 of 2               7   9 | 1   0 | 6
                   rank 1 of 2                 2   4 | 8   3 | 5

The sampler gives every rank the same number of samples. The loader splits the shuffle
into global batches first and then shards each one, so in every step the ranks together
have the batch of the single-process baseline.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from distlab.data.epochs import tell_epoch
from distlab.data.loops import EpochLoops
from distlab.data.stepped_data import SteppedData
from distlab.seeds import small_seed


def shard_indices(
    num_samples: int, rank: int, world_size: int, drop_last: bool = False
) -> list[int]:
    """Return the indices of rank `rank`'s samples, out of 0 … num_samples - 1.

    If num_samples isn't a multiple of world_size, repeat some samples (padding) or,
    with `drop_last`, leave some out (dropping), in both cases as few as possible.

    C1 Every rank gets the same number of samples.
    C2 With padding, every sample is included, and repeats are spread so evenly that no
       two samples' counts differ by more than one. With dropping, no sample appears
       twice.
    In torch.distributed: torch.utils.data.distributed.DistributedSampler, inside
    Example: 5 samples, 2 ranks → 0 2 4 and 1 3 0; with drop_last 0 2 and 1 3
    Cost: none. Check: distlab check 1.8
    """
    ### BEGIN SOLUTION data_loader.shard_indices
    #| how many samples per rank? try 5 samples on 2 ranks, and 3 samples on 8 ranks
    if drop_last:
        total = num_samples - num_samples % world_size
    else:
        total = math.ceil(num_samples / world_size) * world_size
    return [index % num_samples for index in range(rank, total, world_size)]
    ### END SOLUTION


class DistributedSampler(Sampler[int]):
    """Yields one rank's samples in the order of this epoch's shuffle, to a DataLoader.

    All ranks construct it with the same arguments except `rank`. Without `shuffle`, the
    order is 0, 1, 2, … in every epoch. `seed` is any integer: self.seed has 32 bits.

    C1 All ranks use the same shuffle and shard it as in 1.8. The shuffle changes with
       both the epoch and the seed.
    C2 len() returns the number of this rank's samples, and the sampler doesn't modify
       any global random state.
    In torch.distributed: torch.utils.data.distributed.DistributedSampler
    Cost: none. Check: distlab check 1.9
    """

    def __init__(
        self,
        num_samples: int,
        rank: int,
        world_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        self.num_samples, self.rank, self.world_size = num_samples, rank, world_size
        self.shuffle, self.drop_last = shuffle, drop_last
        self.seed = small_seed(seed)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Use the order of `epoch` from now on; call it before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of this rank's samples in an epoch."""
        ### BEGIN SOLUTION data_loader.sampler
        #| the samples of this rank, not of the data set
        return len(self._shard())
        ### END SOLUTION

    def __iter__(self) -> Iterator[int]:
        """Yield the indices of this rank's samples."""
        ### BEGIN SOLUTION data_loader.sampler
        #| one order of all samples, the same on every rank; then this rank's shard
        #| torch.randperm(n, generator=g) draws a shuffle from g = torch.Generator(),
        #| after g.manual_seed(...)
        order = list(range(self.num_samples))
        if self.shuffle:
            # A large factor: usual runs never use one seed for two (seed, epoch) pairs.
            start = self.seed * 1_000_003 + self.epoch
            generator = torch.Generator().manual_seed(start)
            order = torch.randperm(self.num_samples, generator=generator).tolist()
        for position in self._shard():
            yield order[position]
        ### END SOLUTION

    def _shard(self) -> list[int]:
        """Return the positions in the order that belong to this rank."""
        return shard_indices(
            self.num_samples, self.rank, self.world_size, self.drop_last
        )


class DistributedDataLoader(EpochLoops):
    """Yields one rank's shard of each global batch, as in a single process's epoch.

    All ranks construct it with the same arguments, except `rank`. Each step has one
    global batch of `global_batch_size` samples; the last of an epoch may be smaller. A
    rank gets a batch without samples if its shard of the last global batch is empty.
    `seed` is any integer: self.seed has 32 bits.

    A loop begins with the first batch of the epoch, and num_delivered counts its
    batches. After load_state_dict, it begins with the next batch instead, until a loop
    reaches the end or another epoch starts, so peeking at a batch doesn't move it. With
    equally many ranks and data workers, a resumed epoch has the same random numbers.

    1.10 C1 In every step, the ranks' shards together make up the global batch that a
            single process would use, and shard sizes differ by at most one.
         C2 No two data workers draw the same random numbers, even on different ranks or
            in different epochs. A second run with the same seed draws the same numbers,
            while a different seed changes the numbers of every worker.
    1.15 C1 After it has loaded a saved state, a loader continues with the next sample.
         C2 The state is a snapshot made of plain numbers. A loader refuses a state that
            was saved in a different run.
         C3 The state is the same on all ranks and can be loaded on any number of ranks.
    In torch.distributed: DataLoader with DistributedSampler; torchdata's
    StatefulDataLoader for the state
    Cost: none. Check: distlab check 1.10, distlab check 1.15
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        global_batch_size: int,
        rank: int,
        world_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.dataset, self.num_samples = dataset, len(dataset)  # type: ignore[arg-type]
        self.global_batch_size = global_batch_size
        self.rank, self.world_size = rank, world_size
        self.shuffle, self.num_workers = shuffle, num_workers
        self.seed = small_seed(seed)
        self.epoch = 0
        self.num_delivered = 0  # batches of this epoch that iterating has returned

    def set_epoch(self, epoch: int) -> None:
        """Use the order of `epoch`; a new epoch starts at its first batch."""
        super().set_epoch(epoch)
        tell_epoch(self.dataset, self.epoch)  # it may draw crops anew

    def __len__(self) -> int:
        """Return the number of steps of an epoch, which is the same on every rank."""
        return math.ceil(self.num_samples / self.global_batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield this epoch's batches; after load_state_dict, only the rest of them."""
        rest = enumerate(self.batches()[self._begin :], self._begin)
        # Data workers get a base seed from it, not from the global generator.
        generator = torch.Generator()
        if self.num_workers:
            generator.manual_seed(self.worker_seed(0) % 2**64)
        loader = DataLoader(
            SteppedData(self.dataset, self._seed_step if self.num_workers else None),
            # Each index has its step: a data worker seeds itself before each batch.
            batch_sampler=[[(step, i) for i in batch] for step, batch in rest],
            num_workers=self.num_workers,
            collate_fn=self._collate,
            generator=generator,
        )
        # Counted when a batch is returned, not when it is loaded: workers prefetch.
        yield from self.follow(loader)

    def batches(self) -> list[list[int]]:
        """Return the indices of this rank's samples in this epoch, a list per step."""
        ### BEGIN SOLUTION data_loader.loader
        #| self._order() is the shuffle of this epoch, the same on every rank:
        #| split it into global batches, then shard each global batch
        order, size = self._order(), self.global_batch_size
        starts = range(0, self.num_samples, size)
        return [order[s : s + size][self.rank :: self.world_size] for s in starts]
        ### END SOLUTION

    def worker_seed(self, worker: int) -> int:
        """Return the seed for data worker `worker` (0 … num_workers - 1) of this rank.

        Before each batch a worker seeds itself from this number and the step. torch's
        CPU generator uses only the lowest 32 bits of a seed, so the seeds of a run must
        differ in these bits. We tried up to 128 ranks, 40 workers and 200 epochs.
        """
        ### BEGIN SOLUTION data_loader.loader
        #| what must the seed depend on, so that no two workers of a run share it?
        global_worker = self.rank * self.num_workers + worker
        number = self.epoch * self.world_size * self.num_workers + global_worker
        # An odd factor: two values of self.seed never agree in the lowest 32 bits.
        return self.seed * 1_000_003 + number
        ### END SOLUTION

    def state_dict(self) -> dict[str, Any]:
        """Return the position in this epoch and what the order depends on, for JSON.

        A state saved after the last batch says that no batch of this epoch is left.
        """
        ### BEGIN SOLUTION data_loader.resume
        #| what must a loader in a new process know to continue with the next sample?
        #| and which settings must be equal there, or the position is meaningless?
        return {
            "epoch": self.epoch,
            "num_delivered": self.num_delivered,
            "num_samples": self.num_samples,
            "global_batch_size": self.global_batch_size,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }
        ### END SOLUTION

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the loader that saved `state` was.

        Raises:
            ValueError: its data size, batch size, shuffle or seed differs. This loader
                is then unchanged.
        """
        ### BEGIN SOLUTION data_loader.resume
        #| compare the settings and refuse a state that differs; then load the position
        for name in ("num_samples", "global_batch_size", "shuffle", "seed"):
            own, saved = getattr(self, name), state[name]
            if own != saved:
                raise ValueError(f"{name} is {own} here, but {saved} in the state")
        self.epoch, self.num_delivered = state["epoch"], state["num_delivered"]
        ### END SOLUTION
        self.begin_at(self.num_delivered)  # given: there the next loop begins
        tell_epoch(self.dataset, self.epoch)

    def _order(self) -> list[int]:
        """Return all samples in the order of this epoch."""
        sampler = DistributedSampler(
            self.num_samples, 0, 1, shuffle=self.shuffle, seed=self.seed
        )
        sampler.set_epoch(self.epoch)
        return list(sampler)

    def _collate(self, samples: list[Any]) -> tuple[Tensor, ...]:
        """Stack samples to a batch; an empty batch keeps the shape of a sample."""
        is_empty = not samples
        samples = [self.dataset[0]] if is_empty else samples
        # An item is a tuple, or a single tensor: then the batch has one column.
        rows = [row if isinstance(row, tuple | list) else (row,) for row in samples]
        columns = [
            torch.stack([torch.as_tensor(value) for value in column])
            for column in zip(*rows, strict=True)
        ]
        return tuple(column[:0] if is_empty else column for column in columns)

    def _seed_step(self, step: int) -> None:
        """Seed torch, Python's random and numpy in a data worker before a batch.

        Worker w of an epoch has the steps w, w + num_workers, … The seed is the same
        if the epoch is resumed at this step.
        """
        seed = self.worker_seed(step % self.num_workers) % 2**64
        words = np.random.SeedSequence([seed, step]).generate_state(4)
        torch.default_generator.manual_seed(int(words[0]))  # takes 32 bits
        random.seed(words.tobytes())
        np.random.seed(words)
