"""The disk of a service or a checkpoint, and its guarantees after a crash.

The next `read` immediately sees everything that `write`, `append`, `rename` and
`remove` did. But if the machine crashes (not merely the process), less is left:

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
    """Raised if the disk is full, a file doesn't exist, or a path leads elsewhere."""


class Disk(Protocol):
    """The files in one folder, by names such as "log" or "log.tmp".

    Every method raises `DiskError` for a path that leads out of the folder.
    """

    def write(self, path: str, data: bytes) -> None:
        """Make the file hold `data` and nothing else.

        Raises:
            DiskError: the disk is full; the file may contain a part of `data`.
        """

    def append(self, path: str, data: bytes) -> None:
        """Append `data` to the file, creating it if necessary.

        Raises:
            DiskError: the disk is full; the file may contain a part of `data`.
        """

    def sync(self, path: str) -> None:
        """Make the file's contents durable, but not its name; that takes `sync_folder`.

        Raises:
            DiskError: there is no such file.
        """

    def rename(self, source: str, target: str) -> None:
        """Rename a file atomically, replacing any file that has the new name.

        Raises:
            DiskError: there is no file `source`.
        """

    def sync_folder(self) -> None:
        """Make names durable after files were created, renamed or removed."""

    def read(self, path: str) -> bytes:
        """Read the whole file.

        Raises:
            DiskError: there is no such file.
        """

    def names(self) -> list[str]:
        """Return the names of all files, sorted."""

    def remove(self, path: str) -> None:
        """Remove a file.

        Raises:
            DiskError: there is no such file.
        """


_MOST_BYTES = 255  # of a name, on the file systems in use


def require_name(path: str) -> None:
    """Require that a path names a file in the disk's own folder.

    Raises:
        DiskError: it doesn't.
    """
    if not isinstance(path, str):
        raise TypeError(f"a path is a str, not {type(path).__name__}")
    elsewhere = path in ("", ".", "..") or "/" in path or "\\" in path or "\0" in path
    if elsewhere or len(os.fsencode(path)) > _MOST_BYTES:
        shown = path if len(path) <= 60 else f"{path[:57]}..."
        raise DiskError(f"{shown!r} is no name of a file in the disk's own folder")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return True if a path is an address such as s3://bucket rather than a folder.

    If we took it for a path, we would create a folder called `s3:` in the working
    folder.
    """
    return re.match(r"[a-zA-Z][a-zA-Z0-9+.-]+:/", os.fspath(path)) is not None


def require_bytes(data: bytes) -> None:
    """Require that `data` is a bytes object.

    Raises:
        TypeError: it isn't.
    """
    if not isinstance(data, bytes):
        raise TypeError(f"a file holds bytes, not {type(data).__name__}")


def no_file(path: str) -> DiskError:
    """Make the error for a file that doesn't exist."""
    return DiskError(f'there is no file "{path}"')
