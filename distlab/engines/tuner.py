"""Search over parameters with random draws and ASHA, each trial in a process.

    def train_fn(parameters, report):
        for epoch in range(9):
            report(train_one_epoch(parameters["lr"]))     # ends the trial if it is poor

    best = DistributedTuner(train_fn, {"lr": loguniform(1e-4, 1)}, num_gpus=2).tune(8)

`backend` chooses where trials run: "processes", the default, uses this machine, and
"ray" uses Ray Tune, on this machine or on a cluster. We never switch silently, so if
Ray isn't installed, "ray" is an error. For the same seed, both draw the same trials.
With processes, `Asha` decides which trials end early. On Ray, its own ASHA does, with
the same two numbers.

If you pass a `folder`, we save every trial that has ended. If the process is killed and
you start the same search again, it reuses those results and runs the other trials. A
trial that was running continues from its last reported state (`distlab.engines.trial`),
while one that reports no state starts over. You may change the backend in between. On a
cluster, all nodes must reach `folder`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from distlab.engines.expect import EngineError, expect_int, expect_number
from distlab.engines.job import first_line
from distlab.engines.search import Asha, draw
from distlab.engines.trial import num_arguments
from distlab.engines.trial_processes import TrialProcesses
from distlab.engines.tuning import Trial, Tuning

TUNER_BACKENDS = ("processes", "ray")


class DistributedTuner:
    """Runs `num_gpus * trials_per_gpu` trials at a time and returns the best.

    `train_fn(parameters, report)` calls `report(loss)` or `report(loss, state)` as it
    goes, or returns a loss. A function `train_fn(parameters)` can only return one. A
    dictionary with "loss" counts as that loss. Once all trials together have cost
    `max_cost`, no new one begins, and the running ones end at their next report.

    Raises:
        EngineError: a number is impossible, there is nothing to draw for a parameter,
            or there is no such backend.
    """

    def __init__(
        self,
        train_fn: Callable[..., Any],
        search_space: Mapping[str, Any],
        num_gpus: int = 1,
        trials_per_gpu: int = 1,
        *,
        backend: str = "processes",
        address: str | None = None,
        scheduler: Asha | None = None,
        seed: int = 0,
        cost_per_gpu_hour: float = 0.0,
        max_cost: float | None = None,
        folder: str | Path | None = None,
    ) -> None:
        for name, value in (("num_gpus", num_gpus), ("trials_per_gpu", trials_per_gpu)):
            if not isinstance(value, int) or value < 1:
                raise EngineError(f"{name} is {value!r}, must be an integer from 1")
        for name, rate in (
            ("cost_per_gpu_hour", cost_per_gpu_hour),
            ("max_cost", max_cost),
        ):
            expect_number(name, rate, is_zero_fine=True)
        if max_cost is not None and not cost_per_gpu_hour:
            raise EngineError("max_cost needs cost_per_gpu_hour, which is 0")
        _expect_backend(backend, address)
        if not callable(train_fn) or not num_arguments(train_fn):
            raise EngineError("train_fn must be a function of the parameters")
        draw(search_space, seed, 0)  # an empty list is refused here, not in a trial
        self.train_fn, self.search_space = train_fn, dict(search_space)
        self.num_gpus, self.trials_per_gpu = num_gpus, trials_per_gpu
        self.backend, self.address = backend, address
        self.scheduler = scheduler or Asha()
        self.seed, self.rate, self.max_cost = seed, cost_per_gpu_hour, max_cost
        self.folder = Path(folder).absolute() if folder else None
        self._tuning = self._begin(0)

    @property
    def trials(self) -> list[Trial]:
        """Return the trials that have ended."""
        return self._tuning.trials

    @property
    def cost(self) -> float:
        """The cost of all trials so far, including those that are still running."""
        return self._tuning.cost

    def tune(self, num_samples: int) -> dict[str, Any]:
        """Run this many trials; return the parameters with the smallest loss.

        Raises:
            EngineError: no trial has reported a loss, in which case the message is the
                last one's error; we can't send `train_fn` to another process; or Ray
                isn't installed or can't be reached.
        """
        expect_int("num_samples", num_samples, 1)
        _expect_sendable(self.train_fn)
        self._tuning = self._begin(num_samples)
        given = self._tuning, self.train_fn, self.scheduler
        slots = self.num_gpus, self.trials_per_gpu
        if self.backend == "ray":
            from distlab.engines.ray_tune import run_on_ray_tune

            run_on_ray_tune(*given, *slots, self.address)
        else:
            TrialProcesses(*given, *slots).run()
        return self._tuning.best().parameters

    def _begin(self, num_samples: int) -> Tuning:
        return Tuning(
            self.search_space,
            self.seed,
            num_samples,
            slot_cost_per_hour=self.rate / self.trials_per_gpu,
            max_cost=self.max_cost,
            folder=self.folder,
        )


def _expect_sendable(train_fn: Callable[..., Any]) -> None:
    try:
        cloudpickle.dumps(train_fn)
    except Exception as error:  # an object's __reduce__ may raise anything
        raise EngineError(
            f"train_fn cannot be sent to another process: {first_line(error)}"
        ) from error


def _expect_backend(backend: str, address: str | None) -> None:
    if backend not in TUNER_BACKENDS:
        known = " or ".join(TUNER_BACKENDS)
        raise EngineError(f"backend is {backend!r}; of DistributedTuner it is {known}")
    if address is not None and backend != "ray":
        raise EngineError(f"an address is for backend ray; backend is {backend}")
    if address is not None and address.startswith("ray://"):
        raise EngineError(
            f"{address}: Ray Tune cannot run through Ray's client; start the search on "
            "a node of the cluster, with HOST:PORT as the address"
        )
