"""Checks of 4.3, C4 and C5: a rank that cannot write, and which files are removed."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from distlab.checkpoints import files as given
from distlab.comm import Disk, DiskError
from distlab.grading.checks.fault_tolerance.crashes import complete_when_it_returns
from distlab.grading.checks.fault_tolerance.disks import (
    RankDisk,
    Row,
    complete_steps,
    file_in_words,
    files_of_step,
    meta_of,
    play_on_disk,
    tensors_of,
)
from distlab.grading.checks.fault_tolerance.save import (
    PLAYED,
    TASK,
    removed_by_others,
    save_steps,
)
from distlab.grading.clause import clause, judged_after
from distlab.grading.kit.plans import worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext
from distlab.sim import SimDisk

SIZES = (3, 2, 1)
OLD_STEPS, STEP, NEXT_STEP = (20, 10), 30, 40
KEEPS = (2, 1)
FULL, DTYPE = "the disk is full", "complex128"


# ── C4 ──────────────────────────────────────────────────────────────────────────────


def causes(size: int) -> list[tuple[int, str]]:
    """Which rank fails, and what its disk refuses; "": the dtype fits no shard."""
    found = [(rank, f".rank-{rank}.") for rank in (size - 1, 0)]
    return [*dict.fromkeys(found), (0, ".json"), (size - 1, "")]


def fail_once(context: RankContext, unit: ModuleType, seed: int, size: int) -> Any:
    """For each cause: what the ranks raise, what is left, and the save after it."""
    return [
        one_failure(unit, seed, size, keep, *cause)
        for keep in KEEPS
        for cause in causes(size)
    ]


def one_failure(
    unit: ModuleType, seed: int, size: int, keep: int, bad: int, full: str
) -> Any:
    """A save that fails on rank `bad`, and then one that nothing disturbs."""
    files: dict[str, bytes] = {}
    for step in OLD_STEPS:
        files |= files_of_step(step, size, seed)
    disk, rows = SimDisk(files), list[Row]()
    after: dict[str, list[str]] = {}

    def program(context: RankContext) -> str:
        rank, said = context.rank, "returned"
        is_bad = rank == bad
        own = RankDisk(disk, context, rows, full if is_bad else "")
        tensors = tensors_of(rank, STEP, seed)
        if is_bad and not full:
            tensors = {"odd": torch.zeros(2, dtype=torch.complex128)}
        try:
            unit.save(context.comm, own, STEP, tensors, meta_of(rank, STEP), keep)
        except given.CheckpointError as error:
            said = f"CheckpointError: {error}"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        context.comm.barrier()
        after.setdefault("names", disk.names())
        after.setdefault("complete", list(map(str, complete_steps(disk.files))))
        own = RankDisk(disk, context, rows)
        tensors = tensors_of(rank, NEXT_STEP, seed)
        meta = meta_of(rank, NEXT_STEP)
        unit.save(context.comm, own, NEXT_STEP, tensors, meta, keep)
        return said

    said, end = play_on_disk(program, size)
    return {
        "keep": keep,
        "bad": bad,
        "full": full,
        "said": [one if isinstance(one, str) else "" for one in said],
        "end": end,
        "names": after.get("names", []),
        "complete": [int(step) for step in after.get("complete", [])],
        "next": complete_steps(disk.files)[:1] == [NEXT_STEP],
    }


FAILED = [on_ranks(fail_once, size=size) for size in SIZES]


class FailsOnce(RankDisk):
    """The disk of a rank; its operation number `fails_at` raises an error."""

    def __init__(
        self, disk: Disk, context: RankContext, rows: list[Row], fails_at: int
    ) -> None:
        super().__init__(disk, context, rows)
        self._left = fails_at
        self.failed: list[str] = []  # the operation, and its path
        self.may_return = False  # the shard and the manifest have been written

    def _begin(self, name: str, *arguments: str | bytes) -> None:
        super()._begin(name, *arguments)
        self._count(name, *(path for path in arguments if isinstance(path, str)))

    def _count(self, name: str, *paths: str) -> None:
        self.may_return |= name in ("names", "read", "remove")
        self._left -= 1
        if self._left == -1:
            self.failed = [name, *paths]
            raise DiskError(f"{name} failed: {ODD}")

    def read(self, path: str) -> bytes:
        """See Disk."""
        self._count("read", path)
        return super().read(path)

    def names(self) -> list[str]:
        """See Disk."""
        self._count("names")
        return super().names()


ODD = "input/output error"
MOST_CALLS = 40


def fail_anywhere(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """Each call of one rank's disk fails in turn, those of remove_old included."""
    found = []
    for bad in (0, 1):
        for number in range(MOST_CALLS):
            record = _one_call_fails(unit, seed, bad, number)
            if not record["failed"]:
                break
            found.append(record)
    return found


def _one_call_fails(unit: ModuleType, seed: int, bad: int, number: int) -> Any:
    disk, disks = SimDisk(files_of_step(OLD_STEPS[0], 2, seed)), dict[int, FailsOnce]()

    def program(context: RankContext) -> str:
        rank = context.rank
        at = number if rank == bad else MOST_CALLS
        own = disks[rank] = FailsOnce(disk, context, [], at)
        try:
            unit.save(context.comm, own, STEP, {"weight": torch.ones(2)}, {}, 1)
        except Exception as error:
            return type(error).__name__
        return "returned"

    said, end = play_on_disk(program, 2)
    own = disks[bad]
    return {
        "bad": bad,
        "failed": own.failed,
        "free": own.may_return,
        "said": said,
        "end": end,
    }


ANYWHERE = on_ranks(fail_anywhere)


def _expect_told(record: dict[str, Any]) -> None:
    """All ranks raise CheckpointError; after an error of remove_old, or all return."""
    said, call = record["said"], ", ".join(f'"{p}"' for p in record["failed"][1:])
    what = f"when rank {record['bad']}'s disk.{record['failed'][0]}({call}) fails"
    rule = "catch the error, exchange it, and raise on every rank"
    if record["end"]:
        raise NotYetError(
            f"{what}, {record['end']}",
            slug="raised-alone",
            kind="DEADLOCK" if "wait" in record["end"] else "NOT YET",
            rule=rule,
            played=2,
        )
    right = [["CheckpointError"] * 2, *[["returned"] * 2] * record["free"]]
    if said in right:
        return
    is_swallowed = set(said) == {"returned"}
    other = next(rank for rank in (0, 1) if said[rank] != "CheckpointError")
    got = said[other] if said[other] == "returned" else f"raised {said[other]}"
    raise NotYetError(
        f"{what}, save {got} on rank {other}, expected a CheckpointError on both ranks",
        slug="error-swallowed" if is_swallowed else "raised-alone",
        rule=rule,
        played=2,
    )


@clause(TASK, "C4", worlds=(1,), plays=SIZES, runs=[*FAILED, ANYWHERE])
def an_error_on_every_rank(runs: Runs) -> str | None:
    """What each rank raises if one cannot write its shard or the manifest."""
    for size in SIZES:
        for record in worked_out(runs, fail_once, size=size).values[0]:
            _expect_error(record, size)
    for record in worked_out(runs, ANYWHERE).values[0]:
        _expect_told(record)
    return "a full disk on one rank, with the shard or the manifest; a wrong dtype"


def _setting(record: dict[str, Any], size: int) -> str:
    what = "saves a complex128 tensor, an unsupported dtype"
    if record["full"]:
        which = "the manifest" if record["full"] == ".json" else "its shard"
        what = f"finds the disk full while writing {which}"
    of = f" of {size}" * (size > 1)
    return f"when rank {record['bad']}{of} {what}"


def _expect_error(record: dict[str, Any], size: int) -> None:
    setting = _setting(record, size)
    if record["end"]:
        raise NotYetError(
            f"{setting}, {record['end']}, expected a CheckpointError on every rank",
            slug="raised-alone",
            kind="DEADLOCK" if "wait" in record["end"] else "NOT YET",
            rule="catch the error, exchange it, and raise on every rank",
            played=size,
        )
    words = FULL if record["full"] else DTYPE
    for rank, said in enumerate(record["said"]):
        if said == "returned":
            raise NotYetError(
                f"{setting}, save returned on rank {rank}, expected a "
                "CheckpointError on "
                "every rank",
                slug="error-swallowed",
                rule="exchange the errors, and raise if there is one on any rank",
                played=size,
            )
        if not said.startswith("CheckpointError"):
            raise NotYetError(
                f"{setting}, rank {rank} raised {said.partition(':')[0]}, expected a "
                "CheckpointError",
                evidence=[(rank, "raised", said)],
                slug="raised-alone",
                played=size,
            )
        if f"rank {record['bad']}" not in said or words not in said:
            raise NotYetError(
                f"{setting}, rank {rank}'s CheckpointError doesn't name rank "
                f'{record["bad"]} and "{words} …"',
                evidence=[(rank, "raised", said)],
                played=size,
            )
    if OLD_STEPS[0] not in record["complete"]:
        raise NotYetError(
            f"{setting}, the checkpoint of step {OLD_STEPS[0]} is incomplete "
            "afterwards, "
            "expected it to stay",
            slug="last-good-removed",
            rule="remove older checkpoints when the manifest of the new one is durable",
            played=size,
        )
    if STEP in record["complete"]:
        raise NotYetError(
            f"{setting}, step {STEP} has a manifest afterwards, expected no manifest",
            played=size,
        )
    if not record["next"]:
        raise NotYetError(
            f"{setting}, the next save leaves step {NEXT_STEP} incomplete, expected "
            "that save to succeed",
            played=size,
        )


# ── C5 ──────────────────────────────────────────────────────────────────────────────

_SAVED = (9, 10, 30, 100)
_TORN = 25  # its manifest cannot be decoded
_FOREIGN = ("notes.txt", "step-9.txt", "step-10.json.bak", "model.safetensors")
_CASES = ((100, 2), (100, 1), (30, 1), (30, 2), (100, 9), (9, 1))


def files_to_sort(seed: int) -> dict[str, bytes]:
    """Four checkpoints, one unreadable manifest, what crashes left, foreign files."""
    files = dict.fromkeys(_FOREIGN, b"not of a checkpoint")
    for step in _SAVED:
        files |= files_of_step(step, 2, seed)
    torn = files_of_step(_TORN, 2, seed)
    name = given.manifest_name(_TORN)
    torn[name] = torn[name][:-70]
    other = files_of_step(30, 2, seed + 1)
    del other[given.manifest_name(30)]
    alone = files_of_step(20, 2, seed)
    del alone[given.manifest_name(20)]
    temporary = {f"{name}.tmp": data[:9] for name, data in alone.items()}
    return files | torn | other | alone | temporary | {"step-90.json.tmp": b""}


def kept(files: dict[str, bytes], step: int, keep: int, as_text: bool = False) -> Any:
    """The names that stay; `as_text` sorts the steps like words."""
    saved = [
        one
        for one in given.manifest_steps(list(files))
        if one <= step and given.manifest_name(one) in files and one != _TORN
    ]
    newest = sorted(saved, key=str if as_text else int)[-keep:]
    stay = set()
    for one in newest:
        manifest = given.decode_manifest(files[given.manifest_name(one)])
        stay |= {given.manifest_name(one), *(file.name for file in manifest.files)}
    for name in files:
        its_step = given.step_of(name)
        if its_step is None or its_step > step:
            stay.add(name)
    return sorted(stay)


def remove_some(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """What remove_old leaves, for each case."""
    found = []
    for step, keep in _CASES:
        disk = SimDisk(files_to_sort(seed))
        unit.remove_old(disk, step, keep)
        found.append(disk.names())
    return found


def remove_in_saves(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """The steps that are complete after saves with keep=1 and keep=3, and the files."""
    found = []
    for keep in (1, 3):
        disk = SimDisk()

        def program(context: RankContext, keep: int = keep, disk: Any = disk) -> None:
            for step in (9, 10, 11, 12):
                own = RankDisk(disk, context, [])
                tensors = tensors_of(context.rank, step, seed)
                unit.save(context.comm, own, step, tensors, {}, keep=keep)

        _, end = play_on_disk(program, 2)
        found.append([keep, complete_steps(disk.files), len(disk.names()), end])
    return found


@clause(
    TASK,
    "C5",
    worlds=(1,),
    plays=(2,),
    runs=[on_ranks(remove_some), on_ranks(remove_in_saves), *FAILED, *PLAYED],
)
def what_is_removed(runs: Runs) -> str | None:
    """The names that remove_old leaves; what saves leave, also after an error."""
    files = files_to_sort(runs.seed)
    left = worked_out(runs, remove_some).values[0]
    for (step, keep), names in zip(_CASES, left, strict=True):
        _expect_kept(files, step, keep, names)
    with judged_after(complete_when_it_returns, runs, "C3"):
        for size in SIZES:
            rows = worked_out(runs, save_steps, size=size).values[0]["rows"]
            for rank, _, name in removed_by_others(rows)[:1]:
                raise NotYetError(
                    f"with {size} ranks, rank {rank} removed {file_in_words(name)} "
                    "from the shared folder, expected only rank 0 to remove files",
                    played=size,
                )
        for keep, complete, num_files, end in worked_out(runs, remove_in_saves).values[
            0
        ]:
            _expect_steps(keep, complete, num_files, end)
    with judged_after(an_error_on_every_rank, runs, "C4"):
        for record in worked_out(runs, fail_once, size=2).values[0]:
            _expect_room(record)
    return None


def _expect_room(record: dict[str, Any]) -> None:
    """After an error the newest old checkpoints are there, and nothing else."""
    setting, steps = _setting(record, 2), OLD_STEPS[: record["keep"]]
    gone = [step for step in steps if step not in record["complete"]]
    if gone:
        raise NotYetError(
            f"{setting}, the checkpoint of step {gone[0]} is incomplete afterwards, "
            f"expected the newest {record['keep']} to stay"
        )
    rest = [n for n in record["names"] if given.step_of(n) not in (*steps, None)]
    if rest:
        raise NotYetError(
            f'{setting}, "{rest[0]}" still takes up room afterwards, expected '
            "remove_old to remove it",
            slug="no-room-made",
            rule="call remove_old after an error, too",
        )


def _expect_kept(
    files: dict[str, bytes], step: int, keep: int, names: list[str]
) -> None:
    wanted = kept(files, step, keep)
    if names == wanted:
        return
    call = f"remove_old(disk, {step}, keep={keep})"
    if names == kept(files, step, keep, as_text=True):
        raise NotYetError(
            f"{call} sorts the steps as text, so step 9 counts as newer than step 100",
            slug="steps-as-text",
            rule="sort numbers: given.manifest_steps does",
        )
    gone = [name for name in wanted if name not in names]
    if gone:
        name, slug = gone[0], ""
        its_step = given.step_of(name)
        why = f"step {its_step} to stay as one of the newest {keep} complete ones"
        if (its_step or 0) > step:
            why = f"step {its_step} to stay, which is later than {step}"
        if its_step is None:
            why, slug = "files of no checkpoint to stay", "foreign-removed"
        counted = [one for one in (*_SAVED, _TORN) if one <= step]
        is_out = its_step not in sorted(counted)[-keep:]
        is_torn_counted = is_out and its_step in counted and step >= _TORN
        if is_torn_counted:
            why += f", since step {_TORN} has a torn manifest"
        raise NotYetError(
            f"{call} removed {file_in_words(name)}, expected {why}",
            slug=slug,
            rule=f"the manifest of step {_TORN} cannot be decoded: it is not counted"
            if is_torn_counted
            else "",
        )
    extra = next(name for name in names if name not in wanted)
    raise NotYetError(
        f"{call} left {file_in_words(extra)}, expected it to be removed, as no kept "
        "manifest names it"
    )


def _expect_steps(keep: int, complete: list[int], num_files: int, end: str) -> None:
    wanted = [12, 11, 10, 9][:keep]
    if end or complete != wanted or num_files != 3 * keep:
        are_there = f"{num_files} files are left, expected {3 * keep}"
        if complete != wanted:
            are_there = f"the steps {complete} are complete, expected {wanted}"
        raise NotYetError(
            f"after two ranks save steps 9 to 12 with keep={keep}, {end or are_there}"
        )
