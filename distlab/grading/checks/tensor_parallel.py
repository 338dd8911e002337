"""Checks of the unit `tensor_parallel`, a file per task.

Everything is float64 and compared with the same in one process, forward, backward and
over some steps; what is sent is read from the journal.
"""

from distlab.grading.checks.ported_block import ported_block
from distlab.grading.checks.tensor_parallel_blocks import blocks_once
from distlab.grading.checks.tensor_parallel_linears import linears_once
from distlab.grading.checks.tensor_parallel_mesh import (
    draft_meshes,
    places_once,
    real_mesh,
)
from distlab.grading.checks.tensor_parallel_passages import passages_once
from distlab.grading.checks.tensor_parallel_sequence import sequence_once
from distlab.grading.checks.tensor_parallel_vocab import losses_once

__all__ = [
    "blocks_once",
    "draft_meshes",
    "linears_once",
    "losses_once",
    "passages_once",
    "places_once",
    "ported_block",
    "real_mesh",
    "sequence_once",
]
