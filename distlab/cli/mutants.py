"""`distlab mutants`: test the autograder itself, with results per task."""

from __future__ import annotations

import math
import time
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

from distlab.cli.screen import show, show_json
from distlab.curriculum import Curriculum, Task, load_curriculum
from distlab.curriculum.path import is_judged_here

if TYPE_CHECKING:
    from distlab.grading.catalogue import Entry
    from distlab.grading.generated import Outcome
    from distlab.grading.generated_mutants import Mutation
    from distlab.grading.mutants import EntryResult

HARNESS, NOT_ALL, ALL = 11, 1, 0


def mutants(
    *,
    phase: int | None = None,
    as_json: bool = False,
    only: str = "",
    generated: bool = False,
    touched: bool = False,
    stamp: bool = False,
    minutes: float = math.inf,
    second_try: bool = False,
    sample: int = 0,
    seed: int | None = None,
) -> int:
    """Grade the catalogue; return 0 if each entry was judged as it expects, else 1.

    With `generated`, also grade generated mutants, each of which must be rejected or
    have a recorded reason why it may survive. With `touched`, grade every entry of the
    units that have changed since `stamp` recorded them as right, and one entry of each
    other unit. After `minutes`, we start no more entries; with this limit, we mix the
    tasks' entries. With `second_try`, an entry that isn't judged as it expects is
    graded once more, and the second verdict counts: real processes have time limits,
    which a busy machine can exceed. With `sample`, grade at most this many entries for
    each clause, and as many right ones for each task. `seed` draws other numbers than
    usual: no verdict may depend on them.

    The catalogue states the verdicts of real ranks, so with DISTLAB_RANKS=simulated we
    compare simulated ranks with them. We leave out tasks that these can't judge.

    Raises:
        ValueError: an unknown phase, nothing to grade, or a catalogue that is broken.
    """
    from distlab.grading.catalogue import read_catalogue
    from distlab.grading.generated import judge_generated, read_reasons
    from distlab.grading.mutants import SEED, judge
    from distlab.grading.verified import stamp as note_what_is_right
    from distlab.grading.verified import touched as touched_of
    from distlab.ranks import new_cluster

    curriculum = load_curriculum()
    catalogue = read_catalogue(curriculum)
    entries = _chosen(curriculum, catalogue, phase, only)
    if touched:
        entries = touched_of(curriculum, entries)
    entries, not_here = _judged_here(curriculum, _sampled(entries, sample))
    if math.isfinite(minutes):
        entries = _each_task_first(entries)
    reasons = read_reasons(curriculum) if generated else {}
    mutations = _mutations(curriculum, phase, only) if generated else []
    outcomes: list[Outcome] = []
    with new_cluster() as cluster:
        in_time = _until(time.monotonic() + 60 * minutes, entries)
        tell_entry = None if as_json else _tell_about
        own_seed = SEED if seed is None else seed
        results = judge(curriculum, cluster, in_time, tell_entry, own_seed)
        doubtful = [r.entry for r in results if second_try and not r.is_right]
        again = judge(curriculum, cluster, doubtful, tell_entry, own_seed)
        second = {result.entry.id: result for result in again}
        results = [second.get(result.entry.id, result) for result in results]
        if generated:
            tell = None if as_json else _tell_about_slip
            outcomes = judge_generated(curriculum, cluster, mutations, reasons, tell)
    left = len(entries) - len(results)
    if as_json:
        report = _as_json(results, outcomes if generated else None)
        show_json({**report, "not_played": left, "not_judged": not_here})
    else:
        show(_summary(curriculum, results, outcomes))
        show([("plain", f"second try: {entry.id} {entry.task}") for entry in doubtful])
        if left:
            reached = {result.entry.task for result in results}
            none = len({entry.task for entry in entries} - reached)
            over = f"{minutes:g} minutes are over"
            which = f", among them all of {none} tasks" if none else ""
            show([("fail", f"{left} entries not graded{which}: {over}")])
        if not_here:
            tasks = ", ".join(not_here)
            show([("plain", f"not judged on simulated ranks: {tasks}")])
    both: list[EntryResult | Outcome] = [*results, *outcomes]
    if stamp:
        played = {result.entry.id: result.is_right for result in results}
        noted = note_what_is_right(curriculum, catalogue, played)
        if not as_json:
            show([("plain", f"recorded as right: {', '.join(noted) or 'no unit'}")])
    if any(result.status == "error" for result in both):
        return HARNESS
    return ALL if all(result.is_right for result in both) else NOT_ALL


def _each_task_first(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries in an order that may be cut short.

    One right solution of each task comes first, then one wrong one, then a second of
    each, and so on.
    """
    turns = _turns(entries, lambda entry: (entry.task, entry.is_mutant))
    return sorted(entries, key=lambda e: (turns[e.id], e.is_mutant, _hash(e)))


def _sampled(entries: Sequence[Entry], count: int) -> list[Entry]:
    """Choose `count` entries of each clause; 0 means all."""
    turns = _turns(entries, lambda entry: (entry.task, entry.clause))
    return [entry for entry in entries if not count or turns[entry.id] < count]


def _turns(
    entries: Sequence[Entry], group: Callable[[Entry], Hashable]
) -> dict[str, int]:
    """Return each entry's index within its group, ordered by a hash of the ids."""
    taken: Counter[Hashable] = Counter()
    turns = {}
    for entry in sorted(entries, key=_hash):
        turns[entry.id] = taken[group(entry)]
        taken[group(entry)] += 1
    return turns


def _hash(entry: Entry) -> int:
    return zlib.crc32(entry.id.encode())


def _judged_here(
    curriculum: Curriculum, entries: Sequence[Entry]
) -> tuple[list[Entry], list[str]]:
    """Return the entries of tasks that our ranks can judge, and the other tasks."""
    here = {task.id for task in curriculum.tasks if is_judged_here(task)}
    others = dict.fromkeys(entry.task for entry in entries if entry.task not in here)
    return [entry for entry in entries if entry.task in here], list(others)


def _until(end_s: float, entries: Sequence[Entry]) -> Iterator[Entry]:
    for entry in entries:
        if time.monotonic() >= end_s:
            return
        yield entry


def _tasks(curriculum: Curriculum, phase: int | None, only: str) -> list[Task]:
    units = [*curriculum.units.values()]
    if phase is not None:
        units = [*curriculum.phase(phase).units]
    names = {unit.name for unit in units}
    return [t for t in curriculum.tasks if t.unit in names and only in t.id]


def _mutations(curriculum: Curriculum, phase: int | None, only: str) -> list[Mutation]:
    from distlab.grading.generated import generate

    return generate(curriculum, _tasks(curriculum, phase, only))


def _chosen(
    curriculum: Curriculum, entries: Sequence[Entry], phase: int | None, only: str
) -> list[Entry]:
    units = set(curriculum.units)
    if phase is not None:
        units = {unit.name for unit in curriculum.phase(phase).units}
    chosen = [
        entry
        for entry in entries
        if entry.unit in units
        and (only.lower() in entry.id.lower() or only in entry.task)
    ]
    if not chosen:
        raise ValueError(f"nothing in the catalogue matches {only!r}")
    return chosen


def _tell_about(result: EntryResult) -> None:
    show([_line(result)])
    if not result.is_right:
        show([("plain", f"      {line}") for line in _what_is_off(result)])


def _tell_about_slip(outcome: Outcome) -> None:
    if outcome.is_right and outcome.killed:
        return
    word = "alive" if outcome.is_right else "SURVIVED"
    word = "KILLED" if outcome.killed else word
    slip = outcome.mutation
    lines = [f"{slip.id} {word:9} {slip.task}, line {slip.line}: {slip.what}"]
    if outcome.killed or outcome.status == "error":
        lines.append(f"      {outcome.message}")
    lines.append(f"      {outcome.why or 'nobody gave a reason why it may survive'}")
    show([("dim" if outcome.is_right else "fail", line) for line in lines])


def _line(result: EntryResult) -> tuple[str, str]:
    entry = result.entry
    if entry.is_mutant:
        word = "killed" if result.as_named else "MISNAMED"
        word = word if result.killed else "SURVIVED"
    else:
        word = "accepted" if result.is_right else "REJECTED"
    name = entry.task.partition(".")[2]
    head = f"{entry.id:5} {word:9} {name:18} {result.clause:3} {result.slug:24}"
    return ("dim" if result.is_right else "fail", f"{head} {entry.title}")


def _what_is_off(result: EntryResult) -> list[str]:
    lines = [f"{result.status}: {result.message}"] if result.message else []
    if result.entry.is_mutant:
        slug = result.entry.slug or "no diagnosis"
        lines.append(f"expected: {result.entry.clause} [{slug}]")
    return lines


def _summary(
    curriculum: Curriculum, results: Sequence[EntryResult], outcomes: Sequence[Outcome]
) -> list[tuple[str, str]]:
    lines = [("plain", "")]
    for task in curriculum.tasks:
        own = [result for result in results if result.entry.task == task.id]
        mutations = [
            outcome for outcome in outcomes if outcome.mutation.task == task.id
        ]
        if own or mutations:
            clauses = f"{len(task.clauses)} clauses"
            lines.append(
                _rates(f"{task.number:4} {task.id:28} {clauses}", own, mutations)
            )
    return [*lines, _rates(f"{'all':43}", results, outcomes)]


def _rates(
    head: str, results: Sequence[EntryResult], outcomes: Sequence[Outcome]
) -> tuple[str, str]:
    wrong = [result for result in results if result.entry.is_mutant]
    right = [result for result in results if not result.entry.is_mutant]
    killed = sum(result.killed for result in wrong)
    named = sum(result.as_named for result in wrong)
    accepted = sum(result.is_right for result in right)
    text = (
        f"{head}   killed {_of(killed, wrong)}   as named {_of(named, wrong)}   "
        f"accepted {_of(accepted, right)}"
    )
    if outcomes:
        dead = sum(outcome.killed for outcome in outcomes)
        text += f"   generated killed {_of(dead, outcomes)}"
    both: list[EntryResult | Outcome] = [*results, *outcomes]
    good = all(result.is_right for result in both)
    return ("pass" if good else "fail", text)


def _of(count: int, results: Sequence[EntryResult | Outcome]) -> str:
    if not results:
        return f"{'–':>13}"
    return f"{count:3} of {len(results):3} {count / len(results):4.0%}"


def _as_json(
    results: Sequence[EntryResult], outcomes: Sequence[Outcome] | None
) -> dict[str, object]:
    report: dict[str, object] = {
        "mutants": [r.to_json() for r in results if r.entry.is_mutant],
        "accepts": [r.to_json() for r in results if not r.entry.is_mutant],
    }
    if outcomes is not None:
        report["generated"] = [outcome.to_json() for outcome in outcomes]
    return report


# ── the table of the catalogue's readme ─────────────────────────────────────────────

COUNTS = "tests/mutants/README.md"
BEGIN, END = "<!-- distlab mutants --readme -->\n", "<!-- end -->\n"


def write_readme() -> int:
    """Put the current catalogue's counts between the marks of its readme."""
    curriculum = load_curriculum()
    path = curriculum.root / COUNTS
    head, rest = path.read_text(encoding="utf-8").split(BEGIN)
    table = readme_table(curriculum)
    tail = rest.split(END)[1]
    path.write_text(f"{head}{BEGIN}{table}{END}{tail}", encoding="utf-8")
    return ALL


def readme_table(curriculum: Curriculum) -> str:
    """Count the solutions that we try the autograder on, task by task."""
    from distlab.grading.catalogue import read_catalogue
    from distlab.grading.generated import generate, read_reasons

    entries, reasons = read_catalogue(curriculum), read_reasons(curriculum)
    lines, sums = [], [0] * 5
    for task in curriculum.tasks:
        own = [entry for entry in entries if entry.task == task.id]
        wrong = sum(entry.is_mutant for entry in own)
        alive = sum(task.id == name for name, _ in reasons)
        mutations = len(generate(curriculum, [task]))
        row = [len(task.clauses), wrong, len(own) - wrong, mutations - alive, alive]
        sums = [total + count for total, count in zip(sums, row, strict=True)]
        cells = " | ".join(map(str, row))
        lines.append(f"| {task.number} `{task.id}` | {cells} |\n")
    cells = " | ".join(map(str, sums))
    head = (
        "| task | clauses | wrong, rejected as named | right, accepted | "
        "generated, rejected | generated, accepted |\n|---|---|---|---|---|---|\n"
    )
    return f"{head}{''.join(lines)}| all | {cells} |\n"
