"""The parts of ZeRO that unit `sharded_optimizer` gives you: all but math and messages.

`Bucket` lays out parameters in one vector. `BucketOptimizer` provides the interface of
a torch.optim.Optimizer. `Backward` calls one function for each bucket during
backward(), and `ShardedLayers` decides when to gather and to free weights.
"""

from distlab.given.sharded_optimizer.backward import Backward
from distlab.given.sharded_optimizer.buckets import Bucket, ParamGroup
from distlab.given.sharded_optimizer.layers import FreedMemoryError, ShardedLayers
from distlab.given.sharded_optimizer.optimizer import BucketOptimizer, OptimizerFactory
from distlab.given.sharded_optimizer.state import Entry

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
