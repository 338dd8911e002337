"""A throw-away copy of the course, and the real command line in it."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from distlab.curriculum import Progress, find_root, load_curriculum, make_template
from distlab.grading.preflight import look_at
from distlab.runner import Cluster

ROOT = find_root(Path(__file__))
CONFTEST = ROOT / "tests" / "conftest.py"
PHASES = tuple(phase.folder for phase in load_curriculum(ROOT).phases)
PATIENCE_S = 120  # for one command; nothing here is measured
FIRST, SECOND = "collectives.exchange", "collectives.pass_around"
EXCHANGE = """
if comm.rank == 0:
    comm.send(tensor, 1)
elif comm.rank == 1:
    comm.recv(tensor, 0)
"""
RING_OF_SENDS = """
comm.send(outgoing, (comm.rank + 1) % comm.world_size)
comm.recv(incoming, (comm.rank - 1) % comm.world_size)
"""
FOREVER = "while True:\n    pass"


@dataclass(frozen=True)
class Done:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        return self.out + self.err


def keep_warm(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `distlab check` in this process use ranks that are already warm."""

    class Warm:
        def __init__(self, **_: object) -> None:
            pass

        def __enter__(self) -> Cluster:
            return cluster

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr("distlab.runner.Cluster", Warm)


def filled(task: str, body: str, unit: str = "collectives") -> str:
    """The template with one hole filled."""
    hole = rf"    # TODO\({task}\)\n(    #.*\n)*    raise NotImplementedError\(.*\n"
    lines = textwrap.indent(textwrap.dedent(body).strip(), "    ") + "\n"
    text, count = re.subn(hole, lambda _: lines, pristine(unit))
    assert count == 1, task
    return text


def pristine(unit: str) -> str:
    """A unit's template as generated: the one in the checkout is the learner's."""
    solution = load_curriculum(ROOT).units[unit].solution(ROOT)
    return make_template(solution.read_text(encoding="utf-8"))


class Course:
    """The learner's folder: their files, their state, their commands."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "course"
        self.state = folder / "state"
        self.token = f"token-{secrets.token_hex(8)}"
        self.root.mkdir()
        for name in ("curriculum.toml", "pyproject.toml"):
            shutil.copy(ROOT / name, self.root)
        for name in ("solutions", *PHASES):
            shutil.copytree(ROOT / name, self.root / name)
        for unit in ("collectives", "trainer"):
            self.template(unit).write_text(pristine(unit), encoding="utf-8")
        (self.root / "tests").mkdir()
        for path in (*(ROOT / "tests").glob("test_phase*.py"), CONFTEST):
            shutil.copy(path, self.root / "tests")

    def template(self, unit: str = "collectives") -> Path:
        return self.root / "phase1_data_parallel" / f"template_{unit}.py"

    def fill(self, task: str, body: str) -> None:
        self.template().write_text(filled(task, body), encoding="utf-8")

    def digest(self, task: str) -> str:
        """The digest of the learner's code for a task, as a verdict has it."""
        curriculum = load_curriculum(self.root)
        verdict, _ = look_at(curriculum, curriculum.task(task), "mine")
        return verdict.function_digest

    def judged(self, task: str, *, passed: bool = True) -> None:
        """Note a verdict on the learner's code as it is now."""
        progress = Progress(self.root)
        progress.record_verdict(task, passed=passed, digest=self.digest(task))

    def set_time_limit(self, seconds: float) -> None:
        manifest = self.root / "curriculum.toml"
        text = manifest.read_text(encoding="utf-8")
        text = re.sub(r"^time_limit_s = .*\n", "", text, flags=re.MULTILINE)
        limit = f"time_limit_s = {seconds}\npoints ="
        manifest.write_text(text.replace("points =", limit), encoding="utf-8")

    def files(self) -> dict[Path, bytes]:
        """Everything that is the learner's."""
        found = [p for phase in PHASES for p in (self.root / phase).rglob("*")]
        return {path: path.read_bytes() for path in found if path.is_file()}

    def progress(self) -> dict[str, dict[str, object]]:
        """What is kept about each task."""
        path = self.state / "progress.json"
        state = json.loads(path.read_text()) if path.exists() else {"tasks": {}}
        tasks: dict[str, dict[str, object]] = state.get("tasks", {})
        return tasks

    def environment(self, **more: str) -> dict[str, str]:
        # Under CI pytest prints its summary twice as long; a learner's does not.
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("DISTLAB") and name not in ("CI", "BUILD_NUMBER")
        }
        ours = {
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "DISTLAB_STATE": str(self.state),
            "DISTLAB_TEST_TOKEN": self.token,
        }
        return {**kept, **ours, **more}

    def popen(
        self, *command: str, cwd: Path | None = None, **more: str
    ) -> subprocess.Popen[str]:
        """A command under way; see `ended`."""
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=cwd or self.root,
            env=self.environment(**more),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="surrogateescape",
        )

    def ended(self, process: subprocess.Popen[str]) -> Done:
        """Its end: nothing raised in anybody's face, and no process left."""
        try:
            out, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
        assert "Traceback" not in out + err, out + err
        self.expect_nothing_left()
        return Done(process.returncode, out, err)

    def stopped(
        self,
        *command: str,
        once: Callable[[], object],
        by: signal.Signals = signal.SIGINT,
        times: int = 1,
        cwd: Path | None = None,
        **more: str,
    ) -> Done:
        """The end of a command that gets a signal `once` something is the case."""
        process = self.popen(*command, cwd=cwd, **more)
        until = time.monotonic() + PATIENCE_S
        while not once() and time.monotonic() < until:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(by)
        for _ in range(1, times):
            time.sleep(0.02)
            process.send_signal(by)
        return self.ended(process)

    def python(self, *command: str, cwd: Path | None = None, **more: str) -> Done:
        """Run Python to its end; it must leave the learner's files alone."""
        before = self.files()
        done = self.ended(self.popen(*command, cwd=cwd, **more))
        assert self.files() == before
        return done

    def distlab(self, *arguments: str, cwd: Path | None = None, **more: str) -> Done:
        return self.python("-m", "distlab", *arguments, cwd=cwd, **more)

    def shell(self, script: str) -> Done:
        """A line of bash in which $D is distlab; the exit codes are the script's."""
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.root,
            env=self.environment(D=f"{sys.executable} -m distlab"),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert "Traceback" not in done.stdout + done.stderr, done.stderr
        return Done(done.returncode, done.stdout, done.stderr)

    def processes(self) -> list[int]:
        """All processes that were started, at whatever depth, by our commands."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    environ = (entry / "environ").read_bytes()
                except OSError:
                    continue
                if self.token.encode() in environ:
                    found.append(int(entry.name))
        return found

    def expect_nothing_left(self) -> None:
        until = time.monotonic() + 10
        while self.processes() and time.monotonic() < until:
            time.sleep(0.02)
        left = self.processes()
        for pid in left:  # ours, by its token
            os.kill(pid, signal.SIGKILL)
        assert not left
