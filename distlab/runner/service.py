"""The life of a service's process: make the service on its disk, and answer calls.

Started again after a death, it is made anew on the files that the one before left.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, NoReturn

from distlab.comm import RealClock, ServiceContext
from distlab.comm.tcp.server import Server
from distlab.runner.limits import cap_files, cap_memory
from distlab.runner.rank import (
    directory_of,
    disk_here,
    encode_failure,
    resolve,
    say,
    settle_in,
)
from distlab.runner.wire import encode

_EXIT = os._exit


def live(
    job: dict[str, Any],
    number: int,
    control: socket.socket,
    output: int,
    listener: socket.socket,
) -> NoReturn:
    """Be the process `number` of `job`, a service; never returns."""
    try:
        try:
            service = job["services"][number - job["world_size"]]
            folder, home = Path(job["folder"]), f"service{number}"
            settle_in(folder, number, home, output, job["seconds"])
            _serve(job, service, control, listener)
        except BaseException as error:
            say(control, encode_failure(error))
            while control.recv(1):
                pass
    finally:
        _EXIT(1)


def _serve(
    job: dict[str, Any],
    service: dict[str, Any],
    control: socket.socket,
    listener: socket.socket,
) -> None:
    make = resolve(service["factory"])
    cap_memory(job["memory_bytes"])
    cap_files()
    context = ServiceContext(disk=disk_here(), clock=RealClock())
    directory = directory_of(job)
    made = make(context, *service["args"])
    server = Server(
        listener,
        directory.identity(),
        service["name"],
        made,
        max_frame_bytes=directory.max_frame_bytes,
    )
    say(control, encode({"k": "ready"}))
    server.run()
