"""What a process group's calls are made of: one collective, messages, or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup

from distlab.comm import ANY, SUM, ReduceOp
from distlab.comm._call import Call
from distlab.sim.channels import End
from distlab.sim.collectives import Act, Part
from distlab.sim.comm import SimComm
from distlab.sim.kernel import Flight
from distlab.sim.payload import Sized
from distlab.sim.torch.rank import Rank, innermost, post
from distlab.sim.torch.shared_store import Contribution
from distlab.sim.torch.tensors import flat, flat_or_none, hand_out, reduce_op
from distlab.sim.torch.work import TorchWork, Underway

OWN_TAG = 1 << 30  # of messages that a collective is made of
_Base: Any = ProcessGroup  # its declarations have calls that torch does not make


class Transfers(_Base):  # type: ignore[misc]
    """One rank's membership in a group, and how it starts what torch asks for."""

    def __init__(self, rank: Rank, comm: Any, name: str) -> None:
        super().__init__(comm.rank, comm.world_size)
        self._rank, self._comm, self._title = rank, comm, name
        self._gathering: list[TorchWork] | None = None
        self.asked_for = ""  # the backend

    @property
    def group_name(self) -> str:
        """The name that all members know it by."""
        return self._title

    @property
    def group_desc(self) -> str:
        """The same."""
        return self._title

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """See `torch.distributed.get_backend`."""
        return "sim"

    @property
    def _device_types(self) -> list[torch.device]:
        """Where the backend that was asked for takes tensors from."""
        if not self._is_nccl:
            return [torch.device("cpu")]
        kinds = ("cuda",) if self.asked_for == "nccl" else ("cpu", "cuda")
        return [torch.device(kind) for kind in kinds]

    @property
    def _is_nccl(self) -> bool:
        """Whether NCCL would carry this out; on a CPU, and if asked for, gloo does."""
        return self._rank.pretends and self.asked_for != "gloo"

    def reduction(self, opts: Any, tensor: Tensor) -> ReduceOp:
        """Which reduction torch asks for.

        Raises:
            ValueError: the simulator has none of that name, or the backend not for
                such a tensor.
        """
        return reduce_op(opts, tensor, is_nccl=self._is_nccl)

    def _get_backend(self, device: Any) -> Transfers:
        """Answer torch 2.14, which asks a group's backend if it can merge messages."""
        return self

    def eager_connect_single_device(self, device: Any) -> None:
        """NCCL would connect the ranks; here they are."""

    def abort(self) -> None:
        """Close this rank's connections in this group."""
        innermost(self._comm).abort_group()

    def _set_sequence_number_for_group(self) -> None: ...

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def together(self, works: Any) -> TorchWork:
        """Several works as one."""
        works = list(works)
        calls = [(w.wait_s, flight) for w in works for _, flight in w.calls]

        def land() -> None:
            for work in works:
                work.wait_s(None)

        outputs = [tensor for work in works for tensor in work.result()]
        return TorchWork(self._rank, calls, outputs, land)

    def join(
        self,
        act: Act,
        sent: Tensor | None = None,
        received: Tensor | None = None,
        op: ReduceOp = SUM,
    ) -> Underway:
        """Take part in the group's next collective."""
        name, root = act
        call = Call(
            op=name,
            root=root,
            reduce_op=op,
            sent=sent,
            received=received,
            blocking=False,
        )
        part = Part(act, op, self._on_wire(sent), self._on_wire(received))
        if type(part.sent) is Sized and received is not None:
            self._rank.fake.fakes.forget(received)
        self._rank.settle()
        if sent is not None:
            self._require_alike(name, sent)
        return post(self._comm, call, partial(self._meet, part))

    def _meet(self, part: Part, comm: SimComm) -> Flight:
        rank = self._rank
        meeting = comm.group.collectives.join(comm.rank, part)
        if rank.cast is not None:
            world = innermost(rank.comm).group
            rank.cast.join(rank.number, rank.formed, world, self._title, part)
        return meeting

    def _on_wire(self, tensor: Tensor | None) -> Tensor | Sized | None:
        """One row of memory; of a tensor without memory its size."""
        if tensor is not None and self._is_unknown(tensor):
            return Sized(tensor.nbytes)
        return flat_or_none(tensor)

    def _is_unknown(self, tensor: Tensor) -> bool:
        fake = self._rank.fake
        return fake is not None and fake.fakes.is_unknown(tensor)

    def _require_alike(self, op: str, sent: Tensor) -> None:
        """Compare with who came first to the same collective of the group.

        Raises:
            ValueError: they bring unlike tensors; on a real transport that ends in
                garbage, an abort or a hang.
        """
        group = innermost(self._comm).group
        key = (group, self._rank.num_joined[group])
        self._rank.num_joined[group] += 1
        dtype = str(sent.dtype).removeprefix("torch.")
        own = Contribution(self._rank.number, op, sent.numel(), dtype, list(sent.shape))
        first = self._rank.shared.first_parts.setdefault(key, own)
        if first.op == op and first[2:4] != own[2:4]:
            raise ValueError(
                f"rank {own.rank} called {op} on {own.shape} {own.dtype}, "
                f"rank {first.rank} on {first.shape} {first.dtype}"
            )

    def message(self, op: str, tensor: Tensor, peer: int, tag: int) -> Underway:
        """Send or receive one message."""
        row, sends = flat(tensor), op == "send"
        self._require_played(op, peer)
        if self._rank.fake is not None and not sends and tensor.is_floating_point():
            self._rank.fake.fakes.forget(tensor)  # the sender's may be unknown
        wire = Sized(row.nbytes) if self._is_unknown(row) else row
        call = Call(
            op=op,
            dst=peer if sends else None,
            src=None if sends else peer,
            tag=tag,
            sent=row if sends else None,
            received=None if sends else row,
            blocking=False,
        )

        def start(comm: SimComm) -> Flight:
            step = self._rank.next_step()
            end = End(comm.group, op, comm.rank, peer, tag, wire, step)
            (comm.group.send if sends else comm.group.receive)(end)
            return end

        self._rank.settle()
        return post(self._comm, call, start)

    def hand_out(self, row: Tensor, targets: Sequence[Tensor]) -> None:
        """Copy equal parts of what has been gathered into the targets."""
        if not self._is_unknown(row):
            hand_out(row, targets)
            return
        for target in targets:
            self._rank.fake.fakes.forget(target)

    def _require_played(self, op: str, peer: int) -> None:
        """Refuse a message to or from a rank that only follows another one.

        Raises:
            ValueError: `peer` is one.
        """
        if self._rank.cast is None or peer == ANY:
            return
        members = innermost(self._comm).group.members
        if not self._rank.cast.is_played(members[peer]):
            whole = ",".join(map(str, members)) if len(members) < 64 else "all"
            raise ValueError(
                f"rank {self._rank.number} calls {op}, and its peer, rank "
                f"{members[peer]}, is not played: it only follows another rank, and "
                f"messages need both ends; play {whole}"
            )

    def exchange(
        self, sent: Sequence[Tensor | None], into: Sequence[Tensor | None]
    ) -> TorchWork:
        """One message to each rank and one from each, but for those that are None."""
        me, calls = self.rank(), []
        mine, own = sent[me], into[me]
        if mine is not None and own is not None:
            own.detach().copy_(mine.detach().view_as(own))
        for step in range(1, self.size()):
            dst, src = (me + step) % self.size(), (me - step) % self.size()
            out, arriving = sent[dst], into[src]
            if out is not None:
                out = out.contiguous()
                calls.append(self.message("send", out, dst, OWN_TAG))
            if arriving is not None:
                calls.append(self.message("recv", arriving, src, OWN_TAG))
        return self.work(calls, [tensor for tensor in into if tensor is not None])

    def work(
        self,
        calls: list[Underway],
        outputs: list[Tensor],
        land: Callable[[], None] | None = None,
    ) -> TorchWork:
        """What torch gets back; see `TorchWork`."""
        work = TorchWork(self._rank, calls, outputs, land)
        if self._gathering is not None:
            self._gathering.append(work)
        return work
