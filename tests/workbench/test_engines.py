"""distlab.engines: what is refused, which samples a rank has, fields in one process."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    SequentialSampler,
    TensorDataset,
)

from benchmarks import scaling
from distlab.cli.train_verb import train
from distlab.engines import (
    DeepSpeedTrainer,
    DistributedConfig,
    EngineError,
    History,
    HorovodTrainer,
    PyTorchDDPTrainer,
    RayTrainer,
    TensorFlowDistributedTrainer,
    ray_strategy,
)
from distlab.engines import records as recording
from distlab.engines import trainer as trainers
from distlab.engines.config import BACKEND_VARIABLE, config_from, with_world_size
from distlab.engines.deepspeed_strategy import settings
from distlab.engines.optimizers import expect_same_weights
from distlab.engines.samples import epoch_order, epoch_plan
from distlab.engines.strategy import Strategy
from distlab.engines.torch_strategy import (
    accepted_defaults,
    device_of_rank,
    open_group,
)
from distlab.engines.worker import has_stalled
from distlab.engines.worker import train as train_job

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_gpu": 4}, "no field 'num_gpu'; did you mean 'num_gpus'"),
    (
        {"num_gpus": 6, "num_nodes": 2, "gpus_per_node": 4},
        "num_gpus is 6, but num_nodes × gpus_per_node is 2 × 4 = 8",
    ),
    ({"num_gpus": 3, "num_nodes": 2}, "2 nodes cannot divide evenly"),
    ({"num_gpus": 0}, "num_gpus is 0, must be at least 1"),
    ({"num_gpus": True}, "num_gpus is True, must be an integer"),
    ({"epochs": 1.5}, "epochs is 1.5, must be an integer"),
    ({"learning_rate": math.nan}, "learning_rate is nan, must be more than 0"),
    ({"gradient_clipping": "1"}, "gradient_clipping is '1', must be a number"),
    ({"backend": "mpi"}, "there is no MPI backend: choose gloo or nccl"),
    ({"communication_backend": "mpi"}, "there is no MPI backend"),
    ({"backend": "mxnet"}, "there is no MXNet engine"),
    ({"backend": "ray-serve"}, "there is no Ray Serve engine"),
    ({"backend": "ddp"}, "backend is 'ddp'; there are pytorch-ddp, fsdp2"),
    ({"mixed_precision": "fp8"}, "mixed_precision is 'fp8'; there are False, True"),
    ({"mixed_precision": 1}, "mixed_precision is 1"),
    (
        {"backend": "pytorch-ddp", "zero_stage": 3},
        "zero_stage is 3; backend pytorch-ddp has 0, 1: choose fsdp2",
    ),
    (
        {"backend": "fsdp2", "zero_stage": 1},
        "backend fsdp2 has 2, 3: choose pytorch-ddp",
    ),
    ({"offload_params": True}, "backend is pytorch-ddp: choose fsdp2"),
    ({"backend": "fsdp2", "offload_optimizer": True}, "fsdp2 offloads both or neither"),
    ({"backend": "scratch", "compression": "fp16"}, "backend scratch has none"),
    ({"compression": "bf16", "communication_backend": "gloo"}, "bf16 needs nccl"),
    ({"backend": "fsdp2", "find_unused_parameters": True}, "backend is fsdp2"),
    ({"backend": "horovod", "compression": "bf16"}, "backend horovod has none, fp16"),
    ({"backend": "horovod", "communication_backend": "nccl"}, "as it was built"),
    ({"backend": "horovod", "zero_stage": 1}, "backend horovod has 0: choose pytorch"),
    ({"backend": "tensorflow", "mixed_precision": True}, "precision from the model"),
    ({"backend": "tensorflow", "communication_backend": "gloo"}, "tensorflow has no g"),
    ({"backend": "tensorflow", "compression": "fp16"}, "backend tensorflow has none"),
    (
        {"backend": "tensorflow", "zero_stage": 1},
        "backend tensorflow has 0: choose pyt",
    ),
    ({"backend": "deepspeed", "mixed_precision": "fp16"}, "backend deepspeed has bf16"),
    ({"backend": "deepspeed", "checkpoint_dir": "a"}, "deepspeed saves no checkpoints"),
    ({"backend": "fsdp2", "deepspeed_config": {}}, "given, but backend is fsdp2"),
    ({"backend": "tensorflow", "profile_dir": "a"}, "profile_dir"),
    ({"backend": "scratch", "communication_backend": "nccl"}, "scratch runs on gloo"),
    ({"lr_scaling": "log"}, "lr_scaling is 'log'; there are none, linear, sqrt"),
    ({"resume_from_checkpoint": True}, "but no checkpoint_dir"),
    ({"mlflow_experiment": "a", "mlflow_tracking": False}, "mlflow_tracking is off"),
    ({"tensorboard_dir": "a", "tensorboard": False}, "tensorboard is off"),
    ({"offload_params": "false"}, "offload_params is 'false'; there are False, True"),
    ({"find_unused_parameters": 0}, "find_unused_parameters is 0"),
    ({"scaler_init_scale": 2.0}, "scaler_init_scale is given, but mixed_precision is"),
    ({"scaler_growth_interval": 2, "mixed_precision": "bf16"}, "interval is given"),
    ({"checkpoint_dir": 3}, "checkpoint_dir is 3, must be a path"),
    ({"resume_from_checkpoint": ""}, "resume_from_checkpoint is '', must be a path"),
    ({"max_grad_norm": 1.0}, "'max_grad_norm'; did you mean 'gradient_clipping'?"),
    ({"num_epoch": 1.0}, "'num_epoch'; did you mean 'epochs'?"),
    ({"qqq": 1.0}, "no field 'qqq'; there are num_gpus, num_nodes"),
    ({"max_cost": 3.0}, "max_cost needs cost_per_gpu_hour"),
]


@pytest.mark.parametrize(("values", "said"), REFUSED, ids=lambda v: str(v)[:40])
def test_a_contradiction_is_one_line(values: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineError) as caught:
        config_from(values)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


TRAINERS = {
    PyTorchDDPTrainer: "pytorch-ddp",
    RayTrainer: "ray",
    HorovodTrainer: "horovod",
    DeepSpeedTrainer: "deepspeed",
}


@pytest.mark.parametrize("kind", TRAINERS, ids=lambda kind: kind.__name__)
def test_the_classes_that_users_arrive_with(kind: Any) -> None:
    assert kind(net(), num_gpus=2).config.backend == TRAINERS[kind]
    for backend in TRAINERS.values():
        same = PyTorchDDPTrainer(net(), backend=backend)
        assert same.config.backend == backend


@pytest.mark.parametrize("kind", [RayTrainer, PyTorchDDPTrainer])
def test_a_trainer_starts_on_ray_or_takes_part_in_a_job(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def on_ray(as_rank: Any, config: Any, address: Any) -> Any:
        started.append(config.backend)
        return as_rank()

    def take_part(job: Any, starter: Any) -> Any:
        started.append("takes part")
        return train_job(job)

    monkeypatch.setattr(ray_strategy, "on_ray", on_ray)
    trainer = kind(net(), backend="ray", verbose=False)
    trainer.runs_jobs_with = take_part
    assert len(trainer.fit(loader()).losses) == 3
    monkeypatch.setattr(trainers, "is_rank", lambda: True)
    assert len(trainer.fit(loader()).losses) == 3
    assert started == ["ray", "takes part"]


def test_horovods_own_compression_is_known() -> None:
    named = type("FP16Compressor", (), {})
    assert HorovodTrainer(net(), compression=named).config.compression == "fp16"


def test_fit_takes_epochs() -> None:
    trainer = PyTorchDDPTrainer(net(), verbose=False, epochs=5)
    assert len(trainer.fit(loader(), epochs=2).epochs) == 2
    with pytest.raises(EngineError, match="epochs is 0"):
        trainer.fit(loader(), epochs=0)


def test_a_frequency_of_no_checkpoints_is_refused(tmp_path: Path) -> None:
    trainer = PyTorchDDPTrainer(net(), verbose=False, checkpoint_frequency=2)
    with pytest.raises(EngineError, match="checkpoint_frequency is 2"):
        trainer.fit(loader())
    trainer.fit(loader(), checkpoint_dir=tmp_path)


def test_a_field_may_say_another() -> None:
    assert config_from({"zero_stage": 3}).backend == "fsdp2"
    assert config_from({"zero_stage": 1}).backend == "pytorch-ddp"
    assert config_from({"tensorboard_dir": "a"}).tensorboard is True
    assert config_from({"mlflow_experiment": "a"}).mlflow_tracking is True
    plain = config_from({})
    assert (plain.tensorboard, plain.mlflow_tracking) == (False, False)


DEEPSPEED: dict[str, Any] = {
    "train_batch_size": 32,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 10,
    "optimizer": {"type": "Adam", "params": {"lr": 0.25, "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_param": "auto"},
}


def test_a_deepspeed_configuration_is_given_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(DEEPSPEED))
    for given in (DEEPSPEED, path, str(path)):
        trainer = PyTorchDDPTrainer(net(), deepspeed_config=given, num_gpus=2)
        config = trainer.config
        assert (config.backend, config.stage, config.precision) == (
            *("deepspeed", 2),
            "bf16",
        )
        assert (config.batch_size, config.gradient_accumulation_steps) == (8, 2)
        assert config.gradient_clipping == 1.0
        told = settings(config)
        assert told["zero_optimization"] == {"stage": 2, "overlap_comm": True}
        assert told["steps_per_print"] == 10
        assert told.keys().isdisjoint({"optimizer", "scheduler", "train_batch_size"})
        assert trainer.scheduler_interval == "step"
        made = trainer.optimizer(net().parameters())
        assert isinstance(made, torch.optim.AdamW)
        assert made.defaults["lr"] == 0.25
        assert replace(config, epochs=3).batch_size == 8
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert config_from({"deepspeed_config": DEEPSPEED}).batch_size == 4
    plain = {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}
    for more, kind in (
        (plain, torch.optim.Adam),
        ({"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}, torch.optim.SGD),
    ):
        made = DeepSpeedTrainer(net(), deepspeed_config=more).optimizer
        assert type(made(net().parameters())) is kind


TWICE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"gradient_clipping": 1.0}, {"gradient_clipping": 2.0}, "gradient_clipping is 2"),
    ({"zero_optimization": {"stage": 1}}, {"zero_stage": 3}, "zero_stage is 3"),
    ({"train_batch_size": 9}, {"num_gpus": 2}, "train_batch_size 9"),
    (
        {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 4},
        {"num_gpus": 2},
        "2 ranks × 1 microbatches × 4 samples",
    ),
    ({"fp16": {"enabled": True}}, {}, "backend deepspeed has bf16"),
    ({"fp16": True}, {}, "fp16 True, must be a dictionary"),
    ({"optimizer": {"type": "Lamb"}}, {}, "the optimizer Lamb"),
    ({"optimizer": {"type": "SGD"}}, {"optimizer": torch.optim.SGD}, "optimizer is g"),
    ({"scheduler": {"type": "WarmupLR"}}, {"scheduler": len}, "scheduler is given"),
]


@pytest.mark.parametrize(("more", "given", "said"), TWICE, ids=lambda v: str(v)[:40])
def test_a_deepspeed_configuration_that_contradicts_is_one_line(
    more: dict[str, Any], given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(EngineError, match=said) as caught:
        DeepSpeedTrainer(net(), deepspeed_config=more, **given)
    assert "\n" not in str(caught.value)
    (tmp_path / "ds.json").write_text("[")
    for path in (tmp_path / "ds.json", tmp_path / "missing.json"):
        with pytest.raises(EngineError, match=path.name):
            DeepSpeedTrainer(net(), deepspeed_config=path)


def test_a_profiler_around_ranks_is_refused_and_each_rank_writes_a_trace(
    tmp_path: Path,
) -> None:
    with torch.profiler.profile() as profiler:
        PyTorchDDPTrainer(net(), verbose=False).fit(loader())
        with pytest.raises(EngineError, match="profile_dir"):
            PyTorchDDPTrainer(net(), num_gpus=2, verbose=False).fit(loader())
    assert any("addmm" in event.key for event in profiler.key_averages())
    (tmp_path / "a file").touch()
    with pytest.raises(EngineError, match="profile_dir"):
        fit(profile_dir=tmp_path / "a file")


def test_a_number_of_numpy_is_a_number() -> None:
    config = config_from(
        {
            "num_gpus": np.int64(2),
            "learning_rate": np.float32(0.5),
            "offload_params": np.False_,
        }
    )
    found = config.num_gpus, config.learning_rate, config.offload_params
    assert found == (2, 0.5, False)
    assert [type(one) for one in found] == [int, float, bool]


def test_the_backend_may_come_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(BACKEND_VARIABLE, "fsdp2")
    assert config_from({}).backend == "fsdp2"
    assert config_from({"backend": "scratch"}).backend == "scratch"


def test_tensorflow_that_is_not_installed_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    said = r"needs tensorflow, which is not installed: pip install -e '.\[tensorflow\]'"
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(EngineError, match=said):
        train(script, backend="tensorflow", num_gpus=2)
    with pytest.raises(EngineError, match=said):
        TensorFlowDistributedTrainer(None, num_gpus=2)


@pytest.mark.parametrize("node_rank", [-1, 1, 3])
def test_a_node_rank_needs_several_nodes(
    node_rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "distlab.engines.script.launch_distributed_training", lambda *a, **options: 0
    )
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(EngineError, match=f"--node-rank is {node_rank}, but --num-nod"):
        train(script, node_rank=node_rank)
    assert train(script, node_rank=0) == 0


def test_a_job_that_runs_has_its_own_number_of_ranks() -> None:
    assert with_world_size(DistributedConfig(), 8).world_size == 8
    with pytest.raises(EngineError, match=r"\b4\b"):
        with_world_size(DistributedConfig(num_gpus=4), 8)
    nodes = DistributedConfig(num_nodes=2, gpus_per_node=4)
    assert (nodes.world_size, nodes.ranks_per_node) == (8, 4)


# ── samples ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("num_samples", [1, 13, 48, 53])
def test_every_sample_counts_once_with_equal_weight(
    world_size: int, num_samples: int
) -> None:
    order = epoch_order(num_samples, shuffles=True, seed=3, epoch=1)
    assert sorted(order) == [*range(num_samples)]
    plans = [
        epoch_plan(
            order, rank=r, world_size=world_size, batch_size=3, num_microbatches=2
        )
        for r in range(world_size)
    ]
    seen = [i for plan in plans for m in plan for i in m.indices if m.weight]
    assert sorted(seen) == [*range(num_samples)]
    assert len({tuple(m.ends_step for m in plan) for plan in plans}) == 1
    size = world_size * 6
    first = order[:size]
    for start, one in ((0, plans[0][0]), (0, plans[-1][0])):
        assert start == 0
        if one.weight:  # of each sample: weight / len / world_size is 1 / len(first)
            each = one.weight / len(one.indices) / world_size
            assert each == pytest.approx(1 / len(first))


def test_another_epoch_has_another_order_and_drop_last_leaves_the_rest() -> None:
    orders = [epoch_order(40, shuffles=True, seed=0, epoch=e) for e in (1, 2)]
    assert orders[0] != orders[1]
    assert epoch_order(4, shuffles=False, seed=0, epoch=1) == [0, 1, 2, 3]
    plan = epoch_plan([*range(10)], rank=0, world_size=2, batch_size=2, drop_last=True)
    assert [one.indices for one in plan] == [(0, 1), (4, 5)]


# ── in one process ──────────────────────────────────────────────────────────────────


def loader(num_samples: int = 24, **more: Any) -> DataLoader[Any]:
    torch.manual_seed(5)
    inputs = torch.randn(num_samples, 4)
    return DataLoader(TensorDataset(inputs, (inputs[:, 0] > 0).long()), 8, **more)


def net() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Linear(4, 2)


def fit(val: Any = None, max_steps: int | None = None, **config: Any) -> History:
    given = {"verbose": False, "optimizer": sgd, **config}
    return PyTorchDDPTrainer(net(), **given).fit(loader(), val, max_steps=max_steps)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5)


def test_the_model_is_trained_and_the_history_says_how() -> None:
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer = PyTorchDDPTrainer(model, epochs=3, verbose=False, learning_rate=0.05)
    history = trainer.fit(loader(), loader(), single_throughput=1.0)
    assert any(not v.equal(before[n]) for n, v in model.state_dict().items())
    assert len(history.losses) == 9
    assert [row.epoch for row in history.epochs] == [1, 2, 3]
    assert history.losses[-1] < history.losses[0]
    assert history.best_accuracy == trainer.best_accuracy
    assert history.best_accuracy == max(row.accuracy or 0 for row in history.epochs)
    assert history.speedup == history.throughput > 0
    assert history.total_time > 0


def test_an_epochs_loss_is_the_mean_over_its_samples() -> None:
    short = loader(20)  # steps of 8, 8 and 4 samples
    trainer = PyTorchDDPTrainer(net(), optimizer=sgd, verbose=False)
    history = trainer.fit(short)
    a, b, c = history.losses
    mean = pytest.approx((8 * a + 8 * b + 4 * c) / 20, abs=1e-12)
    assert history.epochs[-1].loss == mean
    capped = trainer.fit(short, max_steps=2)
    mean = pytest.approx(sum(capped.losses) / 2, abs=1e-12)
    assert capped.epochs[-1].loss == mean


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_knows_the_samples_of_each_step(world_size: int) -> None:
    for rank in range(world_size):
        plan = epoch_plan([*range(25)], rank=rank, world_size=world_size, batch_size=4)
        found = [one.num_in_step for one in plan if one.ends_step]
        size = 4 * world_size
        assert found == [size] * (25 // size) + [25 % size] * bool(25 % size)


def test_an_optimizer_that_is_handed_in_is_used_on_a_copy() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    PyTorchDDPTrainer(model, optimizer=optimizer, verbose=False).fit(loader())
    other = net()
    PyTorchDDPTrainer(other, optimizer=sgd, verbose=False).fit(loader())
    assert all(
        a.equal(b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


# torch's own ZeroRedundancyOptimizer imports what is deprecated.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("kind", [None, torch.optim.AdamW])
def test_a_sharded_optimizer_is_made_with_what_its_class_takes(kind: Any) -> None:
    make = kind and (lambda parameters: kind(parameters, lr=0.5, weight_decay=0.1))
    whole, sharded = (fit(optimizer=make, zero_stage=stage) for stage in (0, 1))
    assert sharded.losses == whole.losses


def test_a_class_that_takes_any_option_is_given_what_its_base_takes() -> None:
    class Passes(torch.optim.AdamW):
        def __init__(self, parameters: Any, **options: Any) -> None:
            super().__init__(parameters, **options)

    class Keeps(torch.optim.Optimizer):
        def __init__(self, parameters: Any, **options: Any) -> None:
            super().__init__(parameters, options)

    passed = accepted_defaults(Passes(net().parameters(), eps=0.25))
    assert passed["eps"] == 0.25
    assert "decoupled_weight_decay" not in passed
    kept = Keeps(net().parameters(), lr=0.5, depth=3)
    assert accepted_defaults(kept) == {"lr": 0.5, "depth": 3}


def test_accumulated_microbatches_are_one_batch() -> None:
    whole = fit()
    parts = fit(batch_size=3, gradient_accumulation_steps=3, max_steps=2)
    other = fit(batch_size=9, max_steps=2)
    assert parts.losses == pytest.approx(other.losses, abs=1e-6)
    assert whole.losses != other.losses


def test_the_warm_up_grows_and_the_scaling_multiplies() -> None:
    rates = [fit(warmup_epochs=2.0, epochs=e).epochs[-1].learning_rate for e in (1, 2)]
    assert rates == pytest.approx([0.25, 0.5])
    for kind, factor in (("none", 1), ("linear", 4), ("sqrt", 2)):
        config = DistributedConfig(num_gpus=4, lr_scaling=kind)
        assert config.scale_of_rate == factor


def test_what_ends_a_training_early() -> None:
    assert fit(max_steps=2).stopped_by == "max_steps"
    capped = fit(cost_per_gpu_hour=1e9, max_cost=0.01, log_every_n_steps=1, epochs=9)
    assert (capped.stopped_by, len(capped.losses)) == ("max_cost", 1)
    assert capped.cost >= 0.01
    # A rate this small changes no float32 weight: no epoch is better than the first.
    stuck = fit(loader(), early_stopping=2, epochs=9, learning_rate=1e-30)
    assert (stuck.stopped_by, len(stuck.epochs)) == ("early_stopping", 3)


@pytest.mark.parametrize(
    ("losses", "ends_after"),
    [
        ([math.nan] * 6, 3),
        ([1.0, math.nan, math.inf, 0.5, 0.4, 0.3], 3),
        ([math.nan, 1.0, 1.1, 1.2, 1.3, 1.4], 4),
        ([1.0, math.nan, 0.9, -math.inf, 0.95, 0.1], 5),
        ([3.0, 2.0, 1.0], None),
    ],
)
def test_a_loss_that_is_not_finite_is_never_the_best(
    losses: list[float], ends_after: int | None
) -> None:
    counts = range(1, len(losses) + 1)
    ends = (n for n in counts if has_stalled(losses[:n], 2))
    assert next(ends, None) == ends_after
    assert not has_stalled(losses, None)


def test_a_count_past_a_smaller_interval_lets_the_scale_grow() -> None:
    def rank(interval: int) -> Any:
        config = DistributedConfig(
            mixed_precision="fp16", scaler_growth_interval=interval
        )
        strategy: Any = Strategy(config)
        strategy.scaler = torch.amp.GradScaler(
            "cpu", init_scale=4.0, growth_interval=interval
        )
        return strategy

    def step(strategy: Any) -> float:
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight])
        strategy.scaler.scale(weight.sum()).backward()
        strategy.scaler.step(optimizer)
        strategy.scaler.update()
        return float(strategy.scaler.get_scale())

    before, after = rank(10), rank(3)
    for _ in range(5):
        assert step(before) == 4.0
    after.load_scaler(before.scaler.state_dict())
    assert step(after) == 8.0


@pytest.mark.slow
def test_a_checkpoint_is_continued_and_frequency_counts_epochs(tmp_path: Path) -> None:
    whole = fit(epochs=4, checkpoint_dir=tmp_path / "a", checkpoint_frequency=3)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert names == ["epoch_0003.pt", "epoch_0004.pt"]
    part = {"checkpoint_dir": tmp_path / "b", "resume_from_checkpoint": True}
    fit(epochs=2, **part)
    again = fit(epochs=4, **part)
    assert again.losses == whole.losses
    (tmp_path / "b" / "epoch_0004.pt").write_bytes(b"torn")
    assert fit(epochs=4, **part).losses == whole.losses  # from the one before
    torn = tmp_path / "b" / "torn.pt"
    torn.write_bytes(b"torn")
    with pytest.raises(EngineError, match=r"\btorn\.pt\b"):
        fit(resume_from_checkpoint=torn)
    with pytest.raises(EngineError, match=r"\bnone\.pt\b"):
        fit(resume_from_checkpoint=tmp_path / "none.pt")


def test_figures_go_to_the_sinks_every_n_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[int, set[str]]] = []

    class Sink:
        name = "a list"

        def record(self, record: object) -> None:
            raise AssertionError("there are no records of single ranks")

        def figures(self, step: int, figures: dict[str, float]) -> None:
            heard.append((step, set(figures)))

        def close(self) -> None:
            heard.append((-1, set()))

    monkeypatch.setattr(recording, "make_sinks", lambda job: [Sink()])
    fit(loader(), log_every_n_steps=2)
    assert [step for step, _ in heard] == [2, 3, 3, -1]
    named = {"loss", "learning_rate", "grad_norm", "step_s", "num_gpus"}
    assert heard[0][1] >= named
    assert heard[2][1] == {"epoch_loss", "val_loss", "accuracy"}


def test_what_cannot_be_sharded_is_refused_in_one_line() -> None:
    trainer = PyTorchDDPTrainer(net())

    class Buckets(BatchSampler):
        """Chooses batches in a way of its own."""

    batches = Buckets(SequentialSampler(range(24)), 8, drop_last=False)
    batched = DataLoader(loader().dataset, batch_sampler=batches)
    for size in (None, 8):
        own = PyTorchDDPTrainer(net(), batch_size=size)
        with pytest.raises(EngineError, match="has a batch_sampler"):
            own.fit(batched)
    with pytest.raises(EngineError, match="train_loader is a list"):
        trainer.fit([])
    for wrong in (0, 2.5, "3", True):
        given: Any = wrong
        with pytest.raises(EngineError, match=f"max_steps is {wrong!r},"):
            trainer.fit(loader(), max_steps=given)
    with pytest.raises(EngineError, match="num_nodes is 2"):
        PyTorchDDPTrainer(net(), num_nodes=2).fit(loader())
    large = PyTorchDDPTrainer(net(), batch_size=30, verbose=False)
    with pytest.raises(EngineError, match="1 × 30"):
        large.fit(loader(drop_last=True))
    with pytest.raises(EngineError, match=r"\bfloat32\b.*\bfloat64\b"):
        PyTorchDDPTrainer(net().double(), mixed_precision="bf16").fit(loader())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs")
def test_nccl_without_a_gpu_is_one_line() -> None:
    with pytest.raises(EngineError, match=r"nccl.* GPU"):
        fit(communication_backend="nccl")
    with pytest.raises(EngineError, match=r"nccl.* GPU"):
        fit(communication_backend="nccl", num_gpus=2)


def test_the_fields_are_those_of_the_design() -> None:
    named = {field.name for field in fields(DistributedConfig)}
    assert named >= {
        *("num_gpus", "num_nodes", "gpus_per_node", "backend", "batch_size", "epochs"),
        *("learning_rate", "mixed_precision", "scaler_init_scale", "lr_scaling"),
        *("scaler_growth_interval", "gradient_accumulation_steps", "compression"),
        *("gradient_clipping", "communication_backend", "find_unused_parameters"),
        *("zero_stage", "offload_optimizer", "offload_params", "deepspeed_config"),
        *("warmup_epochs", "checkpoint_frequency", "checkpoint_dir", "tensorboard"),
        *("resume_from_checkpoint", "mlflow_tracking", "mlflow_experiment"),
        *("tensorboard_dir", "log_every_n_steps", "early_stopping"),
    }


def test_scaling_marks_more_ranks_than_cores_and_bars_only_the_others() -> None:
    fits = scaling.figures(2, 6.0, 4.5, 10.0, 0.9, is_shared=False)
    values = {line["name"]: line["value"] for line in fits}
    assert values == {
        "epoch_s_n2": 6.0,
        "speedup_n2": 1.6667,
        "efficiency_n2": 0.8333,
        "communication_share_n2": 0.25,
    }
    assert [line["name"] for line in fits if not line.get("met", True)] == [
        "efficiency_n2"
    ]
    shared = scaling.figures(4, 6.0, 4.5, 10.0, 0.9, is_shared=True)
    assert all("bar" not in line for line in shared)
    assert all(line["note"] for line in shared)
    assert not any(line["note"] for line in fits)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"LOCAL_RANK": "-3"}, "LOCAL_RANK=-3"),
        ({"LOCAL_RANK": "one"}, "LOCAL_RANK=one"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, "rank 5 of 2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "0"}, "MASTER_PORT"),
    ],
)
def test_an_environment_that_cannot_be_is_one_line(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], said: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"MASTER_ADDR": "localhost", **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EngineError, match=said) as raised:
        open_group("gloo", device_of_rank("gloo"))
    assert "\n" not in str(raised.value)


def test_weights_of_another_model_are_named() -> None:
    class Extra(torch.nn.Linear):
        def get_extra_state(self) -> int:
            return 3

    own = Extra(2, 2).state_dict()
    expect_same_weights(dict(own), own, "model")
    saved = {**own, "weight": torch.zeros(3, 2), "bias": own["bias"].double()}
    with pytest.raises(EngineError) as raised:
        expect_same_weights(saved, own, "model")
    for said in ("weight (3, 2) and (2, 2)", "bias torch.float64 and torch.float32"):
        assert said in str(raised.value)
