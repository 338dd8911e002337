"""The transports of torch.distributed: gloo between CPUs, NCCL between GPUs."""

from __future__ import annotations

from distlab.transports.table import Comm, Meeting, register_transport


def open_gloo(meeting: Meeting) -> Comm:
    """Connect to the other ranks, all of which must call this."""
    return _open(meeting, "gloo")


def open_nccl(meeting: Meeting) -> Comm:
    """Connect to the other ranks, all of which must call this."""
    return _open(meeting, "nccl")


def _open(meeting: Meeting, backend: str) -> Comm:
    from distlab.comm import TorchComm

    return TorchComm.from_store(
        meeting.torch_store(),
        meeting.rank,
        meeting.world_size,
        backend=backend,
        timeout_s=meeting.timeout_s,
        host=meeting.host,
        local_rank=meeting.local_rank,
    )


register_transport(
    "gloo",
    open_gloo,
    title="torch.distributed's gloo, over TCP",
    is_torchs=True,
    regroups=True,
    aborts=True,
)
register_transport(
    "nccl",
    open_nccl,
    title="torch.distributed's NCCL, between GPUs",
    needs_gpu=True,
    is_torchs=True,
)
