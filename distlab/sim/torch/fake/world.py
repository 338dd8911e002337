"""Fake tensors for all ranks of one run: what is replaced in torch, and put back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from distlab.sim.torch.fake.account import (
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    Account,
    become,
)
from distlab.sim.torch.fake.operators import Answer, FakeCompute
from distlab.sim.torch.fake.tensors import FakeTensors, replace_storages
from distlab.sim.torch.fake.unknown import replace_tellers
from distlab.sim.torch.rank import here
from distlab.sim.torch.replacing import Replaced


class FakeWorld:
    """What the ranks of one run share: the addresses, and torch's answers."""

    def __init__(self) -> None:
        self.fakes = FakeTensors()
        self.answers: dict[Any, Answer] = {}  # of torch
        self.memory: dict[int, dict[str, int]] = {}  # at its peak, by rank

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within the block, ranks that are `at_home` have fake tensors."""
        replaced = Replaced()
        with ExitStack() as stack:
            stack.callback(replaced.undo)
            replace_storages(replaced)
            replace_tellers(replaced, self.fakes)
            replaced.with_original(torch, "save", _save)
            for handle in (
                register_module_parameter_registration_hook(_registered),
                register_optimizer_step_pre_hook(_before_step),
                register_optimizer_step_post_hook(_after_step),
            ):
                stack.callback(handle.remove)
            yield

    def home(self, charge: Callable[[float], None]) -> FakeRank:
        """What one rank has of its own."""
        return FakeRank(self, charge)


class FakeRank:
    """One rank's operators and its account."""

    def __init__(self, world: FakeWorld, charge: Callable[[float], None]) -> None:
        self.fakes, self.account = world.fakes, Account()
        self.compute = FakeCompute(world.fakes, self.account, charge, world.answers)
        self._world = world
        self.modules: WeakSet[nn.Module] = WeakSet()

    def close(self, rank: int) -> None:
        """It has come to its end: keep what its memory was at its peak."""
        self.sort()
        self._world.memory[rank] = self.account.at_peak()

    def sort(self) -> None:
        """Tell parameters and their gradients from the rest."""
        for module in self.modules:
            for parameter in module._parameters.values():
                if parameter is not None:
                    _sort_one(parameter)


def _sort_one(parameter: Tensor) -> None:
    become(parameter, PARAMETERS)
    if parameter.grad is not None:
        become(parameter.grad, GRADIENTS)


def _mine() -> FakeRank | None:
    rank = here()
    return None if rank is None else rank.fake


def _registered(module: nn.Module, name: str, parameter: Any) -> None:
    mine = _mine()
    if mine is not None:
        mine.modules.add(module)
        if parameter is not None:
            become(parameter, PARAMETERS)


def _save(original: Any, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
    rank = here()
    if rank is None or rank.fake is None:
        original(obj, f, *args, **kwargs)
        return
    if isinstance(f, (str, os.PathLike)):
        Path(f).write_bytes(b"")
    rank.notes.add("files of torch.save are empty: fake tensors have no values")


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    mine = _mine()
    if mine is not None:
        mine.sort()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                _sort_one(parameter)
        mine.compute.is_in_step = True


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    mine = _mine()
    if mine is not None:
        mine.compute.is_in_step = False
        for values in optimizer.state.values():
            for value in values.values():
                if isinstance(value, torch.Tensor):
                    become(value, OPTIMIZER)
