"""Lay out the explanation of a concept, a mistake or an error of torch as lines.

Each line has a style. The command line shows the lines in color, and assistants get
them as plain text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from distlab.curriculum import Curriculum
from distlab.curriculum.torch_errors import COMMANDS, TorchError
from distlab.tutor.concepts import Concept

Lines = list[tuple[str, str]]
Command = Callable[[str], str]

_PARTS = (
    ("happened", "What was seen"),
    ("why", "Why"),
    ("fix", "What to change"),
    ("torch", "In torch.distributed"),
)


def typed(verb: str) -> str:
    """Write a command for a reader whose terminal we don't know."""
    return f"distlab {verb}"


def concept_page(
    concept: Concept, curriculum: Curriculum, command: Command = typed
) -> Lines:
    """Show a concept: its text, a snippet with its output, and where to read on."""
    lines = [("plain", f"{concept.name}: {concept.title}"), ("plain", "")]
    lines += [("plain", f"  {line}".rstrip()) for line in concept.text.splitlines()]
    lines += _section("In Python", concept.snippet)
    lines += _section("It prints", concept.prints)
    lines += [("plain", ""), ("rule", "See")]
    if concept.picture:
        lines.append(("plain", f"  {concept.picture}"))
    if concept.command:
        verb = concept.command.removeprefix("distlab ")
        lines.append(("plain", f"  {command(verb)}"))
    lines += [("plain", f"  {guide_path(curriculum, page)}") for page in concept.guide]
    if concept.tasks:
        tasks = (curriculum.task(number) for number in concept.tasks)
        built = ", ".join(f"{task.number} {task.name}" for task in tasks)
        lines.append(("plain", f"  you build it in {built}"))
    for name in (*concept.mistakes, *concept.errors):
        lines.append(("dim", f"  {command(f'explain {name}')}"))
    return lines


def guide_path(curriculum: Curriculum, page: str) -> str:
    """Turn `unit#heading` into a path in the repository."""
    unit, _, anchor = page.partition("#")
    path = curriculum.units[unit].guide(curriculum.root)
    return f"{path.relative_to(curriculum.root).as_posix()}#{anchor}".rstrip("#")


def mistake_page(slug: str, entry: dict[str, str]) -> Lines:
    """Show a misconception under the name that a verdict gives it."""
    lines = [("plain", f"{slug}: {entry['title']}")]
    for key, heading in _PARTS:
        lines += _section(heading, entry[key])
    return lines


def torch_error_page(found: list[TorchError], command: Command = typed) -> Lines:
    """Explain the first error found in a text, and list the others by title."""
    error, *others = found
    lines = [("plain", f"{error.name}: {error.title}")]
    lines += _section("What it means", error.means)
    lines += _section("Why it is usually not the whole story", error.why)
    lines += _section("What to look at first", error.look)
    if error.run:
        lines += _section("What to run next", _to_run(error, command))
    lines.append(("plain", ""))
    for name in error.see:
        is_task = name[0].isdigit()
        verb = f"hint {name}" if is_task else f"explain {name}"
        lines.append(("dim", f"  {command(verb)}"))
    if others:
        names = ", ".join(other.title for other in others[:3])
        lines.append(("dim", f"  also in this text, and likely because of it: {names}"))
    return lines


def _to_run(error: TorchError, command: Command) -> str:
    """Name the commands that find the cause, each above the reason to use it."""
    told = (COMMANDS[name] for name in error.run)
    return "\n".join(f"{command(verb)}\n    {reason}" for verb, reason in told)


def rows(entries: Iterable[tuple[str, str]]) -> Lines:
    """Show names with their titles, one per line."""
    return [("plain", f"  {name:<28} {title}") for name, title in entries]


def plain(lines: Lines) -> str:
    """Join the lines without their styles."""
    return "\n".join(line for _, line in lines)


def _section(heading: str, text: str) -> Lines:
    body = [("plain", f"  {line}".rstrip()) for line in text.strip("\n").splitlines()]
    return [("plain", ""), ("rule", heading), *body]
