"""The parameter server as processes that die, and in virtual time; the kit for both."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from distlab.comm import ServiceContext
from distlab.given.parameter_server import LOG, PULL, PUSH, pack_record
from distlab.grading.checks.parameter_server import exactly_once as once
from distlab.grading.checks.parameter_server.messages import CODEC, WATCHED, message
from distlab.grading.checks.parameter_server.stale_faults import Stale
from distlab.grading.kit.histories import (
    Compared,
    History,
    compared,
    first_by_clause,
    under,
)
from distlab.grading.kit.services import (
    Ask,
    Gone,
    Restart,
    Step,
    play_scripts,
    played_by_hand,
)
from distlab.grading.verdict import NotYetError
from distlab.runner import Cluster, Limits, Run
from distlab.sim import random_script
from distlab.sim.net.spec import parse_faults
from distlab.sim.scripts import faults_of
from solutions.phase3_multi_node import parameter_server as unit
from tests.workbench import parameter_servers as real


def run_real(cluster: Cluster, program: Any, *args: Any, **more: Any) -> Run:
    def obey(_rank: int, order: str) -> None:
        what, _, whom = order.partition(" ")
        getattr(cluster, what)(int(whom) if whom.isdigit() else whom)

    limits = Limits(seconds=60)
    return cluster.run(
        program, real.WORKERS, *args, limits=limits, on_report=obey, **more
    )


# ── on processes ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "orders",
    [[], ["restart server0", "restart server1"], ["freeze server1, thaw server1"]],
    ids=["no fault", "both killed", "one frozen"],
)
def test_servers_of_their_own_count_each_push_once(
    cluster: Cluster, orders: list[str]
) -> None:
    services = {
        name: (real.durable, server) for server, name in enumerate(real.SERVERS)
    }
    run = run_real(
        cluster, real.push_to_both, orders, services=services, may_die=real.SERVERS
    )
    assert run.outcome == "finished"
    total = float(real.WORKERS * real.NUM_PUSHES)
    expected = [[total] * sum(real.lengths_of(server)) for server in range(2)]
    assert run.values == [expected] * real.WORKERS


def test_a_killed_worker_does_not_hold_up_the_others(cluster: Cluster) -> None:
    services = {"server0": real.bounded}
    run = run_real(cluster, real.die_or_go_on, services=services, may_die=(1,))
    assert run.values[0] == run.values[2] == real.NUM_PUSHES


# ── in virtual time ─────────────────────────────────────────────────────────────────


def play(make: Any, count: int) -> dict[str, Any]:
    kinds = ("restart", "torn", "loss", "duplicate", "freeze", "partition", "straggler")
    scripts = (
        random_script(seed, once.RANKS, 1.0, services=("server",), kinds=kinds)
        for seed in range(count)
    )
    return play_scripts(
        make,
        once.worker,
        once.RANKS,
        scripts,
        CODEC,
        flaw=lambda r: not once.all_once(r),
    )


def test_hundreds_of_scripts_lose_and_double_nothing() -> None:
    record = play(once.maker(unit), 200)
    assert once.all_once(record)
    assert record["num_scripts"] == 200


class AcknowledgesFirst(unit.DurableServer):
    """Syncs what was appended before, and not what it appends."""

    def push(self, rank: int, number: int, gradient: torch.Tensor) -> None:
        if number > self.clocks[rank]:
            self.disk.sync(LOG)
            self.disk.append(LOG, pack_record(rank, number, gradient))
            self.apply(rank, number, gradient)


def test_a_planted_mistake_is_found_and_made_short() -> None:
    def make(context: ServiceContext) -> Any:
        weights = torch.zeros(3, dtype=torch.float64)
        return AcknowledgesFirst(
            weights, once.RANKS, once.STEP * once.RANKS, context.disk
        )

    record = play(make, 200)
    assert not once.all_once(record)
    script = parse_faults(record["script"])
    assert len(faults_of(script)) <= 3
    assert "restart" in {fault.kind for fault in faults_of(script)}
    assert re.search(r"\bserver\b", under(record))


# ── the kit ─────────────────────────────────────────────────────────────────────────


def test_a_history_has_what_the_service_met() -> None:
    def make(context: ServiceContext) -> Any:
        weights = torch.zeros(1, dtype=torch.float64)
        return unit.StaleServer(weights, 2, -2.0, 0)

    push = message(PUSH, 1, [1.0])
    steps: list[Step] = [Ask(0, push), Ask(0, message(PULL, 1)), Gone(1)]
    history = played_by_hand(make, steps, WATCHED)
    assert [row[1:] for row in history] == [
        [0, [PUSH, 1, [1.0]], "ok", [1.0]],
        [0, [PULL, 1, []], None, [1.0]],
        [1, "gone", None],
        [0, [PULL, 1, []], [1.0], [1.0]],
    ]

    def wrong(bound: int | None) -> list[Compared]:
        rows = compared(history, Stale(2, bound))
        return [one for one in rows if one.is_early_or_late]

    assert wrong(0) == []
    assert [one.place for one in wrong(None)] == [1]


def test_a_script_is_made_as_short_as_its_clause_allows() -> None:
    def faults(script: str, history: History) -> dict[str, NotYetError]:
        assert history == [[script]]
        found = {"C1": "aa" in script, "C2": "b" in script}
        return {name: NotYetError(name) for name, is_so in found.items() if is_so}

    def shorter(script: str) -> Iterator[str]:
        for place in range(len(script)):
            yield script[:place] + script[place + 1 :]

    scripts = ["xyz", "xaya", "xaay", "yb", "aab"]
    found = first_by_clause(scripts, lambda script: [[script]], faults, shorter)
    assert [script for script, _ in found] == ["aa", "b"]


def test_a_restart_by_hand_keeps_the_disk_only() -> None:
    push = message(PUSH, 1, [1.0, 1.0, 1.0])
    pull = Ask(1, message(PULL, 0))
    steps: list[Step] = [Ask(0, push), Restart(), Ask(0, push), pull]
    history = played_by_hand(once.maker(unit), steps, CODEC)
    assert history[-1][3] == [-once.STEP] * 3
    assert [row[2] for row in history].count("restarted") == 1


def test_the_error_of_a_service_is_raised_as_it_is() -> None:
    class Fails:
        def handle(self, peer: int, message: bytes) -> bytes:
            raise KeyError("momentum")

    with pytest.raises(KeyError, match="momentum"):
        played_by_hand(lambda _: Fails(), [Ask(0, message(PULL, 0))], CODEC)


def test_three_ways_to_wait() -> None:
    seconds = [5.0, *[1.0] * 7]
    in_step, bounded, free = (
        unit.clocks_after(bound, seconds, 60.0) for bound in (0, 3, None)
    )
    assert in_step == [12] * 8
    assert bounded == [12, *[15] * 7]
    assert free == [12, *[60] * 7]
