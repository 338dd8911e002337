"""What every field of DistributedConfig does: a function for each, that asserts it.

`shows("epochs")` marks the function that shows what `epochs` does.
test_engine_fields.py runs each twice: as it is, and without the field.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from distlab.dcp import is_dcp
from distlab.engines import EngineError, PyTorchDDPTrainer, torch_strategy
from distlab.engines import records as recording
from distlab.engines import script as scripts
from distlab.engines.config import config_from
from distlab.engines.deepspeed_strategy import settings
from distlab.monitor.jsonl import read_folder
from tests.workbench.engine_probes import (
    BATCH,
    NUM_SAMPLES,
    RATE,
    Net,
    fit,
    loader,
    moved,
    saved,
    sgd,
)

Effect = Callable[[Path, pytest.MonkeyPatch], None]
EFFECTS: dict[str, Effect] = {}


def shows(name: str) -> Callable[[Effect], Effect]:
    def mark(effect: Effect) -> Effect:
        assert name not in EFFECTS
        EFFECTS[name] = effect
        return effect

    return mark


# ── ranks ───────────────────────────────────────────────────────────────────────────


@shows("num_gpus")
def ranks_in_total(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched(monkeypatch, num_gpus=2)["nproc_per_node"] == 2


def launched(monkeypatch: pytest.MonkeyPatch, **config: Any) -> dict[str, Any]:
    """What the launcher of a user's script is told."""
    told: dict[str, Any] = {}

    def launch(script: Path, *arguments: str, **options: Any) -> int:
        told.update(options)
        return 0

    monkeypatch.setattr(scripts, "launch_distributed_training", launch)
    scripts.run_script(Path(__file__), [], config_from(config))
    return told


@shows("num_nodes")
def nodes_that_meet(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = launched(monkeypatch, num_gpus=4, num_nodes=2)
    assert told["nproc_per_node"] == 2
    assert told["nnodes"] == 2


@shows("gpus_per_node")
def ranks_of_a_node(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = launched(monkeypatch, num_nodes=2, gpus_per_node=3)
    assert (told["nnodes"], told["nproc_per_node"]) == (2, 3)


@shows("backend")
def the_engine_that_trains(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = []
    for name in ("pytorch-ddp", "fsdp2", "scratch"):
        fit(max_steps=1, backend=name)
        kinds.append((Net.seen[-1]["is_sharded"], Net.seen[-1]["is_ours"]))
    assert kinds == [(False, False), (True, False), (False, True)]


@shows("communication_backend")
def what_carries_gradients(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        fit(communication_backend="gloo")
        assert Net.seen[-1]["device"] == "cpu"
        return
    with pytest.raises(EngineError, match="nccl"):
        fit(communication_backend="nccl")


# ── steps ───────────────────────────────────────────────────────────────────────────


@shows("batch_size")
def samples_of_a_microbatch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(fit(batch_size=4).losses) == NUM_SAMPLES / 4


@shows("epochs")
def times_over_the_samples(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [row.epoch for row in fit(epochs=2).epochs] == [1, 2]


@shows("learning_rate")
def a_fifth_of_the_rate(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.allclose(moved(learning_rate=RATE / 5) * 5, moved(), atol=1e-6)


@shows("lr_scaling")
def the_rate_grows_with_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_from({"num_gpus": 2, "lr_scaling": "linear"})
    assert RATE * config.scale_of_rate == pytest.approx(2 * RATE)


@shows("warmup_epochs")
def the_rate_grows_at_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = fit(warmup_epochs=2.0, epochs=2)
    assert [row.learning_rate for row in history.epochs] == [RATE / 2, RATE]
    assert torch.allclose(moved(warmup_epochs=1.0) * 3, moved(), atol=1e-6)


@shows("gradient_accumulation_steps")
def microbatches_of_a_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = fit(gradient_accumulation_steps=NUM_SAMPLES // BATCH)
    assert len(history.losses) == 1


@shows("gradient_clipping")
def the_largest_norm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = float(moved(gradient_clipping=0.01).norm())
    assert norm == pytest.approx(0.01 * RATE, rel=1e-3)


@shows("mixed_precision")
def the_type_of_outputs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for given, dtype in (("bf16", torch.bfloat16), (True, torch.float16)):
        fit(max_steps=1, mixed_precision=given)
        assert Net.seen[-1]["dtype"] == dtype


@shows("scaler_init_scale")
def the_first_scale(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = saved(folder, mixed_precision="fp16", scaler_init_scale=8.0)
    assert state["scaler"]["scale"] == 8.0


@shows("scaler_growth_interval")
def steps_until_it_doubles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"mixed_precision": "fp16", "scaler_init_scale": 8.0}
    state = saved(folder, scaler_growth_interval=1, **given)
    assert state["scaler"]["scale"] == 8.0 * 2 ** (NUM_SAMPLES // BATCH)


@shows("find_unused_parameters")
def parameters_without_a_part(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for backend in ("pytorch-ddp", "scratch"):
        losses = []
        for given in (True, False):
            trainer = PyTorchDDPTrainer(
                Net(has_idle=True),
                optimizer=sgd,
                verbose=False,
                backend=backend,
                find_unused_parameters=given,
            )
            try:
                losses.append(len(trainer.fit(loader()).losses))
            except RuntimeError:  # the engine waits for a gradient that never comes
                losses.append(0)
        assert losses == [NUM_SAMPLES // BATCH, 0], backend


@shows("compression")
def what_is_sent_is_rounded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact, rounded = fit().losses, fit(compression="fp16").losses
    assert rounded != exact
    assert rounded == pytest.approx(exact, abs=1e-2)


@shows("seed")
def the_order_of_the_samples(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def losses(seed: int) -> tuple[float, ...]:
        trainer = PyTorchDDPTrainer(Net(), optimizer=sgd, verbose=False, seed=seed)
        return trainer.fit(loader(shuffle=True)).losses

    assert losses(1) == losses(1)
    assert losses(1) != losses(0)


# ── shards ──────────────────────────────────────────────────────────────────────────


def is_inner_layer_sharded_after_forward(**config: Any) -> bool:
    found: list[bool] = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert Net.newest is not None
        found.append(isinstance(Net.newest.layer.weight, DTensor))
        return torch.nn.functional.cross_entropy(outputs, targets)

    trainer = PyTorchDDPTrainer(
        Net(), loss=loss, optimizer=sgd, verbose=False, backend="fsdp2", **config
    )
    trainer.fit(loader(), max_steps=1)
    return found[0]


@shows("zero_stage")
def what_stays_after_forward(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_inner_layer_sharded_after_forward(zero_stage=3)
    assert not is_inner_layer_sharded_after_forward(zero_stage=2)


@shows("offload_params")
def parameters_on_the_host(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policies: list[object] = []
    shard = torch_strategy.fully_shard

    def noted(module: Any, **options: Any) -> Any:
        policies.append(options["offload_policy"])
        return shard(module, **options)

    monkeypatch.setattr(torch_strategy, "fully_shard", noted)
    fit(max_steps=1, backend="fsdp2", offload_params=True)
    assert policies
    assert all(isinstance(policy, CPUOffloadPolicy) for policy in policies)


@shows("offload_optimizer")
def not_without_parameters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineError, match="fsdp2"):
        fit(backend="fsdp2", offload_optimizer=True)


@shows("deepspeed_config")
def what_deepspeed_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "ds.json"
    path.write_text('{"wall_clock_breakdown": true}')
    for given in (path, {"wall_clock_breakdown": True}):
        told = settings(
            config_from({"backend": "deepspeed", "deepspeed_config": given})
        )
        assert told.get("wall_clock_breakdown") is True


# ── what is kept ────────────────────────────────────────────────────────────────────


@shows("checkpoint_dir")
def where_checkpoints_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(checkpoint_dir=folder)
    assert [path.name for path in folder.iterdir()] == ["epoch_0001.pt"]


@shows("checkpoint_frequency")
def epochs_between_two(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(epochs=3, checkpoint_dir=folder, checkpoint_frequency=2)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["epoch_0002.pt", "epoch_0003.pt"]


@shows("checkpoint_format")
def a_folder_in_place_of_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(epochs=2, checkpoint_dir=folder, checkpoint_format="dcp")
    assert sorted(path.name for path in folder.iterdir()) == [
        "epoch_0001",
        "epoch_0002",
    ]
    assert all(is_dcp(path) for path in folder.iterdir())


@shows("resume_from_checkpoint")
def it_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(epochs=1, checkpoint_dir=folder)
    num_forwards = len(Net.seen)
    for source in (True, folder / "epoch_0001.pt"):
        Net.seen.clear()
        again = fit(epochs=2, checkpoint_dir=folder, resume_from_checkpoint=source)
        assert len(Net.seen) == num_forwards
        assert len(again.losses) == 2 * num_forwards
        (folder / "epoch_0002.pt").unlink()


@shows("early_stopping")
def epochs_without_progress(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A rate this small changes no float32 weight: no epoch is better than the first.
    stuck = fit(loader(), early_stopping=2, epochs=9, learning_rate=1e-30)
    assert (stuck.stopped_by, len(stuck.epochs)) == ("early_stopping", 3)


@shows("cost_per_gpu_hour")
def what_it_has_cost(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fit(cost_per_gpu_hour=1e6).cost > 0


@shows("max_cost")
def the_end_of_the_money(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"cost_per_gpu_hour": 1e9, "log_every_n_steps": 1}
    assert len(fit(max_cost=0.01, **given).losses) == 1


# ── what is written down ────────────────────────────────────────────────────────────


@shows("log_every_n_steps")
def steps_between_records(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    def figures(step: int, figures: dict[str, float]) -> None:
        steps.append(step)

    sink = SimpleNamespace(name="a list", figures=figures, close=lambda: None)
    monkeypatch.setattr(recording, "make_sinks", lambda job: [sink])
    fit(log_every_n_steps=2)
    assert steps == [2, 3, 3]  # 3: the last step of the epoch, then the epoch


class Writer:
    """In the place of torch.utils.tensorboard.SummaryWriter."""

    folders: ClassVar[list[str]] = []
    names: ClassVar[set[str]] = set()

    def __init__(self, folder: str) -> None:
        Writer.folders.append(folder)

    def add_scalar(self, name: str, value: float, step: int) -> None:
        Writer.names.add(name)

    def close(self) -> None:
        """Nothing is open."""


def written(monkeypatch: pytest.MonkeyPatch, **config: Any) -> list[str]:
    """The folders that TensorBoard has written to."""
    module: Any = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    Writer.folders, Writer.names = [], set()
    fit(**config)
    return Writer.folders


@shows("tensorboard")
def figures_for_tensorboard(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(monkeypatch, tensorboard=True) == ["runs"]
    assert {"run/loss", "run/learning_rate", "run/epoch_loss"} <= Writer.names
    assert written(monkeypatch) == []


@shows("profile_dir")
def a_trace_of_each_rank(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(epochs=3, profile_dir=folder / "traces")
    trace = folder / "traces" / "rank_0.trace.json"
    assert trace.exists()
    assert "aten::addmm" in trace.read_text()


@shows("tensorboard_dir")
def where_they_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"tensorboard": True, "tensorboard_dir": folder}
    assert written(monkeypatch, **given) == [str(folder)]


@shows("monitor_dir")
def records_of_all_ranks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(monitor_dir=folder / "one", epochs=2, log_every_n_steps=1)
    assert (folder / "one" / "run.json").is_file()
    recorded = read_folder(folder / "one")
    assert recorded.run["job"] == "one"
    rows = recorded.records[0]
    assert [row.step for row in rows] == list(range(1, len(rows) + 1))
    assert {row.epoch for row in rows} == {1, 2}
    assert all(row.samples and row.seconds > 0 for row in rows)
    with pytest.raises(EngineError, match=r"^monitor_dir: .*one "):
        fit(monitor_dir=folder / "one")


@shows("monitor_also")
def where_else_they_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[int, str]] = []

    class Sink(SimpleNamespace):
        def __init__(self, port: int, *, address: str, run: Any) -> None:
            opened.append((port, f"{address} {run['job']} {run['world_size']}"))
            super().__init__(name="Prometheus", record=_any, figures=_any, close=_any)

    monkeypatch.setattr("distlab.monitor.sinks.Prometheus", Sink)
    monkeypatch.setattr("distlab.engines.records.announced", lambda *_: [])
    fit(monitor_dir=folder / "two", monitor_also=["prometheus:0.0.0.0:9401"])
    assert opened == [(9401, "0.0.0.0 two 1")]
    with pytest.raises(EngineError, match=r"^monitor_also .*monitor_dir"):
        fit(monitor_also="prometheus")
    with pytest.raises(EngineError, match=r"^monitor_also wandb:"):
        fit(monitor_dir=folder / "two", monitor_also="wandb")


def _any(*_: Any) -> None:
    pass


def tracked(monkeypatch: pytest.MonkeyPatch, **config: Any) -> dict[str, Any]:
    """What MLflow is told."""
    told: dict[str, Any] = {"params": {}, "metrics": set(), "ended": []}
    run = SimpleNamespace(info=SimpleNamespace(run_id="7"))
    library: Any = ModuleType("mlflow")
    library.active_run = lambda: None
    library.set_experiment = lambda name: told.update(experiment=name)
    library.start_run = lambda run_name: run
    library.log_params = lambda params, run_id: told["params"].update(params)
    library.get_tracking_uri = lambda: "sqlite://"
    library.set_tracking_uri = lambda uri: told.update(uri=uri)
    library.log_metrics = lambda named, step, run_id: told["metrics"].update(named)
    library.end_run = told["ended"].append
    monkeypatch.setitem(sys.modules, "mlflow", library)
    fit(**config)
    return told


@shows("mlflow_tracking")
def figures_for_mlflow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tracked(monkeypatch, mlflow_tracking=True, epochs=2)
    assert {"step/loss", "step/learning_rate", "step/epoch_loss"} <= told["metrics"]
    assert (told["params"]["epochs"], told["params"]["num_gpus"]) == (2, 1)
    assert told["ended"] == ["FINISHED"]
    assert tracked(monkeypatch)["params"] == {}


@shows("mlflow_experiment")
def the_name_of_the_experiment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = tracked(monkeypatch, mlflow_tracking=True, mlflow_experiment="digits")
    assert told["experiment"] == "digits"
