"""Keep track of a running search: its trials and their cost.

It starts nothing itself. `trial_processes` and `ray_tune` start the trials, and record
here what happens.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from distlab.cost import cost_of
from distlab.engines.expect import EngineError
from distlab.engines.search import draw
from distlab.engines.trial import as_json, bytes_if_there, what_was_kept

DONE, STOPPED, FAILED = "done", "stopped", "failed"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A trial that has ended; `loss` is its best finite report, or infinite."""

    number: int
    parameters: dict[str, Any]
    loss: float
    num_reports: int
    seconds: float
    status: str
    said: str = ""
    """The last line of a trial that failed."""


@dataclass(frozen=True)
class Running:
    """A running trial; a continued one also has its earlier losses and seconds."""

    began: float
    before_s: float
    losses: list[float]

    @property
    def seconds(self) -> float:
        """The trial's seconds so far."""
        return self.before_s + time.monotonic() - self.began


class Tuning:
    """The trials of a search; slots may call it from several threads."""

    def __init__(
        self,
        space: Mapping[str, Any],
        seed: int,
        num_samples: int,
        *,
        slot_cost_per_hour: float,
        max_cost: float | None,
        folder: Path | None,
    ) -> None:
        self.space, self.seed, self.folder = dict(space), seed, folder
        self.rate, self.max_cost = slot_cost_per_hour, max_cost
        self.trials = self._known(num_samples)
        taken = {one.number for one in self.trials}
        self.waiting = [number for number in range(num_samples) if number not in taken]
        self.is_over = False
        """Set by what runs the trials, once none is to be noted any more."""
        self.lock = threading.RLock()
        self._running: dict[int, Running] = {}

    @property
    def cost(self) -> float:
        """The cost of all trials so far, including those that are still running."""
        with self.lock:
            running = sum(one.seconds for one in self._running.values())
            seconds = sum(one.seconds for one in self.trials) + running
        return cost_of(1, seconds, self.rate)

    @property
    def is_too_expensive(self) -> bool:
        """Return True if no other trial may start and the running ones must end."""
        return self.max_cost is not None and self.cost >= self.max_cost

    def parameters(self, number: int) -> dict[str, Any]:
        """Return the parameters drawn for a trial."""
        return draw(self.space, self.seed, number)

    def kept(self, number: int) -> Path | None:
        """Return the file with a trial's progress, if the search has a folder."""
        return self.folder / f"trial-{number}.state" if self.folder else None

    def begin(self) -> int | None:
        """Return the trial that starts now, or None if no other should start."""
        with self.lock:
            if self.is_over or not self.waiting or self.is_too_expensive:
                return None
            number = self.waiting.pop(0)
            head = what_was_kept(self.kept(number))
            before = head["seconds"], head["losses"]
            self._running[number] = Running(time.monotonic(), *before)
            return number

    def reported(self, number: int, loss: float) -> int:
        """Record a loss; return the trial's number of reports so far."""
        with self.lock:
            losses = self._running[number].losses
            losses.append(loss)
            return len(losses)

    def end(self, number: int, status: str, said: str = "") -> None:
        """Record a trial's end, unless the search is over."""
        with self.lock:
            one = self._running.pop(number)
            if self.is_over:
                return
            known = [loss for loss in one.losses if math.isfinite(loss)]
            ended = Trial(
                number=number,
                parameters=self.parameters(number),
                loss=min(known, default=math.inf),
                num_reports=len(one.losses),
                seconds=one.seconds,
                status=status,
                said=said,
            )
            self.trials.append(ended)
            self._note(ended)

    def best(self) -> Trial:
        """Return the trial with the smallest loss.

        Raises:
            EngineError: no trial has reported a loss; the message is the last one's.
        """
        best = min(self.trials, key=lambda one: (one.loss, one.number), default=None)
        if best is None or math.isinf(best.loss):
            raise EngineError(self._why_none_is_best())
        return best

    def _why_none_is_best(self) -> str:
        said = [one.said for one in self.trials if one.said]
        if any(one.num_reports for one in self.trials):
            reason = said[-1] if said else "all that were reported are inf or nan"
            return f"no trial has reported a finite loss: {reason}"
        if said:
            reason = said[-1]
        elif self.trials:
            reason = "train_fn called no report() and returned no number"
        else:
            reason = "the cost cap leaves room for none"
        return f"no trial has reported a loss: {reason}"

    # ── what a killed search leaves ─────────────────────────────────────────────────

    def _note(self, ended: Trial) -> None:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / "trials.jsonl").open("a", encoding="utf-8") as file:
                # On a line that a killed search has left torn nothing may follow.
                file.write("\n" + as_json(asdict(ended)))
        kept = self.kept(ended.number)
        if kept is not None:
            kept.unlink(missing_ok=True)

    def _known(self, num_samples: int) -> list[Trial]:
        """Return this search's trials that ended before, without a torn line."""
        if self.folder is None:
            return []
        for number in range(num_samples):
            self._expect_same(self.folder, number, what_was_kept(self.kept(number)))
        path = self.folder / "trials.jsonl"
        found = {}
        for line in (bytes_if_there(path) or b"").decode().split("\n"):
            try:
                one = Trial(**json.loads(line))
            except ValueError:  # torn, or the empty first line
                continue
            self._expect_same(path, one.number, asdict(one))
            found[one.number] = replace(one, parameters=self.parameters(one.number))
        return [found[number] for number in sorted(found) if number < num_samples]

    def _expect_same(self, path: Path, number: int, noted: dict[str, Any]) -> None:
        drawn = json.loads(as_json(self.parameters(number)))
        if noted.get("parameters", drawn) != drawn:
            raise EngineError(f"{path} holds another search: choose a new folder")
