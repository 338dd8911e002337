"""A learning-rate scheduler in a trainer: its rates are those of a loop by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from distlab.engines import EngineError, PyTorchDDPTrainer
from distlab.engines.start import take_part
from distlab.runner import Cluster, RankContext
from tests.corpora.both_ways import leave, meet
from tests.corpora.engine_ranks import LIMITS
from tests.workbench.engine_probes import RATE, Net, loader

EPOCHS, STEPS = 4, 3  # steps of an epoch


class Noting(torch.optim.SGD):
    """Notes its rates and momenta at each step."""

    seen: ClassVar[list[tuple[float, float]]] = []

    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        Noting.seen.append((float(group["lr"]), float(group["momentum"])))
        return super().step(closure)


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    Net.seen.clear()
    Noting.seen.clear()


def noting(parameters: Any) -> torch.optim.Optimizer:
    return Noting(parameters, lr=RATE, momentum=0.9)


def chained(optimizer: Any) -> Any:
    warm = schedulers.LinearLR(optimizer, 0.1, total_iters=2)
    rest = schedulers.ExponentialLR(optimizer, 0.5)
    return schedulers.SequentialLR(optimizer, [warm, rest], milestones=[2])


MADE: dict[str, tuple[Callable[..., Any], str]] = {
    "StepLR": (partial(schedulers.StepLR, step_size=2, gamma=0.1), "epoch"),
    "LambdaLR": (lambda own: schedulers.LambdaLR(own, lambda n: 1 / (1 + n)), "step"),
    "CosineAnnealingLR": (partial(schedulers.CosineAnnealingLR, T_max=5), "step"),
    "SequentialLR": (chained, "epoch"),
    "OneCycleLR": (
        partial(schedulers.OneCycleLR, max_lr=1.0, total_steps=EPOCHS * STEPS),
        "step",
    ),
}


def by_hand(make: Callable[..., Any], interval: str) -> Any:
    """Rates and momenta of a loop that a user would write."""
    optimizer = noting(Net().parameters())
    scheduler = make(optimizer)
    for _ in range(EPOCHS):
        for _ in range(STEPS):
            optimizer.step()
            if interval == "step":
                scheduler.step()
        if interval == "epoch":
            scheduler.step()
    return taken()


def taken() -> Any:
    """What the steps since the last call have noted, a row for each."""
    seen, Noting.seen = Noting.seen, []
    return np.array(seen)


def fit(epochs: int = EPOCHS, **given: Any) -> Any:
    given = {"optimizer": noting, "verbose": False, **given}
    PyTorchDDPTrainer(Net(), **given).fit(loader(), loader(), epochs=epochs)
    return taken()


@pytest.mark.parametrize(("make", "interval"), MADE.values(), ids=MADE)
def test_its_rates_are_those_of_a_loop_by_hand_also_after_a_resume(
    make: Callable[..., Any], interval: str, tmp_path: Path
) -> None:
    expected = by_hand(make, interval)
    assert len({*expected[:, 0]}) > 1
    given: dict[str, Any] = {"scheduler": make, "scheduler_interval": interval}
    assert fit(**given) == pytest.approx(expected)
    for backend in ("scratch", "fsdp2"):
        assert fit(**given, backend=backend) == pytest.approx(expected)
    kept = {"checkpoint_dir": tmp_path, "resume_from_checkpoint": True}
    first = fit(**given, epochs=1, **kept)
    rest = fit(**given, **kept)
    assert (len(first), len(rest)) == (STEPS, STEPS * (EPOCHS - 1))
    assert np.concatenate([first, rest]) == pytest.approx(expected)


def test_one_on_the_callers_optimizer_continues_from_fit_to_fit() -> None:
    expected = by_hand(*MADE["StepLR"])
    model = Net()
    own = noting(model.parameters())
    scheduler = MADE["StepLR"][0](own)
    # Given once: the scheduler has the optimizer.
    trainer = PyTorchDDPTrainer(model, scheduler=scheduler, verbose=False)
    for _ in range(EPOCHS):
        trainer.fit(loader())
    assert taken() == pytest.approx(expected)
    assert scheduler.last_epoch == EPOCHS
    assert own.param_groups[0]["lr"] == scheduler.get_last_lr()[0]


def test_it_never_sees_warm_up_and_scaling() -> None:
    plain = by_hand(*MADE["StepLR"])
    warmed = fit(scheduler=MADE["StepLR"][0], warmup_epochs=1.0)
    ramp = np.minimum((np.arange(EPOCHS * STEPS) + 1) / STEPS, 1)
    assert warmed[:, 0] == pytest.approx(plain[:, 0] * ramp)
    fifth = fit(scheduler=MADE["StepLR"][0], learning_rate=RATE / 5)
    assert fifth[:, 0] * 5 == pytest.approx(plain[:, 0])


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_plateau_is_one_of_the_validation(mode: str) -> None:
    def make(optimizer: Any) -> Any:
        # No epoch is this much better than the first.
        return schedulers.ReduceLROnPlateau(
            optimizer, mode, 0.5, patience=0, threshold=10.0, threshold_mode="abs"
        )

    halves = [RATE * 0.5**n for n in (0, 0, 1, 2) for _ in range(STEPS)]
    assert fit(scheduler=make)[:, 0] == pytest.approx(halves)
    trainer = PyTorchDDPTrainer(Net(), scheduler=make, verbose=False)
    if mode == "min":
        trainer.fit(loader())
        return
    with pytest.raises(EngineError, match="val_loader"):
        trainer.fit(loader())


def on_ranks(context: RankContext, folder: str) -> list[list[float]]:
    meet(context, folder)
    found = []
    for config in ({}, {"zero_stage": 1}, {"backend": "fsdp2"}):
        trainer = PyTorchDDPTrainer(
            Net(),
            optimizer=noting,
            scheduler=MADE["StepLR"][0],
            verbose=False,
            **config,
        )
        trainer.runs_jobs_with = take_part
        trainer.fit(loader(), epochs=EPOCHS)
        found.append(taken()[:, 0].tolist())
    leave()
    return found


def test_two_ranks_have_the_same_rates(cluster: Cluster, tmp_path: Path) -> None:
    run = cluster.run(on_ranks, 2, str(tmp_path), limits=LIMITS, journal=False)
    by_epoch = [RATE * part for part in (1, 1, 0.1, 0.1)]
    for seen in (one for rank in run.require_finished().values for one in rank):
        assert seen[:: len(seen) // EPOCHS] == pytest.approx(by_epoch)


OTHER = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"scheduler": 3}, "scheduler is a int"),
    ({"scheduler": schedulers.StepLR}, "can't make the scheduler"),
    ({"scheduler": lambda own: own.defaults}, "returns a dict"),
    ({"scheduler_interval": "step"}, "no scheduler"),
    ({"scheduler": MADE["StepLR"][0], "scheduler_interval": "batch"}, "epoch, step"),
    (
        {"scheduler": schedulers.ReduceLROnPlateau, "scheduler_interval": "step"},
        "ReduceLROnPlateau",
    ),
    (
        {"scheduler": partial(schedulers.OneCycleLR, max_lr=1.0, total_steps=1)},
        "the scheduler failed",
    ),
    ({"scheduler": schedulers.StepLR(OTHER, 1)}, "another optimizer"),
    ({"lr_scheduler": schedulers.StepLR}, "did you mean 'scheduler'"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED, ids=lambda v: str(v)[:40])
def test_what_cannot_be_is_one_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineError, match=said) as caught:
        fit(**given)
    assert "\n" not in str(caught.value)


def test_a_rate_beside_a_scheduler_that_has_one_is_refused() -> None:
    scheduler = schedulers.StepLR(OTHER, 1)
    with pytest.raises(EngineError, match=r"learning_rate is 0\.1"):
        PyTorchDDPTrainer(Net(), scheduler=scheduler, learning_rate=0.1)


RESUMED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"scheduler": MADE["StepLR"][0]}, {}, "has none"),
    ({}, {"scheduler": MADE["StepLR"][0]}, "without a scheduler"),
    (
        {"scheduler": MADE["StepLR"][0]},
        {"scheduler": MADE["CosineAnnealingLR"][0]},
        "StepLR",
    ),
    (
        {"scheduler": MADE["StepLR"][0]},
        {"scheduler": MADE["StepLR"][0], "scheduler_interval": "step"},
        "scheduler_interval is step",
    ),
    (
        {"scheduler": MADE["StepLR"][0]},
        {"scheduler": MADE["StepLR"][0], "learning_rate": RATE / 2},
        "learning_rate",
    ),
]


@pytest.mark.parametrize(("before", "now", "said"), RESUMED)
def test_another_scheduler_than_the_checkpoints_is_refused(
    before: dict[str, Any], now: dict[str, Any], said: str, tmp_path: Path
) -> None:
    fit(**before, epochs=1, checkpoint_dir=tmp_path)
    with pytest.raises(EngineError, match=said) as caught:
        fit(**now, checkpoint_dir=tmp_path, resume_from_checkpoint=True)
    assert "\n" not in str(caught.value)
