"""Measure services for the lab of phase 3: rendezvous, launcher, servers.

All times are virtual, and the scripts of faults are drawn from seeds, so every machine
gets the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from distlab.runner import Run
from distlab.walkthroughs import phase3_server_rank as server_rank
from distlab.walkthroughs import phase3_services_rank as rank
from distlab.walkthroughs.tables import Cells

Rows = Mapping[str, Mapping[str, float]]
NUM_WORKERS = 8
SIZES_KIB = (64, 16, 16, 64, 4) * 4 + (1, 1, 128)
"""The tensors of a model besides its embedding."""
MAX_RESTARTS, GRACE_S = 3, 5.0
END_S = 250.0
"""How long we watch a launcher."""
_FASTEST_S = 1.0  # for a gradient


@dataclass(frozen=True, kw_only=True)
class Lifeline:
    """A process of a launcher, which still runs at END_S if `end` is empty."""

    rank: int
    generation: int
    from_s: float
    to_s: float
    end: str  # failed, stopped (by SIGTERM), killed (by SIGKILL), or nothing


@dataclass(frozen=True, kw_only=True)
class Launched:
    """The actions of a launcher until END_S."""

    lifelines: tuple[Lifeline, ...]
    generations: Cells
    outcome: str


class Services:
    """Experiments with services. `run` is a function like `Ranks.run`.

    `ring_s` returns how long a ring all-reduce of a number of bytes takes NUM_WORKERS
    ranks on SLOW_LINK.
    """

    def __init__(self, run: Callable[..., Run], ring_s: Callable[[int], float]) -> None:
        self._run, self._ring_s = run, ring_s

    def _once(self, unit: str, scenario: Callable[..., Any], **values: Any) -> Any:
        return self._run(unit, 1, scenario, **values).values[0]

    # ── rendezvous and launcher ─────────────────────────────────────────────────────

    def meet(self, n: int, messages: Sequence[str]) -> Cells:
        """Return each message with its reply, and when the reply came."""
        values = {"n": n, "messages": tuple(messages)}
        replies = self._once("process_group", rank.meet, **values)
        return {
            f"{number:>2}  {message}": {
                "reply": reply or "none",
                "after message": after or "never",
            }
            for number, (message, (reply, after)) in enumerate(
                zip(messages, replies, strict=True), 1
            )
        }

    def launch(
        self, fails_after_s: float, ignores_sigterm: bool, window_s: float
    ) -> Launched:
        """Launch three ranks, of which rank 2 fails in each generation."""
        rows = self._once(
            "process_group",
            rank.launch,
            fails_after_s=fails_after_s,
            ignores_sigterm=ignores_sigterm,
            window_s=window_s,
            max_restarts=MAX_RESTARTS,
            grace_s=GRACE_S,
        )
        seen = [row for row in rows if row[0] <= END_S]
        lifelines = tuple(_lifelines(seen))
        [code] = [a[1] for *_, acts in seen for a in acts if a[0] == "finish"] or [None]
        outcome = f"the launcher still runs at {END_S:g} s"
        if code is not None:
            outcome = f"the launcher ends at {seen[-1][0]:g} s with exit code {code}"
        return Launched(
            lifelines=lifelines,
            generations=_generations(lifelines, window_s),
            outcome=outcome,
        )

    # ── parameter server ────────────────────────────────────────────────────────────

    def step_times(self, embedding_kib: int, counts: Sequence[int]) -> Rows:
        """Return ms of a step by number of servers, for both ways to assign tensors.

        Also return those of the same step with a ring all-reduce.
        """
        sizes = tuple(1024 * size for size in (embedding_kib, *SIZES_KIB))
        results = self._once(
            "parameter_server",
            server_rank.step_times,
            sizes=sizes,
            counts=tuple(counts),
            num_workers=NUM_WORKERS,
        )
        ring_ms = 1e3 * self._ring_s(sum(sizes))
        return {
            f"{count}": {
                "in turn": 1e3 * row["in turn"],
                "yours": 1e3 * row["yours"],
                "ring all-reduce": ring_ms,
            }
            for count, row in zip(counts, results, strict=True)
        }

    def losses(
        self,
        bounds: Sequence[int | None],
        slow_s: float,
        is_sorted: bool,
        times_s: Sequence[float] = (0, 5, 10, 15, 20, 25, 30),
    ) -> tuple[Rows, Rows]:
        """Return worker 0's loss by time, and by bound the losses at the end.

        Worker 0 needs `slow_s` seconds for a gradient, and the others need 1 s.
        """
        results = self._once(
            "parameter_server",
            server_rank.losses,
            bounds=tuple(bounds),
            seconds=_seconds(slow_s),
            is_sorted=is_sorted,
            times_s=tuple(times_s),
            lr=0.5,
        )
        named = {_named(b): row for b, row in zip(bounds, results, strict=True)}
        by_time = {
            f"{time_s:g}": {name: row["worker 0"][at] for name, row in named.items()}
            for at, time_s in enumerate(times_s)
        }
        at_end = {
            name: {
                "pushes": row["pushes"][-1],
                "loss": row["all"][-1],
                "loss, worker 0": row["worker 0"][-1],
            }
            for name, row in named.items()
        }
        return by_time, at_end

    def pushes_under(
        self,
        bounds: Sequence[int | None],
        faults: Mapping[str, str],
        slow_s: float = 5.0,
        end_s: float = 60.0,
    ) -> Rows:
        """Return the pushes in `end_s` seconds by fault, with a column per server."""
        results = self._once(
            "parameter_server",
            server_rank.pushes_under,
            bounds=tuple(bounds),
            seconds=_seconds(slow_s),
            faults=tuple(faults.values()),
            end_s=end_s,
        )
        names = ["synchronous", *map(_named, bounds)]
        return {
            label: dict(zip(names, counts, strict=True))
            for label, counts in zip(faults, results, strict=True)
        }

    def crashes(self, ignored: str) -> Cells:
        """Return what a crash after each operation leaves, and what it loses.

        The disk does nothing on the operations that are `ignored`.
        """
        results = self._once("parameter_server", rank.crashes, ignored=ignored)
        return {
            f"{number:>2}  {operation}": {
                "acknowledged": acknowledged,
                "new disks": disks,
                "lost": lost,
            }
            for number, (operation, acknowledged, disks, lost) in enumerate(results)
        }

    def failing_scripts(
        self, ignored: str, kinds: Sequence[str], num_scripts: int
    ) -> list[str]:
        """Count the scripts of faults that fail, and show the longest, also shrunk."""
        failing, longest, least = self._once(
            "parameter_server",
            rank.failing_scripts,
            ignored=ignored,
            kinds=tuple(kinds),
            num_scripts=num_scripts,
        )
        lines = [f"{failing} of {num_scripts} scripts fail"]
        for title, script in (("the longest", longest), ("shrunk", least)):
            if script:
                *faults, seed = script.split(",")
                lines += [f"{title} ({seed}):", *(f"    {fault}" for fault in faults)]
        return lines


def _seconds(slow_s: float) -> tuple[float, ...]:
    return float(slow_s), *(NUM_WORKERS - 1) * [_FASTEST_S]


def _named(bound: int | None) -> str:
    return "asynchronous" if bound is None else f"bound {bound}"


def _lifelines(rows: Sequence[Any]) -> list[Lifeline]:
    """Find each process's lifeline in the launcher's actions and the events."""
    started: dict[int, tuple[int, float]] = {}
    lines = []

    def end(process: int, to_s: float, how: str) -> None:
        generation, from_s = started.pop(process)
        times = {"from_s": from_s, "to_s": to_s}
        lines.append(Lifeline(rank=process, generation=generation, **times, end=how))

    ends = {-9: "killed", -15: "stopped"}
    for now_s, event, actions in rows:
        if event[0] == "ended":
            end(event[1], now_s, ends.get(event[2], "failed"))
        for action in actions:
            if action[0] == "start":
                started[action[1]] = action[2], now_s
    for process in [*started]:
        end(process, END_S, "")
    return lines


def _generations(lifelines: Sequence[Lifeline], window_s: float) -> Cells:
    """Return each generation's start, failure, end, and restarts in the window."""
    rows = {}
    starts = sorted({line.from_s for line in lifelines})
    for generation, start_s in enumerate(starts, 1):
        own = [line for line in lifelines if line.generation == generation]
        over_s = max(line.to_s for line in own)
        failed = [line.to_s for line in own if line.end == "failed"]
        recent = [s for s in starts[1:generation] if s > over_s - window_s]
        is_over = all(line.end for line in own)
        rows[f"generation {generation}"] = {
            "starts": start_s,
            "fails": failed[0] if failed else "",
            "is over": over_s if is_over else "",
            f"restarts in {window_s:g} s before": len(recent) if is_over else "",
        }
    return rows
