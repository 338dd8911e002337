"""The verdict under the name of its mistake, where the catalogue has it."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from distlab.curriculum import Curriculum, Progress, UnitSource
from distlab.curriculum.misconceptions import read_misconceptions
from distlab.grading.book.marks import Mark, are_alike, mark_of
from distlab.grading.book.plays import implementation_of, played
from distlab.grading.catalogue import CatalogueError, Entry, read_catalogue
from distlab.grading.clause import Check
from distlab.grading.differential.bills import judges_digest
from distlab.grading.harness import PlayedRuns
from distlab.grading.mismatches import RULES
from distlab.grading.runs import Runs
from distlab.grading.verdict import Difference, NotYetError
from distlab.runner.autopsy import NOBODY

BOOK_SEED = 20  # that of `distlab mutants`, so that it plays nothing twice
ROOM_S = 30.0  # for a solution that never ends; all others take tenths of a second
_ALIKE_SHOWN = 3
_BY_JUDGES = {
    *RULES,
    "raised",
    "local-rank-as-rank",
    "wrong-dtype",
    "no-samples-no-call",
}
"""Misconceptions that show in how a run ends, or that judges name themselves."""

_READ: dict[tuple[Path, str], list[Entry]] = {}


def named(
    curriculum: Curriculum, check: Check, runs: PlayedRuns, failure: NotYetError
) -> NotYetError:
    """The failure under the name of its mistake, if the book knows it."""
    if failure.slug or failure.difference is None:
        return failure
    for entries in _chapters(curriculum, check):
        if alike := _alike(curriculum, check, runs, failure.difference, entries):
            return _said(failure, alike)
    return failure


def _chapters(curriculum: Curriculum, check: Check) -> Iterator[list[Entry]]:
    """Wrong solutions of the clause; then of the unit's tasks that this one builds on.

    A learner may have written their part anew, with the same mistake in it. One entry
    stands for each misconception of theirs.
    """
    needs = curriculum.task(check.task).needs
    entries = [
        entry
        for entry in _entries(curriculum, check.task.partition(".")[0])
        if entry.is_mutant and entry.slug not in _BY_JUDGES and not entry.limit_s
    ]
    yield [e for e in entries if (e.task, e.clause) == (check.task, check.clause)]
    others = [entry for entry in entries if entry.task in needs and entry.slug]
    yield list({entry.slug: entry for entry in reversed(others)}.values())


def _alike(
    curriculum: Curriculum,
    check: Check,
    runs: PlayedRuns,
    difference: Difference,
    entries: list[Entry],
) -> list[Entry]:
    """Those that leave the same; at more world sizes if their names differ."""
    others = [n for n in check.worlds if n != runs.world_size]
    for world_size in (runs.world_size, *others):
        mine = runs.with_seed(BOOK_SEED, world_size)
        alike = _alike_here(curriculum, check, mine, difference.what, entries)
        if alike is not None:
            entries = alike
        elif world_size == runs.world_size:
            return []  # with the book's seed there is no difference
        if len({entry.slug for entry in entries}) < 2:
            break
    return entries


def _entries(curriculum: Curriculum, unit: str) -> list[Entry]:
    key = curriculum.root, unit
    if key not in _READ:
        with contextlib.suppress(CatalogueError, OSError):
            _READ[key] = read_catalogue(curriculum, unit=unit)
    return _READ.get(key, [])


# ── who leaves the same ─────────────────────────────────────────────────────────────


def _alike_here(
    curriculum: Curriculum,
    check: Check,
    mine: PlayedRuns,
    what: str,
    entries: Sequence[Entry],
) -> list[Entry] | None:
    """Those that leave what the learner's ranks leave; None if `what` is right here."""
    left = _difference(check, mine)
    if left is None or left.what != what:
        return None
    mark, marks = mark_of(left), _marks(curriculum, check, mine, entries)
    return [
        entry
        for entry in entries
        if (told := marks.get(entry.id))
        and told[0] == what
        and are_alike(mark, told[1], left.tolerance)
    ]


def _marks(
    curriculum: Curriculum, check: Check, mine: PlayedRuns, entries: Sequence[Entry]
) -> dict[str, tuple[str, Mark] | None]:
    """By entry: what is wrong, and its mark; from the state folder or played.

    Each entry plays the same runs of the learner's that the judge has read.
    """
    specs = tuple(mine.reads)
    folder = Progress(mine.impl.reference.path.parents[2]).folder / "book"
    clause = f"{check.task}-{check.clause}-"
    version = f"{clause}{_version(curriculum, mine.impl.reference)}-"
    path = folder / f"{version}{_digest([mine.world_size, *specs])}.json"
    marks: dict[str, tuple[str, Mark] | None] = {}
    with contextlib.suppress(OSError, ValueError):
        marks = json.loads(path.read_text(encoding="utf-8"))
    missing = [entry for entry in entries if entry.id not in marks]
    if not missing:
        return marks
    alone = [spec for spec in specs if spec.is_on_ranks]
    for entry, records in played(missing, mine, alone, ROOM_S):
        marks[entry.id] = None
        if records is not None:
            wrong = mine.of(implementation_of(mine.impl.reference, entry))
            # A run in virtual time is played when the judge reads it.
            wrong.records, wrong.declared = records, frozenset(specs)
            if left := _difference(check, wrong):
                marks[entry.id] = left.what, mark_of(left)
    with contextlib.suppress(OSError):  # without it the next check plays them again
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(marks), encoding="utf-8")
        for old in folder.glob(f"{clause}*.json"):
            if not old.name.startswith(version):
                old.unlink(missing_ok=True)
    return marks


def _version(curriculum: Curriculum, reference: UnitSource) -> str:
    """What marks depend on, besides the runs."""
    unit = _entries(curriculum, reference.unit)
    judges = judges_digest(reference.unit)
    return _digest([reference.digest, judges, torch.__version__, *unit])


def _digest(parts: Iterable[object]) -> str:
    text = "\n".join(map(str, parts))
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _difference(check: Check, runs: Runs) -> Difference | None:
    try:
        check.judge(runs)
    except NotYetError as failure:
        return failure.difference
    except Exception:  # a judge need not expect what no learner's run was asked for
        return None
    return None


# ── what is said ────────────────────────────────────────────────────────────────────


def _said(failure: NotYetError, alike: Sequence[Entry]) -> NotYetError:
    """The verdict under its name, and how a solution comes to leave the same."""
    titles = list(dict.fromkeys(entry.title for entry in alike))
    if len(titles) <= _ALIKE_SHOWN:
        rows = [(NOBODY, "as if" if not n else "or", t) for n, t in enumerate(titles)]
        failure = failure.but(evidence=(*failure.evidence, *rows))
    slug = alike[0].slug
    if not slug or any(entry.slug != slug for entry in alike):
        return failure
    told = read_misconceptions()[slug]
    title = told["title"][:1].lower() + told["title"][1:]
    wrong = failure.message.partition(": element ")[0]  # the evidence has the numbers
    return failure.but(
        message=f"{title}, so {wrong}",
        slug=slug,
        rule=first_sentence(told["fix"]),
    )


def first_sentence(text: str) -> str:
    """Up to the period that ends it."""
    return " ".join(text.split()).partition(". ")[0].rstrip(".")
