"""`distlab update`: the learner's code in a newer template, and nothing thrown away."""

from __future__ import annotations

import ast
import re

import pytest

from distlab.cli.update import update
from distlab.curriculum import CurriculumError, SourceError, make_template
from distlab.curriculum.carry import carry, is_current
from tests.workbench.course import EXCHANGE, FIRST, SECOND, Course, filled
from tests.workbench.golden import Golden

Capture = pytest.CaptureFixture[str]

SOLUTION = '''"""A unit."""

import math

LIMIT = 3


def given(x):
    return x + LIMIT


# what comes next
def first(comm, x):
    """Do it.

    C1 it is done
    """
    ### BEGIN SOLUTION unit.first
    #| how?
    return x
    ### END SOLUTION


class Box:
    """Holds things."""

    def __init__(self):
        self.size = 1

    def put(self, x):
        """Put it in."""
        ### BEGIN SOLUTION unit.second
        #| where?
        self.size += x
        ### END SOLUTION

    def take(self):
        ### BEGIN SOLUTION unit.third
        #| which?
        return 1
        ### END SOLUTION
'''
HOLE = (
    '    # TODO(unit.first)\n    # how?\n    raise NotImplementedError("unit.first")\n'
)
MINE = (
    make_template(SOLUTION)
    .replace("import math\n", "import math\nimport os.path as p\n")
    .replace(HOLE, "    # my way\n    return helper(x)  # so\n    # the end\n")
    .replace("# what comes", "# mine\ndef helper(x):\n    return x\n\n\n# what comes")
    .replace(
        '        raise NotImplementedError("unit.second")',
        "        self.size += self.more(x)\n\n    def more(self, x):\n        return x",
    )
    + "\n\nEXTRA = 5\n"
)


def newer() -> str:
    """The same unit after a `git pull`: other constants, heads and prompts."""
    return (
        SOLUTION.replace("LIMIT = 3", "LIMIT = 4\nOTHER = 1")
        .replace("C1 it is done", "C1 it is done\n    C2 at once")
        .replace("def put(self, x)", "def put(self, x, y=0)")
        .replace("#| which?", "#| which one?")
        .replace("# what comes next", "# what comes now")
    )


def test_bodies_helpers_and_imports_come_along() -> None:
    result = carry(MINE, newer())
    tree = ast.parse(result.text)
    for words in (
        "LIMIT = 4\nOTHER = 1\n",
        "    C2 at once\n",
        "    # my way\n    return helper(x)  # so\n    # the end\n",
        "# mine\ndef helper(x):\n    return x\n\n\n# what comes now\ndef first(",
        "import math\nimport os.path as p\n",
        "    def put(self, x, y=0):\n",
        "        self.size += self.more(x)\n",
        "    def more(self, x):\n        return x\n",
        "EXTRA = 5\n",
        "        # TODO(unit.third)\n        # which one?\n",
    ):
        assert result.text.count(words) == 1, words
    assert HOLE.splitlines()[-1] not in result.text
    assert result.carried == ["unit.first", "unit.second"]
    assert result.heads == ["unit.first", "unit.second"]
    assert sorted(result.added) == ["Box.more", "EXTRA", "helper", "p"]
    assert result.lost == ["LIMIT"]
    box = next(n for n in tree.body if isinstance(n, ast.ClassDef))
    names = [n.name for n in box.body if isinstance(n, ast.FunctionDef)]
    assert names == ["__init__", "put", "take", "more"]


def test_a_second_time_there_is_nothing_to_do() -> None:
    assert is_current(MINE, SOLUTION)
    assert not is_current(MINE, newer())
    once = carry(MINE, newer()).text
    assert is_current(once, newer())
    assert carry(once, newer()).text == once
    assert is_current(make_template(SOLUTION), SOLUTION)


def test_what_was_changed_and_is_given_has_no_place() -> None:
    mine = MINE.replace("return x + LIMIT", "return 0").replace(
        "self.size = 1", "self.size = 2"
    )
    result = carry(mine, newer())
    assert sorted(result.lost) == ["Box.__init__", "LIMIT", "given"]
    assert "return x + LIMIT" in result.text


def test_a_task_that_is_gone_stays_as_a_helper() -> None:
    gone = (
        newer().replace("def first(", "def begin(").replace("unit.first", "unit.begin")
    )
    result = carry(MINE, gone)
    for code in (
        "def first(comm, x):",
        "return helper(x)  # so",
        'NotImplementedError("unit.begin")',
    ):
        assert code in result.text


# ── the verb ────────────────────────────────────────────────────────────────────────


def pull(course: Course) -> None:
    """A newer solution: the head of 1.1 and the prompt of 1.2 are others."""
    path = course.root / "solutions" / "phase1_data_parallel" / "collectives.py"
    text = path.read_text()
    text, heads = re.subn(r'(def send_recv\(.*?""")', r"\1ANEW ", text, flags=re.DOTALL)
    prompt = rf"(BEGIN SOLUTION {SECOND}\n +#\|) "
    text, prompts = re.subn(prompt, r"\1 PROMPT ", text)
    assert (heads, prompts) == (1, 1)
    path.write_text(text)


def test_update_keeps_the_old_file(
    here: Course, capsys: Capture, golden: Golden
) -> None:
    here.fill(FIRST, EXCHANGE)
    old, before = here.template().read_text(), here.files()
    for unit in ("", "collectives"):
        assert update(unit) == 0
        assert here.files() == before
    capsys.readouterr()

    pull(here)
    assert update() == 0
    said = capsys.readouterr().out
    text = here.template().read_text()
    assert text.count("ANEW ") == text.count("# PROMPT ") == 1
    assert EXCHANGE.splitlines()[2] in text
    (kept,) = here.template().parent.glob("template_collectives.kept-*.py")
    assert kept.read_text() == old
    assert kept.name in said
    renewed = here.files()
    assert update() == 0
    assert here.files() == renewed
    golden("cli/update", said.replace(kept.name, "<kept>") + capsys.readouterr().out)


def test_what_cannot_be_updated(here: Course) -> None:
    with pytest.raises(CurriculumError, match=r"'x'.*\bcollectives\b"):
        update("x")
    pull(here)
    here.template().write_text("def (")
    here.template("trainer").write_text("x = 1\n")  # it could be renewed, and is not
    with pytest.raises(SourceError, match=r"template_collectives\.py") as caught:
        update()
    assert caught.value.line == 1
    assert here.template().read_text() == "def ("
    assert here.template("trainer").read_text() == "x = 1\n"


def test_a_missing_file_comes_back(here: Course) -> None:
    here.template().unlink()
    assert update("collectives") == 0
    assert f"TODO({SECOND})" in here.template().read_text()
    assert filled(FIRST, "pass")
