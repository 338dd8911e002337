"""Audit a script: play it several times, and ask the detectors."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from distlab.audit.detectors import findings
from distlab.audit.findings import NAMES, Finding
from distlab.audit.play import Played, play
from distlab.audit.real import play_real
from distlab.audit.trial import Trial
from distlab.ranks import new_cluster
from distlab.runner import Cluster
from distlab.sim.torch.script import Script

ROUNDING = 1e-3  # that float32 may take two runs apart


@dataclass
class AuditReport:
    """What an audit found; `notes` say what it could not look at, and why."""

    script: str
    world_size: int
    outcome: str
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    output: str = ""

    @property
    def is_right(self) -> bool:
        """Whether there are no findings but notes."""
        return all(finding.is_note for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Return it for `--json`."""
        return {
            "script": self.script,
            "world_size": self.world_size,
            "outcome": self.outcome,
            "findings": [finding.as_json() for finding in self.findings],
            "notes": self.notes,
        }


def audit(
    script: str | Path,
    arguments: Sequence[str] = (),
    num_ranks: int = 4,
    *,
    is_module: bool = False,
    real: bool = False,
    ignore: frozenset[str] = frozenset(),
    cluster: Cluster | None = None,
) -> AuditReport:
    """Run a script on `num_ranks` simulated ranks, and on one; return the findings.

    With `is_module` the script is a module's name, as for `python -m`; with `real` the
    ranks are processes.

    Raises:
        ValueError: there is no such file, fewer than 2 ranks, or `ignore` has a name
            that no finding has.
    """
    target = str(script) if is_module else str(Path(script).resolve())
    if not is_module and not Path(target).is_file():
        raise ValueError(f"there is no script {script}")
    if num_ranks < 2:
        raise ValueError(f"{num_ranks} ranks: an audit compares at least 2")
    if unknown := sorted(ignore - NAMES.keys()):
        raise ValueError(
            f"no finding is called {unknown[0]!r}; there are {', '.join(NAMES)}"
        )
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="audit-")))
        ranks = cluster or stack.enter_context(new_cluster(preload=PRELOAD))
        asked = Script(target, tuple(arguments), is_module)
        way = partial(play_real if real else play, ranks, asked)
        trial = _trial(way, asked.target, num_ranks, folder)
    found = [f for f in findings(trial) if f.name not in ignore]
    many = trial.many
    return AuditReport(target, num_ranks, many.outcome, found, trial.notes, many.output)


PRELOAD = ("distlab.audit.real", "torch.distributed.fsdp", "distlab.sim.torch")


def _trial(way: Callable[..., Played], target: str, n: int, folder: Path) -> Trial:
    many = way(n, folder / "many")
    trial = Trial(target, many, many)
    if not many.is_whole:
        trial.notes.append(
            "we skipped the run on one rank, because the script didn't finish"
        )
        return trial
    exact = _pair(way, n, folder)
    if exact is not None:
        trial.pair, trial.one = exact
        return trial
    alone = way(1, folder / "one")
    if alone.is_whole:
        trial.one, trial.tolerance = alone, ROUNDING
        trial.notes.append(
            "we compared runs in the script's own dtype, because float64 fails"
        )
    else:
        trial.notes.append(f"the script fails on one rank: {alone.explanation}")
    return trial


def _pair(
    way: Callable[..., Played], n: int, folder: Path
) -> tuple[Played, Played] | None:
    one = way(1, folder / "one64", double=True)
    if not one.is_whole:
        return None
    many = way(n, folder / "many64", double=True)
    return (many, one) if many.is_whole else None
