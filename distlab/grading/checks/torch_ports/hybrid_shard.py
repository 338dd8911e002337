"""Checks of task 3.27, `torch_ports.hybrid_shard`: values, memory, the checkpoint."""

from __future__ import annotations

from distlab.grading.checks.torch_ports.hybrid_runs import (
    STEPS,
    WORLDS,
    continued,
    continued_baseline,
    fewer_of,
    node_of,
    one_process,
    replicas_of,
    shard_size,
    sharded_steps,
)
from distlab.grading.clause import clause
from distlab.grading.kit.shard_training import full_weights, make_model
from distlab.grading.kit.torch_group import finished
from distlab.grading.kit.values import Suspect, expect_values, same_everywhere
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner.autopsy import Evidence

UNEVEN = 1.1  # who shards columns may store a little more on one rank
COARSE = 0.05  # what bfloat16 leaves
IN = {"exact": "computed in float64", "mixed": "computed in bfloat16"}
MESH = "init_device_mesh with the shape (replicas, n // replicas), for each layer"


# ── C1: values ──────────────────────────────────────────────────────────────────────

TRAINED = [on_ranks(sharded_steps)]


@clause("torch_ports.hybrid_shard", "C1", worlds=WORLDS, runs=TRAINED)
def weights_of_one_process(runs: Runs) -> str | None:
    """Exactly in float64, roughly in bfloat16."""
    n, seed = runs.world_size, runs.seed
    run = finished(runs, sharded_steps)
    for name, tolerance in (("exact", 1e-10), ("mixed", COARSE)):
        expect_values(
            [value[name]["weights"] for value in run.values],
            same_everywhere(one_process(seed, tuple(range(n))), n),
            what=f"{IN[name]}, the weights after {STEPS} steps",
            verb="are",
            suspects=_suspects(seed, n),
            tolerance=tolerance,
        )
    return f"n = {n}: the weights of the baseline after {STEPS} steps"


def _suspects(seed: int, n: int) -> list[Suspect]:
    nodes = [one_process(seed, node_of(rank, n)) for rank in range(n)]
    alone = [one_process(seed, (rank,)) for rank in range(n)]
    return [
        Suspect(
            slug="replicas-apart",
            values=nodes,
            sentence="each replica takes the mean over its own ranks only, so the "
            "replicas differ",
            rule=MESH,
        ),
        Suspect(
            slug="own-gradient-only",
            values=alone,
            sentence="every rank trains alone, with its own gradients",
            rule=MESH,
        ),
    ]


# ── C2: memory ──────────────────────────────────────────────────────────────────────


@clause("torch_ports.hybrid_shard", "C2", worlds=WORLDS, runs=TRAINED)
def stored_in_shards(runs: Runs) -> str | None:
    """Elements of the parameters on each rank, and their dtype."""
    n = runs.world_size
    size, replicas = len(full_weights(make_model(0))), replicas_of(n)
    values = [value["mixed"] for value in finished(runs, sharded_steps).values]
    held = [value["held"] for value in values]
    evidence = tuple(
        Evidence(rank, "holds", f"{count} of {size} elements")
        for rank, count in enumerate(held)
    )
    most = shard_size(make_model(0), n // replicas)
    if sum(held) != replicas * size or max(held) > UNEVEN * most:
        slug = "weights-not-cut" if min(held) == size else ""
        slug = "one-replica-only" if sum(held) == size < replicas * size else slug
        raise NotYetError(
            f"{n} ranks store {sum(held)} elements, up to {max(held)} each, expected "
            f"{replicas * size}, up to {most} each",
            slug=slug,
            evidence=evidence,
            rule=MESH if slug else "",
        )
    stored = {dtype for value in values for dtype in value["stored"]}
    if stored != {"torch.float64"}:
        raise NotYetError(
            f"the stored weights are {', '.join(sorted(stored))}, expected float64 as "
            "before",
            slug="weights-narrowed",
            rule="MixedPrecisionPolicy(param_dtype=…) narrows the gathered copy only",
        )
    return f"n = {n}: {replicas} × {size} elements, at most {max(held)} on a rank"


# ── C4: the checkpoint ──────────────────────────────────────────────────────────────


@clause("torch_ports.hybrid_shard", "C4", worlds=(4,), runs=[on_ranks(continued)])
def goes_on_with_fewer(runs: Runs) -> str | None:
    """One more step on 2 ranks, as if the 4 ranks had become 2."""
    n, seed = runs.world_size, runs.seed
    fewer = fewer_of(n)
    run = finished(runs, continued)
    known = [
        ("", "all", "nothing was loaded, so the new model has its own weights"),
        ("optimizer-not-loaded", "optimizer", "the optimizer's state was not loaded"),
        (
            "optimizer-not-loaded",
            "settings",
            "the optimizer has its momentum, but not the learning rate that was saved",
        ),
    ]
    expect_values(
        run.values[:fewer],
        same_everywhere(continued_baseline(seed, n), fewer),
        what=f"a step after a state of {n} ranks is loaded on {fewer}, the weights",
        verb="are",
        suspects=[
            Suspect(
                slug=slug,
                values=same_everywhere(continued_baseline(seed, n, lost), fewer),
                sentence=sentence,
                rule="get_state_dict and set_state_dict, of model and optimizer",
            )
            for slug, lost, sentence in known
        ],
    )
    return f"saved on {n} ranks, continued on {fewer}"
