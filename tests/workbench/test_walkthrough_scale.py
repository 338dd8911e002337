"""The sections at real scale of the walkthroughs: their rows are consistent."""

from __future__ import annotations

import pytest

from distlab.given.planning import Batch, Layout
from distlab.walkthroughs import scale


@pytest.fixture(autouse=True)
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISTLAB_IMPL", "reference")


def numbers(row: dict[str, float | str]) -> dict[str, float]:
    return {name: float(cell) for name, cell in row.items()}


@pytest.mark.parametrize("tokens", [512, 4096])
def test_gradients_are_exposed_as_far_as_the_backward_pass_is_too_short(
    tokens: int,
) -> None:
    rows = scale.gradients("llama-2-7b", (8, 64), tokens)
    for row in map(numbers, rows.values()):
        left = row["ring (ms)"] - row["backward (ms)"]
        assert row["exposed (ms)"] == pytest.approx(max(0, left))
    star_s = 2 * 63 * (5e-6 + 2 * 6_738_415_616 / 50e9)
    assert numbers(rows["64"])["star (ms)"] == pytest.approx(1e3 * star_s)


def test_only_splitting_the_model_makes_it_fit() -> None:
    rows = [numbers(row) for row in scale.memory("llama-2-7b", 4096).values()]
    for row in rows:
        parts = sum(row[name] for name in row if name != "total (GB)")
        assert row["total (GB)"] == pytest.approx(parts)
    totals = [row["total (GB)"] for row in rows]
    assert totals[:5] == sorted(totals[:5], reverse=True)
    assert [total < 80 for total in totals] == [False] * 5 + [True] * 2


def test_layouts_name_their_degrees_and_refuse_what_is_not_valid() -> None:
    batch = Batch(sequence=8192, global_batch=512)
    rows = scale.layouts("llama-3-70b", 8, batch, [Layout(data=4, context=2)])
    assert list(rows) == ["4 data × 2 context"]
    with pytest.raises(ValueError, match="3 tensor ranks"):
        scale.layouts("llama-3-70b", 3, batch, [Layout(tensor=3)])


def test_more_gpus_leave_less_of_a_month() -> None:
    rows = scale.failures((1024, 16_384), 60, 16)
    small, large = (numbers(row) for row in rows.values())
    assert small["goodput (%)"] > large["goodput (%)"] == pytest.approx(87.4, abs=0.1)
    assert large["days"] == pytest.approx(3000 / large["goodput (%)"])
