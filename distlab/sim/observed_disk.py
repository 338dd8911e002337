"""A disk in front of another one, which hears of each operation before it is done."""

from __future__ import annotations

from collections.abc import Callable

from distlab.comm import Disk

Put = Callable[[str, bytes], None]


class ObservedDisk:
    """Passes every operation on. A subclass says in `_begin` what happens before.

    `read` and `names` change nothing, and are not reported.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def write(self, path: str, data: bytes) -> None:
        """See `Disk.write`."""
        self._begin("write", path, data)
        self._put(self._disk.write, path, data)

    def append(self, path: str, data: bytes) -> None:
        """See `Disk.append`."""
        self._begin("append", path, data)
        self._put(self._disk.append, path, data)

    def sync(self, path: str) -> None:
        """See `Disk.sync`."""
        self._begin("sync", path)
        self._disk.sync(path)

    def rename(self, source: str, target: str) -> None:
        """See `Disk.rename`."""
        self._begin("rename", source, target)
        self._disk.rename(source, target)

    def sync_folder(self) -> None:
        """See `Disk.sync_folder`."""
        self._begin("sync_folder")
        self._disk.sync_folder()

    def read(self, path: str) -> bytes:
        """See `Disk.read`."""
        return self._disk.read(path)

    def names(self) -> list[str]:
        """See `Disk.names`."""
        return self._disk.names()

    def remove(self, path: str) -> None:
        """See `Disk.remove`."""
        self._begin("remove", path)
        self._disk.remove(path)

    def _begin(self, name: str, *arguments: str | bytes) -> None:
        """An operation begins; what this raises is raised in its place."""

    def _put(self, put: Put, path: str, data: bytes) -> None:
        """Write or append: a subclass may put less."""
        put(path, data)
