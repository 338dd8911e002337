"""Implement `Disk` on a folder of this machine."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distlab.comm._disk import DiskError, is_url, require_bytes, require_name

try:
    import fcntl
except ImportError:  # not on this system
    F_FULLFSYNC = None
else:
    F_FULLFSYNC = getattr(fcntl, "F_FULLFSYNC", None)

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_OPEN = (
    getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
    | getattr(os, "O_NONBLOCK", 0)  # don't wait if it is a pipe
)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)  # never write outside the folder


class RealDisk:
    """The files of one folder, which we create and make durable if necessary.

    `sync` and `sync_folder` call fsync (on macOS F_FULLFSYNC), and return once the
    drive says that it has the data. A rename is atomic. When a disk fills up, people
    sometimes move a file elsewhere and leave a link. You can read and remove such a
    link, but you can't write through it. We refuse pipes and folders that others have
    put there. Windows can't open a folder, so there is no such disk.

    Raises:
        DiskError: we can't create or open the folder, or this is Windows.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if is_url(folder):
            raise DiskError(
                f'"{folder}" is an address, not a folder: mount it, and name the folder'
            )
        if not hasattr(os, "O_DIRECTORY"):
            raise DiskError("this system can't make the names in a folder durable")
        self.folder = Path(folder).absolute()
        with _in_words(str(self.folder)):
            made = _make(self.folder)
        with self._open_folder():
            pass
        for parent in made:
            with _in_words(str(parent)):
                _fsync_folder(parent)

    def write(self, path: str, data: bytes) -> None:
        """Implement `Disk.write`."""
        self._put(path, data, os.O_TRUNC)

    def append(self, path: str, data: bytes) -> None:
        """Implement `Disk.append`."""
        self._put(path, data, os.O_APPEND)

    def sync(self, path: str) -> None:
        """Implement `Disk.sync`.

        Raises:
            DiskError: there is no such file, or the drive failed, so the contents are
                unknown.
        """
        with self._open(path, os.O_RDONLY | _NO_LINK) as file:
            _fsync(file)

    def rename(self, source: str, target: str) -> None:
        """Implement `Disk.rename`."""
        require_name(target)
        opened = self._open(source, os.O_RDONLY | _NO_LINK)
        with opened, self._open_folder() as folder:
            os.replace(source, target, src_dir_fd=folder, dst_dir_fd=folder)

    def sync_folder(self) -> None:
        """Implement `Disk.sync_folder`."""
        with self._open_folder() as folder:
            _fsync(folder)

    def read(self, path: str) -> bytes:
        """Implement `Disk.read`."""
        with self._open(path, os.O_RDONLY) as file:
            parts = []
            while part := os.read(file, 1 << 20):
                parts.append(part)
            return b"".join(parts)

    def names(self) -> list[str]:
        """Implement `Disk.names`, without pipes and folders but with links.

        This includes broken links, because their disk may just not be mounted.
        """
        with self._open_folder() as folder, os.scandir(folder) as entries:
            return sorted(
                entry.name
                for entry in entries
                if entry.is_file(follow_symlinks=False) or entry.is_symlink()
            )

    def remove(self, path: str) -> None:
        """Implement `Disk.remove`; if the path is a link, this removes the link."""
        require_name(path)
        with self._open_folder() as folder, _in_words(path):
            mode = os.stat(path, dir_fd=folder, follow_symlinks=False).st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
                raise DiskError(f'"{path}" is no plain file')
            os.unlink(path, dir_fd=folder)

    def _put(self, path: str, data: bytes, how: int) -> None:
        require_bytes(data)
        flags = os.O_WRONLY | os.O_CREAT | _NO_LINK | how
        with self._open(path, flags) as file:
            left = memoryview(data)
            while left:
                left = left[os.write(file, left) :]

    @contextmanager
    def _open(self, path: str, flags: int) -> Iterator[int]:
        require_name(path)
        with self._open_folder() as folder, _in_words(path):
            try:
                file = os.open(path, flags | _OPEN, 0o600, dir_fd=folder)
            except FileNotFoundError:
                if _is_link(path, folder):
                    raise DiskError(
                        f'"{path}" is a link to a file that does not exist'
                    ) from None
                raise
            try:
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    raise DiskError(f'"{path}" is no plain file')
                yield file
            finally:
                os.close(file)

    @contextmanager
    def _open_folder(self) -> Iterator[int]:
        with _in_words(str(self.folder)):
            folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                yield folder
            finally:
                os.close(folder)


def _is_link(path: str, folder: int) -> bool:
    try:
        mode = os.stat(path, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return False
    return stat.S_ISLNK(mode)


@contextmanager
def _in_words(path: str) -> Iterator[None]:
    """Turn an error of the system into one readable sentence."""
    try:
        yield
    except DiskError:
        raise
    except FileNotFoundError:
        raise DiskError(f'there is no file "{path}"') from None
    except OSError as error:
        if error.errno in _FULL:
            raise DiskError(f'the disk is full: no room for all of "{path}"') from None
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise DiskError(f'"{path}" is no plain file') from None
        why = error.strerror or type(error).__name__
        raise DiskError(f'"{path}": {why}') from error


def _make(folder: Path) -> list[Path]:
    """Create a folder and its parents; return the folders that got a new entry."""
    if folder.is_dir():
        return []
    above = _make(folder.parent)
    folder.mkdir(exist_ok=True)
    return [*above, folder.parent]


def _fsync_folder(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _fsync(opened)
    finally:
        os.close(opened)


def _fsync(file: int) -> None:
    if F_FULLFSYNC is not None:
        fcntl.fcntl(file, F_FULLFSYNC)
    else:
        os.fsync(file)
