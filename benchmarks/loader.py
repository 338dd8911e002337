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

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from benchmarks._bars import Bars, Line, report_of, rows, show  # noqa: E402
from benchmarks._ratios import Pair, result_of  # noqa: E402
from benchmarks._torchvision import torchvision  # noqa: E402
from distlab.data.images import open_images  # noqa: E402
from distlab.data.loader import ImageLoader  # noqa: E402
from distlab.data.make import make  # noqa: E402
from distlab.data.transforms import TrainTransform, normalized  # noqa: E402
from distlab.models.convnet import make_convnet  # noqa: E402

BARS = Bars({}, {})
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
    return BARS.line(name, round(statistics.median(rates), 1), unit, n=len(rates))


def cpu_time(root: Path, num_pairs: int) -> list[Line]:
    """Of one process, ours beside torchvision's where it imports."""
    try:
        peer = theirs(root)
    except ImportError as error:
        times = [seconds(time.process_time, ours(root, FAST)) for _ in range(num_pairs)]
        line = _cpu_line(times)
        return [line | {"what": [f"no ratio to torchvision: {error}"]}]
    pairs: dict[str, list[Pair]] = {"": [], "_full": []}
    for number in range(2 * num_pairs):
        name, transform = ("_full", FULL) if number % 2 else ("", FAST)
        own = ours(root, transform)
        if number % 4 < 2:
            own_s = seconds(time.process_time, own)
            peer_s = seconds(time.process_time, peer)
        else:
            peer_s = seconds(time.process_time, peer)
            own_s = seconds(time.process_time, own)
        pairs[name].append((own_s, peer_s))
    return [
        _cpu_line([own_s for own_s, _ in pairs[""]]),
        *(result_of(f"ratio_torchvision{name}", [pairs[name]], PEER) for name in pairs),
    ]


def _cpu_line(times: Sequence[float]) -> Line:
    value = round(1000 * statistics.median(times), 3)
    return BARS.line("cpu_ms_per_image", value, "ms, CPU time", n=len(times))


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
    return BARS.line("data_wait_share", share, "of the wall time", n=steps - 5)


def measure(num_pairs: int, num_images: int) -> dict[str, Any]:
    """All results, in the schema of every benchmark here."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="distlab-bench-") as temporary:
        folder = Path(temporary)
        make(folder / "photos", "photos", num_images=num_images * 5 // 4)
        make(folder / "digits", "digits")
        results = [
            images_per_s(folder / "photos"),
            images_per_s(folder / "photos" / "shards"),
            *cpu_time(folder / "photos", num_pairs),
            data_wait_share(folder / "digits"),
        ]
    return report_of("loader", results)


def text(results: Sequence[Line]) -> list[str]:
    """What is printed without --json."""
    return rows(results, _row)


def _row(line: Line) -> str:
    sure = f"  upper {line['upper']:g}" if "upper" in line else ""
    return f"{line['name']:<24} {line['value']:>9g} {line['unit']}{sure}"


def main() -> int:
    """Measure and print; no figure has a bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--images", type=int, default=NUM_IMAGES)
    options = parser.parse_args()
    report = measure(options.pairs, options.images)
    return show(report, text, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
