"""One rank's life: form the group, run the program, tell the result, wait to be ended.

A finished rank is parked, not gone: a rank that exits would make its peers' sockets
close, and their "connection closed" would hide the real mistake.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TextIO

from torch.distributed import FileStore  # type: ignore[attr-defined]

from distlab.comm import (
    ByteMeter,
    Comm,
    CommRefusedError,
    Event,
    Journal,
    PeerLost,
    RealDisk,
    Store,
)
from distlab.comm.tcp.endpoint import Directory, TcpEndpoint, store_of
from distlab.processes.tree import die_with_parent
from distlab.runner import stacks
from distlab.runner.asking import told_by
from distlab.runner.context import RankContext, seed_everything
from distlab.runner.gpus import show_gpus
from distlab.runner.last_call import LastCall, path_of
from distlab.runner.limits import cap_files, cap_memory
from distlab.runner.newcomer import NewcomersComm
from distlab.runner.record import LINE_LOST
from distlab.runner.wire import encode
from distlab.transports import Meeting, find_transport

_KEPT_OPEN: list[object] = []
"""The transport of this rank: it must outlive the program, or its sockets close."""

_EXIT = os._exit  # as it was before a program could replace it
_MOST_TEXT = 10_000  # characters of an error's message; a verdict shows the first 160

_ONE_AT_A_TIME = threading.Lock()
"""Held to write a line to the parent: threads of a program may call comm too."""


def live(
    job: dict[str, Any],
    rank: int,
    control: socket.socket,
    output: int | None,
    listener: socket.socket,
) -> NoReturn:
    """Run `job` as `rank` in this new process; never returns.

    `output` is what a forked process prints to; a spawned one has it already.
    """
    folder, pid, code = Path(job["folder"]), os.getpid(), 0
    try:
        try:
            settle_in(folder, rank, f"rank{rank}", output, job["seconds"])
            line = encode(_work(job, rank, folder, control, listener))
        except BaseException as error:
            line = encode_failure(error)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the program may have closed it
                stream.flush()
        if os.getpid() == pid:  # not a child that the program forked and forgot
            code = LINE_LOST  # until we are told to end
            say(control, line)
            while control.recv(1):
                pass
            code = 0
    finally:
        _EXIT(code)


def say(control: socket.socket, line: bytes) -> None:
    """Send a line to the parent."""
    with _ONE_AT_A_TIME:
        control.sendall(line)


def name_of(function: Callable[..., Any]) -> str:
    """What `resolve` finds it by."""
    return f"{function.__module__}:{function.__qualname__}"


def resolve(name: str) -> Callable[..., Any]:
    """The function that "package.module:function" names."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]


def settle_in(
    folder: Path, number: int, home: str, output: int | None, limit_s: float
) -> None:
    """Make this process one of its own: its session, output, stack file and folder."""
    if output is not None:
        os.setsid()
        die_with_parent()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
    sys.stdout = _printed_to(1)
    sys.stderr = _printed_to(2)
    stacks.write_to(folder / f"stack{number}", limit_s)
    (folder / home).mkdir(exist_ok=True)  # who is started again finds its files
    # Files that a rank writes by accident land here, and go with the run.
    os.chdir(folder / home)


def _printed_to(descriptor: int) -> TextIO:
    return open(descriptor, "w", 1, encoding="utf-8", closefd=False)


def _work(
    job: dict[str, Any],
    rank: int,
    folder: Path,
    control: socket.socket,
    listener: socket.socket,
) -> dict[str, Any]:
    endpoint = TcpEndpoint(directory_of(job), rank, listener)
    store = store_of(endpoint)
    transport = _connected(job, rank, folder, store)
    _KEPT_OPEN.extend((transport, endpoint))
    meter = ByteMeter(transport)
    if job["last_call"]:
        meter.traffic.note = LastCall(path_of(folder, rank))

    def tell(event: Event) -> None:
        say(control, encode(event))

    def note(event: Event) -> None:
        endpoint.require_free()  # before the call begins
        tell(event)

    is_journaled = job["journal"] and not job["lives"]
    if is_journaled:
        endpoint.on_wait = told_by(tell)
    context = RankContext(
        comm=Journal(meter, note) if is_journaled else meter,
        traffic=meter.traffic,
        report=lambda value: tell({"k": "report", "value": value}),
        store=store,
        endpoint=endpoint,
        disk=disk_here() if hasattr(os, "O_DIRECTORY") else None,  # not on Windows
    )
    program = resolve(job["program"])
    cap_memory(job["memory_bytes"])
    cap_files()
    seed_everything(job["seed"] + rank)
    tell({"k": "ready"})
    value = program(context, *job["args"])
    endpoint.finish()  # what it serves changes nothing any more
    return {
        "k": "result",
        "value": value,
        "sent_bytes": meter.traffic.sent_bytes,
        "messages": meter.traffic.messages,
        "in_calls_s": meter.traffic.in_calls_s,
    }


def disk_here() -> RealDisk:
    """The disk of this process, in its folder: it goes with the run."""
    here = Path("disk")
    here.mkdir(exist_ok=True)  # its name need not be durable: fsync takes its time
    return RealDisk(here)


def directory_of(job: dict[str, Any]) -> Directory:
    """Who can be called in the run of `job`."""
    addresses = {name: (host, port) for name, (host, port) in job["addresses"].items()}
    return Directory(
        addresses=addresses,
        secret=bytes.fromhex(job["secret"]),
        world_size=job["world_size"],
        max_frame_bytes=job["max_frame_bytes"],
    )


def _connected(job: dict[str, Any], rank: int, folder: Path, store: Store) -> Comm:
    world_size, timeout_s = job["world_size"], job["seconds"] + 60
    local_rank = rank % job["ranks_per_node"]
    if job["lives"]:
        return NewcomersComm(rank, world_size)
    transport = find_transport(job["backend"])
    if transport.needs_gpu:
        show_gpus()
    meeting = _Meeting(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        timeout_s=timeout_s,
        folder=folder,
        own=store,
        secret=bytes.fromhex(job["secret"]),
    )
    comm: Comm = transport.open(meeting)
    return comm


@dataclass(kw_only=True)
class _Meeting(Meeting):
    """The meeting of a run's ranks, all on one machine."""

    folder: Path
    own: Store
    secret: bytes

    def torch_store(self) -> FileStore:
        """Implement `Meeting.torch_store`."""
        return FileStore(str(self.folder / "store"), self.world_size)

    def own_store(self) -> tuple[Store, bytes]:
        """Implement `Meeting.own_store`."""
        return self.own, self.secret


def encode_failure(error: BaseException) -> bytes:
    """The line that tells the parent of it."""
    return encode(raised(error))


def raised(error: BaseException) -> dict[str, Any]:
    """What is told to the parent of an exception that ended the program."""
    frames = [
        (frame.filename, frame.lineno or 0)
        for frame in traceback.extract_tb(error.__traceback__)
    ]
    if isinstance(error, SyntaxError) and error.filename:
        frames.append((error.filename, error.lineno or 0))
    return {
        "k": "raised",
        "type": type(error).__name__[:_MOST_TEXT],
        "message": _text(error),
        "refused": error.kind if isinstance(error, CommRefusedError) else "",
        "peer_lost": _follows_from_lost_peer(error),
        "frames": frames,
    }


def _text(error: BaseException) -> str:
    try:
        return str(error)[:_MOST_TEXT] or type(error).__name__
    except BaseException as second:  # even an exit: that must not be the rank's end
        return f"its message cannot be had: {type(second).__name__}"


def _follows_from_lost_peer(error: BaseException | None) -> bool:
    seen: set[int] = set()  # a chain can be a circle
    while error is not None and id(error) not in seen:
        if isinstance(error, PeerLost):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
