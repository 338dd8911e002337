"""The engines of the core on two real ranks: fields, checkpoints, scripts, failures."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from distlab.engines import EngineError, PyTorchDDPTrainer
from distlab.engines.torch_strategy import layers_of
from distlab.runner import Cluster
from tests.corpora import engine_ranks as ranks

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
CORE = ("pytorch-ddp", "fsdp2", "scratch")
KINDS = ({}, {"zero_stage": 1}, {"backend": "fsdp2"}, {"backend": "scratch"})
Results = dict[str, Any]


def cases(folder: Path) -> dict[str, dict[str, Any]]:
    """By name what is trained, all of it in the same two processes."""
    named: dict[str, dict[str, Any]] = {}
    for backend in CORE:
        own = {"backend": backend}
        named[backend] = {**own, "validates": True}
        named[f"{backend} accumulates"] = {
            **own,
            "batch_size": 4,
            "gradient_accumulation_steps": 2,
        }
        named[f"{backend} clips"] = {**own, "gradient_clipping": 0.5}
    named["offloads"] = {"backend": "fsdp2", "offload_params": True}
    named["offloads both"] = {**named["offloads"], "offload_optimizer": True}
    for name in ("fp16", "powersgd", "bf16"):
        named[f"compression {name}"] = {"compression": name}
    named["scales"] = {"lr_scaling": "linear", "max_steps": 1}
    with_state = {"optimizer": "momentum"}
    named["unbroken"] = {**with_state, "epochs": 3}
    named["stage 2"] = {**with_state, "backend": "fsdp2", "zero_stage": 2, "epochs": 3}
    for index, kind in enumerate(KINDS):
        place = folder / str(index)
        named[f"saves {index}"] = {**with_state, **kind, "checkpoint_dir": str(place)}
        for other in range(len(KINDS)):
            source = str(folder / str(other) / "epoch_0002.pt")
            named[f"{index} continues {other}"] = {
                **with_state,
                **kind,
                "epochs": 3,
                "resume_from_checkpoint": source,
            }
    saves = {name: case for name, case in named.items() if name.startswith("saves")}
    return {**saves, **{n: c for n, c in named.items() if n not in saves}}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    named = cases(tmp_path_factory.mktemp("checkpoints"))
    with Cluster() as cluster:
        found = ranks.on_ranks(cluster, 2, list(named.values()))
    return dict(zip(named, found, strict=True))


def same(results: Results, one: str, other: str) -> bool:
    return all(
        torch.allclose(a["weights"], b["weights"], rtol=0, atol=1e-12)
        and a["losses"] == pytest.approx(b["losses"], abs=1e-12)
        for a, b in zip(results[one], results[other], strict=True)
    )


def test_engines_agree_and_so_do_all_ranks(results: Results) -> None:
    for name in CORE:
        first, second = results[name]
        assert torch.equal(first["weights"], second["weights"])
        assert first["losses"] == second["losses"]
        assert first["epochs"] == second["epochs"]
        assert same(results, name, "pytorch-ddp")
        assert 0 < first["epochs"][-1]["accuracy"] <= 1


def test_they_take_the_steps_of_a_single_process(results: Results) -> None:
    train, val = ranks.loaders()
    trainer = PyTorchDDPTrainer(
        ranks.make_mlp(), optimizer=ranks.sgd, epochs=2, verbose=False
    )
    alone = trainer.fit(train, val)
    assert results["fsdp2"][0]["losses"] == pytest.approx(alone.losses, abs=1e-12)
    last = results["fsdp2"][0]["epochs"][-1]
    assert last["accuracy"] == alone.epochs[-1].accuracy
    assert last["val_loss"] == pytest.approx(alone.epochs[-1].val_loss, abs=1e-12)


def test_microbatches_and_clipping_are_the_same_on_every_engine(
    results: Results,
) -> None:
    for name in CORE:
        assert same(results, f"{name} accumulates", "pytorch-ddp")
        assert same(results, f"{name} clips", "pytorch-ddp clips")
    assert not same(results, "pytorch-ddp clips", "pytorch-ddp")


def test_the_rate_grows_with_the_ranks(results: Results) -> None:
    for rank in results["scales"]:
        assert rank["epochs"][-1]["learning_rate"] == 2 * ranks.LEARNING_RATE


def test_offloading_and_compression(results: Results) -> None:
    assert same(results, "offloads", "pytorch-ddp")
    assert same(results, "offloads both", "pytorch-ddp")
    for name in ("fp16", "powersgd"):
        assert not same(results, f"compression {name}", "pytorch-ddp")
    first = results["pytorch-ddp"][0]["losses"]
    assert results["compression fp16"][0]["losses"] == pytest.approx(first, abs=1e-3)
    assert "bfloat16" in results["compression bf16"][0]


def test_a_checkpoint_of_one_engine_is_continued_by_every_engine(
    results: Results,
) -> None:
    assert same(results, "stage 2", "unbroken")
    for one in range(len(KINDS)):
        for other in range(len(KINDS)):
            assert same(results, f"{one} continues {other}", "unbroken"), (one, other)


def test_layers_are_sharded_one_by_one_unless_they_share_a_parameter() -> None:
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    model = torch.nn.Sequential(inner, torch.nn.Linear(2, 2))
    assert layers_of(model) == [inner[0], model[1]]
    model[1].weight = inner[0].weight
    assert layers_of(model) == []


# ── in an ordinary script ───────────────────────────────────────────────────────────

SCRIPT = """
import json, sys, torch
from torch.utils.data import DataLoader, TensorDataset
from distlab.engines import PyTorchDDPTrainer

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
    def forward(self, x):
        return self.layer(x)

torch.manual_seed(1)
inputs = torch.randn(24, 4)
data = TensorDataset(inputs, (inputs[:, 0] > 0).long())
model = Net()
trainer = PyTorchDDPTrainer(model, epochs=2, verbose=False, **json.loads(sys.argv[1]))
history = trainer.fit(DataLoader(data, 4, shuffle=True), DataLoader(data, 4))
line = {"n": history.num_gpus, "backend": history.backend, "losses": history.losses}
print(json.dumps({**line, "bias": model.layer.bias.tolist()}), flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def run(*command: object, folder: Path) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    lines = [
        line[line.index("{") :] for line in done.stdout.splitlines() if "{" in line
    ]
    return [json.loads(line) for line in lines]


def test_a_script_starts_its_ranks_or_joins_a_job(script: Path) -> None:
    """Without a main guard, and by `distlab train`; the losses are equal."""
    (two,) = run(script, '{"num_gpus": 2}', folder=script.parent)
    assert (two["n"], two["backend"]) == (2, "pytorch-ddp")
    flags = ("--script", script, "--backend", "fsdp2", "--num-gpus", 2)
    own = run("-m", "distlab", "train", *flags, "--", "{}", folder=script.parent)
    assert [(line["n"], line["backend"]) for line in own] == [(2, "fsdp2")] * 2
    for line in own:
        assert line["losses"] == pytest.approx(two["losses"], abs=1e-6)
        assert line["bias"] == pytest.approx(two["bias"], abs=1e-6)


def wrong_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if int(os.environ["RANK"]) == 1:
        raise RuntimeError("the loss is wrong\nsecond line")
    return torch.nn.functional.cross_entropy(outputs, targets)


def test_a_rank_that_fails_is_named_in_one_line() -> None:
    inputs = torch.randn(8, 2)
    data = DataLoader(TensorDataset(inputs, torch.zeros(8, dtype=torch.long)), 2)
    trainer = PyTorchDDPTrainer(torch.nn.Linear(2, 2), loss=wrong_loss, num_gpus=2)
    with pytest.raises(EngineError, match=r"rank 1 .*RuntimeError: the loss is wrong"):
        trainer.fit(data)
