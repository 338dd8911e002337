"""Folders with something wrong: counted, named, and fatal only where asked."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image

from distlab.cli.data import check as check_verb
from distlab.cli.screen import show
from distlab.data.check import check
from distlab.data.images import open_images
from distlab.data.loader import ImageLoader
from distlab.data.problems import DataError
from distlab.data.transforms import EvalTransform, TrainTransform
from tests.workbench.broken_folders import CASES, Case, good_folder

NOBODY = 65534
READABLE = [case for case in CASES if not case.is_refused]
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


def hidden_from_ordinary_users() -> list[Path]:
    """Which of what is imported on the way only root can read."""
    needed = (Path(__file__), Path(Image.__file__))
    with as_ordinary_user():
        return [
            path for path in needed if not os.access(path, os.R_OK, effective_ids=True)
        ]


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A folder that an ordinary user can reach; root's own, of pytest, is none."""
    if os.geteuid() != 0:
        good_folder(tmp_path)
        yield tmp_path
        return
    if hidden := hidden_from_ordinary_users():
        pytest.skip(f"only root can read {hidden[0]}, and root may read everything")
    # What these import may lie where only root reads, as the interpreter's library.
    show([("dim", "")])
    Image.init()
    with tempfile.TemporaryDirectory(prefix="distlab-images-", dir="/tmp") as name:
        os.chown(name, NOBODY, NOBODY)
        with as_ordinary_user():
            good_folder(Path(name))
            yield Path(name)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_wrong_is_counted_and_named(case: Case, root: Path) -> None:
    case.spoil(root / "train" / "cat")
    if case.is_fatal:
        with pytest.raises(DataError, match=str(root)):
            check(root)
        return
    reports = check(root)
    problems = [p for report in reports.values() for p in report.problems]
    if case.is_refused:
        assert (problems[0].name, problems[0].kind) == ("train", "no images")
        with pytest.raises(DataError, match=str(root)):
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
    is_wrong = bool(case.kinds) or case.is_refused
    assert checked(root, strict=True) == int(is_wrong)
    assert checked(root, strict=False) == 0


def checked(root: Path, *, strict: bool) -> int:
    """The exit code of `distlab data check`."""
    return check_verb(root, strict=strict, every=True, num_workers=1, as_json=strict)
