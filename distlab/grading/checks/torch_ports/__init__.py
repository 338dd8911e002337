"""Checks of the unit `torch_ports`: phase 3 with torch.distributed alone."""
