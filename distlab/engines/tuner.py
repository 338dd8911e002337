"""A search over parameters: random draws, ASHA, each trial a process of this machine.

    def train_fn(parameters, report):
        for epoch in range(9):
            report(train_one_epoch(parameters["lr"]))     # ends the trial if it is poor

    best = DistributedTuner(train_fn, {"lr": loguniform(1e-4, 1)}, num_gpus=2).tune(8)

With `folder` every finished trial is written down; the same search, begun again after
its process was killed, takes those results over and runs the others.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from distlab.cost import cost_of
from distlab.engines import job as jobs
from distlab.engines import trial as trials
from distlab.engines.expect import EngineError
from distlab.engines.search import Asha, draw

DONE, STOPPED, FAILED = "done", "stopped", "failed"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A trial that has ended; `loss` is its best report, infinite without any."""

    number: int
    parameters: dict[str, Any]
    loss: float
    num_reports: int
    seconds: float
    status: str
    said: str = ""
    """The last line of a trial that failed."""


class DistributedTuner:
    """Runs `num_gpus * trials_per_gpu` trials at a time and keeps the best.

    `train_fn(parameters, report)` calls `report(loss)` as it goes, or returns a loss.
    Once all trials together have cost `max_cost` no other begins, and those that run
    end at their next report.

    Raises:
        EngineError: a number cannot be.
    """

    def __init__(
        self,
        train_fn: Callable[..., Any],
        search_space: Mapping[str, Any],
        num_gpus: int = 1,
        trials_per_gpu: int = 1,
        *,
        scheduler: Asha | None = None,
        seed: int = 0,
        cost_per_gpu_hour: float = 0.0,
        max_cost: float | None = None,
        folder: str | Path | None = None,
    ) -> None:
        for name, value in (("num_gpus", num_gpus), ("trials_per_gpu", trials_per_gpu)):
            if not isinstance(value, int) or value < 1:
                raise EngineError(f"{name} is {value!r}, must be an integer from 1")
        if max_cost is not None and not cost_per_gpu_hour > 0:
            raise EngineError("max_cost needs cost_per_gpu_hour, which is 0")
        self.train_fn, self.search_space = train_fn, dict(search_space)
        self.num_gpus, self.trials_per_gpu = num_gpus, trials_per_gpu
        self.scheduler = scheduler or Asha()
        self.seed, self.rate, self.max_cost = seed, cost_per_gpu_hour, max_cost
        self.folder = Path(folder) if folder else None
        self.trials: list[Trial] = []
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._began: dict[int, float] = {}
        self._is_over = False

    @property
    def cost(self) -> float:
        """Of all trials up to now, those that still run included."""
        now = time.monotonic()
        running = sum(now - began for began in list(self._began.values()))
        seconds = sum(one.seconds for one in self.trials) + running
        return cost_of(1 / self.trials_per_gpu, seconds, self.rate)

    def tune(self, num_samples: int) -> dict[str, Any]:
        """Run so many trials; the parameters of the one with the smallest loss.

        Raises:
            EngineError: no trial has reported a loss: what the last one said.
        """
        self.trials, self._is_over = self._known(num_samples), False
        taken = {one.number for one in self.trials}
        waiting = [number for number in range(num_samples) if number not in taken]
        slots = [
            threading.Thread(target=self._slot, args=(waiting, index), daemon=True)
            for index in range(self.num_gpus * self.trials_per_gpu)
        ]
        try:
            for slot in slots:
                slot.start()
            for slot in slots:
                slot.join()
        finally:
            self._end_all()
        best = min(self.trials, key=lambda one: (one.loss, one.number), default=None)
        if best is None or math.isinf(best.loss):
            why = best.said if best else "the cost cap leaves room for none"
            raise EngineError(f"no trial has reported a loss: {why}")
        return best.parameters

    # ── a slot runs one trial after the other ───────────────────────────────────────

    def _slot(self, waiting: list[int], index: int) -> None:
        while True:
            with self._lock:
                if self._is_over or self._is_too_expensive() or not waiting:
                    return
                number = waiting.pop(0)
                self._began[number] = time.monotonic()
            ended = self._run(number, index // self.trials_per_gpu)
            with self._lock:
                del self._began[number]
                if not self._is_over:
                    self.trials.append(ended)
                    self._note(ended)

    def _run(self, number: int, gpu: int) -> Trial:
        parameters = draw(self.search_space, self.seed, number)
        began, losses, status = self._began[number], [], DONE
        with tempfile.TemporaryDirectory(prefix="distlab-") as folder:
            jobs.write((self.train_fn, parameters), Path(folder) / "job.pickle")
            log = Path(folder) / "log"
            with self._process(Path(folder), log, gpu) as (process, reports, answers):
                for line in reports:
                    losses.append(json.loads(line)["loss"])
                    goes_on = self._goes_on(len(losses), losses[-1])
                    status = DONE if goes_on else STOPPED
                    with contextlib.suppress(BrokenPipeError):
                        answers.write("go\n" if goes_on else "stop\n")
                        answers.flush()
                code = process.wait()
            lines = log.read_text(errors="replace").split("\n")
        known = [loss for loss in losses if not math.isnan(loss)]
        return Trial(
            number=number,
            parameters=parameters,
            loss=min(known, default=math.inf),
            num_reports=len(losses),
            seconds=time.monotonic() - began,
            status=FAILED if code else status,
            said=next((s for s in reversed(lines) if s.strip()), "") if code else "",
        )

    @contextlib.contextmanager
    def _process(self, folder: Path, log: Path, gpu: int) -> Any:
        environment = dict(os.environ)
        if torch.cuda.is_available():
            environment["CUDA_VISIBLE_DEVICES"] = str(gpu)
        reports, its_reports = os.pipe()
        its_answers, answers = os.pipe()
        command = [trials.__file__, folder / "job.pickle", its_reports, its_answers]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *map(str, command)],
                pass_fds=(its_reports, its_answers),
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        os.close(its_reports)
        os.close(its_answers)
        with self._lock:
            self._processes.add(process)
        try:
            with os.fdopen(reports) as heard, os.fdopen(answers, "w") as said:
                yield process, heard, said
        finally:
            process.kill()
            process.wait()
            with self._lock:
                self._processes.discard(process)

    def _goes_on(self, num_reports: int, loss: float) -> bool:
        with self._lock:
            goes_on = self.scheduler.goes_on(num_reports, loss)
            return goes_on and not self._is_over and not self._is_too_expensive()

    def _is_too_expensive(self) -> bool:
        return self.max_cost is not None and self.cost >= self.max_cost

    def _end_all(self) -> None:
        with self._lock:
            self._is_over = True
            for process in self._processes:
                process.kill()

    # ── what a killed search leaves ─────────────────────────────────────────────────

    def _note(self, ended: Trial) -> None:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "trials.jsonl").open("a", encoding="utf-8") as file:
                # On a line that a killed search has left torn nothing may follow.
                file.write("\n" + json.dumps(asdict(ended)))

    def _known(self, num_samples: int) -> list[Trial]:
        """The trials of this search that have ended before; a torn line is left out."""
        path = self.folder / "trials.jsonl" if self.folder else None
        if path is None or not path.exists():
            return []
        found = {}
        for line in path.read_text(encoding="utf-8").split("\n"):
            try:
                one = Trial(**json.loads(line))
            except ValueError:  # torn, or the empty first line
                continue
            drawn = draw(self.search_space, self.seed, one.number)
            if one.parameters != drawn:
                raise EngineError(f"{path} holds another search: choose a new folder")
            found[one.number] = one
        return [found[number] for number in sorted(found) if number < num_samples]
