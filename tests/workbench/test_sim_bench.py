"""`distlab bench sim` must be able to fail: in every part, what is wrong is counted."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import _sim_corpus as corpus
from benchmarks import _sim_runs as runs
from benchmarks import sim
from benchmarks._bars import missed
from distlab.cli.bench import bench
from distlab.sim.plans import schedules
from tests.corpora.programs.corpus import CASES, TRANSPORTS, on_sim
from tests.corpora.programs.judge import Row, verdict


def row(name: str, world_size: int, **changes: Any) -> Row:
    """A row as if all transports said the same; `changes` are to what is expected."""
    (case,) = (c for c in CASES if (c.name, c.world_size) == (name, world_size))
    came = verdict(on_sim(case))
    case = replace(case, **changes)
    return Row(case=case, verdicts=dict.fromkeys(TRANSPORTS, came))


def test_a_wrong_expectation_lowers_the_share() -> None:
    good = [row("ring_of_sends", 3), row("domino", 3)]
    found = corpus.figures(good)
    assert (found["corpus_programs"], found["corpus_agree"]) == (2, 1.0)
    assert (found["corpus_hangs"], found["corpus_line_named"]) == (1, 1.0)
    wrong = row("triangle", 3, outcome="finished")
    found = corpus.figures([*good, wrong])
    assert found["corpus_agree"] == pytest.approx(2 / 3, abs=1e-4)
    line = corpus.as_data(wrong)
    assert re.search(r"\bdeadlock\b.*\bfinished\b", line["disagreements"][0])
    assert any("DISAGREES" in text for text in corpus.table([line]))
    assert not any("DISAGREES" in t for t in corpus.table([corpus.as_data(good[0])]))


def test_a_line_that_is_not_named_lowers_the_share() -> None:
    missed = row("anyone_takes_what_was_meant_for_later", 3)
    found = corpus.figures([row("ring_of_sends", 3), missed])
    assert (found["corpus_agree"], found["corpus_line_named"]) == (1.0, 0.5)
    assert corpus.table([corpus.as_data(missed)])[1].endswith("NOT NAMED")
    assert corpus.figures([])["corpus_agree"] == 0.0


def test_a_schedule_with_a_slip_is_off_its_formula() -> None:
    def twice(comm: Any, tensor: Any) -> None:
        schedules.ring_all_reduce(comm, tensor)
        schedules.ring_all_gather(comm, tensor.chunk(comm.world_size))

    right = {"ring": runs.FORMS["ring"]}
    errors = runs.closed_form_errors(right, (2, 3))
    assert max(errors.values()) <= 1e-9
    errors = runs.closed_form_errors({"ring": (twice, right["ring"][1])}, (2, 3))
    assert errors["ring, 2"] == pytest.approx(0.5)


def test_the_timed_runs_are_right_on_few_ranks() -> None:
    for simulate in (runs.ring_of_sizes, runs.ring_of_tensors):
        done = simulate(6)
        assert done.cpu_s > 0
        assert done.rel_err <= 1e-9
    assert runs.hierarchical_of_sizes(12, 4).rel_err <= 1e-9
    cpu_s, error = runs.stragglers(4, 20)
    assert cpu_s > 0
    assert error <= 1e-9


def test_a_ring_is_held_to_its_limit_pair_by_pair(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairs = iter([(0.1, 0.1), (4.0, 1.0), (0.1, 0.1), (9.0, 3.0), (1.0, 1.0)])

    def timed(_: int) -> runs.Timed:
        cpu_s, limit_s = next(pairs, (1.0, 1.0))
        return runs.Timed(cpu_s=cpu_s, rel_err=0.0, limit_s=limit_s)

    monkeypatch.setattr(runs, "ring_of_sizes", timed)
    monkeypatch.setattr(runs, "ring_of_tensors", timed)
    monkeypatch.setattr(
        runs, "hierarchical_of_sizes", lambda _: runs.Timed(cpu_s=1.0, rel_err=0.0)
    )
    found = {line["name"]: line for line in sim.large_runs(1)}
    assert found["ratio_ring_1024_size_over_limit"]["value"] == 4.0
    assert found["ratio_ring_1024_torch_over_limit"]["value"] == 3.0
    assert missed([*found.values()]) == [
        "ratio_ring_1024_size_over_limit",
        "ratio_ring_1024_torch_over_limit",
    ]
    assert "ratio_hier_4096_over_limit" not in found


def test_only_pairs_count_between_which_the_machine_was_calm() -> None:
    bare = iter([1.0, 1.05, 1.0, 2.0, 1.0, 1.0])
    cpu = iter([2.0, 9.0, 3.0])

    def simulate(_: int) -> runs.Timed:
        return runs.beside_limit(
            lambda: next(bare), lambda: runs.Timed(cpu_s=next(cpu), rel_err=0.0)
        )

    done = sim.calm_runs(simulate, 2, 2)
    assert [(one.cpu_s, one.limit_s) for one in done] == [(2.0, 1.025), (3.0, 1.0)]
    busy = iter([5.0, 4.0, 6.0, 7.0])
    never = runs.Timed(cpu_s=0.0, rel_err=0.0, limit_s=1.0, is_calm=False)
    (best,) = sim.calm_runs(lambda _: replace(never, cpu_s=next(busy)), 2, 1)
    assert best.cpu_s == 4.0
    lines = sim._over_limit("ring", [best])
    assert [line.get("note") for line in lines] == [None, sim.BUSY]


def test_a_run_off_its_formula_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = runs.Timed(cpu_s=1.0, rel_err=1e-3)
    monkeypatch.setattr(runs, "ring_of_sizes", lambda n: wrong)
    with pytest.raises(SystemExit, match="ring_1024_size_s"):
        sim.large_runs(1)


@pytest.mark.parametrize(
    ("name", "value", "is_missed"),
    [
        ("ratio_ring_1024_size_over_limit", 2.2, False),
        ("ratio_ring_1024_size_over_limit", 2.3, True),
        ("ring_1024_size_s", 90.0, False),  # shown, not barred
        ("closed_form_max_rel_err", 2e-9, True),
        ("corpus_agree", 0.99, True),
        ("corpus_line_named", 0.95, False),
        ("corpus_programs", 49, True),
        ("calibrated_mean_err", None, True),
        ("corpus_rank_in_sentence", 0.1, False),  # shown, not barred
    ],
)
def test_a_bar_that_is_missed_is_named(
    name: str, value: float | None, is_missed: bool
) -> None:
    figure = sim.result(name, value, note="why")
    assert missed([figure]) == [name] * is_missed
    (line,) = sim.BENCH.text([figure])
    assert line.endswith("MISSED") == is_missed
    assert ("null" in line) == (value is None)
    assert "why" in line


def test_only_sim_has_a_corpus() -> None:
    with pytest.raises(ValueError, match=r"\bhang\b.*\bcorpus\b"):
        bench("hang", corpus=True)
