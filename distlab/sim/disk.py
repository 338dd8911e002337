"""A `Disk` in memory that knows which contents a crash could leave.

Everything that was synced stays. Of the rest, a crash may leave any part:

    data     of the operations on one file since its last sync, the first few, the last
             of them torn at any byte; instead of what is missing of that one there may
             be zeros, where the length reached the drive before the data
    names    of the operations on the folder since its last sync, any: each took place
             or did not; of a rename also its first half: the file has both names

Data and names are independent, so a rename may be durable before the data that it
names.

Limits: operations on one file are not reordered, and a rename never loses a name.
Source: as `Disk`; J. Mohan et al., "Finding crash-consistency bugs with bounded
black-box crash testing" (OSDI 2018), for the bounded enumeration (`crashes`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product

from distlab.comm import DiskError
from distlab.comm._disk import no_file, require_bytes, require_name

Files = dict[str, bytes]
"""The contents of a disk, by file name."""


class _File:
    """The content of a file: the visible and the durable one, and all in between."""

    __slots__ = ("durable", "pending", "seen")

    def __init__(self) -> None:
        self.seen = bytearray()
        self.durable = b""
        self.pending: list[tuple[bool, bytes]] = []  # whether it empties the file first

    def put(self, data: bytes, *, anew: bool) -> None:
        if anew:
            self.seen.clear()
        self.seen += data
        self.pending.append((anew, data))

    def sync(self) -> None:
        self.durable = bytes(self.seen)
        self.pending.clear()

    def num_survivors(self) -> int:
        """Return how many contents a crash could leave, not all of them different."""
        return 1 + sum(2 * len(data) + anew for anew, data in self.pending)

    def survivor(self, number: int) -> bytes:
        """Return one of them; 0 is the durable one, and the last is all you can see."""
        left, before = number, self.durable
        for anew, data in self.pending:
            base, size = b"" if anew else before, len(data)
            if left == 0:
                return before
            if anew:
                left -= 1
                if left == 0:
                    return b""
            if left <= size:  # zeros in the place of the end
                kept = left - 1
                return base + data[:kept] + bytes(size - kept)
            if left <= 2 * size:
                return base + data[: left - size]
            left -= 2 * size
            before = base + data
        return before


_NO, _HALF, _YES = range(3)


class _Naming:
    """An operation on the folder, with None for a `source` or `target` that it lacks.

    A new name has only a target, a removal has only a source, and a rename has both.
    """

    __slots__ = ("file", "source", "target")

    def __init__(self, file: _File, source: str | None, target: str | None) -> None:
        self.file, self.source, self.target = file, source, target

    @property
    def ways(self) -> tuple[int, ...]:
        """Return how far the operation may have come."""
        return (_NO, _HALF, _YES) if self.source and self.target else (_NO, _YES)

    def apply(self, names: dict[str, _File], way: int = _YES) -> None:
        """Apply the operation, or half of it, or nothing."""
        if way == _NO:
            return
        if self.target is not None:
            names[self.target] = self.file
        source = self.source if way == _YES else None
        if source is not None and names.get(source) is self.file:
            del names[source]


class DiskCrash(BaseException):
    """Raised when the machine crashes during a disk operation; don't catch it."""


def _dies() -> None:
    raise DiskCrash


class SimDisk:
    """A disk of `capacity_bytes` (None: unlimited) that starts with durable `files`."""

    def __init__(
        self,
        files: Mapping[str, bytes] | None = None,
        *,
        capacity_bytes: int | None = None,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self._names: dict[str, _File] = {}
        self._durable_names: dict[str, _File] = {}
        self._namings: list[_Naming] = []
        # How many operations are left before `when_torn` is called; None: no end.
        self.crash_after: int | None = None
        self.when_torn: Callable[[], None] = _dies
        self._restart_from(files or {})

    # ── the seam ────────────────────────────────────────────────────────────────────

    def write(self, path: str, data: bytes) -> None:
        """Implement `Disk.write`."""
        with self._operation():
            self._put(path, data, anew=True)

    def append(self, path: str, data: bytes) -> None:
        """Implement `Disk.append`."""
        with self._operation():
            self._put(path, data, anew=False)

    def sync(self, path: str) -> None:
        """Implement `Disk.sync`."""
        with self._operation():
            self._file(path).sync()

    def rename(self, source: str, target: str) -> None:
        """Implement `Disk.rename`."""
        with self._operation():
            require_name(target)
            file = self._file(source)
            if source != target:
                self._name(_Naming(file, source, target))

    def sync_folder(self) -> None:
        """Implement `Disk.sync_folder`."""
        with self._operation():
            self._sync_names()

    def read(self, path: str) -> bytes:
        """Implement `Disk.read`."""
        return bytes(self._file(path).seen)

    def names(self) -> list[str]:
        """Implement `Disk.names`."""
        return sorted(self._names)

    def remove(self, path: str) -> None:
        """Implement `Disk.remove`."""
        with self._operation():
            self._name(_Naming(self._file(path), path, None))

    # ── crashes ─────────────────────────────────────────────────────────────────────

    @property
    def files(self) -> Files:
        """Return all visible files, durable or not."""
        return {name: bytes(file.seen) for name, file in sorted(self._names.items())}

    def crash(self, drawing: random.Random) -> None:
        """Crash the machine and restart it, with a disk that is drawn and then durable.

        In one of five cases everything that wasn't synced is gone, and in one of five
        everything has survived.
        """
        kind = drawing.randrange(5)
        survivor = self._least() if kind == 0 else self.files if kind == 1 else None
        self._restart_from(survivor if survivor is not None else self._drawn(drawing))

    def crashes(self, limit: int, drawing: random.Random) -> Iterator[Files]:
        """Yield each different disk that a crash could leave now.

        If there are more than `limit`, we draw that many of them, or fewer if they
        repeat. These always include the disk with only the synced contents and the one
        with everything that is visible.
        """
        seen: set[tuple[tuple[str, bytes], ...]] = set()
        for files in self._all() if self._is_few(limit) else self._some(limit, drawing):
            key = tuple(sorted(files.items()))
            if key not in seen:
                seen.add(key)
                yield files

    def _is_few(self, limit: int) -> bool:
        count = 0
        for names in self._foldings():
            each = 1
            for file in _once(names):
                each *= file.num_survivors()
            count += each
            if count > limit:
                return False
        return True

    def _all(self) -> Iterator[Files]:
        for names in self._foldings():
            files = _once(names)
            for numbers in product(*(range(file.num_survivors()) for file in files)):
                yield _with(names, files, numbers)

    def _some(self, limit: int, drawing: random.Random) -> Iterator[Files]:
        yield self._least()
        yield self.files
        for _ in range(max(0, limit - 2)):
            yield self._drawn(drawing)

    def _least(self) -> Files:
        return {name: file.durable for name, file in self._durable_names.items()}

    def _drawn(self, drawing: random.Random) -> Files:
        names = self._folder([drawing.choice(one.ways) for one in self._namings])
        files = _once(names)
        return _with(names, files, [_draw(file, drawing) for file in files])

    def _foldings(self) -> Iterator[dict[str, _File]]:
        """Yield the sets of names that a crash could leave."""
        for ways in product(*(one.ways for one in self._namings)):
            yield self._folder(ways)

    def _folder(self, ways: Sequence[int]) -> dict[str, _File]:
        names = dict(self._durable_names)
        for naming, way in zip(self._namings, ways, strict=True):
            naming.apply(names, way)
        return names

    # ── how ─────────────────────────────────────────────────────────────────────────

    def _restart_from(self, files: Mapping[str, bytes]) -> None:
        self._names.clear()
        for name, data in files.items():
            require_name(name)
            require_bytes(data)
            file = self._names[name] = _File()
            file.put(data, anew=True)
            file.sync()
        self._sync_names()

    def _sync_names(self) -> None:
        self._durable_names = dict(self._names)
        self._namings.clear()

    @contextmanager
    def _operation(self) -> Iterator[None]:
        """Surround each operation that changes the disk."""
        if self.crash_after == 0:
            self.when_torn()
        yield
        if self.crash_after:
            self.crash_after -= 1
            if self.crash_after == 0:
                self.when_torn()

    def _file(self, path: str) -> _File:
        require_name(path)
        if path not in self._names:
            raise no_file(path)
        return self._names[path]

    def _name(self, naming: _Naming) -> None:
        naming.apply(self._names)
        self._namings.append(naming)

    def _put(self, path: str, data: bytes, *, anew: bool) -> None:
        require_name(path)
        require_bytes(data)
        file = self._names.get(path)
        if file is None:
            file = _File()
            self._name(_Naming(file, None, path))
        room = self._room(file if anew else None)
        file.put(data[:room], anew=anew)
        if len(data) > room:
            raise DiskError(f'the disk is full: no room for all of "{path}"')

    def _room(self, emptied: _File | None) -> int:
        if self.capacity_bytes is None:
            return 1 << 62
        files = [file for file in _once(self._names) if file is not emptied]
        return max(0, self.capacity_bytes - sum(len(file.seen) for file in files))


def _once(names: Mapping[str, _File]) -> list[_File]:
    """Return each file once, even if it has two names."""
    return list(dict.fromkeys(names.values()))


def _with(
    names: Mapping[str, _File], files: Sequence[_File], numbers: Sequence[int]
) -> Files:
    left = {
        file: file.survivor(number) for file, number in zip(files, numbers, strict=True)
    }
    return {name: left[file] for name, file in sorted(names.items())}


def _draw(file: _File, drawing: random.Random) -> int:
    """Draw the number of a survivor; all or nothing is as likely as all others."""
    last = file.num_survivors() - 1
    return drawing.choice((0, last, *(drawing.randint(0, last) for _ in range(2))))
