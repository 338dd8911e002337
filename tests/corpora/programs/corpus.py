"""All the programs of the corpus, and how they are run on each transport."""

from __future__ import annotations

from functools import partial

from distlab.runner import Cluster, Limits, Run
from distlab.sim import run as simulate
from tests.corpora.programs import (
    absent,
    groups,
    hangs,
    library,
    messages,
    own_collectives,
    training,
)
from tests.corpora.programs.case import Case, cases_of
from tests.corpora.programs.judge import Runner

MODULES = (messages, own_collectives, library, absent, groups, training, hangs)
CASES = cases_of(*MODULES)
TRANSPORTS = ("gloo", "tcp", "sim")
LIMITS = Limits(seconds=20)


def on_sim(case: Case) -> Run:
    """Run a program in the simulator, in this process."""
    return simulate(case.program, case.world_size, limits=LIMITS)


def on_ranks(cluster: Cluster, backend: str, case: Case) -> Run:
    """Run a program on real processes."""
    return cluster.run(case.program, case.world_size, limits=LIMITS, backend=backend)


def transports(cluster: Cluster) -> dict[str, Runner]:
    """Every transport by its name; the first one is the law."""
    real = {name: partial(on_ranks, cluster, name) for name in TRANSPORTS[:-1]}
    return {**real, "sim": on_sim}
