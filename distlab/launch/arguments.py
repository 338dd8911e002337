"""The command line: our flags, the script, and what is the script's own.

    python -m distlab.launch --nproc-per-node 4 train.py --epochs 3
    python -m distlab.launch train.py --epochs 3 --nproc_per_node=4 -- --max-restarts 1

Flags may be written with - or _. Where the script stands first, known flags after it
are ours, up to `--`; everything else is the script's.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distlab.launch.config import LaunchConfig, LaunchError

USAGE = """\
usage: python -m distlab.launch [flags] script.py [arguments of the script]

Starts the ranks of script.py, with the environment that torchrun gives them.

  --nproc-per-node N     ranks on this node (1)
  --max-restarts N       after a failure start all ranks again, at most so often (0)
  --monitor-interval S   seconds from one look at the ranks to the next (0.1)
  --grace-period S       seconds from SIGTERM to SIGKILL (30)
  --log-dir DIR          where to write rank_<r>.log (.)
  --backend NAME         gloo, nccl or tcp (gloo)

  --standby K            K more processes, of which one replaces a rank that dies: the
                         others stay, and no step is lost; the script trains with
                         distlab.distributed.elastic. Each process that is started
                         later counts as a restart
  --elastic MIN:MAX      instead of it: MAX ranks, and fewer when some die; a new one
                         joins for each that ends, if --max-restarts allows it. A
                         number written to LOG_DIR/ranks sets another size
  --global-batch-size N  with --elastic: from these two the ranks are told their steps
  --microbatch-size N    of accumulation
  --join-grace S         with --elastic: how long a smaller group waits for more (0.5)
  --freeze-timeout S     with both: a rank that completes no step for S seconds,
                         and ten usual steps, is killed and replaced (10)

Several nodes, with one agent on each; under srun they need none of these:

  --nnodes N             nodes (1); MIN:MAX: so many go on when others do not come, and
                         a node that comes later is there after the next restart
  --last-call S          with MIN:MAX: seconds that MIN nodes wait for the others (30)
  --node-rank R          which one this is, from 0
  --master-addr ADDR     an address of node 0
  --master-port PORT     one node: of the store (a free one); several: where agents meet
  --start-timeout S      seconds that the agents wait for one another (300)
  --node-timeout S       seconds of silence after which a node is lost (15)

Flags may stand after script.py too, before `--`. The agents decide with tasks 3.17 and
3.18: `distlab use mine process_group` has them run your code.
"""


class HelpAsked(Exception):  # noqa: N818 - no error
    """`--help` was said."""


@dataclass(frozen=True)
class CommandLine:
    """What was said: settings by the names of LaunchConfig, the script, the rest."""

    settings: dict[str, Any]
    script: str
    arguments: tuple[str, ...]


_KINDS: dict[str, Callable[[str], Any]] = {
    "nproc_per_node": int,
    "nnodes": int,
    "min_nodes": int,
    "node_rank": int,
    "master_addr": str,
    "master_port": int,
    "backend": str,
    "max_restarts": int,
    "monitor_interval": float,
    "start_timeout": float,
    "last_call": float,
    "node_timeout": float,
    "grace_period": float,
    "log_dir": str,
    "standby": int,
    "elastic": str,
    "global_batch_size": int,
    "microbatch_size": int,
    "join_grace": float,
    "freeze_timeout": float,
}
assert set(_KINDS) == set(LaunchConfig.__dataclass_fields__)


def parse(arguments: Sequence[str]) -> CommandLine:
    """Read the command line.

    Raises:
        LaunchError: a flag is not known or has no value that it can have, or no
            script is named.
        HelpAsked: somebody wants to see USAGE.
    """
    left = list(arguments)
    settings: dict[str, Any] = {}
    while left and left[0].startswith("-") and left[0] != "--":
        if left[0] in ("-h", "--help"):
            raise HelpAsked
        if _name_of(left[0]) not in _KINDS:
            raise LaunchError(_unknown(left[0]))
        _take(left, settings)
    if left and left[0] == "--":
        del left[0]
    if not left:
        raise LaunchError("no script is named: python -m distlab.launch script.py")
    script, rest = left[0], left[1:]
    if settings:  # the flags came first: the rest is the script's
        return CommandLine(settings, script, tuple(rest))
    own: list[str] = []
    while rest and rest[0] != "--":
        if rest[0].startswith("--") and _name_of(rest[0]) in _KINDS:
            _take(rest, settings)
        else:
            own.append(rest.pop(0))
    return CommandLine(settings, script, (*own, *rest[1:]))


def _name_of(flag: str) -> str:
    return flag.partition("=")[0].lstrip("-").replace("-", "_")


def _take(left: list[str], settings: dict[str, Any]) -> None:
    """Take one flag, and its value, from the front."""
    flag, has_value, text = left.pop(0).partition("=")
    name = _name_of(flag)
    if not has_value:
        if not left:
            raise LaunchError(f"{flag} has no value")
        text = left.pop(0)
    try:
        if name == "nnodes" and ":" in text:
            least, _, text = text.partition(":")
            settings["min_nodes"] = int(least)
        settings[name] = _KINDS[name](text)
    except ValueError:
        kind = "a whole number" if _KINDS[name] is int else "a number"
        raise LaunchError(f"{flag} is {text!r}, must be {kind}") from None


def _unknown(flag: str) -> str:
    near = difflib.get_close_matches(_name_of(flag), _KINDS, n=1)
    hint = f"; did you mean --{near[0].replace('_', '-')}?" if near else ""
    return f"there is no flag {flag.partition('=')[0]}{hint or ': see --help'}"
