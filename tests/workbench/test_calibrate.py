"""Calibration: the file it writes, the whole procedure, and the verb.

The procedure is run twice: on a simulated machine whose times are known, where it must
find them again and predict without error, and on this one, where it must reach its end.
"""

from __future__ import annotations

import errno
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from distlab.cli import calibrate as verb
from distlab.cli.doctor import Finding
from distlab.grading.verdict import HARNESS
from distlab.runner import Limits, RankContext, RunnerError
from distlab.sim import run
from distlab.sim.calibration import trains
from distlab.sim.calibration.calibrate import (
    Calibration,
    Measurements,
    Prediction,
    calibrate,
    predict,
)
from distlab.sim.calibration.charge import run_charged
from distlab.sim.net.nets import as_data, from_data
from distlab.sim.net.piecewise import Piecewise
from distlab.simulated import play as simulated
from tests.workbench.golden import Golden

# ── the table's columns ─────────────────────────────────────────────────────────────


def test_columns_travel(tmp_path: Path) -> None:
    net = Piecewise(table=((0, 1.0), (9, 2.0)), adding_s=(0.25, 0.75))
    net.save(tmp_path / "link.json")
    assert Piecewise.load(tmp_path / "link.json") == net
    assert from_data(json.loads(json.dumps(as_data(net)))) == net
    assert net.operation_s(3) == pytest.approx(0.25 + 0.5 / 3)
    assert replace(net, adding_s=()).operation_s(3) == 0


def test_columns_that_cannot_be(tmp_path: Path, golden: Golden) -> None:
    path = tmp_path / "link.json"
    Piecewise(table=((0, 1.0), (9, 2.0))).save(path)
    data = json.loads(path.read_text())
    told = []
    columns: list[tuple[Any, str]] = [
        ([1.0], r"\b2\b.*\b1\b.*adding_s"),
        ([1.0, -1.0], r"-1\.0 .*\b9\b"),
        (["1", 2], "adding_s"),
        (7, "adding_s"),
    ]
    for column, named in columns:
        path.write_text(json.dumps({**data, "adding_s": column}))
        with pytest.raises(ValueError, match=named) as caught:
            Piecewise.load(path)
        told.append(str(caught.value))
    golden("calibration/broken-table", "\n".join(told))


# ── the whole procedure ─────────────────────────────────────────────────────────────

KIB = 1024
PLAN = Measurements(
    sizes=(0, 4 * KIB, 64 * KIB),
    held_out=(6 * KIB, 48 * KIB),
    more_ranks=(3,),
    held_out_more_ranks=(6 * KIB,),
)
KNOWN = Piecewise(
    table=((0, 50e-6), (4 * KIB, 60e-6), (64 * KIB, 90e-6)),
    back_and_forth_s=(40e-6, 45e-6, 70e-6),
    both_ways_s=(45e-6, 50e-6, 95e-6),
    adding_s=(1e-6, 2e-6, 9e-6),
)


class KnownMachine:
    """In place of a cluster: simulated ranks on a machine that is as `KNOWN` says.

    `slower` says how many times as long everything takes that is not in the table.
    """

    def __init__(self, slower: float = 1.0, **_: Any) -> None:
        self._slower = slower

    def __enter__(self) -> KnownMachine:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def run(
        self, program: Any, world_size: int, cases: Any, seconds: float, **options: Any
    ) -> Any:
        assert options["backend"] == "tcp"
        assert isinstance(options["limits"], Limits)
        done = run_charged(
            program, world_size, cases, 0.0, net=KNOWN, operation_s=KNOWN.operation_s
        )
        for rounds in done.values:
            for times in rounds:
                for i, (name, *_) in enumerate(cases):
                    times[i] *= self._slower if name in trains.ALGORITHMS else 1
        return done


@pytest.fixture(autouse=True)
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    # The simulated ranks are this process, and the tests after these need its cores.
    monkeypatch.setattr(trains, "take_a_processor", lambda rank, world_size: None)


def mean_err(found: Calibration) -> float:
    assert {p.world_size for p in found.proof} == {2, 3}
    assert {p.algorithm for p in found.proof} == set(trains.ALGORITHMS)
    return found.mean_err


@pytest.mark.usefixtures("known_machine")
def test_a_known_machine_is_found_again_and_predicted() -> None:
    found = calibrate(KnownMachine(), 1.0, plan=PLAN)
    for name in ("both_ways_s", "back_and_forth_s", "adding_s"):
        assert getattr(found.net, name) == pytest.approx(getattr(KNOWN, name), rel=1e-3)
    assert dict(found.net.table) == pytest.approx(dict(KNOWN.table), rel=1e-3)
    assert mean_err(found) < 1e-3
    assert not any(p.is_miss for p in found.proof)
    assert found.unrest == pytest.approx(0, abs=1e-6)


@pytest.mark.usefixtures("known_machine")
def test_a_machine_that_does_otherwise_is_missed() -> None:
    found = calibrate(KnownMachine(1.5), 1.0, plan=PLAN)
    assert mean_err(found) == pytest.approx(1 / 3, rel=1e-2)
    assert all(p.is_miss for p in found.proof)
    shown = "".join(line for _, line in verb.proof_lines(found))
    assert shown.count("-33\N{NO-BREAK SPACE}%") == len(found.proof)


@pytest.mark.parametrize(
    ("predicted_s", "is_miss"),
    [(1.09, False), (1.12, True), (0.91, False), (0.8, True)],
)
def test_a_miss_is_more_than_a_tenth_either_way(
    predicted_s: float, is_miss: bool
) -> None:
    facts = {"algorithm": "ring", "world_size": 2, "num_bytes": 1}
    assert Prediction(**facts, predicted_s=predicted_s, measured_s=1).is_miss is is_miss


def test_noise_does_not_make_more_bytes_faster() -> None:
    class Disturbed(KnownMachine):
        def run(self, program: Any, n: int, cases: Any, *args: Any, **kw: Any) -> Any:
            done = super().run(program, n, cases, *args, **kw)
            smallest = cases.index(trains.case(trains.ONE_WAY, 0))
            for rounds in done.values:
                for times in rounds:
                    times[smallest] *= 100
            return done

    found = calibrate(Disturbed(), 1.0, plan=replace(PLAN, more_ranks=()))
    seconds = [s for _, s in found.net.table]
    assert seconds == sorted(seconds)


def test_held_out_sizes_are_not_in_the_table() -> None:
    plan = Measurements()
    chunks = {size // n for size in plan.held_out for n in (1, 2)}
    assert not chunks & set(plan.sizes)
    assert max(plan.held_out) < max(plan.sizes)


def test_the_same_prediction_every_time() -> None:
    one = trains.case("ring all-reduce", 6 * KIB)
    assert predict(KNOWN, 2, one) == predict(KNOWN, 2, one) > 0


def test_a_train_of_nothing_known() -> None:
    with pytest.raises(ValueError, match="gossip"):
        trains.case("gossip", 1)


def double(tensor: Tensor) -> None:
    tensor += tensor


@pytest.mark.parametrize("adding_s", [(), (0.5, 1.5)])
def test_a_simulation_on_a_measured_machine_charges_the_function(
    adding_s: tuple[float, ...],
) -> None:
    net = Piecewise(table=((0, 1.0), (80, 1.0)), adding_s=adding_s)
    settings = {
        "functions": ["double"],
        "num_bytes": 40,
        "world_size": 2,
        "seed": 0,
        "net": as_data(net),
        "faults": {},
    }
    done = simulated._run(SimpleNamespace(double=double), settings)
    done.require_finished()
    assert done.time_s == pytest.approx(net.operation_s(40))


# ── the verb ────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_this_machine_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "laptop.json"
    code = verb.calibrate(out=str(out), seconds=0.1, as_json=True, plan=PLAN)
    told = json.loads(capsys.readouterr().out)
    assert code == 0
    net = Piecewise.load(out)
    assert [list(row) for row in net.table] == told["table"]["table"]
    assert net.adding_s
    assert told["rounds"] >= trains.LEAST_ROUNDS
    assert 0 < told["latency_s"] < 1
    algorithms = len(trains.ALGORITHMS)
    assert len(told["proof"]) == 2 * algorithms + algorithms - 1  # no doubling with 3
    assert all(one["measured_s"] > 0 for one in told["proof"])
    errors = [abs(p["error"]) for p in told["proof"] if p["world_size"] == 2]
    assert told["calibrated_mean_err"] == pytest.approx(sum(errors) / len(errors))
    assert [path.name for path in tmp_path.iterdir()] == ["laptop.json"]


@pytest.mark.usefixtures("known_machine")
def test_the_report_names_the_latency_and_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distlab.runner.Cluster", KnownMachine)
    monkeypatch.setenv("DISTLAB_STATE", str(tmp_path / "state"))
    assert verb.calibrate(seconds=1, plan=PLAN) == 0
    told = capsys.readouterr().out
    assert "latency 50.0 µs" in told
    assert re.search(r" 2 \w+: 0\.0", told)
    assert "link.json" in told.splitlines()[-1]
    assert (tmp_path / "state" / verb.LINK_FILE).is_file()


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 1e9])
def test_seconds_that_cannot_be(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(ValueError, match=re.escape(f"--seconds {seconds:g}:")):
        verb.calibrate(out=str(tmp_path / "x.json"), seconds=seconds)


def test_files_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "note.txt").write_text("milk")
    told = []
    for name, named in (
        (".", r"laptop\.json"),
        ("none/x.json", os.strerror(errno.ENOENT)),
        ("note.txt/x.json", os.strerror(errno.ENOTDIR)),
        ("note.txt", r"^note\.txt .*--out"),
    ):
        with pytest.raises(ValueError, match=named) as caught:
            verb.calibrate(out=name)
        told.append(str(caught.value))
    assert (tmp_path / "note.txt").read_text() == "milk"
    golden("calibration/no-such-file", "\n".join(told))


def test_no_connection_is_said_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Finding("loopback", "broken", "EPERM")
    monkeypatch.setattr("distlab.cli.doctor.check_loopback", lambda: broken)
    assert verb.calibrate(out=str(tmp_path / "x.json")) == HARNESS
    said = capsys.readouterr()
    assert not said.out
    assert re.search(r"127\.0\.0\.1.*EPERM", said.err)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("error", [RunnerError("rank 1 is gone"), KeyboardInterrupt()])
def test_what_ends_early_leaves_the_old_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    class Broken(KnownMachine):
        def run(self, *args: Any, **options: Any) -> Any:
            raise error

    monkeypatch.setattr("distlab.runner.Cluster", Broken)
    out = tmp_path / "link.json"
    KNOWN.save(out)
    if isinstance(error, RunnerError):
        assert verb.calibrate(out=str(out)) == HARNESS
    else:
        with pytest.raises(KeyboardInterrupt):
            verb.calibrate(out=str(out))
    assert Piecewise.load(out) == KNOWN
    assert len(list(tmp_path.iterdir())) == 1


def lose_one(context: RankContext) -> None:
    raise ValueError("port 7\nand more")


def test_ranks_that_fail_say_why_in_one_line(known_machine: None) -> None:
    class Failing(KnownMachine):
        def run(self, program: Any, world_size: int, *args: Any, **_: Any) -> Any:
            return run(lose_one, world_size)

    with pytest.raises(RunnerError, match=r"^port 7$"):
        calibrate(Failing(), 1.0, plan=PLAN)
