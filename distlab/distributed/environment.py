"""Find this process's rank and where ranks meet, from arguments or the environment.

rank         RANK         SLURM_PROCID       set by torchrun or by srun
world_size   WORLD_SIZE   SLURM_NTASKS
local_rank   LOCAL_RANK   SLURM_LOCALID
address      MASTER_ADDR  SLURM_STEP_NODELIST   or init_method="tcp://host:port"
             MASTER_PORT  SLURM_JOB_ID
backend      DISTLAB_BACKEND                 set by distlab.launch
compare      DISTLAB_COMPARE                 0: collectives don't compare their calls
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from distlab.launch.slurm import rank_environment

LOOPBACK = "127.0.0.1"
_NAMES = {
    "rank": ("RANK", "SLURM_PROCID"),
    "world_size": ("WORLD_SIZE", "SLURM_NTASKS"),
    "local_rank": ("LOCAL_RANK", "SLURM_LOCALID"),
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """A process's place in its job; `address` is None if the job has a single rank."""

    rank: int
    world_size: int
    local_rank: int
    address: tuple[str, int] | None = None
    generation: int = 1  # one more with every restart of the job
    has_agent: bool = False  # the launcher keeps the store at `address`, not rank 0


def read_place(
    init_method: str = "env://",
    world_size: int | None = None,
    rank: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Place:
    """Read the place from the arguments, or else from the environment.

    Raises:
        ValueError: a value is missing or isn't an integer, or there is no such rank or
            local rank.
    """
    env = dict(os.environ if environment is None else environment)
    env |= rank_environment(env)
    rank = _number("rank", rank, env)
    world_size = _number("world_size", world_size, env)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of {world_size}: ranks count from 0")
    address = _address(init_method, env, needs_one=world_size > 1)
    local_rank = read_local_rank(env, rank)
    restarts = _first_number(("TORCHELASTIC_RESTART_COUNT",), env, 0)
    if restarts < 0:
        raise ValueError(f"TORCHELASTIC_RESTART_COUNT={restarts} must be at least 0")
    return Place(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        address=address if world_size > 1 else None,
        generation=1 + restarts,
        has_agent=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def read_local_rank(
    environment: Mapping[str, str] | None = None, other: int = 0
) -> int:
    """Read this process's number on its node; `other` if the environment lacks it.

    Raises:
        ValueError: the number isn't an integer, is negative, or isn't below
            LOCAL_WORLD_SIZE.
    """
    env = os.environ if environment is None else environment
    local_rank = _first_number(_NAMES["local_rank"], env, None)
    if local_rank is None:
        return other
    size = _first_number(("LOCAL_WORLD_SIZE",), env, None)
    if local_rank < 0 or (size is not None and local_rank >= size):
        of = "" if size is None else f" with LOCAL_WORLD_SIZE={size}"
        raise ValueError(f"LOCAL_RANK={local_rank}{of}: local ranks count from 0")
    return local_rank


def default_backend(environment: Mapping[str, str] | None = None) -> str:
    """Return the backend that our launcher was given, or gloo."""
    env = os.environ if environment is None else environment
    return env.get("DISTLAB_BACKEND") or "gloo"


def compares_calls(environment: Mapping[str, str] | None = None) -> bool:
    """Return False if DISTLAB_COMPARE is 0, so collectives don't compare their calls.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    env = os.environ if environment is None else environment
    value = env.get("DISTLAB_COMPARE") or "1"
    if value not in ("0", "1"):
        raise ValueError(f"DISTLAB_COMPARE={value}: set it to 0 or 1")
    return value == "1"


def own_host(address: tuple[str, int] | None) -> str:
    """Return the address by which the other ranks reach this machine.

    We ask the system which of its addresses it would use to reach `address`. This
    doesn't send anything.

    Raises:
        ValueError: this machine can't reach the address, or can't look up its name.
    """
    if address is None:
        return LOOPBACK
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            *address, type=socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:
        raise ValueError(
            f"MASTER_ADDR is {address[0]!r}, but this machine can't reach it or look "
            f"it up: {getattr(error, 'strerror', None) or error}"
        ) from error


def family_of(host: str) -> socket.AddressFamily:
    """Return IPv6 for an address such as ::1, and IPv4 for all others and for names."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _number(what: str, given: int | None, env: Mapping[str, str]) -> int:
    if given is not None:
        return given
    found = _first_number(_NAMES[what], env, None)
    if found is not None:
        return found
    names = " nor ".join(_NAMES[what])
    raise ValueError(
        f"no {what}: neither {names} is set; start the script with a launcher such as "
        "torchrun, or pass world_size=1, rank=0 for a single process"
    )


@overload
def _first_number(names: Sequence[str], env: Mapping[str, str], other: int) -> int: ...
@overload
def _first_number(
    names: Sequence[str], env: Mapping[str, str], other: None
) -> int | None: ...
def _first_number(
    names: Sequence[str], env: Mapping[str, str], other: int | None
) -> int | None:
    """Return the first of these variables that is set, or `other` if none is."""
    for name in names:
        if env.get(name):
            try:
                return int(env[name])
            except ValueError:
                raise ValueError(f"{name}={env[name]} is not an integer") from None
    return other


def _address(
    init_method: str, env: Mapping[str, str], needs_one: bool
) -> tuple[str, int] | None:
    if init_method == "env://":
        host, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
        what = "MASTER_ADDR and MASTER_PORT"
    elif init_method.startswith("tcp://"):
        host, _, port = init_method.removeprefix("tcp://").rpartition(":")
        what = f"init_method={init_method!r}"
    else:
        raise ValueError(
            f"init_method is {init_method!r}: choose env:// or tcp://host:port"
        )
    if host and port.isdecimal():
        if not 0 < int(port) < 2**16:
            raise ValueError(f"{what}: {port} is not a port, must be 1 to 65535")
        return host.strip("[]"), int(port)
    if needs_one:
        raise ValueError(f"{what} must name the host and the port where ranks meet")
    return None
