"""Options of torchrun that select which of the ranks' lines the terminal shows.

    --redirects, --tee      1 stdout, 2 stderr, 3 both, or 0:3,1:1 by local rank
    --local-ranks-filter    show only these local ranks
    --duplicate-…-filters   copy the lines that contain one of these texts

A rank's log always has both of its streams. If a stream is redirected, the terminal
doesn't show it. With --tee or --redirects, the logs are kept: see
`LaunchConfig.log_dir`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

STDOUT, STDERR = 1, 2
PREFIX = "[rank ${rank}] "
_MAPPING = re.compile(r"\d+:[0-3](,\d+:[0-3])*")


@dataclass(frozen=True, kw_only=True)
class Output:
    """Where the ranks' lines go; a stream is STDOUT, STDERR, or the sum of both."""

    redirects: int | Mapping[int, int] = 0
    tee: int | Mapping[int, int] = 0
    local_ranks: frozenset[int] | None = None
    stdout_filters: tuple[str, ...] = ()
    stderr_filters: tuple[str, ...] = ()
    template: str = PREFIX
    """The prefix of each line; ${rank}, ${local_rank} and ${role_name} are replaced."""
    role: str = "default"

    @property
    def keeps_logs(self) -> bool:
        """True if an option asks for log files."""
        return bool(
            self.redirects or self.tee or self.stdout_filters or self.stderr_filters
        )

    def is_split(self, local_rank: int) -> bool:
        """Return True if this rank's two streams go to different places."""
        has_filters = bool(self.stdout_filters or self.stderr_filters)
        return has_filters or _of(self.redirects, local_rank) in (STDOUT, STDERR)

    def shows(self, local_rank: int, stream: int) -> bool:
        """Return True if the terminal shows this stream of this rank."""
        if self.local_ranks is not None and local_rank not in self.local_ranks:
            return False
        is_teed = _of(self.tee, local_rank) & stream
        return bool(is_teed or not _of(self.redirects, local_rank) & stream)

    def prefix(self, rank: int, local_rank: int) -> str:
        """Return the prefix of this rank's lines."""
        return Template(self.template).safe_substitute(
            rank=rank, local_rank=local_rank, role_name=self.role
        )

    def filters(self, stream: int) -> tuple[str, ...]:
        """Return the texts that select which lines to copy."""
        return self.stdout_filters if stream & STDOUT else self.stderr_filters

    def duplicate(self, folder: Path, stream: int, lines: Sequence[str]) -> None:
        """Copy the lines that contain one of the filters' texts into `folder`."""
        texts = self.filters(stream)
        chosen = [line + "\n" for line in lines if any(t in line for t in texts)]
        name = "filtered_stdout.log" if stream & STDOUT else "filtered_stderr.log"
        if not chosen:
            return
        with (
            contextlib.suppress(OSError),  # a full disk must not stop the training
            open(folder / name, "a", encoding="utf-8") as file,
        ):
            file.writelines(chosen)


def streams(text: str) -> int | dict[int, int]:
    """Read the value of --redirects or --tee.

    Raises:
        ValueError: the value is neither 0 to 3 nor of the form RANK:0-3,…

    Example: "3" → 3; "0:1,1:3" → {0: 1, 1: 3}
    """
    if re.fullmatch("[0-3]", text):
        return int(text)
    if not _MAPPING.fullmatch(text):
        raise ValueError(text)
    pairs = (pair.split(":") for pair in text.split(","))
    return {int(local_rank): int(which) for local_rank, which in pairs}


def texts(value: str) -> tuple[str, ...]:
    """Read a comma-separated list of texts; to get a comma in a text, write it twice.

    Example: "a,b,,c" → ("a", "b,c")
    """
    parts = re.split(r"(?<!,),(?!,)", value)
    return tuple(part.strip().replace(",,", ",") for part in parts if part.strip())


def _of(given: int | Mapping[int, int], local_rank: int) -> int:
    return given if isinstance(given, int) else given.get(local_rank, 0)
