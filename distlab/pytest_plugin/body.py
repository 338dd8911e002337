"""Run a test's body on one rank: the program of each forked process.

The process says by its control socket how the body ended. It then stays until pytest's
process has heard of all ranks, because gloo would tell the others that their connection
was closed, and they would fail for that reason.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import socket
import sys
import warnings
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest

from distlab.launch import control
from distlab.launch.control import CONTROL
from distlab.launch.pages import PAGE
from distlab.pytest_plugin.job import RankedTest
from distlab.recorder.frames import is_users

SHOW = getattr(signal, "SIGUSR2", signal.SIGTERM)  # real ranks are on Linux
"""Tells a rank to print the stacks of its threads."""
_LONGEST = 60_000  # characters of a traceback in a packet


def main() -> None:
    """Be one rank of a test."""
    end = socket.socket(fileno=int(os.environ[CONTROL]))
    with os.fdopen(int(os.environ[PAGE]), "rb") as file:
        file.seek(0)
        job, environment = pickle.load(file)
    faulthandler.register(SHOW, all_threads=False)
    os.environ.clear()
    os.environ.update(environment)
    atexit.register(_stay, end)  # runs after the recorder has said that this rank ends
    sys.excepthook = lambda *_: None  # the test's text has the traceback
    from distlab.recorder.attach import attach

    attach()
    try:
        _call(job)
    except BaseException as error:
        control.send(end, words_of(job, error))
        raise
    control.send(end, {"outcome": "passed"})


def _stay(end: socket.socket) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    control.receive(end)
    os._exit(0)  # to take torch and gloo down in order would need most of a second


def _call(job: RankedTest) -> None:
    import torch.distributed as dist

    with contextlib.suppress(OSError):
        os.chdir(job.folder)
    sys.path[:] = job.sys_path
    sys.argv[:] = job.argv
    if "numpy" in sys.modules:  # else all ranks would draw the same numbers
        sys.modules["numpy"].random.seed()
    load(job)
    dist.init_process_group("gloo")
    function, filters = called(job, int(os.environ["RANK"]))
    with warnings.catch_warnings():
        for chosen in reversed(filters):  # each goes before those that are there
            warnings.filterwarnings(*_filter(*chosen))
        function()


def _filter(
    action: Any, text: Any, category: Any, module: Any, line: int
) -> tuple[Any, ...]:
    """Turn an entry of warnings.filters into the arguments that make it."""
    return action, _pattern(text), category, _pattern(module), line


def _pattern(given: Any) -> str:
    return getattr(given, "pattern", given) or ""


def called(job: RankedTest, rank: int) -> tuple[Any, list[Any]]:
    """Return the body with its own copies of its arguments, and filters of warnings."""
    instance, values, filters = pickle.loads(job.values)
    values |= dict.fromkeys(job.rank_names, rank)
    owner = sys.modules[job.module] if instance is None else instance
    function = getattr(owner, job.function)
    return lambda: function(**values), filters


def load(job: RankedTest) -> ModuleType:
    """Import the test's module under the name that it has in pytest's process."""
    if job.module in sys.modules:
        return sys.modules[job.module]
    parent = job.module.rpartition(".")[0]
    if parent:
        with contextlib.suppress(ImportError):  # --import-mode=importlib makes names up
            importlib.import_module(parent)
    kind = _Rewriting if job.rewrites else SourceFileLoader
    spec = importlib.util.spec_from_file_location(
        job.module, job.file, loader=kind(job.module, job.file)
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[job.module] = module
    spec.loader.exec_module(module)
    return module


class _Rewriting(SourceFileLoader):
    """Loads a module whose asserts say which values they compared."""

    def get_code(self, fullname: str) -> CodeType:
        """Compile the source as pytest would."""
        from _pytest.assertion.rewrite import rewrite_asserts

        source = Path(self.path).read_bytes()
        tree = ast.parse(source, self.path)
        rewrite_asserts(tree, source, self.path)
        return compile(tree, self.path, "exec", dont_inherit=True)


def words_of(job: RankedTest, error: BaseException) -> dict[str, Any]:
    """Describe how a body ended that raised; all values are plain data."""
    for outcome, kind in (
        ("skipped", pytest.skip.Exception),
        ("xfailed", pytest.xfail.Exception),
    ):
        if isinstance(error, kind):
            return {"outcome": outcome, "reason": str(error)}
    info = pytest.ExceptionInfo.from_exception(error)
    below = info.traceback.cut(path=job.file)
    own = below.filter(lambda entry: is_users(entry.frame.code.raw))
    info.traceback = own or below
    shown = info.getrepr(
        showlocals=job.shows_locals,
        style=job.traceback,  # type: ignore[arg-type]
        funcargs=False,
    )
    frames = [(str(entry.path), entry.lineno + 1) for entry in info.traceback]
    return {
        "outcome": "failed",
        "type": type(error).__name__,
        "message": _first_line(error),
        "frames": frames,
        "traceback": _shortened(str(shown)),
    }


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300]


def _shortened(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    half = _LONGEST // 2
    return f"{text[:half]}\n… {len(text) - _LONGEST} characters …\n{text[-half:]}"


if __name__ == "__main__":
    main()
