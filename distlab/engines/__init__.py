"""Run one training on existing engines: torch's DDP, FSDP2, TensorFlow, Ray Train.

config        DistributedConfig: a training's settings, checked before it starts
expect        checks of its fields
trainer       PyTorchDDPTrainer: the training in an ordinary script
worker        the training of one rank, the same on every engine
callbacks     what the caller, or we, add to a training at certain points
strategy      the interface of an engine: one rank of a training
strategies    the table of engines; *_strategy.py registers each, with its facts
samples       which rank trains on which samples
loaders       rebuilds the caller's DataLoader on every rank
losses        finds the divisor of a loss
optimizers    the caller's optimizer on a copy of the model, and in a checkpoint
schedules     the caller's learning-rate scheduler, on a rank's optimizer
randomness    each rank's random numbers
start, rank   starts the ranks, or joins a running job
script        `distlab train`: the same for a user's own script
tuner         DistributedTuner; tuning records its trials, search draws and decides
trial         one trial; trial_processes runs them here, ray_tune on Ray Tune

deepspeed_config  reads DeepSpeed's own configuration into ours
*_trainer     trainers under the names that users arrive with
outside       imports what you install separately
tensorflow_start, tensorflow_rank, keras_model: how TensorFlow's ranks meet, what we
send them
"""

from distlab.engines.callbacks import Callback, Training
from distlab.engines.config import DistributedConfig
from distlab.engines.deepspeed_trainer import DeepSpeedTrainer
from distlab.engines.expect import EngineError
from distlab.engines.history import EpochRow, History
from distlab.engines.horovod_trainer import HorovodTrainer
from distlab.engines.ray_trainer import RayTrainer
from distlab.engines.search import Asha, choice, loguniform, uniform
from distlab.engines.tensorflow_trainer import TensorFlowDistributedTrainer
from distlab.engines.trainer import PyTorchDDPTrainer
from distlab.engines.tuner import DistributedTuner

__all__ = [
    "Asha",
    "Callback",
    "DeepSpeedTrainer",
    "DistributedConfig",
    "DistributedTuner",
    "EngineError",
    "EpochRow",
    "History",
    "HorovodTrainer",
    "PyTorchDDPTrainer",
    "RayTrainer",
    "TensorFlowDistributedTrainer",
    "Training",
    "choice",
    "loguniform",
    "uniform",
]
