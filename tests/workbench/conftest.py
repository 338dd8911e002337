"""What the tests of the workbench share: one warm cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from distlab.runner import Cluster

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
