"""What is said to have changed since the last verdict, and when nothing is said."""

from __future__ import annotations

from distlab.cli.changes import Changes
from distlab.grading.verdict import ClauseVerdict, TaskVerdict


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
        world_sizes=(3,) if ran else (),
        clauses=[
            ClauseVerdict(id=name, text="", status=status, slug=slug)  # type: ignore[arg-type]
            for name, status, slug in parts
        ],
    )


def test_what_changed_is_said() -> None:
    changes = Changes()
    for clauses, said in (
        (("C1 fail x", "C2 skip"), ""),
        (("C1 fail x", "C2 skip"), ""),
        (("C1 fail y", "C2 skip"), "C1 is not x any more"),
        (("C1 pass", "C2 fail z"), "C1 now passes, C2 does not yet"),
        (("C1 fail x", "C2 pass"), "C1 no longer passes, C2 now passes"),
        (("C1 pass", "C2 fail z"), "C1 passes again, C2 no longer passes"),
        (("C1 pass", "C2 fail"), "C2 is not z any more"),
        (("C1 pass", "C2 pass"), "C2 passes again"),
        (("C1 pass", "C2 pass"), ""),
    ):
        assert changes.since_last(verdict(*clauses)) == said


def test_a_file_that_could_not_run_changes_nothing() -> None:
    changes = Changes()
    changes.since_last(verdict("C1 pass"))
    assert changes.since_last(verdict("C1 fail syntax-error", ran=False)) == ""
    assert changes.since_last(verdict("C1 pass")) == ""


def test_tasks_are_kept_apart() -> None:
    changes = Changes()
    changes.since_last(verdict("C1 fail x"))
    assert changes.since_last(verdict("C1 pass", task="a.c")) == ""
    assert changes.since_last(verdict("C1 pass")) == "C1 now passes"
