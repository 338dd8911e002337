"""One module per kind of mistake. Each reads the logs and returns findings.

Every module says in its docstring how it knows, and when it stays silent: evidence
comes before a name, so a doubtful case is no finding.
"""

from __future__ import annotations

from distlab.audit.detectors import (
    conditions,
    failed,
    means,
    padded_evaluation,
    random_numbers,
    replicas,
    same_training,
    samples,
    saves,
    scaling,
    set_epoch,
    unused,
)
from distlab.audit.findings import Finding
from distlab.audit.trial import Trial

__all__ = ["findings"]

FIRST = (conditions, saves, unused)
"""What explains a run that didn't end, and much of what would follow from it."""
DATA = (set_epoch, samples, padded_evaluation, random_numbers, means, scaling)


def findings(trial: Trial) -> list[Finding]:
    """Return all findings, those of one cause once, sorted by line."""
    if not trial.logs:
        return list(failed.find(trial))
    found = [finding for part in (*FIRST, *DATA) for finding in part.find(trial)]
    real = [finding for finding in found if not finding.is_note]
    if not trial.many.is_whole:
        if not found:
            found = list(failed.find(trial))
    elif not any(finding.name == "unused-parameters" for finding in real):
        found += replicas.find(trial)
    if not [finding for finding in found if not finding.is_note]:
        found += same_training.find(trial)  # it can't tell why, the others can
    return sorted(set(found))
