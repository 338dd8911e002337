"""One rank saves, but the state is spread over all.

How it knows: torch.save got tensors of which the rank has a part only (DTensor,
ShardedTensor), on fewer ranks than there are; or a sharded optimizer refused to give
its state because nobody had consolidated it. A save that hangs is `conditions`'s.
Silent: if every rank saves its own part, or the saved tensors are whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from distlab.audit.findings import Finding
from distlab.audit.trial import Trial, some_ranks


def find(trial: Trial) -> Iterator[Finding]:
    """Return a finding per line that saves a part."""
    n = trial.world_size
    saves = [
        (log.rank, event)
        for log in trial.logs
        for event in log.of("save")
        if event["sharded"]
    ]
    for at in sorted({event.at for _, event in saves if event.at is not None}):
        here = [(rank, event) for rank, event in saves if event.at == at]
        ranks = sorted({rank for rank, _ in here})
        if len(ranks) < n:
            yield Finding(
                at,
                "save-needs-all",
                f"only {some_ranks(ranks, n)} of {n} saved its part of "
                f"{here[0][1]['sharded']}, so the parts of the others are missing",
                "let all ranks collect the full state, then save it on one; or use "
                "torch.distributed.checkpoint",
            )
    for trouble in trial.many.troubles:
        if "consolidate_state_dict" in trouble.said and trouble.at is not None:
            yield Finding(
                trouble.at,
                "save-needs-all",
                f"rank {trouble.rank} asks for the state of a sharded optimizer that "
                "the ranks haven't consolidated",
                "call consolidate_state_dict on all ranks first",
            )
            return
