"""Refuse calls that we know to be wrong, before sending anything."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distlab.comm._protocol import CommRefusedError

_FORMS = {
    "send": "(tensor, dst)",
    "recv": "(tensor, src)",
    "sendrecv": "(send_tensor, dst, recv_tensor, src)",
    "broadcast": "(tensor, src)",
    "all_reduce": "(tensor)",
    "reduce": "(tensor, dst)",
    "all_gather": "(output, input)",
    "reduce_scatter": "(output, input)",
    "all_to_all": "(output, input)",
}


class Refusals:
    """One rank's checks, each of which passes or raises a CommRefusedError."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size

    def rank(self, peer: int, verb: str) -> None:
        """Require that the peer exists."""
        if not isinstance(peer, int) or isinstance(peer, bool):
            raise CommRefusedError(
                f"rank {self._rank} {verb} {_kind(peer)}: a rank is a whole number"
            )
        if not 0 <= peer < self._world_size:
            last = self._world_size - 1
            there = f"are only ranks 0 to {last}" if last else "is only rank 0"
            raise CommRefusedError(
                f"rank {self._rank} {verb} rank {peer}, but there {there}",
                "no such rank",
            )

    def peer(self, peer: int, verb: str) -> None:
        """Require that the peer exists and is another rank."""
        self.rank(peer, verb)
        if peer == self._rank:
            raise CommRefusedError(
                f"rank {self._rank} {verb} rank {peer}: that is itself", "itself"
            )

    def group(self, members: Sequence[int]) -> None:
        """Require that a group has members that exist, and has each only once."""
        if not members or len(set(members)) != len(members):
            raise CommRefusedError(f"a group of ranks {members}: each once, at least 1")
        for member in members:
            self.rank(member, "makes a group with")

    def tensor(self, tensor: Tensor, op: str) -> None:
        """Require a contiguous tensor."""
        if not isinstance(tensor, Tensor):
            raise CommRefusedError(
                f"{op} takes a tensor, not {_kind(tensor)}: comm.{op}{_FORMS[op]}"
            )
        if tensor.layout is not torch.strided:
            raise CommRefusedError(
                f"{op} got a {tensor.layout} tensor, which stores only some of its "
                "elements: use to_dense()"
            )
        if not tensor.is_contiguous():
            # What .contiguous() returns is a copy: nothing may be received into it.
            into = op in ("recv", "irecv")
            way = "receive into a contiguous one" if into else "use .contiguous()"
            raise CommRefusedError(
                f"{op} got a non-contiguous tensor, such as a column or a transpose: "
                f"{way}"
            )

    def gathered(self, output: Tensor, input: Tensor, op: str) -> None:
        """Require an output with room for every rank's input."""
        self.tensor(output, op)
        self.tensor(input, op)
        if output.numel() != input.numel() * self._world_size:
            raise CommRefusedError(
                f"{op} of {input.numel()} elements on {self._world_size} ranks "
                f"needs an output of {input.numel() * self._world_size}, "
                f"not {output.numel()}"
            )

    def chunks(self, output: Tensor, input: Tensor, op: str) -> None:
        """Require an input that consists of one output for each rank."""
        self.tensor(output, op)
        self.tensor(input, op)
        if input.numel() != output.numel() * self._world_size:
            raise CommRefusedError(
                f"{op} gives each of {self._world_size} ranks {output.numel()} "
                f"elements, so it needs {output.numel() * self._world_size}, "
                f"not {input.numel()}"
            )

    def exchanged(self, output: Tensor, input: Tensor, op: str) -> None:
        """Require equal sizes, divisible into a chunk for each rank."""
        self.tensor(output, op)
        self.tensor(input, op)
        if output.numel() != input.numel() or input.numel() % self._world_size:
            raise CommRefusedError(
                f"{op} needs input and output of one size that "
                f"{self._world_size} divides, not {input.numel()} and {output.numel()}"
            )

    def limit(self, op: str, async_op: bool, timeout_s: float | None) -> None:
        """Refuse a time limit unless the call waits."""
        if async_op and timeout_s is not None:
            raise CommRefusedError(
                f"{op} with async_op=True does not wait: give timeout_s={timeout_s} to "
                "the wait() of the Work that it returns"
            )

    def unlike(self, sent: Tensor, received: Tensor) -> None:
        """Require the same size and dtype on both sides of a copy to oneself."""
        if sent.numel() != received.numel() or sent.dtype != received.dtype:
            raise CommRefusedError(
                f"rank {self._rank}'s sendrecv with itself sends {_told(sent)}, but "
                f"receives into {_told(received)}"
            )

    def whole_average(self, tensor: Tensor) -> None:
        """Refuse to average integers in place."""
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise CommRefusedError(
                f"the average of {tensor.dtype} is not a whole number: reduce with SUM "
                "and divide, or use a floating-point tensor"
            )


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeiouAEIOU" else f"a {name}"


def _told(tensor: Tensor) -> str:
    """How many elements of what dtype it has."""
    return f"{tensor.numel()} {str(tensor.dtype).removeprefix('torch.')}"
