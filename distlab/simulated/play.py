"""A function on simulated ranks: what it is called with, and what is told of the run.

It all happens in a process of its own, because the code is a learner's: it may loop,
crash or leave. What comes back are figures; the picture is drawn there as well.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm import COLLECTIVES
from distlab.curriculum import load_graft
from distlab.curriculum.units import arrived
from distlab.runner import RankContext
from distlab.runner.rank import resolve
from distlab.sim import Piecewise, SimRun, run
from distlab.sim.calibration.charge import run_charged, uncharged
from distlab.sim.faults import Faults
from distlab.sim.net.nets import from_data
from distlab.sim.plans.members import Members
from distlab.sim.plans.schedules import ring_all_reduce
from distlab.simulated.results import (
    judged,
    left_word,
    own_numbers,
    unstruck,
)

MAX_PRINTED = 10  # lines, of rank 0
NODE_SIZE = 8  # of a network that has none
MAX_JOURNAL_RANKS = 128  # beyond that the picture is of messages, not of calls
TURN_LIMIT_S = 20.0  # of the wall clock, for one rank while no other has its turn
Settings = dict[str, Any]


def whole_count(num_bytes: int, n: int) -> int:
    """How many float32 a tensor has: n equal chunks, so that all shares are alike."""
    return max(1, num_bytes // 4 // n) * n


class Arguments:
    """What is put into a function's parameters on one rank, each by its name."""

    def __init__(
        self, context: RankContext, unit: ModuleType, function: str, settings: Settings
    ) -> None:
        self._context, self._unit, self._function = context, unit, function
        self._node_size = settings["net"].get("node_size", NODE_SIZE)
        n = context.world_size
        self._count = whole_count(settings["num_bytes"], n)
        self._seed = settings["seed"]
        self._generator = torch.Generator().manual_seed(
            self._seed * 7919 + context.rank
        )
        self._model: nn.Module | None = None

    def fill(self, function: Callable[..., Any]) -> dict[str, Any]:
        """The arguments of `function` that have no default of their own."""
        needed = [
            name
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.default is parameter.empty
        ]
        return {name: FILLED[name](self) for name in needed}

    def comm(self) -> Any:
        """The rank's communicator."""
        return self._context.comm

    def context(self) -> RankContext:
        """All that the rank has."""
        return self._context

    def own(self) -> Tensor:
        """Numbers that differ from rank to rank: whole ones, so that sums are exact."""
        size = self._count
        if self._function == "all_gather":
            size //= self._context.world_size  # of the whole result
        return own_numbers(self._seed, self._context.rank, size)

    def room(self) -> Tensor:
        """Zeros, as large as what will be received."""
        size = self._count
        if self._function == "reduce_scatter":
            size //= self._context.world_size
        return torch.zeros(size)

    def root(self) -> int:
        """The rank that has it."""
        return 0

    def number(self) -> int:
        """A small number that is not the same on all ranks."""
        return 1 + self._context.rank % 3

    def levels(self) -> Any:
        """The unit's Levels: the network's nodes, or nodes of 8 if it has none."""
        comm, k = self._context.comm, self._node_size
        n, rank = comm.world_size, comm.rank
        nodes = [range(start, min(start + k, n)) for start in range(0, n, k)]
        num_rails = len(nodes[-1])
        intra_node, rail = Members(comm, nodes[rank // k]), range(rank % k, n, k)
        inter_node = Members(comm, rail) if rank % k < num_rails else None
        return self._unit.Levels(intra_node, inter_node, num_rails)

    def all_reduce(self) -> Callable[[Any, Tensor], None]:
        """A ring."""
        return ring_all_reduce

    def model(self) -> nn.Module:
        """Two layers with as many numbers as were asked for, and gradients."""
        if self._model is None:
            width = max(1, self._count // (self.WIDTH + self.CLASSES + 1))
            layers = nn.Linear(self.WIDTH, width), nn.Linear(width, self.CLASSES)
            self._model = nn.Sequential(*layers)
            # Data parallel ranks begin with equal weights, unless that is to be made.
            differ = "broadcast" in self._function
            same = torch.Generator().manual_seed(self._seed)
            for parameter in self._model.parameters():
                source = self._generator if differ else same
                parameter.data = torch.randn(parameter.shape, generator=source)
                parameter.grad = torch.randn(
                    parameter.shape, generator=same if differ else self._generator
                )
        return self._model

    def optimizer(self) -> torch.optim.Optimizer:
        """Plain SGD of that model."""
        return torch.optim.SGD(self.model().parameters(), lr=0.01)

    def inputs(self) -> Tensor:
        """Eight samples for that model."""
        return torch.randn(8, self.WIDTH, generator=self._generator)

    def targets(self) -> Tensor:
        """Their classes."""
        return torch.randint(0, self.CLASSES, (8,), generator=self._generator)

    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Cross-entropy."""
        return nn.functional.cross_entropy

    WIDTH, CLASSES = 16, 4


FILLED: dict[str, Callable[[Arguments], Any]] = {
    "comm": Arguments.comm,
    "context": Arguments.context,
    **dict.fromkeys(("tensor", "input", "outgoing"), Arguments.own),
    **dict.fromkeys(("output", "incoming"), Arguments.room),
    **dict.fromkeys(("src", "dst", "root"), Arguments.root),
    "num_samples": Arguments.number,
    "levels": Arguments.levels,
    "all_reduce": Arguments.all_reduce,
    "model": Arguments.model,
    "optimizer": Arguments.optimizer,
    "loss_fn": Arguments.loss,
    "inputs": Arguments.inputs,
    "targets": Arguments.targets,
}
"""By a parameter's name: what is put there."""


def call_all(context: RankContext, unit: ModuleType, settings: Settings) -> list[str]:
    """Call the functions one after another; a digest of what each left behind."""
    digests = []
    for name in settings["functions"]:
        if ":" in name:  # not a function of the unit, but one that makes use of it
            digests.append(resolve(name)(context, unit, settings))
            continue
        function = unit
        for part in name.split("."):
            function = getattr(function, part)
        with uncharged(context.comm):
            arguments = Arguments(context, unit, name, settings).fill(function)  # type: ignore[arg-type]
        returned = function(**arguments)  # type: ignore[operator]
        with uncharged(context.comm):
            digests.append(left_word(name, arguments, returned))
    return digests


def simulate_target(context: RankContext, settings: Settings) -> dict[str, Any]:
    """The program of the process in which the ranks are simulated: figures of the run.

    With `settings["html"]` the page of the run is written there; with
    `settings["beside"]` the reference's run stands below it.
    """
    source, reference = arrived(settings["source"]), arrived(settings["reference"])
    sys.path.insert(0, str(source.path.parent))  # what lies beside a file is found
    started = time.perf_counter()
    done = _run(load_graft(source, reference, settings["grafts"]), settings)
    seconds = time.perf_counter() - started
    figures = {**figures_of(done, settings), "simulated_in_s": round(seconds, 3)}
    if settings["html"]:
        from distlab.trace import to_html

        beside = None
        if settings["beside"]:
            beside = _run(load_graft(reference, reference, ()), settings)
            figures["reference_s"] = beside.time_s
        path = Path(settings["html"])
        to_html(done, path, beside=beside, title=settings["title"])
    if settings["perfetto"]:
        from distlab.trace import to_perfetto

        to_perfetto(done, Path(settings["perfetto"]))
    return figures


def _run(unit: ModuleType, settings: Settings) -> SimRun:
    net = from_data(settings["net"])
    start: Callable[..., SimRun] = run
    if isinstance(net, Piecewise) and net.adding_s:  # of a machine that was calibrated
        start = partial(run_charged, operation_s=net.operation_s)
    return start(
        partial(call_all, unit=unit, settings=settings),
        settings["world_size"],
        net=net,
        faults=Faults(**settings["faults"]),
        seed=settings["seed"],
        journal=settings["world_size"] <= MAX_JOURNAL_RANKS,
        turn_limit_s=TURN_LIMIT_S,
    )


def figures_of(done: SimRun, settings: Settings) -> dict[str, Any]:
    """What a table says of a run, as plain data."""
    n, trace = done.world_size, done.trace
    sent, received = [0] * n, [0] * n
    for message in trace:
        sent[message.src] += message.num_bytes
        received[message.dst] += message.num_bytes
    at = [max(out, into) for out, into in zip(sent, received, strict=True)]
    count = whole_count(settings["num_bytes"], n)
    first = done.ranks[0]
    return {
        "world_size": n,
        "outcome": done.outcome,
        "explanation": done.explanation,
        "time_s": done.time_s,
        "messages": len(trace),
        "sent_bytes": sum(sent),
        "busiest_rank": at.index(max(at)),
        "busiest_bytes": max(at),
        "median_bytes": sorted(at)[n // 2],
        "num_bytes": 4 * count,
        "collectives": sum(call["op"] in COLLECTIVES for call in first.calls()),
        "printed": first.output.splitlines()[:MAX_PRINTED],
        **judged(settings["functions"], done.values, settings["seed"], count),
        "unstruck": unstruck(done, settings["faults"]),
        "carrier": done.carrier,
        "trace_hash": done.trace_hash,
    }
