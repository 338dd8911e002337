"""Fault scripts: draw them from a seed, print them on one line, and shorten them.

    for seed in range(1000):
        script = random_script(seed, ranks=3, horizon_s=2.0, services=("counter",))
        if fails(script):
            print(script_text(shrink(script, fails)))

A script is a `Faults`.

Source: A. Zeller and R. Hildebrandt, "Simplifying and isolating failure-inducing input"
(IEEE TSE 2002), section 3, for ddmin, which we apply to single faults before we
simplify each remaining number. A. Groce et al., "Swarm testing" (ISSTA 2012): a script
that leaves out most kinds finds more.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from distlab.sim.faults import Faults, Node

KINDS = (
    *("restart", "torn", "freeze", "partition", "loss", "duplicate", "straggler"),
    "late",
)
"""The kinds that are drawn by default, which are all that end; "kill" doesn't."""
_SHARES = (0.02, 0.1, 0.3)
_FACTORS = (1.5, 4.0, 16.0)
_FEW_KINDS = 3  # in one script
_STEPS = 1000  # instants of a script that are drawn from
_MOST_RUNS = 500  # of a script while it is made shorter


@dataclass(frozen=True)
class Fault:
    """One fault of a script: its kind, and the text after the `=`."""

    kind: str
    nodes: tuple[Node, ...] = ()
    numbers: tuple[float, ...] = ()  # seconds, a share or a factor

    def __str__(self) -> str:
        """Return the fault in the form that `--fault` takes."""
        names = "+".join(map(str, self.nodes))
        if self.kind in ("loss", "duplicate"):
            return f"{self.kind}={_plain(self.numbers[0])}"
        if self.kind == "straggler":
            return f"straggler={names}:{_plain(self.numbers[0])}"
        times = "-".join(f"{_plain(number)}s" for number in self.numbers)
        return f"{self.kind}={names}@{times}"


def _plain(number: float) -> str:
    """Format a number with all of its digits and no exponent."""
    return format(Decimal(repr(number)), "f")


def random_script(
    seed: int,
    ranks: int,
    horizon_s: float,
    *,
    services: Sequence[str] = (),
    most: int = 6,
    kinds: Sequence[str] = KINDS,
) -> Faults:
    """Draw 1 to `most` faults of `ranks` ranks and `services`, over by `horizon_s`.

    To let the store fail as well, name it among `services`.

    Raises:
        ValueError: there are no ranks, no faults or no time, or a kind is unknown.
    """
    unknown = [kind for kind in kinds if kind not in (*KINDS, "kill")]
    if ranks < 1 or most < 1 or not 0 < horizon_s < math.inf or unknown or not kinds:
        raise ValueError(
            f"a script of {most} faults of {ranks} ranks in {horizon_s} s of the kinds "
            f"{', '.join(kinds)}: each 1 or more, a time above 0, kinds out of "
            f"{', '.join((*KINDS, 'kill'))}"
        )
    drawing = random.Random(f"{seed} {ranks} {horizon_s}")
    # A few kinds, and more than one of each: many mistakes need the same thing twice.
    few = drawing.sample(list(kinds), drawing.randint(1, min(_FEW_KINDS, len(kinds))))
    pool = _Pool(list(range(ranks)), list(services))
    wanted = drawing.randint(1, most)
    found: list[Fault] = []
    for _ in range(4 * wanted):  # some do not go together
        fault = _draw(drawing, drawing.choice(few), pool, horizon_s)
        if len(found) < wanted and _goes_with(fault, found, seed):
            found.append(fault)
    return _script(found, seed)


def faults_of(script: Faults) -> list[Fault]:
    """Return the single faults of a script."""
    found = [Fault("straggler", (r,), (x,)) for r, x in script.straggler.items()]
    found += [Fault("kill", (node,), (at,)) for node, at in script.kill.items()]
    found += [Fault("late", (rank,), (at,)) for rank, at in script.late.items()]
    for kind in ("restart", "torn", "freeze"):
        found += [Fault(kind, (node,), (a, b)) for node, a, b in getattr(script, kind)]
    found += [Fault("partition", tuple(n), (a, b)) for n, a, b in script.partitions]
    shares = {"loss": script.loss, "duplicate": script.duplicate}
    return found + [
        Fault(kind, (), (share,)) for kind, share in shares.items() if share
    ]


def script_text(script: Faults) -> str:
    """Return the script as `--fault` takes it; "" if it has no faults."""
    parts = [str(fault) for fault in faults_of(script)]
    if not parts:
        return ""
    return ",".join([*parts, f"seed={script.seed}"])


def without(script: Faults, fault: Fault) -> Faults:
    """Return the script with all faults but this one."""
    return _script([one for one in faults_of(script) if one != fault], script.seed)


def shrink(
    script: Faults, fails: Callable[[Faults], bool], *, most_runs: int = _MOST_RUNS
) -> Faults:
    """Return a script with fewer faults and simpler numbers that still `fails`.

    You can't leave out any of its faults, because without it the script doesn't fail
    (unless `most_runs` were used up before we knew that). `fails` must always return
    the same for the same script.

    Raises:
        ValueError: the script doesn't fail.
    """
    search = _Search(fails, script.seed, most_runs)
    found = faults_of(script)
    if not search.fails(found):
        raise ValueError(f"this script does not fail: {script_text(script) or 'none'}")
    while True:
        shorter = _simpler(_fewer(found, search), search)
        if shorter == found:
            return _script(found, script.seed)
        found = shorter


class _Search:
    """Tries no script twice, and not too many."""

    def __init__(
        self, fails: Callable[[Faults], bool], seed: int, most_runs: int
    ) -> None:
        self._fails, self._seed, self._left = fails, seed, most_runs
        self._known: dict[tuple[Fault, ...], bool] = {}

    def fails(self, faults: list[Fault]) -> bool:
        """Return True if this script fails; an impossible one doesn't."""
        key = tuple(faults)
        if key not in self._known:
            if self._left <= 0:
                return False
            try:
                script = _script(faults, self._seed)
            except ValueError:
                self._known[key] = False
            else:
                self._left -= 1
                self._known[key] = self._fails(script)
        return self._known[key]


def _fewer(faults: list[Fault], search: _Search) -> list[Fault]:
    """Apply ddmin: leave out halves, then quarters, … then single faults."""
    size = len(faults)
    while size >= 1:
        for start in range(0, len(faults), size):
            rest = faults[:start] + faults[start + size :]
            if len(rest) < len(faults) and search.fails(rest):
                faults, size = rest, len(rest) + 1
                break
        size = min(size // 2, len(faults))
    return faults


def _simpler(faults: list[Fault], search: _Search) -> list[Fault]:
    """Return each fault with fewer nodes and rounder numbers."""
    for place in range(len(faults)):
        is_better = True
        while is_better:
            is_better = False
            for fault in _simpler_ones(faults[place]):
                changed = [*faults[:place], fault, *faults[place + 1 :]]
                if search.fails(changed):
                    faults, is_better = changed, True
                    break
    return faults


def _simpler_ones(fault: Fault) -> Iterator[Fault]:
    """Yield simpler faults, the simplest first."""
    if len(fault.nodes) > 1:
        for node in fault.nodes:
            rest = tuple(other for other in fault.nodes if other != node)
            yield Fault(fault.kind, rest, fault.numbers)
    for place, number in enumerate(fault.numbers):
        for rounder in _rounder(number):
            if rounder == 0 and fault.kind in ("loss", "duplicate"):
                continue  # that is: to leave it out
            numbers = (*fault.numbers[:place], rounder, *fault.numbers[place + 1 :])
            yield Fault(fault.kind, fault.nodes, numbers)


def _rounder(number: float) -> Iterator[float]:
    """Yield 0, and the number with fewer digits."""
    known = {number}
    digits = len(f"{number:.12g}".replace(".", "").strip("0"))
    for rounder in (0.0, *(float(f"{number:.{n}g}") for n in range(1, digits))):
        if rounder not in known:
            known.add(rounder)
            yield rounder


# ── how ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Pool:
    """The nodes to draw from."""

    ranks: list[Node]
    services: list[Node]

    def any_node(self, drawing: random.Random) -> Node:
        """Draw a node; services are as likely as ranks, as they have more to lose."""
        return drawing.choice(drawing.choice((self.ranks, self.services or self.ranks)))

    def side(self, drawing: random.Random) -> tuple[Node, ...]:
        """Draw the nodes on one side of a partition."""
        nodes = [*self.ranks, *self.services]
        size = drawing.randint(1, max(1, len(nodes) - 1))
        return tuple(sorted(drawing.sample(nodes, size), key=nodes.index))


def _draw(drawing: random.Random, kind: str, pool: _Pool, horizon_s: float) -> Fault:
    if kind in ("loss", "duplicate"):
        return Fault(kind, (), (drawing.choice(_SHARES),))
    if kind == "straggler":
        return Fault(kind, (drawing.choice(pool.ranks),), (drawing.choice(_FACTORS),))
    first = drawing.randrange(_STEPS)
    # As many short ones as long ones: a tenth of the time, a hundredth, …
    length = math.ceil(_STEPS ** drawing.random())
    step_s = horizon_s / _STEPS
    from_s, to_s = (
        float(f"{step_s * step:.6g}") for step in (first, min(first + length, _STEPS))
    )
    if kind == "late":
        return Fault(kind, (drawing.choice(pool.ranks),), (from_s,))
    if kind == "kill":
        return Fault(kind, (pool.any_node(drawing),), (from_s,))
    if kind == "partition":
        return Fault(kind, pool.side(drawing), (from_s, to_s))
    return Fault(kind, (pool.any_node(drawing),), (from_s, to_s))


def _goes_with(fault: Fault, others: list[Fault], seed: int) -> bool:
    is_one = fault.kind not in ("restart", "torn", "freeze", "partition")
    if is_one and any((o.kind, o.nodes) == (fault.kind, fault.nodes) for o in others):
        return False
    try:
        _script([*others, fault], seed)
    except ValueError:
        return False
    return True


def _script(faults: Sequence[Fault], seed: int) -> Faults:
    """Return the script of these faults.

    Raises:
        ValueError: the faults are impossible, alone or together.
    """
    facts: dict[str, Any] = {"seed": seed}
    for fault in faults:
        if fault.kind in ("loss", "duplicate"):
            facts[fault.kind] = fault.numbers[0]
        elif fault.kind in ("straggler", "kill", "late"):
            facts.setdefault(fault.kind, {})[fault.nodes[0]] = fault.numbers[0]
        elif fault.kind == "partition":
            cut = (fault.nodes, *fault.numbers)
            facts["partitions"] = (*facts.get("partitions", ()), cut)
        else:
            outage = (*fault.nodes, *fault.numbers)
            facts[fault.kind] = (*facts.get(fault.kind, ()), outage)
    return Faults(**facts)
