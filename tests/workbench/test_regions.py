"""From a solution to its template: what the markers may look like, and what remains."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distlab.curriculum import RegionError, load_curriculum, make_template
from distlab.curriculum.regions import find_regions, functions_of
from tests.workbench.golden import Golden

ROOT = Path(__file__).parents[2]
UNITS = load_curriculum(ROOT).units

BEGIN, END = "    ### BEGIN SOLUTION u.a\n", "    ### END SOLUTION\n"
ONLY, END_ONLY = "### BEGIN SOLUTION-ONLY\n", "### END SOLUTION-ONLY\n"


WRONG = [
    (f"{BEGIN}{BEGIN}{END}{END}", 2),
    (f"\n{BEGIN}x\n", 2),
    (f"{BEGIN}x\n{END_ONLY}", 3),
    (f"x\n{END}", 2),
    (f"{ONLY}x\n{END}", 3),
    (f"{ONLY}x\n", 1),
    (f"{ONLY}{BEGIN}{END}{END_ONLY}", 2),
    ("    ### BEGIN SOLUTION\n", 1),
    ("    ### BEGIN SOLUTION a\n", 1),
    ("    ### BEGIN SOLUTION u.A\n", 1),
    ("    # BEGIN SOLUTION u.a\n", 1),
    ("    ###BEGIN SOLUTION u.a\n", 1),
    ("x = 1  ### END SOLUTION\n", 1),
    (f"{BEGIN}x\n    ### end solution\n", 3),
    (f"{BEGIN}x\n    ### END SOLUTION \n", 3),
    ("\t### BEGIN SOLUTION u.a\n", 1),
]
OUTSIDE = "### BEGIN SOLUTION u.a\nx = 1\n### END SOLUTION\n"


def test_wrong_markers_are_refused_with_their_line(golden: Golden) -> None:
    said = []
    for text, line in WRONG:
        with pytest.raises(RegionError, match=rf"^line {line}:") as caught:
            make_template(text)
        said.append(str(caught.value))
    with pytest.raises(RegionError, match=r"^line 1: u\.a") as caught:
        functions_of(OUTSIDE)
    golden("grading/wrong_markers", "\n".join([*said, str(caught.value)]))


def test_a_task_may_have_a_hole_in_each_of_several_functions() -> None:
    text = f"def f():\n{BEGIN}    x\n{END}def g():\n{BEGIN}    y\n{END}"
    assert functions_of(text) == {"u.a": ("f", "g")}
    assert make_template(text).count('raise NotImplementedError("u.a")') == 2


@pytest.mark.parametrize("second", ["a", "b"])
def test_two_holes_in_one_function_are_refused(second: str) -> None:
    another = BEGIN.replace("u.a", f"u.{second}")
    text = f"def f():\n{BEGIN}    x\n{END}{another}    y\n{END}"
    with pytest.raises(RegionError, match=r"^line 5: .* f$"):
        functions_of(text)


def test_what_only_the_solution_needs_is_left_out_whole() -> None:
    text = f"a = 1\n{ONLY}def helper():\n    return 2\n{END_ONLY}b = 3\n"
    assert make_template(text) == "a = 1\nb = 3\n"
    assert find_regions(text) == []


def test_a_hole_has_the_prompts_and_the_indent_of_its_region() -> None:
    text = (
        "class A:\n    def f(self):\n        ### BEGIN SOLUTION u.a\n"
        "        #| first this\n        #|\n        #| then that\n        return 1\n"
        "        ### END SOLUTION\n"
    )
    assert make_template(text) == (
        "class A:\n    def f(self):\n        # TODO(u.a)\n        # first this\n"
        '        #\n        # then that\n        raise NotImplementedError("u.a")\n'
    )
    assert functions_of(text) == {"u.a": ("A.f",)}


@pytest.mark.parametrize("unit", UNITS)
def test_template_and_solution_are_the_same_to_the_byte_outside_regions(
    unit: str,
) -> None:
    solution = UNITS[unit].solution(ROOT).read_bytes().decode()
    region = re.compile(
        r"^ *### BEGIN SOLUTION [\w.]+\n.*?^ *### END SOLUTION\n", re.M | re.S
    )
    only = re.compile(
        r"^ *### BEGIN SOLUTION-ONLY\n.*?^ *### END SOLUTION-ONLY\n", re.M | re.S
    )
    hole = re.compile(
        r"^ *# TODO\([\w.]+\)\n(?: *#.*\n)* *raise NotImplementedError\(.*\)\n", re.M
    )
    template = make_template(solution)
    assert hole.split(template) == region.split(only.sub("", solution))
    assert len(hole.findall(template)) == len(find_regions(solution))
    compile(template, "template", "exec")
