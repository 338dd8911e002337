"""Draw the schedules of unit `pipeline_parallel` as a table over time."""

from __future__ import annotations

from collections.abc import Sequence

from distlab.given.pipeline import Action


def draw(
    schedules: Sequence[Sequence[Action]], forward: int = 1, backward: int = 2
) -> str:
    """Draw all ranks' schedules as a table: a row per rank, a column per unit of time.

    `forward` and `backward` are t_f and t_b, as integers. If the ranks deadlock, the
    table ends there. Each ' after an entry stands for one chunk: none is chunk 0, one
    is chunk 1.
    """
    takes = {"F": forward, "B": backward}
    num_stages = len(schedules) * (1 + max(a.chunk for s in schedules for a in s))
    rows: list[list[str]] = [[] for _ in schedules]
    done: dict[tuple[str, int, int], int] = {}  # by kind, microbatch, stage: when
    left = [list(schedule) for schedule in schedules]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while left[rank]:
                kind, number, chunk = left[rank][0]
                stage = chunk * len(rows) + rank
                before = ("F", number, stage - 1), ("B", number, stage + 1)
                needed = before[kind == "B"]
                if needed[2] == num_stages:
                    needed = "F", number, stage
                if needed[2] >= 0 and needed not in done:
                    break
                row += ["."] * (done.get(needed, 0) - len(row))
                row += [f"{kind}{number}" + "'" * chunk] * takes[kind]
                done[kind, number, stage] = len(row)
                left[rank].pop(0)
                moved = True
    width = max((len(entry) for row in rows for entry in row), default=1)
    lines = [" ".join(entry.ljust(width) for entry in row) for row in rows]
    lines = [f"rank {rank}  {line}".rstrip() for rank, line in enumerate(lines)]
    return "\n".join([*lines, f"{max(map(len, rows))} units of time"])
