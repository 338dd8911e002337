"""Launched trainings: started, ranks of them killed, and their stamps read."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("recovery_train.py")
WORLD_SIZE, STANDBYS = 3, 1
PATIENCE_S = 600.0  # for anything that a job is waited for
SETTLE_STEPS = 20  # by a new group, before the next kill


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One SIGKILL, and what came of it."""

    rank: int
    killed_s: float
    recovered_s: float  # all ranks have completed a step that the new process has, too
    lost_steps: int
    stages: dict[str, float]  # when each was reached; empty where nothing says so

    @property
    def seconds(self) -> float:
        """From the signal to the next step by all ranks."""
        return self.recovered_s - self.killed_s


class Job:
    """A launched training, seen through the stamps of its processes."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes]) -> None:
        self.folder, self.process = folder, process

    def stamps(self) -> dict[int, dict[int, list[tuple[int, float]]]]:
        """By rank and pid: the steps that a process has completed, and when."""
        found: dict[int, dict[int, list[tuple[int, float]]]] = {}
        for path in (self.folder / "stamps").iterdir():
            rank, pid = map(int, path.name.split("."))
            lines = path.read_text().split("\n")[:-1]  # what follows is not complete
            rows = [(int(a), float(b)) for a, b in (line.split() for line in lines)]
            if rows:
                found.setdefault(rank, {})[pid] = rows
        return found

    def newest(self) -> dict[int, int]:
        """The process of each rank that has completed the newest step."""
        return newest_of(self.stamps())

    def has_standby(self) -> bool:
        """Whether a process has come to the loop and has no rank."""
        ranked = {pid for rows in self.stamps().values() for pid in rows}
        ready = {int(p.suffix[1:]) for p in self.folder.glob("ready.*")}
        return any(_is_alive(pid) for pid in ready - ranked)

    def wait_for_steps(self, num: int) -> None:
        """Until the newest process of each rank has completed so many."""

        def are_there() -> bool:
            stamps = self.stamps()  # read once: a rank may appear between two reads
            newest = newest_of(stamps)
            return len(newest) == WORLD_SIZE and all(
                len(stamps[rank][pid]) >= num for rank, pid in newest.items()
            )

        self.wait_until(are_there, f"{num} steps of all ranks")

    def wait_until(self, is_true: Callable[[], object], what: str) -> None:
        """Until it is, as long as the job runs.

        Raises:
            SystemExit: the job has ended, or it takes too long.
        """
        until = time.monotonic() + PATIENCE_S
        while not is_true():
            if self.process.poll() is not None or time.monotonic() > until:
                said = (self.folder / "said.txt").read_text()[-2000:]
                sys.exit(f"no {what}; the job said:\n{said}")
            time.sleep(0.01)

    def kill(self, rank: int, *, needs_standby: bool) -> Kill:
        """Kill the process of a rank in mid-step, and wait until all ranks go on."""
        if needs_standby:
            self.wait_until(self.has_standby, "standby")
            time.sleep(0.3)  # it has come to the loop; now it waits in it
        self.wait_for_steps(SETTLE_STEPS)
        time.sleep(random.uniform(0.0, 0.02))
        pid, before = self.newest()[rank], self.stamps()
        killed_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        self.wait_until(
            lambda: self._next(rank, pid, killed_s) is not None, "next step"
        )
        first, recovered_s = self._next(rank, pid, killed_s) or (0, 0.0)
        newest = max(rows[-1][0] for by in before.values() for rows in by.values())
        return Kill(
            rank=rank,
            killed_s=killed_s,
            recovered_s=recovered_s,
            lost_steps=max(0, newest + 1 - first),
            stages=self._stages(killed_s),
        )

    def finish(self) -> str:
        """Let the training end; the digest of its weights.

        Raises:
            SystemExit: it ends with another code than 0.
        """
        (self.folder / "slow").unlink(missing_ok=True)
        code = self.process.wait(PATIENCE_S)
        if code:
            said = (self.folder / "said.txt").read_text()[-2000:]
            sys.exit(f"the job ended with {code}:\n{said}")
        return (self.folder / "digest").read_text()

    def _next(self, rank: int, dead: int, killed_s: float) -> tuple[int, float] | None:
        """The first step of the rank's new process, and when all had completed it."""
        stamps = self.stamps()
        new = {pid: rows for pid, rows in stamps[rank].items() if pid != dead}
        firsts = [rows[0] for rows in new.values() if rows[0][1] > killed_s]
        if not firsts:
            return None
        first, _ = min(firsts, key=lambda row: row[1])
        times = []
        for processes in stamps.values():
            own = [t for r in processes.values() for s, t in r if s == first]
            if not own or max(own) < killed_s:
                return None
            times.append(max(own))
        return (first, max(times)) if len(times) == WORLD_SIZE else None

    def _stages(self, killed_s: float) -> dict[str, float]:
        """What the agent wrote down about this recovery; torchrun writes nothing."""
        path = self.folder / "recoveries.jsonl"
        if not (self.folder / "is_ours").exists():
            return {}

        def rows() -> list[dict[str, float]]:
            lines = path.read_text().splitlines() if path.exists() else []
            return [r for r in map(json.loads, lines) if r["completed_s"] > killed_s]

        self.wait_until(rows, "line of the agent")
        return rows()[0]


@contextmanager
def ours(num_steps: int, *, flags: Sequence[str] = ()) -> Iterator[Job]:
    """Three ranks and a standby, under distlab.launch."""
    own = ["--nproc-per-node", str(WORLD_SIZE), "--standby", str(STANDBYS), *flags]
    with _folder(is_slow=True) as folder:
        (folder / "is_ours").touch()
        own += ["--max-restarts", "1000", "--log-dir", str(folder)]
        with _job(folder, ["distlab.launch", *own], num_steps) as job:
            yield job


@contextmanager
def plain(num_steps: int) -> Iterator[Job]:
    """Three ranks that no one kills, under distlab.launch without standbys."""
    with _folder(is_slow=False) as folder:
        flags = ["--nproc-per-node", str(WORLD_SIZE), "--log-dir", str(folder)]
        with _job(folder, ["distlab.launch", *flags], num_steps) as job:
            yield job


@contextmanager
def torchrun(num_steps: int) -> Iterator[Job]:
    """Three ranks under torchrun, which starts all of them again, from a checkpoint."""
    flags = ["--standalone", "--nproc-per-node", str(WORLD_SIZE)]
    flags += ["--max-restarts", "1000"]
    with _folder(is_slow=True) as folder:
        flags += ["--log-dir", str(folder)]
        (folder / "checkpoints").mkdir()
        with _job(folder, ["torch.distributed.run", *flags], num_steps) as job:
            yield job


@contextmanager
def _folder(is_slow: bool) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "stamps").mkdir()
        if is_slow:
            (folder / "slow").touch()
        yield folder


@contextmanager
def _job(folder: Path, launcher: list[str], num_steps: int) -> Iterator[Job]:
    command = [sys.executable, "-m", *launcher, str(SCRIPT), str(num_steps)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with open(folder / "said.txt", "wb") as file:
        process = subprocess.Popen(
            [*command, str(folder)], stdout=file, stderr=file, env=environment, cwd=ROOT
        )
    try:
        yield Job(folder, process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(40.0)
        if process.poll() is None:
            process.kill()
            process.wait()


def newest_of(stamps: dict[int, dict[int, list[tuple[int, float]]]]) -> dict[int, int]:
    """The process of each rank that has completed the newest step."""
    return {
        rank: max(processes, key=lambda pid: processes[pid][-1][1])
        for rank, processes in stamps.items()
    }


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat[stat.rindex(")") + 2] != "Z"
