"""Who reads which samples: the ranks share one data set without a single message.

Guide: phase1_data_parallel/guide/data_loader.md.
Source: Li et al., PyTorch Distributed (arXiv 2006.15704), section 2; torch.utils.data.
Symbols: N = num_samples, n = world_size, G = global_batch_size.
Cost: no communication. Every rank works out the same plan and takes its own part.

    one shuffle, the same on every rank      7 2 9 4 1 8 0 3 6 5
    sampler   rank 0 of 2                    7   9   1   0   6
              rank 1 of 2                      2   4   8   3   5
    loader, G = 4, rank 0 of 2               7   9 | 1   0 | 6
                   rank 1 of 2                 2   4 | 8   3 | 5

The sampler gives every rank equally many samples. The loader cuts the shuffle into
global batches first, and shares out each of them: step by step the ranks together see
what one process would see.
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


def shard_indices(
    num_samples: int, rank: int, world_size: int, drop_last: bool = False
) -> list[int]:
    """The numbers of the samples that are rank `rank`'s: some of 0 … num_samples - 1.

    Where the samples cannot be shared out equally, some are given out again (padding)
    or, with `drop_last`, some are given to nobody (dropping): as few as possible.

    C1 equally many on every rank
    C2 padding: every sample, the repeats spread evenly; dropping: no sample twice
    In torch.distributed: torch.utils.data.distributed.DistributedSampler, inside
    Example: 5 samples, 2 ranks → 0 2 4 and 1 3 0; with drop_last 0 2 and 1 3
    Cost: none. Check: distlab check 1.8
    """
    ### BEGIN SOLUTION data_loader.shard_indices
    #| how many does every rank get? try 5 samples on 2 ranks, and 3 samples on 8
    if drop_last:
        total = num_samples - num_samples % world_size
    else:
        total = math.ceil(num_samples / world_size) * world_size
    return [place % num_samples for place in range(rank, total, world_size)]
    ### END SOLUTION


class DistributedSampler(Sampler[int]):
    """One rank's samples in the order of this epoch's shuffle; made for DataLoader.

    All ranks construct it with the same arguments, except `rank`.

    C1 the ranks share one shuffle as in 1.8; another epoch or seed, another shuffle
    C2 len() tells what iterating gives; everybody else's random numbers stay the same
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
        self.shuffle, self.seed, self.drop_last = shuffle, seed, drop_last
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """From here on, the order of `epoch`; to be called before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        """How many samples this rank gets in an epoch."""
        ### BEGIN SOLUTION data_loader.sampler
        #| of this rank, not of the data set
        return len(self._shard())
        ### END SOLUTION

    def __iter__(self) -> Iterator[int]:
        """The numbers of this rank's samples, one after another."""
        ### BEGIN SOLUTION data_loader.sampler
        #| one order of all samples, the same on every rank; then this rank's part of it
        #| torch.randperm(n, generator=g) shuffles with the random numbers of
        #| g = torch.Generator(), after g.manual_seed(...)
        order = list(range(self.num_samples))
        if self.shuffle:
            # Far apart, so that no two (seed, epoch) of a usual run share a stream.
            start = self.seed * 1_000_003 + self.epoch
            generator = torch.Generator().manual_seed(start)
            order = torch.randperm(self.num_samples, generator=generator).tolist()
        for place in self._shard():
            yield order[place]
        ### END SOLUTION

    def _shard(self) -> list[int]:
        """The places in the order that are this rank's."""
        return shard_indices(
            self.num_samples, self.rank, self.world_size, self.drop_last
        )


class DistributedDataLoader:
    """One rank's part of each global batch: the ranks together do one process's epoch.

    All ranks construct it with the same arguments, except `rank`. Each step has one
    global batch of `global_batch_size` samples; the last of an epoch may be smaller. A
    rank for which nothing is left of it gets a batch without samples.

    1.10 C1 in every step the ranks together have one process's batch, in parts that
            differ by one sample at most
         C2 no two data workers draw the same random numbers, on any rank, in any epoch;
            the same run again draws the same ones again; with another seed each
            worker draws others
    1.15 C1 a loader that takes over the state goes on with the very next sample
         C2 the state is a snapshot of plain numbers; that of another run is refused
         C3 it also fits another number of ranks: rank and world size are not in it
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
        self.dataset, self.num_samples = dataset, len(dataset)  # type: ignore[arg-type]
        self.global_batch_size = global_batch_size
        self.rank, self.world_size = rank, world_size
        self.shuffle, self.seed, self.num_workers = shuffle, seed, num_workers
        self.epoch = 0
        self.num_delivered = 0  # batches of this epoch that iterating has given out
        self._is_over = False  # this loader's own loop has ended: no part of a state

    def set_epoch(self, epoch: int) -> None:
        """From here on, the order of `epoch`; a new one begins at its beginning."""
        if epoch != self.epoch:
            self.epoch, self.num_delivered = epoch, 0

    def __len__(self) -> int:
        """How many steps an epoch has: the same on every rank."""
        return math.ceil(self.num_samples / self.global_batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        """The batches of this epoch still to come; once it is over, all anew."""
        if self._is_over and self.num_delivered == len(self):
            self.num_delivered = 0
        self._is_over = False
        batches = self.batches()[self.num_delivered :]
        loader = DataLoader(
            self.dataset,
            batch_sampler=batches,
            num_workers=self.num_workers,
            collate_fn=self._collate,
            worker_init_fn=self._start_worker,
            # Data workers start with a number drawn from it: not from the global one.
            generator=torch.Generator(),
        )
        for batch in loader:
            # Counted when it is handed out: the workers read ahead.
            self.num_delivered += 1
            yield batch
        # Not yet back to 0: a state that is taken now says that nothing is left.
        self._is_over = True

    def batches(self) -> list[list[int]]:
        """The numbers of this rank's samples in this epoch, one list for each step."""
        ### BEGIN SOLUTION data_loader.loader
        #| self._order() is the shuffle of this epoch, the same on every rank:
        #| first cut it into global batches, then share out each of them
        order, size = self._order(), self.global_batch_size
        starts = range(0, self.num_samples, size)
        return [order[s : s + size][self.rank :: self.world_size] for s in starts]
        ### END SOLUTION

    def worker_seed(self, worker: int) -> int:
        """The seed for data worker `worker` (0 … num_workers - 1) of this rank.

        torch keeps the lowest 32 bits of a seed only: it is by these that the seeds of
        a run must differ. Tried with up to 128 ranks, 40 workers and 200 epochs.
        """
        ### BEGIN SOLUTION data_loader.loader
        #| on what must it depend, so that no two workers anywhere share it?
        place = self.rank * self.num_workers + worker
        number = self.epoch * self.world_size * self.num_workers + place
        # Odd, so that no seed of a run loses itself above the lowest 32 bits.
        return self.seed * 1_000_003 + number
        ### END SOLUTION

    def state_dict(self) -> dict[str, Any]:
        """How far this epoch is, and what the order depends on; for json or a file.

        Taken after the last batch it says that nothing is left of this epoch.
        """
        ### BEGIN SOLUTION data_loader.resume
        #| what must a loader in a new process know to go on with the very next sample?
        #| and what must be the same there, or the numbers mean something else?
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
        """Go on where the loader that gave `state` was.

        Raises:
            ValueError: its order was another: other data, batch size, shuffle or seed.
                This loader is then as it was before.
        """
        ### BEGIN SOLUTION data_loader.resume
        #| take over what tells how far it is; refuse what does not fit
        for name in ("num_samples", "global_batch_size", "shuffle", "seed"):
            mine, its = getattr(self, name), state[name]
            if mine != its:
                raise ValueError(f"{name} is {mine} here, but {its} in the state")
        self.epoch, self.num_delivered = state["epoch"], state["num_delivered"]
        ### END SOLUTION

    def _order(self) -> list[int]:
        """All samples in the order of this epoch."""
        everything = DistributedSampler(
            self.num_samples, 0, 1, shuffle=self.shuffle, seed=self.seed
        )
        everything.set_epoch(self.epoch)
        return list(everything)

    def _collate(self, samples: list[Any]) -> tuple[Tensor, ...]:
        """Samples as one batch; a batch without samples has the usual shapes, too."""
        is_empty = not samples
        samples = [self.dataset[0]] if is_empty else samples
        # An item may be a tuple, or a tensor alone: then the batch has one column.
        rows = [row if isinstance(row, tuple | list) else (row,) for row in samples]
        columns = [
            torch.stack([torch.as_tensor(value) for value in column])
            for column in zip(*rows, strict=True)
        ]
        return tuple(column[:0] if is_empty else column for column in columns)

    def _start_worker(self, worker: int) -> None:
        """In a new data worker: its own random numbers, whoever draws them."""
        seed = self.worker_seed(worker)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # as large as numpy takes them
