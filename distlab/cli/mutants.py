"""`distlab mutants`: the autograder's own exam, with its marks per task."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distlab.cli.screen import show, show_json
from distlab.curriculum import Curriculum, load_curriculum

if TYPE_CHECKING:
    from distlab.grading.mutants import Entry, Result

HARNESS, NOT_ALL, ALL = 11, 1, 0


def mutants(*, phase: int | None = None, as_json: bool = False, only: str = "") -> int:
    """Grade the catalogue; 0 when each entry was judged as it says itself, else 1.

    Raises:
        ValueError: an unknown phase, nothing to grade, or a catalogue that is broken.
    """
    from distlab.grading.mutants import judge, read_catalogue
    from distlab.runner import Cluster

    curriculum = load_curriculum()
    entries = _chosen(curriculum, read_catalogue(curriculum), phase, only)
    with Cluster() as cluster:
        results = judge(curriculum, cluster, entries, None if as_json else _tell_about)
    if as_json:
        show_json(_as_json(results))
    else:
        show(_summary(curriculum, results))
    if any(result.status == "error" for result in results):
        return HARNESS
    return ALL if all(result.is_right for result in results) else NOT_ALL


def _chosen(
    curriculum: Curriculum, entries: Sequence[Entry], phase: int | None, only: str
) -> list[Entry]:
    units = set(curriculum.units)
    if phase is not None:
        units = {unit.name for unit in curriculum.phase(phase).units}
    chosen = [
        entry
        for entry in entries
        if entry.task.partition(".")[0] in units
        and (only.lower() in entry.id.lower() or only in entry.task)
    ]
    if not chosen:
        raise ValueError(f"nothing in the catalogue matches {only!r}")
    return chosen


def _tell_about(result: Result) -> None:
    show([_line(result)])
    if not result.is_right:
        show([("plain", f"      {line}") for line in _what_is_off(result)])


def _line(result: Result) -> tuple[str, str]:
    entry = result.entry
    if entry.is_mutant:
        word = "killed" if result.as_named else "MISNAMED"
        word = word if result.killed else "SURVIVED"
    else:
        word = "accepted" if result.is_right else "REJECTED"
    name = entry.task.partition(".")[2]
    head = f"{entry.id:5} {word:9} {name:18} {result.clause:3} {result.slug:24}"
    return ("dim" if result.is_right else "fail", f"{head} {entry.title}")


def _what_is_off(result: Result) -> list[str]:
    lines = [f"{result.status}: {result.message}"] if result.message else []
    if result.entry.is_mutant:
        slug = result.entry.slug or "no diagnosis"
        lines.append(f"expected: {result.entry.clause} [{slug}]")
    return lines


def _summary(
    curriculum: Curriculum, results: Sequence[Result]
) -> list[tuple[str, str]]:
    lines = [("plain", "")]
    for task in curriculum.tasks:
        own = [result for result in results if result.entry.task == task.id]
        if own:
            lines.append(_rates(f"{task.number:4} {task.id:28}", own))
    return [*lines, _rates(f"{'all':33}", results)]


def _rates(head: str, results: Sequence[Result]) -> tuple[str, str]:
    wrong = [result for result in results if result.entry.is_mutant]
    right = [result for result in results if not result.entry.is_mutant]
    killed = sum(result.killed for result in wrong)
    named = sum(result.as_named for result in wrong)
    accepted = sum(result.is_right for result in right)
    text = (
        f"{head} killed {_of(killed, wrong)}   as named {_of(named, wrong)}   "
        f"accepted {_of(accepted, right)}"
    )
    good = all(result.is_right for result in results)
    return ("pass" if good else "fail", text)


def _of(count: int, results: Sequence[Result]) -> str:
    if not results:
        return f"{'–':>13}"
    return f"{count:3} of {len(results):3} {count / len(results):4.0%}"


def _as_json(results: Sequence[Result]) -> dict[str, object]:
    return {
        "mutants": [r.to_json() for r in results if r.entry.is_mutant],
        "accepts": [r.to_json() for r in results if not r.entry.is_mutant],
    }
