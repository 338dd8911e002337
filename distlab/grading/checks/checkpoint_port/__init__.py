"""Checks of the unit `checkpoint_port`: torch.distributed.checkpoint."""
