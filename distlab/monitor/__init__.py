"""Record what a training run does while it runs, and send the figures to sinks.

A `meter.StepMeter` in each rank times data, compute and communication, and makes one
`StepRecord` for every n steps. A `Monitor` combines the ranks' records and passes them
to its sinks: a JSONL file for each rank, TensorBoard, MLflow, Prometheus or an
OpenTelemetry collector. Only the meter, the profiler and the unit that `suspected` gets
import torch, so the first view of `distlab top` doesn't have to wait for it.
"""

from distlab.monitor.monitor import Monitor, Sink
from distlab.monitor.records import StepRecord, Work, combined

__all__ = ["Monitor", "Sink", "StepRecord", "Work", "combined"]
