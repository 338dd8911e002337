"""Faults in a real `distlab ddp --monitor`: which rank is named, and how soon.

The command runs in a copy of the course whose reference trainer has one mistake, on one
rank and from one step on: nothing in distlab knows of it. The folder of records is read
while the run goes on, as `distlab top` does.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

import torch

from distlab.data.idx_sets import NAMES
from distlab.monitor.jsonl import Recorded, read_folder
from distlab.monitor.suspected import rows_of, suspected

ROOT = Path(__file__).parents[1]
TRAINER = "solutions/phase1_data_parallel/trainer.py"
WORLD_SIZE, STEPS, BATCH = 3, 40, 96  # ranks, steps of an epoch, samples of a step
FROM = 47  # the step of the fault: not at the edge of a record or an epoch
SLOW_S = 0.1  # added to each step of the straggler
HANG_AFTER_S = 2.0
PATIENCE_S = 180.0  # for a run in which nothing is named
LOOK_S = 0.05  # between two looks at the folder

_HEAD = """
import itertools as _itertools
import time as _time
from pathlib import Path as _Path

_steps = _itertools.count(1)


def _broken(comm, first_only=True):
    step = next(_steps)
    if comm.rank != {rank} or step < {start} or (first_only and step > {start}):
        return False
    if step == {start}:
        _Path({began!r}).write_text(repr(_time.time()))
    return True

"""
_STEP = (
    "            loss = train_step(comm, model, optimizer, loss_fn, inputs, targets)\n"
)
_AVERAGE = "    average_gradients(comm, model)\n"
_UPDATED = "    mean_loss = loss.detach().clone()\n"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One mistake of `rank`, put before a line of the trainer."""

    name: str
    rank: int
    line: str
    code: str

    def trainer(self, began: Path) -> str:
        """The reference with the mistake; it writes down when it begins."""
        text = (ROOT / TRAINER).read_text(encoding="utf-8")
        head, mark, rest = text.partition("\nLossFn = ")
        if not mark or text.count(self.line) != 1:
            raise ValueError(f"{TRAINER} has no place for the fault {self.name}")
        own = _HEAD.format(rank=self.rank, start=FROM, began=str(began))
        changed = rest.replace(self.line, self.code + self.line)
        return head + own + mark + changed


FAULTS = (
    Fault(
        name="straggler",
        rank=1,
        line=_STEP,
        code=f"            _time.sleep({SLOW_S} * _broken(comm, False))\n",
    ),
    Fault(
        name="desync",
        rank=2,
        line=_UPDATED,
        code="    if _broken(comm):\n"
        "        next(model.parameters()).data.view(-1)[0] += 1e-3\n",
    ),
    Fault(
        name="nan",
        rank=1,
        line=_AVERAGE,
        code="    if _broken(comm):\n"
        "        next(model.parameters()).grad.view(-1)[0] = float('nan')\n",
    ),
    Fault(
        name="hang",
        rank=2,
        line=_STEP,
        code="            _time.sleep(600 * _broken(comm))\n",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Named:
    """What was said of a fault first: which ranks, and how long after it began."""

    ranks: tuple[int, ...] = ()
    seconds: float = PATIENCE_S
    steps: int = 0  # of the run, from the faulty one to the last one with a record
    others: tuple[str, ...] = ()  # what was said wrongly, of other kinds or before
    said: str = ""  # by a run that was ended

    def is_right(self, fault: Fault) -> bool:
        """Whether the faulty rank was named, it alone, and nothing else was said."""
        return self.ranks == (fault.rank,) and not self.others


_KINDS = {
    "straggler": "stragglers",
    "desync": "desynchronized",
    "nan": "nan_origin",
}


def look(recorded: Recorded, fault: Fault, unit: ModuleType) -> Named | None:
    """What the folder says of the fault now; None while it says nothing."""
    found = suspected(recorded, unit, "")
    said = {kind: getattr(found, field) for kind, field in _KINDS.items()}
    others = [f"{kind} {ranks}" for kind, ranks in said.items() if ranks]
    others += found.sentences
    rows = rows_of(recorded)
    step = rows[-1][0].step if rows else 0
    if fault.name == "hang":
        stuck = re.search(r"rank (\d+) had not finished", recorded.autopsy)
        ranks = (int(stuck[1]),) if stuck else ()
        if not recorded.autopsy:
            return None
    else:
        ranks = said[fault.name]
        others = [one for one in others if not one.startswith(f"{fault.name} ")]
        if not ranks:
            return None
    return Named(
        ranks=ranks,
        steps=max(0, step - FROM + 1),
        others=tuple(others),
        said=recorded.autopsy,
    )


def write_images(folder: Path, num_images: int) -> None:
    """Four IDX files of random images, and a few to be held out."""
    generator = torch.Generator().manual_seed(0)
    folder.mkdir()
    for place, count in enumerate((num_images, 64)):
        images = torch.randint(256, (count, 28, 28), generator=generator)
        labels = torch.randint(10, (count,), generator=generator)
        for name, values in zip(NAMES[2 * place :], (images, labels), strict=False):
            head = bytes([0, 0, 8, values.dim()])
            head += struct.pack(f">{values.dim()}I", *values.shape)
            data = values.to(torch.uint8).numpy().tobytes()
            (folder / name).write_bytes(head + data)


def watched(fault: Fault, folder: Path, images: Path, unit: ModuleType) -> Named:
    """Train with the fault in the new `folder`, until something is said of it."""
    began, records = folder / "began", folder / "records"
    course = folder / "course"
    course.mkdir(parents=True)
    for name in ("curriculum.toml", "pyproject.toml"):
        shutil.copy(ROOT / name, course)
    shutil.copytree(ROOT / "solutions", course / "solutions")
    (course / TRAINER).write_text(fault.trainer(began), encoding="utf-8")
    with _training(course, records, images, folder / "said") as is_running:
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            going = is_running()  # asked first: what it wrote last is looked at, too
            named = (
                look(read_folder(records), fault, unit) if _is_run(records) else None
            )
            if named:
                return _timed(named, began)
            if not going:
                return Named(said=(folder / "said").read_text())
            time.sleep(LOOK_S)
    return Named()


def _is_run(records: Path) -> bool:
    try:
        read_folder(records)
    except ValueError:  # not there yet, or half of its first file
        return False
    return True


def _timed(named: Named, began: Path) -> Named:
    if not began.exists():
        return replace(named, ranks=(), others=("named before the fault",))
    return replace(named, seconds=time.time() - float(began.read_text()))


@contextmanager
def _training(
    course: Path, records: Path, images: Path, said: Path
) -> Iterator[Callable[[], bool]]:
    flags = ["--dataset", "idx", "--data-dir", str(images), "--epochs", "50"]
    flags += ["-n", str(WORLD_SIZE), "--global-batch-size", str(BATCH), "--json"]
    flags += ["--code", "reference", "--monitor", str(records)]
    flags += ["--hang-after", str(HANG_AFTER_S)]
    with said.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "distlab", "ddp", *flags],
            cwd=course,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=output,
            stderr=output,
        )
        try:
            yield lambda: process.poll() is None
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            try:
                process.wait(20.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
