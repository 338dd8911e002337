"""Reading images: how many a second, beside torchvision, and who waits for whom.

JPEGs of 500 × 375 pixels from photographs that this machine has (`distlab data make`);
a random region of each, resized to 224 × 224, flipped in half of the cases, as uint8.

    images_per_s        ours with two data workers: wall time, best on a quiet machine
    images_per_s_shards the same from shards
    cpu_ms_per_image    of this process without data workers: reading, decoding, all
    ratio_torchvision   that time by the time of torchvision's ImageFolder and v2
                        transforms in torch's DataLoader, pair by pair, on the same
                        files, where torchvision imports. Ours decodes a JPEG at a
                        part of its size where the region allows it (`draft`)
    ratio_torchvision_full   ours without that: it decodes the same pixels as theirs
    data_wait_share     of a training's wall time, the part in which it waits for a
                        batch: the course's convolutional network on 28 × 28 pixels, two
                        data workers, 64 images in a step

    distlab bench loader [--json]
    python benchmarks/loader.py [--pairs 7] [--images 256] [--json]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.utils.data import DataLoader

from benchmarks._bars import Bench, Line
from benchmarks._ratios import in_turn
from distlab.data.images import open_images
from distlab.data.loader import ImageLoader
from distlab.data.make import make
from distlab.data.transforms import TrainTransform, normalized
from distlab.models.convnet import make_convnet
from tests.corpora.torchvision_here import torchvision

BENCH = Bench("loader", __doc__)
PAIRS, NUM_IMAGES, NUM_WORKERS, BATCH = 7, 256, 2, 32
FAST, FULL = TrainTransform(), TrainTransform(draft=False)
PEER = "torchvision ImageFolder + v2, DataLoader"
STEPS = 60


def ours(root: Path, transform: TrainTransform, num_workers: int = 0) -> ImageLoader:
    """A loader of the images below `root`."""
    return ImageLoader(
        open_images(root, "train", transform), BATCH, num_workers=num_workers
    )


def theirs(root: Path) -> DataLoader[Any]:
    """The same folder read by torchvision, to the same uint8 tensors.

    Raises:
        ImportError: torchvision does not import here.
    """
    v2 = torchvision("torchvision.transforms.v2")
    datasets = torchvision("torchvision.datasets")
    transform = v2.Compose(
        [v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    )
    folder = datasets.ImageFolder(str(root / "train"), transform)
    return DataLoader(folder, BATCH, shuffle=True)


def read(batches: Iterable[Any]) -> int:
    """How many images an epoch has."""
    return sum(len(batch[0]) for batch in batches)


def seconds(clock: Callable[[], float], batches: Iterable[Any]) -> float:
    """Of reading one epoch, per image."""
    start_s = clock()
    num_images = read(batches)
    return (clock() - start_s) / num_images


def images_per_s(root: Path) -> Line:
    """Wall time with data workers, after a first epoch in which they start."""
    loader = ours(root, FAST, NUM_WORKERS)
    read(loader)
    rates = [1 / seconds(time.perf_counter, loader) for _ in range(3)]
    name = "images_per_s_shards" if root.name == "shards" else "images_per_s"
    unit = f"images/s, {NUM_WORKERS} workers"
    return BENCH.line(name, round(statistics.median(rates), 1), unit, n=len(rates))


def cpu_time(root: Path, num_pairs: int) -> list[Line]:
    """Of one process, ours beside torchvision's where it imports."""
    try:
        peer = theirs(root)
    except ImportError as error:
        times = [seconds(time.process_time, ours(root, FAST)) for _ in range(num_pairs)]
        line = _cpu_line(times)
        return [line | {"what": [f"no ratio to torchvision: {error}"]}]
    found = {}
    for name, transform in (("", FAST), ("_full", FULL)):
        ways = [partial(read, loader) for loader in (ours(root, transform), peer)]
        took = in_turn(ways, num_pairs, clock=time.process_time)
        num_images = read(peer)
        found[name] = [(own / num_images, other / num_images) for own, other in took]
    return [
        _cpu_line([own_s for own_s, _ in found[""]]),
        *(BENCH.ratio(f"ratio_torchvision{n}", [p], PEER) for n, p in found.items()),
    ]


def _cpu_line(times: Sequence[float]) -> Line:
    value = round(1000 * statistics.median(times), 3)
    return BENCH.line("cpu_ms_per_image", value, "ms, CPU time", n=len(times))


def data_wait_share(root: Path) -> Line:
    """A short training on the digits that waits for its batches."""
    transform = TrainTransform(size=28, channels=1, area=(0.5, 1.0), flip=0.0)
    images = open_images(root, "train", transform)
    loader = ImageLoader(images, 64, num_workers=NUM_WORKERS)
    model = make_convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    steps, start_s = 0, 0.0
    while steps < STEPS:
        loader.set_epoch(loader.epoch + 1)
        for batch in loader:
            if steps == 5:  # the workers have started
                start_s, loader.wait_s = time.perf_counter(), 0.0
            inputs = normalized(batch.images, (0.5,), (0.5,))
            loss = functional.cross_entropy(model(inputs), batch.targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
    total_s = time.perf_counter() - start_s
    share = round(loader.wait_s / total_s, 4)
    return BENCH.line("data_wait_share", share, "of the wall time", n=steps - 5)


def measure(pairs: int, images: int) -> list[Line]:
    """All figures; none has a bar."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="distlab-bench-") as temporary:
        folder = Path(temporary)
        make(folder / "photos", "photos", num_images=images * 5 // 4)
        make(folder / "digits", "digits")
        return [
            images_per_s(folder / "photos"),
            images_per_s(folder / "photos" / "shards"),
            *cpu_time(folder / "photos", pairs),
            data_wait_share(folder / "digits"),
        ]


if __name__ == "__main__":
    sys.exit(BENCH.main(measure, pairs=PAIRS, images=NUM_IMAGES))
