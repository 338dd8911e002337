"""Whom the records point at: what the meter counts, 4.2 is asked, `top` shows."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distlab.cli import top
from distlab.curriculum import load
from distlab.monitor import StepRecord
from distlab.monitor.jsonl import JsonLines, read_folder, write_autopsy
from distlab.monitor.meter import StepMeter, checksum
from distlab.monitor.suspected import Suspected, num_recent, rows_of, suspected
from distlab.monitor.view import _suspects, view
from tests.workbench.course import Course
from tests.workbench.golden import Golden
from tests.workbench.naming import named

UNIT = load("monitoring", "reference")
RECORD = StepRecord(
    rank=0,
    step=10,
    epoch=1,
    time_s=1000.0,
    num_steps=10,
    seconds=2.0,
    samples=80,
    loss=1.0,
    data_wait_s=0.1,
    communication_s=0.9,
    learning_rate=0.1,
    grad_norm=3.0,
    memory_bytes=1 << 20,
    gpu_utilization=None,
    checksum=7,
)


def a_row(step: int, *changes: dict[str, Any]) -> list[StepRecord]:
    """The records of three ranks; a change has the rank that it is about."""
    row = [replace(RECORD, rank=rank, step=step) for rank in range(3)]
    for change in changes:
        row[change["rank"]] = replace(row[change["rank"]], **change)
    return row


def folder_of(folder: Path, rows: Sequence[Sequence[StepRecord]]) -> Path:
    sink = JsonLines(folder, {"world_size": 3, "dataset": "digits", "epochs": 1})
    for row in rows:
        for record in row:
            sink.record(record)
    sink.close()
    return folder


# ── what the meter counts ───────────────────────────────────────────────────────────


def metered(every: int) -> tuple[torch.nn.Module, StepMeter, list[StepRecord]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    heard: list[StepRecord] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter = StepMeter(0, heard.append, log_every_n_steps=every, optimizer=optimizer)
    meter.begin_epoch()
    return model, meter, heard


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_the_first_step_with_an_inf_or_nan_is_recorded(value: float) -> None:
    model, meter, heard = metered(3)
    for step in range(1, 7):
        inputs = torch.ones(4, 3)
        if step in (2, 3):
            inputs[1, 2] = value
        loss = model(inputs).mean()
        model.zero_grad()
        loss.backward()
        meter.before_call()
        for parameter in model.parameters():  # as an all_reduce with a broken rank
            parameter.grad = torch.full_like(parameter, math.nan)
        meter.end_step(loss, samples=4)
    assert [record.nonfinite_step for record in heard] == [2, None]


def test_without_communication_the_gradients_are_looked_at_in_the_end() -> None:
    model, meter, heard = metered(1)
    (model(torch.full((1, 3), math.nan))).mean().backward()
    meter.end_step(0.0, samples=1)
    assert heard[0].nonfinite_step == 1


def test_a_checksum_differs_where_a_bit_does() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.uint8):
        tensors = [torch.arange(6).to(dtype).reshape(2, 3), torch.ones((), dtype=dtype)]
        first = checksum(tensors)
        assert 0 <= first < 1 << 32
        assert checksum([tensor.clone() for tensor in tensors]) == first
        changed = tensors[0].clone()
        changed[1, 2] = 6
        assert checksum([changed, tensors[1]]) != first
        assert checksum(tensors[::-1]) != first
    assert checksum([]) == 0


def test_the_meter_writes_the_checksum_of_the_weights_down() -> None:
    model, meter, heard = metered(1)
    meter.end_step(0.0, samples=1)
    assert heard[0].checksum == checksum(list(model.parameters())) != 0


# ── what the unit is asked ──────────────────────────────────────────────────────────

FIELDS = ("stragglers", "desynchronized", "nan_origin")
FAULTS: list[tuple[list[list[StepRecord]], str, tuple[int, ...]]] = [
    (
        [a_row(s, {"rank": 1, "communication_s": 0.0}) for s in (10, 20, 30)],
        "stragglers",
        (1,),
    ),
    ([a_row(10), a_row(20, {"rank": 2, "checksum": 8})], "desynchronized", (2,)),
    (
        [
            a_row(10, {"rank": 1, "nonfinite_step": 4}, {"rank": 0}),
            a_row(20, *({"rank": rank, "nonfinite_step": 11} for rank in range(3))),
        ],
        "nan_origin",
        (1,),
    ),
]


@pytest.mark.parametrize(("rows", "field", "ranks"), FAULTS)
def test_a_fault_is_named_and_nothing_else(
    tmp_path: Path, rows: list[list[StepRecord]], field: str, ranks: tuple[int, ...]
) -> None:
    found = suspected(read_folder(folder_of(tmp_path / "run", rows)), UNIT, "4.2")
    nobody: dict[str, tuple[int, ...]] = dict.fromkeys(FIELDS, ())
    expected = nobody | {field: ranks}
    assert {name: getattr(found, name) for name in expected} == expected
    assert found.ranks == set(ranks)
    assert found.sentences == ()


def test_of_several_steps_in_a_row_the_first_with_a_nan_counts(tmp_path: Path) -> None:
    steps = {0: 13, 1: 12, 2: 13}  # one step later everybody has it
    changes = [{"rank": rank, "nonfinite_step": s} for rank, s in steps.items()]
    folder = folder_of(tmp_path / "run", [a_row(10), a_row(20, *changes)])
    found = suspected(read_folder(folder), UNIT, "4.2")
    assert (found.nan_origin, found.nan_step) == ((1,), 12)


def test_a_row_waits_for_all_ranks(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run", [a_row(10), a_row(20)[:2]])
    recorded = read_folder(folder)
    assert [row[0].step for row in rows_of(recorded)] == [10]


def test_a_straggler_of_long_ago_is_none() -> None:
    rows = [a_row(10 * number) for number in range(1, 9)]
    assert num_recent(rows) == 3
    single = [[replace(one, num_steps=1) for one in row] for row in rows * 4]
    assert num_recent(single) == 20


def test_what_the_learners_functions_do_wrong_is_a_sentence(
    tmp_path: Path, golden: Golden
) -> None:
    unit = SimpleNamespace(
        Record=UNIT.Record,
        stragglers=lambda steps: 1 / 0,
        desynchronized=lambda records: None,
        nan_origin=lambda steps: [3],
    )
    recorded = read_folder(folder_of(tmp_path / "run", [a_row(10)]))
    found = suspected(recorded, unit, "your 4.2")  # type: ignore[arg-type]
    assert found.ranks == frozenset()
    values = (
        ("stragglers", "ZeroDivisionError"),
        ("desynchronized", "TypeError", "NoneType"),
        ("nan_origin", "ValueError", 3),
    )
    for sentence, of_it in zip(found.sentences, values, strict=True):
        assert named(sentence, *of_it)
    golden("monitor/unusable functions", "\n".join(found.sentences))


# ── what is shown ───────────────────────────────────────────────────────────────────


def test_the_view_names_them_and_puts_them_first(tmp_path: Path) -> None:
    rows, _, _ = FAULTS[1]
    recorded = read_folder(folder_of(tmp_path / "run", rows))
    found = suspected(recorded, UNIT, "your 4.2")
    lines = view(recorded, 1001.0, width=80, height=8, suspected=found)
    style, text = lines[3]
    assert style == "fail"
    assert named(text, "desynchronized", "rank 2", "your 4.2")
    style, text = lines[6]
    assert (style, text.split()[0]) == ("fail", "2")
    calm = suspected(read_folder(folder_of(tmp_path / "calm", [a_row(10)])), UNIT, "x")
    lines = view(recorded, 1001.0, width=80, height=24, suspected=calm)
    assert "fail" not in {style for style, _ in lines}
    assert [style for style, text in lines if "(x)" in text] == ["dim"]


def test_all_that_is_said_of_suspects(golden: Golden) -> None:
    named_as = {"stragglers": (0, 2), "desynchronized": (1,), "nan_origin": (1, 2)}
    several = Suspected(whose="your 4.2", **named_as, nan_step=7)  # type: ignore[arg-type]
    texts = [
        text
        for found in (several, Suspected(whose="the reference's 4.2"))
        for _, text in _suspects(found)
    ]
    assert named(texts[0], 0, 2, "your 4.2")
    assert named(texts[1], 1, "your 4.2")
    assert named(texts[2], 1, 2, 7, "your 4.2")
    golden("monitor/suspects", "\n".join(texts))


def test_the_view_says_why_a_run_did_not_finish(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "run", [a_row(10)])
    write_autopsy(folder, "the\nreason", ["rank 0  waiting"])
    assert read_folder(folder).autopsy == "the reason"
    lines = view(read_folder(folder), 1001.0, width=80, height=24)
    assert ("fail", "the reason") in lines


def test_top_ends_with_the_run_or_at_q_and_finds_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"\btop FOLDER\b"):
        top.top()
    looks: list[float] = []
    after: dict[int, Callable[[], str | None]] = {}  # so many looks: what happens

    def pressed() -> str:
        looks.append(time.monotonic())
        return after.get(len(looks), str)() or ""

    @contextmanager
    def keys() -> Iterator[Callable[[], str]]:
        yield pressed

    nobody = Suspected(whose="no suspects", sentences=("nobody was asked",))
    for name, value in (
        ("moves", lambda: True),
        ("pressed_keys", keys),
        ("namer", lambda: lambda _: nobody),
        ("EVERY_S", 0.02),
        ("_KEYS_S", 0.01),
    ):
        monkeypatch.setattr(top, name, value)

    # q, while the run goes on
    sink = JsonLines(tmp_path / "runs/one", {"world_size": 1, "dataset": "digits"})
    sink.record(RECORD)
    after = {1: lambda: "x", 4: lambda: "q"}
    assert top.top() == 0
    assert len(looks) == 4
    assert "nobody was asked" in capsys.readouterr().out

    # the end of the run, while it is looked at; then it is shown once
    looks.clear()
    after = {3: sink.close}
    assert top.top() == 0
    assert 3 <= len(looks) < 20
    looks.clear()
    assert top.top() == 0
    assert not looks
    assert "runs/one" in capsys.readouterr().out


def suspects_in(shown: str) -> list[str]:
    """The lines of `top` that say whose functions were asked."""
    return [line for line in shown.splitlines() if re.search(r"\(.*\b4\.2\)", line)]


@pytest.mark.slow
def test_top_asks_the_learners_function_once_it_has_passed(course: Course) -> None:
    folder = folder_of(course.root / "run", FAULTS[0][0])
    (line,) = suspects_in(course.distlab("top", str(folder)).out)
    assert named(line, "straggler", "rank 1", "reference's 4.2")
    template = course.root / "phase4_production" / "template_monitoring.py"
    solution = (course.root / "solutions/phase4_production/monitoring.py").read_text()
    late = "own_s > LATE * statistics.median(others)"
    assert late in solution  # the learner's own: everybody but rank 1 is late
    template.write_text(solution.replace(late, "rank != 1"))
    course.distlab("use", "mine", "4.2")
    (line,) = suspects_in(course.distlab("top", str(folder)).out)
    assert named(line, "straggler", "ranks 0, 2", "your 4.2")
    template.write_text(template.read_text() + "\n1 / 0\n")
    broken = course.distlab("top", str(folder))
    assert broken.code == 0
    assert named(broken.out, "monitoring", "ZeroDivisionError")


@pytest.fixture
def course(tmp_path: Path) -> Course:
    return Course(tmp_path)
