"""Figures and their bars: which ones meet them, what is printed, the exit code."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Line = dict[str, Any]
"""A figure: name, value, unit; `bar` and `met` if it has a bar; `what` is wrong."""


@dataclass(frozen=True)
class Bars:
    """By the name of a figure: the value that it must reach, or must not exceed."""

    at_least: Mapping[str, float]
    at_most: Mapping[str, float]

    def line(self, name: str, value: float, unit: str = "", **more: Any) -> Line:
        """A figure; its `lower` or `upper` bound, if it is in `more`, meets the bar."""
        line: Line = {"name": name, "value": value, "unit": unit, **more}
        if name in self.at_least:
            bar = self.at_least[name]
            line |= {"bar": bar, "met": more.get("lower", value) >= bar}
        if name in self.at_most:
            bar = self.at_most[name]
            line |= {"bar": bar, "met": more.get("upper", value) <= bar}
        return line

    def told(self, line: Line) -> str:
        """The bar of a figure as it is printed, and MISSED; "" if it has none."""
        if "bar" not in line:
            return ""
        sign = "≥" if line["name"] in self.at_least else "≤"
        return f"  bar {sign} {line['bar']:g}" + ("" if line["met"] else "  MISSED")


def missed(results: Sequence[Line]) -> list[str]:
    """The names of the results that miss their bar."""
    return [line["name"] for line in results if not line.get("met", True)]


def share(answers: Sequence[bool]) -> float:
    """The share of those that are True, 0 without any."""
    return round(sum(answers) / len(answers), 4) if answers else 0.0


def report_of(bench: str, results: Sequence[Line]) -> dict[str, Any]:
    """The results in the schema of every benchmark here."""
    machine = {
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "load": round(os.getloadavg()[1], 2),  # of the last five minutes
    }
    return {"bench": bench, "machine": machine, "results": results}


def rows(results: Sequence[Line], row: Callable[[Line], str]) -> list[str]:
    """What is printed without --json: `row` of each figure, and below it its `what`."""
    told = []
    for line in results:
        told += [row(line), *(f"    {what}" for what in line.get("what", ()))]
    return told


def show(
    report: dict[str, Any],
    text: Callable[[Sequence[Line]], list[str]],
    *,
    as_json: bool,
) -> int:
    """Print the report; returns 1 when a bar is missed, else 0."""
    results = report["results"]
    print(json.dumps(report, indent=1) if as_json else "\n".join(text(results)))
    return int(bool(missed(results)))
