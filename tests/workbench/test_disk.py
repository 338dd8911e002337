"""A Disk on a real folder and in memory: the same programs, and the same answers."""

from __future__ import annotations

import os
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from distlab.comm import Disk, DiskError, RealDisk
from distlab.engines import saving
from distlab.engines.expect import EngineError
from distlab.sim import SimDisk
from tests.workbench.disk_programs import (
    ALIKE,
    ELSEWHERE,
    NOT_REFUSED,
    asks_for_what_is_not_there,
    leads_elsewhere,
    no_bytes,
    refusal,
)
from tests.workbench.golden import Golden
from tests.workbench.naming import named

EXPECTED: dict[str, Any] = {
    "writes_and_reads": {"a": b"one, two", "b": b"", "c": b"made by append"},
    "writes_anew": b"short",
    "every_byte": True,
    "renames": (["a", "b"], b"the new one", b"b"),
    "removes": ([], b"the new one"),
    "syncs": (b"12", b""),
    "odd_names": [True] * 6,
}


@pytest.mark.parametrize("program", ALIKE)
def test_both_disks_do_the_same(program: Callable[[Disk], Any], tmp_path: Path) -> None:
    real, simulated = program(RealDisk(tmp_path / "disk")), program(SimDisk())
    assert real == simulated
    assert real == EXPECTED.get(program.__name__, real)
    assert os.listdir(tmp_path) == ["disk"]


def test_what_is_refused_is_named_and_changes_nothing() -> None:
    *told, names = asks_for_what_is_not_there(SimDisk())
    assert [named(text, '"none"') for text in told] == [True] * 4
    assert names == ["there"]
    told, names = no_bytes(SimDisk())
    assert [named(text, "bytes", "str") for text in told] == [True] * 2
    assert names == []


def test_the_sentences_of_a_disk(golden: Golden) -> None:
    missing, outside = asks_for_what_is_not_there, leads_elsewhere
    told = [missing(SimDisk())[0], *outside(SimDisk())[0], no_bytes(SimDisk())[0][0]]
    told.append(fills(SimDisk(capacity_bytes=10))[0])
    golden("disk/refusals", "\n".join(dict.fromkeys(told)))


@pytest.mark.parametrize("make", [lambda at: RealDisk(at), lambda at: SimDisk()])
def test_a_path_outside_is_one_sentence(
    make: Callable[[Path], Disk], tmp_path: Path
) -> None:
    told, names = leads_elsewhere(make(tmp_path))
    assert NOT_REFUSED not in told
    for text, path in zip(told[::7], ELSEWHERE, strict=True):  # seven ways, one path
        assert repr(path)[:50] in text
    assert len(set(told)) == len(ELSEWHERE)
    assert names == ["a"]


# ── a full disk ─────────────────────────────────────────────────────────────────────


@contextmanager
def at_most(num_bytes: int) -> Iterator[None]:
    """No file of this process can be longer: the system's own way to refuse."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fills(disk: Disk) -> list[Any]:
    disk.write("log", b"123456")
    told = [refusal(lambda: disk.append("log", b"789012")), disk.read("log")]
    told += [refusal(lambda: disk.write("log", b"x" * 11)), disk.read("log")]
    disk.write("log", b"fits")
    disk.append("log", b"")
    return [*told, disk.read("log")]


def test_a_full_disk_keeps_what_fits(tmp_path: Path) -> None:
    simulated = fills(SimDisk(capacity_bytes=10))
    disk = RealDisk(tmp_path)
    with at_most(10):
        assert fills(disk) == simulated
    full, appended, again, written, last = simulated
    assert named(full, "full", '"log"')
    assert again == full
    assert (appended, written, last) == (b"1234567890", b"x" * 10, b"fits")


def test_room_is_shared_and_given_back() -> None:
    disk = SimDisk({"a": b"12345"}, capacity_bytes=8)
    assert named(refusal(lambda: disk.write("b", b"1234")), "full", '"b"')
    assert disk.read("b") == b"123"
    disk.remove("a")
    disk.write("b", b"12345678")
    assert disk.files == {"b": b"12345678"}


# ── a real folder ───────────────────────────────────────────────────────────────────


def test_a_real_disk_makes_its_folder_and_finds_it_again(tmp_path: Path) -> None:
    RealDisk(tmp_path / "x" / "y").write("a", b"1")
    assert RealDisk(tmp_path / "x" / "y").read("a") == b"1"
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DiskError) as refused:
        RealDisk(tmp_path / "file")
    assert isinstance(refused.value.__cause__, NotADirectoryError | FileExistsError)


@pytest.mark.parametrize("place", ["s3://bucket/run", "gs:/bucket", "file:///tmp/run"])
def test_a_real_disk_is_no_address_elsewhere(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (place, Path(place)):
        with pytest.raises(DiskError, match=re.escape(str(folder))):
            RealDisk(folder)
        with pytest.raises(EngineError, match="checkpoint_dir"):
            saving.expect_folder(Path(folder))
    assert not [*tmp_path.iterdir()]
    RealDisk(tmp_path / "step:1" / "a").write("a", b"1")


def test_a_real_disk_reads_links_and_waits_for_no_pipe(tmp_path: Path) -> None:
    archive = tmp_path / "archived"
    archive.write_bytes(b"archived")
    folder = tmp_path / "disk"
    disk = RealDisk(folder)
    (folder / "link").symlink_to(archive)
    (folder / "lost").symlink_to(tmp_path / "not mounted")
    (folder / "sub").mkdir()
    os.mkfifo(folder / "pipe")
    for name in ("sub", "pipe"):
        read = refusal(lambda n=name: disk.read(n))  # type: ignore[misc]
        assert named(read, f'"{name}"')
        assert refusal(lambda n=name: disk.write(n, b"")) == read  # type: ignore[misc]
        assert refusal(lambda n=name: disk.remove(n)) == read  # type: ignore[misc]
    assert disk.names() == ["link", "lost"]
    assert disk.read("link") == b"archived"
    assert named(refusal(lambda: disk.read("lost")), '"lost"')
    for name in ("link", "lost"):  # nothing is written outside of the folder
        told = refusal(lambda n=name: disk.write(n, b"x"))  # type: ignore[misc]
        assert named(told, f'"{name}"')
        disk.remove(name)
    assert disk.names() == []
    assert sorted(os.listdir(tmp_path)) == ["archived", "disk"]
    assert archive.read_bytes() == b"archived"


def test_a_real_disk_calls_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(
        os,
        "fsync",
        lambda f: (synced.append(os.readlink(f"/proc/self/fd/{f}")), fsync(f)),
    )
    disk = RealDisk(tmp_path / "new")
    disk.write("a", b"1")
    assert synced == [str(tmp_path)]  # the new folder's own name
    disk.sync("a")
    disk.sync_folder()
    assert synced[1:] == [str(tmp_path / "new" / "a"), str(tmp_path / "new")]


def test_a_drive_that_fails_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = RealDisk(tmp_path)
    disk.write("a", b"1")

    def fails(file: int) -> None:
        raise OSError(5, os.strerror(5))

    monkeypatch.setattr(os, "fsync", fails)
    assert named(refusal(lambda: disk.sync("a")), '"a"', os.strerror(5))
