"""`distlab data make DIR` and `distlab data check DIR`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from distlab.cli.screen import show, show_json, waiting
from distlab.data.check import SplitReport, printable
from distlab.data.check import check as check_folder
from distlab.data.decode import KINDS
from distlab.data.make import make as make_folder
from distlab.data.problems import counted

Row = tuple[str, str]
"""A line of output: its style, then its text."""

_NAMED = 10  # of each kind, without --all
_WIDE = 16
_OTHER_KINDS = {
    "empty class": "a class without any images, so it can't be learned",
    "missing class": "a class that train has but this split doesn't",
    "unknown class": "a class that isn't in train, so its images have no label",
    "unknown suffix": "skipped, because the name isn't that of an image",
    "damaged shard": "everything after the damage is lost",
    "no class": "skipped, because .cls is missing or isn't a number",
    "no image": "skipped, because the sample has no image",
    "several images": "skipped, because we can't tell which image to use",
    "not a file": "skipped, because it's a link or a sparse file",
    "no images": "the split can't be used",
}


def make(folder: Path, kind: str, *, num_images: int, as_json: bool) -> int:
    """Write a folder and shards from this machine's images, and say which.

    Raises:
        ValueError: the folder isn't empty, or there are no such images.
    """
    with waiting(f"writing {folder}", quiet=as_json):
        said = make_folder(folder, kind, num_images=num_images)
    if as_json:
        show_json({"folder": str(folder), "from": kind, "said": said})
    else:
        show([("", said), ("dim", f"  distlab data check {folder}")])
    return 0


def check(
    folder: Path, *, strict: bool, every: bool, num_workers: int, as_json: bool
) -> int:
    """Decode every image, and count and name the unusable ones.

    Returns 1 with `strict` if there is a problem, else 0.

    Raises:
        ValueError: there is nothing to check.
    """
    if num_workers < 1:
        raise ValueError(f"--workers {num_workers}: choose at least 1")
    with waiting(f"decoding {folder}", quiet=as_json):
        reports = check_folder(folder, num_workers=num_workers)
    num_problems = sum(len(report.problems) for report in reports.values())
    code = int(strict and num_problems > 0)
    if as_json:
        splits = {split: report.as_json() for split, report in reports.items()}
        show_json({"folder": str(folder), "splits": splits, "exit": code})
        return code
    for split, report in reports.items():
        show(_lines(split, report, every=every))
    if num_problems == 0:
        show([("pass", "no problem")])
    return code


def _lines(split: str, report: SplitReport, *, every: bool) -> Iterator[Row]:
    usable = f"{report.num_usable:,} of {report.num_images:,} images can be used"
    yield "", f"{split:<6} {report.num_classes:,} classes, {usable}"
    for kind, count in report.converted.most_common():
        yield "dim", f"  {kind:<{_WIDE}} {count:>6,}  converted to RGB"
    for kind, count in counted(report.problems).items():
        meaning = KINDS.get(kind) or _OTHER_KINDS.get(kind, "")
        yield "fail", f"  {kind:<{_WIDE}} {count:>6,}  {meaning}"
        named = [problem for problem in report.problems if problem.kind == kind]
        for problem in named if every else named[:_NAMED]:
            why = f": {problem.why}" if problem.why else ""
            yield "", printable(f"      {problem.name}{why}")
        if not every and count > _NAMED:
            yield "dim", f"      and {count - _NAMED:,} more; --all names them"
