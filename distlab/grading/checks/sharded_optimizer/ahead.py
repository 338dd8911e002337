"""Checks of 3.22, C4: what prefetch hides, in virtual time."""

from __future__ import annotations

from typing import Any

from distlab.grading.checks.sharded_optimizer import layers
from distlab.grading.checks.sharded_optimizer.named import play_ahead
from distlab.grading.checks.sharded_optimizer.stage3 import BACKWARD
from distlab.grading.clause import clause
from distlab.grading.runs import Runs, RunSpec, in_virtual_time, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError

RANKS = 4
WIRE = 0.5  # what the widest layer's shards take on the wire, in units of a pause


def _timed() -> tuple[float, list[RunSpec]]:
    """Bytes a second, and a run without and one with prefetch."""
    sizes = [8 * (RANKS - 1) * size for size in layers.layer_elements(RANKS)]
    speed = max(sizes) / (WIRE * layers.PAUSE_S)
    return speed, [
        in_virtual_time(layers.timed, RANKS, bytes_per_s=speed, prefetch=ahead)
        for ahead in (False, True)
    ]


@clause(
    BACKWARD,
    "C4",
    worlds=(3,),
    runs=[on_ranks(layers.train_stage3, prefetch=True)],
    later=lambda _: _timed()[1],
)
def fetched_ahead(runs: Runs) -> str | None:
    """With prefetch, only the first layer of each direction is waited for."""
    sizes = [8 * (RANKS - 1) * size for size in layers.layer_elements(RANKS)]
    speed, specs = _timed()
    told = [max_of(runs.simulated(spec)) for spec in specs]
    wire = [size / speed for size in sizes]
    compute = layers.PAUSE_S * len(sizes)
    for plain, ahead, where, first in (
        (told[0][0], told[1][0], "forward", wire[0]),
        (told[0][1], told[1][1], "backward()", wire[-1]),
    ):
        scatter = sum(wire) if where != "forward" else 0.0
        if plain > compute + sum(wire) + scatter + 0.01:
            raise NotJudgedError("without prefetch it sends too much: see C3")
        most = compute + first + scatter
        if ahead > most + 0.05 * layers.PAUSE_S:
            play_ahead(runs)
            raise NotYetError(
                f"on {RANKS} simulated ranks, {where} with prefetch takes "
                f"{ahead:.3g} s, "
                f"expected at most {most:.3g} s: it must wait for the first layer only",
                slug="prefetch-waits",
                rule="prefetch starts its messages and returns; unshard_layer waits",
            )
    return (
        f"{RANKS} simulated ranks: forward {told[0][0]:.2f} → {told[1][0]:.2f} s, "
        f"backward() {told[0][1]:.2f} → {told[1][1]:.2f} s"
    )


def max_of(told: dict[str, Any]) -> list[float]:
    """The slowest rank's forward, and its backward()."""
    return [max(value[part] for value in told["values"]) for part in (0, 1)]
