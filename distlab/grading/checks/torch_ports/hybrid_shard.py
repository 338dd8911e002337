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
            suspects=_suspects(seed, n, name),
            tolerance=tolerance,
        )
    return f"n = {n}: the weights of the baseline after {STEPS} steps"


def _suspects(seed: int, n: int, name: str) -> list[Suspect]:
    nodes = [one_process(seed, node_of(rank, n, name)) for rank in range(n)]
    alone = [one_process(seed, (rank,)) for rank in range(n)]
    return [
        Suspect(
            slug="own-gradient-only",
            values=alone,
            sentence=f"after {STEPS} steps, each rank has trained by itself, "
            "expected the mean gradient of all ranks",
            rule=MESH,
        ),
        Suspect(
            slug="replicas-apart",
            values=nodes,
            sentence=f"after {STEPS} steps, the replicas have different weights: each "
            "took the mean over its own ranks, expected all ranks",
            rule=MESH,
        ),
    ]


# ── C2: memory ──────────────────────────────────────────────────────────────────────


@clause("torch_ports.hybrid_shard", "C2", worlds=WORLDS, runs=TRAINED)
def stored_in_shards(runs: Runs) -> str | None:
    """Elements of the parameters on each rank, and their dtype."""
    told = _expect_stored(runs, "mixed")
    _expect_stored(runs, "exact")
    return told


def _expect_stored(runs: Runs, name: str) -> str:
    n = runs.world_size
    size, replicas = len(full_weights(make_model(0))), replicas_of(n, name)
    values = [value[name] for value in finished(runs, sharded_steps).values]
    held = [value["held"] for value in values]
    evidence = tuple(
        Evidence(rank, "holds", f"{count} of {size} elements")
        for rank, count in enumerate(held)
    )
    most = shard_size(make_model(0), n // replicas)
    if sum(held) != replicas * size or max(held) > UNEVEN * most:
        slug = "weights-not-cut" if min(held) == size else ""
        slug = "one-replica-only" if sum(held) == size < replicas * size else slug
        words = f"{sum(held)} elements, up to {max(held)} each, expected "
        words += f"{replicas * size}, up to {most} each"
        if slug == "one-replica-only":
            words = (
                f"{size} elements, one copy of the model, expected {replicas} copies"
            )
        elif slug:
            words = (
                f"all {size} elements on every rank, expected at most {most} on each"
            )
        raise NotYetError(
            f"after hybrid_shard with replicas={replicas}, {n} ranks store {words}",
            slug=slug,
            evidence=evidence,
            rule=MESH if slug else "",
        )
    stored = {dtype for value in values for dtype in value["stored"]}
    if stored != {"torch.float64"}:
        raise NotYetError(
            f"after hybrid_shard, the stored weights are {', '.join(sorted(stored))}, "
            "expected float64 as before",
            slug="weights-narrowed",
            rule="MixedPrecisionPolicy(param_dtype=…) narrows the gathered copy only",
        )
    return f"n = {n}: {replicas} × {size} elements, at most {max(held)} on a rank"


# ── C4: the checkpoint ──────────────────────────────────────────────────────────────


CONTINUED = on_ranks(continued).when("when 4 ranks save and 2 load")


@clause("torch_ports.hybrid_shard", "C4", worlds=(4,), runs=[CONTINUED])
def goes_on_with_fewer(runs: Runs) -> str | None:
    """One more step on 2 ranks, as if the 4 ranks had become 2."""
    n, seed = runs.world_size, runs.seed
    fewer = fewer_of(n)
    run = finished(runs, CONTINUED)
    after = f"after {n} ranks save and {fewer} load, training continues with"
    known = [
        ("", "all", f"{after} the new model's own weights, expected the loaded ones"),
        (
            "optimizer-not-loaded",
            "optimizer",
            f"{after} a new optimizer's state, expected the loaded one",
        ),
        (
            "optimizer-not-loaded",
            "settings",
            f"{after} the saved momentum but not the saved learning rate, expected "
            "both",
        ),
    ]
    expect_values(
        run.values[:fewer],
        same_everywhere(continued_baseline(seed, n), fewer),
        what=f"after {n} ranks save and {fewer} load and train a step, the weights",
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
