"""Checks of the unit `sharded_optimizer`: ZeRO's plan and its three stages."""
