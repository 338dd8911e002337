"""Checks of 4.3, `fault_tolerance.save`: C1, one file; C2, what ranks save."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from distlab.checkpoints import files as given
from distlab.comm import Disk, DiskError
from distlab.grading.checks.fault_tolerance.disks import (
    RankDisk,
    Row,
    expect_end,
    files_of_step,
    flaw_of,
    listed,
    meta_of,
    play_on_disk,
    row_of,
    tensors_of,
    when,
)
from distlab.grading.clause import clause, judged_after
from distlab.grading.kit.plans import worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import NOBODY
from distlab.sim import SimDisk, crash_points
from distlab.sim.observed_disk import ObservedDisk

TASK = "fault_tolerance.save"
SIZES = (3, 2, 1)
OLD, NEW = b"the old content", b"the new one"
FIRST, STEPS = 9, (10, 10, 30)  # step 9 is there; 10 is saved twice, 30 once
KEEP = 2


# ── C1 ──────────────────────────────────────────────────────────────────────────────


def write_one(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """The first crash that leaves less than was promised, and the operations."""
    old = {"a.json": OLD}
    stale = {f"a.json{given.TEMPORARY}": NEW + OLD}, {f"a.json{given.TEMPORARY}": b"t"}
    for files in (old, {}, *(old | one for one in stale)):
        done: list[Row] = []
        disk = SimDisk(files)
        unit.write_file(NotedDisk(disk, done), "a.json", NEW)
        rows = [row[1:] for row in done]
        if disk.names() != ["a.json"]:
            return {"names": disk.names(), "rows": rows}
        if disk.read("a.json") != NEW:
            return {"content": disk.read("a.json").decode(), "names": [*files]}

        def program(disk: Disk, tell: Callable[[Any], None]) -> None:
            unit.write_file(disk, "a.json", NEW)
            tell("returned")

        for point in crash_points(program, files=files, limit=200):
            left = point.files.get("a.json")
            may = {NEW} if point.told else {NEW, files.get("a.json")}
            if left not in may:
                return {
                    "when": when(point),
                    "left": None if left is None else left.decode("latin-1"),
                    "told": bool(point.told),
                    "was": OLD.decode() if "a.json" in files else None,
                    "rows": rows,
                }
    return None


class NotedDisk(ObservedDisk):
    """Notes the operations of one process."""

    def __init__(self, disk: Disk, rows: list[Row]) -> None:
        super().__init__(disk)
        self._rows = rows

    def _begin(self, name: str, *arguments: str | bytes) -> None:
        self._rows.append(row_of(0, name, arguments))


@clause(TASK, "C1", worlds=(1,), plays=(), runs=[on_ranks(write_one)])
def a_file_in_full(runs: Runs) -> str | None:
    """After every crash, what the file holds; with an older file, and without."""
    wrong = worked_out(runs, write_one).values[0]
    if wrong is None:
        return "at every crash, with all that can be left of what was not synced"
    if "content" in wrong:
        raise NotYetError(
            f"when the disk already has {listed(wrong['names'])}, write_file leaves "
            f'"{wrong["content"]}" in "a.json", expected "{NEW.decode()}"',
            rule="a crash may have left a temporary file: write replaces it",
        )
    if "names" in wrong:
        raise NotYetError(
            f'write_file(disk, "a.json", …) leaves {listed(wrong["names"])} on the '
            'disk, expected "a.json" only'
        )
    slug, rule = _cause(wrong["rows"])
    raise NotYetError(
        f'when the machine crashes {wrong["when"]} in write_file, "a.json" '
        f"{_held(wrong)}, expected {_allowed(wrong)}"
        if not wrong["told"]
        else f'when the machine crashes after write_file has returned, "a.json" '
        f"{_held(wrong)}, expected the new content",
        slug=slug,
        rule=rule,
    )


def _allowed(wrong: dict[str, Any]) -> str:
    """What a crash within write_file may leave."""
    old = "no file" if wrong["was"] is None else "the old content"
    return f"{old} or all of the new one"


def _held(wrong: dict[str, Any]) -> str:
    left, was = wrong["left"], wrong["was"]
    if left is None:
        return "is not there"
    if left == was:
        return "has the old content"
    if NEW.decode().startswith(left):
        return f"has {len(left)} of the {len(NEW)} new bytes"
    return f"holds {left!r}"


def _cause(rows: list[Row]) -> tuple[str, str]:
    """The misconception, by the operations of the run without a crash."""
    kinds = [row[0] for row in rows]
    into_place = [row for row in rows if row[0] in ("write", "append")]
    if "rename" not in kinds or any(row[1] == "a.json" for row in into_place):
        return (
            "written-in-place",
            "write under another name; rename puts the file in its place in one step",
        )
    at = kinds.index("rename")
    if "sync" not in kinds[:at]:
        return "renamed-before-sync", "sync(name + TEMPORARY) first, then rename"
    if "sync_folder" not in kinds[at:]:
        return "new-name-not-synced", "a new name is durable after sync_folder()"
    return "", ""


# ── C2 ───────────────────────────────────────────────────────────────────────


def saves(
    unit: ModuleType,
    seed: int,
    num_ranks: int,
    rows: list[Row],
    disk: Any,
    tell: Any,
    keep: int = KEEP,
) -> tuple[list[Any], str]:
    """All ranks save the steps of STEPS on one disk."""

    def program(context: RankContext) -> None:
        own = RankDisk(disk, context, rows)
        for number, step in enumerate(STEPS):
            kind = seed + number
            tensors = tensors_of(context.rank, step, kind)
            meta = meta_of(context.rank, step)
            try:
                unit.save(context.comm, own, step, tensors, meta, keep=keep)
            except (DiskError, given.CheckpointError) as error:
                rows.append([context.rank, "raised", step, str(error)])
                return
            rows.append([context.rank, "returned", step])
            tell([context.rank, step])

    return play_on_disk(program, num_ranks, disk)


def save_steps(context: RankContext, unit: ModuleType, seed: int, size: int) -> Any:
    """The operations of all ranks, and the files at the end."""
    rows: list[Row] = []
    disk = SimDisk(files_of_step(FIRST, size, seed))
    _, end = saves(unit, seed, size, rows, disk, lambda what: None)
    last = files_of_step(STEPS[-1], size, seed + len(STEPS) - 1)
    wrong = [name for name, data in last.items() if disk.files.get(name) != data]
    return {
        "end": end,
        "rows": rows,
        "flaw": flaw_of(disk.files, STEPS[-1]),
        "wrong": wrong,
        "names": disk.names(),
        "order": _order_in(disk.files),
    }


def _order_in(files: dict[str, bytes]) -> list[str]:
    """The shards of the newest manifest, in its order."""
    name = given.manifest_name(STEPS[-1])
    try:
        return [file.name for file in given.decode_manifest(files[name]).files]
    except (KeyError, ValueError):
        return []


PLAYED = [on_ranks(save_steps, size=size) for size in SIZES]
MEMBERS = (2, 0)


def save_in_group(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """Two of three ranks save, in another order: rank 2 is rank 0 of their group."""
    disk, step = SimDisk(), STEPS[-1]

    def program(context: RankContext) -> None:
        group = context.comm.new_group(list(MEMBERS))
        if group is not None:
            own = RankDisk(disk, context, [])
            tensors = tensors_of(context.rank, step, seed)
            unit.save(group, own, step, tensors, meta_of(context.rank, step))

    _, end = play_on_disk(program, 3)
    flaw, metas = flaw_of(disk.files, step), []
    if not flaw:
        metas = [
            given.decode_shard(disk.files[name]).meta for name in _order_in(disk.files)
        ]
    return {"end": end, "flaw": flaw, "metas": metas}


GROUP = on_ranks(save_in_group)
NUM_WIDE = 12  # as text, rank 10 comes before rank 2


def save_wide(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """So many ranks save once that their names have another order than they."""
    disk, step = SimDisk(), STEPS[-1]

    def program(context: RankContext) -> None:
        own = RankDisk(disk, context, [])
        tensors = {"weight": torch.tensor([context.rank])}
        unit.save(context.comm, own, step, tensors, {})

    _, end = play_on_disk(program, NUM_WIDE)
    return {"end": end, "flaw": flaw_of(disk.files, step), "wrong": []} | {
        "names": disk.names(),
        "order": _order_in(disk.files),
    }


WIDE = on_ranks(save_wide)


def _expect_group(runs: Runs) -> None:
    record = worked_out(runs, GROUP).values[0]
    setting = "when ranks 2 and 0 save as ranks 0 and 1 of a group"
    expect_end(record["end"], setting)
    if record["flaw"]:
        raise NotYetError(
            f"{setting}, step {STEPS[-1]} is not complete: {record['flaw']}", played=3
        )
    if record["metas"] != [meta_of(rank, STEPS[-1]) for rank in MEMBERS]:
        raise NotYetError(
            f"{setting}, the manifest doesn't list their shards in this order, "
            "expected "
            "rank 2's first",
            played=3,
        )


@clause(TASK, "C2", worlds=(1,), plays=SIZES, runs=[*PLAYED, GROUP, WIDE])
def the_manifest_comes_last(runs: Runs) -> str | None:
    """The files at the end; and when each shard and the manifest were written."""
    for size in SIZES:
        record = worked_out(runs, save_steps, size=size).values[0]
        setting = f"with {size} rank{'s' * (size > 1)}"
        with judged_after(a_file_in_full, runs, "C1"):
            _expect_last(record["rows"], size, setting)
            _expect_returns(record, size, setting)
            _expect_files(record, size, setting)
    _expect_group(runs)
    record, setting = worked_out(runs, WIDE).values[0], f"with {NUM_WIDE} ranks"
    expect_end(record["end"], setting)
    _expect_files(record, NUM_WIDE, setting)
    return "a rank without a tensor, tied, empty and bfloat16 tensors, a step twice"


def _expect_last(rows: list[Row], size: int, setting: str) -> None:
    """The manifest is written once per save, by rank 0, when all shards are durable."""
    durable: set[int] = set()
    renamed: set[int] = set()
    for rank, kind, *paths in rows:
        if kind == "rename" and ".rank-" in paths[-1]:
            _expect_own_shard(rank, paths[-1], size, setting)
            renamed.add(rank)
        elif kind == "sync_folder":
            durable |= renamed & {rank}
        elif kind == "write" and ".json" in paths[0]:
            missing = sorted(set(range(size)) - durable)
            if rank != 0:
                raise NotYetError(
                    f'{setting}, rank {rank} wrote "{paths[0]}", expected only rank 0 '
                    "to write the manifest",
                    slug="manifest-by-all",
                    played=size,
                )
            if missing:
                _expect_a_shard(missing[0], rows, size, setting)
                raise NotYetError(
                    f'{setting}, rank 0 wrote "{paths[0]}" before rank {missing[0]}\'s '
                    "shard was durable, expected the manifest to come last",
                    slug="manifest-first",
                    rule="write the shard, exchange the records, then write the "
                    "manifest",
                    played=size,
                )
            durable, renamed = set(), set()


def _expect_a_shard(rank: int, rows: list[Row], size: int, setting: str) -> None:
    """It writes one at all."""
    if not any(r == rank and ".rank-" in str(paths[-1:]) for r, _, *paths in rows):
        raise NotYetError(
            f"{setting}, rank {rank} wrote no shard, expected one from each rank, even "
            "if it has no tensors",
            played=size,
        )


def _expect_own_shard(rank: int, name: str, size: int, setting: str) -> None:
    """The rank in the name is the one that writes it."""
    if f".rank-{rank}." not in name:
        raise NotYetError(
            f'{setting}, rank {rank} wrote "{name}", expected a name with its own '
            f"number, rank-{rank}",
            played=size,
        )


def _expect_returns(record: dict[str, Any], size: int, setting: str) -> None:
    """Every save of every rank returned."""
    raised = [row for row in record["rows"] if row[1] == "raised"]
    if raised and early_return(record["rows"]) is not None:
        raise NotJudgedError("see C3")
    if raised:
        rank, _, step, error = raised[0]
        others = removed_by_others(record["rows"])
        raise NotYetError(
            f"{setting}, save of step {step} raised on rank {rank}, although the disk "
            f"has room: {error}",
            rule="only rank 0 removes older files" if others else "",
            played=size,
        )
    expect_end(record["end"], setting)


def removed_by_others(rows: list[Row]) -> list[Row]:
    """What ranks other than 0 removed."""
    return [row for row in rows if row[1] == "remove" and row[0] != 0]


def early_return(rows: list[Row]) -> Row | None:
    """The first return of a rank before the manifest of that save is durable."""
    returns: dict[int, int] = {}
    num_commits, is_named = 0, False
    for row in rows:
        rank, kind, *paths = row
        if kind == "rename" and ".json" in paths[-1]:
            is_named = True
        elif kind == "sync_folder" and rank == 0 and is_named:
            num_commits, is_named = num_commits + 1, False
        elif kind == "returned":
            returns[rank] = returns.get(rank, 0) + 1
            if returns[rank] > num_commits:
                return row
    return None


def _expect_files(record: dict[str, Any], size: int, setting: str) -> None:
    step = STEPS[-1]
    if record["flaw"]:
        raise NotYetError(
            f"{setting}, save returned, but step {step} is not complete: "
            f"{record['flaw']}",
            played=size,
        )
    ranks = [int(name.split(".rank-")[1].split(".")[0]) for name in record["order"]]
    if ranks != list(range(size)):
        listed_at = next(
            (place for place, rank in enumerate(ranks) if rank != place), len(ranks)
        )
        as_text = ranks == sorted(range(size), key=str)
        raise NotYetError(
            f"{setting}, the manifest of step {step} lists "
            + (
                f"rank {ranks[listed_at]}'s shard in place {listed_at}"
                if listed_at < len(ranks)
                else f"{len(ranks)} shard{'s' * (len(ranks) != 1)}"
            )
            + f", expected those of ranks 0 to {size - 1} in order"
            + ": their names were sorted as text" * as_text,
            rule="keep the order of the ranks, in which exchange returns the records"
            if as_text
            else "",
            played=size,
        )
    if record["wrong"]:
        name = record["wrong"][0]
        rank = name.partition(".rank-")[2].partition(".")[0]
        raise NotYetError(
            f"{setting}, rank {rank}'s shard of step {step} differs from what rank "
            f"{rank} saved"
            if rank
            else f"{setting}, the manifest of step {step} is not that of its shards",
            evidence=[
                (NOBODY, "expected", name),
                (NOBODY, "disk", listed(record["names"])),
            ],
            played=size,
        )
