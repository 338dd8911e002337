"""A tutor for people and for their assistants: it explains, runs, checks and hints.

It never gives the solution of a task that has not passed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distlab.tutor.explaining import explain_ddp_concepts
    from distlab.tutor.lessons import check, hint, next_task, solution, why_did_it_hang
    from distlab.tutor.snippets import on_ranks
    from distlab.tutor.tools import get_tools
    from distlab.tutor.trainings import compare_ddp_vs_single, run_ddp_simulation

_HOMES = {
    "check": "lessons",
    "compare_ddp_vs_single": "trainings",
    "explain_ddp_concepts": "explaining",
    "get_tools": "tools",
    "hint": "lessons",
    "next_task": "lessons",
    "on_ranks": "snippets",
    "run_ddp_simulation": "trainings",
    "solution": "lessons",
    "why_did_it_hang": "lessons",
}

__all__ = [
    "check",
    "compare_ddp_vs_single",
    "explain_ddp_concepts",
    "get_tools",
    "hint",
    "next_task",
    "on_ranks",
    "run_ddp_simulation",
    "solution",
    "why_did_it_hang",
]


def __getattr__(name: str) -> Any:
    # An explanation should not wait for torch.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
