"""The servers of `benchmarks/ps.py` in virtual time, under scripts of faults.

Half of the scripts are for `durable`: server and workers restarted, writes torn, all
messages lost or doubled, nodes frozen, cut off and slow. Half are for `bounded`, where
workers are killed for good, and only the server is restarted: a worker that begins anew
has lost its clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks import _ps_observer as observer
from benchmarks._ps_servers import acknowledges_first
from benchmarks._ps_work import Plan, Row, work
from distlab.comm import Factory
from distlab.grading.kit.histories import under
from distlab.grading.kit.services import Codec, play_scripts
from distlab.runner import RankContext, RunnerError
from distlab.sim import AlphaBeta, Faults, parse_faults, random_script, run, script_text
from distlab.sim.scripts import faults_of

SERVER = "server"
WORKERS, PUSHES, BOUND = 3, 4, 1
HORIZON_S = 1.0
NET = AlphaBeta(alpha_s=1e-3, bytes_per_s=1e9)
WALL_LIMIT_S = 20.0
PLAN: Plan = {
    "servers": [SERVER],
    "seconds": [HORIZON_S / PUSHES] * WORKERS,
    "pushes": [PUSHES] * WORKERS,
    "patience_s": 0.05,
    "dies": [],
    "end_s": 40 * HORIZON_S,
    "bound": BOUND,
    "lease_s": 8 * HORIZON_S,  # the slowest worker needs 4 for a gradient
}
HARMLESS = ("restart", "torn", "loss", "duplicate", "freeze", "partition", "straggler")
DEADLY = (*HARMLESS, "late", "kill", "kill")
CODEC = Codec(lambda message: message[0], len)  # nobody reads the history here
Make = Callable[..., Any]


@dataclass
class Simulated:
    """What came of many scripts."""

    num_scripts: int = 0
    failures: list[str] = field(default_factory=list)  # each with its script


def without_rank_restarts(script: Faults) -> Faults:
    """Only ranks are killed for good, and only the server is restarted."""
    return replace(
        script,
        kill={node: at for node, at in script.kill.items() if node != SERVER},
        restart=tuple(one for one in script.restart if one[0] == SERVER),
        torn=tuple(one for one in script.torn if one[0] == SERVER),
    )


def scripts(*, deadly: bool, seed: int = 0) -> Iterator[Faults]:
    """Without an end; each has at least one fault."""
    for number in itertools.count(seed):
        kinds = DEADLY if deadly else HARMLESS
        script = random_script(
            number, WORKERS, HORIZON_S, services=(SERVER,), kinds=kinds
        )
        script = without_rank_restarts(script) if deadly else script
        # Somebody must be left to read the weights at the end.
        if faults_of(script) and len(script.kill) < WORKERS:
            yield script


def flaw(make: Make, script: Faults, bound: int | None) -> str:
    """What is wrong in the run under this script; nothing if all is right."""
    rows: list[Row] = []
    services: dict[str, Factory] = {SERVER: lambda context: make(context, PLAN)}
    try:
        done = run(
            lambda context: work(context, PLAN, rows.append),
            WORKERS,
            net=NET,
            faults=script,
            services=services,
            journal=False,
            trace=False,
            wall_limit_s=WALL_LIMIT_S,
        )
    except RunnerError as error:
        return str(error)
    killed = {node: at for node, at in script.kill.items() if isinstance(node, int)}
    if late := observer.unfinished(rows, PLAN, killed):
        return f"workers {late} did not come to their end: {done.explanation}"
    wrong = observer.miscounted(rows, PLAN, killed)
    if bound is not None:
        wrong += observer.violations(observer.leads(rows, PLAN, killed), bound)
    return wrong[0] if wrong else ""


def play_random_scripts(num_scripts: int, make: Make, *, deadly: bool) -> Simulated:
    """The server under so many scripts."""
    seen = Simulated()
    bound = BOUND if deadly else None
    for script in itertools.islice(scripts(deadly=deadly), num_scripts):
        seen.num_scripts += 1
        if wrong := flaw(make, script, bound):
            seen.failures.append(f"{script_text(script)}: {wrong}")
    return seen


def planted(most_scripts: int) -> dict[str, Any]:
    """A server that acknowledges first: the script that shows it, made short.

    Worked out by the kit that judges learners' servers.
    """

    def program(context: RankContext) -> list[Row]:
        rows: list[Row] = []
        work(context, PLAN, rows.append)
        return rows

    def wrong(record: dict[str, Any]) -> list[str]:
        rows = [row for own in record["values"] for row in own or ()]
        return observer.miscounted(rows, PLAN, ())

    record = play_scripts(
        lambda context: acknowledges_first(context, PLAN),
        program,
        WORKERS,
        itertools.islice(scripts(deadly=False), most_scripts),
        CODEC,
        flaw=wrong,
    )
    found = wrong(record)
    return {
        "is_found": bool(found),
        "scripts": record["num_scripts"],
        "script": record["script"],
        "faults": len(faults_of(parse_faults(record["script"]))) if found else 0,
        "sentence": f"{under(record)}{found[0]}" if found else "",
    }
