"""Make the planned fault happen in a rank, once in the whole run.

The training reports its position with `at(moment, step)`. When it reaches the moment
and the step of the plan in the plan's rank, the fault happens. A file, `fired.json`,
records when it happened and what it was, so that it doesn't happen again.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from distlab.chaos.plan import FaultPlan
from distlab.checkpoints import files as given
from distlab.comm import Disk
from distlab.sim.observed_disk import ObservedDisk

FIRED, CUT, LAUNCHER = "fired.json", "cut.json", "launcher.pid"
SLOWER = 5  # times
ROOM_BYTES = 32 << 10  # for each file of a full disk
FULL_SAVES = 2  # so many saves find no room
_EVERY_STEP = ("forward", "all-reduce", "optimizer")
_PATIENCE_S = 20.0


class PlannedError(RuntimeError):
    """An exception that `distlab chaos` raises in a rank."""


class Faults:
    """The part of the plan that concerns this rank; without a plan, nothing happens."""

    def __init__(
        self, plan: FaultPlan | None, rank: Callable[[], int], checkpoints: Path
    ) -> None:
        self._plan, self._checkpoints, self._rank = plan, checkpoints, rank
        self._is_over = plan is None
        self._slow_at, self._num_full = "", 0
        self._durations: list[float] = []
        self._last = time.monotonic()

    def at(self, moment: str, step: int) -> None:
        """Note where the training is, and cause the fault if the plan says so."""
        if moment == "forward":
            now = time.monotonic()
            self._durations.append(now - self._last)
            self._last = now
        if self._slow_at == moment:
            self._dawdle()
        if self._is_due(moment, step) and self._plan and self._plan.fault != "nan":
            self._fire(step)

    def poison(self, moment: str, step: int, tensor: Tensor) -> None:
        """Put a NaN into `tensor`, if the plan says so."""
        if self._is_due(moment, step) and self._plan and self._plan.fault == "nan":
            self._note(step, "a NaN")
            place = self._plan.draw % tensor.numel()
            tensor.detach().view(-1)[place] = float("nan")

    def disk(self, disk: Disk) -> Disk:
        """Wrap the disk of this rank's checkpoints, for the faults of a save."""
        return disk if self._is_over else _Disk(disk, self)

    def saving(self, step: int, num_writes: int) -> None:
        """Note the `num_writes`-th operation on the disk in this save.

        A save consists of eight such operations on rank 0, and of four on the other
        ranks.
        """
        if self._plan is None:
            return
        num_kinds = 8 if self._plan.rank == 0 else 4
        if num_writes == self._plan.draw % num_kinds:
            self.at("save", step)

    def save_ended(self) -> None:
        """Note that a save has ended; after some saves, a full disk has room again."""
        if self._num_full:
            self._num_full -= 1
            if not self._num_full:
                import resource

                _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    def _is_due(self, moment: str, step: int) -> bool:
        plan = self._plan
        if plan is None or self._is_over:
            return False
        if moment != plan.moment or step < plan.step or self._rank() != plan.rank:
            return False  # an elastic group may lack this rank when the step comes
        self._is_over = (Path(plan.folder) / FIRED).exists()
        return not self._is_over

    def _fire(self, step: int) -> None:
        assert self._plan is not None
        _HAPPEN[self._plan.fault](self, step)

    def _note(self, step: int, what: str, **more: object) -> None:
        """Record that the fault happens now, so that no process causes it again."""
        assert self._plan is not None
        self._is_over = True
        path = Path(self._plan.folder) / FIRED
        told = {"t": time.monotonic(), "rank": self._plan.rank, "step": step}
        text = json.dumps({**told, "moment": self._plan.moment, "what": what, **more})
        path.with_suffix(".part").write_text(text)
        path.with_suffix(".part").rename(path)

    # ── the faults ──────────────────────────────────────────────────────────────────

    def _raise(self, step: int) -> None:
        self._note(step, "an exception")
        raise PlannedError(f"planned by distlab chaos, in step {step}")

    def _signal(self, step: int, number: signal.Signals) -> None:
        self._note(step, number.name)
        os.kill(os.getpid(), number)

    def _signal_launcher(self, step: int, number: signal.Signals) -> None:
        self._note(step, f"{number.name} for the launcher")
        launcher = Path(self._plan.folder if self._plan else "") / LAUNCHER
        os.kill(int(launcher.read_text()), number)

    def _damage(self, step: int, change: Callable[[bytes], bytes]) -> None:
        """Damage a file of the newest checkpoint on the disk, then die."""
        assert self._plan is not None
        names = [path.name for path in self._checkpoints.iterdir()]
        newest = given.manifest_steps(names)[-1]
        manifest = self._checkpoints / given.manifest_name(newest)
        files = given.decode_manifest(manifest.read_bytes()).files
        chosen = random.Random(self._plan.draw).choice([manifest.name, *_names(files)])
        path = self._checkpoints / chosen
        self._note(step, f"{chosen}, then SIGKILL", damaged=newest)
        path.write_bytes(change(path.read_bytes()))
        os.kill(os.getpid(), signal.SIGKILL)

    def _truncated(self, data: bytes) -> bytes:
        assert self._plan is not None
        return data[: self._plan.draw % len(data)]

    def _flipped(self, data: bytes) -> bytes:
        assert self._plan is not None
        place = self._plan.draw % len(data)
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    def _fill(self, step: int) -> None:
        self._note(step, f"room for {ROOM_BYTES >> 10} KiB per file (RLIMIT_FSIZE)")
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM_BYTES, hard))
        self._num_full = FULL_SAVES

    def _slow_down(self, step: int) -> None:
        self._note(step, f"{SLOWER} times slower from here on")
        assert self._plan is not None
        moment = self._plan.moment
        self._slow_at = moment if moment in _EVERY_STEP else "forward"
        self._dawdle()

    def _dawdle(self) -> None:
        usual_s = statistics.median(self._durations[1:20] or [0.02])
        time.sleep((SLOWER - 1) * usual_s)

    def _kill_data_worker(self, step: int) -> None:
        worker = multiprocessing.active_children()[0]
        self._note(step, "SIGKILL for a data worker")
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)

    def _cut(self, step: int) -> None:
        """Ask the holder of the link to cut it, and wait until that is done."""
        assert self._plan is not None
        self._note(step, "the link between the nodes is cut")
        until = time.monotonic() + _PATIENCE_S
        while not (Path(self._plan.folder) / CUT).exists():
            if time.monotonic() > until:
                raise PlannedError("the link was not cut")
            time.sleep(0.005)


def _names(files: tuple[given.FileRecord, ...]) -> list[str]:
    return [file.name for file in files]


_HAPPEN: dict[str, Callable[[Faults, int], None]] = {
    "exception": Faults._raise,
    "kill-worker": lambda f, s: f._signal(s, signal.SIGKILL),
    "kill-rank-0": lambda f, s: f._signal(s, signal.SIGKILL),
    "freeze": lambda f, s: f._signal(s, signal.SIGSTOP),
    "notice": lambda f, s: f._signal_launcher(s, signal.SIGTERM),
    "kill-launcher": lambda f, s: f._signal_launcher(s, signal.SIGKILL),
    "truncate": lambda f, s: f._damage(s, f._truncated),
    "flip-bit": lambda f, s: f._damage(s, f._flipped),
    "disk-full": Faults._fill,
    "slow": Faults._slow_down,
    "kill-data-worker": Faults._kill_data_worker,
    "cut-short": Faults._cut,
    "cut-for-good": Faults._cut,
    "cut-off": Faults._cut,
}


class _Disk(ObservedDisk):
    """Counts the operations of a save, whose file names tell which step is saved."""

    def __init__(self, disk: Disk, faults: Faults) -> None:
        super().__init__(disk)
        self._faults = faults
        self._step, self._num_done = -1, 0

    def _begin(self, name: str, *arguments: str | bytes) -> None:
        first = arguments[0] if arguments else ""
        if name == "write":
            assert isinstance(first, str)
            step = given.step_of(first)
            if step is not None and step != self._step:
                if self._step >= 0:
                    self._faults.save_ended()
                self._step, self._num_done = step, 0
        if name in ("write", "sync", "rename", "sync_folder"):
            number, self._num_done = self._num_done, self._num_done + 1
            with contextlib.suppress(ProcessLookupError):  # the launcher is gone
                self._faults.saving(self._step, number)
