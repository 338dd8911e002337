"""Load unit `planning`, whose functions are the only formulas of `distlab plan`."""

from __future__ import annotations

from types import ModuleType

from distlab.curriculum import load_curriculum
from distlab.curriculum.choose import chosen_unit
from distlab.curriculum.units import load

UNIT = "planning"


def formulas(code: str) -> ModuleType:
    """Return the unit: "reference", a file, or "mine" with its gaps filled.

    Raises:
        CurriculumError, SourceError: the code can't be read.
    """
    if code == "mine":
        return chosen_unit(load_curriculum(), UNIT, "mine").load()
    return load(UNIT, code)
