"""Who may import whom, what nothing uses, and that `__all__` tells the truth.

The rules are in rules.py; here they meet the repository, and a violation of each.
"""

from __future__ import annotations

import pytest

from tests.workbench.rules import (
    CAPSTONE,
    RULES,
    Files,
    Rule,
    benchmarks_do_without_tests,
    checks_do_without_pytest,
    checks_of_units_stand_apart,
    comm_stands_alone,
    corpora_stand_alone,
    definitions_are_used,
    exports_exist,
    fronts_are_thin,
    no_circles_between_files,
    no_circles_between_packages,
    no_import_upward,
    nobody_imports_learners_code,
    repository,
    solutions_see_comm_only,
)
from tests.workbench.unsaid import unsaid_rules


@pytest.mark.parametrize("rule", RULES)
def test_the_repository_keeps_the_rule(rule: Rule) -> None:
    assert rule(repository()) == []


VIOLATIONS: list[tuple[Rule, str, str, str]] = [
    (
        benchmarks_do_without_tests,
        "benchmarks/sim.py",
        "from tests.workbench import course",
        "tests.workbench",
    ),
    (
        corpora_stand_alone,
        "tests/corpora/programs/judge.py",
        "from benchmarks._bars import share",
        "benchmarks._bars",
    ),
    (comm_stands_alone, "distlab/comm/_a.py", "import distlab.paths", "distlab.paths"),
    (
        comm_stands_alone,
        "distlab/comm/_a.py",
        "from distlab import data",
        "distlab.data",
    ),
    (
        comm_stands_alone,
        "distlab/comm/_a.py",
        "def f():\n    from ..runner import Cluster",
        "distlab.runner",
    ),
    (
        no_circles_between_files,
        "distlab/sim/a.py",
        "if TYPE_CHECKING:\n    from distlab.sim.a import A",
        "distlab/sim/a.py imports itself by way of others",
    ),
    (
        no_import_upward,
        "distlab/runner/a.py",
        "from distlab.grading import Report",
        "distlab/runner/a.py (floor 2) imports distlab.grading from above",
    ),
    (
        no_import_upward,
        "distlab/tutor/a.py",
        "if TYPE_CHECKING:\n    import distlab.cli.app",
        "imports distlab.cli.app from above",
    ),
    (no_import_upward, "distlab/magic/a.py", "import distlab.comm", "has no floor yet"),
    (no_import_upward, "distlab/cli/a.py", "import distlab.magic", "has no floor yet"),
    (
        nobody_imports_learners_code,
        "distlab/grading/checks/a.py",
        "from solutions.phase1_data_parallel import trainer",
        "imports solutions.phase1_data_parallel",
    ),
    (
        nobody_imports_learners_code,
        "distlab/cli/a.py",
        "import phase1_data_parallel.template_trainer",
        "imports phase1_data_parallel.template_trainer",
    ),
    (
        nobody_imports_learners_code,
        "solutions/phase1_data_parallel/a.py",
        "import solutions.phase1_data_parallel.collectives",
        "imports solutions.phase1_data_parallel.collectives",
    ),
    (
        solutions_see_comm_only,
        "solutions/phase1_data_parallel/a.py",
        "from distlab.models import Mlp",
        "imports distlab.models",
    ),
    (solutions_see_comm_only, CAPSTONE, "import distlab.runner", "distlab.runner"),
    (
        checks_do_without_pytest,
        "distlab/grading/checks/a.py",
        "def f():\n    import pytest",
        "imports pytest",
    ),
    (
        checks_of_units_stand_apart,
        "distlab/grading/checks/a/b.py",
        "from distlab.grading.checks.c.d import e",
        "imports distlab.grading.checks.c.d",
    ),
    (
        fronts_are_thin,
        "tests/test_phase9.py",
        "from distlab.runner import Cluster",
        "imports distlab.runner",
    ),
    (exports_exist, "distlab/a.py", "__all__ = ['b']", "__all__ names b"),
    (exports_exist, "distlab/a.py", "b = 1\n__all__ = ['b', 'b']", "names b twice"),
    (
        definitions_are_used,
        "distlab/a.py",
        "def never_called(): ...",
        "nothing mentions never_called",
    ),
    (
        unsaid_rules,
        "distlab/grading/checks/a/b.py",
        "expect_values(a, b, what='c', rule='d')",
        "b.py:1: no suspect lacks a rule",
    ),
    (
        unsaid_rules,
        "distlab/grading/checks/a/b.py",
        "def f():\n    return Suspect(rule='c')\nexpect_values(suspects=f(), rule='d')",
        "b.py:3: no suspect lacks a rule",
    ),
]


@pytest.mark.parametrize(
    ("rule", "path", "text", "complaint"),
    VIOLATIONS,
    ids=[f"{rule.__name__}-{number}" for number, (rule, *_) in enumerate(VIOLATIONS)],
)
def test_a_violation_is_caught(
    rule: Rule, path: str, text: str, complaint: str
) -> None:
    (said, *_) = rule({path: text})
    assert complaint in said


def test_a_circle_is_caught_though_no_floor_is_above_another() -> None:
    files = {
        "distlab/data/a.py": "import distlab.models.b",
        "distlab/models/b.py": "import distlab.paths",
        "distlab/paths.py": "def f():\n    from distlab.data import a",
    }
    assert no_import_upward(files) == []
    assert len(no_circles_between_packages(files)) == 3


@pytest.mark.parametrize(
    "files",
    [
        {"distlab/comm/_a.py": "import torch\nfrom distlab.comm._b import c"},
        {"distlab/comm/_a.py": "from . import _b\nfrom ._c import d"},
        {"distlab/cli/a.py": "from distlab import __version__\nimport distlab.comm"},
        {"distlab/runner/a.py": "import distlab.curriculum"},
        {CAPSTONE: "import distlab.distributed\nfrom distlab.data import digits"},
        {"tests/test_phase9.py": "import pytest\nfrom distlab.grading.front import a"},
        {"distlab/a.py": "from b import c as d\ne: int = 1\n__all__ = ['d', 'e']"},
        {"distlab/grading/checks/a/b.py": "import distlab.grading.checks.a.c"},
        {"distlab/grading/a.py": "expect_values(suspects=[Suspect(), b], rule='c')"},
    ],
    ids=str.split("comm relative version floor capstone front exports unit rules"),
)
def test_what_is_allowed_is_not_complained_about(files: Files) -> None:
    for rule in RULES:
        if rule is not no_import_upward or "distlab/a.py" not in files:
            assert rule(files) == [], rule.__name__
