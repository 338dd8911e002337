"""The sampler of phase 1 behind torch's names, for torch's DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import Dataset, Sampler

from distlab.distributed.group import get_rank, get_world_size, has_rank
from distlab.distributed.parts import running, unit
from distlab.given.epochs import tell_epoch

_SETTINGS = ("num_samples", "num_replicas", "shuffle", "seed", "drop_last")


class DistributedSampler(Sampler[int]):
    """This rank's samples in the order of this epoch's shuffle.

    Give `dataset` or `dataset_size`. `num_replicas` and `rank` are the default group's
    if they are not given. All ranks construct it with the same other arguments. Every
    rank gets equally many samples: some are repeated, or left out with `drop_last`.
    A data set that has set_epoch, such as images with random crops, is told the epoch.

    Raises:
        ValueError: neither or both of dataset and dataset_size, or no such rank.

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
        if (dataset is None) == (dataset_size is None):
            raise ValueError("give dataset or dataset_size, one of them")
        size = dataset_size if dataset is None else len(dataset)  # type: ignore[arg-type]
        assert size is not None
        if None in (num_replicas, rank) and not has_rank():
            raise ValueError(
                "this process has no rank yet: under --standby and --elastic, draw the "
                "samples in the loop, from step.index, get_rank() and get_world_size()"
            )
        self.num_replicas = get_world_size() if num_replicas is None else num_replicas
        self.rank = get_rank() if rank is None else rank
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"rank {self.rank} of {self.num_replicas} replicas")
        self.num_samples, self.shuffle, self._dataset = size, shuffle, dataset
        self.seed, self.drop_last = seed, drop_last
        self.num_yielded = 0  # indices of this epoch that were drawn
        with running():
            self._inner = unit("data_loader").DistributedSampler(
                size,
                self.rank,
                self.num_replicas,
                shuffle=shuffle,
                seed=seed,
                drop_last=drop_last,
            )

    @property
    def epoch(self) -> int:
        """The epoch whose shuffle is used."""
        return int(self._inner.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Use the order of `epoch` from now on; another epoch starts at its start."""
        if epoch != self.epoch:
            self.num_yielded = 0
        self._inner.set_epoch(epoch)
        tell_epoch(self._dataset, epoch)

    def __len__(self) -> int:
        """The number of this rank's samples in an epoch."""
        with running():
            return len(self._inner)

    def __iter__(self) -> Iterator[int]:
        """The indices of this rank; after load_state_dict, those that are left."""
        if self.num_yielded >= len(self):
            self.num_yielded = 0
        with running():
            for index in islice(iter(self._inner), self.num_yielded, None):
                self.num_yielded += 1
                yield index

    def state_dict(self) -> dict[str, Any]:
        """The position in this epoch, and what the order depends on; fit for json.

        The position counts indices that were drawn. Data workers draw ahead of the
        batches they return, so with num_workers > 0 save between epochs; or use the
        loader of 1.15, which counts batches and fits any number of ranks.
        """
        settings = {name: getattr(self, name) for name in _SETTINGS}
        return {"epoch": self.epoch, "num_yielded": self.num_yielded, **settings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the sampler that saved `state` was.

        Raises:
            ValueError: a setting differs; this sampler is then unchanged.
        """
        for name in _SETTINGS:
            if getattr(self, name) != state[name]:
                raise ValueError(
                    f"{name} is {getattr(self, name)} here, but {state[name]} in the "
                    "state"
                )
        self._inner.set_epoch(state["epoch"])
        tell_epoch(self._dataset, state["epoch"])
        self.num_yielded = state["num_yielded"]
