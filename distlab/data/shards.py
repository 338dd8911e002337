"""Shards in WebDataset's layout: tar files whose neighboring files make a sample.

    train-000000.tar: 000000000.jpg 000000000.cls 000000001.jpg 000000001.cls …

Source: the WebDataset format, https://github.com/webdataset/webdataset: files of a
sample share their name up to the first dot; .cls holds the class as a decimal number.

Reading is by position, not by stream: an index of a shard says where each image's bytes
are, so a sample has a number, an epoch has each of them once, on any number of ranks
and data workers, and a run resumes at its next sample. The order of an epoch shuffles
the shards, then the samples of a few of them together: reads stay in a few files.
"""

from __future__ import annotations

import bisect
import io
import json
import os
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from distlab.data.decode import ImageError
from distlab.data.folder import SUFFIXES
from distlab.data.problems import DataError, Problem

INDEX = ".index.json"
CLASSES = "classes.txt"


class Member(NamedTuple):
    """Where the image of a sample is in its shard, and its class."""

    key: str
    offset: int
    num_bytes: int
    target: int


class ShardSource:
    """The samples of one split, in the order of the shards' names.

    Raises:
        DataError: there is no shard of this split, or no sample in them.
    """

    def __init__(self, root: Path, split: str) -> None:
        self.root, self.split = root, split
        self.paths = sorted(root.glob(f"{split}-*.tar"))
        self.problems: list[Problem] = []
        self.members: list[Member] = []
        self.starts: list[int] = []  # of each shard, in self.members
        for path in self.paths:
            self.starts.append(len(self.members))
            members, problems = read_index(path)
            self.members += members
            self.problems += problems
        if not self.members:
            what = "has no sample" if self.paths else "is not there"
            raise DataError(f"{root / split}-*.tar {what}")
        self.targets = [member.target for member in self.members]
        self.classes = _classes(root, max(self.targets) + 1)
        self._files: dict[int, int] = {}  # shard -> descriptor, in this process

    def __len__(self) -> int:
        return len(self.members)

    def name(self, index: int) -> str:
        """The shard and the key of a sample."""
        return f"{self.paths[self._shard(index)].name}/{self.members[index].key}"

    def read(self, index: int) -> bytes:
        """The bytes of a sample's image.

        Raises:
            ImageError: the shard cannot be read, or is shorter than it was.
        """
        shard, member = self._shard(index), self.members[index]
        try:
            if shard not in self._files:
                self._files[shard] = os.open(self.paths[shard], os.O_RDONLY)
            # Reads at an offset: data workers may share a descriptor.
            data = os.pread(self._files[shard], member.num_bytes, member.offset)
        except OSError as error:
            raise ImageError("unreadable", error.strerror or str(error)) from error
        if len(data) < member.num_bytes:
            raise ImageError("cut short", "the shard is shorter than its index says")
        return data

    def groups(self) -> list[range]:
        """The samples of each shard: what should be read together."""
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


def read_index(path: Path) -> tuple[list[Member], list[Problem]]:
    """What a shard holds: from the index beside it, or else from its headers.

    An index counts only if it was made of a shard of the same length.
    """
    try:
        size = path.stat().st_size
        saved = json.loads(path.with_name(path.name + INDEX).read_text("utf-8"))
        if saved["num_bytes"] == size:
            return [Member(*member) for member in saved["members"]], []
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return scan_shard(path)


def scan_shard(path: Path) -> tuple[list[Member], list[Problem]]:
    """The samples of a shard, by its headers; what follows damage is lost."""
    members: list[Member] = []
    problems: list[Problem] = []
    try:
        with tarfile.open(path, "r:") as tar:
            for key, files in _samples(tar):
                _add(path, key, files, members, problems)
    except (tarfile.TarError, OSError, EOFError) as error:
        why = f"{len(members)} samples before it are used: {error}"
        problems.append(Problem(path.name, "damaged shard", why))
    return members, problems


Files = dict[str, tuple[int, int, bytes]]
"""By suffix: offset and length of a file in the shard; the text of a short one."""


def _samples(tar: tarfile.TarFile) -> Iterator[tuple[str, Files]]:
    key, files = "", Files()
    for member in tar:
        if not member.isfile():
            continue
        folder, _, base = member.name.rpartition("/")
        stem, _, suffix = base.partition(".")
        own = f"{folder}/{stem}" if folder else stem
        if files and own != key:
            yield key, files
            files = {}
        text = b""
        if suffix.lower() == "cls":
            extracted = tar.extractfile(member)
            text = extracted.read(32) if extracted else b""
        key = own
        files[f".{suffix.lower()}"] = (member.offset_data, member.size, text)
    if files:
        yield key, files


def _add(
    path: Path, key: str, files: Files, members: list[Member], problems: list[Problem]
) -> None:
    image = next((files[s] for s in files if s.endswith(SUFFIXES)), None)
    label = files.get(".cls", (0, 0, b""))[2].strip()
    name = f"{path.name}/{key}"
    if image is None:
        problems.append(Problem(name, "no image"))
    elif not label.isdigit():
        problems.append(Problem(name, "no class", repr(label.decode("latin-1"))))
    elif image[0] + image[1] > path.stat().st_size:
        problems.append(Problem(name, "cut short", "the shard ends within it"))
    else:
        members.append(Member(key, image[0], image[1], int(label)))


def _classes(root: Path, at_least: int) -> tuple[str, ...]:
    try:
        names = (root / CLASSES).read_text("utf-8").split("\n")
        names = [name for name in names if name]
    except (OSError, ValueError):
        names = []
    return tuple(names) + tuple(str(n) for n in range(len(names), at_least))


def write_shards(
    folder: Path,
    split: str,
    samples: Iterable[tuple[str, bytes, int]],
    *,
    per_shard: int = 1000,
    classes: Sequence[str] = (),
) -> int:
    """Write (suffix, bytes of the image, class) as shards with an index each.

    The same samples give the same bytes. Returns the number of shards.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if classes:
        (folder / CLASSES).write_text("\n".join(classes) + "\n", encoding="utf-8")
    num_shards = 0
    tar: tarfile.TarFile | None = None
    for number, (suffix, data, target) in enumerate(samples):
        if number % per_shard == 0:
            _finish(tar)
            path = folder / f"{split}-{num_shards:06d}.tar"
            tar = tarfile.open(path, "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115
            num_shards += 1
        assert tar is not None
        key = f"{number:09d}"
        _put(tar, f"{key}{suffix}", data)
        _put(tar, f"{key}.cls", str(target).encode())
    _finish(tar)
    return num_shards


def _put(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    header = tarfile.TarInfo(name)
    header.size = len(data)
    tar.addfile(header, io.BytesIO(data))


def _finish(tar: tarfile.TarFile | None) -> None:
    if tar is None:
        return
    tar.close()
    path = Path(str(tar.name))
    members, _ = scan_shard(path)
    index = {"num_bytes": path.stat().st_size, "members": members}
    path.with_name(path.name + INDEX).write_text(json.dumps(index), encoding="utf-8")
