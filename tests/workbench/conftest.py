"""What the tests of the workbench share: one warm cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from distlab.runner import Cluster
from tests.workbench.course import Course

# pytest-xdist sets it in its workers: messages would be wrapped to that width.
os.environ.pop("COLUMNS", None)


def pytest_report_header() -> list[str]:
    return [
        "These are the tests of distlab itself, thousands of them.",
        "Your own work: pytest tests/test_phase1.py, or distlab check.",
    ]


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Ranks for everybody; its zygote starts at the first run."""
    with Cluster(preload=("tests.workbench.conformance.programs",)) as ranks:
        yield ranks


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Course:
    """A copy of the course, with this process in it."""
    course = Course(tmp_path)
    monkeypatch.chdir(course.root)
    monkeypatch.setenv("DISTLAB_STATE", str(course.state))
    monkeypatch.delenv("DISTLAB_IMPL", raising=False)
    return course
