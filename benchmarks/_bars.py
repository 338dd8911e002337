"""The harness of every benchmark: figures, their bars, the report and the exit code.

A benchmark has one `Bench`, makes its figures with `Bench.line` or `Bench.ratio`, and
ends in `Bench.main`, which reads the options, prints the report as a table or as JSON,
and says with its exit code whether every bar is met.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks._ratios import Launches, summary

Line = dict[str, Any]
"""A figure: name, value, unit; `bar` and `met` if it has a bar; `what` is wrong."""
Report = dict[str, Any]
"""What is printed as JSON: the results, and what else a benchmark has to tell."""


class Bench:
    """One benchmark: by the name of a figure, the value that it must reach or keep to.

    A figure of None, which could not be measured, meets no bar.
    """

    def __init__(
        self,
        name: str,
        doc: str | None,
        *,
        at_least: Mapping[str, float] | None = None,
        at_most: Mapping[str, float] | None = None,
    ) -> None:
        self.name, self.doc = name, doc or ""
        self.at_least, self.at_most = dict(at_least or {}), dict(at_most or {})

    def line(self, name: str, value: float | None, unit: str = "", **more: Any) -> Line:
        """A figure; its `lower` or `upper` bound, if it is in `more`, meets the bar."""
        line: Line = {"name": name, "value": value, "unit": unit, **more}
        least, most = more.get("lower", value), more.get("upper", value)
        if name in self.at_least:
            bar = self.at_least[name]
            line |= {"bar": bar, "sign": "≥"}
            line["met"] = least is not None and least >= bar
        if name in self.at_most:
            bar = self.at_most[name]
            is_met = line.get("met", True) and most is not None and most <= bar
            line |= {"bar": bar, "sign": "≤", "met": is_met}
        return line

    def ratio(self, name: str, launches: Launches, peer: str, **more: Any) -> Line:
        """How long ours takes by a peer, with its bounds: see `_ratios.summary`."""
        return self.line(name, **{**summary(launches), "peer": peer, **more})

    @staticmethod
    def row(line: Line) -> str:
        """A figure as it is printed; it ends in MISSED if it misses its bar."""
        value = line["value"]
        shown = f"{value:.6g}" if isinstance(value, int | float) else "null"
        told = f"{line['name']:<34} {shown:>12} {line['unit']}"
        for bound in ("lower", "upper"):
            told += f"  {bound} {line[bound]:.4g}" if bound in line else ""
        told += f"  {line['note']}" if line.get("note") else ""
        if "bar" in line:
            told += f"  bar {line['sign']} {line['bar']:g}"
            told += "" if line["met"] else "  MISSED"
        return told.rstrip()

    def text(self, results: Sequence[Line]) -> list[str]:
        """What is printed without --json: each figure, and below it its `what`."""
        told = []
        for line in results:
            told += [self.row(line), *(f"    {what}" for what in line.get("what", ()))]
        return told

    def report(self, results: Sequence[Line], **more: Any) -> Report:
        """The results in the schema of every benchmark."""
        machine = {
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "load": round(os.getloadavg()[1], 2),  # of the last five minutes
        }
        return {"bench": self.name, "machine": machine, "results": [*results], **more}

    def main(
        self,
        measure: Callable[..., Report | Sequence[Line]],
        above: Callable[[Report], Sequence[str]] = lambda _: (),
        **options: Any,
    ) -> int:
        """Measure with the options of the command line, print, and judge.

        Args:
            measure: called with the options; it returns results, or a report.
            above: lines to print above the figures, where no JSON is asked for.
            options: by name, the default of an option. False makes a flag, a tuple has
                the words to choose from, a list takes words without a name.

        Returns:
            1 if a bar is missed, else 0.
        """
        parser = argparse.ArgumentParser(
            description=self.doc, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument("--json", action="store_true", help="one JSON object")
        for name, default in options.items():
            flag = f"--{name.replace('_', '-')}"
            if isinstance(default, bool):
                parser.add_argument(flag, action="store_true")
            elif isinstance(default, tuple):
                parser.add_argument(flag, choices=default, default="")
            elif isinstance(default, list):
                parser.add_argument(name, nargs="*", default=default)
            else:
                parser.add_argument(flag, type=type(default), default=default)
        given = vars(parser.parse_args())
        as_json = given.pop("json")
        found = measure(**given)
        report = found if isinstance(found, dict) else self.report(found)
        if as_json:
            print(json.dumps(report, indent=1))
        else:
            print("\n".join([*above(report), *self.text(report["results"])]))
        return int(bool(missed(report["results"])))


def missed(results: Sequence[Line]) -> list[str]:
    """The names of the results that miss their bar."""
    return [line["name"] for line in results if not line.get("met", True)]


def share(answers: Sequence[bool]) -> float:
    """The share of those that are True, 0 without any."""
    return round(sum(answers) / len(answers), 4) if answers else 0.0
