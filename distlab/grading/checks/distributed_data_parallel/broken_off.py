"""A backward() that broke off with an error: which of the hooks' mistakes led to it.

The error itself, such as an assertion in the given code, is only the consequence.
"""

from __future__ import annotations

import traceback
from typing import Any

from torch import Tensor, nn

from distlab.given.distributed_data_parallel import SecondGradientError
from distlab.grading.checks.distributed_data_parallel.departures import departures
from distlab.grading.checks.distributed_data_parallel.watch import Happened

_ALIAS = ", also named "


def watch_marks(ddp: Any, model: nn.Module) -> list[list[str]]:
    """From now on all names of the gradients that `mark_ready` is told are kept."""
    marked: list[list[str]] = []
    names = names_of(model)
    mark_ready = ddp.mark_ready

    def noting(parameter: Tensor) -> None:
        marked.append(names[parameter])
        mark_ready(parameter)

    ddp.mark_ready = noting
    return marked


def names_of(model: nn.Module) -> dict[Tensor, list[str]]:
    """All names of each parameter."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def twice_in(error: Exception, model: nn.Module) -> str:
    """All names of the parameter whose hook was called twice; or nothing."""
    if not isinstance(error, SecondGradientError):
        return ""
    return _ALIAS.join(names_of(model)[error.parameter])


def is_raised_in(error: Exception, function: str) -> bool:
    """Whether a function of this name was being called when it was raised."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_name == function for frame, _ in frames)


def flaw_of(
    events: list[Happened],
    buckets: list[list[str]],
    marked: list[list[str]],
    twice: str,
    in_mark_ready: bool,
) -> str:
    """What the hooks did until then that they must not do; or nothing.

    What was not sent says nothing of an error that mark_ready itself has raised.
    """
    if twice:
        return f"one backward() calls on_gradient twice for {twice}, expected one call"
    ready = [event[1] for event in events if event[0] == "gradient"]
    for number, names in enumerate(marked):
        if names in marked[:number]:
            who = _ALIAS.join(names)
            return f"one backward() calls mark_ready twice for {who}, expected one call"
        if names[0] not in ready:
            return f"mark_ready is called for {names[0]} before its .grad is complete"
    return "" if in_mark_ready else unsent_in(events, buckets, none_too=True)


def unsent_in(
    events: list[Happened], buckets: list[list[str]], *, none_too: bool = False
) -> str:
    """The first bucket that was complete and stayed; or nothing.

    Nothing either if none was sent at all, unless `none_too`.
    """
    ready = [event[1] for event in events if event[0] == "gradient"]
    num_sent = len(departures(events))
    num_complete = 0
    while num_complete < len(buckets) and {*buckets[num_complete]} <= {*ready}:
        num_complete += 1
    if num_sent < num_complete and (num_sent or none_too):
        return (
            f"bucket {num_sent} was complete but never sent, expected every complete "
            "bucket to be sent"
        )
    return ""
