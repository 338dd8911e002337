"""What `tests/test_phaseN.py` stands on: the verdicts of `distlab check`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import TracebackType

from distlab.curriculum import (
    Progress,
    ProgressUnavailableError,
    find_root,
    load_curriculum,
)
from distlab.grading.grade import Grader
from distlab.grading.preflight import graded_files
from distlab.grading.remember import record
from distlab.grading.report import lines_of, plain
from distlab.grading.verdict import INTERRUPTED, TaskVerdict
from distlab.ranks import new_cluster


class NotJudgedHereError(Exception):
    """A task needs ranks that this system doesn't have; the message says for what."""


class PhaseFront:
    """Grades the learner's files of one phase; `test_file` says in which checkout."""

    def __init__(self, phase: int, test_file: str) -> None:
        self._curriculum = load_curriculum(find_root(Path(test_file)))
        self._phase = self._curriculum.phase(phase)
        self._cluster = new_cluster()
        self._grader = Grader(self._curriculum, self._cluster)

    def __enter__(self) -> PhaseFront:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._cluster.close()

    @property
    def task_ids(self) -> list[str]:
        """The tasks of the phase, in order."""
        return [task.id for unit in self._phase.units for task in unit.tasks]

    @property
    def header(self) -> list[str]:
        """The files that are graded, with their digests."""
        tasks = [task for unit in self._phase.units for task in unit.tasks]
        return graded_files(self._curriculum, tasks, "mine")

    def failure(self, task_id: str) -> str:
        """The verdict on a task that has not passed; empty if it has.

        Raises:
            NotJudgedHereError: the task needs ranks that this system doesn't have.
        """
        report = self._grader.grade([self._curriculum.task(task_id)])
        verdict = report.tasks[0]
        self._keep(verdict)
        if verdict.status == "not_judged":
            raise NotJudgedHereError(verdict.message)
        return "" if verdict.status == "pass" else plain(lines_of(verdict))

    def main(self) -> int:
        """Grade the whole phase, print, and return the exit code of `distlab check`."""
        print("\n".join(self.header))
        tasks = [self._curriculum.task(task_id) for task_id in self.task_ids]
        try:
            with self:
                report = self._grader.grade(tasks, self._tell)
        except KeyboardInterrupt:
            return INTERRUPTED
        return report.exit_code

    def _tell(self, verdict: TaskVerdict) -> None:
        print(plain(lines_of(verdict)), flush=True)
        self._keep(verdict)

    def _keep(self, verdict: TaskVerdict) -> None:
        """As `distlab check` does; the verdict holds even where it cannot be kept."""
        with contextlib.suppress(ProgressUnavailableError):
            record(Progress(self._curriculum.root), verdict)
