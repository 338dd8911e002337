"""A folder of JSON lines: `run.json`, `rank_<r>.jsonl`, `figures.jsonl`.

    run.json        what the run is: world size, steps, when it began, its settings;
                    and `ended_s`, Unix time, once nothing more will come
    rank_0.jsonl    a StepRecord of rank 0 in each line
    figures.jsonl   {"step": …, "loss": …}: all ranks together, and validations
    autopsy.txt     if the run didn't finish: why, and where each rank was

Every line is written at once. If a run is killed, it leaves at most one torn line, the
last of a file, and we ignore that line when we read the folder. Because JSON has no
numbers for nan and infinity, we write them as "nan" and "inf".
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TextIO

from distlab.monitor.records import StepRecord

RUN, FIGURES, AUTOPSY = "run.json", "figures.jsonl", "autopsy.txt"
ENDED = "ended_s"
_DEPTH = 3  # folders below the working folder in which records are looked for


class JsonLines:
    """Writes the folder, which must not hold another run.

    If the folder holds a run with the same values in `same`, this run continues it: we
    keep the lines up to the step `after`.

    Raises:
        ValueError: `folder` holds a different run, which would be mixed with this one.
        OSError: the folder can't be written.
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
        self._run = dict(run)
        _write_run(folder, self._run)

    def record(self, record: StepRecord) -> None:
        """Write a line into the file of the record's rank."""
        self._write(f"rank_{record.rank}.jsonl", vars(record))

    def figures(self, step: int, figures: Mapping[str, float]) -> None:
        """Write a line for the whole run."""
        self._write(FIGURES, {"step": step, **figures})

    def close(self) -> None:
        """Close the files, and note in the folder that the run has ended."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        with contextlib.suppress(OSError):  # the folder may be gone, or its disk full
            _write_run(self._folder, {**self._run, ENDED: time.time()})

    def _write(self, name: str, values: Mapping[str, Any]) -> None:
        file = self._files.get(name)
        if file is None:
            path = self._folder / name
            file = self._files[name] = path.open("a", encoding="utf-8")
        file.write(json.dumps({key: _finite(value) for key, value in values.items()}))
        file.write("\n")
        file.flush()


def _write_run(folder: Path, run: Mapping[str, Any]) -> None:
    beside = folder / f"{RUN}.part"  # whoever reads meanwhile finds a whole file
    beside.write_text(json.dumps(dict(run), indent=1) + "\n", encoding="utf-8")
    beside.replace(folder / RUN)


def _is_run(path: Path, same: Mapping[str, Any]) -> bool:
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(run, dict) and same.items() <= run.items()


def _keep_up_to(path: Path, step: int) -> None:
    """Remove the lines of later steps, and a torn one."""
    kept = [values for values in _lines(path) if values.get("step", 0) <= step]
    beside = path.with_suffix(".part")
    beside.write_text(
        "".join(json.dumps(values) + "\n" for values in kept), encoding="utf-8"
    )
    beside.replace(path)


def write_autopsy(folder: Path, reason: str, lines: Sequence[str]) -> None:
    """Record why the run didn't finish, in one line, and where the ranks were.

    Raises:
        OSError: the file can't be written.
    """
    text = "\n".join([" ".join(reason.split()), "", *lines])
    (folder / AUTOPSY).write_text(text + "\n", encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """The contents of a folder at the time of reading."""

    run: dict[str, Any]
    records: dict[int, list[StepRecord]]  # by rank, oldest first
    figures: list[dict[str, float]]  # each with its "step"
    autopsy: str = ""  # why it did not finish
    ended_s: float | None = None  # Unix time; None while it runs, or if it was killed

    @property
    def is_over(self) -> bool:
        """True if no more records will come."""
        return self.ended_s is not None or bool(self.autopsy)


def read_folder(folder: Path) -> Recorded:
    """Read all whole lines in the folder.

    Raises:
        ValueError: the folder has no records, or a line is damaged; the message says
            which.
    """
    try:
        run = json.loads((folder / RUN).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{folder} holds no records: there is no {RUN}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / RUN} cannot be read: {error}") from error
    if not isinstance(run, dict) or "world_size" not in run:
        raise ValueError(f"{folder / RUN} does not say the world size")
    ended_s = run.pop(ENDED, None)
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
    return Recorded(
        run=run, records=records, figures=figures, autopsy=reason, ended_s=ended_s
    )


def newest_folder(under: Path) -> Path | None:
    """Return the folder of records at or just below `under` that was written last."""
    found = [(_written_s(folder), folder) for folder in _folders(under, _DEPTH)]
    return max(found, default=(0.0, None))[1]


def _folders(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the folders that hold records, without hidden ones."""
    try:
        inside = [e for e in os.scandir(folder) if not e.name.startswith((".", "__"))]
        names = {entry.name for entry in inside}
        folders = [e.path for e in inside if e.is_dir(follow_symlinks=False)]
    except OSError:  # not ours to read
        return
    if RUN in names and _has_world_size(folder / RUN):
        yield folder
    elif depth:
        for path in sorted(folders):
            yield from _folders(Path(path), depth - 1)


def _has_world_size(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        run = json.loads(path.read_text(encoding="utf-8"))
        return isinstance(run, dict) and "world_size" in run
    return False


def _written_s(folder: Path) -> float:
    with contextlib.suppress(OSError):
        return max(entry.stat().st_mtime for entry in os.scandir(folder))
    return 0.0


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
