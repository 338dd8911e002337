"""A process that becomes one rank: it imports what ranks need, and waits for its job.

It reads one request per line from its connection to the parent (see runner/wire.py):

    preload    → ready, with the port at which it can be called
    job        → it is that rank from now on, see runner/rank.py

Its standard input stays open as long as the parent lives. When it closes, somebody has
killed the parent, so we end ourselves and remove the folder of all its ranks.
"""

from __future__ import annotations

import _thread
import os
import socket
import time
from typing import NoReturn

_EXIT = os._exit  # as it was before a program could replace it
_PATIENCE_S, _PAUSE_S = 10.0, 0.2
_ENDING: list[bool] = []  # not empty once the parent has ended


def main(arguments: list[str]) -> NoReturn:
    """Serve the parent: its port and folder, and what to import, are the arguments."""
    port, home, modules = int(arguments[0]), arguments[1], arguments[2:]
    lifeline = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # a rank has no keyboard
    os.close(nothing)
    word = b""
    while (letter := os.read(lifeline, 1)) not in (b"", b"\n"):
        word += letter
    # Below `threading`: it is no thread of the program.
    _thread.start_new_thread(_end_with_parent, (lifeline, home))
    try:
        _serve(port, word, modules)
    except OSError:
        # It also breaks when the parent ends, and then the folder has to go first.
        time.sleep(_PAUSE_S)
        if _ENDING:
            time.sleep(_PATIENCE_S)
        raise


def _serve(port: int, word: bytes, modules: list[str]) -> NoReturn:
    control = socket.create_connection(("127.0.0.1", port))
    control.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    control.sendall(word)
    # All of this while we import torch, so that nobody waits for it later.
    import encodings.idna  # noqa: F401

    from distlab.processes.fork_server import import_all
    from distlab.runner import rank
    from distlab.runner.wire import decode, encode

    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    heard = b""
    while True:
        import_all(modules)
        control.sendall(encode({"k": "ready", "port": listener.getsockname()[1]}))
        while b"\n" not in heard:
            piece = control.recv(1 << 16)
            if not piece:
                raise ConnectionResetError
            heard += piece
        line, heard = heard.split(b"\n", 1)
        request = decode(line)
        if request["k"] == "job":
            rank.live(request, request["number"], control, None, listener)
        modules = request["modules"]


def _end_with_parent(lifeline: int, home: str) -> None:
    try:
        while os.read(lifeline, 1):
            pass
    finally:
        _ENDING.append(True)
        from distlab.runner import own_folder

        own_folder.remove(home)
        _EXIT(1)
