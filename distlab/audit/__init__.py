"""Is my distributed training right? Asked of a script, as it is.

    from distlab.audit import audit
    report = audit("train.py", ["--lr", "0.1"], num_ranks=4)
    for finding in report.findings:
        print(finding.at, finding.name, finding.said)

How it works: the script runs on simulated ranks, once as it is and twice in float64, on
n ranks and on one. Hooks (`watching`) write down what it does: each batch, call of a
model, backward, optimizer step, collective, random draw and save, with the user's line.
Detectors (`detectors`) read these logs and return findings. A detector that isn't sure
stays silent.
"""

from __future__ import annotations

from distlab.audit.findings import NAMES, NOTES, Finding
from distlab.audit.run import AuditReport, audit

__all__ = ["NAMES", "NOTES", "AuditReport", "Finding", "audit"]
