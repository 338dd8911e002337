"""The standing clauses: the reference plays beside, for cost, side effects, state."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
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
    values_of,
)
from distlab.grading.differential.modes import in_other_mode
from distlab.grading.differential.observe import Observed, Operations, watch
from distlab.grading.differential.standing import (
    ASPECTS,
    best_size,
    no_more_cost,
    no_other_change,
    sizes_beside,
    specs_of,
)
from distlab.grading.harness import Implementation, PlayedRuns
from distlab.grading.kit.again import OTHER_SEED, turned
from distlab.grading.preflight import look_at
from distlab.grading.verdict import STANDING, NotYetError
from distlab.runner import Cluster, Limits
from tests.workbench.golden import Golden
from tests.workbench.judging import CURRICULUM, solution_of, verdict_on, with_body
from tests.workbench.naming import named

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
            assert reason.strip(), f"{task.id}: {name}"


def test_every_scenario_is_played_beside_the_reference() -> None:
    for task in CURRICULUM.tasks:
        checks = checks_of(task.id)
        sizes = {size for check in checks for size in check.worlds}
        wanted = {s.scenario for size in sizes for s in specs_of(checks, size)}
        found = sizes_beside(task.id)
        assert found[0] == best_size(task.id)
        assert wanted == {s.scenario for n in found for s in specs_of(checks, n)}


def test_every_task_is_played_at_a_size_that_its_checks_try() -> None:
    for task in CURRICULUM.tasks:
        size = best_size(task.id)
        assert specs_of(checks_of(task.id), size), task.id


# ── the bill ────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("more", "values"),
    [
        ({"sent_bytes": (800.0, 1000.0)}, ("rank 1", "1,000", "bytes")),
        ({"collectives": (3, 2)}, ("rank 0", 3, "collectives")),
        ({"operations": (10_000, 30_000)}, ("rank 1", "30,000", "operations")),
    ],
)
def test_more_than_the_busiest_rank_of_the_reference_is_too_much(
    more: dict[str, tuple[float, ...]], values: tuple[object, ...]
) -> None:
    with pytest.raises(NotYetError) as found:
        no_more_cost(replace(BILL, **more), BILL)  # type: ignore[arg-type]
    assert named(str(found.value), *values)
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
    with pytest.raises(NotYetError) as found:
        no_other_change(replace(BILL, changes=(frozenset(), more)), BILL)
    assert named(str(found.value), "step", "training", "rank 1")


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


# Each with what its aspect has to name.
CHANGES: list[tuple[tuple[str, ...], Callable[[Any], object]]] = [
    (("model", "training"), lambda model: model.eval()),
    (("model's", "0.bias", "values"), lambda model: nn.init.ones_(model[0].bias)),
    (("model's", "0.bias", "gradient"), _backward),
    (("model's", "0.bias", "requires_grad"), _frozen),
    (("model", "hooks"), lambda model: model[0].register_forward_hook(lambda *_: None)),
    (("model", "layers"), lambda model: model.append(nn.Identity())),
    (("model's", "1.running_mean", "values"), _averages),
]


def changes_of(change: Callable[[Any], object]) -> list[str]:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = fingerprints({"model": model})
    assert not changed(before, fingerprints({"model": model}))
    change(model)
    return changed(before, fingerprints({"model": model}))


@pytest.mark.parametrize(
    ("values", "change"), CHANGES, ids=[" ".join(values) for values, _ in CHANGES]
)
def test_a_change_of_a_model_is_seen(
    values: tuple[str, ...], change: Callable[[Any], object]
) -> None:
    assert any(named(aspect, *values) for aspect in changes_of(change))


def test_the_aspects(golden: Golden) -> None:
    """They are told to a learner as they are."""
    aspects = dict.fromkeys(a for _, change in CHANGES for a in changes_of(change))
    golden("standing/aspects", "\n".join(aspects))


def test_other_memory_in_the_callers_tensor_is_a_change() -> None:
    tensor = torch.zeros(3)
    before = fingerprints({"tensor": tensor})
    tensor.data = torch.zeros(3)
    (aspect,) = changed(before, fingerprints({"tensor": tensor}))
    assert named(aspect, "tensor", "memory")


@pytest.mark.parametrize(
    "look",
    [
        pytest.param(lambda whole: whole[:, 1], id="a column"),
        pytest.param(lambda whole: whole.t(), id="transposed"),
        pytest.param(lambda whole: whole[1], id="a row"),
        pytest.param(lambda whole: whole.sum().unsqueeze(0), id="one element"),
        pytest.param(lambda whole: whole.to(torch.bfloat16), id="bfloat16"),
        pytest.param(lambda whole: whole.to(torch.complex64).conj(), id="conjugate"),
    ],
)
def test_values_are_compared_however_they_lie(
    look: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    tensor = look(torch.arange(12.0).reshape(3, 4))
    before = values_of(tensor)
    assert values_of(tensor) == before
    assert values_of(tensor.clone()) == before
    tensor[-1] += 1
    assert values_of(tensor) != before


def test_what_lies_beside_a_view_is_none_of_its_values() -> None:
    whole = torch.zeros(3, 4)
    before = values_of(whole[1])
    whole[0] += 1
    whole[2] += 1
    assert values_of(whole[1]) == before


def test_to_look_at_the_process_draws_no_number() -> None:
    before = of_process()
    assert of_process() == before


def test_random_numbers_and_modes_of_the_process_are_looked_at() -> None:
    torch_state, state = torch.get_rng_state(), random.getstate()
    before = of_process()
    torch.rand(1)
    random.random()
    with torch.no_grad():
        now = of_process()
    torch.set_rng_state(torch_state)
    random.setstate(state)
    by_torch, by_python, mode = changed(before, now)
    assert named(by_torch, "torch's", "random")
    assert named(by_python, "Python's", "random")
    assert named(mode, "torch's", "grad")


def test_a_result_that_changes_after_the_call_is_seen() -> None:
    unit, seen = _watched("def state(values): return {'values': values[0][:]}")
    kept = torch.zeros(2)
    saved = unit.state([kept])
    assert not seen.aliased()
    kept.add_(1)
    ((function, aspect),) = seen.aliased()
    assert function == "state"
    assert named(aspect, "returned")
    assert saved["values"].sum() == 2


SERVICE = """
class Service:
    def __init__(self):
        self.kept = []
    def handle(self, peer, message):
        self.push(message)
    def push(self, values):
        self.kept.append(values)
        if len(self.kept) > 1:
            self.kept[0] += values
"""


def _watched(text: str) -> tuple[Any, Observed]:
    unit, seen = ModuleType("unit"), Observed()
    exec(compile(text, "unit.py", "exec"), unit.__dict__)
    watch(unit, seen)
    return unit, seen


def test_what_a_service_does_to_an_earlier_message_is_seen() -> None:
    unit, seen = _watched(SERVICE)
    service, first = unit.Service(), torch.ones(2)
    service.handle(0, first)
    assert not seen.changes
    service.handle(1, torch.ones(2))
    assert {first for first, _ in seen.changes} == {"Service.push"}
    (aspect, *_) = (aspect for _, aspect in seen.changes if named(aspect, "earlier"))
    assert named(aspect, "message", "earlier", "values")


def test_a_change_of_a_layer_that_is_replaced_is_seen() -> None:
    unit, seen = _watched(
        "def replace(model, other):\n"
        "    model[0].weight.data += 1\n"
        "    model[0] = other\n"
    )
    model, other = nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    held = model[0]
    unit.replace(model, other)
    assert held is not model[0]
    of_replace = [aspect for function, aspect in seen.changes if function == "replace"]
    assert any(named(aspect, "model's", "0.weight", "values") for aspect in of_replace)


@pytest.mark.parametrize("layer", [nn.Identity(), nn.Dropout()])
def test_a_model_whose_layers_do_not_ask_has_the_other_mode(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(2, 2), layer)
    is_turned = isinstance(layer, nn.Identity)
    with in_other_mode([model]):
        assert model.training is not is_turned
        assert layer.training is not is_turned
    assert all(part.training for part in model.modules())
    with in_other_mode([model]):
        model.eval()
    assert model.training is is_turned  # as it was turned: nothing was changed


def test_sizes_are_other_ones_in_the_time_before() -> None:
    sizes = ((3, 1), (2,), (4,))
    assert turned(sizes, 7) == sizes
    assert turned(sizes, 7 + OTHER_SEED) == ((2,), (4,), (3, 1))


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
    assert named(failure.message, "training")


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
