"""A process group of simulated ranks: torch's collectives, carried out by the kernel.

What torch calls becomes a collective of `distlab.sim.collectives`, with its cost model,
where there is one for it, and messages where there is none (gather, scatter, uneven
all-to-all). All of it starts when it is called and is done at a virtual time, so that
compute in between overlaps with it, and all of it is written in the rank's journal.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from distlab.comm import ANY
from distlab.sim.collectives import Act
from distlab.sim.torch.tensors import copy_all, flat
from distlab.sim.torch.transfers import OWN_TAG, Transfers
from distlab.sim.torch.work import TorchWork


class SimProcessGroup(Transfers):
    """One rank's membership in a group; `comm` is its communicator there."""

    # ── point to point ──────────────────────────────────────────────────────────────

    def send(self, tensors: list[Tensor], dst: int, tag: int) -> TorchWork:
        """See `torch.distributed.isend`."""
        return self.work([self.message("send", t, dst, tag) for t in tensors], [])

    def recv(self, tensors: list[Tensor], src: int, tag: int) -> TorchWork:
        """See `torch.distributed.irecv`."""
        calls = [self.message("recv", t, src, tag) for t in tensors]
        return self.work(calls, tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> TorchWork:
        """See `torch.distributed.irecv` without a source."""
        return self.recv(tensors, ANY, tag)

    # ── collectives that the kernel has ─────────────────────────────────────────────

    def barrier(self, opts: Any = None) -> TorchWork:
        """See `torch.distributed.barrier`."""
        return self.work([self.join(("barrier", None))], [])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: Any = 0) -> None:
        """See `torch.distributed.monitored_barrier`."""
        self.barrier().wait()

    def broadcast(self, tensors: list[Tensor], opts: Any) -> TorchWork:
        """See `torch.distributed.broadcast`."""
        act = ("broadcast", opts.rootRank)
        return self.work([self.join(act, t, t) for t in tensors], tensors)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> TorchWork:
        """See `torch.distributed.all_reduce`."""
        return self._reduced(("all_reduce", None), tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> TorchWork:
        """The same for many tensors in one."""
        joined = torch.cat([flat(tensor) for tensor in tensors])
        act: Act = ("all_reduce", None)
        call = self.join(act, joined, joined, self.reduction(opts, joined))
        pieces = joined.split([tensor.numel() for tensor in tensors])
        into = [flat(tensor) for tensor in tensors]
        return self.work([call], tensors, partial(copy_all, pieces, into))

    def reduce(self, tensors: list[Tensor], opts: Any) -> TorchWork:
        """See `torch.distributed.reduce`."""
        return self._reduced(("reduce", opts.rootRank), tensors, opts)

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> TorchWork:
        """See `torch.distributed.all_gather`."""
        (input,), (into,) = inputs, outputs
        gathered = input.new_empty(input.numel() * self.size())
        call = self.join(("all_gather", None), input, gathered)
        return self.work([call], into, partial(self.hand_out, gathered, into))

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> TorchWork:
        """The same for many tensors; `outputs` has a list for each rank."""
        by_tensor = [list(row) for row in zip(*outputs, strict=True)]
        return self.together(
            self.allgather([into], [input])
            for into, input in zip(by_tensor, inputs, strict=True)
        )

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: Any = None
    ) -> TorchWork:
        """See `torch.distributed.all_gather_into_tensor`."""
        return self.work([self.join(("all_gather", None), input, output)], [output])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> TorchWork:
        """The same for many tensors."""
        return self.together(map(self.all_gather_single, outputs, inputs))

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> TorchWork:
        """See `torch.distributed.reduce_scatter`."""
        joined = torch.cat([flat(tensor) for tensor in inputs[0]])
        return self.reduce_scatter_single(outputs[0], joined, opts)

    def reduce_scatter_single(
        self, output: Tensor, input: Tensor, opts: Any = None
    ) -> TorchWork:
        """See `torch.distributed.reduce_scatter_tensor`."""
        act: Act = ("reduce_scatter", None)
        call = self.join(act, input, output, self.reduction(opts, input))
        return self.work([call], [output])

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> TorchWork:
        """The same for many tensors."""
        one = partial(self.reduce_scatter_single, opts=opts)
        return self.together(map(one, outputs, inputs))

    # The names until torch 2.12.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ── collectives made of messages ────────────────────────────────────────────────

    def gather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any
    ) -> TorchWork:
        """See `torch.distributed.gather`."""
        root = opts.rootRank
        if self.rank() != root:
            return self.work([self.message("send", inputs[0], root, OWN_TAG)], [])
        sent: list[Tensor | None] = [None] * self.size()
        sent[root] = inputs[0]
        return self.exchange(sent, list(outputs[0]))

    def scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any
    ) -> TorchWork:
        """See `torch.distributed.scatter`."""
        root = opts.rootRank
        if self.rank() != root:
            calls = [self.message("recv", outputs[0], root, OWN_TAG)]
            return self.work(calls, outputs)
        into: list[Tensor | None] = [None] * self.size()
        into[root] = outputs[0]
        return self.exchange(list(inputs[0]), into)

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> TorchWork:
        """See `torch.distributed.all_to_all`."""
        return self.exchange(list(inputs), list(outputs))

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> TorchWork:
        """See `torch.distributed.all_to_all_single`."""
        if not output_sizes and not input_sizes:
            return self.work([self.join(("all_to_all", None), input, output)], [output])
        n = self.size()
        sent = input.split(input_sizes or [len(input) // n] * n)
        into = output.split(output_sizes or [len(output) // n] * n)
        return self.exchange(list(sent), list(into))

    alltoall_base = all_to_all_single

    # ── several in one ──────────────────────────────────────────────────────────────

    def _start_coalescing(self, device: torch.device | None = None) -> None:
        self._gathering = []

    def _end_coalescing(self, device: torch.device | None = None) -> TorchWork:
        works, self._gathering = self._gathering or [], None
        return self.together(works)

    # ── how ─────────────────────────────────────────────────────────────────────────

    def _reduced(self, act: Act, tensors: list[Tensor], opts: Any) -> TorchWork:
        calls = [self.join(act, t, t, self.reduction(opts, t)) for t in tensors]
        return self.work(calls, tensors)
