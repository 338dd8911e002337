"""A folder of JSON lines: `run.json`, `rank_<r>.jsonl`, `figures.jsonl`.

    run.json        what the run is: world size, steps, when it began, its settings
    rank_0.jsonl    a StepRecord of rank 0 in each line
    figures.jsonl   {"step": …, "loss": …}: all ranks together, and validations
    autopsy.txt     only where the run did not finish: why, and where each rank was

Every line is written at once. A run that is killed leaves at most one torn line, the
last of a file, which reading leaves out. JSON has no numbers for nan and infinity:
they stand as "nan" and "inf".
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TextIO

from distlab.monitor.records import StepRecord

RUN, FIGURES, AUTOPSY = "run.json", "figures.jsonl", "autopsy.txt"


class JsonLines:
    """Writes the folder; it must not hold another run.

    A run with the values `same` is this one, which goes on: the folder keeps its lines
    up to the step `after`.

    Raises:
        ValueError: `folder` holds a run already, which would be mixed with this.
        OSError: it cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        run: Mapping[str, Any],
        *,
        same: Mapping[str, Any] | None = None,
        after: int = 0,
    ) -> None:
        self.name = f"the monitor folder {folder}"
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / RUN).exists():
            if same is None or not _is_run(folder / RUN, same):
                raise ValueError(
                    f"{folder} holds the records of another run: choose a new folder"
                )
            for path in folder.glob("*.jsonl"):
                _keep_up_to(path, after)
        self._folder, self._files = folder, dict[str, TextIO]()
        (folder / RUN).write_text(json.dumps(dict(run), indent=1) + "\n")

    def record(self, record: StepRecord) -> None:
        """A line in the file of its rank."""
        self._write(f"rank_{record.rank}.jsonl", vars(record))

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """A line for the whole run."""
        self._write(FIGURES, {"step": step, **figures})

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _write(self, name: str, values: Mapping[str, Any]) -> None:
        file = self._files.get(name)
        if file is None:
            path = self._folder / name
            file = self._files[name] = path.open("a", encoding="utf-8")
        file.write(json.dumps({key: _finite(value) for key, value in values.items()}))
        file.write("\n")
        file.flush()


def _is_run(path: Path, same: Mapping[str, Any]) -> bool:
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(run, dict) and same.items() <= run.items()


def _keep_up_to(path: Path, step: int) -> None:
    """Leave out the lines of later steps, and one that is torn."""
    kept = [values for values in _lines(path) if values.get("step", 0) <= step]
    beside = path.with_suffix(".part")
    beside.write_text("".join(json.dumps(values) + "\n" for values in kept))
    beside.replace(path)


def write_autopsy(folder: Path, reason: str, lines: Sequence[str]) -> None:
    """Say in the folder why the run did not finish, in a line, and where ranks were.

    Raises:
        OSError: it cannot be written.
    """
    text = "\n".join([" ".join(reason.split()), "", *lines])
    (folder / AUTOPSY).write_text(text + "\n", encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A folder as it is now."""

    run: dict[str, Any]
    records: dict[int, list[StepRecord]]  # by rank, oldest first
    figures: list[dict[str, float]]  # each with its "step"
    autopsy: str = ""  # why it did not finish


def read_folder(folder: Path) -> Recorded:
    """Everything that is in the folder, whole lines only.

    Raises:
        ValueError: it is no such folder, or a line is damaged; says which.
    """
    try:
        run = json.loads((folder / RUN).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{folder} holds no records: there is no {RUN}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / RUN} cannot be read: {error}") from error
    if not isinstance(run, dict) or "world_size" not in run:
        raise ValueError(f"{folder / RUN} does not say the world size")
    paths = {rank: folder / f"rank_{rank}.jsonl" for rank in range(run["world_size"])}
    records = {
        rank: [_record(values, path) for values in _lines(path)]
        for rank, path in paths.items()
    }
    figures = [
        {key: _number(value) for key, value in values.items()}
        for values in _lines(folder / FIGURES)
    ]
    path = folder / AUTOPSY
    reason = path.read_text(encoding="utf-8").split("\n")[0] if path.exists() else ""
    return Recorded(run=run, records=records, figures=figures, autopsy=reason)


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    *whole, _torn = path.read_text(encoding="utf-8").split("\n")
    found = []
    for number, line in enumerate(whole, start=1):
        try:
            values = json.loads(line)
        except ValueError:
            values = None
        if not isinstance(values, dict):
            raise ValueError(f"{path}:{number} is no line of records")
        found.append(values)
    return found


_NAMES = {field.name for field in fields(StepRecord)}


def _record(values: dict[str, Any], path: Path) -> StepRecord:
    if set(values) != _NAMES:
        wrong = ", ".join(sorted(set(values) ^ _NAMES))
        raise ValueError(f"{path}: a record has too much or too little: {wrong}")
    return StepRecord(**{key: _number(value) for key, value in values.items()})


def _finite(value: Any) -> Any:
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def _number(value: Any) -> Any:
    return float(value) if value in {"nan", "inf", "-inf"} else value
