"""In the processes of tests.mutation's tests: which functions each test calls.

It is loaded three times from a folder of its own, `mutation_plugin`: by every Python
process that the tests start (`watch`), as pytest's plugin, and as the server that forks
a pytest from itself, because importing torch takes longer than most tests do.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import contextlib
import gc
import importlib
import json
import marshal
import os
import resource
import signal
import sys
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

FILE_S, GUARD_S = 40, 90  # no test begins after this; all is ended after that

_seen: set[str] = set()
_found: dict[str, Any] = {"seen": {}, "seconds": {}, "failed": []}
_session: list[Any] = []


class _Noted(ast.NodeTransformer):
    """Each function begins with a note that it was called."""

    def __init__(self, file: str) -> None:
        self._file, self._scope = file, ""

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        """Methods are named after their class."""
        return self._within(node, f"{self._scope}{node.name}.")

    def visit_FunctionDef(self, node: Any) -> Any:
        """Note the call behind the docstring."""
        name = f"{self._file}::{self._scope}{node.name}"
        note = ast.parse(f"_mutation_seen({name!r})").body[0]
        text = ast.get_docstring(node, clean=False) is not None
        at = node.body[min(int(text), len(node.body) - 1)]
        for part in ast.walk(note):
            ast.copy_location(part, at)
        self._within(node, f"{self._scope}{node.name}.<locals>.")
        node.body.insert(int(text), note)
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def _within(self, node: Any, scope: str) -> Any:
        before, self._scope = self._scope, scope
        self.generic_visit(node)
        self._scope = before
        return node


def _noted(path: str) -> CodeType:
    """The code of a module with its notes, once it was made from a file."""
    file = f"distlab/{path.rpartition('/distlab/')[2]}"
    _seen.add(f"{file}::<module>")
    kept = Path(os.environ["MUTATION_CODE"], file.replace("/", "-"))
    if not kept.exists():
        tree = _Noted(file).visit(ast.parse(Path(path).read_bytes()))
        draft = kept.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            draft.write_bytes(marshal.dumps(compile(tree, path, "exec")))
            draft.rename(kept)
        return compile(tree, path, "exec")
    code: CodeType = marshal.loads(kept.read_bytes())
    return code


def watch() -> None:
    """Note each function of distlab that this process and its forks call, if asked."""
    if not os.environ.get("MUTATION_SEES"):
        return

    def get_code(self: SourceFileLoader, name: str) -> Any:
        inside = name.startswith("distlab.") and "/distlab/" in self.path
        return _noted(self.path) if inside else as_ever(self, name)

    def leave(status: int) -> None:
        _dump()
        really(status)

    as_ever, SourceFileLoader.get_code = SourceFileLoader.get_code, get_code  # type: ignore
    really, os._exit = os._exit, leave  # type: ignore[assignment]
    vars(builtins)["_mutation_seen"] = _seen.add
    os.register_at_fork(after_in_child=_seen.clear)
    atexit.register(_dump)


def serve() -> None:
    """Fork a pytest for each line of stdin, with what is slow to import at hand."""
    for module in ("torch", "numpy", "pytest", "typer", "rich.console", "PIL.Image"):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        if (pid := os.fork()) == 0:
            os.setsid()
            os.environ.update(order["environment"])
            _limit()
            log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for number in (1, 2):
                os.dup2(log, number)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.argv[:] = ["pytest", *order["arguments"]]
            watch()
            sys.exit(importlib.import_module("pytest").main(order["arguments"]))
        end = time.monotonic() + GUARD_S
        while (status := os.waitpid(pid, os.WNOHANG))[0] == 0:
            if time.monotonic() > end:
                os.killpg(pid, signal.SIGKILL)
            time.sleep(0.02)
        print(os.waitstatus_to_exitcode(status[1]), flush=True)


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 30, 4 << 30))


def _names() -> set[str]:
    names = _seen.copy()
    _seen.clear()
    return names


def _dump() -> None:
    stem = os.path.join(os.environ["MUTATION_SEEN"], f"{os.getpid()}-{time.time_ns()}")
    with contextlib.suppress(OSError):
        with open(stem, "w") as file:
            file.write("\n".join(_names()))
        os.rename(stem, f"{stem}.txt")


def pytest_sessionstart(session: Any) -> None:
    """Remember the session, to end it in time."""
    _session[:] = [session, time.monotonic()]


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keep the tests that were chosen."""
    if wanted := os.environ["MUTATION_TESTS"]:
        chosen = set(json.loads(Path(wanted).read_text()))
        items[:] = [item for item in items if item.nodeid in chosen]


def pytest_collectreport(report: Any) -> None:
    """Note a file that cannot be imported."""
    if report.failed:
        _found["failed"].append(report.nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    """Note what a test executed; what a fixture did counts for all its file."""
    node = report.nodeid
    if report.failed:
        _found["failed"].append(node)
    _found["seconds"][node] = _found["seconds"].get(node, 0) + report.duration
    names = _names()
    for path in Path(os.environ["MUTATION_SEEN"]).glob("*.txt"):
        names |= set(path.read_text().split())
        path.unlink()
    for name in names:
        where = node.partition("::")[0] if report.when == "setup" else node
        _found["seen"].setdefault(name, {})[where] = 1
    if time.monotonic() - _session[1] > float(os.environ["MUTATION_LIMIT"]):
        _session[0].shouldstop = "its time is over"


def pytest_sessionfinish() -> None:
    """Hand over what was found."""
    Path(os.environ["MUTATION_FOUND"]).write_text(json.dumps(_found))
