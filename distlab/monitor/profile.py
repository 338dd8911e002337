"""Record a torch.profiler trace of a few steps per rank, and a GPU's memory history.

    step 1 2 │ 3        │ 4 5 6       │ 7 …
    wait     │ warm up  │ recorded    │ off again: the run is not slowed

You can open the traces in https://ui.perfetto.dev, and the memory snapshot in
https://pytorch.org/memory_viz.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

WAIT, WARM_UP, RECORDED = 2, 1, 3


class StepProfiler:
    """Writes a trace automatically; call `end_step` after each step.

    The files are `rank_<r>.trace.json`, and on a GPU also `rank_<r>.memory.pickle`, in
    `folder`, which must exist. If a run has fewer steps than we wait for, `close`
    writes whatever has been recorded.
    """

    def __init__(self, folder: Path, rank: int, device: torch.device) -> None:
        self._folder, self._rank = folder, rank
        self._on_gpu = device.type == "cuda"
        activities = [ProfilerActivity.CPU]
        if self._on_gpu:
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history()
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=WAIT, warmup=WARM_UP, active=RECORDED, repeat=1),
            on_trace_ready=self._write,
            profile_memory=True,
            acc_events=True,
        )
        self._profile.start()

    def end_step(self) -> None:
        """Note the end of a step."""
        self._profile.step()

    def close(self) -> None:
        """Stop recording."""
        self._profile.stop()

    def _write(self, recorded: profile) -> None:
        recorded.export_chrome_trace(
            str(self._folder / f"rank_{self._rank}.trace.json")
        )
        if self._on_gpu:
            torch.cuda.memory._dump_snapshot(
                str(self._folder / f"rank_{self._rank}.memory.pickle")
            )
            torch.cuda.memory._record_memory_history(enabled=None)
