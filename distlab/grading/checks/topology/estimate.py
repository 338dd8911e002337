"""Checks of task 3.6, `topology.predict`: seconds, compared with simulated runs.

For few ranks the expected time is that of the schedules in the simulator. For many
ranks it is their formula, which the simulator confirms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from types import ModuleType
from typing import Any

from distlab.grading.checks.topology.forms import doubling_rounds, flat_s
from distlab.grading.clause import clause
from distlab.grading.kit.plans import in_call, worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import NOBODY
from distlab.sim import AlphaBeta, Sized, run
from distlab.sim.plans import schedules

LINKS = (
    AlphaBeta(alpha_s=10e-6, bytes_per_s=12.5e9),
    AlphaBeta(alpha_s=3e-6, bytes_per_s=450e9),
)
POWERS = (8, 2, 4, 1024, 1)
OTHERS = (3, 6, 12, 1000)  # 3 × 1,000 divides the sizes
SIZES = (0, 12_000, 1_200_000_000)
SIMULATED = 8  # ranks, at most
NAMES = ("naive", "ring", "recursive doubling")
CLOSE = 1e-6  # relative; the simulator counts picoseconds
_TABLE = 4  # lines of evidence


def whole(n: int, size: int) -> int:
    """A number of bytes that n equal chunks divide."""
    return size // (n * 24) * n * 24


def estimate_all(context: RankContext, unit: ModuleType, seed: int) -> list[Any]:
    """What estimate_time returns in every setting: three numbers, or the error."""
    found = []
    for n, size, link in settings():
        values = n, size, unit.Link(link.alpha_s, link.bytes_per_s)
        with in_call(f"estimate_time({n}, {size}, {values[2]})"):
            found.append(_read(unit.estimate_time(*values)))
    return found


def settings() -> list[tuple[int, int, AlphaBeta]]:
    """n, bytes and link of each question."""
    return [
        (n, whole(n, size), link)
        for n in (*POWERS, *OTHERS)
        for size in SIZES
        for link in LINKS
    ]


def _read(told: Any) -> dict[str, float] | str:
    if not isinstance(told, Mapping):
        return f"returned {told!r:.40}, expected a dict"
    missing = [name for name in NAMES if name not in told]
    if missing:
        return f'returned a dict without the key "{missing[0]}"'
    found = {}
    for name in NAMES:
        try:
            found[name] = float(told[name])
        except (TypeError, ValueError):
            return f'returned {told[name]!r:.40} for "{name}", expected a number'
    return found


# ── the truth ───────────────────────────────────────────────────────────────────────


@cache
def truth_s(name: str, n: int, num_bytes: int, link: AlphaBeta) -> float:
    """Of a simulated run if it is small, and of the formula otherwise."""
    is_power = doubling_rounds(n) == n.bit_length() - 1
    if n > SIMULATED or not num_bytes or not is_power:
        return flat_s(n, num_bytes, link)[name]
    return run(PLAYED[name], n, num_bytes, net=link, journal=False).time_s


def _naive(context: RankContext, num_bytes: int) -> None:
    comm = context.comm
    box: Any = Sized(num_bytes)
    others = range(1, comm.world_size)
    if comm.rank:
        comm.send(box, 0)
        comm.recv(box, 0)
        return
    for rank in others:
        comm.recv(box, rank)
    for rank in others:
        comm.send(box, rank)


def _ring(context: RankContext, num_bytes: int) -> None:
    box: Any = Sized(num_bytes)
    schedules.ring_all_reduce(context.comm, box)


def _doubling(context: RankContext, num_bytes: int) -> None:
    box: Any = Sized(num_bytes)
    schedules.recursive_doubling_all_reduce(context.comm, box)


PLAYED: dict[str, Callable[[RankContext, int], None]] = {
    "naive": _naive,
    "ring": _ring,
    "recursive doubling": _doubling,
}

# ── what it looks like when it is wrong ─────────────────────────────────────────────

Form = Callable[[int, int, AlphaBeta], float]


def _suspects(name: str) -> list[tuple[str, str, Form]]:
    """Slug, sentence and formula of mistakes that are known."""

    def right(n: int, size: float, link: AlphaBeta) -> float:
        return flat_s(n, size, link)[name]

    every: list[tuple[str, str, Form]] = [
        (
            "not-seconds",
            "is {got}, expected {wanted}: the unit must be seconds",
            lambda n, size, link, f=factor: f * right(n, size, link),  # type: ignore[misc]
        )
        for factor in (1e3, 1e6, 1e9)
    ]
    every.append(
        (
            "not-seconds",
            "counts 8 times the bytes: bytes_per_s counts bytes, not bits",
            lambda n, size, link: right(n, 8 * size, link),
        )
    )
    if name != "recursive doubling":
        every += [
            (
                "one-way-only",
                "is half the expected time: the sum must also return to every rank",
                lambda n, size, link: right(n, size, link) / 2,
            ),
            (
                "latency-once",
                "has one α in total, expected one for each message",
                lambda n, size, link: (
                    right(n, size, _ideal(link)) + (n > 1) * link.alpha_s
                ),
            ),
        ]
    if name == "ring":
        every.append(
            (
                "whole-tensor-every-step",
                "has the full tensor in every message, expected one chunk",
                lambda n, size, link: flat_s(n, size, link)["naive"],
            )
        )
    if name == "recursive doubling":
        every += [
            (
                "ranks-beyond-the-power",
                "counts {rounds:.3g} rounds of messages, expected {needed}",
                lambda n, size, link, r=rounds: r(n) * link.message_s(size),  # type: ignore[misc]
            )
            for rounds in (
                math.log2,
                lambda n: n.bit_length() - 1,
                lambda n: (n - 1).bit_length(),
            )
        ]
    return every


def _ideal(link: AlphaBeta) -> AlphaBeta:
    return AlphaBeta(alpha_s=0.0, bytes_per_s=link.bytes_per_s)


def _judge(name: str, runs: Runs) -> str:
    told = worked_out(runs, estimate_all).values[0]
    for (n, size, _), values in zip(settings(), told, strict=True):
        if isinstance(values, str):
            raise NotYetError(
                f"estimate_time({n}, {size}, …) {values}",
                rule='{"naive": …, "ring": …, "recursive doubling": …}, in seconds',
                fatal=True,
            )
    asked, got = settings(), [values[name] for values in told]
    right = [truth_s(name, *setting) for setting in asked]
    if not _alike(got, right):
        raise _wrong(name, asked, got, right)
    return f"8 ranks, 1.2 GB, {name}: {1000 * right[asked.index(BIG)]:.1f} ms"


BIG = (8, whole(8, SIZES[-1]), LINKS[0])


def _alike(got: list[float], right: list[float]) -> bool:
    return all(
        math.isclose(g, r, rel_tol=CLOSE, abs_tol=1e-12)
        for g, r in zip(got, right, strict=True)
    )


def _time(seconds: float) -> str:
    """`12 µs`, `3.4 ms`, `1.5 s`."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if abs(seconds * factor) < 1000:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s"


def _wrong(
    name: str,
    asked: list[tuple[int, int, AlphaBeta]],
    got: list[float],
    right: list[float],
) -> NotYetError:
    rows = [
        (setting, g, r)
        for setting, g, r in zip(asked, got, right, strict=True)
        if not _alike([g], [r])
    ]
    rows.sort(key=lambda row: not row[0][1])  # no bytes at all would point to these
    (n, size, _), first, wanted = rows[0]
    slug, sentence = "", f"is {_time(first)}, expected {_time(wanted)}"
    for known, words, form in _suspects(name):
        if _alike(got, [form(*setting) for setting in asked]):
            slug = known
            sentence = words.format(
                rounds=form(n, 0, AlphaBeta(alpha_s=1.0, bytes_per_s=1.0)),
                needed=doubling_rounds(n),
                got=f"{first:.3g}",
                wanted=f"{wanted:.3g}",
            )
            break
    return NotYetError(
        f"with {n} rank{'s' * (n != 1)} and {size:,} bytes, the estimate for {name!r} "
        f"{sentence}",
        slug=slug,
        evidence=[
            (
                NOBODY,
                f"n = {n}",
                f"{size:,} bytes, α {link.alpha_s:g} s, "
                f"{link.bytes_per_s:g} bytes/s: expected {r:.6g} s   got {g:.6g} s",
            )
            for (n, size, link), g, r in rows[:_TABLE]
        ],
        rule="count the messages that follow one another, and the bytes of each",
    )


for _number, _name in enumerate(NAMES, 1):
    clause(
        "topology.predict", f"C{_number}", worlds=(1,), runs=[on_ranks(estimate_all)]
    )(partial(_judge, _name))
