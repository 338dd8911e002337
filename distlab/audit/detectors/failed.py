"""A script that ends with an error, or doesn't end: reported if nothing explains it."""

from __future__ import annotations

from collections.abc import Iterator

from distlab.audit.findings import Finding
from distlab.audit.places import Place
from distlab.audit.trial import Trial


def find(trial: Trial) -> Iterator[Finding]:
    """Return at most one finding."""
    many = trial.many
    if many.is_whole:
        return
    trouble = next((t for t in many.troubles if t.at is not None), None)
    at = trouble.at if trouble and trouble.at else Place(trial.script, 1)
    said = f"rank {trouble.rank}: {trouble.said}" if trouble else many.explanation
    yield Finding(at, "failed", said, "run the script on one rank first")
