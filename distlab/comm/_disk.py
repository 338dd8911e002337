"""The disk of a service or a checkpoint, and what it promises after a crash.

What `write`, `append`, `rename` and `remove` do is seen by the next `read` at once. A
crash of the machine (not merely of the process) leaves less:

    written, appended   durable after `sync(path)`; before, any of it may be there, or
                        torn at any byte
    renamed, removed,   durable after `sync_folder()`; before, the old name, the new one
    newly named         or both may be there, even if the data is not

Source: T. Pillai et al., "All file systems are not created equal" (OSDI 2014), section
2 and table 1, for what file systems leave; POSIX fsync(2) for the folder.
"""

from __future__ import annotations

import os
import re
from typing import Protocol


class DiskError(OSError):
    """What a disk refuses: it is full, no such file, a path outside of its folder."""


class Disk(Protocol):
    """Files in one folder, by their names there: "log", "log.tmp".

    Every method raises `DiskError` for a path that leads elsewhere.
    """

    def write(self, path: str, data: bytes) -> None:
        """Make the file hold `data` and nothing else.

        Raises:
            DiskError: the disk is full; the file may hold a part of `data`.
        """

    def append(self, path: str, data: bytes) -> None:
        """Put `data` at the end of the file, which is made if it is not there.

        Raises:
            DiskError: the disk is full; a part of `data` may be there.
        """

    def sync(self, path: str) -> None:
        """Make what the file holds durable; not its name: that needs `sync_folder`.

        Raises:
            DiskError: there is no such file.
        """

    def rename(self, source: str, target: str) -> None:
        """Give a file another name, in one step; a file of that name is gone.

        Raises:
            DiskError: there is no file `source`.
        """

    def sync_folder(self) -> None:
        """Make the names of the folder durable: what was made, renamed, removed."""

    def read(self, path: str) -> bytes:
        """All that the file holds.

        Raises:
            DiskError: there is no such file.
        """

    def names(self) -> list[str]:
        """The names of all files, sorted."""

    def remove(self, path: str) -> None:
        """Take a name, and so the file, away.

        Raises:
            DiskError: there is no such file.
        """


_MOST_BYTES = 255  # of a name, on the file systems in use


def require_name(path: str) -> None:
    """A path is the name of a file in the disk's own folder.

    Raises:
        DiskError: it is not.
    """
    if not isinstance(path, str):
        raise TypeError(f"a path is a str, not {type(path).__name__}")
    elsewhere = path in ("", ".", "..") or "/" in path or "\\" in path or "\0" in path
    if elsewhere or len(os.fsencode(path)) > _MOST_BYTES:
        shown = path if len(path) <= 60 else f"{path[:57]}..."
        raise DiskError(f"{shown!r} is no name of a file in the disk's own folder")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is an address such as s3://bucket rather than a folder.

    Taken as a path, it would become a folder called `s3:` in the working folder.
    """
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+:/", os.fspath(path)) is not None


def require_bytes(data: bytes) -> None:
    """What is written is bytes.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(data, bytes):
        raise TypeError(f"a file holds bytes, not {type(data).__name__}")


def no_file(path: str) -> DiskError:
    """What to raise for a name that no file has."""
    return DiskError(f'there is no file "{path}"')
