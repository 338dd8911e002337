"""Ranks that meet at the reference's rendezvous, simulated and on real processes."""

from __future__ import annotations

import json
from typing import Any

from distlab.comm import PeerLost, Service, ServiceContext
from distlab.curriculum import load
from distlab.runner import RankContext

NAME = "rendezvous"


def rendezvous(context: ServiceContext, world_size: int = 3) -> Service:
    made: Service = load("process_group", "reference").Rendezvous(world_size)
    return made


def ask(ctx: RankContext, op: str, generation: int, **fields: Any) -> Any:
    """Call until there is an answer; a refusal is its text."""
    assert ctx.endpoint
    message = json.dumps({"op": op, "generation": generation} | fields).encode()
    while True:
        try:
            answer = json.loads(ctx.endpoint.call(NAME, message, 0.2))
            return answer.get("reply", "refused")
        except PeerLost:
            ctx.clock.sleep(0.01)


def meet_twice(ctx: RankContext) -> list[Any]:
    """Two generations; the second has other names. What each rank came to know."""
    known: list[Any] = []
    for generation in (1, 2):
        name = f"{generation}-{ctx.rank}"
        rank = ask(ctx, "join", generation, key=name)
        ask(ctx, "set", generation, key=f"name{rank}", value=name)
        keys = [f"name{other}" for other in range(ctx.world_size)]
        ask(ctx, "wait", generation, keys=keys)
        names = [ask(ctx, "get", generation, key=key) for key in keys]
        known.append((names[rank] == name, sorted(names)))
        ask(ctx, "set", generation, key=f"done{rank}", value="")
        done = [f"done{other}" for other in range(ctx.world_size)]
        ask(ctx, "wait", generation, keys=done)
        if generation == 1:  # no rank may go on while another one still waits
            ctx.clock.sleep(PAUSE_S)
    return [*known, ask(ctx, "set", 1, key="name0", value="stale")]


PAUSE_S = 1.0  # of virtual time; longer than any fault lasts
EXPECTED = [
    *((True, [f"{generation}-{rank}" for rank in range(3)]) for generation in (1, 2)),
    "refused",
]
