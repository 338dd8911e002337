"""Word the agent's messages: why all ranks restart, and why it gave up."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distlab.launch.records import message
from distlab.paths import shown
from distlab.runner.signals import meaning_of_signal, name_of_signal

NUM_LINES = 12  # the last ones of a log
USAGE_ERROR = 2  # the exit code of argparse, of a shell, and of Python without a script
PREFIX = "[distlab]"


@dataclass(frozen=True, kw_only=True)
class Gone:
    """Event: a process has ended; with everything that a report of it needs."""

    number: int  # its rank, or its own number under --standby and --elastic
    code: int  # -s after signal s
    lines: Sequence[str] = ()  # the last ones of its log
    log: str = ""
    node: str = ""  # where the log is, if not on node 0
    is_lost: bool = False  # node 0 has lost the whole node
    record: Mapping[str, Any] = field(default_factory=dict)  # as in Failure


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The first rank of a generation that ended with a code other than 0."""

    rank: int
    code: int  # -s after signal s
    generation: int
    lines: Sequence[str]  # the last ones of its log
    log: str
    node: str = ""  # where the log is, if elsewhere
    is_lost: bool = False  # nothing is heard of its node
    ended_s: float = 0.0  # when the agent heard of it
    record: Mapping[str, Any] = field(default_factory=dict)
    """The record that torch's @record has written about the exception."""

    @classmethod
    def of(
        cls, gone: Gone, *, rank: int, generation: int, ended_s: float = 0.0
    ) -> Failure:
        """Return the failure of a rank whose process is gone."""
        return cls(
            rank=rank,
            code=gone.code,
            generation=generation,
            lines=gone.lines,
            log=gone.log,
            node=gone.node,
            is_lost=gone.is_lost,
            ended_s=ended_s,
            record=gone.record,
        )

    @property
    def is_usage_error(self) -> bool:
        """True if the rank would fail in the same way after every restart."""
        return self.code == USAGE_ERROR

    @property
    def what(self) -> str:
        """Describe the end of the rank, such as `rank 2 was ended by SIGKILL`."""
        who = f"rank {self.rank}" if self.rank >= 0 else "a process without a rank"
        if self.is_lost:
            return f"{who} is lost with its node"
        if self.code >= 0:
            return f"{who} ended with exit code {self.code}"
        meaning = meaning_of_signal(-self.code)
        if self.code == -signal.SIGKILL:
            meaning = "which the system also sends when memory runs out"
        told = f", {meaning}" if meaning else ""
        return f"{who} was ended by {name_of_signal(-self.code)}{told}"


def restarting(failure: Failure | None, max_restarts: int, generation: int) -> str:
    """Return a line that says all ranks are about to restart."""
    what = failure.what if failure else "a rank failed"
    return f"{PREFIX} {what}; restart {generation - 1} of at most {max_restarts}\n"


def not_restarting(failure: Failure) -> str:
    """Return a line that says why a restart would fail in the same way."""
    return (
        f"{PREFIX} {failure.what}, which means that it was called incorrectly, so we "
        "don't restart it\n"
    )


def misplaced(flag: str, script: str) -> str:
    """Return a line that says the script gets a flag that looks like ours."""
    return (
        f"{PREFIX} {flag} comes after {script}, so the script gets it; put the "
        "launcher's flags before the script\n"
    )


def going_on(num_nodes: int, most: int, world_size: int) -> str:
    """Return a line that says the number of nodes has changed."""
    ranks = f"{world_size} rank{'s' * (world_size != 1)}"
    return f"{PREFIX} continuing with {num_nodes} of {most} nodes and {ranks}\n"


def recovered(failure: Failure, size: int, step: int, seconds: float) -> str:
    """Return a line that says the other ranks stayed, and all continue."""
    return (
        f"{PREFIX} {failure.what}; {size} ranks continued and completed step {step} "
        f"{seconds:.2f} s later\n"
    )


def gave_up(failure: Failure | None, code: int, generation: int) -> str:
    """Say which rank failed, by which signal or code, and show its last lines."""
    if failure is None:
        return f"{PREFIX} exit code {code}\n"
    after = ""
    if generation > 1:
        restarts = f"{generation - 1} restart{'s' * (generation > 2)}"
        after = f" after {restarts}"
    lines = [f"{PREFIX} gave up{after}: {failure.what}"]
    if recorded := message(failure.record):
        lines.append(f"{PREFIX} it recorded: {recorded}")
    where = shown(Path(failure.log)) if not failure.node else failure.log
    where += f" on {failure.node}" * bool(failure.node)
    if failure.rank < 0:  # it leaves no log
        lines.append(
            f"{PREFIX} it joined no group; with --standby or --elastic, the script has "
            "to train with distlab.distributed.elastic"
        )
        lines += [f"    {line}" for line in failure.lines]
    elif failure.lines and not failure.log:
        lines.append(f"{PREFIX} its last lines (to keep all lines, use --log-dir DIR):")
        lines += [f"    {line}" for line in failure.lines]
    elif failure.lines:
        lines.append(f"{PREFIX} its last lines; the full log is {where}:")
        lines += [f"    {line}" for line in failure.lines]
    elif not failure.log:
        lines.append(f"{PREFIX} it printed nothing")
    else:
        lines.append(f"{PREFIX} it printed nothing; its log would be {where}")
    lines.append(f"{PREFIX} exit code {code}")
    return "\n".join(lines) + "\n"


def apart(world_size: int) -> str:
    """Return a line that says no rank used the store; some engines meet elsewhere."""
    return (
        f"{PREFIX} no rank used the store at MASTER_PORT, so unless the ranks met "
        f"elsewhere, these were {world_size} separate runs of the script\n"
    )


def hung(code: int) -> str:
    """Return a line that says the job was ended because its ranks couldn't go on."""
    return (
        f"{PREFIX} ended the ranks, because none of them can go on; exit code {code}\n"
    )


def interrupted(number: int, code: int) -> str:
    """Return a line that says somebody stopped the job."""
    return f"{PREFIX} stopped by {name_of_signal(number)}; exit code {code}\n"
