"""A disk in front of another one, which is told of each operation in advance."""

from __future__ import annotations

from collections.abc import Callable

from distlab.comm import Disk

Put = Callable[[str, bytes], None]


class ObservedDisk:
    """Passes every operation on; a subclass's `_begin` decides what comes before.

    `read` and `names` change nothing, and are not reported.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def write(self, path: str, data: bytes) -> None:
        """Implement `Disk.write`."""
        self._begin("write", path, data)
        self._put(self._disk.write, path, data)

    def append(self, path: str, data: bytes) -> None:
        """Implement `Disk.append`."""
        self._begin("append", path, data)
        self._put(self._disk.append, path, data)

    def sync(self, path: str) -> None:
        """Implement `Disk.sync`."""
        self._begin("sync", path)
        self._disk.sync(path)

    def rename(self, source: str, target: str) -> None:
        """Implement `Disk.rename`."""
        self._begin("rename", source, target)
        self._disk.rename(source, target)

    def sync_folder(self) -> None:
        """Implement `Disk.sync_folder`."""
        self._begin("sync_folder")
        self._disk.sync_folder()

    def read(self, path: str) -> bytes:
        """Implement `Disk.read`."""
        return self._disk.read(path)

    def names(self) -> list[str]:
        """Implement `Disk.names`."""
        return self._disk.names()

    def remove(self, path: str) -> None:
        """Implement `Disk.remove`."""
        self._begin("remove", path)
        self._disk.remove(path)

    def _begin(self, name: str, *arguments: str | bytes) -> None:
        """Note that an operation begins; an error raised here replaces it."""

    def _put(self, put: Put, path: str, data: bytes) -> None:
        """Write or append; a subclass may write less."""
        put(path, data)
