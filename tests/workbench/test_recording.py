"""Records of judged tasks, written to files and judged again without ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from distlab.grading.clause import Check
from distlab.grading.grade import Grader
from distlab.grading.harness import PlayedRuns
from distlab.grading.recording import FORMAT, RecordingError, load, save
from distlab.grading.rejudge import judge_records
from distlab.grading.verdict import ClauseVerdict, NotYetError, TaskVerdict
from distlab.runner import Cluster
from distlab.runner.wire import decode, encode
from tests.workbench.golden import Golden
from tests.workbench.judging import CURRICULUM, SEED, catalogue, solution_of

SUM, LOSS, STAGE1 = (
    "collectives.all_reduce",
    "tensor_parallel.vocab_loss",
    "sharded_optimizer.stage1",
)
# 1.4, 2.19, 3.13: the reference, wrong solutions of each clause, and right ones.
JUDGED = {
    SUM: ("", "CO77", "CO88", "CO93", "CO68", "LV02", "A16"),
    LOSS: ("", "TP41", "TP44", "TP46"),
    STAGE1: ("", "ZR22", "ZR01", "ZR97", "A804"),
}
CASES = [(task, name) for task, names in JUDGED.items() for name in names]


class OwnClauses(Grader):
    """Judges nothing else: the standing clauses and the book need ranks."""

    def _standing(self, *_: Any) -> Iterator[ClauseVerdict]:
        return iter(())

    def _named(
        self, check: Check, runs: PlayedRuns, failure: NotYetError
    ) -> NotYetError:
        return failure


@dataclass
class Recorded:
    """A file of records, and the verdict of when they were made."""

    path: Path
    verdict: TaskVerdict


@pytest.fixture(scope="module")
def recorded(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Recorded]:
    """Judges a task once, on ranks; later only what was recorded is read."""
    folder = tmp_path_factory.mktemp("records")
    known: dict[tuple[str, str], Recorded] = {}

    def record(task_id: str, name: str) -> Recorded:
        if (task_id, name) not in known:
            task = CURRICULUM.task(task_id)
            text, path = solution_of(task.unit), folder / f"{task.unit}{name}"
            if name:
                text = catalogue()[name].applied_to(text)
            code = path.with_suffix(".py")
            code.write_text(text, encoding="utf-8")
            grader = OwnClauses(
                CURRICULUM,
                cluster,
                code=str(code),
                seed=SEED,
                on_played=lambda task, played: save(path, task.id, played),
            )
            (verdict,) = grader.grade([task]).tasks
            assert verdict.status != "error", verdict.message
            known[task_id, name] = Recorded(path, verdict)
        return known[task_id, name]

    return record


def judged_again(path: Path, task_id: str) -> tuple[ClauseVerdict, ...]:
    return judge_records(CURRICULUM.task(task_id), load(path, task_id))


def facts(clauses: tuple[ClauseVerdict, ...]) -> list[tuple[Any, ...]]:
    return [(*c.to_json().values(), c.kind, c.evidence, c.note) for c in clauses]


@pytest.mark.slow
@pytest.mark.parametrize(("task", "name"), CASES)
def test_judged_again_as_on_ranks(
    task: str, name: str, recorded: Callable[[str, str], Recorded]
) -> None:
    once = recorded(task, name)
    is_wrong = bool(name) and catalogue()[name].is_mutant
    assert once.verdict.status == ("fail" if is_wrong else "pass")
    assert facts(judged_again(once.path, task)) == facts(once.verdict.clauses)


def test_the_text_that_was_judged_is_in_the_file(
    recorded: Callable[[str, str], Recorded],
) -> None:
    once = recorded(SUM, "CO77")
    for n, runs in load(once.path, SUM).items():
        assert (runs.world_size, runs.seed) == (n, SEED)
        assert runs.source.digest == once.verdict.digest


# ── what was changed, and what is no recording ──────────────────────────────────────

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture
def changed(
    tmp_path: Path, recorded: Callable[[str, str], Recorded]
) -> Callable[[Change, str], Path]:
    """The recording of a task's reference with something changed in it."""

    def make(change: Change, task: str = SUM) -> Path:
        told = decode(recorded(task, "").path.read_bytes())
        change(told)
        path = tmp_path / "changed"
        path.write_bytes(encode(told))
        return path

    return make


def ranks_in(told: dict[str, Any], n: int = 3) -> list[dict[str, Any]]:
    return [rank for *_, run in told["worlds"][n] for rank in run["ranks"]]


def add_one(value: Any) -> None:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        value += 1
    elif isinstance(value, list | tuple | Mapping):
        for part in value.values() if isinstance(value, Mapping) else value:
            add_one(part)


@pytest.mark.parametrize("task", JUDGED)
def test_a_changed_value_changes_the_verdict(
    task: str, changed: Callable[[Change, str], Path]
) -> None:
    def change(told: dict[str, Any]) -> None:
        add_one([rank["value"] for rank in ranks_in(told)])

    clauses = judged_again(changed(change, task), task)
    # Where two clauses each leave it to the other, neither is judged: never a pass.
    assert clauses[0].status != "pass"


def test_a_changed_journal_changes_the_verdict(
    changed: Callable[[Change, str], Path],
) -> None:
    def change(told: dict[str, Any]) -> None:
        for rank in ranks_in(told):
            rank |= {"journal": [], "messages": 0, "sent_bytes": 0.0}

    first, *_ = judged_again(changed(change, SUM), SUM)
    assert (first.status, first.slug) == ("fail", "no-messages")


def test_what_was_not_recorded_is_not_judged(
    changed: Callable[[Change, str], Path],
) -> None:
    whole = changed(lambda told: told["worlds"].pop(4), SUM)
    assert {c.status for c in judged_again(whole, SUM)} == {"skip"}
    part = changed(lambda told: told["worlds"][4].pop(0), SUM)
    skipped = [c for c in judged_again(part, SUM) if c.status == "skip"]
    assert skipped
    assert all(re.search(r"\b[\w.]+:\w+\(", c.message) for c in skipped)  # which


def rename(name: str) -> Change:
    def change(told: dict[str, Any]) -> None:
        told["worlds"][3][0] = (name, *told["worlds"][3][0][1:])

    return change


# Each with what its refusal has to name.
BAD_FORMS: dict[str, tuple[Change, str]] = {
    "another clause's": (rename("os:system"), r"collectives\.all_reduce .*os:system"),
    "no worlds": (lambda told: told.pop("worlds"), r"KeyError\('worlds'\)"),
    "another format": (lambda told: told.update(format="another"), r"/changed\b"),
    "another task": (lambda told: told.update(task=LOSS), r"collectives\.all_reduce$"),
    "too many ranks": (lambda told: told.update(worlds={10**9: []}), r"\b1000000000\b"),
    "no number of ranks": (lambda told: told.update(worlds={True: []}), r"\bTrue\b"),
    "more fields": (
        lambda told: ranks_in(told)[0].update(shell="sh"),
        r"TypeError\(.*'shell'",
    ),
    "a rank twice": (lambda told: ranks_in(told)[0].update(rank=7), r"\b3 ranks$"),
    "no source": (lambda told: told.update(source=None), r"TypeError\("),
}


@pytest.mark.parametrize("form", BAD_FORMS)
def test_a_changed_form_is_one_sentence(
    form: str, changed: Callable[[Change, str], Path]
) -> None:
    change, values = BAD_FORMS[form]
    with pytest.raises(RecordingError, match=values) as told:
        load(changed(change, SUM), SUM)
    assert "\n" not in str(told.value)


def test_the_refusals_of_changed_forms(
    changed: Callable[[Change, str], Path], golden: Golden
) -> None:
    texts = []
    for form, (change, _) in BAD_FORMS.items():
        with pytest.raises(RecordingError) as told:
            load(changed(change, SUM), SUM)
        texts.append(f"{form}: {told.value}")
    golden("recording/refusals", "\n".join(texts))


@pytest.mark.parametrize("part", ["journal", "value"])
def test_values_that_no_rank_reports_are_one_sentence(
    part: str, changed: Callable[[Change, str], Path]
) -> None:
    def change(told: dict[str, Any]) -> None:
        for rank in ranks_in(told):
            rank[part] = 7

    with pytest.raises(RecordingError, match=r"\bC1\b.*\b3\b.*Error\("):
        judged_again(changed(change, SUM), SUM)


def test_another_file_or_half_a_file_is_one_sentence(
    tmp_path: Path, recorded: Callable[[str, str], Recorded]
) -> None:
    path, whole = tmp_path / "file", recorded(SUM, "").path.read_bytes()
    torch.save({"format": FORMAT}, path)
    for data in (b"", b"{}", b"[1]", b"\xff\xfe", path.read_bytes(), whole[:-9]):
        path.write_bytes(data)
        with pytest.raises(RecordingError, match=re.escape(str(path))) as told:
            load(path, SUM)
        assert "\n" not in str(told.value)
        assert told.value.__cause__ is None
