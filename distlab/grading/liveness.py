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

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

from distlab.curriculum import load_graft
from distlab.curriculum.compiled import received
from distlab.grading.clause import Check, checks_of
from distlab.grading.guard import install
from distlab.grading.harness import Implementation, code_of, off_limits
from distlab.grading.kernel import perform_simulated
from distlab.grading.runs import (
    Records,
    Runs,
    RunSpec,
    UndeclaredRunError,
)
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import Cluster, Limits, RankContext, Run
from distlab.sim import run as simulate

SIZES = range(1, 9)
PATIENCE_S = 3.0  # for all sizes together: what takes longer is left to real ranks

RiskySizes = dict[int, list[int]]
"""By the index of a check among its task's: the world sizes to look at."""


class KernelRuns(Runs):
    """Runs on ranks of the kernel; `module` is the unit as it was loaded."""

    def __init__(
        self,
        impl: Implementation,
        module: ModuleType,
        world_size: int,
        seed: int,
        limits: Limits,
    ) -> None:
        super().__init__(impl.source, world_size, seed)
        self._module, self._limits = module, limits
        self._records: Records = {}

    def read(self, spec: RunSpec) -> Run:
        """The record of a run, however it ended.

        Raises:
            UndeclaredRunError: it is in virtual time, or starts a program: neither is
                looked at here.
        """
        if not spec.is_on_ranks:
            raise UndeclaredRunError("not on ranks: nothing to look at here")
        if spec not in self._records:
            values = {"seed": self.seed, **dict(spec.values)}
            self._records[spec] = simulate(
                partial(
                    perform_simulated,
                    self._module,
                    spec.scenario,
                    values,
                    self.source.builds,
                ),
                self.world_size,
                seed=self.seed,
                limits=self._limits,
            )
        return self._records[spec]


def risky_sizes(
    cluster: Cluster, task_id: str, impl: Implementation, seed: int, limits: Limits
) -> RiskySizes:
    """The checks of a task that do not come to their end in the kernel, and where.

    Nothing is suspected of code that the kernel cannot run, or not in time.

    Raises:
        RunnerError: the ranks could not be started.
    """
    found: RiskySizes = {}
    if not impl.source.builds:
        return found
    if all(check.worlds == (1,) for check in checks_of(task_id)):
        return found  # a plan: a rank by itself has nobody to wait for

    def note(_rank: int, told: Any) -> None:
        if _is_suspicion(told):
            found.setdefault(told[0], []).append(told[1])

    cluster.run(
        play_checks,
        1,
        *code_of(impl),
        task_id,
        {"seed": seed, "seconds": limits.seconds},
        off_limits(impl),
        limits=replace(limits, seconds=min(PATIENCE_S, limits.seconds)),
        on_report=note,
        seed=seed,
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


def play_checks(
    context: RankContext,
    source: dict[str, str],
    reference: dict[str, str],
    grafts: list[str],
    task_id: str,
    settings: dict[str, Any],
    protected: dict[str, list[str]],
) -> None:
    """In a process of its own: play the checks at these sizes; report suspicions."""
    install(**protected, doors=())
    impl = Implementation(received(source), received(reference), tuple(grafts))
    limits = Limits(seconds=settings["seconds"])
    module = load_graft(impl.source, impl.reference, impl.grafts)
    runs = {n: KernelRuns(impl, module, n, settings["seed"], limits) for n in SIZES}
    for index, check in enumerate(checks_of(task_id)):
        for n in _sizes_for(check):
            failure = _failure(check, runs[n])
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


def _failure(check: Check, runs: Runs) -> NotYetError | None:
    """What the check says; fatal if a run failed, and otherwise not our concern."""
    try:
        check.judge(runs)
    except NotYetError as failure:
        return failure
    except NotJudgedError:
        return None
    except Exception:  # a check that knows only the sizes it asked for
        return None
    return None
