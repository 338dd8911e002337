"""What a training run writes down about itself while it runs, and where it goes.

A `meter.StepMeter` in each rank times data, compute and communication and makes one
`StepRecord` for every n steps. A `Monitor` combines the ranks' records and hands them
to its sinks: a JSONL file for each rank, TensorBoard, MLflow, Prometheus. Only the
meter and the profiler import torch, and the unit that `suspected` is handed: the first
view of `distlab top` does not wait for it.
"""

from distlab.monitor.monitor import Monitor, Sink
from distlab.monitor.records import StepRecord, Work, combined

__all__ = ["Monitor", "Sink", "StepRecord", "Work", "combined"]
