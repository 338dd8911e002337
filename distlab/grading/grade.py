"""Judge tasks on ranks, clause by clause, and say whose part a mistake is."""

from __future__ import annotations

import functools
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from distlab.curriculum import Curriculum, Task
from distlab.curriculum.regions import functions_of
from distlab.grading.beside import reference_run
from distlab.grading.book.names import named
from distlab.grading.clause import (
    Check,
    checks_of,
    declared_runs,
    modules_of,
    planned_runs,
    sizes_of,
)
from distlab.grading.differential.observe import COMPILER
from distlab.grading.differential.standing import (
    OPERATIONS,
    first_fault,
    sizes_beside,
)
from distlab.grading.harness import Implementation, PlayedRuns
from distlab.grading.liveness import in_order, risky_sizes
from distlab.grading.local_rank import local_rank_used
from distlab.grading.parts import parts_beside
from distlab.grading.preflight import look_at
from distlab.grading.threads import one_thread
from distlab.grading.verdict import (
    STANDING,
    STANDING_ADVICE,
    ClauseStatus,
    ClauseVerdict,
    NotJudgedError,
    NotYetError,
    Report,
    TaskVerdict,
)
from distlab.runner import Cluster, Limits, RunCancelledError, RunnerError

# Imported before ranks are forked, so that no rank has to.
_IN_RANKS = (
    "distlab.grading.book.plays",
    "distlab.grading.liveness",
    "distlab.grading.virtual",
    "distlab.grading.differential.observe",
)


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
        on_played: Callable[[Task, Sequence[PlayedRuns]], None] = lambda *_: None,
    ) -> None:
        """`first` is judged before the other clauses, and `on_first` hears of it.

        That changes when it is known, and nothing about the verdict. `on_step` hears
        which clause is judged at which number of ranks: "C2, n = 3". `on_played` hears
        of the runs of a task that was judged, one entry per world size.
        """
        self._curriculum = curriculum
        self._cluster = cluster
        self._code = code
        self._seed = secrets.randbelow(1_000_000) if seed is None else seed
        self._worlds = tuple(worlds)
        self._first, self._on_first, self._on_step = first, on_first, on_step
        self._on_played = on_played
        self._unfulfilled: set[str] = set()  # clauses of the task that is judged

    def grade(
        self,
        tasks: Iterable[Task],
        on_verdict: Callable[[TaskVerdict], None] | None = None,
    ) -> Report:
        """Judge `tasks` in order; `on_verdict` is called after each."""
        verdicts = []
        for task in tasks:
            started = time.monotonic()
            verdict = self._judge_task(task)
            verdict = replace(verdict, seconds=time.monotonic() - started)
            verdicts.append(verdict)
            if on_verdict:
                on_verdict(verdict)
        return Report(code=self._code, seed=self._seed, tasks=verdicts)

    def _judge_task(self, task: Task) -> TaskVerdict:
        verdict, ready = look_at(self._curriculum, task, self._code)
        if ready is None:
            return verdict
        impl = Implementation(ready.source, ready.reference, ready.unfinished)
        return self._run(verdict, task, impl)

    def _run(
        self, verdict: TaskVerdict, task: Task, impl: Implementation
    ) -> TaskVerdict:
        played: dict[int, PlayedRuns] = {}
        self._unfulfilled.clear()
        try:
            self._cluster.warm(
                *self._curriculum.units[task.unit].preload,
                *modules_of(task.unit),
                *impl.reference.given,
                *_IN_RANKS,
            )
            risky = {}
            if not self._worlds:  # sizes that were asked for are all tried for real
                limits = self._limits(task, 1)
                risky = risky_sizes(self._cluster, task.id, impl, self._seed, limits)

            @functools.cache
            def judged(index: int, check: Check) -> tuple[ClauseVerdict, bool]:
                worlds = in_order(self._world_sizes(check), risky.get(index, ()))
                return self._judge_clause(task, check, impl, played, worlds)

            with one_thread():
                clauses = self._judged_clauses(task, judged)
                if all(clause.status == "pass" for clause in clauses):
                    clauses += tuple(self._standing(task, impl, played))
        except RunnerError as error:
            return replace(verdict, status="error", message=str(error))
        except RunCancelledError:
            raise
        except Exception as error:  # our own mistake
            message = f"the grader failed with {type(error).__name__}: {error}"
            return replace(verdict, status="error", message=message)
        self._on_played(task, tuple(played.values()))
        verdict = replace(
            verdict,
            ran=True,
            clauses=clauses,
            # Sizes that were asked for are named as they were.
            world_sizes=tuple(sorted(played))
            if self._worlds
            else sizes_of(task.id, played),
            printed=sum(len(r.printed().splitlines()) for r in played.values()),
        )
        failure = verdict.first_failure()
        if failure:
            message, slug = failure.message, failure.slug
            return replace(verdict, status="fail", message=message, slug=slug)
        if any(clause.status == "skip" for clause in clauses):
            # Left to another clause, and that one found nothing: never a pass.
            message = "not every clause was judged"
            return replace(verdict, status="error", message=message)
        return replace(verdict, status="pass")

    def _judged_clauses(
        self, task: Task, judged: Callable[[int, Check], tuple[ClauseVerdict, bool]]
    ) -> tuple[ClauseVerdict, ...]:
        """All of them in order, until one ends it; `first` was judged before."""
        checks = list(enumerate(checks_of(task.id)))
        for index, check in checks:
            if check.clause == self._first:
                self._on_first(judged(index, check)[0])
        clauses, ended = [], False
        for index, check in checks:
            skipped = _verdict_on(task, check, "skip")
            clause, ended = (skipped, True) if ended else judged(index, check)
            clauses.append(clause)
        return tuple(clauses)

    def _standing(
        self, task: Task, impl: Implementation, played: dict[int, PlayedRuns]
    ) -> Iterator[ClauseVerdict]:
        """The first of the standing clauses that is not fulfilled, if one is."""
        if self._worlds:  # a look at sizes of one's own choosing
            return
        # Ranks count operations once torch's compiler is imported. Another unit may
        # have had it imported: the verdict must not depend on that.
        if COMPILER not in self._curriculum.units[task.unit].preload:
            task = replace(task, excused={OPERATIONS: "not counted", **task.excused})
        for world_size in sizes_beside(task.id):
            self._on_step(f"beside the reference, n = {world_size}")
            runs = played.get(world_size) or self._planned(task, impl, world_size)
            runs.reads.clear()
            if fault := first_fault(task, runs):
                clause, failure = fault
                text = STANDING[clause]
                passed = ClauseVerdict(id=clause, text=text, status="pass")
                # At world size 1 one process may have played other numbers of ranks.
                is_played = sizes_of(task.id, [world_size]) != (world_size,)
                size = failure.played if is_played else world_size
                yield _failed(task, passed, failure, runs, size)
                return

    def _judge_clause(
        self,
        task: Task,
        check: Check,
        impl: Implementation,
        played: dict[int, PlayedRuns],
        worlds: tuple[int, ...],
    ) -> tuple[ClauseVerdict, bool]:
        """One clause at its world sizes; and whether nothing more can be judged."""
        passed = _verdict_on(task, check, "pass")
        for world_size in worlds:
            if world_size not in played:
                played[world_size] = self._planned(task, impl, world_size)
            runs = played[world_size]
            runs.reads.clear()
            sizes = ", ".join(map(str, check.sizes(world_size)))
            self._on_step(check.clause + f", n = {sizes}" * bool(sizes))
            try:
                try:
                    note = _said(check, runs)
                except (NotYetError, NotJudgedError):
                    if not runs.shared:
                        raise
                    # A fault is one only if it shows in a run by itself too.
                    runs = played[world_size] = runs.alone()
                    note = _said(check, runs)
                if note and world_size > (passed.world_size or 0):
                    passed = replace(passed, note=note, world_size=world_size)
            except NotJudgedError:
                return _verdict_on(task, check, "skip"), False
            except NotYetError as failure:
                failure = local_rank_used(check, runs) or failure
                if not failure.fatal and world_size not in self._world_sizes(check):
                    continue  # only a hang was suspected there, and it is none
                failure = self._named(check, runs, failure)
                part = ""
                if failure.kind != "TIME":  # a second wait as long would teach nothing
                    part = self._whose_part(task, check, runs)
                size = check.size_of(failure, world_size)
                failed = _failed(task, passed, failure, runs, size, part)
                return failed, failure.fatal
        return passed, False

    def _named(
        self, check: Check, runs: PlayedRuns, failure: NotYetError
    ) -> NotYetError:
        """The failure under the name that the book of mistakes has for it.

        Only the first clause that fails is at the head of a verdict.
        """
        if any(clause < check.clause for clause in self._unfulfilled):
            return failure
        self._unfulfilled.add(check.clause)
        return named(self._curriculum, check, runs, failure)

    def _world_sizes(self, check: Check) -> tuple[int, ...]:
        if not self._worlds:
            return check.worlds
        # A size that was asked for is tried even if it is not on the list, except a
        # single rank where the clause says nothing about one.
        return tuple(n for n in self._worlds if n > 1 or n in check.worlds)

    def _limits(self, task: Task, world_size: int) -> Limits:
        return Limits(seconds=task.time_limit_s * max(1.0, world_size / 8))

    def _planned(self, task: Task, impl: Implementation, world_size: int) -> PlayedRuns:
        """Runs that take those of all clauses together."""
        checks = checks_of(task.id)
        own = [check for check in checks if world_size in self._world_sizes(check)]
        limits = self._limits(task, world_size)
        plan = planned_runs(own, world_size)
        runs = PlayedRuns(self._cluster, impl, world_size, self._seed, limits, plan)
        runs.declared = declared_runs(task.id, world_size)
        return runs

    def _whose_part(self, task: Task, check: Check, runs: PlayedRuns) -> str:
        """Say so if it passes with the reference's version of what the task builds on.

        A task that uses a sibling must not be blamed for the sibling's mistake. Nor the
        sibling for a mistake of the task: a part that passes its own checks is not the
        wrong one, even if the reference's version hides the mistake.
        """
        impl = runs.impl
        functions = functions_of(impl.reference.text)
        used = parts_beside(impl.source.tree, task.id, task.needs, functions)
        siblings = tuple(name for name in used if name not in impl.grafts)

        def passes_with(names: tuple[str, ...]) -> bool:
            return _passes(check, runs.of(impl.with_grafts(names)))

        if not siblings or not passes_with(siblings):
            return ""
        if len(siblings) > 1:
            enough = [(name,) for name in siblings if passes_with((name,))]
            siblings = enough[0] if enough else siblings
        if all(self._is_sound(name, impl, runs.world_size) for name in siblings):
            return ""
        names = " and ".join(name.partition(".")[2] for name in siblings)
        return f"this part is right: it passes with the reference's {names}; fix yours"

    def _is_sound(self, name: str, impl: Implementation, near: int) -> bool:
        """Whether a task passes its own checks, at one number of ranks each."""
        task = self._curriculum.task(name)
        for check in checks_of(name):
            sizes = [n for n in check.worlds if n > 1] or list(check.worlds)
            world_size = near if near in sizes else sizes[-1]
            if not _passes(check, self._planned(task, impl, world_size)):
                return False
        return True


def _passes(check: Check, runs: PlayedRuns) -> bool:
    try:
        _said(check, runs)
    except (NotYetError, NotJudgedError):
        return False
    return True


def _said(check: Check, runs: PlayedRuns) -> str | None:
    """What the judge of a check says.

    Raises:
        RunnerError: it failed, which is our own mistake, or the ranks did.
    """
    try:
        return check.judge(runs)
    except (NotYetError, NotJudgedError, RunnerError, RunCancelledError):
        raise
    except Exception as error:
        where = f"the check of {check.clause} failed at n = {runs.world_size}"
        raise RunnerError(f"{where}: {type(error).__name__}: {error}") from error


def _verdict_on(task: Task, check: Check, status: ClauseStatus) -> ClauseVerdict:
    text = task.clauses[check.clause]
    return ClauseVerdict(id=check.clause, text=text, status=status)


def _failed(
    task: Task,
    passed: ClauseVerdict,
    failure: NotYetError,
    runs: PlayedRuns,
    size: int | None,
    part: str = "",
) -> ClauseVerdict:
    """The clause with its failure; with its advice where no known mistake fits."""
    spec, latest = runs.latest or (None, None)
    rule = part or failure.rule
    if not (rule or failure.slug):
        rule = {**STANDING_ADVICE, **task.advice}.get(passed.id, "")
    return passed.failed(
        failure,
        size,
        rule=rule,
        output=failure.output or runs.printed(),
        is_played=size != runs.world_size,
        run=latest,
        reference_run=functools.partial(reference_run, runs, spec) if spec else None,
    )
