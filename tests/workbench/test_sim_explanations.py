"""How the ends of simulated runs are worded; what they name is tested elsewhere."""

from __future__ import annotations

import re
from collections.abc import Callable

from distlab.sim import Faults, SimRun, run
from tests.workbench import test_sim, test_sim_faults, test_sim_knots, test_sim_ranks
from tests.workbench import test_sim_outages as outages
from tests.workbench import test_sim_own_services as own
from tests.workbench import test_sim_services as services
from tests.workbench.golden import Golden

RUNS: dict[str, Callable[[], SimRun]] = {
    "finished": lambda: run(test_sim.clock, 2),
    "a cycle": lambda: run(test_sim.ring_of_sends, 3),
    "a large cycle": lambda: run(test_sim.ring_of_sends, 64),
    "a knot": lambda: run(test_sim_knots.all_from_anyone, 4, False),
    "a way out of a knot": lambda: run(test_sim_knots.all_from_anyone, 4, True),
    "an error": lambda: run(test_sim_ranks.one_fails_then_another, 3),
    "in backward()": lambda: run(
        test_sim_ranks.sends_in_a_hook, 2, carrier="greenlets"
    ),
    "killed": lambda: run(
        test_sim_faults.counting, 2, 99, faults=Faults(kill={0: 0.0})
    ),
    "lost": lambda: run(test_sim_faults.counting, 2, 9, faults=Faults(loss=1.0)),
    "changed too early": lambda: run(
        test_sim_faults.changes_early, 2, True, eager_bytes=64
    ),
    "restarted": lambda: run(
        outages.lives_again, 2, faults=Faults(restart=((0, 0.25, 0.5),))
    ),
    "a key that never comes": lambda: run(services.waits_for_a_key, 2, None),
    "no integer": lambda: run(services.adds_to_a_word, 1),
    "nobody answers": lambda: run(services.nobody_serves, 2, 0),
    "no such rank": lambda: run(services.nobody_serves, 2, 5),
    "a service that never answers": lambda: run(
        own.waits_for_ps, 1, services={"ps": lambda context: own.Ticks()}
    ),
}


def test_explanations(golden: Golden) -> None:
    told = [f"{name}: {play().explanation}" for name, play in RUNS.items()]
    golden("sim/explanations", re.sub(r"\.py:\d+", ".py:<line>", "\n".join(told)))
