"""Open the engine that a job names, in the process of a rank."""

from __future__ import annotations

from distlab.engines.job import Job
from distlab.engines.parallel import Parallel


def open_parallel(job: Job) -> Parallel:
    """Open the configured backend in this process."""
    own = job.config, job.model, job.optimizer
    if job.config.backend == "scratch":
        from distlab.engines.scratch import Scratch

        return Scratch(*own)
    if job.config.backend == "horovod":
        from distlab.engines.horovod_parallel import Horovod

        return Horovod(*own)
    if job.config.backend == "deepspeed":
        from distlab.engines.deepspeed_parallel import DeepSpeed

        return DeepSpeed(*own)
    if job.config.backend == "tensorflow":
        from distlab.engines.tensorflow_parallel import TensorFlow

        return TensorFlow(job.config, job.model)
    from distlab.engines.torch_engine import Torch

    return Torch(*own)
