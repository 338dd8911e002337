"""Checks of the unit `compression_port`: phase 4's compression in torch's own words."""
