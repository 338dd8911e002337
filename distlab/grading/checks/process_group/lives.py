"""Scripts for 3.18: what becomes of each process, played at a `Launcher`.

No process runs: a script says how long each one lives, how it ends, and what it does
on SIGTERM.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from signal import SIGINT, SIGKILL, SIGTERM

FOREVER = math.inf
NUM_RANDOM = 200


@dataclass(frozen=True)
class Life:
    """How a process ends when it is left alone, and after SIGTERM."""

    after_s: float = 10.0
    code: int = 0
    stops_in_s: float = 0.5  # FOREVER: it ignores SIGTERM
    stop_code: int = -SIGTERM


@dataclass(frozen=True, kw_only=True)
class Script:
    """A launcher's numbers, and the lives of its processes that are not the usual."""

    world_size: int = 3
    max_restarts: int = 2
    window_s: float = 100.0
    grace_s: float = 5.0
    lives: dict[tuple[int, int], Life] = field(default_factory=dict)
    interrupts: tuple[tuple[float, int], ...] = ()
    ticks_s: tuple[float, ...] = ()  # that came without having been asked for


def _fails(code: int = 1, after_s: float = 2.0) -> Life:
    return Life(after_s, code)


def _failing(after_s: float, code: int) -> dict[tuple[int, int], Life]:
    """In each of eight generations rank 1 fails; ranks 0 and 2 live on."""
    lives = {(g, rank): Life(80.0) for g in range(1, 9) for rank in (0, 2)}
    return lives | {(g, 1): Life(after_s, code) for g in range(1, 9)}


IGNORES = Life(stops_in_s=FOREVER)
BY_HAND = (
    Script(),
    Script(world_size=1),
    Script(lives={(1, 0): Life(1.0), (1, 2): Life(20.0)}, ticks_s=(0.5, 12.0)),
    Script(lives={(1, 1): _fails()}),
    Script(lives={(1, 1): _fails(), (1, 0): Life(1.0)}),
    Script(lives={(1, 1): _fails(-SIGKILL), (1, 2): _fails(3, 2.2)}),
    Script(lives={(1, 1): _fails(), (1, 0): IGNORES}),
    Script(lives={(1, 1): _fails(), (1, 0): IGNORES}, ticks_s=(3.0, 4.0)),
    Script(lives={(1, 1): _fails(), (1, 0): Life(stops_in_s=1.0, stop_code=0)}),
    Script(lives={(1, 2): _fails()}, ticks_s=(7.3, 8.0)),  # those of the generation 1
    Script(lives={(g, 1): _fails(g + 2) for g in range(1, 7)}),
    Script(lives={(g, 1): _fails(-9) for g in range(1, 7)}),
    Script(max_restarts=0, lives={(1, 0): _fails(7)}),
    Script(max_restarts=0, lives={(1, 0): _fails(-11), (1, 1): _fails(5, 2.2)}),
    Script(
        max_restarts=0, lives={(1, 0): _fails(4), (1, 1): Life(stops_in_s=1.0)}
    ),
    Script(max_restarts=1, window_s=50.0, lives=_failing(60.0, 1)),
    Script(max_restarts=2, window_s=50.0, lives=_failing(15.0, 6)),
    Script(interrupts=((3.0, SIGINT),)),
    Script(interrupts=((3.0, SIGTERM),), lives={(1, 0): IGNORES, (1, 1): Life(1.0)}),
    Script(interrupts=((2.2, SIGINT),), lives={(1, 1): _fails()}),
    Script(world_size=1, max_restarts=1, lives={(1, 0): _fails(2), (2, 0): _fails(9)}),
)  # fmt: skip


def scripts(seed: int) -> list[Script]:
    """Those above, and some that depend on the seed."""
    draw = random.Random(seed)
    return [*BY_HAND, *(_random_script(draw) for _ in range(NUM_RANDOM))]


def _random_script(draw: random.Random) -> Script:
    def tenths(least: float, most: float) -> float:
        return round(draw.uniform(least, most), 1) + draw.randint(1, 99) / 10_000

    world_size = draw.randint(1, 5)
    lives = {}
    for generation in range(1, 7):
        for rank in range(world_size):
            lives[generation, rank] = Life(
                after_s=tenths(0.1, 20.0),
                code=draw.choice((0, 0, 0, 1, 3, -9, -11)),
                stops_in_s=draw.choice((tenths(0.1, 1.0), tenths(1.0, 9.0), FOREVER)),
                stop_code=draw.choice((-SIGTERM, -SIGTERM, 0, 1)),
            )
    return Script(
        world_size=world_size,
        max_restarts=draw.randint(0, 3),
        window_s=tenths(5.0, 60.0),
        grace_s=tenths(1.0, 6.0),
        lives=lives,
        interrupts=tuple(
            (tenths(0.5, 40.0), SIGINT) for _ in range(draw.randint(0, 1))
        ),
        ticks_s=tuple(tenths(0.1, 30.0) for _ in range(draw.randint(0, 3))),
    )
