"""Judge tasks on ranks, clause by clause, and say whose part a mistake is."""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Callable, Iterable, Sequence

from distlab.curriculum import Curriculum, Task
from distlab.curriculum.regions import functions_of
from distlab.grading.beside import reference_of_latest
from distlab.grading.clause import Check, checks_of
from distlab.grading.harness import Implementation, RankHarness
from distlab.grading.liveness import in_order, suspects
from distlab.grading.parts import parts_used
from distlab.grading.preflight import PRELOADS, look_at
from distlab.grading.threads import one_thread
from distlab.grading.verdict import (
    ClauseVerdict,
    NotJudgedError,
    NotYetError,
    Report,
    TaskVerdict,
)
from distlab.grading.wishes import Asker, first_plays
from distlab.runner import Cluster, Limits, RunCancelledError, RunnerError


class Grader:
    """Judges tasks on one warm cluster, one after another."""

    def __init__(
        self,
        curriculum: Curriculum,
        cluster: Cluster,
        *,
        code: str = "mine",
        seed: int | None = None,
        worlds: Sequence[int] = (),
        first: str = "",
        on_first: Callable[[ClauseVerdict], None] = lambda _: None,
        on_step: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`first` is judged before the other clauses, and `on_first` hears of it.

        That changes when it is known, and nothing about the verdict. `on_step` hears
        which clause is judged at which number of ranks: "C2, n = 3".
        """
        self._curriculum = curriculum
        self._cluster = cluster
        self._code = code
        self._seed = secrets.randbelow(1_000_000) if seed is None else seed
        self._worlds = tuple(worlds)
        self._first, self._on_first, self._on_step = first, on_first, on_step

    def grade(
        self,
        tasks: Iterable[Task],
        on_verdict: Callable[[TaskVerdict], None] | None = None,
    ) -> Report:
        """Judge `tasks` in order; `on_verdict` is called after each."""
        verdicts = []
        for task in tasks:
            started = time.monotonic()
            verdict = self._judge(task)
            verdict.seconds = time.monotonic() - started
            verdicts.append(verdict)
            if on_verdict:
                on_verdict(verdict)
        return Report(code=self._code, seed=self._seed, tasks=verdicts)

    def _judge(self, task: Task) -> TaskVerdict:
        verdict, ready = look_at(self._curriculum, task, self._code)
        if ready is None:
            return verdict
        impl = Implementation(ready.source, ready.reference, ready.unfinished)
        return self._run(verdict, task, impl)

    def _run(
        self, verdict: TaskVerdict, task: Task, impl: Implementation
    ) -> TaskVerdict:
        benches: dict[int, RankHarness] = {}
        try:
            checks = f"distlab.grading.checks.{task.unit}"
            judges = (checks, "distlab.grading.liveness")
            self._cluster.warm(*judges, *PRELOADS.get(task.unit, ()))
            suspected = {}
            if not self._worlds:  # sizes that were asked for are all tried for real
                alone = self._bench(task, 1)
                suspected = suspects(self._cluster, task.id, impl, alone)

            @functools.cache
            def judge(index: int, check: Check) -> tuple[ClauseVerdict, bool]:
                worlds = in_order(self._world_sizes(check), suspected.get(index, ()))
                return self._clause(task, check, impl, benches, worlds)

            with one_thread():
                self._judge_clauses(verdict, task, judge)
        except RunnerError as error:
            verdict.status, verdict.message = "error", str(error)
            return verdict
        except RunCancelledError:
            raise
        except Exception as error:  # a check that did not foresee what it got
            verdict.status = "error"
            verdict.message = f"a check failed with {type(error).__name__}: {error}"
            return verdict
        verdict.world_sizes = tuple(sorted(benches))
        verdict.printed = sum(len(b.printed().splitlines()) for b in benches.values())
        failure = verdict.first_failure()
        verdict.status = "fail" if failure else "pass"
        if failure:
            verdict.message, verdict.slug = failure.message, failure.slug
        elif any(clause.status == "skip" for clause in verdict.clauses):
            # Left to another clause, and that one found nothing: never a pass.
            verdict.status, verdict.message = "error", "not every clause was judged"
        return verdict

    def _judge_clauses(
        self,
        verdict: TaskVerdict,
        task: Task,
        judge: Callable[[int, Check], tuple[ClauseVerdict, bool]],
    ) -> None:
        """All of them in order, until one ends it; `first` was judged before."""
        checks = list(enumerate(checks_of(task.id)))
        for index, check in checks:
            if check.clause == self._first:
                self._on_first(judge(index, check)[0])
        ended = False
        for index, check in checks:
            skipped = _clause(task, check, "skip")
            clause, ended = (skipped, True) if ended else judge(index, check)
            verdict.clauses.append(clause)

    def _clause(
        self,
        task: Task,
        check: Check,
        impl: Implementation,
        benches: dict[int, RankHarness],
        worlds: tuple[int, ...],
    ) -> tuple[ClauseVerdict, bool]:
        """One clause at its world sizes; and whether nothing more can be judged."""
        passed = _clause(task, check, "pass")
        for world_size in worlds:
            if world_size not in benches:
                benches[world_size] = self._planned(task, impl, world_size)
            bench = benches[world_size]
            bench.latest = None
            self._on_step(f"{check.clause}, n = {world_size}")
            try:
                note = _judged(check, impl, bench)
                if note and world_size > (passed.world_size or 0):
                    passed.note, passed.world_size = note, world_size
            except NotJudgedError:
                return _clause(task, check, "skip"), False
            except NotYetError as failure:
                if not failure.fatal and world_size not in self._world_sizes(check):
                    continue  # only a hang was suspected there, and it is none
                failed = _clause(task, check, "fail")
                _take_over(failed, failure, world_size)
                failed.output = failure.output or bench.printed()
                failed.run = bench.latest
                failed.reference_run = reference_of_latest(impl, bench)
                if failure.kind != "TIME":  # a second wait as long would teach nothing
                    part = self._whose_part(task, check, impl, bench)
                    failed.rule = part or failed.rule
                return failed, failure.fatal
        return passed, False

    def _world_sizes(self, check: Check) -> tuple[int, ...]:
        if not self._worlds:
            return check.worlds
        # A size that was asked for is tried even if it is not on the list, except a
        # single rank where the clause says nothing about one.
        return tuple(n for n in self._worlds if n > 1 or n in check.worlds)

    def _bench(self, task: Task, world_size: int) -> RankHarness:
        seconds = task.time_limit_s * max(1.0, world_size / 8)
        return RankHarness(
            self._cluster, world_size, self._seed, Limits(seconds=seconds)
        )

    def _planned(
        self, task: Task, impl: Implementation, world_size: int
    ) -> RankHarness:
        """A bench that plays together what the checks will want first."""
        bench = self._bench(task, world_size)
        asker = Asker(self._cluster, world_size, self._seed, bench.limits)
        checks = checks_of(task.id)
        bench.plan = first_plays(
            [c for c in checks if world_size in self._world_sizes(c)], impl, asker
        )
        return bench

    def _whose_part(
        self, task: Task, check: Check, impl: Implementation, bench: RankHarness
    ) -> str:
        """Say so if it passes with the reference's version of what the task builds on.

        A task that uses a sibling must not be blamed for the sibling's mistake. Nor the
        sibling for a mistake of the task: a part that passes its own checks is not the
        wrong one, even if the reference's version hides the mistake.
        """
        functions = functions_of(impl.reference.text)
        used = parts_used(impl.source.tree, task.id, functions)
        siblings = tuple(name for name in used if name not in impl.grafts)
        if not siblings or not _passes(check, impl.with_grafts(siblings), bench):
            return ""
        if len(siblings) > 1:
            alone = [(n,) for n in siblings]
            enough = [n for n in alone if _passes(check, impl.with_grafts(n), bench)]
            siblings = enough[0] if enough else siblings
        if all(self._is_sound(name, impl, bench) for name in siblings):
            return ""
        names = " and ".join(name.partition(".")[2] for name in siblings)
        return f"this part is right: it passes with the reference's {names}; fix yours"

    def _is_sound(self, name: str, impl: Implementation, bench: RankHarness) -> bool:
        """Whether a task passes its own checks, at one number of ranks each."""
        for check in checks_of(name):
            sizes = [n for n in check.worlds if n > 1] or list(check.worlds)
            world_size = bench.world_size if bench.world_size in sizes else sizes[-1]
            own = self._bench(self._curriculum.task(name), world_size)
            if not _passes(check, impl, own):
                return False
        return True


def _judged(check: Check, impl: Implementation, bench: RankHarness) -> str | None:
    """What the check says; a fault is one only if it shows without company too."""
    try:
        return check.judge(impl, bench)
    except NotYetError:
        if not bench.forget_company():
            raise
        return check.judge(impl, bench)


def _passes(check: Check, impl: Implementation, bench: RankHarness) -> bool:
    try:
        check.judge(impl, bench)
    except (NotYetError, NotJudgedError):
        return False
    return True


def _clause(task: Task, check: Check, status: str) -> ClauseVerdict:
    return ClauseVerdict(
        id=check.clause,
        text=task.clauses[check.clause],
        status=status,  # type: ignore[arg-type]
    )


def _take_over(failed: ClauseVerdict, failure: NotYetError, world_size: int) -> None:
    failed.world_size = world_size
    failed.message, failed.slug = failure.message, failure.slug
    failed.kind, failed.evidence = failure.kind, failure.evidence
    failed.rule = failure.rule
