"""What is known about a run once it is over: one record per rank, and the outcome."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from distlab.comm import Event

Status = Literal["finished", "raised", "died", "waiting", "running"]
Outcome = Literal["finished", "raised", "died", "deadlock", "timeout"]
LINE_LOST = 113  # exit status of a rank that could not tell how it ended


class RunnerError(RuntimeError):
    """The harness itself could not do its work; never the learner's fault."""


class RunCancelledError(Exception):
    """Whoever asked for a run does not want it any more; its ranks are gone."""


@dataclass(frozen=True, kw_only=True)
class ErrorRecord:
    """An exception that a rank raised; `frames` are (file, line), outermost first."""

    type: str
    message: str
    frames: tuple[tuple[str, int], ...] = ()
    refused: str = ""  # by the communicator, before anything was sent: the kind
    peer_lost: bool = False  # it is, or follows from, a PeerLost


@dataclass(kw_only=True)
class RankRecord:
    """One rank of a run."""

    rank: int
    pid: int = 0
    status: Status = "running"
    value: Any = None
    error: ErrorRecord | None = None
    exit_status: int | None = None  # as waitpid gives it, when the process died
    failed_s: float | None = None  # seconds into the run, when it raised or died
    journal: list[Event] = field(default_factory=list)
    waiting: Event | None = None  # the call it is blocked in
    stack: tuple[tuple[str, int], ...] = ()  # where it was when time ran out
    stopped: bool = False  # by SIGSTOP or its like, when time ran out
    output: str = ""
    sent_bytes: float = 0.0
    messages: int = 0
    marks: list[int] = field(default_factory=list)  # events before each report
    in_calls_s: float = 0.0
    deaths: list[int] = field(default_factory=list)  # exit statuses of earlier lives

    def calls(self) -> list[Event]:
        """The calls this rank started, in order, without their ends."""
        return [event for event in self.journal if event["k"] in ("enter", "post")]

    def open_calls(self) -> list[Event]:
        """The calls that have started and not ended, in order."""
        ended = {e["n"] for e in self.journal if e["k"] in ("exit", "error")}
        return [call for call in self.calls() if call["n"] not in ended]


@dataclass(frozen=True, kw_only=True)
class Run:
    """How `world_size` ranks ended.

    `waits_for` maps each blocked rank to the ranks that would have to act; `cycle` is a
    circle in it, such as (0, 1, 2), or empty; `explanation` says it in a sentence.
    `idle_s` is how long no rank had called or reported anything, where that ended it.
    `services` are the processes beside the ranks, by name.
    """

    world_size: int
    outcome: Outcome
    ranks: tuple[RankRecord, ...]
    seconds: float
    limit_s: float
    waits_for: dict[int, tuple[int, ...]] = field(default_factory=dict)
    cycle: tuple[int, ...] = ()
    explanation: str = ""
    services: dict[str, RankRecord] = field(default_factory=dict)
    idle_s: float = 0.0

    @property
    def values(self) -> list[Any]:
        """What the program returned on each rank."""
        return [record.value for record in self.ranks]

    @property
    def took(self) -> str:
        """How long it went on, in words."""
        return f"{self.seconds:.2f} s"

    def primary(self) -> RankRecord | None:
        """The rank whose failure came first; the others failed because of it."""
        failed = [r for r in self.ranks if r.status in ("died", "raised")]
        failed.sort(key=lambda r: float("inf") if r.failed_s is None else r.failed_s)
        first = [r for r in failed if not (r.error and r.error.peer_lost)]
        return next(iter(first or failed), None)

    def require_finished(self) -> Run:
        """This run, if every rank finished.

        Raises:
            NotFinishedError: it did not; with the explanation.
        """
        if self.outcome != "finished":
            raise NotFinishedError(self)
        return self


class NotFinishedError(RunnerError):
    """The ranks of `run` had to finish, and did not."""

    def __init__(self, run: Run) -> None:
        super().__init__(run.explanation)
        self.run = run
