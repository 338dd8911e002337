"""Write the results as tables for a terminal and for docs/chaos.md, and as JSON."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from distlab.chaos.campaign import Campaign
from distlab.chaos.judge import (
    GOOD,
    HUNG,
    LOST,
    RECOVERED,
    REFUSED,
    SAMPLES,
    SEGMENTS,
    WEIGHTS,
    WENT_ON,
    CellResult,
)
from distlab.chaos.matrix import FAULTS, MODES, MOMENTS, Cell, ChaosFault, cells
from distlab.chaos.plan import Setting

FIRST, COLUMN = 27, 11
DEFECTS = {
    "hung": (HUNG,),
    "wrong_weights": (WEIGHTS, SAMPLES),
    "lost_checkpoints": (LOST,),
}
LEGEND = (
    "A number is the time in seconds from the fault to every rank's next step, in runs",
    "that ended with the right weights. went on: the run needed no restart and has the",
    "right weights · refused: it stopped with one line that says why · –: can't happen",
    "· *: not run",
)
Cells = dict[str, CellResult]


def head() -> str:
    """Return the head of a table."""
    return " " * FIRST + "".join(f"{title:>{COLUMN}}" for title in SHORT.values())


SHORT = {
    "forward": "forward",
    "all-reduce": "all-reduce",
    "optimizer": "optimizer",
    "save": "save",
    "epoch": "epoch edge",
}


def row(fault: ChaosFault, mode: str, found: Cells) -> str:
    """Return a line of a table, which shows a fault at all moments."""
    texts = (text_of(Cell(fault, moment, mode), found) for moment in MOMENTS)
    return f"{fault.title:<{FIRST}}" + "".join(f"{text:>{COLUMN}}" for text in texts)


def text_of(cell: Cell, found: Cells) -> str:
    """Return the text in a cell of the table."""
    result = found.get(cell.id)
    if result is None:
        return "–" if cell.why_not else "*"
    if result.status == RECOVERED:
        return f"{result.recovery_s:.1f} s"
    return result.status if result.is_good else "✗"


def word_of(cell: Cell, found: Cells) -> str:
    """Return a cell of docs/chaos.md; it has no times, which depend on the load."""
    result = found.get(cell.id)
    if result is None or not result.is_good:
        return text_of(cell, found)
    return result.status


def by_id(results: Iterable[CellResult]) -> Cells:
    """Return the results by the id of their cell."""
    return {result.cell.id: result for result in results}


def rows_of(mode: str, cells: Iterable[Cell]) -> list[ChaosFault]:
    """Return the faults with a cell in this mode, in the order of the table."""
    names = {cell.fault.name for cell in cells if cell.mode == mode}
    return [fault for fault in FAULTS if fault.name in names]


def summary(results: Sequence[CellResult]) -> str:
    """Count the results of each kind in one line."""
    counts = Counter(result.status for result in results)
    told = [f"{counts[status]} {status}" for status in GOOD if counts[status]]
    others = sorted(set(counts) - set(GOOD))
    told += [f"{counts[status]} {status.upper()}" for status in others]
    zeros = [
        f"0 {name.replace('_', ' ')}"
        for name, statuses in DEFECTS.items()
        if not sum(counts[status] for status in statuses)
    ]
    return f"{len(results)} cells: {', '.join([*told, *zeros])}"


def times(results: Sequence[CellResult]) -> list[str]:
    """Return a line for each segment of the recoveries: n, p50, p95, max."""
    found = [result.segments for result in results if result.status == RECOVERED]
    if not found:
        return []
    columns = {name: [own[name] for own in found] for name in SEGMENTS}
    columns["all"] = [sum(own.values()) for own in found]
    lines = [f"recovery, n = {len(found)}; p50, p95, max"]
    for name, values in columns.items():
        shown = (quantile(values, q) for q in (0.5, 0.95, 1.0))
        lines.append(f"  {name:<25}" + "".join(f"{value:>7.2f} s" for value in shown))
    return lines


def quantile(values: Sequence[float], q: float) -> float:
    """Return the smallest value that a share `q` of the values doesn't exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def in_a_line(mode: str, results: Sequence[CellResult]) -> str:
    """Say how long the recoveries of a mode took, and how many steps they cost."""
    own = [one for one in results if (one.cell.mode, one.status) == (mode, RECOVERED)]
    if not own:
        return ""
    seconds = [one.recovery_s for one in own]
    p50, p95, most = (quantile(seconds, q) for q in (0.5, 0.95, 1.0))
    steps = quantile([one.num_lost for one in own], 0.5)
    return (
        f"Recoveries with `{mode}` (n = {len(own)}) took {p50:.2f} s (p50), "
        f"{p95:.2f} s (p95) or {most:.2f} s (max) from the fault to every rank's next "
        f"step, and they repeated {steps:g} steps (median)."
    )


def reasons(campaign: Campaign) -> list[str]:
    """List the cells that weren't run and those that can't happen, with the reasons."""
    lines = [
        f"not run: {_count(cells)} ({_names(cells)}), because {why}"
        for why, cells in campaign.not_played.items()
    ]
    lines += [
        f"can't happen: {_count(cells)} ({_names(cells)}), because {why}"
        for why, cells in campaign.senseless.items()
    ]
    return lines


def _count(cells: Sequence[Cell]) -> str:
    return f"{len(cells)} cell{'s' * (len(cells) != 1)}"


def _names(cells: Sequence[Cell]) -> str:
    modes = dict.fromkeys(cell.mode for cell in cells)
    faults = dict.fromkeys(cell.fault.title for cell in cells)
    what = next(iter(faults)) if len(faults) == 1 else f"{len(faults)} faults"
    return f"{what}; {', '.join(modes)}"


def markdown(
    results: Sequence[CellResult], campaign: Campaign, machine: dict[str, Any]
) -> str:
    """Return the tables of docs/chaos.md, one for each mode that was run."""
    found: Cells = by_id(results)
    parts: list[str] = []
    for mode in MODES:
        if not any(result.cell.mode == mode for result in results):
            continue
        parts.append(f"| `{mode}` | {' | '.join(MOMENTS.values())} |")
        parts.append("|---" * (len(MOMENTS) + 1) + "|")
        for fault in rows_of(mode, [result.cell for result in results]):
            texts = [word_of(Cell(fault, moment, mode), found) for moment in MOMENTS]
            parts.append(f"| {fault.title} | {' | '.join(texts)} |")
        parts += ["", in_a_line(mode, results), ""]
    where = f"{machine['cores']} cores, load {machine['load']:g}"
    parts += [f"{summary(results)}. Run with {where}.", ""]
    parts += [f"{line[0].upper()}{line[1:]}.\n" for line in reasons(campaign)]
    return "\n".join(parts)


def as_data(
    results: Sequence[CellResult], campaign: Campaign, setting: Setting
) -> dict[str, Any]:
    """Return the data for `--json`: figures as in every benchmark, and each cell."""
    import torch

    counts = Counter(result.status for result in results)
    recovered = [result for result in results if result.status == RECOVERED]
    figures: list[dict[str, Any]] = [
        {"name": "cells", "value": len(results), "unit": ""},
        *(
            {"name": name.replace(" ", "_"), "value": counts[name], "unit": "cells"}
            for name in (RECOVERED, WENT_ON, REFUSED)
        ),
    ]
    for name, statuses in DEFECTS.items():
        value = sum(counts[status] for status in statuses)
        figures.append(_bar(name, value))
    figures.append(_bar("defects", sum(not result.is_good for result in results)))
    if recovered:
        values = [result.recovery_s for result in recovered]
        shown = {f"p{round(100 * q)}": quantile(values, q) for q in (0.5, 0.95)}
        figures.append(
            {
                "name": "recovery_s",
                "value": round(shown["p50"], 3),
                "unit": "s",
                "n": len(values),
                **{name: round(value, 3) for name, value in shown.items()},
                "max": round(max(values), 3),
            }
        )
    machine = {
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[1], 2),
    }
    return {
        "bench": "chaos",
        "machine": machine,
        "seed": setting.seed,
        "ranks": setting.num_ranks,
        "code": setting.code,
        "results": figures,
        "cells": [_cell_data(result) for result in results],
        "not_played": _named(campaign.not_played),
        "makes_no_sense": _named(campaign.senseless),
    }


def from_data(data: dict[str, Any]) -> tuple[list[CellResult], Campaign]:
    """Return the results, and the cells that weren't run, from the data of `as_data`.

    Raises:
        ValueError: the data has another form.
    """
    known = {cell.id: cell for cell in cells()}
    try:
        results = [
            CellResult(
                cell=known[one["id"]],
                status=one["status"],
                segments=one["segments"],
                what=one["what"],
                why=one["why"],
                seconds=one["seconds"],
                num_lost=one["repeated_steps"],
                evidence=tuple(one["evidence"]),
            )
            for one in data["cells"]
        ]
        named = [
            {one["why"]: [known[name] for name in one["cells"]] for one in data[key]}
            for key in ("not_played", "makes_no_sense")
        ]
    except (KeyError, TypeError) as error:
        raise ValueError("this is no report of `distlab chaos --json`") from error
    played = tuple(result.cell for result in results)
    return results, Campaign(played=played, not_played=named[0], senseless=named[1])


def _bar(name: str, value: int) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": "cells", "bar": 0, "met": not value}


def _cell_data(result: CellResult) -> dict[str, Any]:
    return {
        "id": result.cell.id,
        "status": result.status,
        "good": result.is_good,
        "what": result.what,
        "why": result.why,
        "seconds": round(result.seconds, 2),
        "repeated_steps": result.num_lost,
        "segments": {name: round(s, 3) for name, s in result.segments.items()},
        "evidence": list(result.evidence),
    }


def _named(reasons: dict[str, list[Cell]]) -> list[dict[str, Any]]:
    return [
        {"why": why, "cells": [cell.id for cell in cells]}
        for why, cells in reasons.items()
    ]
