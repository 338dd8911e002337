"""`distlab bench compression` must be able to fail: what is wrong misses its bar."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks import compression as bench
from benchmarks._bars import missed
from benchmarks._compression_ranks import BYTE_STEPS, DENSE_STEPS, POWER_STEPS
from distlab.runner import Cluster

DENSE = 1_000_000.0
RIGHT = {
    "dense": 1.0,
    "fp16": 0.5,
    "bf16": 0.5,
    "int8": 0.251,
    "sign1": 0.0315,
    "topk1": 0.01,  # times n
    "powersgd4": bench.powersgd_share(),
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(preload=("torch._dynamo", "benchmarks._compression_ranks")) as ranks:
        yield ranks


def sent(n: int, **planted: float) -> dict[str, float]:
    """Bytes by hook; `planted` replaces shares."""
    shares = RIGHT | planted
    shares["topk1"] *= n
    return {name: share * DENSE for name, share in shares.items()}


def test_the_formula_of_powersgd_is_that_of_the_convnet() -> None:
    matrices = 4 * (16 + 25) + 4 * (32 + 400) + 4 * (128 + 512) + 4 * (10 + 128)
    others = 16 + 32 + 128 + 10
    assert bench.powersgd_share() == (matrices + others) / 80_202


def test_what_the_formulas_say_meets_the_bars() -> None:
    results = bench.bytes_results({n: sent(n) for n in bench.WORLDS})
    assert missed(results) == []
    assert [result["name"] for result in results] == [
        f"bytes_{name}" for name in RIGHT if name != "dense"
    ]
    assert results[0]["bytes_per_step"]["n2"] == DENSE / 2 / BYTE_STEPS


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("fp16", 0.51),
        ("bf16", 1.0),
        ("int8", 0.27),
        ("int8", 0.2),
        ("sign1", 0.034),
        ("topk1", 0.0102),
        ("topk1", 0.015),  # indices of 8 bytes
        ("powersgd4", 0.0648),
        ("powersgd4", 0.0646),
    ],
)
def test_planted_bytes_on_one_world_size_miss_the_bar(name: str, share: float) -> None:
    planted = {2: sent(2), 4: sent(4, **{name: share})}
    assert missed(bench.bytes_results(planted)) == [f"bytes_{name}"]


def test_a_planted_accuracy_misses_the_bar_only_with_error_feedback() -> None:
    percent = {"dense": 98.0, "topk1": 97.4, "int8": 97.5, "topk1_without": 60.0}
    results = bench.accuracy_results(percent, ("digits", 30))
    assert missed(results) == ["acc_delta_topk1"]
    found = {result["name"]: result for result in results}
    assert found["acc_delta_topk1_without"]["value"] == 38.0
    assert "bar" not in found["acc_delta_topk1_without"]
    assert {result["note"] for result in results} == {"digits"}


def test_a_planted_difference_to_torchs_powersgd_misses_the_bar() -> None:
    assert bench.powersgd_result([0.0, 1e-5])["met"]
    assert not bench.powersgd_result([2e-5, 0.0])["met"]


def test_a_missed_bar_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = [bench.powersgd_result([1.0]), *bench.bytes_results({2: sent(2)})]

    monkeypatch.setattr("sys.argv", ["compression.py"])
    assert bench.BENCH.main(lambda: planted) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "MISSED" in line] == [
        "powersgd_max_difference"
    ]


@pytest.mark.slow
def test_real_ranks_meet_the_bars_of_bytes_and_of_torchs_powersgd(
    cluster: Cluster,
) -> None:
    assert missed(bench.bytes_results(bench.sent_bytes(cluster, "reference"))) == []
    assert bench.beside_torchs(cluster, "reference")["value"] < 1e-12
    assert DENSE_STEPS >= 2 <= POWER_STEPS  # torch needs the one, a residual the other
