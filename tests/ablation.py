"""Take out each assertion of the checks in turn; the catalogue must notice.

    python -m tests.ablation [--only WORD ...]

Exits with 1 if an assertion is idle or silent and not excused in `EXCUSED`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter

from distlab.curriculum import load_curriculum
from distlab.grading.ablation import Finding, ablate
from distlab.grading.catalogue import read_catalogue
from distlab.processes.tree import leaving_none
from distlab.runner import Cluster

# Assertions that the catalogue cannot make speak: file of checks, how the text begins.
_BY_REASON: dict[str, list[tuple[str, str]]] = {
    "speaks of what came by another way than comm: tests/hostile/cheats.toml": [
        ("trainer/average_gradients.py", "expect_messages(run, 'the gradients"),
        ("trainer/broadcast_model.py", "expect_messages(run, 'the weights"),
        ("trainer/train_step.py", "expect_messages(run, 'the weights"),
        ("mixed_precision/loss_scaler.py", "expect_messages(run, 'all ranks decide"),
        ("distributed_data_parallel/finish.py", "expect_messages(run, 'the gradients"),
        ("mixed_precision/master_weights.py", "expect_messages(run, 'the gradients"),
        ("model_parallel/step.py", "expect_messages(run, 'the weights"),
        ("pipeline_parallel/execute.py", "expect_messages(run, 'the gradients"),
        ("pipeline_parallel/steps.py", "expect_messages(run, 'the gradients"),
        ("gradient_accumulation/clip.py", "expect_messages(run, 'the weights"),
        ("gradient_accumulation/sync_once.py", "expect_messages(run, 'the gradient"),
        ("collectives/broadcasts.py", 'raise NotYetError(f"with {n} ranks, all have'),
        ("collectives/pairs.py", "expect_messages(run, \"rank 1's tensor is right"),
        ("collectives/gather_scatter.py", "_expect_sent(seen, 'reduce_scatter')"),
        ("sharded_optimizer/stage1.py", "expect_sent(run, sent, 'the weights"),
        ("sharded_optimizer/stage2.py", "expect_sent(run, sent, 'the weights"),
        ("sharded_optimizer/stage3.py", "expect_messages(run, 'the outputs"),
        ("sharded_optimizer/stage3.py", "expect_messages(run, 'the weights"),
    ],
    "speaks of values that are wrong only with several microbatches in flight": [
        ("pipeline_parallel/steps.py", "expect_gradients(case, actual, runs.seed)"),
    ],
    "speaks when its clause is judged first: distlab watch does that": [
        ("activation_checkpointing/checkpoint.py", "_expect_tensors(run)"),
        ("activation_checkpointing/port.py", "raise NotJudgedError('no tensor was"),
        ("gradient_accumulation/port.py", "finished(runs, PART)"),
        ("ring_allreduce/segments.py", "runs.finished(pipelined_once)"),
        ("topology/doubling.py", "runs.finished(double_all)"),
    ],
    "speaks of a mistake in another task: tests/workbench/test_ring_allreduce.py": [
        ("ring_allreduce/mistakes.py", "_expect_bounds(sums)"),
        ("ring_allreduce/mistakes.py", "raise NotYetError(f'chunk_bounds"),
    ],
}
EXCUSED = {
    (f"checks/{file}", start): why
    for why, sites in _BY_REASON.items()
    for file, start in sites
}


def excuse(finding: Finding) -> str:
    """Why it may be idle or silent; or nothing."""
    for (file, start), why in EXCUSED.items():
        if finding.site.file == file and finding.site.text.startswith(start):
            return why
    return ""


def tell(finding: Finding) -> None:
    """A line for an assertion that is not known to be needed."""
    site, why = finding.site, excuse(finding)
    if finding.state != "needed":
        where = f"{site.file}:{site.first}"
        print(f"{finding.state:7} {where:44} {site.text}", flush=True)
        print(f"        {why or 'not excused'} {finding.entry}", flush=True)


def main() -> int:
    """Run it on the whole catalogue, or on the tasks that contain a word."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words = "tasks that contain one of these"
    parser.add_argument("--only", nargs="+", default=[""], help=words, metavar="WORD")
    only = parser.parse_args().only
    curriculum = load_curriculum()
    entries = [
        entry
        for entry in read_catalogue(curriculum)
        if any(word in entry.task for word in only)
    ]
    started = time.monotonic()
    with leaving_none(), Cluster() as cluster:
        findings = ablate(curriculum, cluster, entries, tell)
    counts = Counter(finding.state for finding in findings)
    states = ", ".join(f"{counts[state]} {state}" for state in sorted(counts))
    seconds = time.monotonic() - started
    print(f"{len(findings)} assertions: {states}; {seconds:.0f} s")
    return int(any(f.state != "needed" and not excuse(f) for f in findings))


if __name__ == "__main__":
    sys.exit(main())
