"""Given to the unit `sharded_optimizer`: all of ZeRO that is neither math nor message.

`Bucket` lays parameters out in one vector; `BucketOptimizer` is what the users of a
torch.optim.Optimizer expect; `Backward` calls one function for each bucket during
backward(); `ShardedLayers` says when weights come and go.
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
