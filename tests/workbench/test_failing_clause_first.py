"""The clause that failed last is judged first, and the verdict stays what it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distlab.cli.changes import Changes
from distlab.grading import ClauseVerdict, TaskVerdict
from distlab.grading.grade import Grader
from distlab.runner import Cluster
from tests.workbench.judging import CURRICULUM, SEED, solution_of, with_body

TASK = "trainer.evaluate"
TALKS_IN_EACH_BATCH = """
model.eval()
sums = torch.zeros(3, dtype=torch.float64)
with torch.no_grad():
    for inputs, targets in batches:
        outputs = model(inputs)
        part = torch.zeros(3, dtype=torch.float64)
        if len(inputs):
            part[0] = loss_fn(outputs, targets) * len(inputs)
        part[1] = (outputs.argmax(dim=1) == targets).sum()
        part[2] = len(inputs)
        comm.all_reduce(part)
        sums += part
return Metrics(float(sums[0] / sums[2]), float(sums[1] / sums[2]))
"""
ONE_RANK_ALONE = """
if comm.rank == 0:
    comm.all_reduce(torch.zeros(3))
return Metrics(0.0, 0.0)
"""


def judged(
    cluster: Cluster, folder: Path, body: str, first: str
) -> tuple[TaskVerdict, list[ClauseVerdict]]:
    """The verdict, and what was heard before it was complete."""
    path = folder / "trainer.py"
    path.write_text(with_body(solution_of("trainer"), TASK, body), encoding="utf-8")
    heard: list[ClauseVerdict] = []
    grader = Grader(
        CURRICULUM,
        cluster,
        code=str(path),
        seed=SEED,
        worlds=(3,),
        first=first,
        on_first=heard.append,
    )
    return grader.grade([CURRICULUM.task(TASK)]).tasks[0], heard


def what_it_says(verdict: TaskVerdict) -> dict[str, Any]:
    told = verdict.to_json()
    return {name: told[name] for name in told if name != "seconds"}


@pytest.mark.parametrize(
    ("body", "first", "order", "statuses"),
    [
        (TALKS_IN_EACH_BATCH, "C2", ["C2", "C1"], ["pass", "fail", "skip"]),
        (ONE_RANK_ALONE, "C3", ["C3", "C1"], ["fail", "skip", "skip"]),
    ],
    ids=["first-ends-it", "another-ends-it"],
)
def test_the_verdict_does_not_depend_on_what_comes_first(
    body: str,
    first: str,
    order: list[str],
    statuses: list[str],
    cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual, heard = judged(cluster, tmp_path, body, "")
    assert heard == []
    assert [clause.status for clause in usual.clauses] == statuses

    met: list[str] = []
    one_clause = Grader._judge_clause

    def noted(self: Grader, task: Any, check: Any, *rest: Any) -> Any:
        met.append(check.clause)
        return one_clause(self, task, check, *rest)

    monkeypatch.setattr(Grader, "_judge_clause", noted)
    verdict, heard = judged(cluster, tmp_path, body, first)
    assert [clause.id for clause in heard] == [first]
    assert met == order
    assert what_it_says(verdict) == what_it_says(usual)


def test_the_first_clause_that_failed_is_remembered() -> None:
    changes = Changes()
    assert changes.failing("a.b") == ""
    for statuses, failing in (
        ({"C1": "pass", "C2": "fail", "C3": "fail"}, "C2"),
        ({"C1": "pass", "C2": "pass", "C3": "pass"}, ""),
    ):
        clauses = [
            ClauseVerdict(id=name, text="", status=status)  # type: ignore[arg-type]
            for name, status in statuses.items()
        ]
        verdict = TaskVerdict(
            id="a.b",
            number="1.2",
            title="",
            status="fail",
            path="",
            digest="",
            ran=True,
            world_sizes=(3,),
            clauses=clauses,
        )
        changes.since_last(verdict)
        assert changes.failing("a.b") == failing
