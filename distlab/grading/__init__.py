"""The autograder: clauses, oracles and verdicts, and how they are told."""

from distlab.grading.verdict import (
    FAILED,
    HARNESS,
    INTERRUPTED,
    NOT_STARTED,
    PASS,
    USAGE,
    ClauseVerdict,
    NotYetError,
    Report,
    TaskVerdict,
)

__all__ = [
    "FAILED",
    "HARNESS",
    "INTERRUPTED",
    "NOT_STARTED",
    "PASS",
    "USAGE",
    "ClauseVerdict",
    "NotYetError",
    "Report",
    "TaskVerdict",
]
