"""The parts of ZeRO that unit `sharded_optimizer` gives you: all but math and messages.

`Bucket` lays out parameters in one vector. `BucketOptimizer` provides the interface of
a torch.optim.Optimizer. `Backward` calls one function for each bucket during
backward(), and `ShardedLayers` decides when to gather and to free weights.
"""

from distlab.given.zero.backward import Backward
from distlab.given.zero.buckets import Bucket, ParamGroup
from distlab.given.zero.layers import FreedMemoryError, ShardedLayers
from distlab.given.zero.optimizer import BucketOptimizer, OptimizerFactory
from distlab.given.zero.state import Entry

__all__ = [
    "Backward",
    "Bucket",
    "BucketOptimizer",
    "Entry",
    "FreedMemoryError",
    "OptimizerFactory",
    "ParamGroup",
    "ShardedLayers",
]
