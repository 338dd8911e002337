"""Random fault scripts find what is wrong with a service, and `shrink` says why."""

from __future__ import annotations

from functools import partial

import pytest

from distlab.sim import Faults, parse_faults, random_script, script_text, shrink
from distlab.sim.scripts import KINDS, faults_of
from tests.workbench import counter_service
from tests.workbench.counter_service import (
    HORIZON_S,
    RANKS,
    AcknowledgesFirst,
    Counter,
    TrustsTheTail,
    fails,
)

NUM_SCRIPTS = 1000


def drawn(seed: int) -> Faults:
    return random_script(seed, RANKS, HORIZON_S, services=("counter",))


# ── a service under a thousand of them ──────────────────────────────────────────────


def test_the_right_counter_survives_them_all() -> None:
    assert [seed for seed in range(NUM_SCRIPTS) if fails(Counter, drawn(seed))] == []


def test_acknowledging_first_is_found_and_shrunk() -> None:
    is_wrong = partial(fails, AcknowledgesFirst)
    script = next(
        script for script in map(drawn, range(NUM_SCRIPTS)) if is_wrong(script)
    )
    short = shrink(script, is_wrong)
    assert is_wrong(short)
    assert len(faults_of(short)) <= 3
    assert short.restart or short.torn
    assert is_wrong(parse_faults(script_text(short)))  # as it is typed
    assert not fails(Counter, short)


@pytest.mark.parametrize(
    "kind", counter_service.WRONG, ids=lambda kind: str(kind.__name__)
)
def test_every_wrong_counter_is_found(kind: type[Counter]) -> None:
    first = 169 if kind is TrustsTheTail else 0  # one of a few hundred
    scripts = map(drawn, range(first, NUM_SCRIPTS))
    script = next((script for script in scripts if fails(kind, script)), None)
    assert script
    assert len(faults_of(shrink(script, partial(fails, kind)))) <= 3


def test_a_run_under_a_script_is_the_same_again() -> None:
    for seed in range(20):
        one, other = (counter_service.counted(Counter, drawn(seed)) for _ in range(2))
        assert one.trace_hash == other.trace_hash
        assert one.struck == other.struck


# ── what is drawn ───────────────────────────────────────────────────────────────────


def test_scripts_are_theirs_of_their_seed_and_over_in_time() -> None:
    draw = partial(random_script, ranks=4, horizon_s=2.0, services=("ps", "store"))
    scripts = [draw(seed) for seed in range(300)]
    assert scripts == [draw(seed) for seed in range(300)]
    assert {fault.kind for script in scripts for fault in faults_of(script)} == {*KINDS}
    assert {len(faults_of(script)) for script in scripts} == {1, 2, 3, 4, 5, 6}
    for script in scripts:
        script.check(4, ("ps",))
        for fault in faults_of(script):
            times = fault.numbers if fault.kind not in ("straggler",) else ()
            assert all(0 <= number <= 2.0 for number in times)


def test_a_script_is_text_and_back() -> None:
    assert script_text(Faults(seed=3)) == ""
    for seed in range(300):
        script = random_script(
            seed, 4, 1e-3, services=("ps",), kinds=(*KINDS, "kill"), most=9
        )
        assert parse_faults(script_text(script)) == script


def test_what_cannot_be_drawn() -> None:
    for wrong in (
        partial(random_script, 0, 0, 1.0),
        partial(random_script, 0, 2, 0.0),
        partial(random_script, 0, 2, float("inf")),
        partial(random_script, 0, 2, 1.0, most=0),
        partial(random_script, 0, 2, 1.0, kinds=("meteor",)),
        partial(random_script, 0, 2, 1.0, kinds=()),
    ):
        with pytest.raises(ValueError, match="|".join(KINDS)):
            wrong()


# ── shrinking ───────────────────────────────────────────────────────────────────────

LONG = parse_faults(
    "restart=0@0.2512s-0.5121s,restart=1@0.123s-0.9s,freeze=2@0.1s-0.2s,loss=30%,"
    "partition=0+1+2@0.3125s-0.75s,kill=3@0.5s,straggler=1:4,late=2@0.25s,seed=8"
)


def test_only_what_matters_is_left() -> None:
    def needs_two(script: Faults) -> bool:
        return bool(script.kill) and any(node == 1 for node, *_ in script.restart)

    short = shrink(LONG, needs_two)
    assert script_text(short) == "kill=3@0.0s,restart=1@0.0s-0.9s,seed=8"


def test_nodes_and_numbers_become_simpler() -> None:
    def cuts_1_at_04(script: Faults) -> bool:
        cuts = script.partitions
        return any(1 in nodes and a > 0.3 and b > 0.4 for nodes, a, b in cuts)

    assert script_text(shrink(LONG, cuts_1_at_04)) == "partition=1@0.31s-0.8s,seed=8"


def test_each_fault_that_is_left_is_needed() -> None:
    def is_odd(script: Faults) -> bool:
        found = faults_of(script)
        return len(found) >= 3 and len(found) % 2 == len(faults_of(LONG)) % 2

    short = faults_of(shrink(LONG, is_odd))
    assert len(short) == 4


def test_a_script_is_tried_once_and_not_too_often() -> None:
    tried: list[str] = []

    def notes(script: Faults) -> bool:
        tried.append(script_text(script))
        return len(faults_of(script)) >= 2

    shrink(LONG, notes)
    assert len(tried) == len(set(tried))
    tried.clear()
    shrink(LONG, notes, most_runs=5)
    assert len(tried) == 5


def test_what_does_not_fail_is_not_shrunk() -> None:
    with pytest.raises(ValueError, match=r"\brestart=0@0\.2512s"):
        shrink(Faults(restart=((0, 0.2512, 0.5),)), lambda script: False)
    assert script_text(shrink(LONG, lambda script: True)) == ""
