"""Image files in IDX form: read when they are right, and named when they are not."""

from __future__ import annotations

import gzip
import os
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
from tests.workbench.images import (
    NUM_HELD_OUT,
    NUM_TRAIN,
    contents,
    idx_bytes,
    known_set,
    write_set,
)

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
    "empty": (b"", "is empty"),
    "one byte": (b"\0", "is not an IDX file: it begins with 00,"),
    "a picture": (b"\x89PNG\r\n\x1a\n", "is not an IDX file: it begins with 89 50 4e"),
    "half a header": (GOOD[:10], "is cut short: it ends within its header"),
    "half a body": (GOOD[:-1], r"is cut short: .* 2 × 28 × 28 bytes, and 1,567 of 1,5"),
    "too long": (GOOD + b"\0", "is longer than its header promises: 2 × 28 × 28"),
    "floats": (header(2, 28, 28, kind=13), "holds float32, not unsigned bytes"),
    "who knows": (header(2, 28, 28, kind=99), "values of the unknown type 0x63"),
    "labels": (idx_bytes(PIXELS[0, 0]), r"holds labels \(1 .*; images \(3 .* expected"),
    "flat": (header(4, 4), "holds values in 2 dimensions; images"),
    "no images": (header(0, 28, 28), "says that it holds 0 × 28 × 28 bytes"),
    "too many": (header(1 << 31, 28, 28), "says that it holds 2,147,483,648 × 28 × 28"),
    "half a pack": (
        gzip.compress(GOOD)[:-20],
        "cannot be unpacked, it is cut short or",
    ),
    "no trailer": (gzip.compress(GOOD)[:-6], "cannot be unpacked, it is cut short or"),
    "a bad sum": (gzip.compress(GOOD)[:-8] + b"\0" * 8, "cannot be unpacked.*CRC"),
    "a bad pack": (b"\x1f\x8b\x08" + b"\xff" * 60, "cannot be unpacked"),
    "packed nothing": (
        gzip.compress(b""),
        "is not an IDX file: it begins with nothing,",
    ),
    "a packed long one": (gzip.compress(GOOD + bytes(9)), "is longer than its header"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_gets_one_sentence_with_its_name(
    tmp_path: Path, name: str
) -> None:
    content, sentence = BROKEN[name]
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(IdxError, match=sentence) as caught:
        read_idx(path, 3)
    assert str(caught.value).startswith(f"{path} ")
    assert "\n" not in str(caught.value)


def test_no_file_a_folder_a_pipe(tmp_path: Path) -> None:
    with pytest.raises(IdxError, match="is not there"):
        read_idx(tmp_path / "nowhere", 3)
    with pytest.raises(IdxError, match="is a folder, not a file"):
        read_idx(tmp_path, 3)
    os.mkfifo(tmp_path / "pipe")  # reading it would never end
    with pytest.raises(IdxError, match="is not there"):
        read_idx(tmp_path / "pipe", 3)


def test_what_may_not_be_read(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    write_set(tmp_path)
    (tmp_path / NAMES[0]).chmod(0)
    with pytest.raises(IdxError, match="cannot be read: Permission denied"):
        read_images(find_files(tmp_path))
    tmp_path.chmod(0)
    with pytest.raises(IdxError, match="cannot be read: Permission denied"):
        find_files(tmp_path)
    tmp_path.chmod(0o700)


def test_another_content_is_refused_by_its_checksum(tmp_path: Path) -> None:
    other = bytearray(contents()[NAMES[2]])
    other[100] ^= 1
    files = find_files(write_set(tmp_path, t10k_images=bytes(other)))
    read_images(files)  # as anybody's own files they are fine
    with pytest.raises(IdxError, match=r"t10k-images.* its SHA-256 is .*…, and"):
        read_images(files, known_set())


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        (
            {"train_labels": idx_bytes(np.zeros(95, np.uint8))},
            r"train-labels\S+ has 95 labels for the 96 images of \S+train-images",
        ),
        (
            {"t10k_labels": idx_bytes(np.array([3] * 7 + [12] * 33, np.uint8))},
            r"t10k-labels\S+ has the label 12 at place 7; classes are 0 … 9",
        ),
        (
            {"train_images": idx_bytes(np.zeros((96, 32, 30), np.uint8))},
            r"train-images\S+ holds images of 32 × 30 pixels, not 28 × 28",
        ),
    ],
)
def test_files_that_do_not_fit_each_other(
    tmp_path: Path, changed: dict[str, bytes], sentence: str
) -> None:
    with pytest.raises(IdxError, match=sentence):
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


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(IdxError, match="none of the four files is in"):
        find_files(tmp_path)
    with pytest.raises(IdxError, match="nowhere is not there"):
        find_files(tmp_path / "nowhere")
    write_set(tmp_path)
    with pytest.raises(IdxError, match="is not a folder"):
        find_files(tmp_path / NAMES[0])
    (tmp_path / NAMES[3]).unlink()
    with pytest.raises(IdxError, match=rf"there is no {NAMES[3]}\[.gz\] in"):
        find_files(tmp_path)


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
