"""`distlab chaos`: inject faults into a real training run, and report the outcome."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distlab.cli.options import Json
from distlab.cli.screen import command, processes, show, show_json, waiting
from distlab.processes.tree import leaving_none

if TYPE_CHECKING:  # they import torch
    from distlab.chaos.campaign import Campaign
    from distlab.chaos.judge import CellResult
    from distlab.chaos.kept import Plays
    from distlab.chaos.matrix import Cell
    from distlab.chaos.plan import Setting

ALL_GOOD, DEFECT = 0, 1
BEGIN, END = "<!-- distlab chaos --docs -->\n", "<!-- end of chaos -->\n"
MOST_RANKS = 4
_Only = Annotated[
    str,
    typer.Option(
        help="Run only the cells whose id contains this text, such as "
        "kill-rank-0@save/restart."
    ),
]


def chaos(
    only: _Only = "",
    seed: Annotated[
        int, typer.Option(help="Seed that decides which ranks and steps are hit.")
    ] = 0,
    code: Annotated[
        str, typer.Option(help="Whose units to run: mine or reference.")
    ] = ("reference"),
    n: Annotated[int, typer.Option("-n", help="Number of ranks, from 2 to 4.")] = 3,
    html: Annotated[
        str, typer.Option(help="Write the results to this file as an HTML page.")
    ] = "",
    out: Annotated[
        str,
        typer.Option(
            help="Save the results to this JSON file, and skip any cells that it "
            "already contains."
        ),
    ] = "",
    docs: Annotated[
        str,
        typer.Option(
            help="Run nothing. Only update docs/chaos.md from the results in this JSON "
            "file."
        ),
    ] = "",
    as_json: Json = False,
) -> int:
    """Kill, freeze, starve and cut off ranks of a real run, and check how it ends."""
    if docs:
        return write_docs(Path(docs))
    from distlab.chaos.campaign import Player, campaign_of
    from distlab.chaos.kept import Kept
    from distlab.chaos.matrix import cells
    from distlab.chaos.plan import Setting
    from distlab.chaos.report import as_data

    if n not in range(2, MOST_RANKS + 1):
        raise ValueError(f"{n} ranks: choose 2 to {MOST_RANKS}")
    if code not in ("mine", "reference"):
        raise ValueError(f"--code {code}: choose mine or reference")
    setting = Setting(num_ranks=n, seed=seed, code=code)
    campaign = campaign_of(cells(only))
    player: Plays = Player(setting)
    if out:
        player = Kept(player, Path(out), campaign, setting)
    with leaving_none():
        if as_json:
            results = [player.play(cell) for cell in campaign.played]
        else:
            results = _play_aloud(campaign, player, setting)
    data = as_data(results, campaign, setting)
    if as_json:
        show_json(data)
    if html:
        _write_page(Path(html), results, campaign, setting)
    return ALL_GOOD if all(result.is_good for result in results) else DEFECT


def _play_aloud(
    campaign: Campaign, player: Plays, setting: Setting
) -> list[CellResult]:
    from distlab.chaos.report import LEGEND, reasons, summary, times

    cells = campaign.played
    lines = (
        f"{processes(setting.num_ranks)} train on the digits for {setting.num_steps} "
        f"steps and save a checkpoint every {setting.save_every}.",
        f"Something goes wrong in each of {len(cells)} runs, which take about "
        f"{_minutes(len(cells))} min on a quiet machine.",
        "",
    )
    if cells:
        show([("plain", line) for line in lines])
    results = _play_rows(cells, player)
    if results:
        told = [*LEGEND, ""]
        for mode in dict.fromkeys(result.cell.mode for result in results):
            own = times([result for result in results if result.cell.mode == mode])
            told += [f"{mode}: {own[0]}", *own[1:], ""] if own else []
        show([("plain", line) for line in [*told, summary(results)]])
    show([("dim", line) for line in reasons(campaign)])
    for result in results:
        if not result.is_good:
            _tell_defect(result, setting)
    return results


def _play_rows(cells: Sequence[Cell], player: Plays) -> list[CellResult]:
    """Run row by row, and show each row when it's done."""
    from distlab.chaos.report import by_id, head, row

    results: list[CellResult] = []
    mode = ""
    for number, cell in enumerate(cells):
        if cell.mode != mode:
            mode = cell.mode
            show([("dim", f"{mode:<12}{head()[12:]}")])
        with waiting(f"{cell.id}, {number + 1} of {len(cells)}"):
            results.append(player.play(cell))
        own = [one for one in results if one.cell.fault == cell.fault]
        own = [one for one in own if one.cell.mode == mode]
        following = cells[number + 1] if number + 1 < len(cells) else None
        if following is None or following.fault != cell.fault or following.mode != mode:
            style = "plain" if all(one.is_good for one in own) else "fail"
            show([(style, row(cell.fault, mode, by_id(own)))])
    show([("", "")] * bool(cells))
    return results


def _tell_defect(result: CellResult, setting: Setting) -> None:
    cell = result.cell
    again = f"chaos --only {cell.id} --seed {setting.seed} -n {setting.num_ranks}"
    lines = [
        ("", ""),
        ("fail", f"✗ {cell.id}: {result.status}: {result.why}"),
        ("plain", f"  {result.what}"),
        *(("dim", f"    {line}") for line in result.evidence),
        ("plain", f"  again: {command(again)}"),
    ]
    show(lines)


def _minutes(num_cells: int) -> int:
    return max(1, round(num_cells * 10 / 60))


def _write_page(path: Path, *what: Any) -> None:
    from distlab.chaos.page import page

    path.write_text(page(*what), encoding="utf-8")


def write_docs(source: Path) -> int:
    """Put the tables of a report between the marks of docs/chaos.md.

    Raises:
        ValueError: the file isn't a report.
    """
    from distlab.chaos.kept import read_report
    from distlab.chaos.report import from_data, markdown
    from distlab.cli.own_course import need_a_clone
    from distlab.curriculum import find_root

    need_a_clone("chaos --docs")
    data = read_report(source)
    path = find_root() / "docs" / "chaos.md"
    before, rest = path.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    table = markdown(*from_data(data), data["machine"])
    path.write_text(f"{before}{BEGIN}{table}{END}{after}", encoding="utf-8")
    return ALL_GOOD
