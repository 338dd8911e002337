"""What a training of the engines goes on from, and where it ends then."""

from __future__ import annotations

import re
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from distlab.engines import (
    DistributedConfig,
    EngineError,
    PyTorchDDPTrainer,
    records,
    saving,
    torch_strategy,
    worker,
)
from distlab.engines.job import TrainingJob
from distlab.engines.loaders import read_loader
from distlab.engines.strategy import Strategy
from distlab.engines.worker import train
from tests.workbench.engine_probes import RATE, Net, fit, loader, sgd

WAIT_S = 20.0  # for a rank that will not come: the test has failed then


@pytest.mark.parametrize("max_steps", [2, 3])
def test_a_checkpoint_that_has_all_steps_is_not_trained_on(
    max_steps: int, tmp_path: Path
) -> None:
    first = fit(checkpoint_dir=tmp_path)
    assert len(first.losses) == 3
    Net.seen.clear()
    again = fit(
        max_steps=max_steps,
        epochs=9,
        checkpoint_dir=tmp_path,
        resume_from_checkpoint=True,
    )
    assert Net.seen == []
    assert (again.stopped_by, again.losses) == ("max_steps", first.losses)
    assert again.epochs == first.epochs


class Meeting:
    """Sums tensors of several ranks, which are threads of this process."""

    def __init__(self, world_size: int) -> None:
        self.barrier = Barrier(world_size, timeout=WAIT_S)
        self.parts: dict[int, torch.Tensor] = {}

    def sum(self, rank: int, tensor: torch.Tensor) -> torch.Tensor:
        self.parts[rank] = tensor.clone()
        self.barrier.wait()
        total = torch.stack(list(self.parts.values())).sum(0)
        self.barrier.wait()
        return tensor.copy_(total)


class RankInThread(Strategy):
    """A rank of a `Meeting`; it keeps its gradients to itself."""

    device = torch.device("cpu")

    def __init__(self, config: DistributedConfig, rank: int, meeting: Meeting) -> None:
        super().__init__(config)
        self.rank, self.world_size = rank, meeting.barrier.parties
        self.meeting = meeting
        self.module = self.forward = Net()
        self.optimizer = sgd(self.module.parameters())

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.meeting.sum(self.rank, tensor)


def in_threads(configs: list[DistributedConfig]) -> list[Any]:
    """What each rank gives back or raises."""
    meeting = Meeting(len(configs))

    def run(rank: int) -> Any:
        config = configs[rank]
        job = TrainingJob(
            model=Net(),
            loss=torch.nn.functional.cross_entropy,
            optimizer=sgd,
            train=read_loader(loader(), None, "train_loader"),
            val=None,
            config=config,
            verbose=False,
        )
        try:
            return train(job, RankInThread(config, rank, meeting))
        except EngineError as error:
            return error

    with ThreadPoolExecutor(len(configs)) as threads:
        return list(threads.map(run, range(len(configs))))


@pytest.mark.parametrize("others", ["nothing", "an older one"])
def test_ranks_that_find_different_checkpoints_do_not_begin(
    others: str, tmp_path: Path
) -> None:
    folders = tmp_path / "node 0", tmp_path / "node 1"
    fit(epochs=2, checkpoint_dir=folders[0])
    if others == "an older one":
        fit(epochs=1, checkpoint_dir=folders[1])
    configs = [
        DistributedConfig(
            num_gpus=2, epochs=3, checkpoint_dir=one, resume_from_checkpoint=True
        )
        for one in folders
    ]
    said = "different checkpoints: checkpoint_dir must be a folder that all nodes share"
    for outcome in in_threads(configs):
        assert isinstance(outcome, EngineError)
        assert said in str(outcome)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """With a number of NumPy's, as np.logspace gives one."""
    decay = np.logspace(-4, -2, 3)[0]
    return torch.optim.AdamW(parameters, lr=0.1, weight_decay=decay)


class Counting(Net):
    """Has state besides parameters and buffers."""

    calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += self.training
        return super().forward(inputs)


def trained(
    folder: Path, model: Any = None, optimizer: Any = adamw, **more: Any
) -> Any:
    net = model or Net()
    trainer = PyTorchDDPTrainer(
        net, optimizer=optimizer, verbose=False, checkpoint_dir=folder, **more
    )
    return trainer.fit(loader()), net


@pytest.mark.parametrize("backend", ["pytorch-ddp", "scratch", "fsdp2"])
def test_numbers_of_numpy_and_extra_state_are_resumed(
    backend: str, tmp_path: Path
) -> None:
    whole, net = trained(tmp_path / "a", Counting(), epochs=2, backend=backend)
    trained(tmp_path / "b", Counting(), epochs=1, backend=backend)
    resume = {"resume_from_checkpoint": True, "backend": backend}
    again, other = trained(tmp_path / "b", Counting(), epochs=2, **resume)
    assert again.losses == whole.losses
    assert (net.calls, other.calls) == (6, 6)


def test_a_state_that_no_checkpoint_can_hold_is_refused_before_a_step(
    tmp_path: Path,
) -> None:
    def odd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": parameters, "kind": Path}], lr=0.1)

    Net.seen.clear()
    with pytest.raises(EngineError, match="Path"):
        trained(tmp_path, optimizer=odd)
    assert Net.seen == []
    assert [*tmp_path.iterdir()] == []


def test_the_newest_is_the_one_of_the_most_epochs(tmp_path: Path) -> None:
    for epoch in (9998, 9999, 10000, 10001):
        saving.save(tmp_path, epoch, {})
    found = saving.load(True, tmp_path)
    assert found is not None
    assert (found["epoch"], found["passed_over"]) == (10001, [])
    broken = tmp_path / "epoch_10001.pt"
    data = bytearray(broken.read_bytes())
    data[len(data) // 2] ^= 1
    broken.write_bytes(data)
    found = saving.load(True, tmp_path)
    assert found is not None
    assert found["epoch"] == 10000
    assert len(found["passed_over"]) == 1
    assert "epoch_10001.pt" in found["passed_over"][0]


def flipped(path: Path) -> None:
    """One bit of a weight: torch.load doesn't see it."""
    with zipfile.ZipFile(path) as archive:
        (entry,) = [e for e in archive.infolist() if e.filename.endswith("data/0")]
        value = archive.read(entry)
    data = bytearray(path.read_bytes())
    data[data.index(value)] ^= 1
    path.write_bytes(data)


def linked_to_nothing(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.parent / "not mounted")


def emptied(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("harm", [flipped, linked_to_nothing, emptied])
def test_a_checkpoint_that_cannot_be_loaded_is_never_a_fresh_start(
    harm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = trained(tmp_path, epochs=2)
    harm(tmp_path / "epoch_0002.pt")
    again, _ = trained(tmp_path, epochs=2, resume_from_checkpoint=True)
    assert again.losses == first.losses
    assert "epoch_0002.pt" in capsys.readouterr().err
    for path in tmp_path.glob("epoch_*.pt"):
        harm(path)
    kept = sorted(tmp_path.rglob("*"))
    Net.seen.clear()
    with pytest.raises(EngineError, match=r"epoch_0002\.pt.*epoch_0001\.pt"):
        trained(tmp_path, epochs=2, resume_from_checkpoint=True)
    assert Net.seen == []
    assert sorted(tmp_path.rglob("*")) == kept


def test_a_folder_that_cannot_be_listed_is_never_a_fresh_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "link").symlink_to(tmp_path / "not mounted")
    for name in ("file", "link"):
        with pytest.raises(EngineError, match=name):
            saving.load(True, tmp_path / name)
    assert saving.load(True, tmp_path / "new") is None


def test_an_error_on_one_rank_is_one_on_all(tmp_path: Path) -> None:
    folders = tmp_path / "node 0", tmp_path / "node 1"
    for folder in folders:
        fit(epochs=1, checkpoint_dir=folder)
    emptied(folders[1] / "epoch_0001.pt")
    (tmp_path / "file").write_text("no folder")
    file = tmp_path / "file"
    for places, resumes in ((folders, True), ((file, folders[0]), False)):
        configs = [
            DistributedConfig(
                num_gpus=2,
                epochs=2,
                checkpoint_dir=one,
                resume_from_checkpoint=resumes,
            )
            for one in places
        ]
        failed = 1 if resumes else 0
        outcomes = in_threads(configs)
        assert all(isinstance(outcome, EngineError) for outcome in outcomes)
        assert str(places[failed]) in str(outcomes[failed])
        assert f"rank {failed} " in str(outcomes[1 - failed])


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(4, 3)


@pytest.mark.parametrize("backend", ["pytorch-ddp", "scratch", "fsdp2"])
def test_another_model_is_named(backend: str, tmp_path: Path) -> None:
    trained(tmp_path, epochs=1, backend=backend)
    resume = {"resume_from_checkpoint": True, "backend": backend, "epochs": 2}
    for model, named in (
        (Wider(), r"\bhead\.weight \(2, 4\) and \(3, 4\)"),
        (Net(has_idle=True), r"\bidle\.weight\b"),
        (Net().double(), r"\blayer\.weight torch\.float32 and torch\.float64"),
    ):
        with pytest.raises(EngineError, match=named):
            trained(tmp_path, model, **resume)


def test_an_optimizer_with_its_parameters_in_another_order(tmp_path: Path) -> None:
    whole, _ = trained(tmp_path / "a", epochs=2)
    trained(tmp_path / "b", epochs=1)

    def turned(parameters: Any) -> torch.optim.Optimizer:
        return adamw([*parameters][::-1])

    again, _ = trained(
        tmp_path / "b", None, turned, epochs=2, resume_from_checkpoint=True
    )
    assert again.losses == whole.losses


# ── every field, of a training that is resumed ──────────────────────────────────────

OF_STARTING = {"num_gpus", "num_nodes", "gpus_per_node", "lr_scaling"}
"""What says how many ranks there are, and what follows from that: see the last test."""

FP16 = {"mixed_precision": "fp16", "scaler_init_scale": 8.0}
CHANGES: dict[str, tuple[dict[str, Any], Any]] = {
    "backend": ({}, "scratch"),
    "batch_size": ({}, 4),
    "epochs": ({}, 2),
    "learning_rate": ({}, 0.01),
    "mixed_precision": ({}, "bf16"),
    "scaler_init_scale": (FP16, 4.0),
    "scaler_growth_interval": (FP16, 1),
    "gradient_accumulation_steps": ({}, 3),
    "gradient_clipping": ({}, 1e-3),
    "communication_backend": ({}, "nccl"),
    "find_unused_parameters": ({}, True),
    "zero_stage": ({}, 1),
    "offload_optimizer": ({"backend": "fsdp2"}, True),
    "offload_params": ({"backend": "fsdp2"}, True),
    "deepspeed_config": ({"backend": "pytorch-ddp"}, {}),
    "profile_dir": ({}, "traces"),
    "compression": ({}, "fp16"),
    "warmup_epochs": ({}, 3.0),
    "checkpoint_frequency": ({}, 3),
    "checkpoint_dir": ({}, "elsewhere"),
    "checkpoint_format": ({}, "dcp"),
    "resume_from_checkpoint": ({}, False),
    "mlflow_tracking": ({}, True),
    "mlflow_experiment": ({}, "digits"),
    "tensorboard": ({}, True),
    "tensorboard_dir": ({}, "runs"),
    "monitor_dir": ({}, "monitored"),
    "monitor_also": ({}, "prometheus:0"),
    "log_every_n_steps": ({}, 2),
    "early_stopping": ({"learning_rate": 1e-30}, 1),
    "seed": ({}, 5),
    "cost_per_gpu_hour": ({}, 1e9),
    "max_cost": ({"cost_per_gpu_hour": 1e9}, 1e-3),
}
"""What it takes for a field to matter, and another value of it."""


def resumed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, **config: Any
) -> dict[str, Any]:
    """All that a training shows that continues after the first of three epochs."""
    shown: dict[str, Any] = {"steps": [], "policies": []}

    class Noted(worker.TrainingLoop):
        def __init__(self, job: TrainingJob, strategy: Strategy, records: Any) -> None:
            super().__init__(job, strategy, records)
            ddp = getattr(strategy, "ddp", None)
            shown["unused"] = getattr(ddp, "find_unused_parameters", None)
            shown["optimizer"] = type(strategy.optimizer).__name__
            shown["sinks"] = (job.config.tensorboard, job.config.tensorboard_dir)
            shown["run"] = job.mlflow_run

    def sinks(job: TrainingJob) -> list[Any]:
        noted = shown["steps"]
        return [
            SimpleNamespace(
                name="a list",
                figures=lambda step, figures: noted.append(step),
                close=lambda: None,
            )
        ]

    def shard(module: Any, **options: Any) -> Any:
        shown["policies"].append(type(options["offload_policy"]).__name__)
        return fully_shard(module, **options)

    fully_shard = torch_strategy.fully_shard
    with monkeypatch.context() as patched:
        patched.setattr(worker, "TrainingLoop", Noted)
        patched.setattr(records, "make_sinks", sinks)
        patched.setattr(torch_strategy, "fully_shard", shard)
        patched.chdir(folder)
        Net.seen.clear()
        given = {"checkpoint_dir": "saved", "resume_from_checkpoint": True, "epochs": 3}
        trainer = PyTorchDDPTrainer(
            Net(), optimizer=sgd, verbose=False, **(given | config)
        )
        history = trainer.fit(loader(shuffle=True))
    shown["folders"] = {path.name for path in folder.iterdir()}
    for path in sorted((folder / "saved").iterdir()):
        shown[path.name] = (saving.load(path, None) or {})["scaler"]
    return shown | {
        "seen": [*Net.seen],
        "losses": history.losses,
        "rates": [row.learning_rate for row in history.epochs],
        "stopped_by": history.stopped_by,
        "has_cost": history.cost > 0,
    }


def test_every_field_is_changed() -> None:
    named = {field.name for field in fields(DistributedConfig)}
    assert CHANGES.keys() | OF_STARTING == named


@pytest.mark.filterwarnings("ignore:.torch.jit")  # of ZeRO
@pytest.mark.parametrize("name", CHANGES)
def test_a_field_of_a_resumed_training_takes_effect_or_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed, value = CHANGES[name]
    folders = tmp_path / "as it was", tmp_path / "changed"
    for folder in folders:
        trainer = PyTorchDDPTrainer(Net(), optimizer=sgd, verbose=False, **needed)
        trainer.fit(loader(shuffle=True), checkpoint_dir=folder / "saved")
    as_it_was = resumed(folders[0], monkeypatch, **needed)
    assert as_it_was["losses"] == resumed(folders[0], monkeypatch, **needed)["losses"]
    refusal = ""
    try:
        changed = resumed(folders[1], monkeypatch, **{**needed, name: value})
    except (EngineError, ModuleNotFoundError) as refused:
        changed, refusal = as_it_was, str(refused)
    assert changed != as_it_was or re.search(rf"{name}|mlflow|nccl", refusal)


def test_a_resumed_training_has_other_ranks(tmp_path: Path) -> None:
    fit(checkpoint_dir=tmp_path)
    given = {"epochs": 2, "checkpoint_dir": tmp_path, "resume_from_checkpoint": True}
    for scaling, rate in (("none", RATE), ("linear", 2 * RATE)):
        config = DistributedConfig(num_gpus=2, lr_scaling=scaling, **given)
        one, other = in_threads([config, config])
        assert one.history.losses == other.history.losses
        assert len(one.history.losses) == 3 + 2
        assert one.history.epochs[-1].learning_rate == rate
        (tmp_path / "epoch_0002.pt").unlink()


# ── what ended stays ended; what is older stays behind ──────────────────────────────


def test_a_training_that_stalled_or_cost_too_much_is_not_trained_on(
    tmp_path: Path,
) -> None:
    stuck = {"learning_rate": 1e-30, "cost_per_gpu_hour": 1e9, "early_stopping": 2}
    first = fit(epochs=9, checkpoint_dir=tmp_path, **stuck)
    resume = {"epochs": 9, "checkpoint_dir": tmp_path, "resume_from_checkpoint": True}
    for more, why in (({}, "early_stopping"), ({"max_cost": 1e-3}, "max_cost")):
        if more:
            stuck.pop("early_stopping")
        Net.seen.clear()
        again = fit(**resume, **stuck, **more)
        assert Net.seen == []
        assert (again.stopped_by, again.losses) == (why, first.losses)


def test_a_training_that_began_anew_in_a_folder_resumes_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(epochs=3, checkpoint_dir=tmp_path)
    mine = {"checkpoint_dir": tmp_path, "learning_rate": RATE / 2}
    first = fit(epochs=1, **mine)
    again = fit(epochs=2, resume_from_checkpoint=True, **mine)
    assert again.losses[:3] == first.losses
    assert len(again.epochs) == 2
    assert "epoch_0003.pt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "name"),
    [("RMSprop", "momentum"), ("RMSprop", "centered"), ("AdamW", "amsgrad")],
)
def test_a_setting_that_needs_other_state_is_refused(
    kind: str, name: str, tmp_path: Path
) -> None:
    def make(parameters: Any, **last: Any) -> torch.optim.Optimizer:
        *others, bias = parameters
        groups = [{"params": others}, {"params": [bias], **last}]
        made: torch.optim.Optimizer = getattr(torch.optim, kind)(groups, lr=0.01)
        return made

    trained(tmp_path, optimizer=make)
    value = 0.5 if name == "momentum" else True
    again = {"epochs": 2, "resume_from_checkpoint": True}
    with pytest.raises(EngineError, match=name):
        trained(tmp_path, None, lambda own: make(own, **{name: value}), **again)
    trained(tmp_path, None, lambda own: make(own, weight_decay=0.5), **again)
