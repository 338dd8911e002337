"""Checks of the unit `gradient_accumulation`, a file per task."""

from distlab.grading.checks.accumulate import accumulate_once
from distlab.grading.checks.clip import clip_steps
from distlab.grading.checks.ported_step import ported_steps
from distlab.grading.checks.sync_once import sync

__all__ = ["accumulate_once", "clip_steps", "ported_steps", "sync"]
