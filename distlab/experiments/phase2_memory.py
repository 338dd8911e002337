"""Phase 2's walkthrough, the bytes: what is kept for backward, and what is sent.

Scenarios as the autograder's: `(context, unit, **values) -> plain data`. `unit` is the
learner's module.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm import Comm
from distlab.experiments.phase2_mesh_rank import MeshConfig
from distlab.grading.oracles import digest
from distlab.models.transformer import next_token_loss
from distlab.runner import RankContext

Block = Callable[[Tensor], Tensor]


class _Kept:
    """A tensor as long as autograd keeps it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class LiveBytes:
    """While it is entered: the bytes that autograd keeps, each time they change.

    What several operations keep counts once, and `parameters` do not count.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.history = [0]
        self._parameters = {p.untyped_storage().data_ptr() for p in parameters}
        self._holders: Counter[int] = Counter()  # by where their memory is
        self._hooks = torch.autograd.graph.saved_tensors_hooks(
            self._keep, lambda kept: kept.tensor
        )

    def __enter__(self) -> LiveBytes:
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    @property
    def peak(self) -> int:
        """The most that was kept at any time."""
        return max(self.history)

    def _keep(self, tensor: Tensor) -> _Kept:
        # Detached, or a result that is kept would hold its own graph forever.
        kept = _Kept(tensor.detach())
        memory = tensor.untyped_storage()
        place, size = memory.data_ptr(), memory.nbytes()
        if place not in self._parameters:
            if not self._holders[place]:
                self.history.append(self.history[-1] + size)
            self._holders[place] += 1
            weakref.finalize(kept, self._forget, place, size)
        return kept

    def _forget(self, place: int, size: int) -> None:
        self._holders[place] -= 1
        if not self._holders[place]:
            self.history.append(self.history[-1] - size)


def memory_of_a_step(
    context: RankContext, unit: ModuleType, *, seed: int = 0, batch_size: int
) -> dict[str, int]:
    """Bytes of one Adam step of the course's transformer in float32, by purpose."""
    config = MeshConfig(batch_size=batch_size)
    model, batch = config.make_model().float(), config.batch(0)
    optimizer = torch.optim.Adam(model.parameters())
    with LiveBytes(model.parameters()) as live:
        next_token_loss(model(batch), batch).backward()
    optimizer.step()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    state = [t for held in optimizer.state.values() for t in held.values()]
    return {
        "weights": _bytes(model.parameters()),
        "gradients": _bytes(gradients),
        "Adam's state": _bytes(state),
        "activations": live.peak,
    }


def accumulate(
    context: RankContext, unit: ModuleType, *, seed: int = 0, counts: tuple[int, ...]
) -> list[dict[str, int]]:
    """One step in K microbatches, for each K: bytes sent and kept, by this rank.

    `each` is what is sent if every microbatch's gradients are, `once` by sync_once.
    """
    config = MeshConfig(num_layers=2)
    comm, traffic = context.comm, context.traffic
    mine = config.batch(0).chunk(comm.world_size)[comm.rank]
    found = []
    for count in counts:
        microbatches = [(part, part) for part in mine.chunk(count)]
        model = config.make_model()
        start = traffic.sent_bytes
        _sync_each(comm, model, microbatches)
        between = traffic.sent_bytes
        model = config.make_model()
        with LiveBytes(model.parameters()) as live:
            unit.sync_once(comm, model, next_token_loss, microbatches)
        once = traffic.sent_bytes - between
        sent = {"each": int(between - start), "once": int(once)}
        found.append({"K": count, **sent, "kept": live.peak})
    return found


def _sync_each(
    comm: Comm, model: nn.Module, microbatches: list[tuple[Tensor, Tensor]]
) -> None:
    for inputs, targets in microbatches:
        loss = next_token_loss(model(inputs), targets)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for gradient in gradients:
            comm.all_reduce(gradient)


def sawtooth(
    context: RankContext, unit: ModuleType, *, seed: int = 0, num_blocks: int
) -> dict[str, dict[str, Any]]:
    """Bytes kept over one forward and backward, without and with checkpoint."""
    config = MeshConfig(num_layers=num_blocks)
    found = {}
    for label in ("all is kept", "checkpoint"):
        embed, *blocks, _ = config.make_model()
        x = embed(config.batch(0)).detach()
        parameters = [p for block in blocks for p in block.parameters()]
        with LiveBytes(parameters) as live:
            for block in blocks:
                x = unit.checkpoint(block, x) if label == "checkpoint" else block(x)
            turn = len(live.history)
            x.square().mean().backward()
        gradients = [p.grad.flatten() for p in parameters if p.grad is not None]
        found[label] = {
            "history": live.history,
            "turn": turn,
            "digest": digest(torch.cat(gradients)),
        }
    return found


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
