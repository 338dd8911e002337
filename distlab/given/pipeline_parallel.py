"""The entries of a schedule in unit `pipeline_parallel`, and the peers they talk to.

`draw` shows schedules as a table over time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


# ── schedules as a table over time ────────────────────────────────────────────────────


def draw(
    schedules: Sequence[Sequence[Action]], forward: int = 1, backward: int = 2
) -> str:
    """Draw all ranks' schedules as a table: a row per rank, a column per unit of time.

    `forward` and `backward` are t_f and t_b, as integers. If the ranks deadlock, the
    table ends there. Each ' after an entry stands for one chunk: none is chunk 0, one
    is chunk 1.
    """
    takes = {"F": forward, "B": backward}
    num_stages = len(schedules) * (1 + max(a.chunk for s in schedules for a in s))
    rows: list[list[str]] = [[] for _ in schedules]
    done: dict[tuple[str, int, int], int] = {}  # by kind, microbatch, stage: when
    left = [list(schedule) for schedule in schedules]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while left[rank]:
                kind, number, chunk = left[rank][0]
                stage = chunk * len(rows) + rank
                before = ("F", number, stage - 1), ("B", number, stage + 1)
                needed = before[kind == "B"]
                if needed[2] == num_stages:
                    needed = "F", number, stage
                if needed[2] >= 0 and needed not in done:
                    break
                row += ["."] * (done.get(needed, 0) - len(row))
                row += [f"{kind}{number}" + "'" * chunk] * takes[kind]
                done[kind, number, stage] = len(row)
                left[rank].pop(0)
                moved = True
    width = max((len(entry) for row in rows for entry in row), default=1)
    lines = [" ".join(entry.ljust(width) for entry in row) for row in rows]
    lines = [f"rank {rank}  {line}".rstrip() for rank, line in enumerate(lines)]
    return "\n".join([*lines, f"{max(map(len, rows))} units of time"])
