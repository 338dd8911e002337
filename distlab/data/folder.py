"""Read an image folder in ImageNet's layout, split/class/file.

    DIR/train/n01440764/n01440764_18.JPEG        DIR/val/n01440764/…

We number classes in the order of their names, by code points, so that every machine
numbers them alike. Files may lie deeper than that; all of them belong to the class.
Folders that tools and desktops create, such as .ipynb_checkpoints, are ignored.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from distlab.data.decode import ImageError
from distlab.data.problems import DataError, Problem

SUFFIXES = (
    ".jpg", ".jpeg", ".png", ".gif", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".pgm",
)  # fmt: skip

MAX_BYTES = 1 << 28
"""Limit for one file: 256 MiB."""

_OF_SYSTEMS = ("__MACOSX", "@eaDir", "lost+found", "$RECYCLE.BIN")


def is_hidden(name: str) -> bool:
    """Return True if a tool, desktop or file system creates files with this name.

    Their names usually begin with a dot, such as Jupyter's .ipynb_checkpoints or the
    ._* files of macOS. We also know some others.
    """
    return (name.startswith(".") and name not in (".", "..")) or name in _OF_SYSTEMS


class FolderSource:
    """The files of one split; `problems` are those found while listing the folder.

    Pass train's classes as `classes` to number another split in the same way. We can't
    number a class that train lacks, so we skip its files.

    Raises:
        DataError: the folder cannot be read, or has no image in any class.
    """

    def __init__(
        self, root: Path, split: str, *, classes: Sequence[str] | None = None
    ) -> None:
        self.root, self.split = root, split
        self.problems: list[Problem] = []
        folder = root / split
        try:
            own = sorted(entry.name for entry in os.scandir(folder) if _is_class(entry))
        except OSError as error:
            why = error.strerror or error
            raise DataError(f"{folder} cannot be read: {why}") from error
        self.classes = tuple(own if classes is None else classes)
        number = {name: target for target, name in enumerate(self.classes)}
        self.names: list[str] = []
        self.targets: list[int] = []
        for name in own:
            files = list(self._files(folder / name))
            if name not in number:
                why = f"train has no such class; {len(files)} files are not used"
                self.problems.append(Problem(f"{split}/{name}", "unknown class", why))
                continue
            if not files:
                self.problems.append(Problem(f"{split}/{name}", "empty class"))
            self.names += files
            self.targets += [number[name]] * len(files)
        absent = [name for name in self.classes if name not in set(own)]
        self.problems += [Problem(f"{split}/{n}", "missing class") for n in absent]
        if not self.names:
            raise DataError(f"no image is in {folder}: DIR/{split}/CLASS/FILE.jpg, …")

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        """Return the path of a file below the root."""
        return self.names[index]

    def read(self, index: int) -> bytes:
        """Read the bytes of a file.

        Raises:
            ImageError: we can't read it.
        """
        try:
            return read_regular(self.root / self.names[index])
        except OSError as error:
            is_loop = error.errno == errno.ELOOP
            kind = "link loop" if is_loop else "unreadable"
            raise ImageError(kind, error.strerror or str(error)) from error

    def groups(self) -> list[range]:
        """Return one group, because all files may be read in any order."""
        return [range(len(self))]

    def _files(self, folder: Path) -> Iterator[str]:
        """The images below a folder, in the order of their paths."""
        seen: set[tuple[int, int]] = set()
        pending = [folder]
        while pending:
            path = pending.pop()
            try:
                status = path.stat()
                entries = sorted(os.scandir(path), key=lambda entry: entry.name)
            except OSError as error:
                self._note(path, "unreadable", error.strerror or str(error))
                continue
            if (status.st_dev, status.st_ino) in seen:
                self._note(path, "link loop", "a folder links to one around it")
                continue
            seen.add((status.st_dev, status.st_ino))
            pending += [path / e.name for e in reversed(entries) if _is_class(e)]
            for entry in entries:
                if is_hidden(entry.name) or _is_dir(entry):
                    continue
                if entry.name.lower().endswith(SUFFIXES):
                    yield self._below(path / entry.name)
                else:
                    self._note(path / entry.name, "unknown suffix", "")

    def _note(self, path: Path, kind: str, why: str) -> None:
        self.problems.append(Problem(self._below(path), kind, why))

    def _below(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


def read_regular(path: Path) -> bytes:
    """Read a regular file, but not a pipe or a device, which might never end.

    Raises:
        ImageError: it isn't a regular file, or has more than MAX_BYTES.
        OSError: we can't read it.
    """
    # Without O_NONBLOCK, opening a pipe waits until something writes into it.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ImageError("unreadable", "it is not a regular file")
        if status.st_size > MAX_BYTES:
            raise ImageError("too large", f"the file has {status.st_size:,} bytes")
        return file.read()


def _is_class(entry: os.DirEntry[str]) -> bool:
    """Return True if the entry is the folder of a class, or a folder inside one."""
    return _is_dir(entry) and not is_hidden(entry.name)


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # links that lead in a circle: told when the file is read
        return False
