"""Run a script on ranks with the hooks on, in a process of its own; return the logs."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distlab.audit.log import AuditLog, Event
from distlab.audit.places import Place, real_file
from distlab.paths import is_users_code
from distlab.runner import Cluster, Limits, RankContext

if TYPE_CHECKING:
    from distlab.sim.torch.script import Script

LIMITS = Limits(seconds=120.0, memory_bytes=8 << 30)
_MOST_OUTPUT = 4000  # characters of what rank 0 printed


@dataclass(frozen=True)
class Trouble:
    """A rank that did not come to its end: what it says, and the user's line."""

    rank: int
    said: str
    at: Place | None
    kind: str = ""


@dataclass
class Played:
    """One run: the ranks' logs and how it ended."""

    world_size: int
    outcome: str
    explanation: str
    logs: list[AuditLog] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    output: str = ""

    @property
    def is_whole(self) -> bool:
        """Whether every rank came to its end."""
        return self.outcome == "finished"


def play(
    cluster: Cluster,
    script: Script,
    world_size: int,
    folder: Path,
    *,
    double: bool = False,
) -> Played:
    """Run the script on simulated ranks; `double` makes float64 the default dtype."""
    settings = {
        **settings_of(script, folder, double=double),
        "world_size": world_size,
    }
    done = cluster.run(simulate, 1, settings, limits=LIMITS, journal=False)
    path = folder / "played.pickle"
    if done.outcome != "finished" or not path.is_file():
        error = done.ranks[0].error
        said = f"{error.type}: {error.message}" if error else done.explanation
        return Played(world_size, done.outcome, said, output=done.ranks[0].output)
    with path.open("rb") as file:
        played: Played = pickle.load(file)
    return played


def settings_of(script: Script, folder: Path, *, double: bool) -> dict[str, Any]:
    """Return what a process that runs the script has to know, as plain data."""
    return {
        "work": _working_folder(folder),
        "script": astuple(script),
        "folder": str(folder),
        "double": double,
    }


def _working_folder(folder: Path) -> str:
    """Make a folder with links to all that is in the current one.

    A script finds its files there, but the files that it makes are not there when it
    runs the next time: a checkpoint would have it go on where it ended.
    """
    work = folder / "work"
    work.mkdir(parents=True)
    for entry in Path.cwd().iterdir():
        (work / entry.name).symlink_to(entry.resolve())
    return str(work)


# ── in the process that simulates ───────────────────────────────────────────────────


def set_up(settings: dict[str, Any]) -> None:
    """Prepare this process for the script."""
    import torch

    os.chdir(settings["work"])
    torch.set_num_threads(1)
    if settings["double"]:
        torch.set_default_dtype(torch.float64)


def simulate(context: RankContext, settings: dict[str, Any]) -> None:
    """Run all ranks of the script here, and write what they did into the folder."""
    from distlab.audit import watching
    from distlab.sim.torch.script import Script, run_script

    folder = Path(settings["folder"])
    world_size = settings["world_size"]
    set_up(settings)
    logs: dict[int, AuditLog] = {}

    @contextmanager
    def around(rank: int) -> Iterator[None]:
        with watching.watched(rank, folder) as log:
            logs[rank] = log
            yield

    with watching.installed():
        done = run_script(Script(*settings["script"]), world_size, around=around)
    for log in logs.values():
        log.events += events_of_workers(log)
    played = Played(
        world_size,
        done.outcome,
        done.explanation,
        [logs[rank] for rank in sorted(logs)],
        [trouble for trouble in map(trouble_of, done.ranks) if trouble],
        done.ranks[0].output[-_MOST_OUTPUT:],
    )
    with (folder / "played.pickle").open("wb") as file:
        pickle.dump(played, file)


def trouble_of(record: Any) -> Trouble | None:
    """Return why a rank did not come to its end, None if it did."""
    if record.status == "finished":
        return None
    if record.error is not None:
        frames = record.error.frames
        said = f"{record.error.type}: {record.error.message}"
        return Trouble(record.rank, said, _users(frames), record.error.type)
    waits = record.waiting or {}
    frames = [*record.stack, (waits.get("file", ""), waits.get("line", 0))]
    return Trouble(record.rank, record.status, _users(frames), record.status)


def _users(frames: Any) -> Place | None:
    for file, line in reversed(list(frames)):
        if is_users_code(file):
            return Place(real_file(file), line)
    return None


def events_of_workers(log: AuditLog) -> Iterator[Event]:
    """Return what the workers of a rank's loaders wrote into the run's folder."""
    for path in sorted(Path(log.folder).glob(f"rank{log.rank}-*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            note = json.loads(line)
            note["made"] = {k: p and Place(*p) for k, p in note["made"].items()}
            yield Event("fetch", None, 0, note)
