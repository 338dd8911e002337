"""Run many cells, one after another, and say why some of them aren't run."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from distlab.chaos import partition
from distlab.chaos.judge import CellResult, judge
from distlab.chaos.matrix import Cell
from distlab.chaos.plan import Setting
from distlab.chaos.play import ChaosRun, play_cell
from distlab.curriculum import Progress, find_root


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """The cells to run, and the reasons why others are left out, with their cells."""

    played: tuple[Cell, ...]
    senseless: dict[str, list[Cell]] = field(default_factory=dict)
    not_played: dict[str, list[Cell]] = field(default_factory=dict)


def campaign_of(cells: Sequence[Cell]) -> Campaign:
    """Sort the cells into those that can run on this machine and those that can't."""
    played: list[Cell] = []
    senseless: dict[str, list[Cell]] = {}
    missing: dict[str, list[Cell]] = {}
    for cell in cells:
        why_not = partition.why_not() if cell.fault.num_nodes > 1 else ""
        if cell.why_not:
            senseless.setdefault(cell.why_not, []).append(cell)
        elif why_not:
            missing.setdefault(why_not, []).append(cell)
        else:
            played.append(cell)
    return Campaign(played=tuple(played), senseless=senseless, not_played=missing)


class Player:
    """Runs cells; it makes only one unbroken run for each setting."""

    def __init__(self, setting: Setting, script: Path | None = None) -> None:
        self._setting, self._script = setting, script
        self._unbroken: dict[Setting, ChaosRun] = {}

    def play(self, cell: Cell) -> CellResult:
        """Run a cell and judge it.

        Raises:
            RuntimeError: on this machine, not even a run without a fault succeeds.
        """
        setting = self._setting.for_cell(cell)
        unbroken = self.unbroken(setting)
        run = self._in_folder(cell, setting)
        return judge(cell, setting, run, unbroken)

    def unbroken(self, setting: Setting) -> ChaosRun:
        """Return a run without a fault, the same for all nodes and data workers.

        Raises:
            RuntimeError: the run didn't succeed.
        """
        plain = replace(setting, num_workers=0, num_nodes=1)
        if plain not in self._unbroken:
            run = self._in_folder(None, plain)
            if run.codes != [0] or run.left:
                said = [text for _, text in run.said] + run.logs + run.left
                raise RuntimeError(
                    "the training does not even run without a fault: "
                    f"{'; '.join(said[-5:]) or run.codes}"
                )
            self._unbroken[plain] = run
        return self._unbroken[plain]

    def _in_folder(self, cell: Cell | None, setting: Setting) -> ChaosRun:
        with tempfile.TemporaryDirectory(dir=_real_folder(), prefix="chaos-") as folder:
            return play_cell(cell, setting, Path(folder), self._script)


def _real_folder() -> Path:
    """Return a folder on a disk, since /tmp may be in memory."""
    folder = Path(tempfile.gettempdir())
    with suppress(Exception):  # outside of a checkout
        folder = Progress(find_root()).folder
        folder.mkdir(parents=True, exist_ok=True)
    return folder
