"""Read and write WebDataset's shards, tar files whose neighbors form a sample.

    train-000000.tar: 000000000.jpg 000000000.cls 000000001.jpg 000000001.cls …

Source: the WebDataset format, https://github.com/webdataset/webdataset: files of a
sample share their name up to the first dot; .cls holds the class as a decimal number.

We read by position, not as a stream. A shard's index says where each image's bytes
are, so each sample has a number, an epoch has each of them once on any number of ranks
and data workers, and a run resumes at its next sample. To keep reads in a few files, an
epoch shuffles the shards, and then the samples of a few shards at a time.

Shards may come from any program. We match the files of a sample by name, even if they
aren't next to each other, and skip hidden files that desktops create. If we can't tell
for certain what belongs to a sample, we report a problem instead of guessing.
"""

from __future__ import annotations

import bisect
import glob
import io
import itertools
import json
import os
import re
import tarfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from distlab.data.decode import ImageError
from distlab.data.folder import SUFFIXES, is_hidden
from distlab.data.problems import DataError, Problem, summary

INDEX = ".index.json"
CLASSES = "classes.txt"

_TICK_NS = 20_000_000
"""If a file is written twice within this time, its timestamps may not change."""

_LONGEST_LABEL = 32  # bytes
_UNNAMED_CLASSES = 1000
"""With more classes than this and than samples, labels look like ids and need names."""

_PACKED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"(\xb5": "zstd"}


class Member(NamedTuple):
    """The place of a sample's image in its shard, and its class."""

    key: str
    offset: int
    num_bytes: int
    target: int


class Stamp(NamedTuple):
    """Distinguishes one version of a file from the next."""

    num_bytes: int
    modified_ns: int
    changed_ns: int  # the system sets it at every change; programs can't reset it


class ShardSource:
    """The samples of one split, in the order of the shards' names.

    The class names are the lines of classes.txt, or else just numbers. Pass the classes
    of train as `classes` to number another split in the same way. We then report a
    class that train lacks as a problem, and skip its samples.

    Raises:
        DataError: the split has no shards, they have no usable sample, or a label
            isn't the number of a class.
    """

    def __init__(
        self, root: Path, split: str, *, classes: Sequence[str] | None = None
    ) -> None:
        self.root, self.split = root, split
        self.paths = shards_in(root, split)
        self.problems: list[Problem] = []
        self.members: list[Member] = []
        self.starts: list[int] = []  # of each shard, in self.members
        self._stamps: list[Stamp] = []  # of each shard when we read its members
        for path in self.paths:
            self.starts.append(len(self.members))
            stamp, members, problems = _read(path)
            self._stamps.append(stamp)
            self.problems += problems
            self.members += self._known(path, members, classes)
        if not self.members:
            raise DataError(f"{root / split}-*.tar {self._why_none()}")
        self.targets = [member.target for member in self.members]
        self.classes = self._classes() if classes is None else tuple(classes)
        self._files: dict[int, int] = {}  # shard -> descriptor, in this process

    def __len__(self) -> int:
        return len(self.members)

    def name(self, index: int) -> str:
        """Return the shard and the key of a sample."""
        return f"{self.paths[self._shard(index)].name}/{self.members[index].key}"

    def read(self, index: int) -> bytes:
        """Read the bytes of a sample's image.

        Raises:
            ImageError: we can't read the shard.
            DataError: the shard has been overwritten since the source was made.
        """
        shard, member = self._shard(index), self.members[index]
        try:
            if shard not in self._files:
                self._files[shard] = os.open(self.paths[shard], os.O_RDONLY)
            # Reads at an offset: data workers may share a descriptor.
            data = os.pread(self._files[shard], member.num_bytes, member.offset)
            now = os.fstat(self._files[shard])
        except OSError as error:
            raise ImageError("unreadable", error.strerror or str(error)) from error
        stamp = self._stamps[shard]
        if (now.st_size, now.st_mtime_ns) != (stamp.num_bytes, stamp.modified_ns):
            raise DataError(
                f"{self.paths[shard]} was overwritten while it was in use, so its "
                "labels and positions no longer match: start the run again"
            )
        return data

    def groups(self) -> list[range]:
        """Return the samples of each shard, which should be read together."""
        ends = [*self.starts[1:], len(self.members)]
        spans = zip(self.starts, ends, strict=True)
        return [range(start, end) for start, end in spans if end > start]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_files": {}}

    def __del__(self) -> None:
        for descriptor in self.__dict__.get("_files", {}).values():
            os.close(descriptor)

    def _shard(self, index: int) -> int:
        return bisect.bisect_right(self.starts, index) - 1

    def _known(
        self, path: Path, members: list[Member], classes: Sequence[str] | None
    ) -> list[Member]:
        """Return the members whose class exists in train; report the others."""
        if classes is None:
            return members
        for member in members:
            if member.target >= len(classes):
                why = f"the label {member.target}; train has {len(classes)} classes"
                name = f"{path.name}/{member.key}"
                self.problems.append(Problem(name, "unknown class", why))
        return [member for member in members if member.target < len(classes)]

    def _why_none(self) -> str:
        if not self.paths:
            return "is not there"
        if not self.problems:
            return f"has no file in {len(self.paths)} shards"
        return f"has no sample that can be used: {summary(self.problems)}"

    def _classes(self) -> tuple[str, ...]:
        """Return the names of the classes.

        Raises:
            DataError: a label is too large to be the number of a class.
        """
        names = class_names(self.root)
        largest = max(range(len(self)), key=self.targets.__getitem__)
        num_classes = self.targets[largest] + 1
        if names is not None:
            if num_classes > len(names):
                raise DataError(
                    f"{self.name(largest)} has the label {num_classes - 1}, and "
                    f"{self.root / CLASSES} names {len(names)} classes, from 0 on"
                )
            return names
        if num_classes > max(_UNNAMED_CLASSES, len(self)):
            raise DataError(
                f"{self.name(largest)} has the label {num_classes - 1:,}, but there "
                f"are only {len(self):,} samples: number the classes from 0 on, or "
                f"name each class in a line of {CLASSES}"
            )
        return tuple(map(str, range(num_classes)))


def shards_in(root: Path, split: str) -> list[Path]:
    """Return the shards of a split, in the order of their names."""
    return sorted(root.glob(f"{glob.escape(split)}-*.tar"))


def class_names(root: Path) -> tuple[str, ...] | None:
    """Read the names of class 0, class 1, … from classes.txt; None if it doesn't exist.

    Raises:
        DataError: the file exists but can't be read, or is empty.
    """
    try:
        names = (root / CLASSES).read_text("utf-8").rstrip().splitlines()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{root / CLASSES} cannot be read: {error}") from error
    if not names:
        raise DataError(f"{root / CLASSES} is empty: write one class name per line")
    return tuple(name.strip() for name in names)


def _read(path: Path) -> tuple[Stamp, list[Member], list[Problem]]:
    """List a shard's contents from the index beside it, or else from its headers.

    We only trust an index if the shard's size and both of its timestamps are unchanged.
    They differ for a copy, and also for a shard that was overwritten and then given its
    old date. In these cases we write a new index if we can.
    """
    index = _index_of(path)
    try:
        stamp = _stamp(path)
    except OSError as error:
        why = error.strerror or str(error)
        return Stamp(0, 0, 0), [], [Problem(path.name, "damaged shard", why)]
    try:
        saved = json.loads(index.read_text("utf-8"))
        age_ns = index.stat().st_mtime_ns - max(stamp[1:])
        if tuple(saved["stamp"]) == stamp and age_ns > _TICK_NS:
            return stamp, [Member(*member) for member in saved["members"]], []
    except (OSError, ValueError, KeyError, TypeError):
        pass
    members, problems = scan_shard(path)
    if index.exists() and not problems:
        with suppress(OSError):  # not writable: then we scan the shard every time
            _write_index(path, stamp, members)
    return stamp, members, problems


def _index_of(path: Path) -> Path:
    return path.with_name(path.name + INDEX)


def _stamp(path: Path) -> Stamp:
    status = path.stat()
    return Stamp(status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _write_index(path: Path, stamp: Stamp, members: list[Member]) -> None:
    """Write the index atomically, because several ranks may write it at once."""
    if _stamp(path) != stamp:  # the shard is still being written
        return
    index = _index_of(path)
    unfinished = index.with_name(f".{index.name}.{os.getpid()}")
    try:
        text = json.dumps({"stamp": stamp, "members": members})
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(index)
    finally:
        unfinished.unlink(missing_ok=True)


def scan_shard(path: Path) -> tuple[list[Member], list[Problem]]:
    """List a shard's samples by its headers; everything after damage is lost."""
    groups: list[tuple[str, Files]] = []
    problems: list[Problem] = []
    members: list[Member] = []
    damage = ""
    try:
        with path.open("rb") as file:
            if packed := _PACKED.get(file.read(2)):
                why = f"it is packed with {packed}, but we read by position: unpack it"
                return [], [Problem(path.name, "damaged shard", why)]
            file.seek(0)
            with tarfile.open(fileobj=file, mode="r:") as tar:
                for group in _groups(path, tar, problems):
                    groups.append(group)
                damage = _after_end(file, tar)
    except (tarfile.TarError, OSError, EOFError) as error:
        damage = str(error)
    for key, files in _joined(groups):
        _add(path, key, files, members, problems)
    if damage:
        why = f"{len(members)} samples before it are used: {damage}"
        problems.append(Problem(path.name, "damaged shard", why))
    return members, problems


Files = dict[str, tuple[int, int, bytes]]
"""Maps a suffix to a file's offset and length, or to the text of a short one."""


def _groups(
    path: Path, tar: tarfile.TarFile, problems: list[Problem]
) -> Iterator[tuple[str, Files]]:
    """Group neighboring files by name; a repeated suffix starts a new group."""
    key, files = "", Files()
    for member in tar:
        if any(map(is_hidden, member.name.split("/"))):
            continue
        if member.issparse() or not (member.isreg() or member.isdir()):
            why = "a link, or a file with holes: pack it as a plain file"
            problems.append(Problem(f"{path.name}/{member.name}", "not a file", why))
            continue
        if not member.isreg():
            continue
        folder, _, base = member.name.rpartition("/")
        stem, _, suffix = base.partition(".")
        own, suffix = f"{folder}/{stem}" if folder else stem, f".{suffix.lower()}"
        if files and (own != key or suffix in files):
            yield key, files
            files = {}
        text = b""
        if suffix == _LABEL:
            extracted = tar.extractfile(member)
            text = extracted.read(_LONGEST_LABEL + 1) if extracted else b""
        key = own
        files[suffix] = (member.offset_data, member.size, text)
    if files:
        yield key, files


_LABEL = ".cls"


def _joined(groups: list[tuple[str, Files]]) -> Iterator[tuple[str, Files]]:
    """Join groups of the same name that lie apart, as after `tar *.jpg *.cls`.

    We only join them if no group of that name is a complete sample, and if no suffix
    occurs twice.
    """
    alone: dict[str, list[Files]] = defaultdict(list)
    whole = {key for key, files in groups if _LABEL in files and _images(files)}
    for key, files in groups:
        if key not in whole:
            alone[key].append(files)
    done: set[str] = set()
    for key, files in groups:
        parts = alone.get(key, [])
        suffixes = [suffix for part in parts for suffix in part]
        if len(parts) < 2 or len(set(suffixes)) < len(suffixes):
            yield key, files
        elif key not in done:
            done.add(key)
            yield key, {suffix: part[suffix] for part in parts for suffix in part}


def _images(files: Files) -> list[str]:
    """Return the suffixes of images; with both .jpg and .mask.png, only .jpg."""
    found = [suffix for suffix in files if suffix.endswith(SUFFIXES)]
    return [suffix for suffix in found if suffix in SUFFIXES] or found


def _add(
    path: Path, key: str, files: Files, members: list[Member], problems: list[Problem]
) -> None:
    images = _images(files)
    label = files.get(_LABEL, (0, 0, b""))[2].strip()
    name, has = f"{path.name}/{key}", f"its files are {', '.join(files)}"
    if not images:
        problems.append(Problem(name, "no image", has))
    elif _LABEL not in files:
        why = f"{has}, and none is {_LABEL}; a name ends at its first dot"
        problems.append(Problem(name, "no class", why))
    elif len(images) > 1:
        why = f"which of {', '.join(images)} it is cannot be told"
        problems.append(Problem(name, "several images", why))
    elif not label.isdigit() or len(label) > _LONGEST_LABEL:
        why = f"{label.decode('latin-1')!r} is no number from 0 on"
        problems.append(Problem(name, "no class", why))
    else:
        offset, num_bytes, _ = files[images[0]]
        members.append(Member(key, offset, num_bytes, int(label)))


def _after_end(file: IO[bytes], tar: tarfile.TarFile) -> str:
    """Return what is wrong after the last file, or "" if zeros mark the end."""
    last = max(tar.getmembers(), key=lambda member: member.offset_data, default=None)
    if last is None or last.issparse():
        return ""
    stored = last.size if last.isreg() else 0
    file.seek(last.offset_data + -(-stored // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE)
    tail = file.read(tarfile.BLOCKSIZE)
    if len(tail) < tarfile.BLOCKSIZE:
        return "it has no end marker, so it may have been cut off there"
    while tail and not tail.strip(b"\0"):
        tail = file.read(1 << 16)
    return "more data follows its end: if you joined shards with cat, repack" * bool(
        tail
    )


def write_shards(
    folder: Path,
    split: str,
    samples: Iterable[tuple[str, bytes, int]],
    *,
    per_shard: int = 1000,
    classes: Sequence[str] = (),
) -> int:
    """Write (suffix, bytes of the image, class) as shards with an index each.

    The same samples give the same shards. Once the new shards are complete, they
    replace all shards of the split that this function wrote before, even if there are
    fewer of them. Returns the number of shards.

    Raises:
        ValueError: a suffix isn't an image's, a class is negative or not among
            `classes`, or per_shard is less than 1.
        DataError: the folder has shards of the split with other names.
    """
    if per_shard < 1:
        raise ValueError(f"per_shard is {per_shard}, must be at least 1")
    folder.mkdir(parents=True, exist_ok=True)
    old = shards_in(folder, split)
    for path in old:
        if not re.fullmatch(r"-\d{6,}\.tar", path.name.removeprefix(split)):
            raise DataError(
                f"{path} is a shard of {split} as well: choose a new folder"
            )
    new: list[Path] = []
    try:
        for unfinished in _written(folder, split, samples, per_shard, classes):
            new.append(unfinished)
        for path in old[len(new) :]:
            _index_of(path).unlink(missing_ok=True)
            path.unlink()
        if classes:
            text = "\n".join(classes) + "\n"
            (folder / CLASSES).write_text(text, encoding="utf-8")
        for number, unfinished in enumerate(new):
            path = folder / f"{split}-{number:06d}.tar"
            members, _ = scan_shard(unfinished)
            unfinished.replace(path)
            _write_index(path, _stamp(path), members)
    finally:
        for unfinished in folder.glob(f".{glob.escape(split)}-*.tar.{os.getpid()}"):
            unfinished.unlink()
    return len(new)


def _written(
    folder: Path,
    split: str,
    samples: Iterable[tuple[str, bytes, int]],
    per_shard: int,
    classes: Sequence[str],
) -> Iterator[Path]:
    """Yield finished shards under temporary names that don't look like a shard's."""
    numbered = iter(enumerate(samples))
    for shard in itertools.count():
        first = next(numbered, None)
        if first is None:
            return
        path = folder / f".{split}-{shard:06d}.tar.{os.getpid()}"
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            rest = itertools.islice(numbered, per_shard - 1)
            for number, (suffix, data, target) in itertools.chain([first], rest):
                if suffix.lower() not in SUFFIXES:
                    raise ValueError(
                        f"sample {number}: {suffix!r} is no image's suffix"
                    )
                if target < 0 or (classes and target >= len(classes)):
                    raise ValueError(f"sample {number}: {target} numbers no class")
                _put(tar, f"{number:09d}{suffix}", data)
                _put(tar, f"{number:09d}{_LABEL}", str(int(target)).encode())
        yield path


def _put(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    header = tarfile.TarInfo(name)
    header.size = len(data)
    tar.addfile(header, io.BytesIO(data))
