"""Checks of the unit `sharded_optimizer`: ZeRO's plan and its three stages."""

from distlab.grading.checks import (
    sharded_clip,
    sharded_plan,
    sharded_saved,
    sharded_stage1,
    sharded_stage2,
    sharded_stage3,
)

__all__ = [
    "sharded_clip",
    "sharded_plan",
    "sharded_saved",
    "sharded_stage1",
    "sharded_stage2",
    "sharded_stage3",
]
