"""DCP folders of one process: written, read, converted, and refused in one sentence."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from distlab.cli.checkpoint import checkpoint
from distlab.dcp import DcpError, is_dcp, load_state
from distlab.dcp.files import METADATA, read, write
from distlab.engines import EngineError, dcp_state, saving
from tests.workbench.dcp_trainings import on_engine
from tests.workbench.fsdp2_script import Net, make_optimizer, samples

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

DATA = "__0_0.distcp"


def distlab(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "distlab", *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


NESTED: dict[str, Any] = {
    "model": {"a.weight": torch.arange(6.0).view(3, 2), "n": torch.tensor(3)},
    "optim": {
        "state": {"a.weight": {"step": torch.tensor(2.0), "count": 5}},
        "param_groups": [
            {"lr": 0.1, "betas": (0.9, 0.99), "params": ["a.weight"]},
            {"lr": 0.2, "betas": None, "params": []},
        ],
    },
    "half": torch.ones(2, dtype=torch.bfloat16),
}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "one", NESTED)
    assert is_dcp(folder)
    assert equal(read(folder), NESTED)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    with pytest.raises(DcpError, match="exists"):
        write(folder, NESTED)
    write(folder, {"x": 1}, replaces=True)
    assert read(folder) == {"x": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_value_that_could_not_be_read_back_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DcpError, match="'x'"):
        write(tmp_path / "one", {"x": object()})
    assert list(tmp_path.iterdir()) == []


def test_each_changed_byte_is_harmless_or_found(tmp_path: Path) -> None:
    folder = write(tmp_path / "one", NESTED)
    file = folder / DATA
    data, said = file.read_bytes(), list[str]()
    for place in range(0, len(data), 53):
        changed = bytearray(data)
        changed[place] ^= 5
        file.write_bytes(changed)
        try:
            assert equal(read(folder), NESTED), place
        except DcpError as error:
            said.append(str(error))
    assert len(said) > 40
    assert not any("\n" in line for line in said)


def _cut(folder: Path) -> None:
    data = (folder / DATA).read_bytes()
    (folder / DATA).write_bytes(data[: len(data) // 2])


def _garbled(folder: Path) -> None:
    (folder / METADATA).write_bytes(b"garbage")


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("ran",))


def _evil(folder: Path) -> None:
    (folder / METADATA).write_bytes(pickle.dumps(Evil()))


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "cut": _cut,
    "file missing": lambda folder: (folder / DATA).unlink(),
    "no metadata": lambda folder: (folder / METADATA).unlink(),
    "garbled": _garbled,
    "a pickle": _evil,
    "nothing": shutil.rmtree,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_refused_in_one_sentence(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "one", NESTED)
    DAMAGE[damage](folder)
    with pytest.raises(DcpError) as refusal:
        load_state(folder)
    assert str(folder) in str(refusal.value)
    assert "\n" not in str(refusal.value)
    with pytest.raises(EngineError):
        saving.load(folder, None)
    assert "ran" not in capsys.readouterr().out


def test_with_damaged_weights_the_checkpoint_before_is_taken(tmp_path: Path) -> None:
    on_engine(1, "sgd", 2, checkpoint_dir=tmp_path, checkpoint_format="dcp")
    newest = tmp_path / "epoch_0002"
    began = dcp_state.began(newest)
    with (newest / METADATA).open("rb") as file:
        places = pickle.load(file).storage_data
    first = next(place for at, place in places.items() if at.fqn.startswith("model."))
    data = bytearray((newest / DATA).read_bytes())
    data[first.offset + first.length // 2] ^= 1
    (newest / DATA).write_bytes(data)
    with pytest.raises(DcpError):
        read(newest)
    assert dcp_state.began(newest) == began > 0
    found = saving.load(True, tmp_path)
    assert found is not None
    assert len(found["rows"]) == 1
    (said,) = found["passed_over"]
    assert str(newest) in said
    assert "earlier training" not in said


def stepped(kind: str = "adamw") -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net()
    optimizer = make_optimizer(kind, model)
    inputs, targets = samples()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


class App:
    """As in PyTorch's tutorial."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def state_dict(self) -> dict[str, Any]:
        return self.content

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("layout", ["app", "optimizer", "flattened", "torchtitan"])
def test_the_layouts_of_other_scripts_are_read(layout: str, tmp_path: Path) -> None:
    model, optimizer = stepped()
    weights, moments = get_state_dict(model, optimizer)
    flat = get_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )[1]
    made: dict[str, Any] = {
        "app": {"app": App({"model": weights, "optim": moments})},
        "optimizer": {"model": weights, "optimizer": moments, "epoch": 3},
        "flattened": {"model": weights, "optim": flat},
        "torchtitan": {**weights, "optimizer": flat},
    }
    save(made[layout], checkpoint_id=tmp_path / "one", no_dist=True)
    found = load_state(tmp_path / "one")
    assert equal(found.model, dict(weights))
    before: Any = moments["param_groups"]
    states: Any = moments["state"]
    assert equal(found.optim["state"], dict(states))
    groups = found.optim["param_groups"]
    assert [set(g["params"]) for g in groups] == [set(g["params"]) for g in before]
    assert [g["lr"] for g in groups] == [g["lr"] for g in before]


@pytest.mark.parametrize("kind", ["adamw", "momentum", "sgd"])
def test_a_converted_checkpoint_has_what_torch_asks_for(
    kind: str, tmp_path: Path
) -> None:
    on_engine(1, kind, 1, checkpoint_dir=tmp_path / "ours")
    saved = saving.load(True, tmp_path / "ours")
    assert saved is not None
    there, back = tmp_path / "there", tmp_path / "back"
    for source, target in ((tmp_path / "ours", there), (there, back)):
        assert checkpoint(source, target, program="", as_json=True) == 0
    again = saving.load(True, back)
    assert again is not None
    assert equal(again["weights"], saved["weights"])
    assert equal(again["optimizer"]["param_groups"], saved["optimizer"]["param_groups"])
    for name, own in saved["optimizer"]["state"].items():
        assert equal(again["optimizer"]["state"][name], own)
    for name in ("rows", "losses", "num_steps", "began"):
        assert again[name] == saved[name]
    model = Net()
    optimizer = make_optimizer(kind, model)
    weights, moments = get_state_dict(model, optimizer)
    load({"model": weights, "optim": moments}, checkpoint_id=there, no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    assert equal(dict(model.state_dict()), saved["weights"])
    states = optimizer.state_dict()["state"]
    assert len(states) == (0 if kind == "sgd" else 11)  # two of them were never used


def test_a_script_s_folder_says_at_most_how_far_it_was(tmp_path: Path) -> None:
    weights, moments = get_state_dict(*stepped())
    state = {"model": weights, "optim": moments, "distlab": {"step": 4, "epoch": 2}}
    save(state, checkpoint_id=tmp_path / "one", no_dist=True)
    history = on_engine(1, "adamw", 3, resume_from_checkpoint=tmp_path / "one")
    assert [row.epoch for row in history.epochs] == [1, 2, 3]
    assert len(history.losses) == 6


@pytest.mark.parametrize("change", ["name", "shape", "kind", "no optimizer"])
def test_a_folder_of_another_model_is_refused(change: str, tmp_path: Path) -> None:
    model, optimizer = stepped("momentum" if change == "kind" else "adamw")
    weights, moments = get_state_dict(model, optimizer)
    if change == "name":
        weights["other"] = weights.pop("scale")
    elif change == "shape":
        weights["scale"] = torch.ones(4, dtype=torch.double)
    state: dict[str, Any] = {"model": weights, "optim": moments}
    if change == "no optimizer":
        state.pop("optim")
    save(state, checkpoint_id=tmp_path / "one", no_dist=True)
    with pytest.raises(EngineError) as refusal:
        on_engine(1, "adamw", 3, resume_from_checkpoint=tmp_path / "one")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("source", "target", "program"),
    [
        ("missing", "", ""),
        ("empty", "", ""),
        ("text", "", ""),
        ("foreign", "taken", "train"),
        ("foreign", "new", ""),
        ("foreign", "new", "ddp"),
        ("foreign", "new", "horovod"),
        ("cut", "new", "train"),
    ],
)
def test_the_command_refuses_and_leaves_everything(
    source: str, target: str, program: str, tmp_path: Path
) -> None:
    weights, moments = get_state_dict(*stepped())
    for name in ("foreign", "cut"):
        place = tmp_path / name
        save({"model": weights, "optim": moments}, checkpoint_id=place, no_dist=True)
    _cut(tmp_path / "cut")
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("hello")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("mine")
    before = sorted(path for path in tmp_path.rglob("*"))
    named = {"foreign": target if target == "taken" else "--for"}.get(source, source)
    with pytest.raises(ValueError, match=named) as refusal:
        checkpoint(
            tmp_path / source,
            tmp_path / target if target else None,
            program=program,
            as_json=True,
        )
    assert "\n" not in str(refusal.value)
    assert sorted(path for path in tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_the_command_converts_a_script_s_folder(tmp_path: Path) -> None:
    weights, moments = get_state_dict(*stepped())
    state = {"model": weights, "optim": moments, "distlab": {"step": 4, "epoch": 2}}
    save(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    for program, name in (("train", "epoch_0002.pt"), ("library", "step-4.json")):
        line = "checkpoint", "theirs", program, "--for", program, "--json"
        said = distlab(*line, cwd=tmp_path)
        assert said.returncode == 0, said.stderr
        found = json.loads(said.stdout)
        assert (found["step"], found["epoch"]) == (4, 2)
        assert (tmp_path / program / name).is_file()
    refused = distlab("checkpoint", "theirs", "train", cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    history = on_engine(
        1, "adamw", 3, checkpoint_dir=tmp_path / "train", resume_from_checkpoint=True
    )
    assert len(history.epochs) == 3
