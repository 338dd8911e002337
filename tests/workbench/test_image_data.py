"""Images of folders and shards: the same pixels on any ranks, resumed at any batch."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable
from itertools import chain
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Subset

from distlab.data.check import check
from distlab.data.images import Images, open_images, open_source
from distlab.data.loader import Batch, ImageLoader
from distlab.data.make import make
from distlab.data.problems import DataError
from distlab.data.shards import INDEX, ShardSource, scan_shard, write_shards
from distlab.data.transforms import (
    EvalTransform,
    TrainTransform,
    normalized,
    random_region,
)
from distlab.distributed import DistributedSampler
from distlab.distributed.parts import unit
from tests.corpora.torchvision_here import torchvision

ROOT = Path(__file__).parents[2]
SMALL = TrainTransform(size=24)
NUM_IMAGES = 30


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sklearn", reason="its photographs: make .venv/.ready-dev")
    folder = tmp_path_factory.mktemp("images") / "photos"
    make(folder, "photos", num_images=NUM_IMAGES)
    return folder


@pytest.fixture
def images(root: Path) -> Images:
    return open_images(root, "train", SMALL, seed=5)


def epoch_of(images: Images, world_size: int = 1, **options: int) -> list[Tensor]:
    """The images of each global batch of an epoch, from all ranks together."""
    loaders = [
        ImageLoader(images, 7, rank, world_size, seed=3, **options)
        for rank in range(world_size)
    ]
    batches = []
    for shards in zip(*loaders, strict=True):
        batch = torch.empty(sum(len(s.images) for s in shards), 3, 24, 24)
        for rank, shard in enumerate(shards):
            batch[rank::world_size] = shard.images.float()
        batches.append(batch)
    return batches


@pytest.mark.parametrize(("world_size", "num_workers"), [(3, 0), (1, 2)])
def test_pixels_do_not_depend_on_ranks_and_workers(
    images: Images, world_size: int, num_workers: int
) -> None:
    expected = epoch_of(images)
    given = epoch_of(images, world_size, num_workers=num_workers)
    assert all(map(torch.equal, given, expected))
    assert sum(map(len, given)) == len(images) == NUM_IMAGES * 4 // 5


def test_another_epoch_and_seed_have_other_pixels(root: Path, images: Images) -> None:
    first = images[0][0]
    images.set_epoch(1)
    assert not torch.equal(images[0][0], first)
    assert not torch.equal(open_images(root, "train", SMALL, seed=6)[0][0], first)
    images.set_epoch(0)
    assert torch.equal(images[0][0], first)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_loader_refuses_a_rank_that_is_not_there(images: Images, rank: int) -> None:
    with pytest.raises(ValueError, match="rank"):
        ImageLoader(images, 4, rank, 2)


def test_a_loader_resumes_at_its_next_batch_on_other_ranks(images: Images) -> None:
    loader = ImageLoader(images, 7, seed=3)
    loader.set_epoch(2)
    all_targets = [batch.targets.tolist() for batch in loader]
    loader = ImageLoader(images, 7, seed=3)
    loader.set_epoch(2)
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    rest: list[list[int]] = [[], []]
    for rank in range(2):
        resumed = ImageLoader(images, 7, rank, 2, seed=3)
        resumed.load_state_dict(state)
        rest[rank] = [t for batch in resumed for t in batch.targets.tolist()]
    assert sorted(rest[0] + rest[1]) == sorted(chain(*all_targets[2:]))
    with pytest.raises(ValueError, match=r"\bseed\b.* 4\b.* 3\b"):
        ImageLoader(images, 7, seed=4).load_state_dict(state)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("num_workers", [0, 1])  # which stays for all loops
def test_a_look_at_a_batch_moves_nothing(images: Images, num_workers: int) -> None:
    def targets(batches: Iterable[Batch]) -> list[list[int]]:
        return [batch.targets.tolist() for batch in batches]

    loader = ImageLoader(images, 7, seed=3, num_workers=num_workers)
    next(iter(loader))
    whole = targets(loader)
    found, counts = [], []
    for batch in loader:
        found += targets([batch])
        next(iter(loader))
        counts.append(loader.state_dict()["num_delivered"])
    assert found == whole
    assert counts == [1, 2, 3, 4]
    loader.load_state_dict({**loader.state_dict(), "num_delivered": 2})
    next(iter(loader))
    assert [targets(loader), targets(loader)] == [whole[2:], whole]
    with pytest.raises(ValueError, match=r"\bImageLoader\b.*\bshuffle\b"):
        loader.load_state_dict({"seed": 3})


def test_numbers_of_numpy_are_seeds(root: Path, images: Images) -> None:
    same = open_images(root, "train", SMALL, seed=np.int64(5))
    assert torch.equal(same[3][0], images[3][0])
    orders = [ImageLoader(images, 4, seed=np.int64(s)).order() for s in (3, 4)]
    assert orders[0] == ImageLoader(images, 4, seed=3).order() != orders[1]


@pytest.mark.slow
def test_a_killed_data_worker_is_replaced(images: Images) -> None:
    expected = [batch.targets.tolist() for batch in ImageLoader(images, 2, seed=1)]
    loader = ImageLoader(images, 2, seed=1, num_workers=1)
    given = []
    for batch in loader:
        given.append(batch.targets.tolist())
        if len(given) == 3:
            worker = loader._loader._iterator._workers[0]  # type: ignore[union-attr]
            os.kill(worker.pid, signal.SIGKILL)
            # Torch raises wherever the main thread is when the worker has ended.
            with pytest.raises(RuntimeError, match="signal: Killed"):
                time.sleep(20)
    assert given == expected
    assert loader.worker_restarts == 1


def test_shards_have_the_same_samples(root: Path, images: Images) -> None:
    shards = open_images(root / "shards", "train", SMALL, seed=5)
    assert shards.classes == images.classes
    folder = {
        hashlib.sha256(images.source.read(i)).digest(): images.targets[i]
        for i in range(len(images))
    }
    own = {
        hashlib.sha256(shards.source.read(i)).digest(): shards.targets[i]
        for i in range(len(shards))
    }
    assert own == folder
    assert sorted(ImageLoader(shards, 4).order()) == list(range(len(shards)))


def test_the_order_of_shards_reads_few_of_them_at_once(tmp_path: Path) -> None:
    samples = ((".jpg", b"x", 0) for _ in range(200))
    assert write_shards(tmp_path, "train", samples, per_shard=10) == 20
    images = Images(ShardSource(tmp_path, "train"), SMALL)
    loader = ImageLoader(images, 10, seed=1)
    order = loader.order()
    assert sorted(order) == list(range(200))
    for start in (0, 80):
        assert len({index // 10 for index in order[start : start + 80]}) == 8
    loader.set_epoch(1)
    assert loader.order() != order


def test_an_index_is_what_a_scan_of_the_shard_gives(root: Path) -> None:
    for path in (root / "shards").glob("*.tar"):
        members, problems = scan_shard(path)
        assert members == ShardSource(root / "shards", path.stem[:-7]).members
        assert not problems
        with tarfile.open(path) as tar:
            names = [member.name for member in tar]
        assert names[:2] == ["000000000.jpg", "000000000.cls"]


def test_damaged_shards_are_named_and_the_rest_is_used(
    root: Path, tmp_path: Path
) -> None:
    (whole,) = (root / "shards").glob("train-*.tar")
    data = whole.read_bytes()
    (tmp_path / "train-000000.tar").write_bytes(data[: len(data) // 2])
    (tmp_path / "train-000001.tar").write_bytes(b"no tar at all" * 100)
    (tmp_path / "train-000002.tar").write_bytes(b"")
    with tarfile.open(tmp_path / "train-000003.tar", "w") as tar:
        for name in ("a.jpg", "b.cls", "c.jpg", "c.cls"):
            tar.addfile(tarfile.TarInfo(name))
    report = check(tmp_path)["train"]
    assert 0 < report.num_usable < NUM_IMAGES
    kinds = {(p.name.partition("/")[0][:12], p.kind) for p in report.problems}
    assert kinds == {
        ("train-000000", "damaged shard"),
        ("train-000001", "damaged shard"),
        ("train-000002", "damaged shard"),
        ("train-000003", "no class"),
        ("train-000003", "no image"),
    }


def test_an_index_of_another_shard_is_not_believed(root: Path, tmp_path: Path) -> None:
    (whole,) = (root / "shards").glob("val-*.tar")
    copy = tmp_path / "val-000000.tar"
    copy.write_bytes(whole.read_bytes())
    size = copy.stat().st_size
    for stamp in ([3, 0, 0], [size, 0, 0], size):
        text = json.dumps({"stamp": stamp, "num_bytes": size, "members": []})
        copy.with_name(copy.name + INDEX).write_text(text)
        assert len(ShardSource(tmp_path, "val")) == NUM_IMAGES // 5


def pack(path: Path, members: list[tuple[str, bytes]], mode: str = "w") -> None:
    """A shard as another program writes it."""
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, data in members:
            header = tarfile.TarInfo(name)
            header.size = len(data)
            tar.addfile(header, io.BytesIO(data))


def pair(key: str, label: object, image: bytes = b"x") -> list[tuple[str, bytes]]:
    return [(f"{key}.png", image), (f"{key}.cls", str(label).encode())]


def test_an_index_beside_a_changed_shard_is_made_anew(tmp_path: Path) -> None:
    shard, index = tmp_path / "train-000000.tar", tmp_path / f"train-000000.tar{INDEX}"
    write_shards(tmp_path, "train", [(".png", b"x", n) for n in (0, 1, 0)])
    written = shard.stat()
    pack(shard, [one for n in range(3) for one in pair(f"{n:09d}", (1, 0, 1)[n])])
    assert shard.stat().st_size == written.st_size
    assert ShardSource(tmp_path, "train").targets == [1, 0, 1]
    # With its old date, too, as `cp -p` and rsync leave it.
    pack(shard, [one for n in range(3) for one in pair(f"{n:09d}", (0, 1, 1)[n])])
    os.utime(shard, ns=(written.st_atime_ns, written.st_mtime_ns))
    os.utime(index, ns=(written.st_atime_ns, written.st_mtime_ns + 10**10))
    assert ShardSource(tmp_path, "train").targets == [0, 1, 1]
    # What was made anew is used: the times fit, so the shard is not read.
    saved = json.loads(index.read_text())
    saved["members"][0][3] = 1
    index.write_text(json.dumps(saved))
    later = max(shard.stat().st_mtime_ns, shard.stat().st_ctime_ns) + 10**9
    os.utime(index, ns=(later, later))
    assert ShardSource(tmp_path, "train").targets == [1, 1, 1]
    os.utime(index, ns=(later, later - 10**9))  # within a tick, nothing is certain
    assert ShardSource(tmp_path, "train").targets == [0, 1, 1]
    assert {path.name for path in tmp_path.iterdir()} == {shard.name, index.name}


def test_a_shard_that_changes_while_it_is_read_is_fatal(tmp_path: Path) -> None:
    write_shards(tmp_path, "train", [(".png", b"x", n) for n in (0, 1)])
    source, shard = ShardSource(tmp_path, "train"), tmp_path / "train-000000.tar"
    assert source.read(0) == b"x"
    pack(shard, pair("000000000", 1) + pair("000000001", 0))
    os.utime(shard, ns=(1, 1))
    with pytest.raises(DataError, match=r"train-000000\.tar"):
        source.read(1)


def test_shards_that_are_written_again_leave_nothing_of_the_old(tmp_path: Path) -> None:
    seven = [(".png", b"x", 0)] * 7
    classes = ("cat", "dog")
    assert write_shards(tmp_path, "train", seven, per_shard=2, classes=classes) == 4
    source = ShardSource(tmp_path, "train")
    again = ((".png", source.read(i), 1) for i in range(3))  # reads what it replaces
    assert write_shards(tmp_path, "train", again, per_shard=2) == 2
    assert ShardSource(tmp_path, "train").targets == [1, 1, 1]
    with pytest.raises(ValueError, match=r"\b1\b.*'png'"):
        write_shards(tmp_path, "train", [(".png", b"x", 0), ("png", b"x", 0)])
    with pytest.raises(ValueError, match=r"\b0\b.*-1"):
        write_shards(tmp_path, "train", [(".png", b"x", -1)])
    with pytest.raises(ValueError, match=r"\b0\b.* 2\b"):
        write_shards(tmp_path, "train", [(".png", b"x", 2)], classes=classes)
    assert ShardSource(tmp_path, "train").targets == [1, 1, 1]
    assert len(list(tmp_path.iterdir())) == 5  # two shards, their indexes, the classes
    pack(tmp_path / "train-more.tar", pair("1", 0))
    with pytest.raises(DataError, match=r"train-more\.tar"):
        write_shards(tmp_path, "train", seven)


OTHERS = {
    "./ prefix": ([*pair("./1", 3), *pair("./2", 4)], [3, 4], []),
    "folders": ([*pair("a/1", 3), *pair("b/1", 4)], [3, 4], []),
    "upper case": ([("1.PNG", b"x"), ("1.CLS", b"3"), *pair("2", 4)], [3, 4], []),
    "long names": ([*pair("é" * 80, 3), *pair("z" * 150, 4)], [3, 4], []),
    "a newline": (pair("1", " 3\n"), [3], []),
    "label first": ([*pair("1", 3)[::-1], *pair("2", 4)[::-1]], [3, 4], []),
    "sorted by type": (
        [("1.png", b"x"), ("2.png", b"x"), ("1.cls", b"3"), ("2.cls", b"4")],
        [3, 4],
        [],
    ),
    "one name twice": ([*pair("1", 3), *pair("1", 4)], [3, 4], []),
    "of a desktop": (
        [("._1.png", b"x"), *pair("1", 3), *pair("__MACOSX/2", 4)],
        [3],
        [],
    ),
    "a mask": ([("1.mask.png", b"y"), *pair("1", 3)], [3], []),
    "two images": (
        [("1.in.png", b"x"), ("1.mask.png", b"y"), ("1.cls", b"3"), *pair("2", 4)],
        [4],
        ["several images"],
    ),
    "dots in names": ([*pair("a.v2.1", 3), *pair("b", 4)], [4], ["no class"]),
    "json": ([("1.png", b"x"), ("1.json", b"3"), *pair("2", 4)], [4], ["no class"]),
    "negative": ([*pair("1", -1), *pair("2", 4)], [4], ["no class"]),
    "a name": ([*pair("1", "n01440764"), *pair("2", 4)], [4], ["no class"]),
    "a long number": ([*pair("1", "3" * 40), *pair("2", 4)], [4], ["no class"]),
    "apart and twice": (
        [("1.png", b"x"), *pair("2", 4), ("1.png", b"y"), *pair("3", 0), *pair("1", 9)],
        [4, 0, 9],
        ["no class", "no class"],
    ),
}
"""What other programs write: the files, the targets, the kinds of the problems."""


@pytest.mark.parametrize("name", OTHERS)
def test_shards_of_other_programs(name: str, tmp_path: Path) -> None:
    members, targets, kinds = OTHERS[name]
    pack(tmp_path / "train-000000.tar", members)
    source = ShardSource(tmp_path, "train")
    assert source.targets == targets
    assert [source.read(i) for i in range(len(source))] == [b"x"] * len(source)
    assert [problem.kind for problem in source.problems] == kinds
    assert all(problem.why for problem in source.problems)


def test_shards_without_a_sample_are_refused_with_the_reason(tmp_path: Path) -> None:
    shard = tmp_path / "train-000000.tar"
    pack(shard, [("1.png", b"x"), ("1.txt", b"3"), ("2.png", b"x")])
    with pytest.raises(DataError, match=r"\b2 × .*train-000000\.tar/1\b.*\.txt"):
        ShardSource(tmp_path, "train")
    pack(shard, pair("1", 3), mode="w:gz")
    with pytest.raises(DataError, match=r"train-000000\.tar\b.*gzip"):
        ShardSource(tmp_path, "train")
    shard.rename(tmp_path / "train-000000.tar.gz")
    with pytest.raises(DataError, match=r"train-000000\.tar\.gz"):
        open_source(tmp_path, "train")


def test_shards_joined_or_cut_at_a_whole_file_are_damaged(tmp_path: Path) -> None:
    shard = tmp_path / "train-000000.tar"
    pack(shard, pair("1", 3))
    whole = shard.read_bytes()
    shard.write_bytes(whole + whole)
    assert [p.kind for p in ShardSource(tmp_path, "train").problems] == [
        "damaged shard"
    ]
    shard.write_bytes(whole[: 4 * 512])  # two headers, two files of less than a block
    source = ShardSource(tmp_path, "train")
    assert source.targets == [3]
    assert [problem.kind for problem in source.problems] == ["damaged shard"]


def test_labels_that_are_ids_are_refused(tmp_path: Path) -> None:
    shard = tmp_path / "train-000000.tar"
    pack(shard, pair("1", 3) + pair("2", 1_000_000_007))
    with pytest.raises(DataError, match=r"train-000000\.tar/2\b.*1,000,000,007"):
        ShardSource(tmp_path, "train")
    pack(shard, pair("1", 3) + pair("2", 999))  # some samples of many classes
    assert len(ShardSource(tmp_path, "train").classes) == 1000
    (tmp_path / "classes.txt").write_text("cat\r\n\r\ndog\n\n")
    with pytest.raises(DataError, match=r"train-000000\.tar/2\b.*\b999\b.*\b3\b"):
        ShardSource(tmp_path, "train")
    pack(shard, pair("1", 2))
    assert ShardSource(tmp_path, "train").classes == ("cat", "", "dog")
    (tmp_path / "classes.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"classes\.txt"):
        ShardSource(tmp_path, "train")


def test_all_splits_are_numbered_as_train_is(root: Path, tmp_path: Path) -> None:
    pack(tmp_path / "train-0.tar", pair("1", 0) + pair("2", 1))
    pack(tmp_path / "val-0.tar", pair("1", 1) + pair("2", 2))
    val = open_source(tmp_path, "val")
    assert (val.classes, val.targets) == (("0", "1"), [1])
    assert [problem.kind for problem in val.problems] == ["unknown class"]
    # A folder has names, and a shard numbers.
    (tmp_path / "val-0.tar").unlink()
    (tmp_path / "val/dog").mkdir(parents=True)
    (tmp_path / "val/dog/1.png").write_bytes(b"x")
    with pytest.raises(DataError, match=r"classes\.txt"):
        open_source(tmp_path, "val")
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    assert open_source(tmp_path, "val").targets == [1]
    pack(tmp_path / "val-0.tar", pair("1", 1))
    with pytest.raises(DataError, match=r"val-0\.tar"):
        open_source(tmp_path, "val")


# ── copies of a data set ────────────────────────────────────────────────────────────


def test_a_loop_over_the_images_ends(images: Images) -> None:
    assert sum(1 for _ in images) == len(images)  # type: ignore[attr-defined]
    last = len(images) - 1
    assert torch.equal(images[-1][0], images[np.int64(last)][0])
    for index in (len(images), -len(images) - 1):
        with pytest.raises(IndexError, match=rf"{index}\b.* {len(images)}\b"):
            images[index]
        with pytest.raises(IndexError):
            images.sample(index)


def first_sums(images: Images, loader: DataLoader[Tensor], epochs: range) -> list[int]:
    sums = []
    for epoch in epochs:
        images.set_epoch(epoch)
        sums.append(int(next(iter(loader))[0].sum()))
    return sums


def test_persistent_workers_follow_the_epoch_and_refuse_another_transform(
    images: Images,
) -> None:
    expected = first_sums(images, DataLoader(images, 4), range(3))
    assert len(set(expected)) == 3
    # Also the workers of a copy that came from another process: a rank's, say.
    for own in (images, pickle.loads(pickle.dumps(images)), copy.deepcopy(images)):
        loader = DataLoader(own, 4, num_workers=1, persistent_workers=True)
        assert first_sums(own, loader, range(3)) == expected
    images.set_epoch(0)
    assert own.epoch == 2
    own.transform = EvalTransform(size=24, resize=24)
    with pytest.raises(DataError, match=r"\btransform\b"):
        list(loader)
    assert int(next(iter(DataLoader(own, 4, num_workers=1)))[0].sum())


def test_loaders_and_samplers_tell_the_images_their_epoch(images: Images) -> None:
    both = ConcatDataset([Subset(images, range(8)), Subset(images, range(8, 16))])
    loader = unit("data_loader").DistributedDataLoader(both, 8, 0, 1, shuffle=False)
    sampler = DistributedSampler(both, num_replicas=1, rank=0, shuffle=False)
    for teller in (loader, sampler):
        teller.set_epoch(2)
        assert images.epoch == 2
        state = teller.state_dict()
        teller.set_epoch(0)
        assert images.epoch == 0
        teller.load_state_dict(state)
        assert images.epoch == 2
    images.set_epoch(3)  # one's own say counts until the next set_epoch
    list(loader), list(sampler)
    assert images.epoch == 3


def test_copies_have_an_epoch_and_a_transform_of_their_own(images: Images) -> None:
    other = copy.copy(images)
    other.transform = EvalTransform(size=24, resize=24)
    other.set_epoch(5)
    assert (images.epoch, images.transform) == (0, SMALL)
    assert images[0][0].shape == other[0][0].shape


def note_epoch(
    images: Images, rank: int, both: Barrier, found: SimpleQueue[tuple[int, int]]
) -> None:
    images.set_epoch(rank + 1)
    both.wait()
    found.put((rank, images.epoch))


def test_ranks_that_were_given_the_images_have_an_epoch_of_their_own(
    images: Images,
) -> None:
    fork = torch.multiprocessing.get_context("fork")
    both, found = fork.Barrier(2), fork.SimpleQueue()
    ranks = [
        fork.Process(target=note_epoch, args=(images, rank, both, found))
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    assert dict(found.get() for _ in ranks) == {0: 1, 1: 2}
    for rank in ranks:
        rank.join()
    assert images.epoch == 0


def test_the_loader_follows_another_transform(images: Images) -> None:
    loader = ImageLoader(images, 12, num_workers=1)
    assert next(iter(loader)).images.shape[-1] == 24
    loader.set_epoch(1)
    images.transform = TrainTransform(size=16)
    batches = list(loader)
    assert [len(batch.images) for batch in batches] == [12, 12]
    assert {batch.images.shape[-1] for batch in batches} == {16}


def test_the_same_images_are_made_again(root: Path, tmp_path: Path) -> None:
    make(tmp_path / "again", "photos", num_images=NUM_IMAGES)
    for path in root.rglob("*.*"):
        if path.name.endswith(INDEX):  # has the times of its shard's file
            continue
        assert (tmp_path / "again" / path.relative_to(root)).read_bytes() == (
            path.read_bytes()
        )
    with pytest.raises(DataError, match=r"/again\b"):
        make(tmp_path / "again", "photos")


def test_a_random_region_lies_inside_and_has_the_asked_area() -> None:
    random, parts = Random(0), []
    for _ in range(2000):
        left, top, right, bottom = random_region(
            (400, 300), (0.08, 1.0), (3 / 4, 4 / 3), random
        )
        assert 0 <= left < right <= 400
        assert 0 <= top < bottom <= 300
        parts.append((right - left) * (bottom - top) / 120_000)
        assert 0.74 < (right - left) / (bottom - top) < 1.35
    assert 0.07 < min(parts) < 0.1
    assert 0.9 < max(parts) <= 1.0
    # Large regions of a long image do not fit: then the middle, with a bounded aspect.
    long = random_region((4000, 10), (0.5, 1.0), (3 / 4, 4 / 3), random)
    assert long == (1993, 0, 2006, 10)


def test_draft_decodes_a_large_photograph_smaller_and_nearly_alike(root: Path) -> None:
    source = open_source(root, "train")
    fast = Images(source, TrainTransform(size=32, area=(0.5, 1.0)), seed=1)
    full = Images(source, TrainTransform(size=32, area=(0.5, 1.0), draft=False), seed=1)
    for index in range(6):
        difference = (fast[index][0].float() - full[index][0].float()).abs().mean()
        assert 0 < difference < 8  # of 255


def test_the_evaluation_takes_the_centre() -> None:
    values = np.zeros((300, 400, 3), np.uint8)
    values[100:200, 150:250] = 255
    pixels = EvalTransform(size=64, resize=240)(Image.fromarray(values))
    assert pixels.shape == (3, 64, 64)
    assert pixels.min() == 255
    assert EvalTransform(size=64, resize=64, channels=1)(
        Image.fromarray(values)
    ).shape == (1, 64, 64)


def test_normalized_is_zero_at_the_mean() -> None:
    gray = torch.full((2, 3, 4, 4), 124, dtype=torch.uint8)
    expected = (124 / 255 - 0.456) / 0.224
    assert torch.allclose(normalized(gray)[:, 1], torch.tensor(expected))


def test_transforms_are_those_of_torchvision(root: Path) -> None:
    try:
        v2 = torchvision("torchvision.transforms.v2")
    except ImportError as error:
        pytest.skip(str(error))
    theirs = v2.Compose([v2.Resize(72), v2.CenterCrop(64), v2.PILToTensor()])
    for index in range(6):
        path = root / open_source(root, "val").name(index)
        with Image.open(path) as image:
            assert torch.equal(
                EvalTransform(size=64, resize=72)(image), theirs(image.convert("RGB"))
            )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_webdataset_library_reads_our_shards(root: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    (path,) = (root / "shards").glob("val-*.tar")
    samples = list(webdataset.WebDataset(str(path), shardshuffle=False))
    source = ShardSource(root / "shards", "val")
    assert [sample["jpg"] for sample in samples] == [
        source.read(index) for index in range(len(source))
    ]
    assert [int(sample["cls"]) for sample in samples] == source.targets


@pytest.mark.slow
def test_the_bench_measures_every_figure() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/loader.py", "--json", "--pairs=2", "--images=32"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    results = {
        line["name"]: line["value"] for line in json.loads(done.stdout)["results"]
    }
    expected = {"images_per_s", "images_per_s_shards", "cpu_ms_per_image"}
    assert expected | {"data_wait_share"} <= set(results)
    assert min(results.values()) > 0
    assert results["data_wait_share"] < 1
