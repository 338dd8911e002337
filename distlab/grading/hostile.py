"""Hostile and broken submissions: each must get a truthful verdict, and leave nothing.

Each is handed in as the learner's own file in a copy of the course, so that one that
deletes the course deletes the copy. What they are stands in `hostile_cases.py`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from distlab.curriculum import Curriculum, load_curriculum, make_template
from distlab.grading.catalogue import Entry
from distlab.grading.grade import Grader
from distlab.grading.hostile_cases import FILES, HostileCase
from distlab.grading.mutants import SEED
from distlab.grading.time_limit import no_longer_than
from distlab.grading.verdict import TaskVerdict
from distlab.processes.tree import descendants
from distlab.runner import Cluster

BOUND_S = 20.0  # generous: no verdict here needs it, and none may need more


@dataclass(frozen=True, kw_only=True)
class HostileResult:
    """The verdict on one case, and what was found afterwards."""

    case: HostileCase
    verdict: TaskVerdict
    seconds: float
    line: int = 0  # the one marked `# HERE`
    left: int = 0  # processes
    changed: tuple[str, ...] = ()  # files of the course

    def problems(self) -> list[str]:
        """What is not as it must be; nothing if all is."""
        case, found = self.case, self.verdict
        said = _everything_said(found)
        wrong = []
        if found.status != case.status:
            wrong.append(f"{found.status} instead of {case.status}: {found.message}")
        if case.slug is not None and found.slug != case.slug:
            wrong.append(f"[{found.slug}] instead of [{case.slug}]: {found.message}")
        if case.says not in said:
            wrong.append(f"does not say {case.says!r}: {said}")
        if case.call and not self.is_named():
            wrong.append(f"not rank {case.rank}, {case.call}, :{self.line}: {said}")
        if self.left:
            wrong.append(f"{self.left} processes are left")
        if self.changed:
            wrong.append(f"changed: {', '.join(self.changed)}")
        if self.seconds > BOUND_S:
            wrong.append(f"took {self.seconds:.1f} s")
        return wrong

    def is_named(self) -> bool:
        """Whether the evidence names the rank, the call and the line of the hang."""
        failure = self.verdict.first_failure()
        return failure is not None and any(
            line.rank == self.case.rank
            and line.state == "waiting"
            and self.case.call in line.text
            and line.where.endswith(f".py:{self.line}")
            for line in failure.evidence
        )


def judge(
    root: Path,
    cluster: Cluster,
    cases: Iterable[HostileCase],
    on_result: Callable[[HostileResult], None] | None = None,
) -> list[HostileResult]:
    """Hand each case in, in a copy of the course below `root`; nothing is left."""
    results = []
    with tempfile.TemporaryDirectory(prefix="distlab-hostile-") as folder:
        for case in cases:
            copy = _course(root, Path(folder) / case.id)
            results.append(_played(load_curriculum(copy), cluster, case))
            shutil.rmtree(copy)
            if on_result:
                on_result(results[-1])
    return results


def _played(
    curriculum: Curriculum, cluster: Cluster, case: HostileCase
) -> HostileResult:
    task = replace(curriculum.task(case.task), time_limit_s=case.limit_s)
    unit = curriculum.units[task.unit]
    cluster.start()
    mine, before = descendants(os.getpid()), _digests(curriculum.root)
    path = unit.template(curriculum.root)
    path.unlink()
    before.pop(str(path.relative_to(curriculum.root)))
    if case.file:
        FILES[case.file](path)
    else:
        solution = unit.solution(curriculum.root).read_text(encoding="utf-8")
        path.write_text(_text(case, solution), encoding="utf-8")
    handed_in = {**before, **_digests(curriculum.root)}
    started = time.monotonic()
    with no_longer_than(2 * BOUND_S, f"no verdict after {2 * BOUND_S:g} s"):
        grader = Grader(curriculum, cluster, seed=SEED, worlds=case.worlds)
        verdict = grader.grade([task]).tasks[0]
    seconds = time.monotonic() - started
    cluster.settle()
    after = dict.fromkeys(handed_in, "") | _digests(curriculum.root)
    changed = sorted(p for p in after if after[p] != handed_in.get(p))
    return HostileResult(
        case=case,
        verdict=verdict,
        seconds=seconds,
        line=_marked(path),
        left=len(set(descendants(os.getpid())) - set(mine)),
        changed=tuple(changed),
    )


def _marked(path: Path) -> int:
    if not path.is_file():
        return 0
    text = path.read_bytes().partition(b"# HERE")
    return text[0].count(b"\n") + 1 if text[1] else 0


def _text(case: HostileCase, solution: str) -> str:
    if case.text:
        return case.text
    if case.body:
        entry = Entry(
            id=case.id,
            task=case.task,
            title="",
            body=case.body,
            helper=case.helper,
        )
        return entry.applied_to(solution)
    return f"{solution}\n\n{case.helper}"


def _course(root: Path, copy: Path) -> Path:
    """What a submission could reach for: the course, its solutions and its tests."""
    curriculum = load_curriculum(root)
    copy.mkdir()
    shutil.copy(root / "curriculum.toml", copy)
    shutil.copytree(root / "solutions", copy / "solutions")
    (copy / "tests").mkdir()
    for test in (root / "tests").glob("*.py"):
        shutil.copy(test, copy / "tests")
    for unit in curriculum.units.values():
        template = unit.template(copy)
        template.parent.mkdir(exist_ok=True)
        solution = unit.solution(root).read_text(encoding="utf-8")
        template.write_text(make_template(solution), encoding="utf-8")
    return copy


def _digests(root: Path) -> dict[str, str]:
    """Of every file, without the marks of wrong solutions that the grader keeps."""
    book = root / ".distlab" / "book"
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file() and path.suffix != ".pyc" and book not in path.parents
    }


def _everything_said(verdict: TaskVerdict) -> str:
    texts = [verdict.message]
    failure = verdict.first_failure()
    if failure:
        lines = [f"{e.state} {e.text} {e.where}" for e in failure.evidence]
        texts += [failure.kind, failure.rule, failure.output, *lines]
    return "\n".join(texts)
