"""Write figures as TensorBoard's event files, with torch's own `SummaryWriter`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from distlab.monitor.extras import needed
from distlab.monitor.records import StepRecord


class TensorBoard:
    """Event files in `folder`, which `tensorboard --logdir FOLDER` shows.

    Figures of the run appear under `run/`, and each rank's loss and shares under
    `ranks/`, with one curve per rank in the same chart.

    Raises:
        ModuleNotFoundError: tensorboard isn't installed.
        OSError: the folder can't be written.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        module = needed("torch.utils.tensorboard", "TensorBoard")
        self._writer = module.SummaryWriter(str(folder))

    def record(self, record: StepRecord) -> None:
        """Add one point to each of this rank's curves."""
        figures = {
            "loss": record.loss,
            "step_s": record.step_s,
            "data_wait_share": record.data_wait_share,
            "communication_share": record.communication_share,
        }
        for name, value in figures.items():
            if value is not None:
                self._writer.add_scalar(
                    f"ranks/{name}/{record.rank}", value, record.step
                )

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Add one point to each of the run's curves."""
        for name, value in figures.items():
            self._writer.add_scalar(f"run/{name}", value, step)

    def close(self) -> None:
        """Write everything that is still in memory."""
        self._writer.close()
