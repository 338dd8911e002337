"""Horovod with two real processes, beside torch's DDP; `make test-horovod`."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from distlab.cli.train_verb import train
from distlab.engines import EngineError, HorovodTrainer, PyTorchDDPTrainer
from distlab.models.mlp import make_mlp
from tests.corpora import engine_ranks as ranks

hvd: Any = pytest.importorskip("horovod.torch", reason="`make test-horovod` builds it")
STEPS = 20
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "microbatches": {"gradient_accumulation_steps": 3, "batch_size": 2},
    "clipped": {"gradient_clipping": 0.01},
}


def both(case: dict[str, Any], **more: Any) -> tuple[Any, ...]:
    loader, val = ranks.loaders()
    given: dict[str, Any] = {"epochs": 2, "batch_size": 8, "num_gpus": 2, **case}
    own, other = make_mlp(), make_mlp()
    ddp = PyTorchDDPTrainer(own, optimizer=ranks.momentum, verbose=False, **given)
    expected = ddp.fit(loader, val, max_steps=STEPS)
    trainer = HorovodTrainer(other, ranks.momentum, verbose=False, **given, **more)
    return expected, trainer.fit(loader, val, max_steps=STEPS), own, other


def largest(own: torch.nn.Module, other: torch.nn.Module) -> float:
    pairs = zip(own.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_twenty_steps_are_those_of_torch_ddp(case: dict[str, Any]) -> None:
    expected, found, own, other = both(case)
    assert (found.backend, found.num_gpus) == ("horovod", 2)
    worst = max(abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True))
    weights = largest(own, other)
    print(f"largest difference to DDP: loss {worst:.1e}, weights {weights:.1e}")
    assert worst <= 1e-10
    assert weights <= 1e-10
    assert found.best_accuracy == expected.best_accuracy


def test_fp16_changes_what_is_sent_and_the_timeline_is_written(tmp_path: Path) -> None:
    timeline = tmp_path / "timeline.json"
    # Horovod's own object, which users arrive with, is the word "fp16".
    fp16 = hvd.Compression.fp16
    expected, found, _, _ = both({}, compression=fp16, timeline=timeline)
    gaps = [abs(a - b) for a, b in zip(found.losses, expected.losses, strict=True)]
    assert 0 < max(gaps) < 1e-2
    events = json.loads(timeline.read_text())
    assert any("ALLREDUCE" in event.get("name", "") for event in events)


def test_a_checkpoint_of_ddp_is_continued(tmp_path: Path) -> None:
    loader, _ = ranks.loaders()
    given: dict[str, Any] = {"batch_size": 8, "num_gpus": 2, "checkpoint_dir": tmp_path}
    make: dict[str, Any] = {"optimizer": ranks.momentum, "verbose": False}
    whole = PyTorchDDPTrainer(make_mlp(), **make, **given, epochs=2).fit(loader)
    PyTorchDDPTrainer(make_mlp(), **make, **given, epochs=1).fit(loader)
    trainer = HorovodTrainer(
        make_mlp(),
        optimizer=ranks.momentum,
        verbose=False,
        **given,
        epochs=2,
        resume_from_checkpoint=True,
    )
    found = trainer.fit(loader)
    pairs = zip(found.losses, whole.losses, strict=True)
    assert max(abs(a - b) for a, b in pairs) <= 1e-10


SCRIPT = """
import sys
from pathlib import Path
import horovod.torch as hvd
from distlab.engines import HorovodTrainer
hvd.init()
mean = HorovodTrainer.metric_average(float(hvd.rank()), "rank")
Path(sys.argv[1], str(hvd.rank())).write_text(str(mean))
"""


def test_distlab_train_runs_a_script_and_metrics_are_averaged(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    given: dict[str, Any] = {"backend": "horovod", "num_gpus": 2, "log_dir": tmp_path}
    assert train(script, [str(tmp_path)], **given) == 0
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["0.5", "0.5"]


TRAINERS = """
import json, os, sys
from functools import partial
from pathlib import Path
import torch
from tests.corpora import engine_ranks as ranks
from distlab.engines import HorovodTrainer, PyTorchDDPTrainer
from distlab.models.mlp import make_mlp

make = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
found = []
for kind in (HorovodTrainer, PyTorchDDPTrainer):
    trainer = kind(
        make_mlp(),
        optimizer=ranks.momentum,
        scheduler=make,
        verbose=False,
        batch_size=8,
    )
    history = trainer.fit(ranks.loaders(64)[0], epochs=2)
    rates = [row.learning_rate for row in history.epochs]
    found.append((history.backend, history.num_gpus, history.losses, rates))
Path(sys.argv[1], os.environ["HOROVOD_RANK"]).write_text(json.dumps(found))
"""


def test_trainers_in_a_script_take_part_with_a_scheduler(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAINERS)
    given: dict[str, Any] = {"backend": "horovod", "num_gpus": 2, "log_dir": tmp_path}
    assert train(script, [str(tmp_path)], **given) == 0
    first, second = (json.loads((tmp_path / rank).read_text()) for rank in "01")
    ddp = PyTorchDDPTrainer(
        make_mlp(),
        optimizer=ranks.momentum,
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5),
        verbose=False,
        batch_size=8,
        num_gpus=2,
    )
    losses = ddp.fit(ranks.loaders(64)[0], epochs=2).losses
    assert first == second
    for backend, num_gpus, own, rates in first:
        assert (backend, num_gpus) == ("horovod", 2)
        assert own == pytest.approx(losses, abs=1e-10)
        assert rates == pytest.approx([0.05, 0.025])


def failing(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("the loss is wrong")


def test_a_failure_is_one_line() -> None:
    loader, _ = ranks.loaders()
    trainer = HorovodTrainer(make_mlp(), None, failing, num_gpus=2)
    with pytest.raises(EngineError, match=r"rank \d .*RuntimeError: the loss is wrong"):
        trainer.fit(loader)
