"""Callbacks of the trainers: when they are called, what they see, how they stop it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from distlab.engines import Callback, EngineError, History, PyTorchDDPTrainer, Training


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(24, 4, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, 0].gt(0).long()), batch_size=8)


def fit(*callbacks: Callback, **config: Any) -> History:
    torch.manual_seed(0)
    given = {"epochs": 3, "verbose": False, "callbacks": callbacks, **config}
    return PyTorchDDPTrainer(torch.nn.Linear(4, 2), **given).fit(loader(), loader())


class Diary(Callback):
    """Notes what happens, in memory and, on every rank, in a file."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.entries: list[list[Any]] = []

    def note(self, what: str, training: Training) -> None:
        self.entries.append([what, training.epoch, training.step, len(training.rows)])
        if self.folder is not None:
            path = self.folder / f"rank_{training.rank}_of_{training.world_size}.json"
            path.write_text(json.dumps(self.entries))

    def on_train_begin(self, training: Training) -> None:
        self.note("begin", training)

    def on_step_end(self, training: Training) -> None:
        self.note("step", training)

    def on_epoch_end(self, training: Training) -> None:
        self.note("epoch", training)

    def on_train_end(self, training: Training) -> None:
        self.note("end", training)


class StopAt(Callback):
    """Stops in a step or after an epoch, on one rank or on all."""

    def __init__(self, step: int = 0, epoch: int = 0, rank: int | None = None) -> None:
        self.step, self.epoch, self.rank = step, epoch, rank

    def _stop(self, training: Training) -> None:
        if self.rank in (None, training.rank):
            training.stop()

    def on_train_begin(self, training: Training) -> None:
        if not self.step and not self.epoch:
            self._stop(training)

    def on_step_end(self, training: Training) -> None:
        if training.step == self.step:
            self._stop(training)

    def on_epoch_end(self, training: Training) -> None:
        if len(training.rows) == self.epoch:
            self._stop(training)


def test_they_are_called_in_order() -> None:
    diary = Diary()
    fit(diary, epochs=2)
    assert diary.entries == [
        ["begin", 1, 0, 0],
        *[["step", 1, step, 0] for step in (1, 2, 3)],
        ["epoch", 2, 3, 1],
        *[["step", 2, step, 1] for step in (4, 5, 6)],
        ["epoch", 3, 6, 2],
        ["end", 3, 6, 2],
    ]


def test_they_see_what_is_trained() -> None:
    seen: list[Any] = []

    class Look(Callback):
        def on_epoch_end(self, training: Training) -> None:
            (weight, _) = training.model.parameters()
            rate = training.optimizer.param_groups[0]["lr"]
            seen.append((weight.detach().clone(), rate, training.learning_rate))
            seen.append((training.rows[-1].accuracy, training.grad_norm))

    history = fit(Look(), epochs=1, learning_rate=0.02)
    (weight, rate, told), (accuracy, norm) = seen
    assert weight.shape == (2, 4)
    assert rate == told == 0.02
    assert accuracy == history.epochs[0].accuracy
    assert norm == history.epochs[0].grad_norm


def test_a_training_with_callbacks_is_the_same() -> None:
    assert fit(Diary()).losses == fit().losses


@pytest.mark.parametrize(
    ("stop", "log_every", "num_losses", "num_epochs", "saved"),
    [
        (StopAt(), 1, 0, 0, []),
        (StopAt(step=4), 1, 4, 2, ["epoch_0001.pt"]),
        (StopAt(step=4), 2, 5, 2, ["epoch_0001.pt"]),
        (StopAt(step=6), 1, 6, 2, ["epoch_0001.pt", "epoch_0002.pt"]),
        (StopAt(epoch=1), 1, 3, 1, ["epoch_0001.pt"]),
    ],
)
def test_they_can_stop_it(
    tmp_path: Path,
    stop: StopAt,
    log_every: int,
    num_losses: int,
    num_epochs: int,
    saved: list[str],
) -> None:
    history = fit(stop, log_every_n_steps=log_every, checkpoint_dir=tmp_path)
    assert history.stopped_by == "callback"
    assert len(history.losses) == num_losses
    assert len(history.epochs) == num_epochs
    assert sorted(path.name for path in tmp_path.iterdir()) == saved


def test_the_end_comes_also_after_a_failure() -> None:
    class Fail(Callback):
        def on_step_end(self, training: Training) -> None:
            raise ValueError("no more")

    diary = Diary()
    with pytest.raises((ValueError, EngineError)):
        fit(diary, Fail())
    assert [what for what, *_ in diary.entries] == ["begin", "step", "end"]


@pytest.mark.parametrize("given", [Diary(), [Diary], ["a name"], 3])
def test_what_is_no_callback_is_refused(given: Any) -> None:
    with pytest.raises(EngineError, match="callbacks"):
        PyTorchDDPTrainer(torch.nn.Linear(4, 2), callbacks=given)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["pytorch-ddp", "fsdp2", "scratch"])
def test_one_rank_stops_all(tmp_path: Path, backend: str) -> None:
    stop = StopAt(step=2, rank=1)
    history = fit(Diary(tmp_path), stop, num_gpus=2, backend=backend, batch_size=4)
    assert (history.stopped_by, len(history.losses)) == ("callback", 3)  # a record's
    told = [json.loads(path.read_text()) for path in sorted(tmp_path.iterdir())]
    assert len(told) == 2
    assert told[0] == told[1]
    assert told[0][-1] == ["end", 2, 3, 1]
