"""Ranks that train in lockstep in one process, each with its own state.

Everything that a resume could forget is in their training: master weights, AdamW, a
schedule, loss scaling, a moving average, dropout and batch norm, draws of Python's and
numpy's generators, the position in the data, and a hook with residuals and factors.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from distlab.checkpoints import files as given
from distlab.checkpoints.training_state import (
    Run,
    State,
    Stateful,
    pack,
    random_state,
    set_random_state,
    unpack,
)
from distlab.given.gradient_compression import Factors, Residuals, split

ITEMS = {
    "parameters": "the parameters",
    "buffers": "the buffers",
    "master": "the master weights",
    "optimizer": "the optimizer's state",
    "scheduler": "the scheduler's state",
    "scaler": "the scaler's state",
    "loader": "the loader's position",
    "average": 'the part "average"',
    "residuals": "the hook's residuals",
    "factors": "the hook's factors",
    "python": "Python's random numbers",
    "numpy": "numpy's random numbers",
    "torch": "torch's random numbers",
}
"""What a run consists of, in words."""


_DRAWS = 12  # more than there are parts


@dataclass
class Bucket:
    """All parameters."""

    parameters: Sequence[Tensor]
    flat: Tensor


def draw() -> None:
    """What loading a part may do: an order of samples, a first value."""
    random.random()
    np.random.rand()
    torch.rand(())


class DrawingResiduals(Residuals):
    """Residuals that draw random numbers when they are loaded."""

    def load_state_dict(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """See Residuals."""
        super().load_state_dict(model, state)
        draw()


class DrawingFactors(Factors):
    """Factors that draw random numbers when they are loaded."""

    def load_state_dict(self, model: nn.Module, state: dict[str, Tensor]) -> None:
        """See Factors."""
        super().load_state_dict(model, state)
        draw()


class Hook:
    """Top-k of a rank's own gradient, and a factor for each matrix."""

    def __init__(self) -> None:
        self.residuals, self.factors = DrawingResiduals(), DrawingFactors(1)

    def compress(self, bucket: Bucket) -> Tensor:
        """What this rank sends: its largest gradients."""
        corrected = bucket.flat + self.residuals.of(bucket)
        at = corrected.abs().topk(len(corrected) // 3).indices
        sent = torch.zeros_like(corrected)
        sent[at] = corrected[at]
        self.residuals.keep(bucket, corrected - sent)
        return sent

    def turn(self, bucket: Bucket) -> None:
        """One power iteration; the factors then scale the gradient."""
        factors = []
        for matrix, q in zip(split(bucket)[0], self.factors.of(bucket), strict=True):
            product = matrix.T @ (matrix @ q) + 1e-3 * q
            factors.append(product / product.norm())
        self.factors.keep(bucket, factors)
        bucket.flat *= 1 + sum(float(q[0, 0]) for q in factors) / 100


class Part:
    """A part of a run whose state is some numbers and a tensor."""

    def __init__(self) -> None:
        self.state: State = {"count": 0, "scale": 8.0, "sum": torch.zeros(2)}

    def advance(self, values: Tensor) -> None:
        """One step."""
        self.state["count"] += 1
        self.state["scale"] *= 2.0 if self.state["count"] % 3 == 0 else 1.0
        self.state["sum"] = 0.9 * self.state["sum"] + values

    def state_dict(self) -> State:
        """See Stateful."""
        return dict(self.state)

    def load_state_dict(self, state: State) -> None:
        """See Stateful. It draws random numbers, as a loader that shuffles may."""
        self.state = dict(state)
        draw()


class Sharded:
    """In place of a sharded optimizer: notes what it was loaded with."""

    def __init__(self, rank: int) -> None:
        self.rank, self.loaded = rank, None

    def state_by_name(self) -> State:
        """As ZeRO's."""
        return self.state_dict()["state"]  # type: ignore[no-any-return]

    def state_dict(self) -> State:
        """This rank's state."""
        states = {"0.weight": {"start": self.rank, "sum": torch.ones(2)}}
        return {"state": states, "param_groups": [{"lr": 0.1, "names": [*states]}]}

    def load_state_dict(self, state: Any) -> None:
        """From the states of all ranks."""
        self.loaded = state


def new_model(width: int = 6) -> nn.Module:
    """Dropout, batch norm and matrices; parameters tied, frozen and transposed."""
    first, norm, last = nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2)
    norm.bias = first.bias
    last.bias.requires_grad_(False)
    last.weight = nn.Parameter(last.weight.detach().t().contiguous().t())
    last.register_buffer("seen", torch.zeros(2), persistent=False)
    return nn.Sequential(first, norm, nn.Dropout(0.25), last)


def new_run(seed: int, width: int = 6) -> Run:
    """A run with everything, its weights drawn from `seed`."""
    torch.manual_seed(seed)
    model = new_model(width)
    master = [p.detach().double().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(master, lr=0.02)
    parts: dict[str, Stateful] = {
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        "scaler": Part(),
        "loader": Part(),
        "average": Part(),
    }
    return Run(
        model=model, optimizer=optimizer, master=master, parts=parts, hook=Hook()
    )


class Player:
    """One rank: its run, and its random numbers while another rank has its turn."""

    def __init__(self, rank: int, seed: int) -> None:
        self.rank, self.run = rank, new_run(seed)
        random.seed(seed + 10 + rank)
        np.random.seed(seed + 20 + rank)
        torch.manual_seed(seed + 30 + rank)
        self.random = random_state()

    def sent(self) -> Tensor:
        """Forward, backward and compression, with this rank's random numbers."""
        set_random_state(self.random)
        run = self.run
        at = run.parts["loader"].state["count"]  # type: ignore[attr-defined]
        generator = torch.Generator().manual_seed(100 * at + self.rank)
        inputs = torch.randn(8, 4, generator=generator) * (0.5 + random.random())
        inputs += float(np.random.rand())
        loss = run.model(inputs).square().mean()
        run.model[3].seen += inputs[0, :2]  # type: ignore[index]
        run.model.zero_grad()
        loss.backward()
        self.random = random_state()
        return run.hook.compress(self.bucket())  # type: ignore[no-any-return]

    def bucket(self, flat: Tensor | None = None) -> Bucket:
        """The gradients, or other values like them."""
        own = list(self.run.model.parameters())
        if flat is None:
            gradients = [p.grad if p.grad is not None else 0 * p for p in own]
            flat = torch.cat([g.detach().reshape(-1) for g in gradients])
        return Bucket(own, flat.clone())

    def apply(self, mean: Tensor) -> None:
        """The optimizer's step and all that belongs to it."""
        run, bucket = self.run, self.bucket(mean)
        run.hook.turn(bucket)
        parts = bucket.flat.split([p.numel() for p in bucket.parameters])
        for copy, part in zip(run.master, parts, strict=True):
            copy.grad = part.view_as(copy).double()
        run.optimizer.step()  # type: ignore[attr-defined]
        run.parts["scheduler"].step()  # type: ignore[attr-defined]
        with torch.no_grad():
            for p, copy in zip(run.model.parameters(), run.master, strict=True):
                p.copy_(copy)
        for name in ("scaler", "loader", "average"):
            run.parts[name].advance(bucket.flat[:2])  # type: ignore[attr-defined]

    def items(self) -> dict[str, str]:
        """A digest of every item of the state."""
        run = self.run
        found = {
            "parameters": list(run.model.parameters()),
            "buffers": list(run.model.buffers()),
            "master": list(run.master),
            "optimizer": run.optimizer.state_dict(),
            **{name: part.state_dict() for name, part in run.parts.items()},
            "residuals": run.hook.residuals.state_dict(run.model),
            "factors": run.hook.factors.state_dict(run.model),
            **{name: self.random[name] for name in ("python", "numpy", "torch")},
        }
        return {name: digest(value) for name, value in found.items()}


def drawn_since(saved: State, now: State) -> list[str]:
    """The generators that are where they were saved, and a few draws further."""
    names, found = ("python", "numpy", "torch"), []
    set_random_state(saved)
    for _ in range(_DRAWS):
        draw()
        state = random_state()
        found += [name for name in names if digest(state[name]) == digest(now[name])]
    return found


def digest(value: Any) -> str:
    """Equal for equal states, to the bit."""
    found = hashlib.sha256()
    _feed(value, found.update)
    return found.hexdigest()


def _feed(value: Any, take: Callable[[bytes], None]) -> None:
    if isinstance(value, Tensor):
        take(f"{value.dtype} {list(value.shape)}".encode())
        take(value.detach().contiguous().numpy().tobytes())
    elif isinstance(value, np.ndarray):
        take(value.tobytes())
    elif isinstance(value, dict):
        _feed([*value.items()], take)
    elif isinstance(value, list | tuple) and len(value) < 100:
        for one in value:
            _feed(one, take)
    else:
        take(repr(value).encode())


def take_step(players: Sequence[Player]) -> None:
    """One step of all ranks: every one applies the mean of what they sent."""
    mean = torch.stack([player.sent() for player in players]).mean(0)
    for player in players:
        player.apply(mean)


def through_files(states: Sequence[tuple[State, State]]) -> tuple[State, list[State]]:
    """What comes back of the ranks' states when they have been saved and loaded.

    Raises:
        TypeError: a value fits no shard.
    """
    shards = []
    for rank, (shared, own) in enumerate(states):
        data = given.encode_shard(*pack(shared, own, rank, len(states)))
        shards.append(given.decode_shard(data))
    return unpack(given.Checkpoint(step=0, shards=tuple(shards)))
