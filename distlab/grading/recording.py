"""The records of a task's own clauses in a file, to be judged again without ranks.

The format is that in which ranks report: JSON, tensors as bytes, no pickle. What a file
names is looked up among the runs that the task declares; nothing is imported. A record
is no proof: what was changed in the file is judged as if it had been recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distlab.curriculum.units import arrived, travelling
from distlab.grading.clause import declared_runs
from distlab.grading.harness import PlayedRuns
from distlab.grading.runs import Network, RecordedRuns, Records, RunSpec
from distlab.runner import ErrorRecord, RankRecord, Run
from distlab.runner.limits import MAX_RANKS
from distlab.runner.wire import decode, encode

FORMAT = "distlab records 1"


class RecordingError(ValueError):
    """A file that holds no records, or not those of this task."""


def save(path: Path, task_id: str, played: Sequence[PlayedRuns]) -> None:
    """Write what was played for one task, one entry of `played` per world size."""
    worlds = {
        runs.world_size: [
            (spec.name, spec.values, spec.network and asdict(spec.network), asdict(run))
            for spec, run in runs.records.items()
        ]
        for runs in played
    }
    source, seed = travelling(played[0].source), played[0].seed
    told = {"task": task_id, "source": source, "seed": seed, "worlds": worlds}
    path.write_bytes(encode({"format": FORMAT, **told}))


def load(path: Path, task_id: str) -> dict[int, RecordedRuns]:
    """The records by world size, with the text that was judged as their source.

    Raises:
        RecordingError: the file is not one of ours, not whole, or of another task.
        OSError: it cannot be read.
    """
    try:
        told = decode(path.read_bytes())
    except ValueError:
        raise RecordingError(f"{path} holds no records, or not all of them") from None
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        raise RecordingError(f"{path} holds no records of this version of distlab")
    if told.get("task") != task_id:
        raise RecordingError(f"{path} holds records of another task than {task_id}")
    try:
        return {n: _runs(told, task_id, n) for n in told["worlds"]}
    except RecordingError as error:
        raise RecordingError(f"{path}: {error}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RecordingError(f"{path} was changed: {error!r}") from None


def _runs(told: dict[str, Any], task_id: str, world_size: int) -> RecordedRuns:
    if type(world_size) is not int or not 1 <= world_size <= MAX_RANKS:
        raise RecordingError(f"there are no records of {world_size!r} ranks")
    declared = declared_runs(task_id, world_size)
    known = {(spec.name, spec.values, spec.network): spec for spec in declared}
    records: Records = {}
    for name, values, network, run in told["worlds"][world_size]:
        found = known.get((name, values, network and Network(**network)))
        if found is None:
            raise RecordingError(f"no clause of {task_id} declares {name}{values}")
        records[found] = _run(found, run, world_size)
    runs = RecordedRuns(arrived(told["source"]), world_size, told["seed"], records)
    runs.declared = declared
    return runs


def _run(spec: RunSpec, told: dict[str, Any], world_size: int) -> Run:
    ranks = tuple(
        RankRecord(**{**rank, "error": rank["error"] and ErrorRecord(**rank["error"])})
        for rank in told["ranks"]
    )
    count = world_size if spec.is_on_ranks else 1
    if [record.rank for record in ranks] != list(range(count)):
        raise RecordingError(f"{spec.name} has no record for each of {count} ranks")
    return Run(**{**told, "ranks": ranks})
