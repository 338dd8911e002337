"""Choose whose code the 2 × 2 ranks run: three units of phase 2, task by task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distlab.curriculum import (
    Curriculum,
    UnitSource,
    load_curriculum,
    naming_file,
    read_source,
)
from distlab.curriculum.choose import Choice, Part, chosen_unit
from distlab.paths import shown

NEEDED = {
    "model_parallel": ("model_parallel.partition",),
    "pipeline_parallel": (
        "pipeline_parallel.forward_backward",
        "pipeline_parallel.execute",
        "pipeline_parallel.free",
        "pipeline_parallel.one_f_one_b",
    ),
    "tensor_parallel": (
        "tensor_parallel.mesh",
        "tensor_parallel.copy_reduce",
        "tensor_parallel.linears",
        "tensor_parallel.block",
    ),
}
"""The tasks of each unit that a training on the mesh runs."""

_ENTRIES = {
    "model_parallel": "partition",
    "pipeline_parallel": "execute",
    "tensor_parallel": "make_mesh",
}
"""The function by which we recognize the unit in a file."""


class UnfinishedError(Exception):
    """Raised if tasks that the training needs aren't written yet; names them.

    `number` is that of the first one.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        names = ", ".join(f"{part.number} {part.task}" for part in parts)
        super().__init__(f"the training needs tasks you haven't written yet: {names}")
        self.number = parts[0].number


def choose_units(code: str | None) -> dict[str, Choice]:
    """Return the code of all three units.

    `code` is "reference", "mine", or a file with one unit. "mine" runs the learner's
    tasks, except for those that `distlab use` has set to the reference. None runs the
    tasks that have passed, and the reference's for the rest.

    Raises:
        UnfinishedError: `code` is "mine", and a task that the training needs isn't
            written.
        ValueError: a file can't be read, or holds none of the three units.
    """
    curriculum = load_curriculum()
    if code is None:
        return {name: chosen_unit(curriculum, name) for name in NEEDED}
    if code == "mine":
        units = {name: chosen_unit(curriculum, name, "mine") for name in NEEDED}
        _require_finished(units)
        return units
    sources = {
        name: read_source(curriculum, curriculum.units[name], "reference")
        for name in NEEDED
    }
    if code != "reference":
        source = _of_file(curriculum, code)
        sources[source.unit] = source
    return {
        name: Choice(source=source, reference=source, grafts=(), parts=())
        for name, source in sources.items()
    }


def needed_parts(units: Mapping[str, Choice]) -> list[Part]:
    """Return whose code each task of the training runs, in order of task number."""
    parts = [
        part
        for name, choice in units.items()
        for part in choice.parts
        if part.task in NEEDED[name]
    ]
    return sorted(parts, key=lambda part: [int(n) for n in part.number.split(".")])


def _require_finished(units: Mapping[str, Choice]) -> None:
    unfinished = [
        part
        for part in needed_parts(units)
        if part.whose == "reference" and part.why != "as set"
    ]
    if unfinished:
        raise UnfinishedError(unfinished)


def _of_file(curriculum: Curriculum, path: str) -> UnitSource:
    for name, entry in _ENTRIES.items():
        with naming_file():
            source = read_source(curriculum, curriculum.units[name], path)
            is_here = not source.missing((entry,))
        if is_here:
            return source
    names = ", ".join(_ENTRIES.values())
    raise ValueError(f"--code {shown(path)}: the file has none of {names}")
