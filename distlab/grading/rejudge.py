"""Judge a task's own clauses by what was recorded; the standing ones need ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from distlab.curriculum import Task
from distlab.grading.clause import Check, checks_of
from distlab.grading.mismatches import printed
from distlab.grading.recording import RecordingError
from distlab.grading.runs import MissingRunError, Runs, UndeclaredRunError
from distlab.grading.threads import one_thread
from distlab.grading.verdict import ClauseVerdict, NotJudgedError, NotYetError


def judge_records(
    task: Task, recorded: Mapping[int, Runs]
) -> tuple[ClauseVerdict, ...]:
    """Each clause's verdict; "skip" where what it needs was not recorded.

    World sizes that a clause does not list were played for a suspected hang, and only
    that counts there.

    Raises:
        RecordingError: a record is not what a rank would have reported.
        UndeclaredRunError: a judge read what its clause does not declare.
    """
    clauses, ended = [], False
    with one_thread():
        for check in checks_of(task.id):
            text = task.clauses[check.clause]
            verdict = ClauseVerdict(id=check.clause, text=text, status="skip")
            if not ended:
                verdict, ended = _judged(check, verdict, recorded)
            clauses.append(verdict)
    return tuple(clauses)


def _judged(
    check: Check, skipped: ClauseVerdict, recorded: Mapping[int, Runs]
) -> tuple[ClauseVerdict, bool]:
    """One clause; and whether nothing more can be judged."""
    passed = replace(skipped, status="pass")
    others = [n for n in recorded if n not in check.worlds]
    for n in (*others, *check.worlds):
        try:
            note = _said(check, recorded[n]) if n in recorded else _missing(n)
        except MissingRunError as error:
            if n in check.worlds:
                return replace(skipped, message=str(error)), False
        except NotJudgedError:
            return skipped, False
        except NotYetError as failure:
            if n in check.worlds or failure.fatal:
                size = check.size_of(failure, n)
                return _failed(passed, failure, recorded[n], size), failure.fatal
        else:
            if note and n > (passed.world_size or 0):
                passed = replace(passed, note=note, world_size=n)
    return passed, False


def _said(check: Check, runs: Runs) -> str | None:
    runs.reads.clear()
    try:
        return check.judge(runs)
    except (NotYetError, NotJudgedError, MissingRunError, UndeclaredRunError):
        raise
    except Exception as error:  # values of a kind that no scenario reports
        where = f"{check.clause}, n = {runs.world_size}"
        message = f"{where}: the records cannot be judged: {error!r}"
        raise RecordingError(message) from error


def _missing(world_size: int) -> str:
    raise MissingRunError(f"there are no records of {world_size} ranks")


def _failed(
    passed: ClauseVerdict, failure: NotYetError, runs: Runs, size: int | None
) -> ClauseVerdict:
    run = runs.latest[1] if runs.latest else None
    output = failure.output or (printed(run) if run else "")
    return passed.failed(failure, size, output=output, run=run)
