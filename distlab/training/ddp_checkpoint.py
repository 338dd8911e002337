"""The checkpoints of `distlab ddp` on one rank, which the unit `fault_tolerance` saves.

A checkpoint has the state of the run and the rank's report so far, so that the report
of a resumed training covers all epochs. If a checkpoint can't be saved, training
continues. If one can't be loaded, training doesn't begin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from distlab.checkpoints.files import CheckpointError, exchange, step_of
from distlab.checkpoints.saved_run import packed, resume
from distlab.checkpoints.training_state import Run, State
from distlab.comm import Comm, DiskError, RealDisk
from distlab.dcp.runs import FromDcp, has_dcp, save_run
from distlab.grading.kit.torchrun_env import unrecorded
from distlab.runner import RankContext
from distlab.training.ddp_config import DdpConfig

FREE = ("world_size", "multiple_of", "epochs", "lr_scaling", "device", "code")
"""Settings that you may change when you resume a training.

All others must be the same as before. `lr_scaling` is part of the learning rate.
"""


@dataclass(frozen=True, kw_only=True)
class Checkpointing:
    """Where and how often to save: every `every` steps, or after each epoch if 0.

    `is_dcp` asks for the format of torch.distributed.checkpoint. A folder that has such
    checkpoints already keeps its format.
    """

    folder: str
    every: int = 0
    resume: bool = False
    is_dcp: bool = False


class RefusedError(ValueError):
    """Raised if a training can't continue from the folder's contents; says why."""


class Checkpoints:
    """Saves and loads checkpoints; all ranks create it and save in the same steps.

    `data` identifies the files of the data set.
    """

    def __init__(
        self,
        context: RankContext,
        unit: ModuleType,
        order: Checkpointing,
        config: DdpConfig,
        run: Run,
        data: str,
    ) -> None:
        self._context, self._unit, self._order, self._run = context, unit, order, run
        # Its messages are none of the training's: they are not recorded or counted.
        self._comm = unrecorded(context.comm)
        own = {name: v for name, v in asdict(config).items() if name not in FREE}
        self._settings = own | {"data_dir": data}
        self._num_epochs = config.epochs
        self._num_failed, self._num_saved = 0, 0
        self._disk, error = _opened(order.folder)
        errors = [one for one in exchange(self._comm, error) if one]
        if errors and order.resume:
            self._refuse(f"--resume: {errors[0]}")
        if errors:
            self._warn(errors[0])
        self._saver: Any = None
        folder = Path(order.folder)
        # Rank 0's answer, so that all ranks make the same calls.
        self._is_dcp = bool(exchange(self._comm, order.is_dcp or has_dcp(folder))[0])
        if self._disk is not None and not errors:
            self._saver = (
                _DcpSaver(self._comm, folder)
                if self._is_dcp
                else unit.AsyncSaver(self._comm, self._disk)
            )

    def resume(self) -> State | None:
        """Set the run to the newest checkpoint; return what was saved as `progress`.

        Returns None if you didn't ask to resume, or if there is no checkpoint yet.

        Raises:
            RefusedError: on all ranks, if the training can't continue from there.
        """
        if not self._order.resume or self._disk is None:
            return None
        comm, place, disk = self._comm, self._order.folder, self._disk
        unit: Any = self._unit
        if has_dcp(Path(place)):
            unit = FromDcp(unit, Path(place))
        try:
            found = resume(
                comm, unit, lambda: disk, self._run, check=self._require_same
            )
        except (DiskError, CheckpointError, ValueError) as error:
            self._refuse(f"--resume from {place}: {_one_line(error)}")
        if found is None:
            self._require_nothing_else()
            self._tell("checkpoint", f"there is none in {place} yet: from step 0")
            return None
        for line in found.refused:
            self._tell("warning", f"a newer checkpoint was not taken: {line}")
        self._tell("checkpoint", f"from step {found.step} in {place}")
        same = len(found.owns) == comm.world_size
        progress: State = found.owns[comm.rank if same else 0]["progress"]
        return progress | {"loader": found.shared["loader"]}

    def is_due(self, step: int) -> bool:
        """Return True if we should save a checkpoint after this step."""
        return self._order.every > 0 and step % self._order.every == 0

    def is_due_after(self, num_epochs: int) -> bool:
        """Return True if we should save after this many epochs, as after the last."""
        return self._order.every == 0 or num_epochs == self._num_epochs

    def save(self, step: int, progress: State) -> None:
        """Begin to save; report once if an earlier save failed."""
        if self._saver is None:
            return
        num_epochs = len(progress["metrics"])
        state = packed(
            self._comm,
            self._unit,
            self._run,
            shared={"settings": self._settings, "num_epochs": num_epochs},
            own={"progress": progress},
        )
        self._num_saved += 1
        saver = self._saver
        if self._failed(lambda: saver.save(step, *state)) and not self._is_dcp:
            # This step was not tried: the error was that of the last one.
            self._failed(lambda: saver.save(step, *state))

    def close(self) -> None:
        """Wait for the last save, and report how many failed if more than one did."""
        if self._saver is None:
            return
        self._failed(self._saver.wait)
        if self._num_failed > 1:
            text = f"{self._num_failed} of {self._num_saved} checkpoints were not saved"
            self._tell("warning", text)

    def _failed(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except CheckpointError as error:
            self._num_failed += 1
            if self._num_failed == 1:
                self._warn(str(error))
            return True
        return False

    def _require_same(self, shared: State) -> None:
        if "settings" not in shared:
            raise ValueError("it was not saved by distlab ddp")
        saved, done = shared["settings"], shared.get("num_epochs", 0)
        for name, own in self._settings.items():
            flag = "--" + name.replace("_", "-").replace("learning-rate", "lr")
            if name not in saved:
                raise ValueError(f"it doesn't say which {flag} it was saved with")
            if saved[name] != own:
                raise ValueError(
                    f"it was saved with {flag} {saved[name]}, but this is a training "
                    f"with {own}"
                )
        if done > self._num_epochs:
            raise ValueError(
                f"{done} epochs are done, but this is a training with --epochs "
                f"{self._num_epochs}"
            )

    def _require_nothing_else(self) -> None:
        """Refuse a folder that has other files but none of our checkpoints.

        If a first save was cut short, its files are ours, and the next save removes
        them.
        """
        assert self._disk is not None
        names = [name for name in self._disk.names() if step_of(name) is None]
        if names:
            self._refuse(
                f"--resume from {self._order.folder}: it has no checkpoint of distlab, "
                f"and {names[0]}{_kind(self._disk, names[0])}"
            )

    def _refuse(self, why: str) -> None:
        self._tell("refused", why)
        raise RefusedError(why)

    def _warn(self, why: str) -> None:
        self._tell("warning", f"training goes on without a checkpoint: {why}")

    def _tell(self, kind: str, text: str) -> None:
        if self._context.rank == 0:
            self._context.report({kind: text})


class _DcpSaver:
    """Saves DCP folders, and like AsyncSaver, has save() and wait()."""

    def __init__(self, comm: Comm, folder: Path) -> None:
        self._comm, self._folder = comm, folder

    def save(self, step: int, tensors: dict[str, Tensor], meta: dict[str, Any]) -> None:
        """Save; the ranks wait until rank 0 has written everything."""
        save_run(self._comm, self._folder, step, tensors, meta)

    def wait(self) -> None:
        """Return, because nothing is under way."""


def _opened(folder: str) -> tuple[RealDisk | None, str]:
    try:
        return RealDisk(folder), ""
    except (DiskError, OSError) as error:
        return None, _one_line(error)


def _kind(disk: RealDisk, name: str) -> str:
    """Describe a file by its first bytes."""
    try:
        data = disk.read(name)
    except DiskError:  # naming the file is enough
        return ""
    is_pickle = data[:4] == b"PK\x03\x04" or (
        data[:1] == b"\x80" and data[1:2] <= b"\x05"
    )
    if is_pickle:
        return " is a pickle, which could run any code: it is not opened"
    return ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
