"""All command-line options, our own and torchrun's, in one table.

We either support an option, or refuse it and say what to use instead. A test compares
the table with torch's own parser, so we can't miss an option of torchrun.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from distlab.launch.config import LOOPBACK, ON_HANG, LaunchError
from distlab.launch.output import PREFIX, Output, streams, texts

C10D_PORT = 29400  # torchrun's default for an --rdzv-endpoint without a port
_CONF = {
    "timeout": "start_timeout",
    "join_timeout": "start_timeout",
    "last_call_timeout": "last_call",
    "rank": "node_rank",
}
"""Keys of --rdzv-conf, which are torch's names for our settings."""
_CONF_ELSE = {"is_host", "keep_alive_interval", "keep_alive_max_attempt", "store_type"}
_CONF_OF_TORCHS_STORE = {"close_timeout", "heartbeat_timeout", "read_timeout"}
_TEMPLATE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
_NAME = re.compile(r"[\w.:%-]+")


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option; we write its name with underscores, but users may use dashes."""

    read: Callable[[str], Any] = str
    must_be: str = "text"
    is_flag: bool = False
    is_torchruns: bool = False
    """If True, PET_<NAME> in the environment also sets it."""
    instead: str = ""
    """If set, we don't support the option, and this says what to use instead."""


def choice(*names: str) -> Callable[[str], str]:
    """Return a reader that accepts only these words."""

    def read(text: str) -> str:
        if text not in names:
            raise ValueError(text)
        return text

    return read


def whole(text: str) -> int:
    """Read a whole number."""
    return int(text)


def nodes(text: str) -> tuple[int, int]:
    """Read `N`, or `MIN:MAX`."""
    least, has_range, most = text.partition(":")
    return int(least), int(most if has_range else least)


def processes(text: str) -> int:
    """Read a number of ranks, or count the GPUs or CPU cores of this node.

    Raises:
        LaunchError: this node has no such device.
    """
    if text.strip().lstrip("-").isdigit():
        return int(text)
    import torch

    if text in ("gpu", "xpu"):
        kind = torch.cuda if text == "gpu" else torch.xpu
        if not kind.is_available():
            raise LaunchError(
                f"--nproc-per-node {text}: torch finds no such device here; pass a "
                "number, or cpu for one rank per core"
            )
        return int(kind.device_count())
    if text == "auto" and torch.accelerator.is_available():
        return int(torch.accelerator.device_count())
    if text in ("auto", "cpu"):
        return num_cpus()
    raise ValueError(text)


def num_cpus() -> int:
    """Count the cores that this process may use."""
    import os

    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def local_ranks(text: str) -> frozenset[int] | None:
    """Read a list such as 0,2; empty means all of them."""
    return frozenset(int(part) for part in text.split(",")) if text else None


def signals(text: str) -> tuple[str, ...]:
    """Read a list such as SIGTERM,SIGUSR1, which is checked later."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def pairs(text: str) -> dict[str, str]:
    """Read KEY=VALUE pairs separated by commas."""
    found = {}
    for part in filter(None, text.strip().split(",")):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if not key or not value:
            raise ValueError(text)
        found[key] = value
    return found


def endpoint(text: str) -> tuple[str, int | None]:
    """Read HOST or HOST:PORT; put an IPv6 address in brackets if it has a port.

    Example: "[::1]:29400" → ("::1", 29400)
    """
    host, port = text.strip(), ""
    if not (host.startswith("[") and host.endswith("]")) and ":" in host:
        is_bare_ipv6 = host.count(":") > 1 and not host.startswith("[")
        if not is_bare_ipv6:
            host, _, port = host.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not _NAME.fullmatch(host) or (port and not port.isdecimal()):
        raise ValueError(text)
    if port and int(port) > 65535:
        raise ValueError(text)
    return host, int(port) if port else None


def _torchruns(read: Callable[[str], Any], must_be: str) -> Option:
    return Option(read=read, must_be=must_be, is_torchruns=True)


def _refused(instead: str) -> Option:
    return Option(is_torchruns=True, instead=instead)


_FLAG = Option(is_flag=True, is_torchruns=True)
_WHOLE, _SECONDS = "a whole number", "a number of seconds"
_STREAMS = "0 to 3, or a list such as 0:3,1:1"
_NUMA = ("node", "socket", "exclusive", "core-complex")

TORCHRUNS: dict[str, Option] = {
    "nnodes": _torchruns(nodes, "a whole number, or MIN:MAX such as 1:2"),
    "nproc_per_node": _torchruns(processes, "a whole number, auto, cpu, gpu or xpu"),
    "rdzv_backend": _torchruns(choice("static", "c10d"), "c10d or static"),
    "rdzv_endpoint": _torchruns(endpoint, "HOST:PORT"),
    "rdzv_id": _torchruns(str, "a name"),
    "rdzv_conf": _torchruns(pairs, "KEY=VALUE,…"),
    "standalone": _FLAG,
    "max_restarts": _torchruns(whole, _WHOLE),
    "monitor_interval": _torchruns(float, _SECONDS),
    "start_method": _torchruns(
        choice("spawn", "fork", "forkserver"), "spawn, fork or forkserver"
    ),
    "event_log_handler": _torchruns(
        choice("null", "console"),
        "null or console; the launcher reports events on stderr, and with --standby in "
        "LOG_DIR/recoveries.jsonl",
    ),
    "role": _torchruns(str, "a name"),
    "module": _FLAG,
    "no_python": _FLAG,
    "run_path": _FLAG,
    "log_dir": _torchruns(str, "a folder"),
    "redirects": _torchruns(streams, _STREAMS),
    "tee": _torchruns(streams, _STREAMS),
    "local_ranks_filter": _torchruns(local_ranks, "local ranks such as 0,1"),
    "duplicate_stdout_filters": _torchruns(texts, "texts such as apple,orange"),
    "duplicate_stderr_filters": _torchruns(texts, "texts such as apple,orange"),
    "node_rank": _torchruns(whole, _WHOLE),
    "master_addr": _torchruns(str, "an address"),
    "master_port": _torchruns(whole, _WHOLE),
    "local_addr": _torchruns(str, "an address"),
    "logs_specs": _refused(
        "the launcher writes rank_<r>.log to --log-dir; to choose what it shows, use "
        "--redirects, --tee and --local-ranks-filter"
    ),
    "numa_binding": Option(read=choice(*_NUMA), must_be=", ".join(_NUMA)),
    "signals_to_handle": _torchruns(signals, "signals such as SIGTERM,SIGUSR1"),
    "shutdown_timeout": _torchruns(float, _SECONDS),
    "virtual_local_rank": _FLAG,
}
OURS: dict[str, Option] = {
    "backend": Option(must_be="a backend such as gloo"),
    "monitor": Option(must_be="a folder"),
    "also": Option(read=signals, must_be="places such as prometheus:9400"),
    "explain_hangs": Option(is_flag=True),
    "on_hang": Option(read=choice(*ON_HANG), must_be=", ".join(ON_HANG)),
    "no_progress": Option(read=float, must_be=_SECONDS),
    "hang_report": Option(must_be="a file"),
    "hang_stacks": Option(is_flag=True),
    "grace_period": Option(read=float, must_be=_SECONDS),
    "start_timeout": Option(read=float, must_be=_SECONDS),
    "last_call": Option(read=float, must_be=_SECONDS),
    "node_timeout": Option(read=float, must_be=_SECONDS),
    "standby": Option(read=int, must_be=_WHOLE),
    "elastic": Option(must_be="MIN:MAX"),
    "global_batch_size": Option(read=int, must_be=_WHOLE),
    "microbatch_size": Option(read=int, must_be=_WHOLE),
    "join_grace": Option(read=float, must_be=_SECONDS),
    "freeze_timeout": Option(read=float, must_be=_SECONDS),
    "use_env": Option(is_flag=True),  # from torch.distributed.launch; always on
}
OPTIONS = {**TORCHRUNS, **OURS}
SHORT = {"n": "nproc_per_node", "m": "module", "r": "redirects", "t": "tee"}


def find(flag: str) -> str:
    """Return the option that a flag names, in full or by a unique prefix.

    Raises:
        LaunchError: there is no such option.
    """
    name = flag.lstrip("-").replace("-", "_")
    if not flag.startswith("--"):
        if name in SHORT:
            return SHORT[name]
    elif name in OPTIONS:
        return name
    elif len(found := [one for one in OPTIONS if one.startswith(name)]) == 1:
        return found[0]
    near = difflib.get_close_matches(name, OPTIONS, n=1)
    hint = f"; did you mean {dashed(near[0])}?" if near else ": see --help"
    raise LaunchError(f"there is no flag {flag}{hint}")


def dashed(name: str) -> str:
    """Return an option's name as you type it, with dashes."""
    return "--" + name.replace("_", "-")


def value(name: str, text: str, flag: str) -> Any:
    """Read an option's value; `flag` is the name that the user typed.

    Raises:
        LaunchError: the value isn't valid, or we don't support the option.
    """
    option = OPTIONS[name]
    if option.instead:
        raise LaunchError(f"distlab.launch has no {flag}: {option.instead}")
    try:
        return option.read(text)
    except LaunchError:
        raise
    except ValueError:
        raise LaunchError(
            f"{flag} is {text!r}, but it must be {option.must_be}{_hint(name, text)}"
        ) from None


def _hint(name: str, text: str) -> str:
    if name == "rdzv_backend":
        return (
            f". Agents meet at node 0, so they don't need {text}. To use c10d, pass "
            "the address of node 0 with --rdzv-endpoint"
        )
    return ""


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """Read torchrun's options from PET_<NAME> variables.

    Raises:
        LaunchError: a value isn't valid.
    """
    said: dict[str, Any] = {}
    for name, option in TORCHRUNS.items():
        variable = f"PET_{name.upper()}"
        text = environment.get(variable, "") if option.is_torchruns else ""
        if not text:
            continue
        if not option.is_flag:
            said[name] = value(name, text, variable)
        elif text.strip().lstrip("-").isdigit():
            said[name] = bool(int(text))
        else:
            raise LaunchError(f"{variable} is {text!r}, but it must be 0 or 1")
    if template := environment.get(_TEMPLATE):
        said["template"] = template
    return said


def settings_of(
    said: Mapping[str, Any], srun: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Translate options to the fields of LaunchConfig; `srun` fills in missing ones.

    Raises:
        LaunchError: two options exclude each other.
    """
    left = dict(said)
    for name in ("start_method", "event_log_handler", "use_env"):
        left.pop(name, None)  # no effect: each rank's script is its own program anyway
    settings: dict[str, Any] = {}
    if (run_as := _run_as(left)) != "script":
        settings["run_as"] = run_as
    least, most = left.pop("nnodes", (None, None))
    if most is not None:
        settings["nnodes"] = most
        if least != most:
            settings["min_nodes"] = least
    if "rdzv_id" in left:
        settings["run_id"] = left.pop("rdzv_id")
    if "shutdown_timeout" in left:
        settings["grace_period"] = left.pop("shutdown_timeout")
    if (output := _output(left)) != Output():
        settings["output"] = output
    meeting = _meeting(left, most, srun or {})
    return {**settings, **meeting, **left}


def _run_as(left: dict[str, Any]) -> str:
    is_module, is_command, is_path = (
        left.pop(name, False) for name in ("module", "no_python", "run_path")
    )
    if is_path:  # takes precedence, as in torchrun
        return "path"
    if is_module and is_command:
        raise LaunchError(
            "--module and --no-python can't be combined, because a module needs "
            "Python: drop one of them"
        )
    return "module" if is_module else "command" if is_command else "script"


def _output(left: dict[str, Any]) -> Output:
    return Output(
        redirects=left.pop("redirects", 0),
        tee=left.pop("tee", 0),
        local_ranks=left.pop("local_ranks_filter", None),
        stdout_filters=left.pop("duplicate_stdout_filters", ()),
        stderr_filters=left.pop("duplicate_stderr_filters", ()),
        role=left.get("role", "default"),
        template=left.pop("template", PREFIX),
    )


def _meeting(
    left: dict[str, Any], nnodes: int | None, srun: Mapping[str, Any]
) -> dict[str, Any]:
    """Return where the agents meet, and which node this is."""
    host, port = left.pop("rdzv_endpoint", (None, None))
    is_c10d = left.pop("rdzv_backend", "static") == "c10d"
    conf = left.pop("rdzv_conf", {})
    settings = _configured(conf)
    if left.pop("standalone", False):
        if (nnodes or 1) > 1:
            raise LaunchError(
                f"--standalone is for one node, but --nnodes is {nnodes}: drop one"
            )
        for name in ("node_rank", "master_addr", "master_port"):
            left.pop(name, None)  # as in torchrun, which picks its own address
        return {**settings, "nnodes": 1, **_own_address(left)}
    if nnodes is None or nnodes > 1:
        settings = {**srun, **settings}
    if host is not None:
        settings["master_addr"] = LOOPBACK if host == "localhost" else host
        settings["master_port"] = C10D_PORT if port is None and is_c10d else port or 0
        left.pop("master_addr", None)
        left.pop("master_port", None)
    is_one = (nnodes or settings.get("nnodes", 1)) == 1
    if is_one and host is None and "master_addr" not in left:
        settings |= _own_address(left)
    if is_c10d:
        settings = _c10d(
            settings, left, conf, is_one=is_one, has_place=host is not None
        )
    return settings


def _c10d(
    settings: dict[str, Any],
    left: dict[str, Any],
    conf: Mapping[str, str],
    *,
    is_one: bool,
    has_place: bool,
) -> dict[str, Any]:
    """Let c10d find this node's rank, and on a single node also the port."""
    if is_one:
        left.pop("node_rank", None)
        return {**settings, "any_port": True}
    if _is_true(conf.get("is_host", "0")):
        return {**settings, "node_rank": 0}
    if has_place and "node_rank" not in left:
        settings = {k: v for k, v in settings.items() if k != "node_rank"}
        return {**settings, "any_node": True}
    return settings


def _is_true(text: str) -> bool:
    return text.lower() in ("1", "true", "t", "yes", "y")


def _own_address(left: Mapping[str, Any]) -> dict[str, Any]:
    """On a single node, meet at --local-addr if it is given."""
    return {"master_addr": left["local_addr"]} if "local_addr" in left else {}


def _configured(conf: Mapping[str, str]) -> dict[str, Any]:
    """Translate the keys of --rdzv-conf to our settings.

    Raises:
        LaunchError: a key is unknown, or a value isn't valid.
    """
    known = {*_CONF, *_CONF_ELSE, *_CONF_OF_TORCHS_STORE}
    if unknown := sorted(conf.keys() - known):
        raise LaunchError(
            f"--rdzv-conf has no key {unknown[0]!r}; choose from "
            f"{', '.join(sorted(known))}"
        )
    try:
        found: dict[str, Any] = {
            _CONF[key]: int(text) for key, text in conf.items() if key in _CONF
        }
        if "keep_alive_interval" in conf or "keep_alive_max_attempt" in conf:
            interval_s = float(conf.get("keep_alive_interval", "5"))
            attempts = int(conf.get("keep_alive_max_attempt", "3"))
            found["node_timeout"] = interval_s * attempts
    except ValueError:
        raise LaunchError(
            f"--rdzv-conf is {dict(conf)}: its times must be whole seconds"
        ) from None
    if conf.get("store_type", "tcp") != "tcp":
        raise LaunchError(
            f"--rdzv-conf store_type={conf['store_type']}: agents meet over TCP only, "
            "at --rdzv-endpoint"
        )
    return found
