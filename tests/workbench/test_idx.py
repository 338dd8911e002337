"""Image files in IDX form: read when they are right, and named when they are not."""

from __future__ import annotations

import errno
import gzip
import os
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from distlab.data.idx import IdxError, read_idx
from distlab.data.idx_sets import (
    NAMES,
    cache_folder,
    find_files,
    known_sets,
    read_images,
)
from distlab.training.ddp_data import locate
from tests.workbench.golden import Golden
from tests.workbench.images import (
    NUM_HELD_OUT,
    NUM_TRAIN,
    contents,
    idx_bytes,
    known_set,
    write_set,
)
from tests.workbench.refusals import refusal

PIXELS = np.arange(2 * 28 * 28, dtype=np.uint8).reshape(2, 28, 28)
GOOD = idx_bytes(PIXELS)


@pytest.mark.parametrize("packed", [False, True])
def test_a_set_is_read(tmp_path: Path, packed: bool) -> None:
    data = read_images(find_files(write_set(tmp_path, packed=packed)), known_set())
    assert data.train_inputs.shape == (NUM_TRAIN, 1, 28, 28)
    assert data.held_out_inputs.shape == (NUM_HELD_OUT, 1, 28, 28)
    assert data.train_inputs.dtype == torch.float32
    assert data.train_targets.dtype == data.held_out_targets.dtype == torch.int64
    assert float(data.train_inputs.max()) == 1.0
    assert 0 <= float(data.train_inputs.min()) < 0.1
    raw = np.frombuffer(contents()[NAMES[0]][16:], np.uint8).reshape(-1, 1, 28, 28)
    assert torch.equal((data.train_inputs * 255).round().byte(), torch.tensor(raw))
    assert data.train_targets.tolist() == list(contents()[NAMES[1]][8:])


def test_packed_is_told_by_content_not_by_name(tmp_path: Path) -> None:
    path = tmp_path / "plain.gz"
    path.write_bytes(GOOD)
    assert np.array_equal(read_idx(path, 3), PIXELS)
    path.write_bytes(gzip.compress(GOOD))
    assert np.array_equal(read_idx(path.rename(tmp_path / "packed"), 3), PIXELS)


def header(*sizes: int, kind: int = 8, dims: int | None = None) -> bytes:
    magic = bytes([0, 0, kind, len(sizes) if dims is None else dims])
    return magic + struct.pack(f">{len(sizes)}I", *sizes)


BROKEN = {
    "empty": (b"", ""),
    "one byte": (b"\0", r"\b00, .*\b00 00$"),
    "a picture": (b"\x89PNG\r\n\x1a\n", r"\b89 50 4e.*\b00 00$"),
    "half a header": (GOOD[:10], r"\bheader\b"),
    "half a body": (GOOD[:-1], r"\b2 × 28 × 28\b.*\b1,567\b.*\b1,568\b"),
    "too long": (GOOD + b"\0", r"\b2 × 28 × 28\b"),
    "floats": (header(2, 28, 28, kind=13), r"\bfloat32\b"),
    "who knows": (header(2, 28, 28, kind=99), r"\b0x63\b"),
    "labels": (idx_bytes(PIXELS[0, 0]), r"\blabels \(1 .*\bimages \(3 "),
    "flat": (header(4, 4), r"\b2 .*\bimages \(3 "),
    "no images": (header(0, 28, 28), r"\b0 × 28 × 28\b"),
    "too many": (header(1 << 31, 28, 28), r"\b2,147,483,648 × 28 × 28\b"),
    "half a pack": (gzip.compress(GOOD)[:-20], r"\bunpacked\b"),
    "no trailer": (gzip.compress(GOOD)[:-6], r"\bunpacked\b"),
    "a bad sum": (gzip.compress(GOOD)[:-8] + b"\0" * 8, r"\bunpacked\b.*\bCRC"),
    "a bad pack": (b"\x1f\x8b\x08" + b"\xff" * 60, r"\bunpacked\b"),
    "packed nothing": (gzip.compress(b""), r"\b00 00$"),
    "a packed long one": (gzip.compress(GOOD + bytes(9)), r"\b2 × 28 × 28\b"),
}


def test_a_broken_file_is_named_in_one_line(tmp_path: Path, golden: Golden) -> None:
    path, told = tmp_path / "train-images-idx3-ubyte", []
    for name, (content, named) in BROKEN.items():
        path.write_bytes(content)
        message = refusal(IdxError, read_idx, path, 3)
        assert message.startswith(f"{path} "), name
        assert re.search(named, message), name
        assert "\n" not in message, name
        told.append(f"{name}: {message}")
    golden("data/broken-idx-files", "\n".join(told))


def test_no_file_a_folder_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # reading it would never end
    for path in (tmp_path / "nowhere", tmp_path, tmp_path / "pipe"):
        assert str(path) in refusal(IdxError, read_idx, path, 3)


def test_what_may_not_be_read(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    write_set(tmp_path)
    (tmp_path / NAMES[0]).chmod(0)
    denied = os.strerror(errno.EACCES)
    with pytest.raises(IdxError, match=f"{NAMES[0]}.*{denied}"):
        read_images(find_files(tmp_path))
    tmp_path.chmod(0)
    with pytest.raises(IdxError, match=denied):
        find_files(tmp_path)
    tmp_path.chmod(0o700)


def test_another_content_is_refused_by_its_checksum(tmp_path: Path) -> None:
    other = bytearray(contents()[NAMES[2]])
    other[100] ^= 1
    files = find_files(write_set(tmp_path, t10k_images=bytes(other)))
    read_images(files)  # as anybody's own files they are fine
    with pytest.raises(IdxError, match=r"t10k-images.*\bSHA-256\b"):
        read_images(files, known_set())


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (
            {"train_labels": idx_bytes(np.zeros(95, np.uint8))},
            r"train-labels.*\b95\b.*\b96\b.*train-images",
        ),
        (
            {"t10k_labels": idx_bytes(np.array([3] * 7 + [12] * 33, np.uint8))},
            r"t10k-labels.* 12\b.* 7\b.*\b0 … 9\b",
        ),
        (
            {"train_images": idx_bytes(np.zeros((96, 32, 30), np.uint8))},
            r"train-images.*\b32 × 30\b.*\b28 × 28\b",
        ),
    ],
)
def test_files_that_do_not_fit_each_other(
    tmp_path: Path, changed: dict[str, bytes], named: str
) -> None:
    with pytest.raises(IdxError, match=named):
        read_images(find_files(write_set(tmp_path, **changed)))


def test_usual_names_and_layouts_are_found(tmp_path: Path) -> None:
    dotted = write_set(tmp_path / "dotted")
    for name in NAMES:
        (dotted / name).rename(dotted / name.replace("-idx", ".idx"))
    assert {path.name for path in find_files(dotted).values()} == {
        name.replace("-idx", ".idx") for name in NAMES
    }
    write_set(tmp_path / "MNIST" / "raw", packed=True)  # as torchvision does
    assert find_files(tmp_path)[NAMES[0]].parent == tmp_path / "MNIST" / "raw"
    write_set(tmp_path)
    assert find_files(tmp_path)[NAMES[0]] == tmp_path / NAMES[0]


def test_labels_never_go_with_the_images_of_another_set(tmp_path: Path) -> None:
    write_set(tmp_path / "MNIST" / "raw")
    for name in NAMES[1::2]:  # as after an unfinished copy
        (tmp_path / name).write_bytes((tmp_path / "MNIST" / "raw" / name).read_bytes())
    assert {path.parent for path in find_files(tmp_path).values()} == {
        tmp_path / "MNIST" / "raw"
    }
    (tmp_path / "MNIST" / "raw" / NAMES[1]).unlink()
    with pytest.raises(IdxError, match=NAMES[1]):
        find_files(tmp_path)


def test_a_packed_file_that_says_something_else_is_refused(tmp_path: Path) -> None:
    write_set(tmp_path, packed=True)
    write_set(tmp_path)
    assert find_files(tmp_path)[NAMES[1]].name == NAMES[1]
    plain = tmp_path / NAMES[1]
    plain.write_bytes(plain.read_bytes()[:-1] + b"\7")
    with pytest.raises(IdxError, match=rf"{NAMES[1]} .*{NAMES[1]}\.gz"):
        find_files(tmp_path)


def test_what_is_missing_is_named(tmp_path: Path, golden: Golden) -> None:
    told = [refusal(IdxError, find_files, tmp_path)]
    assert str(tmp_path) in told[-1]
    told.append(refusal(IdxError, find_files, tmp_path / "nowhere"))
    assert str(tmp_path / "nowhere") in told[-1]
    write_set(tmp_path)
    told.append(refusal(IdxError, find_files, tmp_path / NAMES[0]))
    assert str(tmp_path / NAMES[0]) in told[-1]
    (tmp_path / NAMES[3]).unlink()
    told.append(refusal(IdxError, find_files, tmp_path))
    assert [name for name in NAMES if name in told[-1]] == [NAMES[3]]
    told.append(refusal(IdxError, read_idx, tmp_path / NAMES[3], 1))
    told.append(refusal(IdxError, read_idx, tmp_path, 1))
    golden("data/missing-idx-files", "\n".join(told))


def test_the_known_sets_and_where_they_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert set(known_sets()) == {"mnist", "fashion-mnist"}
    for known in known_sets().values():
        assert set(known.sha256) == set(NAMES)
        assert all(len(found) == 64 for found in known.sha256.values())
        assert known.mirrors
    sums = [found for known in known_sets().values() for found in known.sha256.values()]
    assert len(set(sums)) == 8
    monkeypatch.setenv("DISTLAB_DATA", str(tmp_path))
    assert cache_folder("mnist") == tmp_path / "mnist"
    monkeypatch.delenv("DISTLAB_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("mnist") == tmp_path / ".cache" / "distlab" / "mnist"


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_the_real_files_where_they_are_here(name: str) -> None:
    known = known_sets()[name]
    try:
        files = locate(name).files
    except IdxError:
        pytest.skip(f"{known.title} is not on this machine")
    assert files
    data = read_images(files, known)
    assert (len(data.train_targets), len(data.held_out_targets)) == (60_000, 10_000)
    assert data.train_targets.unique().tolist() == list(range(10))
