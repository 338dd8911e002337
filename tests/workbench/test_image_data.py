"""Images of folders and shards: the same pixels on any ranks, resumed at any batch."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from itertools import chain
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from benchmarks._torchvision import torchvision
from distlab.data.check import check
from distlab.data.images import Images, open_images, open_source
from distlab.data.loader import ImageLoader
from distlab.data.make import make
from distlab.data.problems import DataError
from distlab.data.shards import INDEX, ShardSource, scan_shard, write_shards
from distlab.data.transforms import (
    EvalTransform,
    TrainTransform,
    normalized,
    random_region,
)

ROOT = Path(__file__).parents[2]
SMALL = TrainTransform(size=24)
NUM_IMAGES = 30


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    copy.with_name(copy.name + INDEX).write_text('{"num_bytes": 3, "members": []}')
    assert len(ShardSource(tmp_path, "val")) == NUM_IMAGES // 5


def test_the_same_images_are_made_again(root: Path, tmp_path: Path) -> None:
    make(tmp_path / "again", "photos", num_images=NUM_IMAGES)
    for path in root.rglob("*.*"):
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
