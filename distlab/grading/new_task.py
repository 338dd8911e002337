"""Stubs for a new task, and a list of what its author still has to write.

A task is spread over several files, so `create` adds a stub to each of them. The stubs
already work together: the solution returns the rank's right neighbor, the check
compares that, and the catalogue has two wrong solutions and a right one. The author can
therefore run everything from the start, and replace one piece at a time.

Whatever has to be replaced says `TODO:` and what to write. `left_to_do` collects these
lines, and adds what can be counted: wrong and right solutions, and stressors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from distlab.curriculum import Curriculum, CurriculumError, Task, Unit
from distlab.grading.catalogue import FOLDER, RECORDS, read_catalogue
from distlab.grading.stressors import stressor_table
from distlab.grading.verified import unverified

MINUTES, READING = 15, 5
WRONG_PER_CLAUSE, RIGHT = 2, 3
_TODO = re.compile(r"TODO: (?P<what>[^|]*?)\W*(?:\|.*)?$")

_MANIFEST = """\
[[phase.unit.task]]
number = "{number}"
id = "{id}"
title = "TODO: name the task in a few words"
build = "TODO: say what the learner builds, for the time table"
minutes = {minutes}
reading_minutes = {reading}
difficulty = 2
needs = ["{needs}"]
points = 2
clauses.C1 = "TODO: say what must hold, in one sentence."
advice.C1 = "TODO: say where to look; it must be true of every solution that fails C1"
"""
_SOLUTION = '''

def {name}(rank: int, world_size: int) -> int:
    """Return the rank's right neighbor. TODO: replace this example with your function.

    C1 TODO
    Check: distlab check {number}
    """
    ### BEGIN SOLUTION {id}
    #| TODO: tell the learner what to achieve, but not how
    return (rank + 1) % world_size
    ### END SOLUTION
'''
_CHECKS = '''\
"""Checks of task {number}, `{id}`. TODO: say what they look at."""

from __future__ import annotations

from types import ModuleType

from distlab.grading.clause import clause
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext

TASK = "{id}"


def {name}_once(context: RankContext, unit: ModuleType, seed: int) -> int:
    """Call the function on every rank. TODO: write your scenario."""
    result: int = unit.{name}(context.rank, context.world_size)
    return result


@clause(TASK, "C1", worlds=(4, 3, 2, 7, 1), runs=[on_ranks({name}_once)])
def {name}_is_right(runs: Runs) -> str | None:
    """Compare each rank's result. TODO: judge your clause."""
    n = runs.world_size
    values = runs.finished({name}_once).values
    expected = [(rank + 1) % n for rank in range(n)]
    if values != expected:
        raise NotYetError(
            "{name} returns the wrong rank",
            evidence=[
                (rank, "returned", f"{{got}}   expected {{right}}")
                for rank, (got, right) in enumerate(zip(values, expected, strict=True))
            ],
        )
    return None
'''
_CATALOGUE = """\
[{wrong_1}]
title = "TODO: describe the first wrong solution"
rejected = "C1"
change = [["rank + 1", "rank - 1"]]

[{wrong_2}]
title = "TODO: describe the second wrong solution"
rejected = "C1"
change = [["% world_size", "% 2"]]

[{right}]
title = "TODO: describe a solution that looks different but is right"
body = '''
return rank + 1 if rank + 1 < world_size else 0
'''
"""
_HINTS = """
## {name}

### 1 question

TODO: ask a question that leads to the idea.

### 2 principle

TODO: state the principle, and draw a picture.

### 3 steps

TODO: list the steps in words.

### 4 near-code

    TODO: write the steps as near-code.
"""
_GUIDE = """\
### {number} {id}

**What.** TODO: say what the learner builds.

**Why.** TODO: say who needs it, and what happens without it.

> **Predict, then run.** TODO: ask for something that readers can predict.
>
> Command: TODO: give a command that shows it.
>
> My prediction: `______`
>
> <details><summary>Result</summary>
>
> TODO: say what the command prints, and why.
>
> </details>

"""


def create(curriculum: Curriculum, number: str, task_id: str) -> list[Path]:
    """Write the stubs of a task in an existing unit; return the files it touched.

    The template and the tables of tasks are left to `distlab templates`.

    Raises:
        CurriculumError: the number or the id can't be used, and nothing was written.
    """
    unit = _unit_of(curriculum, number, task_id)
    root, name = curriculum.root, task_id.partition(".")[2]
    solution = _text(unit.solution(root))
    if re.search(rf"^(?:def|class) {name}\b", solution, re.MULTILINE):
        path = unit.solution(root).relative_to(root)
        raise CurriculumError(f"{path} already has a {name}; choose another name")
    facts = {
        "number": number,
        "id": task_id,
        "name": name,
        "needs": unit.tasks[-1].id,
        "minutes": str(MINUTES),
        "reading": str(READING),
        **_new_ids(root, unit),
    }
    manifest = root / "curriculum.toml"
    texts = {
        manifest: _in_unit(_text(manifest), unit.name, _MANIFEST.format(**facts)),
        unit.solution(root): _before_main(solution, _SOLUTION.format(**facts)),
        _checks(root, task_id): _CHECKS.format(**facts),
        _catalogue(root, task_id): _CATALOGUE.format(**facts),
        unit.hints(root): _text(unit.hints(root)) + _HINTS.format(**facts),
        unit.guide(root): _after_tasks(
            _text(unit.guide(root)), _GUIDE.format(**facts), unit
        ),
    }
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    return list(texts)


def _unit_of(curriculum: Curriculum, number: str, task_id: str) -> Unit:
    name = task_id.partition(".")[0]
    if not re.fullmatch(r"[a-z_0-9]+\.[a-z][a-z_0-9]*", task_id):
        raise CurriculumError(f"{task_id!r} isn't an id such as topology.choose")
    if name not in curriculum.units:
        raise CurriculumError(
            f"there is no unit {name!r}; first add a [[phase.unit]] to the manifest, "
            "with its solution, its guide page, its hints and a package of checks"
        )
    unit = curriculum.units[name]
    phase = next(p.number for p in curriculum.phases if unit in p.units)
    if not re.fullmatch(rf"{phase}\.\d+", number):
        raise CurriculumError(f"{name} is in phase {phase}: {number} can't be its task")
    for task in curriculum.tasks:
        if number == task.number or task_id == task.id:
            raise CurriculumError(f"there is already a task {task.number} {task.id}")
    return unit


def _new_ids(root: Path, unit: Unit) -> dict[str, str]:
    """Return names for the catalogue's new entries that no other entry has."""
    texts = {path: _text(path) for path in sorted((root / FOLDER).glob("*/*.toml"))}
    used = set(re.findall(r"^\[([A-Z]+\d+)\]", "".join(texts.values()), re.MULTILINE))
    own = "".join(text for path, text in texts.items() if path.parent.name == unit.name)
    letters = re.findall(r"^\[([A-Z]{2})\d+\]", own, re.MULTILINE)[0]
    wrong = (name for n in range(1, 1000) if (name := f"{letters}{n:02}") not in used)
    right = (name for n in range(1, 1000) if (name := f"A{n:02}") not in used)
    return {"wrong_1": next(wrong), "wrong_2": next(wrong), "right": next(right)}


# ── where a stub goes ───────────────────────────────────────────────────────────────


def _in_unit(manifest: str, unit: str, stub: str) -> str:
    """Insert the stub after the unit's last task."""
    start = manifest.index(f'\nname = "{unit}"\n')
    following = re.compile(r"^\[\[(?:phase|phase\.unit|route)\]\]", re.MULTILINE)
    found = following.search(manifest, start)
    if not found:
        return f"{manifest.rstrip()}\n\n{stub}"
    return f"{manifest[: found.start()]}{stub}\n{manifest[found.start() :]}"


def _before_main(solution: str, stub: str) -> str:
    """Append the stub, but before the lines that run the file as a program."""
    code, main, rest = solution.partition('\n\nif __name__ == "__main__":')
    return f"{code.rstrip()}\n{stub}{main}{rest}"


def _after_tasks(guide: str, stub: str, unit: Unit) -> str:
    """Insert the stub after the section of the unit's last task."""
    last = unit.tasks[-1]
    start = guide.index(f"\n### {last.number} {last.id}\n")
    end = guide.index("\n## ", start) + 1
    total = sum(task.minutes for task in unit.tasks if not task.stretch)
    opening, rest = guide[:end], guide[end:]
    opening = re.sub(rf"\babout(\s){total}\b", rf"about\g<1>{total + MINUTES}", opening)
    return f"{opening}{stub}{rest}"


# ── what is left ────────────────────────────────────────────────────────────────────


def left_to_do(curriculum: Curriculum, task: Task) -> list[str]:
    """Return one sentence for each thing that the task's author still has to do.

    Raises:
        CatalogueError: the catalogue can't be read.
    """
    return [*_todo_lines(curriculum, task), *_counted(curriculum, task)]


def _todo_lines(curriculum: Curriculum, task: Task) -> Iterator[str]:
    root, unit = curriculum.root, curriculum.units[task.unit]
    said = set()
    for path in (
        root / "curriculum.toml",
        unit.solution(root),
        _checks(root, task.id),
        _catalogue(root, task.id),
        unit.hints(root),
        unit.guide(root),
    ):
        for number, line in enumerate(_text(path).splitlines(), 1):
            found = _TODO.search(line)
            # A clause is worded once, in the manifest, and `templates` copies it.
            if found and found["what"] not in said:
                said.add(found["what"])
                yield f"{path.relative_to(root)}:{number}: {found['what']}"


def _counted(curriculum: Curriculum, task: Task) -> Iterator[str]:
    catalogue = read_catalogue(curriculum)
    own = [entry for entry in catalogue if entry.task == task.id]
    where = _catalogue(curriculum.root, task.id).relative_to(curriculum.root)
    for clause in task.clauses:
        num = sum(entry.clause == clause for entry in own)
        if num < WRONG_PER_CLAUSE:
            yield (
                f"{where}: {clause} has {num} wrong solution{'s' * (num != 1)}; write "
                f"at least {WRONG_PER_CLAUSE}"
            )
    right = sum(not entry.is_mutant for entry in own)
    if right < RIGHT:
        yield (
            f"{where}: there {'is' if right == 1 else 'are'} {right} right "
            f"solution{'s' * (right != 1)}; write at least {RIGHT}"
        )
    cells = stressor_table(curriculum, catalogue)
    missing = [c.stressor for c in cells if c.task == task.id and c.fault]
    if missing:
        yield (
            f"{RECORDS / 'stressors.toml'}: cover or excuse these stressors: "
            f"{', '.join(missing)}"
        )
    if task.unit in unverified(curriculum):
        yield f"run `distlab mutants --only {task.unit}. --stamp`"


def _checks(root: Path, task_id: str) -> Path:
    unit, _, name = task_id.partition(".")
    return root / "distlab" / "grading" / "checks" / unit / f"{name}.py"


def _catalogue(root: Path, task_id: str) -> Path:
    unit, _, name = task_id.partition(".")
    return root / FOLDER / unit / f"{name}.toml"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
