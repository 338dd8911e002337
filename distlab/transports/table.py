"""The table of transports: the ways to communicate, and what each one supports.

A file called *_transport.py in this folder registers its transport:

    register_transport("name", open_name, …)      in name_transport.py

That entry is all that the rest of the package knows about a transport: the runner, the
launcher and `init_process_group` read it here. To add a transport, you therefore write
one file, or a package with an entry point in the group distlab.transports (see
distlab.registry). The file must not import torch, or any library that the transport
needs, until the transport is opened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from distlab.registry import Registry

Comm: TypeAlias = Any  # distlab.comm imports torch


@dataclass(kw_only=True)
class Meeting:
    """Where a rank meets the others."""

    rank: int
    world_size: int
    local_rank: int
    host: str = "127.0.0.1"
    """The address by which the ranks of other machines reach this one."""
    timeout_s: float
    """How long to wait for the other ranks, and later for each message."""

    def torch_store(self) -> Any:
        """Return a store of torch.distributed that all ranks share."""
        raise NotImplementedError

    def own_store(self) -> tuple[Any, bytes]:
        """Return a `distlab.comm.Store` that all ranks share, and their secret."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Transport:
    """A transport, as it registers itself.

    `open(meeting)` connects to the other ranks and returns this rank's Comm. Every rank
    must call it.
    """

    name: str
    open: Callable[[Meeting], Comm]
    title: str
    """What it is, in a few words."""
    needs_gpu: bool = False
    """True if each rank needs a GPU of its own."""
    is_torchs: bool = False
    """True if torch.distributed has a backend of this name, as torch's DDP needs."""
    regroups: bool = False
    """True if --standby and --elastic can form its groups again without lost ranks."""
    aborts: bool = False
    """True if its threads may wait for a lost rank until `Comm.abort` ends them."""


_table = Registry[Transport](
    "transport", "distlab.transports", "distlab.transports", "backend", ValueError
)


def register_transport(
    name: str, open: Callable[[Meeting], Comm], **facts: Any
) -> Transport:
    """Add a transport to the table; `facts` are the fields of Transport.

    Raises:
        ValueError: another module has registered this name.
    """
    transport = Transport(name=name, open=open, **facts)
    _table.add(name, transport, open)
    return transport


def find_transport(name: str) -> Transport:
    """Return the transport with this name.

    Raises:
        ValueError: there is no such transport, or its package can't be imported.
    """
    return _table.find(name)


def load_ours() -> None:
    """Import our own transports now, so that forked processes already have them."""
    _table.load_ours()


def transport_names(
    is_meant: Callable[[Transport], bool] = lambda _: True,
) -> tuple[str, ...]:
    """Return the names of the transports for which `is_meant` is true; by default, all.

    They are in alphabetical order.
    """
    return tuple(sorted(one.name for one in _table.entries() if is_meant(one)))
