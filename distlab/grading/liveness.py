"""The first judge of hangs: a task's own checks, played in the simulator's kernel.

A real run takes a tenth of a second per world size, so only a few sizes are tried; and
a hang there is known only after the ranks have been looked at twice. In the kernel a
run takes milliseconds, and nobody runnable with nothing pending is a deadlock, for
certain. So every check of a point-to-point unit is first played there at 1 to 8 ranks,
and a size at which a run does not come to its end is then judged first on real ranks.

The kernel only suspects. Its ranks share one process: a module's globals, the
environment and the order in which ranks run are not those of real ranks, and code that
needs threads or waits for the wall clock does not run there at all. So the verdict is
always that of real ranks, and where these disagree they are right.

The code under judgement runs in a process of its own here too.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor

from distlab.comm import PointToPointOnly
from distlab.curriculum import load_graft
from distlab.curriculum.units import arrived, travelling
from distlab.grading.clause import Check, checks_of
from distlab.grading.guard import install
from distlab.grading.harness import (
    POINT_TO_POINT_UNITS,
    Implementation,
    RankHarness,
    needed_reference,
    off_limits,
)
from distlab.grading.together import Scenario, play_of
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import Cluster, Limits, RankContext, Run
from distlab.sim import run as simulate

SIZES = range(1, 9)
PATIENCE_S = 3.0  # for all sizes together: what takes longer is left to real ranks

Suspects = dict[int, list[int]]
"""By the index of a check among its task's: the world sizes to look at."""


@dataclass
class KernelBench(RankHarness):
    """Ranks of the kernel, for checks that expect a bench.

    `modules` has the unit as it was loaded, by its grafts, for all benches of a task.
    """

    modules: dict[tuple[str, ...], ModuleType] = field(default_factory=dict)

    def observe(self, impl: Implementation, scenario: Scenario, **values: Any) -> Run:
        """The run, however it ended."""
        key = (play_of(scenario, values), impl.grafts)
        if key not in self._runs:
            if impl.grafts not in self.modules:
                loaded = load_graft(impl.source, impl.reference, impl.grafts)
                self.modules[impl.grafts] = loaded
            module = self.modules[impl.grafts]
            program = partial(
                perform_simulated, module, scenario, {"seed": self.seed, **values}
            )
            self._runs[key] = simulate(
                program, self.world_size, seed=self.seed, limits=self.limits
            )
        return self._runs[key]


def suspects(
    cluster: Cluster, task_id: str, impl: Implementation, bench: RankHarness
) -> Suspects:
    """The checks of a task that do not come to their end in the kernel, and where.

    Nothing is suspected of code that the kernel cannot run, or not in time.

    Raises:
        RunnerError: the ranks could not be started.
    """
    found: Suspects = {}
    if impl.source.unit not in POINT_TO_POINT_UNITS:
        return found
    if all(check.worlds == (1,) for check in checks_of(task_id)):
        return found  # a plan: a rank by itself has nobody to wait for

    def note(_rank: int, told: Any) -> None:
        if _is_suspicion(told):
            found.setdefault(told[0], []).append(told[1])

    cluster.run(
        play,
        1,
        travelling(impl.source),
        needed_reference(impl),
        list(impl.grafts),
        task_id,
        {"seed": bench.seed, "seconds": bench.limits.seconds},
        off_limits(impl),
        limits=replace(bench.limits, seconds=min(PATIENCE_S, bench.limits.seconds)),
        on_report=note,
        seed=bench.seed,
        journal=False,
    )
    return found


def _is_suspicion(told: Any) -> bool:
    """Whether it is ours: the code under judgement can write on this line too."""
    if not isinstance(told, list) or [type(part) for part in told] != [int, int]:
        return False
    return told[1] in SIZES


def in_order(worlds: tuple[int, ...], suspected: Sequence[int]) -> tuple[int, ...]:
    """The world sizes of a check, with those in front at which it may not end.

    Of sizes that the check itself does not try, one is enough.
    """
    known = [n for n in worlds if n in suspected]
    extra = [] if known else [n for n in suspected[:1] if n not in worlds]
    return (*known, *extra, *(n for n in worlds if n not in known))


def play(
    context: RankContext,
    source: dict[str, str],
    reference: dict[str, str],
    grafts: list[str],
    task_id: str,
    settings: dict[str, Any],
    protected: dict[str, list[str]],
) -> None:
    """In a process of its own: play the checks at these sizes; report suspicions."""
    install(**protected)
    impl = Implementation(arrived(source), arrived(reference), tuple(grafts))
    limits = Limits(seconds=settings["seconds"])
    nobody: Any = None  # no cluster: this process has its ranks in it
    modules: dict[tuple[str, ...], ModuleType] = {}
    benches = {
        n: KernelBench(nobody, n, settings["seed"], limits, modules=modules)
        for n in SIZES
    }
    for index, check in enumerate(checks_of(task_id)):
        for n in _sizes_for(check):
            failure = _failure(check, impl, benches[n])
            if failure and failure.fatal:
                context.report([index, n])
            if failure and (failure.fatal or n in check.worlds):
                break  # where the check itself fails first, there it is to fail


def _sizes_for(check: Check) -> list[int]:
    """The check's own world sizes in its order, then those it does not try for real.

    The first that fails is then the one at which the check by itself would have failed.
    """
    own = [n for n in check.worlds if n in SIZES]
    return own + [n for n in SIZES if n > 1 and n not in own]


def _failure(
    check: Check, impl: Implementation, bench: RankHarness
) -> NotYetError | None:
    """What the check says; fatal if a run failed, and otherwise not our concern."""
    try:
        check.judge(impl, bench)
    except NotYetError as failure:
        return failure
    except NotJudgedError:
        return None
    except Exception:  # a check that knows only the sizes it asked for
        return None
    return None


def perform_simulated(
    module: ModuleType,
    scenario: Scenario,
    values: dict[str, Any],
    context: RankContext,
) -> Any:
    """On each simulated rank: a module of its own, the comm that its unit has."""
    building = POINT_TO_POINT_UNITS.get(module.__name__.rpartition(".")[2])
    if building:
        guarded = PointToPointOnly(context.comm, building=building)
        context = replace(context, comm=guarded)
    return scenario(context, _twin(module), **values)


def _twin(module: ModuleType) -> ModuleType:
    """A copy with globals of its own, as each real rank has them.

    Loading it once more would cost ten times as much. Classes stay shared.
    """
    twin = ModuleType(module.__name__)
    scope = vars(twin)
    for name, value in vars(module).items():
        if isinstance(value, FunctionType) and value.__globals__ is vars(module):
            own = FunctionType(value.__code__, scope, name, None, value.__closure__)
            own.__defaults__ = copy.deepcopy(value.__defaults__)
            own.__kwdefaults__ = copy.deepcopy(value.__kwdefaults__)
            scope[name] = own
        elif isinstance(value, list | dict | set | Tensor) and name[:2] != "__":
            scope[name] = copy.deepcopy(value)
        else:
            scope[name] = value
    return twin
