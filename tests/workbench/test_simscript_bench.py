"""`distlab bench simscript` must be able to fail, and its formula must be the run's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import _simscript_net as cluster
from benchmarks import simscript
from benchmarks._bars import missed
from benchmarks.simscript import ROOT, Case
from distlab.sim.torch.script import Script, run_script
from tests.corpora.simscript.transformer import SIZES


@pytest.mark.parametrize("ranks", [6])
def test_a_step_takes_what_the_formula_says(ranks: int) -> None:
    target = str(ROOT / "tests" / "corpora" / "simscript" / "transformer.py")
    done = run_script(
        Script(target, ("tiny",)),
        ranks,
        net=cluster.NET,
        flops_per_s=cluster.FLOPS_PER_S,
        fake=True,
    )
    assert done.require_finished()
    steps = json.loads(done.ranks[0].output)
    formula = sum(cluster.step_s(SIZES["tiny"], ranks).values())
    assert steps[-1] == pytest.approx(formula, abs=2e-7)  # of looks at the clock


def run_of(cpu_s: float, step_s: float = 1.0) -> dict[str, Any]:
    took = {"cpu_s": cpu_s, "wall_s": 2 * cpu_s, "peak_mb": 100.0}
    return {"took": took, "figures": {"steps_s": [0.5, step_s], "memory": {"a": 10}}}


def test_what_misses_its_bar_or_does_not_repeat_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = iter([run_of(9.0), run_of(4.0), run_of(26.0, 1.0), run_of(27.0, 1.1)])
    monkeypatch.setattr(simscript, "played", lambda case: next(runs))
    monkeypatch.setattr(simscript, "CASES", simscript.CASES[:2])
    lines = simscript.measure()
    values = {line["name"]: line["value"] for line in lines}
    assert values["ddp_256_s"] == 4.0
    assert values["fsdp2_256_step_s"] == 1.0
    assert missed(lines) == ["fsdp2_256_s", "repeats"]


def test_a_step_that_is_off_its_formula_misses_its_bar() -> None:
    case = next(case for case in simscript.CASES if case.name == "fake_7b_256")
    right = sum(cluster.step_s(SIZES["7b"], 256).values())
    assert not missed(simscript.lines_of(case, [run_of(1.0, right)]))
    lines = simscript.lines_of(case, [run_of(1.0, 1.1 * right)])
    assert missed(lines) == ["fake_7b_256_rel_err"]


def test_a_run_that_fails_is_no_figure() -> None:
    with pytest.raises(RuntimeError, match="nothing"):
        simscript.played(Case("nothing", "absent.py", "", 2, False))
