"""Decode every image of a folder once, and report those that can't be used."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from distlab.data.decode import ImageError, open_image, to_rgb
from distlab.data.images import SPLITS, Source, open_source
from distlab.data.problems import DataError, Problem, counted

_CHUNK = 64
_MODES = {
    "L": "gray", "1": "black and white", "P": "palette", "CMYK": "CMYK",
    "I;16": "16 bits", "I;16B": "16 bits", "I": "16 bits",
    "RGBA": "transparent", "LA": "transparent", "PA": "transparent",
}  # fmt: skip


@dataclass
class SplitReport:
    """A split's sizes and problems, and how many images we convert, by kind."""

    num_classes: int = 0
    num_images: int = 0
    problems: list[Problem] = field(default_factory=list)
    converted: Counter[str] = field(default_factory=Counter)

    @property
    def num_usable(self) -> int:
        """Return the number of images that decode."""
        return self.num_images - sum(p.name in self._failed for p in self.problems)

    _failed: set[str] = field(default_factory=set)

    def as_json(self) -> dict[str, object]:
        """Return plain values, with the names of problems as we print them."""
        return {
            "classes": self.num_classes,
            "images": self.num_images,
            "usable": self.num_usable,
            "problems": counted(self.problems),
            "converted": dict(self.converted),
            "named": [
                {"name": printable(p.name), "kind": p.kind, "why": printable(p.why)}
                for p in self.problems
            ],
        }


def check(root: Path, *, num_workers: int = 1) -> dict[str, SplitReport]:
    """Decode every image of every split.

    Raises:
        DataError: there is nothing to read: neither a folder nor a shard of
            a split, or no image in any.
    """
    reports: dict[str, SplitReport] = {}
    refused: list[str] = []
    for split in SPLITS:
        if not (root / split).exists() and not any(root.glob(f"{split}-*.tar")):
            continue
        try:
            source = open_source(root, split)
        except DataError as error:
            refused.append(str(error))
            problem = Problem(split, "no images", str(error))
            reports[split] = SplitReport(problems=[problem])
            continue
        reports[split] = _of_source(source, num_workers)
    if len(refused) == len(reports):
        raise DataError(
            "; ".join(dict.fromkeys(refused)) if refused else _nothing(root)
        )
    return reports


def printable(text: str) -> str:
    """Print a name on one line: é stays é, but escape newlines and invalid bytes."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def _of_source(source: Source, num_workers: int) -> SplitReport:
    report = SplitReport(num_classes=len(source.classes), num_images=len(source))
    report.problems += source.problems
    for problem, kinds in _decoded(source, num_workers):
        report.converted.update(kinds)
        if problem is not None:
            report.problems.append(problem)
            report._failed.add(problem.name)
    return report


Result = tuple[Problem | None, list[str]]


def _decoded(source: Source, num_workers: int) -> Iterator[Result]:
    if num_workers < 2 or len(source) < 2 * _CHUNK:
        yield from _decode_some(source, range(len(source)))
        return
    chunks = [
        range(start, min(start + _CHUNK, len(source)))
        for start in range(0, len(source), _CHUNK)
    ]
    # Spawned: a fork of a process whose threads hold locks may wait for them forever.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, context, _keep, (source,)) as pool:
        for results in pool.map(_decode_kept, chunks):
            yield from results


_kept: list[Source] = []


def _keep(source: Source) -> None:
    _kept.append(source)


def _decode_kept(numbers: range) -> list[Result]:
    return list(_decode_some(_kept[0], numbers))


def _decode_some(source: Source, numbers: range) -> Iterator[Result]:
    for index in numbers:
        try:
            image = open_image(source.read(index))
            kinds = [_MODES[image.mode]] if image.mode in _MODES else []
            if getattr(image, "n_frames", 1) > 1:
                kinds.append("more than one frame")
            if "transparency" in image.info and "transparent" not in kinds:
                kinds.append("transparent")
            to_rgb(image)
        except ImageError as error:
            yield Problem(source.name(index), error.kind, str(error)), []
        else:
            yield None, kinds


def _nothing(root: Path) -> str:
    if not root.is_dir():
        return f"{root} {'is not a folder' if root.exists() else 'is not there'}"
    names = " or ".join(f"{split}-*.tar" for split in SPLITS)
    return f"{root} has neither the folder {' nor '.join(SPLITS)} nor {names}"
