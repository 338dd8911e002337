"""`distlab bench verdict` copies what the tasks of every phase need."""

from __future__ import annotations

import pytest

from benchmarks.verdict import COURSE, ROOT
from distlab.curriculum import load_curriculum

UNITS = load_curriculum(ROOT).units


@pytest.mark.parametrize("name", UNITS)
def test_the_files_of_a_unit_are_in_the_copy(name: str) -> None:
    for path in (UNITS[name].template(ROOT), UNITS[name].solution(ROOT)):
        assert path.is_file()
        assert path.relative_to(ROOT).parts[0] in COURSE
