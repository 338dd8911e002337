"""`distlab ddp --monitor FOLDER`: open the sinks for a training's figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distlab.cli.screen import command, warn
from distlab.monitor.sinks import announced, expect_known, open_sinks

if TYPE_CHECKING:  # these import torch, and a mistyped flag should not wait for it
    from distlab.monitor import Monitor, Sink, Work
    from distlab.training.ddp_config import DdpConfig
    from distlab.training.ddp_data import Origin
    from distlab.training.ddp_rank import Monitored

_HANG_AFTER_S = 600.0  # as long as NCCL's communication calls wait by default
_LOG_EVERY = 10


@dataclass(frozen=True, kw_only=True)
class MonitorOrder:
    """The options of the monitor; without a folder, there is none."""

    folder: Path | None = None
    also: tuple[str, ...] = ()
    log_every_n_steps: int | None = None
    profile: bool = False
    hang_after_s: float | None = None

    @property
    def idle_s(self) -> float:
        """Return for how many seconds all ranks may be silent before we end the run."""
        if self.hang_after_s is not None:
            return self.hang_after_s
        return _HANG_AFTER_S if self.folder else math.inf

    def check(self) -> None:
        """Refuse invalid options before anything has started.

        Raises:
            ValueError: an option needs another, or is out of range.
        """
        every = self.log_every_n_steps
        for flag, is_given in (
            ("--profile", self.profile),
            ("--also", bool(self.also)),
            ("--log-every-n-steps", every is not None),
        ):
            if is_given and self.folder is None:
                raise ValueError(f"{flag} needs --monitor FOLDER")
        if every is not None and every < 1:
            raise ValueError(f"--log-every-n-steps {every}: choose at least 1")
        if self.hang_after_s is not None and not 0 < self.hang_after_s < math.inf:
            raise ValueError(
                f"--hang-after {self.hang_after_s:g}: choose more than 0 seconds"
            )
        expect_known(self.also)


class Monitoring:
    """The monitor of one run, and the settings that ranks need."""

    def __init__(self, order: MonitorOrder, config: DdpConfig, mlflow: Any) -> None:
        """Open every sink. `mlflow` is one more, or None.

        Raises:
            ModuleNotFoundError: a library is missing; the sentence says what brings it.
            OSError: the folder cannot be written, or a port cannot be had.
        """
        assert order.folder is not None
        self._order, self._folder = order, order.folder.resolve()
        self._config, self._sinks = config, _open(order, config)
        self.lines = _announced(order, self._sinks)
        if mlflow is not None:
            self._sinks.append(mlflow)
        if order.profile:
            self._profile.mkdir(exist_ok=True)

    @property
    def _profile(self) -> Path:
        return self._folder / "profile"

    def monitor(self, origin: Origin) -> Monitor:
        """Return the object that listens to the ranks."""
        from distlab.monitor import Monitor

        work = _work(self._config, origin)
        return Monitor(self._config.world_size, self._sinks, work=work, warn=warn)

    @property
    def monitored(self) -> Monitored:
        """Return the settings for the ranks."""
        from distlab.training.ddp_rank import Monitored

        profile = str(self._profile) if self._order.profile else ""
        every = self._order.log_every_n_steps or _LOG_EVERY
        return Monitored(log_every_n_steps=every, profile=profile)

    def autopsy(self, reason: str, lines: Sequence[str]) -> None:
        """Record why the run didn't finish, or warn if we can't."""
        from distlab.monitor.jsonl import write_autopsy

        try:
            write_autopsy(self._folder, reason, lines)
        except OSError as error:
            warn(f"couldn't write the autopsy to the monitor folder: {error}")

    def after(self) -> list[str]:
        """Say what to look at now."""
        lines = [f"  records   {command(f'top {self._order.folder}')}"]
        if self._order.profile:
            traces = sorted(self._profile.glob("*.trace.json"))
            lines.append(
                f"  profile   {len(traces)} traces in {self._order.folder}/profile: "
                "open them in https://ui.perfetto.dev"
            )
        return lines


def _open(order: MonitorOrder, config: DdpConfig) -> list[Sink]:
    assert order.folder is not None
    run = {"tool": "distlab ddp", **asdict(config)}
    return open_sinks(order.folder, run, order.also)


def _announced(order: MonitorOrder, sinks: Sequence[Sink]) -> list[str]:
    assert order.folder is not None
    lines = [f"  monitor   {order.folder}: {command(f'top {order.folder}')} shows it"]
    return lines + [f"{'':12}{line}" for line in announced(order.folder, sinks)]


def _work(config: DdpConfig, origin: Origin) -> Work:
    import torch

    from distlab.monitor import Work
    from distlab.monitor.flops import flops_per_sample, peak_flops
    from distlab.training.ddp_data import make_model, read_split

    device = torch.device(config.device)
    inputs = read_split(origin.files, origin.known).train_inputs[:1]
    devices = config.world_size if config.device == "cuda" else 1
    return Work(
        flops_per_sample=flops_per_sample(make_model(config), inputs),
        peak_flops=peak_flops(device) * devices,
    )
