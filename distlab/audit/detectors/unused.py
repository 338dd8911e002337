"""Parameters that get no gradient, by name, and where they were made.

How it knows: DDP was told to expect a gradient for every parameter (no
find_unused_parameters, no static graph), and at a step some parameters had none,
although others had. DDP then fails in the next forward(), or leaves ranks unequal.
Silent: for parameters that need no gradient, and if DDP looks for unused ones itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from distlab.audit.findings import Finding
from distlab.audit.log import AuditLog
from distlab.audit.places import Place
from distlab.audit.trial import Trial, few, some_ranks


def find(trial: Trial) -> Iterator[Finding]:
    """Return a finding per line that makes unused parameters."""
    for ddp in trial.logs[0].of("ddp"):
        if ddp["find_unused"] or ddp["static"] or ddp["size"] < 2:
            continue
        without = [_without(log, ddp["names"]) for log in trial.logs]
        names = [n for n in ddp["names"] if any(n in lacking for lacking in without)]
        by_line: dict[Place, list[str]] = {}
        for name in names:
            place = ddp["born"].get(name) or ddp.at
            if place is not None:
                by_line.setdefault(place, []).append(name)
        for place, unused in by_line.items():
            ranks = [r for r, lack in enumerate(without) if set(unused) & set(lack)]
            yield Finding(
                place,
                "unused-parameters",
                f"{few(unused)} got no gradient on {some_ranks(ranks, len(without))}",
                "use them in the loss, remove them, set requires_grad=False, or pass "
                "find_unused_parameters=True to DDP",
            )


def _without(log: AuditLog, names: list[str]) -> list[str]:
    for step in log.of("step"):
        gradients = step["gradients"]
        known = [name for name in names if name in gradients]
        lacking = [name for name in known if gradients[name] is None]
        if known and lacking and len(lacking) < len(known):
            return lacking
    return []
