"""Runs tests of a checkout for mutation.py, and knows which executes what."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.mutation import called
from tests.mutation.mutants import Mutant, Place

TESTS = "tests/workbench"
UNFIT = (f"{TESTS}/test_broken_folders.py",)  # needs a user who is not root
PLUGIN = "mutation_plugin"  # _called.py, copied to a folder of its own
MOST = (6, 12.0)  # of a mutant: files, seconds of tests
ELSE = (2, 3.0)  # if no test calls its function


class Tests:
    """Runs tests of a checkout, and knows which test executes what."""

    def __init__(self, repo: Path, scratch: Path, known: Path) -> None:
        self.repo, self.scratch, self._known = repo, scratch, known
        self.map: dict[str, dict[str, Any]] = {}  # file of tests: what it found
        if known.exists():
            self.map = json.loads(known.read_text())
        shutil.copy(called.__file__, scratch / f"{PLUGIN}.py")
        start = f"import {PLUGIN}\n{PLUGIN}.__doc__ = 'PYTEST_DONT_REWRITE'\n"
        (scratch / "sitecustomize.py").write_text(f"{start}{PLUGIN}.watch()\n")
        self.distrusted: set[str] = set()  # they fail now and then
        (scratch / "code").mkdir()
        self._token = f"{os.getpid()}-{time.time_ns()}"
        own = self.repo / ".venv/bin/python"
        command = [str(own) if own.exists() else sys.executable, "-c"]
        command += [f"import {PLUGIN} as plugin; plugin.serve()"]
        environment = os.environ | {
            "MUTATION_TOKEN": self._token, "PYTHONPATH": str(scratch),
            "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        pipe = subprocess.PIPE
        self._server = subprocess.Popen(
            command, cwd=repo, env=environment, stdin=pipe, stdout=pipe, text=True
        )

    def digest(self, file: str) -> str:
        """What tells one text of a file from another; nothing if it is gone."""
        path = self.repo / file
        return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""

    def run(
        self,
        files: list[str],
        chosen: list[str] | None = None,
        sees: bool = False,
        first: bool = True,
    ) -> dict[str, Any] | None:
        """What these tests execute or which fail (up to the first); None: no end."""
        temp, seen = self.scratch / "t", self.scratch / "seen"
        for folder in (temp, seen):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o755)
        found, wanted = self.scratch / "found.json", self.scratch / "wanted.json"
        found.unlink(missing_ok=True)
        wanted.write_text(json.dumps(chosen))
        environment = {
            "TMPDIR": str(temp), "MUTATION_SEEN": str(seen),
            "MUTATION_SEES": "1" if sees else "", "MUTATION_FOUND": str(found),
            "MUTATION_TESTS": str(wanted) if chosen else "",
            "MUTATION_LIMIT": str(called.FILE_S),
            "MUTATION_CODE": str(self.scratch / "code"),
        }  # fmt: skip
        # Plain, because pytest rewrites `distlab` too (it is a plugin): unseen by us.
        arguments = ["-q", "-p", "no:nbval", "-p", "no:cacheprovider", "-p", PLUGIN]
        arguments += ["--assert=plain"]
        arguments += ["-m", "not slow and not own", *files] + ["-x"] * first
        log = str(self.scratch / "log")
        order = {"environment": environment, "arguments": arguments, "log": log}
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(order), file=self._server.stdin, flush=True)
        status = int(self._server.stdout.readline())
        self._end()
        shutil.rmtree(temp, ignore_errors=True)
        if found.exists():
            return dict(json.loads(found.read_text()))
        return None if status == -signal.SIGKILL else {"failed": ["crash"]}

    def _end(self) -> None:
        """End what the tests left."""
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                mine = self._token.encode() in (folder / "environ").read_bytes()
                if mine and int(folder.name) != self._server.pid:
                    os.kill(int(folder.name), signal.SIGKILL)

    def close(self) -> None:
        """End the server."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()

    def learn(self) -> None:
        """Run each file that is new or has changed, to see what it executes."""
        paths = sorted((self.repo / TESTS).glob("test_*.py"))
        files = [p.relative_to(self.repo).as_posix() for p in paths]
        files = [file for file in files if file not in UNFIT]
        self.map = {f: self.map[f] for f in files if f in self.map}
        for file in files:
            digest = self.digest(file)
            if self.map.get(file, {}).get("digest") == digest:
                continue
            found = self.run([file], sees=True, first=False) or {}
            failed = found.get("failed", [])
            again = self.run([file], failed, first=False) if failed else {}
            still = failed if again is None else again.get("failed", [])
            empty: dict[str, Any] = {"seen": {}, "seconds": {}}
            self.map[file] = {**empty, **found, "failed": still, "digest": digest}
            self._known.write_text(json.dumps(self.map))
            print(f"{file}: {len(failed)} failed, {len(still)} again", flush=True)

    def choose(self, mutant: Mutant) -> tuple[list[str], bool]:
        """Tests, those closest to its module first, and if they execute the mutant."""
        if nodes := self._calling(mutant.file, mutant.function, *MOST):
            return nodes, True
        # A process with an environment of its own may have called it, unseen.
        end = f"_{Path(mutant.file).stem}.py"
        tests = [found["seconds"] for f, found in self.map.items() if f.endswith(end)]
        named = [node for seconds in tests for node in seconds]
        return [*named, *self._calling(mutant.file, "<module>", *ELSE)], False

    def _calling(
        self, module: str, function: str, most: int, budget: float
    ) -> list[str]:
        """Tests that call a function, of so many files and seconds."""
        share, tests = {}, {}
        for file, found in self.map.items():
            seen = found["seen"]
            if at := seen.get(f"{module}::{function}"):
                share[file] = sum(n.startswith(f"{module}::") for n in seen) / len(seen)
                every = sorted(found["seconds"], key=found["seconds"].__getitem__)
                bad = self.distrusted.union(found["failed"])
                kept = [n for n in every if n not in bad]
                exact = [n for n in kept if file in at or n in at]
                tests[file] = [*exact, *(n for n in kept if n not in exact)]
        files = sorted(share, key=share.__getitem__, reverse=True)[:most]
        chosen: dict[str, list[str]] = {file: [] for file in files}
        for turn in range(max((len(tests[f]) for f in files), default=0)):
            for file in [f for f in files if turn < len(tests[f])]:
                seconds = self.map[file]["seconds"][tests[file][turn]]
                if seconds <= budget:
                    budget -= seconds
                    chosen[file].append(tests[file][turn])
        return [node for file in files for node in chosen[file]]

    def meet(
        self, place: Place, number: int, nodes: list[str], executed: bool = True
    ) -> dict[str, Any]:
        """What becomes of a mutant in these tests."""
        path = self.repo / place.mutant.file
        stat, source = path.stat(), path.read_bytes()
        started = time.monotonic()
        broken = source[: place.start] + place.text.encode() + source[place.end :]
        try:
            path.write_bytes(broken)
            os.utime(path, (number, number))  # no compiled file is of that second
            found = self.run(_files(nodes), nodes) if nodes else {"failed": []}
        finally:
            path.write_bytes(source)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        git = ["git", "checkout", "-q", "--", "."]  # a mutant may have written there
        subprocess.run(git, cwd=self.repo, check=True)
        by = "timeout" if found is None else next(iter(found["failed"]), "")
        seconds = round(time.monotonic() - started, 1)
        outcome = "killed" if by else "survived" if executed else "no test"
        digest = self.digest(by.partition("::")[0]) if by else ""
        return {"outcome": outcome, "by": by, "digest": digest, "seconds": seconds}

    def distrust(self, nodes: list[str]) -> set[str]:
        """Those of these tests that fail although nothing is broken."""
        failed: set[str] = set()
        for file in _files(nodes):
            some = [node for node in nodes if node.startswith(f"{file}::")]
            found = self.run([file], some, first=False) or {"failed": []}
            failed |= {*found["failed"]} & {*some}
        self.distrusted |= failed
        return failed


def _files(nodes: list[str]) -> list[str]:
    return list(dict.fromkeys(node.partition("::")[0] for node in nodes))
