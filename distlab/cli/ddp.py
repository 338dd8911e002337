"""`distlab ddp`: a whole data-parallel training, on the course's own loader and `fit`.

Before it a look at the cost, during it a bar for each rank, after it what the ranks
agree on. Every figure is measured while you watch.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distlab.cli.ddp_monitor import Monitoring, MonitorOrder
from distlab.cli.screen import command, processes, show_json, waiting, warn

if TYPE_CHECKING:  # these import torch, and a mistyped flag should not wait for it
    from distlab.curriculum.choose import Choice
    from distlab.runner import Cluster, NotFinishedError
    from distlab.training.ddp import Beside, DdpResult
    from distlab.training.ddp_checkpoint import Checkpointing
    from distlab.training.ddp_config import DdpConfig, Wishes
    from distlab.training.ddp_data import Origin
    from distlab.training.ddp_estimate import Probe
    from distlab.training.ddp_tracking import Tracked, TrackedRun

_TRACKERS = ("", "mlflow")
_IS_MANIFEST = re.compile(r"step-\d+\.json").fullmatch
_IS_DCP = re.compile(r"step-\d+").fullmatch


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to do around the training; `rate` is the cost of one rank per hour."""

    data_dir: Path | None = None
    may_download: bool = False
    track: str = ""
    rate: float = 1.0
    max_cost: float | None = None
    compare: bool = False
    as_json: bool = False
    monitor: MonitorOrder = field(default_factory=MonitorOrder)
    save: Path | None = None
    checkpoint: Path | None = None
    checkpoint_every: int | None = None
    checkpoint_format: str = "shards"
    resume: bool = False


def ddp(wishes: Wishes, order: Order) -> int:
    """Train; return 0, or 1 if ranks disagree or the learner's code doesn't finish.

    Raises:
        ValueError: an option is invalid; nothing has started yet.
        ModuleNotFoundError: you asked for MLflow, but it isn't installed.
        OSError: we can't download the data, or open a sink of the monitor.
    """
    _check(order)
    import torch

    from distlab.training.ddp_code import choose_units, whose
    from distlab.training.ddp_config import make_config
    from distlab.training.ddp_data import locate

    config = make_config(wishes, num_gpus=torch.cuda.device_count())
    units = choose_units(config.code)
    config = replace(config, code=config.code or whose(units))
    mlflow = _mlflow(config) if order.track else None
    origin = locate(
        config.dataset,
        folder=order.data_dir,
        may_download=order.may_download,
        say=_quiet if order.as_json else _say,
    )
    return _Training(config, order, units, origin, mlflow).lead()


def _check(order: Order) -> None:
    if order.track not in _TRACKERS:
        raise ValueError(f"--track {order.track}: choose mlflow")
    if not 0 <= order.rate < math.inf:
        raise ValueError(
            f"--cost-per-worker-hour {order.rate:g}: choose 0 or a larger number"
        )
    if order.max_cost is not None and not 0 <= order.max_cost < math.inf:
        raise ValueError(f"--max-cost {order.max_cost:g}: choose 0 or a larger number")
    order.monitor.check()
    _check_checkpoints(order)
    if order.save:
        from distlab.training.ddp_saved import require_writable

        require_writable(order.save)


def _check_checkpoints(order: Order) -> None:
    folder, every = order.checkpoint, order.checkpoint_every
    kind = order.checkpoint_format
    if folder is None:
        given = {
            "--resume": order.resume,
            "--checkpoint-every": every is not None,
            "--checkpoint-format": kind != "shards",
        }
        for flag in (name for name, is_given in given.items() if is_given):
            raise ValueError(f"{flag} needs --checkpoint DIR")
        return
    if kind not in ("shards", "dcp"):
        raise ValueError(f"--checkpoint-format {kind}: choose shards or dcp")
    if every is not None and every < 1:
        raise ValueError(f"--checkpoint-every {every}: choose at least 1 step")
    try:  # Path.glob takes a folder that it can't list for an empty one
        names = os.listdir(folder) if os.path.lexists(folder) else []
    except NotADirectoryError:
        raise ValueError(f"--checkpoint {folder} is a file; name a folder") from None
    except OSError as error:
        raise ValueError(
            f"--checkpoint {folder} can't be listed: {error.strerror}"
        ) from error
    if ".metadata" in names:
        raise ValueError(
            f"--checkpoint {folder} is a DCP checkpoint itself; move it into a folder "
            "under the name step-<n>, and name that folder"
        )
    has_manifest = any(map(_IS_MANIFEST, names))
    if order.resume and kind == "dcp" and has_manifest:
        raise ValueError(
            f"--checkpoint {folder} has no DCP folders but checkpoints of the other "
            "format; leave --checkpoint-format out"
        )
    if not order.resume and (has_manifest or any(map(_IS_DCP, names))):
        raise ValueError(
            f"--checkpoint {folder} contains checkpoints from another run; pass "
            "--resume to continue it, or name another folder"
        )


def _mlflow(config: DdpConfig) -> Any:
    from distlab.curriculum import Progress, find_root
    from distlab.training.ddp_tracking import prepare, require_mlflow, store_uri

    require_mlflow()  # before a folder is made for it
    return prepare(config.dataset, store_uri(Progress(find_root()).folder))


class _Training:
    """One run of the command, after its options have been checked."""

    def __init__(
        self,
        config: DdpConfig,
        order: Order,
        units: dict[str, Choice],
        origin: Origin,
        mlflow: Any,
    ) -> None:
        self._config, self._order, self._units = config, order, units
        self._origin, self._mlflow = origin, mlflow
        self._tracked: TrackedRun | None = None
        self._monitoring: Monitoring | None = None

    def lead(self) -> int:
        """Show everything before, during and after; return the exit code."""
        try:
            self._write_down()
            return self._lead()
        finally:
            if self._tracked:
                self._tracked.fail()  # which does nothing where it has finished

    def _write_down(self) -> None:
        sink = None
        if self._mlflow:
            from distlab.monitor.mlflow import MLflow
            from distlab.training.ddp_tracking import TrackedRun

            self._tracked = TrackedRun(self._mlflow, self._config)
            sink = MLflow(self._mlflow, self._tracked.run_id)
        if self._order.monitor.folder:
            self._monitoring = Monitoring(self._order.monitor, self._config, sink)

    def _lead(self) -> int:
        from distlab.ranks import new_cluster
        from distlab.runner import RunnerError
        from distlab.training.ddp import PRELOADS

        with new_cluster(preload=PRELOADS) as cluster:
            cluster.start(wait=False)  # while the files are checked, it imports torch
            self._before(cluster)
            try:
                result = self._on_ranks(cluster)
                alone = self._alone(cluster) if self._order.compare else None
            except RunnerError as error:
                return self._broken(error)
        return self._after(result, alone)

    def _before(self, cluster: Cluster) -> None:
        from distlab.cli.ddp_report import plan
        from distlab.training.ddp_data import read_split
        from distlab.training.ddp_estimate import estimate

        data = read_split(self._origin.files, self._origin.known)
        most, rate = self._order.max_cost, self._order.rate
        if self._order.as_json and most is None:
            return
        with waiting("measuring how long startup and messages take"):
            probed = self._probe(cluster)
        expected = estimate(self._config, data, probed)
        if most is not None and expected.cost(rate) > most:
            raise ValueError(
                f"--max-cost {most:g}: this run is expected to cost "
                f"{expected.cost(rate):.2g}, so choose fewer epochs or ranks"
            )
        if self._order.as_json:
            return
        lines = plan(self._config, self._origin.note, expected, rate)
        watched = self._monitoring.lines if self._monitoring else []
        _say(*lines, *self._evaluation(), *watched, "")

    def _evaluation(self) -> list[str]:
        """Say whose evaluate measures the model if `--code` has none."""
        from distlab.training.ddp_code import evaluates_itself

        if self._config.code[0].startswith("mine ") or evaluates_itself(self._units):
            return []  # the line of the code says it, or there is nothing to say
        return ["  evaluate  the reference's code, until you have written task 1.13"]

    def _probe(self, cluster: Cluster) -> Probe | None:
        """Measure how long startup and messages take; None if the ranks fail."""
        from distlab.runner import RunnerError
        from distlab.training.ddp import PRELOADS
        from distlab.training.ddp_code import is_reference
        from distlab.training.ddp_estimate import probe

        cluster.warm(*PRELOADS)
        own = not is_reference(self._config.code)
        try:
            return probe(cluster, self._config, journal=own)
        except RunnerError:  # the training meets it, too, and says why
            return None

    def _on_ranks(self, cluster: Cluster) -> DdpResult:
        from distlab.cli.ddp_bars import Bars
        from distlab.cli.training import shard_table
        from distlab.training.ddp import Shard, train

        config, quiet = self._config, self._order.as_json
        label = processes(config.world_size)
        watched = self._monitoring
        monitor = watched.monitor(self._origin) if watched else None
        with (
            Bars(label, config.world_size, config.epochs, quiet=quiet) as bars,
            contextlib.closing(monitor) if monitor else contextlib.nullcontext(),
        ):

            def on_shards(shards: list[Shard], steps: int) -> None:
                head = "its first samples in the shuffle of epoch 1"
                bars.say("", *shard_table(shards, head=head))
                bars.begin(steps)

            def on_word(kind: str, text: str) -> None:
                if kind == "warning":
                    warn(text)
                else:
                    bars.say(f"{kind}: {text}")

            return train(
                cluster,
                config,
                self._origin.files,
                self._all_units(),
                on_shards=on_shards,
                on_moment=bars.moment,
                on_epoch=bars.epoch,
                on_log=bars.log,
                monitor=monitor,
                monitored=watched.monitored if watched else None,
                checkpointing=self._checkpointing(),
                on_word=on_word,
                idle_s=self._order.monitor.idle_s,
            )

    def _checkpointing(self) -> Checkpointing | None:
        from distlab.training.ddp_checkpoint import Checkpointing

        order = self._order
        if order.checkpoint is None:
            return None
        return Checkpointing(
            folder=str(order.checkpoint.absolute()),
            every=order.checkpoint_every or 0,
            resume=order.resume,
            is_dcp=order.checkpoint_format == "dcp",
        )

    def _all_units(self) -> dict[str, Choice]:
        from distlab.training.ddp_code import choose_saver

        return self._units | (choose_saver() if self._order.checkpoint else {})

    def _alone(self, cluster: Cluster) -> DdpResult:
        from distlab.cli.ddp_bars import Bars
        from distlab.training.ddp import train_alone

        config, quiet = self._config, self._order.as_json
        with Bars("1 process", 1, config.epochs, quiet=quiet) as bars:
            return train_alone(
                cluster,
                config,
                self._origin.files,
                self._units,
                on_shards=lambda _, steps: bars.begin(steps),
                on_moment=bars.moment,
                on_epoch=bars.epoch,
            )

    def _broken(self, error: Exception) -> int:
        from distlab.runner import NotFinishedError
        from distlab.training.ddp_code import is_reference

        if isinstance(error, NotFinishedError):
            lines = _autopsy(error)
            _say("", *lines)
            if self._monitoring:
                self._monitoring.autopsy(str(error), lines)
            if error.run.idle_s:
                warn(str(error))
                return 1
        if is_reference(self._config.code):
            warn(
                f"the ranks did not finish: {error}; `{command('doctor')}` may know why"
            )
            return 11
        warn(
            f"the ranks did not finish: {error}; "
            f"run `{command('check 1.11')}` to find out more"
        )
        return 1

    def _after(self, result: DdpResult, alone: DdpResult | None) -> int:
        from distlab.cli.ddp_report import as_data, tell
        from distlab.training.ddp import compare

        beside: Beside | None = compare(result, alone) if alone else None
        saved = self._save(result)
        tracked = self._track(result, beside) if self._mlflow else None
        failures = result.failures() + (beside.failures() if beside else [])
        rate = self._order.rate
        if self._order.as_json:
            show_json(as_data(result, alone, beside, tracked, rate, failures))
        else:
            tell(result, alone, beside, tracked, rate, failures)
            _say(*(self._monitoring.after() if self._monitoring else []))
        if failures:
            return 1
        lost = bool(self._mlflow and not tracked) or not saved
        return 11 if lost else 0

    def _save(self, result: DdpResult) -> bool:
        """Return True if we saved the model, or nobody asked us to."""
        from distlab.training.ddp_saved import save_model

        if not self._order.save:
            return True
        try:
            save_model(result, self._order.save)
        except OSError as error:
            warn(f"the training is done, but we couldn't save its model: {error}")
            return False
        return True

    def _track(self, result: DdpResult, beside: Beside | None) -> Tracked | None:
        assert self._tracked is not None
        saved, rate = self._order.save, self._order.rate
        try:
            return self._tracked.finish(
                result,
                rate=rate,
                beside=beside,
                model_file=saved if saved and saved.exists() else None,
            )
        except Exception as error:  # MLflow's, SQLAlchemy's or the network's
            first = (str(error).splitlines() or [type(error).__name__])[0]
            warn(f"the training is done, but MLflow refused it: {first}")
            return None


def _say(*lines: str) -> None:
    from distlab.cli.screen import show

    show([("plain", line) for line in lines])


def _autopsy(error: NotFinishedError) -> list[str]:
    """Return a line per rank that says where it was."""
    from distlab.grading.report import evidence_lines
    from distlab.runner.autopsy import evidence

    return evidence_lines(evidence(error.run))


def _quiet(*lines: str) -> None:
    pass
