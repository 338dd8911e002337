"""`distlab bench ps` must be able to fail: what is wrong is seen, on all its ways."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
import torch

from benchmarks import _ps_observer as observer
from benchmarks import _ps_real as real
from benchmarks import _ps_servers as servers
from benchmarks import _ps_sim as sim
from benchmarks import ps
from benchmarks._bars import missed
from benchmarks._ps_work import ACKED, FINAL, PULLED, STARTED, Plan, Row, gradient
from distlab.comm import ServiceContext
from distlab.sim import parse_faults
from distlab.sim.scripts import faults_of
from tests.workbench.golden import Golden

PLAN: Plan = {**sim.PLAN, "pushes": [3, 3, 3]}
BOUND = 1


def weights_at(*clocks: int) -> list[float]:
    """What a server has when each worker has made so many pushes."""
    pushes = [(rank, k) for rank, c in enumerate(clocks) for k in range(1, c + 1)]
    weights = torch.stack([gradient(PLAN, *push) for push in pushes]).sum(0)
    return list(weights.tolist())


def pulled(rank: int, time_s: float, *clocks: int) -> Row:
    return [PULLED, rank, 0, clocks[rank], time_s, weights_at(*clocks)]


def acked(*clocks: int) -> list[Row]:
    return [
        [ACKED, rank, 0, number, 0.5 * number, []]
        for rank, clock in enumerate(clocks)
        for number in range(1, clock + 1)
    ]


def final(*clocks: int) -> Row:
    return [FINAL, 0, 0, 3, 9.0, weights_at(*clocks)]


def numbers_in(sentence: str) -> list[int]:
    """Of a worker, a server, a push, and what was counted: in that order."""
    return [int(number) for number in re.findall(r"\d+", sentence)]


# ── the observer of clocks ──────────────────────────────────────────────────────────


def broken(rows: list[Row], killed: dict[int, float]) -> list[str]:
    return observer.violations(observer.leads(rows, PLAN, killed), BOUND)


def test_a_pull_too_far_ahead_is_a_violation() -> None:
    rows = [pulled(0, 1.0, 2, 1, 1), pulled(0, 2.0, 3, 1, 2)]
    (violation,) = broken(rows, {})
    assert numbers_in(violation) == [0, 0, 3, 2, 3, 1, 2]


def test_a_killed_worker_leaves_the_bound_and_not_before() -> None:
    rows = [pulled(0, 1.0, 3, 1, 2), pulled(0, 2.0, 3, 1, 2)]
    assert len(broken(rows, {1: 1.5})) == 1
    assert broken(rows, {1: 0.5}) == []
    assert len(broken(rows, {2: 0.5})) == 2  # worker 1 still counts


def test_a_worker_that_never_pushed_counts() -> None:
    assert len(broken([pulled(0, 1.0, 2, 2, 0)], {})) == 1


# ── the observer of pushes ──────────────────────────────────────────────────────────


def test_each_acknowledged_push_is_there_once() -> None:
    assert observer.miscounted([*acked(3, 2, 3), final(3, 2, 3)], PLAN, ()) == []


def test_a_lost_and_a_doubled_push_are_named() -> None:
    rows = [*acked(3, 3, 3), final(3, 2, 3)]
    weights = torch.tensor(rows[-1][5], dtype=torch.float64)
    rows[-1][5] = (weights + gradient(PLAN, 2, 3)).tolist()
    found = observer.miscounted(rows, PLAN, ())
    # push, worker, server, times
    assert list(map(numbers_in, found)) == [[3, 1, 0, 0], [3, 2, 0, 2]]


def test_the_push_of_a_killed_worker_that_was_under_way_may_be_there() -> None:
    rows = [*acked(3, 1, 3), final(3, 2, 3)]
    assert observer.miscounted(rows, PLAN, [1]) == []
    assert len(observer.miscounted(rows, PLAN, [])) == 1  # it lived: it was told
    assert len(observer.miscounted([*acked(3, 1, 3), final(3, 3, 3)], PLAN, [1])) == 1


def test_weights_that_no_pushes_give_and_none_at_all(golden: Golden) -> None:
    rows = [*acked(1, 1, 1), final(1, 1, 1)]
    rows[-1][5][0] += 0.5
    both = [*acked(1, 1, 1), final(1, 1, 1), final(1, 1, 0)]
    found = [observer.miscounted(given, PLAN, ()) for given in (rows, rows[:-1], both)]
    assert all(found)
    golden("bench/ps_weights", "\n".join(flaws[0] for flaws in found))


def test_who_did_not_come_to_the_end_and_how_fast_the_others_were() -> None:
    rows = [[STARTED, rank, -1, 0, 0.0, []] for rank in range(3)]
    rows += [*acked(3, 3, 1), pulled(0, 2.0, 3, 3, 1), pulled(1, 2.0, 3, 3, 1)]
    assert observer.unfinished(rows, PLAN, ()) == [2]
    assert observer.unfinished(rows, PLAN, [2]) == []
    assert observer.rate(rows, (0, 1), PLAN) == pytest.approx(2 * 3 / 1.5)
    with pytest.raises(ValueError, match=r"\[2\]"):
        observer.rate(rows, (0, 2), PLAN)
    assert observer.longest_pause_s(rows, (0,)) == pytest.approx(0.5)


# ── in virtual time ─────────────────────────────────────────────────────────────────


def knows_no_bound(context: ServiceContext, plan: Plan) -> Any:
    return servers.bounded(context, {**plan, "bound": None})


class Forgets(servers.BoundedServer):
    """Its log has no departures, and no lease ends."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.ended, self.unheard = set(), set()


def forgets(context: ServiceContext, plan: Plan) -> Any:
    right = servers.bounded(context, plan)
    weights, n = 0 * right.weights, right.num_workers
    return Forgets(weights, n, -float(n), context.disk, plan["bound"], 8.0)


def test_the_servers_are_right_under_scripts() -> None:
    for make, deadly in ((servers.durable, False), (servers.bounded, True)):
        seen = sim.play_random_scripts(15, make, deadly=deadly)
        assert (seen.num_scripts, seen.failures) == (15, [])


def test_wrong_servers_fail_under_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim, "WALL_LIMIT_S", 0.5)
    ahead = sim.play_random_scripts(5, knows_no_bound, deadly=True).failures
    assert numbers_in(ahead[0])[-4] > BOUND  # ahead, and then three clocks
    lost = sim.flaw(
        servers.acknowledges_first,
        parse_faults("restart=server@0.99s-1.0s,seed=36"),
        None,
    )
    assert numbers_in(lost)[-1] == 0  # times
    stuck = parse_faults("kill=1@0.1s,restart=server@0.5s-0.6s")
    assert sim.flaw(servers.bounded, stuck, BOUND) == ""
    assert sim.flaw(forgets, stuck, BOUND)


def test_scripts_spare_who_reads_the_weights() -> None:
    drawn = sim.scripts(deadly=True)
    for script in (next(drawn) for _ in range(300)):
        assert faults_of(script)
        assert len(script.kill) < sim.WORKERS
        assert sim.SERVER not in script.kill
        assert {one[0] for one in (*script.restart, *script.torn)} <= {sim.SERVER}


def test_the_planted_mistake_is_found_and_made_short() -> None:
    planted = sim.planted(200)
    assert planted["is_found"]
    assert 1 <= planted["faults"] <= 3
    assert "server" in planted["sentence"]


# ── the report ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "value", "is_missed"),
    [
        ("healthy_throughput_share", 0.9, False),
        ("healthy_throughput_share", 0.89, True),
        ("ssp_violations", 1, True),
        ("lost_or_double_pushes", 1, True),
        ("unfinished_runs", 1, True),
        ("leftover_processes", 1, True),
        ("sim_scripts", 999, True),
        ("sim_failures", 1, True),
        ("planted_found", 0, True),
        ("planted_shrunk_faults", 3, False),
        ("planted_shrunk_faults", 4, True),
        ("bad_frames", 99_999, True),
        ("bad_frames_accepted", 1, True),
        ("held_by_frozen_s", 99.0, False),  # shown, not barred
    ],
)
def test_a_bar_that_is_missed_is_named(
    name: str, value: float, is_missed: bool
) -> None:
    line = ps.result(name, value)
    assert missed([line]) == [name] * is_missed
    assert ps.BENCH.text([line])[0].endswith("MISSED") == is_missed


def test_a_share_meets_its_bar_with_its_lower_bound() -> None:
    tally = ps.Tally(pairs={"ssp": [[(8.0, 8.0)]] * 5, "asynchronous": []})
    assert missed(ps.of_processes(tally)) == ["healthy_throughput_share"]
    tally.pairs["asynchronous"] = [[(share, 1.0)] for share in (0.8, 0.8, 1, 1, 1)]
    worst = ps.of_processes(tally)[0]
    assert (worst["note"], worst["value"], worst["met"]) == ("asynchronous", 1.0, False)
    assert worst["lower"] < 0.9


# ── on processes ────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_a_small_measurement_prints_every_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(real, "ASYNC_S", 0.02)
    monkeypatch.setattr(real, "SSP_S", 0.02)
    monkeypatch.setattr(ps, "HELD_S", 0.2)
    for name in ("ASYNC_PUSHES", "SSP_PUSHES", "HELD_PUSHES"):
        monkeypatch.setattr(ps, name, 8)
    few = ["--pairs", "1", "--scripts", "40", "--frames", "40", "--json"]
    monkeypatch.setattr(sys, "argv", ["ps.py", *few])
    assert ps.BENCH.main(ps.measure, pairs=1, scripts=1, frames=1) == 1
    report = json.loads(capsys.readouterr().out)
    found = {line["name"]: line for line in report["results"]}
    not_met = {name for name, line in found.items() if not line.get("met", True)}
    # How fast it is on a busy machine is not this test's business.
    speed = {"healthy_throughput_share", "planted_found"}
    assert not_met - speed == {"sim_scripts", "bad_frames"}
    assert found["runs"]["value"] == 5
    assert found["server_restarts"]["value"] == 8
    assert found["ssp_largest_lead"]["value"] == real.BOUND
