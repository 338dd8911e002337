"""Run one trial: call the caller's function with the parameters drawn for it.

    python distlab/engines/trial.py JOB REPORTS ANSWERS PARENT

The process writes a JSON line per report to one pipe, and reads from the other if it
should continue. On Ray Tune, an actor does the same with the same `LossReport`.

A file keeps a trial's progress: a JSON line with its losses and seconds, then the
pickled state. We replace it as a whole, so a trial that is killed never leaves half a
file.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distlab.engines.expect import EngineError

WATCH_S = 0.5


class TrialStopped(BaseException):
    """Raised in a trial that the search has ended."""


class LossReport:
    """Reports the losses of the caller's function.

    If you also pass your state, a trial can continue after the search was killed:

        state = report.state or start()
        for epoch in range(state["epoch"], 9):
            state, loss = train_one_epoch(state)
            report(loss, state)

    `send` gets all losses so far. We save the state first, so that the search never
    knows a loss that a continued trial would report again.
    """

    def __init__(
        self,
        send: Callable[[list[float]], None],
        parameters: Any,
        kept: Path | None,
    ) -> None:
        self._send, self._parameters, self._kept = send, parameters, kept
        self._began = time.monotonic()
        self.state: Any = None
        head = what_was_kept(kept)
        self.losses, self._before_s = head["losses"], head["seconds"]
        text = None if kept is None else bytes_if_there(kept)
        if text is not None:
            try:
                self.state = pickle.loads(text.partition(b"\n")[2])
            except Exception as error:  # depends on what is in the file
                raise damaged(kept) from error

    def __call__(self, loss: Any, state: Any = None) -> None:
        """Report a loss, or a dictionary with one; returns only if the trial continues.

        Raises:
            TypeError: the loss isn't a number.
        """
        number = number_in(loss)
        if number is None:
            raise TypeError(f"report({loss!r}): a loss must be a number")
        self.losses.append(number)
        if state is not None and self._kept is not None:
            self._keep(self._kept, state)
        self._send(self.losses)

    def _keep(self, path: Path, state: Any) -> None:
        seconds = self._before_s + time.monotonic() - self._began
        head = {
            "parameters": self._parameters,
            "losses": self.losses,
            "seconds": seconds,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        # A process of a killed search may still write: each one has a file to itself.
        part = path.with_suffix(f".{os.getpid()}")
        with part.open("wb") as file:
            file.write(as_json(head).encode() + b"\n" + pickle.dumps(state))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)


def what_was_kept(path: Path | None) -> dict[str, Any]:
    """Return the parameters, losses and seconds of a trial that we continue.

    Raises:
        EngineError: the file exists but can't be read.
    """
    text = None if path is None else bytes_if_there(path)
    if text is None:
        return {"losses": [], "seconds": 0.0}
    try:
        head: dict[str, Any] = json.loads(text.partition(b"\n")[0])
        return {**head, "losses": head["losses"], "seconds": head["seconds"]}
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(path) from error


def bytes_if_there(path: Path) -> bytes | None:
    """Read a whole file; return None only if neither the file nor a link exists.

    Raises:
        EngineError: the file can't be read, and continuing would lose its contents.
    """
    if not os.path.lexists(path):
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise EngineError(f"{path} cannot be read: {error.strerror}") from error


def damaged(path: Path | None) -> EngineError:
    """Return the error for a file with invalid contents."""
    return EngineError(f"{path} is damaged: remove it to restart the trial")


def as_json(value: Any) -> str:
    """Format a value on one line, as Python shows it if JSON has no form for it."""
    return json.dumps(value, default=repr)


def call(train_fn: Callable[..., Any], parameters: Any, report: LossReport) -> None:
    """Run the trial to its end; a returned loss counts as a report."""
    given = (parameters, report)[: num_arguments(train_fn)]
    loss = number_in(train_fn(*given))
    if loss is not None:
        report(loss)


def num_arguments(train_fn: Callable[..., Any]) -> int:
    """Return how many arguments, up to 2, `train_fn` takes; 2 if we can't tell."""
    try:
        found = inspect.signature(train_fn).parameters.values()
    except (TypeError, ValueError):
        return 2
    if any(one.kind is one.VAR_POSITIONAL for one in found):
        return 2
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    return min(2, sum(one.kind in positional for one in found))


def number_in(value: Any) -> float | None:
    """Convert a number, also of NumPy or torch, to a float; None for anything else.

    For a dictionary, convert the value of "loss".
    """
    if isinstance(value, dict):
        value = value.get("loss")
    if not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # an array of several numbers
        return None


def end_with(parent: int) -> None:
    """End this process once its parent has gone, since a killed search can't end it."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(job: Path, reports: int, answers: int, parent: int) -> int:
    """Run the trial; return 0 even if the search has ended it."""
    end_with(parent)
    with job.open("rb") as file:  # as distlab.engines.job, without torch
        sys.path += [one for one in pickle.load(file) if one not in sys.path]
        train_fn, parameters, kept = pickle.load(file)
    said, heard = os.fdopen(reports, "w"), os.fdopen(answers)

    def send(losses: list[float]) -> None:
        print(json.dumps({"loss": losses[-1]}), file=said, flush=True)
        if heard.readline().strip() != "go":
            raise TrialStopped

    with contextlib.suppress(TrialStopped):
        call(train_fn, parameters, LossReport(send, parameters, kept))
    return 0


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    sys.exit(main(Path(sys.argv[1]), *map(int, sys.argv[2:])))
