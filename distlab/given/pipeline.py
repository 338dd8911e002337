"""The entries of a schedule in unit `pipeline_parallel`, and the peers they talk to."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from distlab.comm import Comm, Work

LossFn = Callable[[Tensor, Tensor], Tensor]


class Action(NamedTuple):
    """One entry of a schedule: Action("F", 3) is the forward of microbatch 3.

    `chunk` matters in 2.21, where a rank has several model chunks; elsewhere it is 0.
    """

    kind: str  # "F" forward, "B" backward
    microbatch: int
    chunk: int = 0


class ModelChunk(NamedTuple):
    """The layers of one stage, and an example of ONE sample that enters the stage.

    Chunk c of rank r is stage c · n + r of all n · v stages, so the stage after the
    last rank's is the next chunk of rank 0. Only the shape and dtype of `example`
    matter.
    """

    module: nn.Module
    example: Tensor


class Peer(NamedTuple):
    """The other end of a message: comm.recv(tensor, *peer), comm.isend(tensor, *peer).

    The tag identifies the message, because several may be in flight between two ranks.
    """

    rank: int
    tag: int


Kept = dict[tuple[int, int], tuple[Tensor, Tensor]]
"""x and output of a microbatch, from forward to backward, by (chunk, microbatch)."""
Sends = dict[Action, Work]
"""The sends for which nobody has waited, by the action that started them."""


def peers(
    comm: Comm, action: Action, num_chunks: int
) -> tuple[Peer | None, Peer | None]:
    """Return the peer from which `action` receives, and the peer to which it sends.

    A forward receives activations from the stage before, and a backward receives their
    gradient from the stage after. A peer is None at the first or last stage of the
    model.
    """
    num_stages = num_chunks * comm.world_size
    stage = action.chunk * comm.world_size + comm.rank

    def peer(other: int) -> Peer | None:
        if not 0 <= other < num_stages:
            return None
        link = action.microbatch * num_stages + min(stage, other)
        return Peer(other % comm.world_size, 2 * link + (action.kind == "B"))

    before, after = peer(stage - 1), peer(stage + 1)
    return (before, after) if action.kind == "F" else (after, before)
