"""The lines from the parent to the processes of a run, and what they are given.

A process has a control (records come back on it, its end tells the process to end), an
output (what it prints) and a listener (where it can be called).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distlab.runner.doors import Door


@dataclass
class Post:
    """Our ends of one process's lines."""

    control: socket.socket
    output: int

    def close(self) -> None:
        """Give them up."""
        self.control.close()
        with contextlib.suppress(OSError):
            os.close(self.output)


def close_all(posts: Sequence[Post]) -> None:
    """Give all up: those, too, that have taken the place of others meanwhile."""
    for post in posts:
        post.close()


def open_posts(doors: Sequence[Door], give: Callable[[list[int]], None]) -> list[Post]:
    """Lines for one process behind each door; `give` sends their ends away."""
    pairs = [socket.socketpair() for _ in doors]
    pipes = [os.pipe() for _ in doors]
    posts = [Post(pair[0], pipe[0]) for pair, pipe in zip(pairs, pipes, strict=True)]
    listeners: list[socket.socket] = []
    try:
        listeners += [door.listen() for door in doors]
        controls = [pair[1].fileno() for pair in pairs]
        outputs = [pipe[1] for pipe in pipes]
        give([*controls, *outputs, *(one.fileno() for one in listeners)])
    except BaseException:
        close_all(posts)
        raise
    finally:
        for pair, pipe in zip(pairs, pipes, strict=True):
            pair[1].close()
            os.close(pipe[1])
        for listener in listeners:
            listener.close()
    return posts
