"""What torch.distributed says when something went wrong, and what it means."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

COMMANDS = {
    "run": (
        "run -n 4 train.py",
        "start the script this way, and a hang names its ranks, calls and lines",
    ),
    "audit": (
        "audit train.py",
        "run the script on simulated ranks, and look for mistakes of this kind",
    ),
    "explain-hang": (
        "explain-hang dumps/",
        "if torch's flight recorder has left dumps, get the same report from them",
    ),
}


@dataclass(frozen=True, kw_only=True)
class TorchError:
    """One error text: what it `means`, `why` it is not the cause, where to `look`.

    `see` names misconceptions and tasks. `run` names the commands that find the cause
    of a hang, keys of `COMMANDS`. `provoked` says that the example was seen with this
    version of torch, not only read about.
    """

    name: str
    title: str
    patterns: tuple[str, ...]
    example: str
    means: str
    why: str
    look: str
    see: tuple[str, ...]
    run: tuple[str, ...] = ()
    provoked: bool = False

    def is_in(self, text: str) -> bool:
        """Whether the text, on one line, holds this error."""
        return any(re.search(p, text, re.IGNORECASE) for p in self.patterns)


@cache
def read_torch_errors() -> tuple[TorchError, ...]:
    """All that are known; what is nearer to the cause comes first."""
    path = Path(__file__).with_name("torch_errors.toml")
    entries = tomllib.loads(path.read_text(encoding="utf-8"))
    return tuple(_error(name, entry) for name, entry in entries.items())


def _error(name: str, entry: dict[str, Any]) -> TorchError:
    lists = {key: tuple(entry.get(key, ())) for key in ("patterns", "see", "run")}
    return TorchError(name=name, **{**entry, **lists})


def find_torch_errors(text: str) -> list[TorchError]:
    """The errors that a pasted text holds, the one next to the cause first."""
    joined = " ".join(text.split())
    return [error for error in read_torch_errors() if error.is_in(joined)]
