"""Checkpoints in the format of torch.distributed.checkpoint (DCP)."""

from distlab.dcp.files import DcpError, is_dcp
from distlab.dcp.layout import TrainingState, load_state, save_state

__all__ = ["DcpError", "TrainingState", "is_dcp", "load_state", "save_state"]
