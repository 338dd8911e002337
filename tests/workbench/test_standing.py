"""The standing clauses: the reference plays beside, for cost, side effects, state."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from distlab.grading import TaskVerdict
from distlab.grading.clause import checks_of
from distlab.grading.differential.bills import Bill, reference_bills
from distlab.grading.differential.fingerprints import (
    changed,
    fingerprints,
    of_process,
)
from distlab.grading.differential.observe import Observed, Operations, watch
from distlab.grading.differential.standing import (
    ASPECTS,
    best_size,
    no_more_cost,
    no_other_change,
    specs_of,
)
from distlab.grading.harness import Implementation, PlayedRuns
from distlab.grading.preflight import look_at
from distlab.grading.verdict import STANDING, NotYetError
from distlab.runner import Cluster, Limits
from tests.workbench.judging import CURRICULUM, solution_of, verdict_on, with_body

Judged = Callable[..., TaskVerdict]
BILL = Bill(
    sent_bytes=(800.0, 800.0),
    collectives=(2, 2),
    operations=(10_000, 10_000),
    changes=(frozenset({("step", "model's parameter w: its values")}),) * 2,
)


@pytest.fixture
def judged(tmp_path: Path, cluster: Cluster) -> Judged:
    return functools.partial(verdict_on, cluster, tmp_path, worlds=())


# ── the manifest ────────────────────────────────────────────────────────────────────


def test_every_excuse_names_a_clause_or_an_aspect_and_has_a_reason() -> None:
    for task in CURRICULUM.tasks:
        for name, reason in task.excused.items():
            assert name in (*STANDING, *ASPECTS), f"{task.id}: {name}"
            assert len(reason.split()) >= 5, f"{task.id}: {name}"


def test_every_task_is_played_at_a_size_that_its_checks_try() -> None:
    for task in CURRICULUM.tasks:
        size = best_size(task.id)
        assert specs_of(checks_of(task.id), size), task.id


# ── the bill ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"sent_bytes": (800.0, 1000.0)}, "rank 1 sends 1,000 bytes"),
        ({"collectives": (3, 2)}, "rank 0 calls 3 collectives"),
        ({"operations": (10_000, 30_000)}, "rank 1 does 30,000 floating-point"),
    ],
)
def test_more_than_the_busiest_rank_of_the_reference_is_too_much(
    more: dict[str, tuple[float, ...]], said: str
) -> None:
    with pytest.raises(NotYetError, match=said) as found:
        no_more_cost(replace(BILL, **more), BILL)  # type: ignore[arg-type]
    assert not found.value.rule  # facts: which way to save it is not known
    no_more_cost(replace(BILL, **more), BILL, excused=ASPECTS)  # type: ignore[arg-type]


def test_another_rank_may_be_the_busiest_and_a_flag_more_is_free() -> None:
    other = replace(BILL, sent_bytes=(0.0, 840.0), collectives=(0, 2))
    no_more_cost(other, BILL)


def test_a_bill_survives_its_file() -> None:
    for bill in (BILL, replace(BILL, operations=None)):
        assert Bill.from_json(json.loads(json.dumps(bill.to_json()))) == bill


# ── changes ─────────────────────────────────────────────────────────────────────────


def test_what_the_reference_changes_is_free_and_nothing_else() -> None:
    no_other_change(BILL, BILL)
    more = frozenset({("step", "model: training mode")})
    with pytest.raises(NotYetError, match="step changed model: training mode on rank"):
        no_other_change(replace(BILL, changes=(frozenset(), more)), BILL)


def test_which_method_and_which_gradient_is_free() -> None:
    def bill(function: str, aspect: str) -> Bill:
        return replace(BILL, changes=(frozenset({(function, aspect)}), frozenset()))

    right = bill("Wrapper.finish", "module's parameter a: its gradient")
    no_other_change(bill("Wrapper.ready", "module's parameter b: its gradient"), right)
    with pytest.raises(NotYetError):
        no_other_change(
            bill("Wrapper.ready", "module's parameter a: its values"), right
        )


def _frozen(model: Any) -> None:
    model[0].bias.requires_grad_(False)


def _backward(model: Any) -> None:
    model[0].bias.sum().backward()


def _averages(model: Any) -> None:
    model[1].running_mean.add_(1)


CHANGES: dict[str, Callable[[Any], object]] = {
    "model: training mode": lambda model: model.eval(),
    "model's parameter 0.bias: its values": lambda model: nn.init.ones_(model[0].bias),
    "model's parameter 0.bias: its gradient": _backward,
    "model's parameter 0.bias: requires_grad": _frozen,
    "model: its hooks": lambda model: model[0].register_forward_hook(lambda *_: None),
    "model: its layers": lambda model: model.append(nn.Identity()),
    "model's buffer 1.running_mean: its values": _averages,
}


@pytest.mark.parametrize("aspect", CHANGES)
def test_a_change_of_a_model_is_seen(aspect: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = fingerprints({"model": model})
    assert not changed(before, fingerprints({"model": model}))
    CHANGES[aspect](model)
    assert aspect in changed(before, fingerprints({"model": model}))


def test_other_memory_in_the_callers_tensor_is_a_change() -> None:
    tensor = torch.zeros(3)
    before = fingerprints({"tensor": tensor})
    tensor.data = torch.zeros(3)
    assert changed(before, fingerprints({"tensor": tensor})) == ["tensor: its memory"]


def test_random_numbers_and_modes_of_the_process_are_looked_at() -> None:
    torch_state, state = torch.get_rng_state(), random.getstate()
    before = of_process()
    torch.rand(1)
    random.random()
    with torch.no_grad():
        now = of_process()
    torch.set_rng_state(torch_state)
    random.setstate(state)
    assert changed(before, now) == [
        "torch's random numbers",
        "Python's random numbers",
        "torch's grad mode",
    ]


def test_a_result_that_changes_after_the_call_is_seen() -> None:
    from types import ModuleType

    unit = ModuleType("unit")
    text = "def state(values): return {'values': values[0][:]}"
    exec(compile(text, "unit.py", "exec"), unit.__dict__)
    seen = Observed()
    watch(unit, seen)
    kept = torch.zeros(2)
    saved = unit.state([kept])
    assert not seen.aliased()
    kept.add_(1)
    assert seen.aliased() == [("state", "a tensor that it had returned")]
    assert saved["values"].sum() == 2


@pytest.mark.parametrize("uncounted", ["mine", "right"])
def test_operations_that_were_not_counted_are_not_compared(uncounted: str) -> None:
    """Ranks count them only where torch's compiler is loaded: not both may have."""
    many = replace(BILL, operations=(10_000, 30_000))
    none = replace(BILL, operations=None)
    pair = (none, many) if uncounted == "mine" else (many, none)
    no_more_cost(*pair)


def test_operations_of_a_matrix_product_are_counted() -> None:
    with Operations() as operations:
        torch.ones(3, 4) @ torch.ones(4, 5)
    assert operations.count == 2 * 3 * 4 * 5


# ── whole verdicts ──────────────────────────────────────────────────────────────────

GLOBAL_SUM = """
spare = globals().setdefault("_spare", torch.zeros_like(tensor))
if comm.rank == 0:
    for src in range(1, comm.world_size):
        comm.recv(spare, src) if spare.dtype == tensor.dtype else None
        tensor += spare
    for dst in range(1, comm.world_size):
        comm.send(tensor, dst)
else:
    comm.send(tensor, 0)
    comm.recv(tensor, 0)
tensor += globals().get("_more", 0)
globals()["_more"] = 1
"""


def test_a_sum_kept_between_two_calls_is_found(judged: Judged) -> None:
    text = with_body(solution_of("collectives"), "collectives.all_reduce", GLOBAL_SUM)
    verdict = judged("collectives.all_reduce", text)
    assert verdict.status == "fail"


def test_a_call_that_changes_the_training_mode_for_good_is_found(
    judged: Judged,
) -> None:
    solution = solution_of("trainer")
    own = "model.eval()\n" + _body_of(solution, "trainer.broadcast_model")
    verdict = judged(
        "trainer.broadcast_model", with_body(solution, "trainer.broadcast_model", own)
    )
    failure = verdict.first_failure()
    assert failure is not None
    assert (failure.id, failure.slug) == ("S2", "side-effect"), failure.message
    assert "training mode" in failure.message


def _body_of(solution: str, task: str) -> str:
    import textwrap

    start = solution.index(f"### BEGIN SOLUTION {task}\n")
    lines = solution[start : solution.index("### END SOLUTION", start)].splitlines()
    return textwrap.dedent(
        "\n".join(line for line in lines[1:] if not line.strip().startswith("#|"))
    )


# ── what is kept of the reference ───────────────────────────────────────────────────


def _never(*_: object) -> None:
    pytest.fail("the reference was played again")


def test_the_reference_is_played_once_and_a_broken_file_is_no_harm(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTLAB_STATE", str(tmp_path))
    task = CURRICULUM.task("collectives.exchange")
    _, ready = look_at(CURRICULUM, task, "reference")
    assert ready is not None
    impl = Implementation(ready.source, ready.reference)
    runs = PlayedRuns(cluster, impl, 2, 7, Limits(seconds=30))
    specs = specs_of(checks_of(task.id), 2)
    first, played = reference_bills(task.id, runs, specs)
    assert played
    assert played.bills == first
    (kept,) = (tmp_path / "reference").iterdir()
    monkeypatch.setattr("distlab.grading.differential.bills.played_twice", _never)
    assert reference_bills(task.id, runs, specs) == (first, None)
    monkeypatch.undo()
    monkeypatch.setenv("DISTLAB_STATE", str(tmp_path))
    kept.write_text("[{]")
    assert reference_bills(task.id, runs, specs)[0] == first
