"""Run trials as processes of this machine, with a thread for each slot."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from distlab.engines import job as jobs
from distlab.engines import trial as trials
from distlab.engines.expect import EngineError
from distlab.engines.search import Asha
from distlab.engines.tuning import DONE, FAILED, STOPPED, Tuning

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpu(number: int, visible: str | None) -> str:
    """Return CUDA's name for a trial's GPU, from those that this process may use."""
    return visible.split(",")[number].strip() if visible else str(number)


class TrialProcesses:
    """Runs the trials of a search, `num_gpus * trials_per_gpu` at a time."""

    def __init__(
        self,
        tuning: Tuning,
        train_fn: Callable[..., Any],
        scheduler: Asha,
        num_gpus: int,
        trials_per_gpu: int,
    ) -> None:
        self.tuning, self.train_fn, self.scheduler = tuning, train_fn, scheduler
        self.num_gpus, self.trials_per_gpu = num_gpus, trials_per_gpu
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._errors: list[Exception] = []

    def run(self) -> None:
        """Run all waiting trials; none of their processes outlives this call.

        Raises:
            EngineError: we couldn't start a trial, or there are too few GPUs.
        """
        found = torch.cuda.device_count()
        if 0 < found < self.num_gpus:
            raise EngineError(
                f"num_gpus is {self.num_gpus}, but torch finds {found}, and a trial "
                "without a GPU would train on the CPU"
            )
        slots = [
            threading.Thread(target=self._slot, args=(index,), daemon=True)
            for index in range(self.num_gpus * self.trials_per_gpu)
        ]
        try:
            for slot in slots:
                slot.start()
            for slot in slots:
                slot.join()
        finally:
            with self.tuning.lock:
                self.tuning.is_over = True
                for process in self._processes:
                    process.kill()
        for error in self._errors:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise EngineError(f"a trial could not be run: {why}") from error

    def _slot(self, index: int) -> None:
        try:
            while (number := self.tuning.begin()) is not None:
                status, said = self._run(number, index // self.trials_per_gpu)
                self.tuning.end(number, status, said)
        except Exception as error:  # `run` raises it: a thread would only print it
            self._errors.append(error)
            self.tuning.is_over = True

    def _run(self, number: int, gpu: int) -> tuple[str, str]:
        given = self.tuning.parameters(number), self.tuning.kept(number)
        status = DONE
        with tempfile.TemporaryDirectory(prefix="distlab-") as folder:
            jobs.write((self.train_fn, *given), Path(folder) / "job.pickle")
            log = Path(folder) / "log"
            with self._process(Path(folder), log, gpu) as (process, reports, answers):
                for line in reports:
                    goes_on = self._goes_on(number, json.loads(line)["loss"])
                    status = DONE if goes_on else STOPPED
                    with contextlib.suppress(BrokenPipeError):
                        answers.write("go\n" if goes_on else "stop\n")
                        answers.flush()
                code = process.wait()
            lines = log.read_text(errors="replace").split("\n")
        if code:
            silent = f"the process of a trial ended with code {code}"
            return FAILED, next((s for s in reversed(lines) if s.strip()), silent)
        return status, ""

    @contextlib.contextmanager
    def _process(self, folder: Path, log: Path, gpu: int) -> Any:
        environment = dict(os.environ)
        if torch.cuda.is_available():
            environment[VISIBLE] = visible_gpu(gpu, environment.get(VISIBLE))
        reports, its_reports = os.pipe()
        its_answers, answers = os.pipe()
        pipes = its_reports, its_answers
        command = [trials.__file__, folder / "job.pickle", *pipes, os.getpid()]
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *map(str, command)],
                pass_fds=pipes,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        os.close(its_reports)
        os.close(its_answers)
        with self.tuning.lock:
            self._processes.add(process)
        try:
            with os.fdopen(reports) as heard, os.fdopen(answers, "w") as said:
                yield process, heard, said
        finally:
            process.kill()
            process.wait()
            with self.tuning.lock:
                self._processes.discard(process)

    def _goes_on(self, number: int, loss: float) -> bool:
        with self.tuning.lock:
            goes_on = self.scheduler.goes_on(self.tuning.reported(number, loss), loss)
            return goes_on and not (self.tuning.is_over or self.tuning.is_too_expensive)
