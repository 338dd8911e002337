"""Checkpoints in the format of torch.distributed.checkpoint (DCP)."""

from distlab.dcp.files import DcpError, is_dcp, sync_folder
from distlab.dcp.layout import TrainingState, load_more, load_state, save_state

__all__ = [
    "DcpError",
    "TrainingState",
    "is_dcp",
    "load_more",
    "load_state",
    "save_state",
    "sync_folder",
]
