"""The words of a verdict: what a check raises, and what is reported about a task."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:  # the words alone must not cost the import of torch
    from distlab.runner import Run
    from distlab.runner.autopsy import Evidence

ClauseStatus = Literal["pass", "fail", "skip"]
TaskStatus = Literal["pass", "fail", "not_started", "not_judged", "error"]

PASS, FAILED, USAGE, NOT_STARTED, HARNESS, NOT_JUDGED = 0, 1, 2, 10, 11, 12
INTERRUPTED = 130
"""Exit codes; of several tasks the gravest counts: 11, 1, 10, 12, and then 0."""

STANDING = {
    "S1": "costs no more than the reference: bytes, collectives, computation",
    "S2": "changes nothing that the reference leaves as it is",
    "S3": "is right a second time in the same process, with other numbers",
}
"""Clauses that every task has, judged beside the reference: see differential/."""

STANDING_ADVICE = {
    "S1": "find the call, the copy or the computation that the result doesn't need",
    "S2": "write only to what the task names: copy an argument before you change it",
    "S3": "look for what the first call leaves behind: a global, a default, a cache",
}
"""Where to look if one of these fails; a task's own clauses have `Task.advice`."""

HALF_DONE = "half done"
"""How the message of a task begins that has more functions than were written."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What the ranks left, by rank, where something else was expected of them.

    Two solutions that leave the same make the same mistake: see `distlab.grading.book`.
    """

    what: str
    actual: tuple[Any, ...]
    tolerance: float  # relative to the largest number


class NotYetError(Exception):
    """A clause is not fulfilled yet. It never changes; `but` makes another one.

    `slug` names the misconception, if one is known; "no diagnosis" is better than a
    wrong one. `rule` is what to do, said only where the diagnosis is sure. `kind` is
    the headline's word: NOT YET, DEADLOCK, TIME or MEMORY. `evidence` has lines for the
    ranks: each is an Evidence, or simply `(rank, state, text)`. `output` is what the
    ranks printed. `fatal` means that the task's other clauses cannot be judged, `run`
    is what it is about, and `played` how many ranks there were where one process played
    them all. `difference` is set where the ranks' values are wrong, so that the book of
    mistakes can look for a solution that leaves the same. `situation` tells what is
    special about the run, and stands before the message: "with an empty tensor".
    """

    def __init__(
        self,
        message: str,
        *,
        slug: str = "",
        evidence: Iterable[Evidence | tuple[int, str, str]] = (),
        rule: str = "",
        kind: str = "NOT YET",
        fatal: bool = False,
        output: str = "",
        run: Run | None = None,
        played: int | None = None,
        difference: Difference | None = None,
        situation: str = "",
    ) -> None:
        super().__init__(message)
        self.message: Final = message
        self.slug: Final = slug
        self.evidence: Final = tuple(map(_line, evidence))
        self.rule: Final = rule
        self.kind: Final = kind
        self.fatal: Final = fatal
        self.output: Final = output
        self.run: Final = run
        self.played: Final = played
        self.difference: Final = difference
        self.situation: Final = situation

    @property
    def headline(self) -> str:
        """The message, and before it the situation where one is known."""
        return ", ".join(filter(None, (self.situation, self.message)))

    def but(self, **changes: Any) -> NotYetError:
        """The same verdict with other facts, by the names of the arguments."""
        facts = {
            "message": self.message,
            "slug": self.slug,
            "evidence": self.evidence,
            "rule": self.rule,
            "kind": self.kind,
            "fatal": self.fatal,
            "output": self.output,
            "run": self.run,
            "played": self.played,
            "difference": self.difference,
            "situation": self.situation,
        }
        assert facts.keys() >= changes.keys()
        return NotYetError(**{**facts, **changes})


def _line(line: Evidence | tuple[int, str, str]) -> Evidence:
    if not isinstance(line, tuple):
        return line
    from distlab.runner.autopsy import Evidence

    return Evidence(*line)


class NotJudgedError(Exception):
    """This clause can only be judged once another one, which fails, is fulfilled.

    The verdict says "not judged"; the message is for who reads the check.
    """


@dataclass(frozen=True, kw_only=True)
class ClauseVerdict:
    """One clause of one task; `world_size` is where it failed, or the last tried.

    None where one process played several ranks, and the failure is about no number.
    """

    id: str
    text: str
    status: ClauseStatus
    world_size: int | None = None
    message: str = ""
    slug: str = ""
    kind: str = ""
    evidence: tuple[Evidence, ...] = ()
    rule: str = ""
    note: str = ""
    output: str = ""
    is_played: bool = False  # one process played all ranks
    run: Run | None = field(default=None, repr=False)  # the one that failed
    # Plays the reference in its stead; of use while the cluster lasts.
    reference_run: Callable[[], Run | None] | None = field(default=None, repr=False)

    def failed(
        self, failure: NotYetError, world_size: int | None, **more: Any
    ) -> ClauseVerdict:
        """The same clause where `failure` was raised; `more` are fields of its own."""
        facts: dict[str, Any] = {
            "world_size": world_size,
            "message": failure.headline,
            "slug": failure.slug,
            "kind": failure.kind,
            "evidence": failure.evidence,
            "rule": failure.rule,
            "output": failure.output,
        }
        return replace(self, status="fail", note="", **facts | more)

    def to_json(self) -> dict[str, Any]:
        """The clause as one entry of a task."""
        return {
            "id": self.id,
            "status": self.status,
            "slug": self.slug,
            "message": self.message,
            "world_size": self.world_size,
        }


@dataclass(frozen=True, kw_only=True)
class TaskVerdict:
    """One task: its status, and each clause's."""

    id: str
    number: str
    title: str
    status: TaskStatus
    path: str
    digest: str
    function_digest: str = ""
    line: int = 0
    seconds: float = 0.0
    message: str = ""
    slug: str = ""
    ran: bool = False  # its checks ran, perhaps on no ranks: then no `world_sizes`
    world_sizes: tuple[int, ...] = ()
    is_plan: bool = False  # pure functions: no rank sends anything
    printed: int = 0  # lines, in the latest run of each world size
    clauses: tuple[ClauseVerdict, ...] = ()

    @property
    def place(self) -> str:
        """`file:line` to go to; without a line, the file."""
        return f"{self.path}:{self.line}" if self.line else self.path

    def first_failure(self) -> ClauseVerdict | None:
        """The clause to look at first."""
        return next((c for c in self.clauses if c.status == "fail"), None)

    def to_json(self) -> dict[str, Any]:
        """The task as one entry of a report."""
        return {
            "id": self.id,
            "number": self.number,
            "status": self.status,
            "seconds": round(self.seconds, 3),
            "file": self.path,
            "digest": self.digest,
            "message": self.message,
            "slug": self.slug,
            "world_sizes": list(self.world_sizes),
            "clauses": [clause.to_json() for clause in self.clauses],
        }


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything one `check` found out."""

    code: str
    seed: int
    tasks: list[TaskVerdict]

    @property
    def exit_code(self) -> int:
        """0 pass, 1 a task failed, 10 not started, 11 harness error, 12 not judged."""
        statuses = {task.status for task in self.tasks}
        if "error" in statuses:
            return HARNESS
        if "fail" in statuses:
            return FAILED
        if "not_started" in statuses:
            return NOT_STARTED
        return NOT_JUDGED if "not_judged" in statuses else PASS

    def to_json(self) -> dict[str, Any]:
        """The report as one JSON object."""
        return {
            "code": self.code,
            "seed": self.seed,
            "digest": "+".join(dict.fromkeys(task.digest for task in self.tasks)),
            "tasks": [task.to_json() for task in self.tasks],
            "exit": self.exit_code,
        }
