"""Folders with something wrong: counted, named, and fatal only where asked."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from distlab.cli.data import check as check_verb
from distlab.cli.screen import show
from distlab.data.check import check
from distlab.data.images import open_images
from distlab.data.loader import ImageLoader
from distlab.data.problems import DataError
from distlab.data.transforms import EvalTransform, TrainTransform
from tests.workbench.broken_folders import CASES, Case, good_folder

NOBODY = 65534
READABLE = [case for case in CASES if not case.refused]
TRAIN, EVAL = TrainTransform(size=16), EvalTransform(size=16, resize=18)


@contextmanager
def as_ordinary_user() -> Iterator[None]:
    """Root may read everything; so not as root, if we are it."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder that an ordinary user can reach, unlike pytest's."""
    show([("dim", "")])  # what it imports may lie where only root reads
    with as_ordinary_user():
        folder = Path(tempfile.mkdtemp(prefix="distlab-images-", dir="/tmp"))
        good_folder(folder)
        try:
            yield folder
        finally:
            for path in folder.glob("train/*"):
                path.chmod(0o755)
            shutil.rmtree(folder)


def test_there_are_at_least_forty() -> None:
    assert len(CASES) >= 40
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_wrong_is_counted_and_named(case: Case, root: Path) -> None:
    case.spoil(root / "train" / "cat")
    if case.is_fatal:
        with pytest.raises(DataError, match=case.refused):
            check(root)
        return
    reports = check(root)
    problems = [p for report in reports.values() for p in report.problems]
    if case.refused:
        assert case.refused in str(problems[0])
        with pytest.raises(DataError, match=case.refused):
            open_images(root, "train")
        return
    assert Counter(p.kind for p in problems) == Counter(case.kinds)
    assert all(problem.name for problem in problems)
    converted = Counter[str]()
    for report in reports.values():
        converted += report.converted
    assert converted == Counter(case.converted)


@pytest.mark.parametrize("case", READABLE, ids=lambda case: case.name)
def test_a_training_goes_on_and_an_evaluation_leaves_out(
    case: Case, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case.spoil(root / "train" / "cat")
    images = open_images(root, "train", TRAIN)
    loader = ImageLoader(images, 4)
    batches = list(loader)
    assert sum(len(batch.images) for batch in batches) == len(images)
    known = check(root)["train"]
    named = {str(problem) for problem in loader.problems.values()}
    assert named == {str(p) for p in known.problems if p not in images.problems}
    left = ImageLoader(open_images(root, "train", EVAL), 4, is_train=False)
    assert sum(len(batch.images) for batch in left) == known.num_usable
    assert [images[i][0].shape for i in range(len(images))] == [(3, 16, 16)] * len(
        images
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_strict_refuses(case: Case, root: Path) -> None:
    case.spoil(root / "train" / "cat")
    if case.is_fatal:
        with pytest.raises(DataError):
            checked(root, strict=False)
        return
    is_wrong = bool(case.kinds or case.refused)
    assert checked(root, strict=True) == int(is_wrong)
    assert checked(root, strict=False) == 0


def checked(root: Path, *, strict: bool) -> int:
    """The exit code of `distlab data check`."""
    return check_verb(root, strict=strict, every=True, num_workers=1, as_json=strict)
