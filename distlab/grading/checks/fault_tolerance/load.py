"""Checks of 4.4, `fault_tolerance.load`: damaged, foreign and missing files."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from types import ModuleType
from typing import Any

from distlab.checkpoints import files as given
from distlab.comm import DiskError
from distlab.grading.checks.fault_tolerance.disks import (
    Row,
    file_in_words,
    files_of_step,
    meta_of,
    same_tensor,
    tensors_of,
)
from distlab.grading.checks.fault_tolerance.save import NotedDisk
from distlab.grading.clause import clause
from distlab.grading.kit.plans import worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.runner.autopsy import NOBODY, Evidence
from distlab.sim import SimDisk

TASK = "fault_tolerance.load"
NEW, OLD, SIZE = 100, 10, 3
WIDE, NUM_WIDE = 300, 12  # as text, rank 10 comes before rank 2
AS_TEXT = 9  # the newest step, where steps are compared as text
INTACT = f"steps 8, 9, {OLD} and {NEW} are intact"
NUM_FLIPS = 120
_opened: list[str] = []
"""Filled if somebody unpickles what `_Trap` was pickled to."""


class _Trap:
    def __reduce__(self) -> Any:
        return _spring, ()


def _spring() -> dict[str, Any]:
    _opened.append("opened")
    return {}


Case = tuple[str, dict[str, bytes], int | None, tuple[str, ...]]
"""What is the case, in words; the files; the step to be loaded (None: no checkpoint is
complete, and -1: there is none); and the files that must be named as refused: one for
each newer step, the newest first."""


def base(seed: int) -> dict[str, bytes]:
    """Steps 8, 9 and 10 of two ranks, step 100 of three: step 100 is the newest."""
    saved = files_of_step(NEW, SIZE, seed)
    for step in (8, AS_TEXT, OLD):
        saved |= files_of_step(step, 2, seed)
    return saved


def cases(seed: int) -> Iterator[Case]:
    """Everything that load may meet."""
    files = base(seed)
    manifest = given.manifest_name(NEW)
    shards = [name for name in files_of_step(NEW, SIZE, seed) if name != manifest]
    alone = {n: data for n, data in files_of_step(200, 2, seed).items() if "rank" in n}
    foreign = {"notes.txt": b"hello", "model.pt": pickle.dumps(_Trap())}
    yield INTACT, files, NEW, ()
    wide = files_of_step(WIDE, NUM_WIDE, seed)
    yield f"step {WIDE} was saved by {NUM_WIDE} ranks", files | wide, WIDE, ()
    yield from _damaged(files)
    yield from _recorded_otherwise(files)
    yield "there are shards of step 200 without a manifest", files | alone, NEW, ()
    yield "there are files of other programs", files | foreign, NEW, ()
    yield (
        'there is a "step-200.json.tmp"',
        files | {"step-200.json.tmp": files[manifest]},
        NEW,
        (),
    )
    for name in (shards[0], shards[-1], manifest):
        data = files[name]
        middle = len(data) // 2
        yield (
            f"the last byte of {file_in_words(name)} is missing",
            _with(files, name, data[:-1]),
            OLD,
            (name,),
        )
        yield (
            f"half of {file_in_words(name)} is missing",
            _with(files, name, data[:middle]),
            OLD,
            (name,),
        )
        yield f"{file_in_words(name)} is empty", _with(files, name, b""), OLD, (name,)
        yield (
            f"{file_in_words(name)} has a byte more",
            _with(files, name, data + b"\n"),
            OLD,
            (name,),
        )
        yield (
            f"{file_in_words(name)} is a pickle",
            _with(files, name, pickle.dumps(_Trap())),
            OLD,
            (name,),
        )
    gone = {n: data for n, data in files.items() if n != shards[1]}
    yield f"{file_in_words(shards[1])} is not there", gone, OLD, (shards[1],)
    swapped = files | {shards[0]: files[shards[2]], shards[2]: files[shards[0]]}
    yield "two ranks' shards have each other's bytes", swapped, OLD, (shards[0],)
    other = _with(files, manifest, files[given.manifest_name(OLD)])
    yield (
        f"{file_in_words(manifest)} is a copy of step {OLD}'s",
        other,
        OLD,
        (manifest,),
    )
    yield (
        "a manifest names a pickle, with its SHA-256",
        _of_pickle(files),
        OLD,
        (".rank-0.",),
    )
    yield "the disk is empty", {}, -1, ()
    yield (
        "there are shards without a manifest, and foreign files",
        alone | foreign,
        -1,
        (),
    )
    torn = {n: data[:-1] if ".json" in n else data for n, data in files.items()}
    steps = (NEW, OLD, AS_TEXT, 8)
    every = tuple(map(given.manifest_name, steps))
    yield "all manifests are torn", torn, None, every
    first = tuple(_first_shard(files, step) for step in steps)
    yield "a shard of each checkpoint is torn", _cut(files, *first), None, first


def _damaged(files: dict[str, bytes]) -> Iterator[Case]:
    """An older checkpoint is damaged, which isn't tried; or the two newest are."""
    new, old, oldest = (_first_shard(files, step) for step in (NEW, OLD, 8))
    what = f"the last byte of {file_in_words(old)} is missing"
    yield what, _cut(files, old), NEW, ()
    both = f"the last bytes of rank 0's shards of steps {OLD} and"
    yield (
        f"{both} 8 are missing",
        _cut(files, old, oldest),
        NEW,
        (),
    )
    yield (
        f"{both} {NEW} are missing",
        _cut(files, old, new),
        AS_TEXT,
        (new, old),
    )


def _recorded_otherwise(files: dict[str, bytes]) -> Iterator[Case]:
    """A record of the newest manifest differs in its last digit, or in its size."""
    name = given.manifest_name(NEW)
    first, *others = given.decode_manifest(files[name]).files
    last = "0" if first.sha256[-1] != "0" else "1"
    for what, record in (
        ("last digit in the SHA-256", replace(first, sha256=first.sha256[:-1] + last)),
        ("size", replace(first, num_bytes=first.num_bytes + 1)),
    ):
        manifest = given.Manifest(step=NEW, files=(record, *others))
        data = given.encode_manifest(manifest)
        text = f"the manifest has a wrong {what} for {file_in_words(first.name)}"
        yield text, _with(files, name, data), OLD, (first.name,)


def _first_shard(files: dict[str, bytes], step: int) -> str:
    manifest = given.decode_manifest(files[given.manifest_name(step)])
    return manifest.files[0].name


def _cut(files: dict[str, bytes], *names: str) -> dict[str, bytes]:
    return files | {name: files[name][:-1] for name in names}


def flips(seed: int) -> Iterator[Case]:
    """One bit of one file of step 100 is another one."""
    files, drawing = base(seed), random.Random(seed)
    names = sorted(files_of_step(NEW, SIZE, seed))
    for number in range(NUM_FLIPS):
        name = names[number % len(names)]
        data = bytearray(files[name])
        at, bit = drawing.randrange(len(data)), drawing.randrange(8)
        data[at] ^= 1 << bit
        what = f"bit {bit} of byte {at} of {file_in_words(name)} is flipped"
        yield what, _with(files, name, bytes(data)), OLD, (name,)


def _with(files: dict[str, bytes], name: str, data: bytes) -> dict[str, bytes]:
    return files | {name: data}


def _of_pickle(files: dict[str, bytes]) -> dict[str, bytes]:
    data = pickle.dumps(_Trap())
    record = given.record_of(data, NEW, 0)
    manifest = given.Manifest(step=NEW, files=(record,))
    name = given.manifest_name(NEW)
    return files | {record.name: data, name: given.encode_manifest(manifest)}


def load_cases(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """What load makes of each case."""
    return [_loaded(unit, files, seed) for _, files, _, _ in _every(seed)]


def _loaded(unit: ModuleType, files: dict[str, bytes], seed: int) -> dict[str, Any]:
    _opened.clear()
    rows: list[Row] = []
    record: dict[str, Any] = {"step": -1, "wrong": "", "refused": [], "raised": ""}
    try:
        loaded = unit.load(NotedDisk(SimDisk(files), rows))
    except (given.CheckpointError, ValueError, DiskError, KeyError, EOFError) as error:
        kind = type(error).__name__
        record |= {"step": None, "raised": kind, "refused": [str(error)]}
    else:
        if loaded is not None:
            step = loaded.step
            record |= {"step": step, "refused": [str(one) for one in loaded.refused]}
            record["wrong"] = _difference(loaded, seed)
    return record | {"opened": bool(_opened), "changes": rows[:1]}


def _difference(loaded: Any, seed: int) -> str:
    """What of the shards is not what was saved."""
    size = {NEW: SIZE, WIDE: NUM_WIDE}.get(loaded.step, 2)
    if len(loaded.shards) != size:
        return f"it has {len(loaded.shards)} shards, expected {size}"
    for rank, shard in enumerate(loaded.shards):
        tensors, meta = tensors_of(rank, loaded.step, seed), meta_of(rank, loaded.step)
        if not hasattr(shard, "tensors") or not hasattr(shard, "meta"):
            return f"its shards are of type {type(shard).__name__}, expected Shard"
        same = shard.tensors.keys() == tensors.keys() and all(
            same_tensor(shard.tensors[name], tensors[name]) for name in tensors
        )
        if not same or shard.meta != meta:
            return f"shard {rank} is not what rank {rank} saved"
    return ""


@lru_cache(maxsize=2)
def _every(seed: int) -> tuple[Case, ...]:
    return (*cases(seed), *flips(seed))


def judged(runs: Runs) -> list[tuple[Case, dict[str, Any]]]:
    """Each case with what load made of it."""
    return list(
        zip(_every(runs.seed), worked_out(runs, load_cases).values[0], strict=True)
    )


@clause(TASK, "C1", worlds=(1,), plays=(), runs=[on_ranks(load_cases)])
def the_newest_complete(runs: Runs) -> str | None:
    """The step that is loaded, and its shards; the disk is only read."""
    for case, record in judged(runs):
        what, _, step, names = case
        if record["opened"]:
            raise NotYetError(
                f"when {what}, load unpickled it and ran code in it, expected it to be "
                "refused",
                slug="pickle-opened",
                rule="decode_manifest and decode_shard read no pickle",
            )
        if record["changes"]:
            call = record["changes"][0]
            raise NotYetError(
                f"when {what}, load called disk.{call[1]}, expected it to read only"
            )
        if step is not None and step >= 0:
            _expect_step(what, step, names, record)
    return f"{NUM_FLIPS} flipped bits; truncated, empty, swapped and foreign files"


def _expect_step(
    what: str, step: int, names: tuple[str, ...], record: dict[str, Any]
) -> None:
    got, setting = record["step"], f"when {what}"
    wanted = f"step {step}, the newest intact one"
    name = names[0] if names else ""
    if got is None:
        raise NotYetError(
            f"{setting}, load raised {record['raised']}, expected {wanted}",
            evidence=[(NOBODY, record["raised"], record["refused"][0])],
            slug="no-fallback" if name else "",
            rule="catch what one checkpoint raises, and try the one before"
            if name
            else "",
        )
    is_shard = ".rank-" in name
    if got == NEW and step < NEW:
        raise NotYetError(
            f"{setting}, load returned step {NEW}, expected {wanted}",
            slug="damage-unnoticed" if is_shard else "",
            rule="compare size and SHA-256 of each shard with its record"
            if is_shard
            else "",
        )
    if got != step:
        raise NotYetError(
            f"{setting}, load returned "
            + ("None" if got == -1 else f"step {got}")
            + f", expected {wanted}",
            slug="steps-as-text" if got == AS_TEXT and not name else "",
        )
    if record["wrong"]:
        raise NotYetError(f"{setting}, load returned step {got}, but {record['wrong']}")


@clause(TASK, "C2", worlds=(1,), plays=(), runs=[on_ranks(load_cases)], after=("C1",))
def what_was_refused(runs: Runs) -> str | None:
    """One line for each refused checkpoint, with the name of the file."""
    for (what, _, step, names), record in judged(runs):
        if step is None or step < 0:
            continue
        lines, setting = record["refused"], f"when {what}, load's `refused`"
        if len(lines) > len(names):
            older = not any(name in lines[-1] for name in names)
            raise NotYetError(
                f"{setting} has {_num_lines(len(lines))}, expected {len(names)}",
                rule=f"one line for each step above {step}, none for an older one"
                if older
                else "",
                evidence=_lines(lines),
            )
        if len(lines) < len(names):
            raise NotYetError(
                f"{setting} has {_num_lines(len(lines))}, expected {len(names)}, one "
                f'of them for "{names[len(lines)]}"',
                evidence=_lines(lines),
            )
        for line, name in _pairs(lines, names):
            if name not in line or "\n" in line:
                raise NotYetError(
                    f'{setting} doesn\'t name "{name}" in one line, expected the '
                    "name of each refused file",
                    evidence=_lines(lines),
                )
            if len(line) < len(name) + 8:
                raise NotYetError(
                    f'{setting} has only "{line}" in a line, expected the reason too'
                )
    return None


def _num_lines(count: int) -> str:
    return "1 line" if count == 1 else f"{count} lines"


def _lines(lines: list[str]) -> tuple[Evidence, ...]:
    return tuple(Evidence(NOBODY, "refused", line) for line in lines)


def _pairs(lines: list[str], names: tuple[str, ...]) -> list[tuple[str, str]]:
    """Each file with its line: they may be in any order."""
    left = list(lines)
    pairs = []
    for name in names:
        line = next((line for line in left if name in line), left[0])
        left.remove(line)
        pairs.append((line, name))
    return pairs


def _got(record: dict[str, Any]) -> str:
    if record["raised"]:
        return f"raised {record['raised']}"
    return (
        "returned None" if record["step"] == -1 else f"returned step {record['step']}"
    )


@clause(TASK, "C3", worlds=(1,), plays=(), runs=[on_ranks(load_cases)], after=("C1",))
def none_or_an_error(runs: Runs) -> str | None:
    """No checkpoint at all, and none that is complete."""
    for (what, _, step, names), record in judged(runs):
        if step == -1 and (record["raised"] or record["step"] != -1):
            raise NotYetError(f"when {what}, load {_got(record)}, expected None")
        if step is None and record["raised"] != "CheckpointError":
            raise NotYetError(
                f"when {what}, load {_got(record)}, expected a CheckpointError",
                slug="" if record["raised"] else "silent-restart",
                rule=""
                if record["raised"]
                else "None only if there is no manifest at all",
            )
        missing = [name for name in names if step is None]
        missing = [name for name in missing if name not in record["refused"][0]]
        if missing:
            raise NotYetError(
                f"when {what}, load's CheckpointError doesn't name "
                f'"{missing[0]}", expected a line for each refused checkpoint',
                rule="its message has the line of every checkpoint that was refused",
                evidence=_lines(record["refused"]),
            )
    return None
