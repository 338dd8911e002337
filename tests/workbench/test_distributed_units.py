"""Whose code `distlab.distributed` runs, and what is said when it raises an error."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import distlab.distributed as dist
from distlab.cli.demo import demo
from distlab.comm import PeerLost
from distlab.curriculum import load_curriculum
from distlab.distributed import example, parts
from distlab.grading.kit.torchrun_env import like_torchrun
from distlab.runner import Cluster, Limits, RankContext
from tests.workbench.course import ROOT, Course
from tests.workbench.launching import torchrun

PATIENCE_S = 60.0
PATIENT = Limits(seconds=300)


@pytest.fixture
def course(tmp_path: Path) -> Course:
    """A learner who has written every solution."""
    found = Course(tmp_path)
    for unit in load_curriculum(ROOT).units.values():
        shutil.copy(unit.solution(ROOT), unit.template(found.root))
    return found


def stand_in(course_root: str, state: str, code: str) -> None:
    """Use the units of this course in this rank."""
    os.environ["DISTLAB_STATE"] = state
    os.environ["DISTLAB_IMPL"] = code
    parts.forget(root=Path(course_root))


def trains(
    context: RankContext, root: str, state: str, code: str, backend: str
) -> dict[str, Any]:
    stand_in(root, state, code)
    like_torchrun(context, PATIENCE_S)
    dist.init_process_group(backend, timeout_s=PATIENCE_S)
    trained = example.train(num_epochs=3)
    units = dist.get_distributed_info()["units"]
    dist.destroy_process_group()
    return {
        "weights": trained.weights,
        "losses": trained.losses,
        "whose": [row["whose"] for row in units],
    }


@pytest.mark.parametrize(
    "backend", ["gloo", pytest.param("tcp", marks=pytest.mark.slow)]
)
def test_solutions_as_mine_give_the_same_bits(
    course: Course, cluster: Cluster, backend: str
) -> None:
    place = str(course.root), str(course.state)
    found = {}
    for code in ("mine", "reference"):
        run = cluster.run(trains, 2, *place, code, backend, limits=PATIENT)
        found[code] = run.require_finished().values
        for value in found[code]:
            assert value["whose"] == [code] * len(parts.tasks())
    weights = [value["weights"] for code in found for value in found[code]]
    assert all(torch.equal(weights[0], other) for other in weights[1:])
    losses = found["mine"][0]["losses"]
    assert len(losses) == 3
    assert losses[2] < losses[0] / 1.5


def break_(course: Course, unit: str, old: str, new: str) -> int:
    """Change the learner's file; the number of the line that is new."""
    path = load_curriculum(course.root).units[unit].template(course.root)
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), encoding="utf-8")
    return text[: text.index(old)].count("\n") + 1


def raises(context: RankContext, root: str, state: str, call: str) -> str:
    stand_in(root, state, "mine")
    like_torchrun(context, PATIENCE_S)
    try:
        dist.init_process_group("tcp", timeout_s=PATIENCE_S)
        if call == "broadcast":
            dist.broadcast(torch.ones(2))
        if call == "backward":
            model = dist.DistributedDataParallel(torch.nn.Linear(2, 1))
            model(torch.ones(1, 2)).sum().backward()
    except dist.UnitError as error:
        return str(error)
    except PeerLost:  # rank 0 keeps the store; it ended with the error first
        assert call == "init"
    return "no error"


BROKEN = {
    "broadcast": (
        "collectives",
        "    for dst in range(comm.world_size):\n        if dst != src:\n",
        "    for dst in comm.world_size:\n        if dst != src:\n",
        "1.3 collectives.broadcast",
        "TypeError: 'int' object is not iterable",
    ),
    "backward": (
        "distributed_data_parallel",
        "            pack(bucket.gradients(), bucket.flat)\n",
        "            pack(bucket.gradient(), bucket.flat)\n",
        "3.10 distributed_data_parallel.hooks",
        "AttributeError: 'Bucket' object has no attribute 'gradient'",
    ),
    "init": (
        "process_group",
        '        values[key] = request.value\n        return ""\n',
        '        values[key] = request.valu\n        return ""\n',
        "3.17 process_group.rendezvous",
        "AttributeError: 'Request' object has no attribute 'valu'",
    ),
}


@pytest.mark.parametrize("call", BROKEN)
def test_a_unit_that_raises_is_named_in_one_line(
    course: Course, cluster: Cluster, call: str
) -> None:
    unit, old, new, task, error = BROKEN[call]
    line = break_(course, unit, old, new)
    n = 2 if call == "init" else 1  # a single rank meets no other rank
    run = cluster.run(
        raises, n, str(course.root), str(course.state), call, limits=PATIENT
    )
    said = [value for value in run.require_finished().values if value != "no error"]
    assert said
    path = rf"{load_curriculum(ROOT).units[unit].folder}/template_{unit}\.py:{line}"
    task_id = task.partition(" ")[2]
    for sentence in said:
        assert "\n" not in sentence
        assert re.fullmatch(
            rf"{re.escape(task)} \(.*{path}\) .*{error}.*"
            rf"`distlab use reference {task_id}`.*",
            sentence,
        )


def test_an_error_of_the_callers_module_is_no_units() -> None:
    dist.init_process_group(world_size=1, rank=0)
    try:
        model = dist.DistributedDataParallel(torch.nn.Linear(2, 1))
        with pytest.raises(RuntimeError, match="1x3") as raised:
            model(torch.ones(1, 3))
        assert not isinstance(raised.value, dist.UnitError)
    finally:
        dist.destroy_process_group()


# ── the demo of phase 3 ─────────────────────────────────────────────────────────────


def test_the_demo_trains_as_one_process(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("distlab.runner.Cluster", lambda preload: nullcontext(cluster))
    assert demo(phase=3, world_size=3, epochs=1, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["difference"] < 1e-12
    assert len(set(found["digests"])) == 1
    assert (found["code"], found["whose"], len(found["losses"])) == ("reference", {}, 1)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"world_size": 17}, "choose between 1 and 16"),
        ({"epochs": 0}, "choose at least 1"),
        ({"code": __file__}, "--code is mine or reference"),
    ],
)
def test_what_the_demo_refuses(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        demo(phase=3, **arguments)


@pytest.mark.slow
def test_the_demo_on_the_learners_own_library(course: Course) -> None:
    line = "demo", "--phase", "3", "-n", "2", "--epochs", "1", "--code", "mine"
    done = course.distlab(*line, "--json")
    assert done.code == 0, done.said
    found = json.loads(done.out)
    assert set(found["whose"].values()) == {"mine"}
    assert "3.17" in found["whose"]


@pytest.mark.slow
def test_the_example_under_torchrun(here: Course, tmp_path: Path) -> None:
    done = here.python(
        *torchrun(tmp_path, 2)[1:],
        *("--local-addr=127.0.0.1", "-m", "distlab.distributed.example"),
        *("--backend", "tcp", "--epochs", "1"),
        OMP_NUM_THREADS="1",
    )
    assert done.code == 0, done.err
    assert " 2 ranks" in done.out
