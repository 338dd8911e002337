"""What is said to have changed since the last verdict, and when nothing is said."""

from __future__ import annotations

import re

from distlab.cli.changes import Changes
from distlab.grading.verdict import ClauseVerdict, TaskVerdict
from tests.workbench.golden import Golden


def verdict(*clauses: str, task: str = "a.b", ran: bool = True) -> TaskVerdict:
    """Clauses as `C1 fail some-slug`."""
    parts = [(*clause.split(), "")[:3] for clause in clauses]
    return TaskVerdict(
        id=task,
        number="1.2",
        title="",
        status="fail",
        path="",
        digest="",
        ran=ran,
        world_sizes=(3,) if ran else (),
        clauses=[
            ClauseVerdict(id=name, text="", status=status, slug=slug)  # type: ignore[arg-type]
            for name, status, slug in parts
        ],
    )


def test_what_changed_is_said(golden: Golden) -> None:
    changes = Changes()
    told = []
    for clauses, named in (
        (("C1 fail x", "C2 skip"), []),
        (("C1 fail x", "C2 skip"), []),
        (("C1 fail y", "C2 skip"), ["C1"]),
        (("C1 pass", "C2 fail z"), ["C1", "C2"]),
        (("C1 fail x", "C2 pass"), ["C1", "C2"]),
        (("C1 pass", "C2 fail z"), ["C1", "C2"]),
        (("C1 pass", "C2 fail"), ["C2"]),
        (("C1 pass", "C2 pass"), ["C2"]),
        (("C1 pass", "C2 pass"), []),
    ):
        said = changes.since_last(verdict(*clauses))
        assert re.findall(r"C\d", said) == named
        told.append(f"{', '.join(clauses)}: {said}")
    golden("cli/changes", "\n".join(told))


def test_a_file_that_could_not_run_changes_nothing() -> None:
    changes = Changes()
    changes.since_last(verdict("C1 pass"))
    assert changes.since_last(verdict("C1 fail syntax-error", ran=False)) == ""
    assert changes.since_last(verdict("C1 pass")) == ""


def test_tasks_are_kept_apart() -> None:
    changes = Changes()
    changes.since_last(verdict("C1 fail x"))
    assert changes.since_last(verdict("C1 pass", task="a.c")) == ""
    assert re.findall(r"C\d", changes.since_last(verdict("C1 pass"))) == ["C1"]
