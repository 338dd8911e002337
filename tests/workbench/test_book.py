"""The book of mistakes: a difference gets its name from a wrong solution like it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from distlab.curriculum import UnitSource
from distlab.grading.book.marks import are_alike, mark_of
from distlab.grading.book.names import first_sentence, named
from distlab.grading.book.plays import implementation_of, played
from distlab.grading.catalogue import Entry
from distlab.grading.clause import checks_of
from distlab.grading.harness import PlayedRuns
from distlab.grading.kit.values import expect_values
from distlab.grading.runs import RunSpec
from distlab.grading.verdict import Difference, NotYetError, TaskVerdict
from distlab.runner import Cluster, Limits
from tests.workbench.judging import (
    CURRICULUM,
    ROOT,
    SEED,
    catalogue,
    solution_of,
    verdict_on,
    with_body,
)

UNIT, TASK = "gradient_accumulation", "gradient_accumulation.sync_once"
ODD = 0.125  # no entry of the catalogue leaves a gradient times this


@pytest.fixture(scope="module", autouse=True)
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which the marks of a clause are kept once for all tests."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("state")
        patch.setenv("DISTLAB_STATE", str(folder))
        yield folder


def mistaken(*values: list[float], tolerance: float = 1e-10) -> Difference:
    actual = tuple(torch.tensor(value, dtype=torch.float64) for value in values)
    return Difference(what="it", actual=actual, tolerance=tolerance)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ([1.0, 2.0], [1.0, 2.0 + 1e-14], True),
        ([1.0, 2.0], [2.0, 1.0], False),
        ([1.0, 2.0], [1.0, 2.0 + 1e-5], False),
        ([1.0, 2.0], [1.0, 2.0, 0.0], False),
        ([1.0, torch.nan], [1.0, torch.nan], True),
        ([1.0, torch.nan], [1.0, torch.inf], False),
        ([1.0, torch.inf], [1.0, -torch.inf], False),
        ([], [], True),
    ],
)
def test_marks_are_alike_where_values_are(
    one: list[float], other: list[float], same: bool
) -> None:
    first, second = mark_of(mistaken(one)), mark_of(mistaken(other))
    assert are_alike(first, second, 1e-10) is same


def test_every_rank_counts() -> None:
    one, other = mistaken([1.0], [2.0]), mistaken([1.0], [3.0])
    assert not are_alike(mark_of(one), mark_of(other), 1e-10)
    assert not are_alike(mark_of(one), mark_of(mistaken([1.0])), 1e-10)


def verdict(cluster: Cluster, folder: Path, body: str) -> TaskVerdict:
    text = with_body(solution_of(UNIT), TASK, body)
    return verdict_on(cluster, folder, TASK, text)


def test_a_mistake_of_the_catalogue_has_its_name_with_any_seed(
    cluster: Cluster, tmp_path: Path, state: Path
) -> None:
    # As GA25, in other words: the seed is not the book's.
    book = state / "book"
    book.mkdir()
    outdated, of_another = book / f"{TASK}-C1-0-0.json", book / f"{TASK}-C2-0-0.json"
    outdated.touch()
    of_another.touch()
    done = verdict(
        cluster,
        tmp_path,
        """
        model.zero_grad()
        accumulate(comm, model, loss_fn, microbatches)
        for parameter in model.parameters():
            total = parameter.grad / comm.world_size
            comm.all_reduce(total)
            parameter.grad.copy_(total)
        """,
    )
    failure = done.first_failure()
    assert failure is not None
    assert (failure.id, failure.slug) == ("C1", "divided-twice")
    assert failure.rule
    assert [line.state for line in failure.evidence][-1] == "as if"
    kept = set(book.iterdir())
    assert len(kept) == 2
    assert outdated not in kept
    assert of_another in kept


def test_a_part_written_anew_has_the_names_of_that_part(
    cluster: Cluster, tmp_path: Path
) -> None:
    # GA05 is a mistake of the task before; here it stands in this one.
    body = """
    model.zero_grad()
    full = len(microbatches) * len(microbatches[0][0])
    for inputs, targets in microbatches:
        (loss_fn(model(inputs), targets) * len(inputs) / full).backward()
    for parameter in model.parameters():
        comm.all_reduce(parameter.grad)
    """
    assert verdict(cluster, tmp_path, body).slug == "short-tail-as-full"


def test_what_is_not_in_the_book_has_facts_and_no_name(
    cluster: Cluster, tmp_path: Path
) -> None:
    body = f"""
    model.zero_grad()
    accumulate(comm, model, loss_fn, microbatches)
    for parameter in model.parameters():
        comm.all_reduce(parameter.grad)
        parameter.grad *= {ODD}
    """
    done = verdict(cluster, tmp_path, body)
    failure = done.first_failure()
    assert failure is not None
    assert (failure.id, failure.slug) == ("C1", "")
    assert "1/8" in failure.message
    assert "as if" not in [line.state for line in failure.evidence]


def test_names_are_told_apart_by_what_they_leave(cluster: Cluster) -> None:
    """No two misconceptions of a clause leave the same at its first world size."""
    check = checks_of(TASK)[0]
    entries = [
        entry
        for entry in catalogue().values()
        if (entry.task, entry.clause) == (TASK, "C1") and entry.slug
    ]
    marks = []
    for entry, left in differences(cluster, entries, *check.runs(3)):
        marks.append((entry.slug, mark_of(left)))
    assert len(marks) > 15
    for slug, mark in marks:
        alike = {s for s, other in marks if are_alike(mark, other, 1e-10)}
        assert alike == {slug}


def differences(
    cluster: Cluster, entries: list[Entry], *specs: RunSpec
) -> list[tuple[Entry, Difference]]:
    check, runs = checks_of(TASK)[0], played_by(cluster)
    found = []
    for entry, records in played(entries, runs, specs, 60.0):
        if records:
            own = runs.of(implementation_of(runs.impl.reference, entry))
            own.records = records
            try:
                check.judge(own)
            except NotYetError as failure:
                if failure.difference:
                    found.append((entry, failure.difference))
    return found


def played_by(cluster: Cluster) -> PlayedRuns:
    """Runs of the reference on three ranks."""
    path = CURRICULUM.units[UNIT].solution(ROOT)
    reference = UnitSource(UNIT, "reference", path, solution_of(UNIT))
    some = implementation_of(reference, catalogue()["GA25"])
    return PlayedRuns(cluster, some, 3, SEED, Limits(seconds=60.0))


def test_who_raises_or_hangs_keeps_nobody_from_being_played(cluster: Cluster) -> None:
    def entry(name: str, body: str) -> Entry:
        return Entry(id=name, task=TASK, title=name, body=body, clause="C1")

    entries = [
        entry("fine", "model.zero_grad()"),
        entry("raises", "raise ValueError"),
        entry("hangs", "if comm.rank == 0:\n    comm.barrier()"),
        entry("fine too", "accumulate(comm, model, loss_fn, microbatches)"),
    ]
    specs = checks_of(TASK)[0].runs(3)
    found = {e.id: r for e, r in played(entries, played_by(cluster), specs, 60.0)}
    assert {name for name, records in found.items() if records} == {"fine", "fine too"}
    assert set(found) == {one.id for one in entries}


def test_a_failure_with_a_name_or_without_values_stays(cluster: Cluster) -> None:
    check, runs = checks_of(TASK)[0], played_by(cluster)
    for failure in (
        NotYetError("named", slug="raised", difference=mistaken([1.0])),
        NotYetError("of another kind"),
    ):
        assert named(CURRICULUM, check, runs, failure) is failure


def right() -> list[Tensor]:
    return [torch.arange(1.0, 7.0).double() * (rank + 1) for rank in range(3)]


@pytest.mark.parametrize(
    ("actual", "words"),
    [
        ([3 * value for value in right()], ["3 times", "every rank"]),
        ([value / 4 for value in right()], ["1/4 of", "every rank"]),
        ([value * 0 for value in right()], ["zero", "every rank"]),
        ([right()[0], right()[1] * 5, right()[2]], ["5 times", "rank 1"]),
        ([right()[1], right()[0] + 1, right()[2] + 1], ["rank 0", "rank 1"]),
        ([r + torch.eye(6)[4] for r in right()], ["1 of 6", "element 4"]),
    ],
)
def test_facts_are_stated_of_what_has_no_name(
    actual: list[Tensor], words: list[str]
) -> None:
    with pytest.raises(NotYetError) as caught:
        expect_values(actual, right(), what="it")
    assert all(word in caught.value.message for word in words)
    assert caught.value.difference is not None


def test_a_rule_is_the_first_sentence_of_the_fix() -> None:
    assert first_sentence("Do it\nonce. Not\ntwice.") == "Do it once"
    assert first_sentence("Only .grad = 0.5 counts.") == "Only .grad = 0.5 counts"
