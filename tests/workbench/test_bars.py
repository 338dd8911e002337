"""The harness of every benchmark: bars, options, what is printed, and the exit code."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

from benchmarks._bars import Bench, missed
from benchmarks._ratios import in_turn, slowest
from distlab.cli.bench import names

BENCH = Bench("x", "One line.", at_least={"high": 2, "both": 1}, at_most={"both": 3})


@pytest.mark.parametrize(
    ("name", "value", "bounds", "is_met"),
    [
        ("high", 2, {}, True),
        ("high", 1.9, {}, False),
        ("high", None, {}, False),
        ("high", 3, {"lower": 1.9}, False),
        ("both", 2, {}, True),
        ("both", 4, {}, False),
        ("both", 0.5, {}, False),
        ("both", 2, {"upper": 4}, False),
    ],
)
def test_a_figure_meets_its_bars_with_its_bounds(
    name: str, value: float | None, bounds: dict[str, float], is_met: bool
) -> None:
    line = BENCH.line(name, value, what=["why"], **bounds)
    assert missed([line]) == [name] * (not is_met)
    row, why = BENCH.text([line])
    assert row.endswith("MISSED") != is_met
    assert why.strip() == "why"


def test_a_figure_without_a_bar_is_shown() -> None:
    assert missed([BENCH.line("shown", None)]) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"pairs": 5, "word": "", "part": "", "fast": False, "rest": []}),
        (
            ["a", "b", "--pairs=1", "--word=w", "--part=one", "--fast"],
            {"pairs": 1, "word": "w", "part": "one", "fast": True, "rest": ["a", "b"]},
        ),
    ],
)
def test_options_reach_the_measurement(
    words: list[str],
    expected: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["x.py", *words])
    given: dict[str, Any] = {}

    def measure(**options: Any) -> list[Any]:
        given.update(options)
        return [BENCH.line("high", 3)]

    options: dict[str, Any] = {"pairs": 5, "word": "", "part": ("one", "two")}
    assert BENCH.main(measure, **options, fast=False, rest=[]) == 0
    assert given == expected
    assert capsys.readouterr().out.startswith("high")


@pytest.mark.parametrize(("value", "code"), [(2, 0), (1, 1)])
def test_the_json_is_the_report_and_the_exit_code_says_if_all_bars_are_met(
    value: int,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["x.py", "--json"])
    results = [BENCH.line("high", value)]
    assert BENCH.main(lambda: BENCH.report(results, more=1)) == code
    report = json.loads(capsys.readouterr().out)
    assert (report["bench"], report["results"], report["more"]) == ("x", results, 1)


def test_ways_take_turns_at_going_first() -> None:
    order = []
    ways = [lambda: order.append("a"), lambda: order.append("b")]
    assert len(in_turn(ways, 2, warm_up=1)) == 2
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert slowest([[(1, 5), (2, 2)], [(3, 4), (1, 1)]]) == [(3, 5), (2, 2)]


@pytest.mark.parametrize("name", names())
def test_every_benchmark_has_the_harness(name: str) -> None:
    module = importlib.import_module(f"benchmarks.{name}")
    bench = module.bench() if name == "scaling" else module.BENCH
    assert isinstance(bench, Bench)
    assert bench.name == name
