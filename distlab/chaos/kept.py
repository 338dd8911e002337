"""Write results to a file cell by cell, so that you can stop a long campaign."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from distlab.chaos.campaign import Campaign
from distlab.chaos.judge import CellResult
from distlab.chaos.matrix import Cell
from distlab.chaos.plan import Setting
from distlab.chaos.report import as_data, by_id, from_data


class Plays(Protocol):
    """Runs cells: either a Player or a wrapper that keeps the results."""

    def play(self, cell: Cell) -> CellResult:
        """Run a cell."""


class Kept:
    """Runs the cells whose results the file doesn't have yet, and adds them to it."""

    def __init__(
        self, player: Plays, path: Path, campaign: Campaign, setting: Setting
    ) -> None:
        """Read the file, if it exists.

        Raises:
            ValueError: it isn't a report, or one for another seed, size or code.
        """
        self._player, self._path = player, path
        self._campaign, self._setting = campaign, setting
        self._results = by_id(_read(path, setting)) if path.exists() else {}

    def play(self, cell: Cell) -> CellResult:
        """Return the result in the file, or run the cell now if there is none."""
        if cell.id not in self._results:
            self._results[cell.id] = self._player.play(cell)
            self._write()
        return self._results[cell.id]

    def _write(self) -> None:
        results = list(self._results.values())
        data = as_data(results, self._campaign, self._setting)
        text = json.dumps(data, indent=1)
        # Beside, then renamed: a full disk or a kill leaves the earlier results whole.
        path = self._path.resolve()
        beside = path.with_name(f"{path.name}.unfinished")
        try:
            beside.write_text(f"{text}\n", encoding="utf-8")
            beside.replace(path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise


def read_report(path: Path) -> dict[str, Any]:
    """Read a file that `--json` or `--out` wrote.

    Raises:
        ValueError: it isn't valid JSON.
    """
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    return data


def _read(path: Path, setting: Setting) -> list[CellResult]:
    data = read_report(path)
    results, _ = from_data(data)
    own = {"seed": setting.seed, "ranks": setting.num_ranks, "code": setting.code}
    for name, value in own.items():
        if data.get(name) != value:
            raise ValueError(
                f"{path} is a report with {name} {data.get(name)}, not {value}: name "
                "another file, or remove this one"
            )
    return results
