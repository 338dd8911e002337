"""Take out each assertion of the checks in turn; the catalogue must notice.

    python benchmarks/ablation.py [--only TASK]

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
from distlab.runner import Cluster

# An assertion that the catalogue cannot make speak, by file and how its text begins.
_CHEATED = "speaks of what came by another way than comm: tests/hostile/cheats.toml"
_SIBLING = "speaks of a mistake in another task: tests/workbench/test_{}.py"
_OF_A_LOADER = _SIBLING.format("data_loader")
_OF_3_1 = _SIBLING.format("ring_allreduce")
_OUT_OF_TURN = "speaks when its clause is judged first: distlab watch does that"
EXCUSED: dict[tuple[str, str], str] = {
    ("average_gradients.py", "expect_messages(run, 'the gradients are right"): _CHEATED,
    ("broadcast_model.py", "expect_messages(run, 'the weights are right"): _CHEATED,
    ("train_step.py", "expect_messages(run, 'the weights are right"): _CHEATED,
    ("loss_scaler.py", "expect_messages(run, 'all ranks decide alike"): _CHEATED,
    ("ddp_finish.py", "expect_messages(run, 'the gradients are right"): _CHEATED,
    ("master_weights.py", "expect_messages(run, 'the gradients are"): _CHEATED,
    ("model_parallel_step.py", "expect_messages(run, 'the weights are"): _CHEATED,
    ("pipeline_execute.py", "expect_messages(run, 'the gradients are"): _CHEATED,
    ("pipeline_steps.py", "expect_messages(run, 'the gradients are"): _CHEATED,
    ("pipeline_steps.py", "expect_gradients(case, actual, harness.seed)"): (
        "speaks of values that are wrong only with several microbatches in flight"
    ),
    ("clip.py", "expect_messages(run, 'the weights are right"): _CHEATED,
    ("sync_once.py", "expect_messages(run, 'the gradient is right"): _CHEATED,
    ("checkpoint.py", "_expect_tensors(run)"): _OUT_OF_TURN,
    ("broadcasts.py", "raise NotYetError(f'every rank has it after"): _CHEATED,
    ("pairs.py", "expect_messages(run, \"rank 1's tensor is right"): _CHEATED,
    ("data_loader_siblings.py", "return NotYetError("): _OF_A_LOADER,
    ("data_loader_siblings.py", "judge(impl, harness)"): _OF_A_LOADER,
    ("ring_mistakes.py", "_expect_bounds(sums)"): _OF_3_1,
    ("ring_mistakes.py", "raise NotYetError('chunk_bounds does not give"): _OF_3_1,
    ("ring_segments.py", "harness.run(impl, pipelined_once)"): _OUT_OF_TURN,
    ("sharded_stage1.py", "expect_sent(run, sent, 'the weights are"): _CHEATED,
    ("sharded_stage2.py", "expect_sent(run, sent, 'the weights are"): _CHEATED,
    ("sharded_stage3.py", "expect_messages(run, 'the outputs are"): _CHEATED,
    ("sharded_stage3.py", "expect_messages(run, 'the weights are"): _CHEATED,
    ("topology_doubling.py", "harness.run(impl, double_all)"): _OUT_OF_TURN,
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
        print(f"{finding.state:7} {where:34} {site.text}", flush=True)
        print(f"        {why or 'not excused'} {finding.entry}", flush=True)


def main() -> int:
    """Run it on the whole catalogue, or on the tasks that contain a word."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="tasks that contain this")
    only = parser.parse_args().only
    curriculum = load_curriculum()
    entries = [e for e in read_catalogue(curriculum) if only in e.task]
    started = time.monotonic()
    with Cluster() as cluster:
        findings = ablate(curriculum, cluster, entries, tell)
    counts = Counter(finding.state for finding in findings)
    states = ", ".join(f"{counts[state]} {state}" for state in sorted(counts))
    seconds = time.monotonic() - started
    print(f"{len(findings)} assertions: {states}; {seconds:.0f} s")
    return int(any(f.state != "needed" and not excuse(f) for f in findings))


if __name__ == "__main__":
    sys.exit(main())
