"""What the tests of the workbench share: one warm cluster."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from distlab.ranks import new_cluster
from distlab.runner import Cluster
from tests.workbench.course import ROOT, Course
from tests.workbench.golden import Golden
from tests.workbench.launching import Agent, free_port, script

# pytest-xdist sets it in its workers: messages would be wrapped to that width.
os.environ.pop("COLUMNS", None)


def pytest_report_header() -> list[str]:
    return [
        "These are the tests of distlab itself, thousands of them.",
        "Your own work: pytest tests/test_phase1.py, or distlab check.",
    ]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage while thousands of tests are made, none of which is any."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """Exclude everything older than this module from garbage collection.

    A worker holds thousands of tests and all of torch. Searching them takes three
    quarters of a small training, because an engine collects garbage when it closes.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Compute on one thread, as ranks do; the other cores play other tests.

    Two threads that wait for each other cost more than they give: with one, a small
    training takes half the processor time.
    """
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def golden(request: pytest.FixtureRequest) -> Golden:
    """Holds an output's wording: `golden("cli/status", text)`."""
    return Golden(request.config.getoption("--regenerate-golden"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Ranks for everybody; its zygote starts at the first run."""
    with new_cluster(preload=("tests.workbench.conformance.programs",)) as ranks:
        yield ranks


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Course:
    """A copy of the course, with this process in it."""
    course = Course(tmp_path)
    monkeypatch.chdir(course.root)
    monkeypatch.setenv("DISTLAB_STATE", str(course.state))
    monkeypatch.delenv("DISTLAB_IMPL", raising=False)
    return course


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Callable[..., list[Agent]]]:
    """Starts an agent for each of two nodes of two ranks each, on this machine."""
    started: list[Agent] = []
    port = free_port()

    def start(
        program: str, *arguments: object, flags: Sequence[Sequence[str]] = ((), ())
    ) -> list[Agent]:
        path = script(tmp_path, program)
        for node in range(len(flags)):
            command = [sys.executable, "-m", "distlab.launch", "--nnodes", "2"]
            command += ["--node-rank", str(node), "--nproc-per-node", "2"]
            command += ["--master-port", str(port), "--log-dir", str(tmp_path)]
            command += [*flags[node], str(path), *map(str, arguments)]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            started.append(subprocess.Popen(command, cwd=ROOT, text=True, **pipes))  # type: ignore[call-overload]
        return started

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
