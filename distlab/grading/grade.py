"""Judge tasks: not started, renamed, broken, wrong or right, and whose part it is."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from distlab.curriculum import Curriculum, SourceError, Task, read_source
from distlab.curriculum.regions import functions_of
from distlab.grading.bench import Bench, Implementation
from distlab.grading.clause import Check, checks_of
from distlab.grading.verdict import ClauseVerdict, NotYetError, Report, TaskVerdict
from distlab.runner import Cluster, Limits, RunnerError

PRELOADS = {"trainer": ("torch._dynamo",)}
"""What each rank would import by itself: constructing an optimiser needs dynamo."""


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
    ) -> None:
        self._curriculum = curriculum
        self._cluster = cluster
        self._code = code
        self._seed = secrets.randbelow(1_000_000) if seed is None else seed
        self._worlds = tuple(worlds)

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

    # ── before anything runs ────────────────────────────────────────────────────────

    def _judge(self, task: Task) -> TaskVerdict:
        unit = self._curriculum.units[task.unit]
        verdict = TaskVerdict(
            id=task.id,
            number=task.number,
            title=task.title,
            status="fail",
            path=shown(unit.template(self._curriculum.root)),
            digest="",
        )
        try:
            reference = read_source(self._curriculum, unit, "reference")
            functions = functions_of(reference.text)
        except (SourceError, ValueError) as error:
            verdict.status = "error"
            verdict.message = f"the reference of {unit.name} is unusable: {error}"
            return verdict
        try:
            source = read_source(self._curriculum, unit, self._code)
            verdict.path, verdict.digest = shown(source.path), source.digest
            states = {t.id: source.state_of(t.id, functions[t.id]) for t in unit.tasks}
        except SourceError as error:
            return _fail_all(verdict, task, *_broken(error))
        state, verdict.line = states[task.id]
        if state == "not_started":
            verdict.status, verdict.slug = "not_started", "not-started"
            verdict.message = (
                f"{verdict.path}:{verdict.line} still raises NotImplementedError"
            )
            return verdict
        if state == "missing":
            message = (
                f"{verdict.path} has no function {functions[task.id]}: "
                "it was renamed or removed"
            )
            return _fail_all(verdict, task, message, "renamed")
        unfinished = [name for name, (how, _) in states.items() if how != "started"]
        impl = Implementation(source, reference, tuple(sorted(unfinished)))
        return self._run(verdict, task, impl)

    # ── on ranks ────────────────────────────────────────────────────────────────────

    def _run(
        self, verdict: TaskVerdict, task: Task, impl: Implementation
    ) -> TaskVerdict:
        benches: dict[int, Bench] = {}
        ended = False
        try:
            self._cluster.warm(*PRELOADS.get(task.unit, ()))
            for check in checks_of(task.id):
                if ended:
                    verdict.clauses.append(_clause(task, check, "skip"))
                    continue
                clause, ended = self._clause(task, check, impl, benches)
                verdict.clauses.append(clause)
        except RunnerError as error:
            verdict.status, verdict.message = "error", str(error)
            return verdict
        verdict.world_sizes = tuple(sorted(benches))
        failure = verdict.first_failure()
        verdict.status = "fail" if failure else "pass"
        if failure:
            verdict.message, verdict.slug = failure.message, failure.slug
        return verdict

    def _clause(
        self,
        task: Task,
        check: Check,
        impl: Implementation,
        benches: dict[int, Bench],
    ) -> tuple[ClauseVerdict, bool]:
        """One clause at its world sizes; and whether nothing more can be judged."""
        passed = _clause(task, check, "pass")
        for world_size in self._world_sizes(check):
            if world_size not in benches:
                benches[world_size] = self._bench(task, world_size)
            bench = benches[world_size]
            try:
                note = check.judge(impl, bench)
                if note and world_size > (passed.world_size or 0):
                    passed.note, passed.world_size = note, world_size
            except NotYetError as failure:
                failed = _clause(task, check, "fail")
                _take_over(failed, failure, world_size)
                failed.rule = self._whose_part(task, check, impl, bench) or failed.rule
                return failed, failure.fatal
        return passed, False

    def _world_sizes(self, check: Check) -> tuple[int, ...]:
        if not self._worlds:
            return check.worlds
        # A size that was asked for is tried even if it is not on the list, except a
        # single rank where the clause says nothing about one.
        return tuple(n for n in self._worlds if n > 1 or n in check.worlds)

    def _bench(self, task: Task, world_size: int) -> Bench:
        seconds = task.time_limit_s * max(1.0, world_size / 8)
        return Bench(self._cluster, world_size, self._seed, Limits(seconds=seconds))

    def _whose_part(
        self, task: Task, check: Check, impl: Implementation, bench: Bench
    ) -> str:
        """Say so if it passes with the reference's version of what the task builds on.

        A task that uses a sibling must not be blamed for the sibling's mistake.
        """
        own = [n for n in task.needs if n.startswith(f"{task.unit}.")]
        siblings = tuple(name for name in own if name not in impl.grafts)
        if not siblings:
            return ""
        try:
            check.judge(impl.with_grafts(siblings), bench)
        except NotYetError:
            return ""
        names = " and ".join(name.partition(".")[2] for name in siblings)
        return f"this part is right: it passes with the reference's {names}; fix yours"


def shown(path: Path) -> str:
    """A path as the learner would type it: relative to where they are."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _broken(error: SourceError) -> tuple[str, str, int]:
    if error.line:
        return f"{shown(error.path)}: {error}", "syntax-error", error.line
    return str(error), "", 0


def _fail_all(
    verdict: TaskVerdict, task: Task, message: str, slug: str, line: int = 0
) -> TaskVerdict:
    verdict.status, verdict.message, verdict.slug = "fail", message, slug
    verdict.line = line or verdict.line
    verdict.clauses = [
        ClauseVerdict(id=name, text=text, status="fail", message=message, slug=slug)
        for name, text in task.clauses.items()
    ]
    return verdict


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
    failed.rule, failed.output = failure.rule, failure.output
