"""Phase 1's sampler with torch's names, for torch's DataLoader."""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from types import FrameType
from typing import Any

from torch.utils.data import Dataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from distlab.data.epochs import tell_epoch
from distlab.data.loops import EpochLoops, Loop, check_state, saved_position
from distlab.distributed.group import get_rank, get_world_size, has_rank
from distlab.distributed.parts import running, unit
from distlab.seeds import any_seed

_SETTINGS = ("num_samples", "num_replicas", "shuffle", "seed", "drop_last")
_NEAR = 4  # how many frames up the stack the DataLoader's iterator may be


class DistributedSampler(EpochLoops, Sampler[int]):
    """Yields this rank's samples in the order of this epoch's shuffle.

    Pass either `dataset` or `dataset_size`. `num_replicas` and `rank` default to those
    of the default group. All other arguments must be the same on all ranks. Every rank
    gets equally many samples: to achieve this, we repeat some samples, or leave some
    out if you set `drop_last`. If the data set has a set_epoch method, for example to
    draw new random crops, we tell it the epoch. `seed` may be any integer, including
    numpy's.

    A loop begins at the start of the epoch, whatever loops ran before. After
    load_state_dict, loops begin at the loaded position, until one of them reaches the
    end or set_epoch names another epoch. A single rank can therefore safely peek at a
    batch. To continue a loop that you left in the same process, keep its iterator, or
    load the sampler's own state.

    Raises:
        ValueError: you pass neither or both of dataset and dataset_size, the data set
            has no length, the seed isn't an integer, or there is no such rank.

    Example:
        init_process_group()
        data = torch.utils.data.TensorDataset(torch.arange(10))
        sampler = DistributedSampler(data, seed=3)
        loader = torch.utils.data.DataLoader(data, batch_size=2, sampler=sampler)
        seen = set()
        sampler.set_epoch(1)
        mine = torch.cat([batch for (batch,) in loader])
        for samples in all_gather(mine):
            seen |= set(samples.tolist())
        assert seen == set(range(10))
    """

    def __init__(
        self,
        dataset: Dataset[Any] | None = None,
        dataset_size: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__()
        if (dataset is None) == (dataset_size is None):
            raise ValueError("give dataset or dataset_size, one of them")
        size = _length(dataset) if dataset_size is None else dataset_size
        if None in (num_replicas, rank) and not has_rank():
            raise ValueError(
                "this process has no rank yet: under --standby and --elastic, draw the "
                "samples in the loop, from step.index, get_rank() and get_world_size()"
            )
        self.num_replicas = get_world_size() if num_replicas is None else num_replicas
        self.rank = get_rank() if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"rank {self.rank} of {self.num_replicas} replicas")
        self.num_samples, self.shuffle = operator.index(size), shuffle
        self._dataset = dataset
        self.seed, self.drop_last = any_seed(seed), drop_last
        self._done_epoch: int | None = None  # an epoch that a loaded state had finished
        with running():
            self._inner = unit("data_loader").DistributedSampler(
                self.num_samples,
                self.rank,
                self.num_replicas,
                shuffle=shuffle,
                seed=self.seed,
                drop_last=drop_last,
            )

    @property
    def num_yielded(self) -> int:
        """Count the epoch's indices that the newest loop has yielded, as in state_dict.

        With a DataLoader, we count the samples in the batches that it has returned,
        because its data workers draw indices ahead of that.
        """
        return self.current().returned

    def set_epoch(self, epoch: int) -> None:
        """Use the order of `epoch` from now on; call it before each epoch.

        A different epoch begins at its start. If it's the current epoch, the call
        doesn't change where the next loop begins, so a loaded position is kept.
        """
        done, self._done_epoch = self._done_epoch, None
        super().set_epoch(epoch)
        if done is not None and self.epoch == done:
            self.begin_at(len(self))
        tell_epoch(self._dataset, self.epoch)

    def __len__(self) -> int:
        """Return the number of this rank's samples in an epoch."""
        with running():
            return len(self._inner)

    def __iter__(self) -> Iterator[int]:
        """Yield this rank's indices; after load_state_dict, only the remaining ones."""
        self.settle()
        self._done_epoch = None
        loop = _DataLoaderLoop.of_caller(self._begin)
        with running():
            self._inner.set_epoch(self.epoch)
            rest = islice(iter(self._inner), self._begin, None)
            yield from self.follow(rest, loop)

    def state_dict(self) -> dict[str, Any]:
        """Return the position and everything that determines the order, ready for JSON.

        You can save it inside a loop, after a `break`, or between epochs. With a
        DataLoader, the position counts the batches it has returned, even if its data
        workers are ahead. The only exception is your own batch sampler without a
        batch_size, where the position counts the indices drawn.
        """
        settings = {name: getattr(self, name) for name in _SETTINGS}
        loop = self.current()
        return {
            "epoch": self.epoch,
            "num_yielded": loop.returned,
            "is_over": loop.has_all and not loop.is_running,
            **settings,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the sampler that saved `state` was.

        If that epoch's loop had finished, `epoch` is the next one. Otherwise, the first
        loop gets the rest of the epoch, which may be empty. So this code trains on each
        sample once, and runs whatever follows an epoch once:

            for epoch in range(sampler.epoch, num_epochs):
                sampler.set_epoch(epoch)
                for batch in loader: ...

        Raises:
            ValueError: a setting differs, or `state` isn't from a sampler. This sampler
                is then unchanged.
        """
        check_state(self, state, _SETTINGS, ("epoch", "num_yielded"))
        epoch, number = saved_position(state, "num_yielded", len(self))
        self._done_epoch, self.epoch = None, epoch
        if state.get("is_over"):
            self._done_epoch = self.epoch
            self.epoch += 1
            self.begin_at(0)
        else:
            self.begin_at(number)
        tell_epoch(self._dataset, self.epoch)


class _DataLoaderLoop(Loop):
    """A loop of torch's DataLoader, whose data workers draw ahead of what it returns.

    We replace the iterator's counter with ours, because we still need the count after a
    `break`, when the iterator is gone. If we kept it, its data workers would stay too.
    """

    def __init__(self, iterator: _BaseDataLoaderIter, size: int, begin: int) -> None:
        super().__init__(begin)
        self._iterator, self._size, self._begin = weakref.ref(iterator), size, begin
        self._drop_last = bool(getattr(iterator._index_sampler, "drop_last", False))
        self._batches = _Counter()
        iterator._num_yielded = self._batches  # type: ignore[assignment]
        # Data workers that persist, or the caller, keep an iterator that has ended.
        iterator._next_data = self._batches.ending(iterator)  # type: ignore[method-assign]

    @classmethod
    def of_caller(cls, begin: int) -> _DataLoaderLoop | None:
        """Find the DataLoader's loop that is calling a sampler's `__iter__`, if any."""
        frame: FrameType | None = sys._getframe(2)
        for _ in range(_NEAR):
            caller = frame.f_locals.get("self") if frame else None
            if isinstance(caller, _BaseDataLoaderIter):
                is_batched = caller._auto_collation
                sampler = caller._index_sampler
                size = getattr(sampler, "batch_size", None) if is_batched else 1
                return cls(caller, size, begin) if size else None
            frame = frame.f_back if frame else None
        return None

    @property
    def returned(self) -> int:
        """The number of samples in the batches that the caller's loop has received."""
        return min(self.drawn, self._begin + self._batches.number * self._size)

    @property
    def has_all(self) -> bool:
        """True if no batch is left, except a partial one that drop_last leaves out."""
        num_left_out = (self.drawn - self._begin) % self._size * self._drop_last
        return self.has_drawn_all and self.returned >= self.drawn - num_left_out

    @property
    def is_running(self) -> bool:
        """True if the iterator still exists and is still in this loop."""
        iterator = self._iterator()
        is_ours = getattr(iterator, "_num_yielded", None) is self._batches
        return is_ours and not self._batches.has_ended


class _Counter:
    """Counts the batches that a DataLoader's iterator has returned, to its end."""

    number = 0
    has_ended = False

    def ending(self, iterator: _BaseDataLoaderIter) -> Callable[[], Any]:
        """Return a function that draws batches of `iterator` without holding it."""
        own, draw = weakref.ref(iterator), type(iterator)._next_data

        def drawn() -> Any:
            caller = own()
            assert caller is not None
            try:
                return draw(caller)
            except StopIteration:
                self.has_ended = True
                raise

        return drawn

    def __iadd__(self, other: int) -> _Counter:
        self.number += other
        return self

    def __int__(self) -> int:
        return self.number


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError:
        raise ValueError(
            f"a {type(dataset).__name__} has no length, so its samples can't be "
            "divided among the ranks"
        ) from None
