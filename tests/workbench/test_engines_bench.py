"""`distlab bench engines`: missed bars, and engines that are absent."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import engines
from benchmarks._bars import missed
from tests.corpora import outside_engines as outside

SAME = outside.Gaps(loss=0.0, weights=1e-16, accuracy=0.0)


@pytest.mark.parametrize("figure", ["loss", "weights", "accuracy"])
def test_a_difference_misses_its_bar(figure: str) -> None:
    name = "horovod_{}_n2"
    assert missed(engines.gap_lines(name, 1e-10, SAME)) == []
    other = replace(SAME, **{figure: 0.02})
    assert missed(engines.gap_lines(name, 1e-10, other)) == [f"horovod_{figure}_n2"]


def test_other_losses_and_weights_miss_theirs() -> None:
    base = {"losses": [1.0, 0.5], "weights": torch.ones(3)}
    assert missed(engines.compare("scratch_n2", base, base)) == []
    other = {"losses": [1.0, 0.5 + 1e-9], "weights": torch.ones(3) * 2}
    names = ["scratch_n2_loss", "scratch_n2_weights"]
    assert missed(engines.compare("scratch_n2", other, base)) == names


def test_an_engine_that_is_not_installed_is_named_with_its_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    absent = replace(outside.ENGINES["ray"], module="no_such_module")
    assert not absent.is_here
    monkeypatch.setattr(outside, "ENGINES", {"ray": absent})
    report = engines.measure(worlds=())
    assert report["not_measured"] == {"ray": "test-ray"}
    (said,) = engines.absent_engines(report)
    assert said.endswith("make test-ray")
