"""What a caller hands to a trainer: loss, optimizer and loader all have their effect.

Two ranks, and two microbatches on one, must take the step of a single rank.
"""

from __future__ import annotations

import functools
import random
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

import distlab.distributed as ours
from distlab.engines import EngineError, History, PyTorchDDPTrainer
from distlab.engines.loaders import Batches, read_loader
from distlab.engines.start import take_part
from distlab.runner import Cluster, RankContext
from tests.corpora.both_ways import leave, meet
from tests.corpora.engine_ranks import LIMITS

NUM_SAMPLES, RATE = 9, 0.5  # the second batch has 1: rank 1 of 2 gets none
IGNORED = -100
cross_entropy = nn.functional.cross_entropy


# ── losses ──────────────────────────────────────────────────────────────────────────


class Tempered(nn.Module):
    """A loss that learns how sharp the scores are."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs * self.temperature, targets)


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, torch.tensor([1.0, 10.0]))


LOSSES: dict[str, Callable[[], Any]] = {
    "plain": lambda: None,
    "class weights": lambda: nn.CrossEntropyLoss(torch.tensor([1.0, 10.0])),
    "a function with them": lambda: weighted,
    "a part of one": lambda: functools.partial(
        cross_entropy, weight=torch.tensor([1.0, 10.0]), label_smoothing=0.1
    ),
    "of logarithms": lambda: (
        lambda o, y: nn.NLLLoss(torch.tensor([3.0, 1.0]))(o.log_softmax(1), y)
    ),
    "a sum": lambda: nn.CrossEntropyLoss(reduction="sum"),
    "a function that sums": lambda: functools.partial(cross_entropy, reduction="sum"),
    "another sum": lambda: (
        lambda o, y: nn.functional.mse_loss(o[:, 0], y.float(), reduction="sum")
    ),
    "with a parameter": Tempered,
}


def data(has_ignored: bool = False, num_samples: int = NUM_SAMPLES) -> TensorDataset:
    torch.manual_seed(0)
    inputs, targets = torch.randn(num_samples, 2), torch.arange(num_samples) % 2
    if has_ignored:
        targets[[0, 1, 2, 3, 6]] = IGNORED  # all that rank 0 has of the first step
    return TensorDataset(inputs, targets)


def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(2, 2)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def trained(
    name: str, batch_size: int, *, has_ignored: bool = False, **config: Any
) -> list[float]:
    """All that was learned, the losses and the figures of the validation."""
    model, loss = net(), LOSSES[name]()
    given = {"optimizer": sgd, "verbose": False, **config}
    runs_with = given.pop("runs_with", None)
    trainer = PyTorchDDPTrainer(model, loss=loss, batch_size=batch_size, **given)
    trainer.runs_jobs_with = runs_with or trainer.runs_jobs_with
    own = data(has_ignored)
    history = trainer.fit(DataLoader(own, 8), DataLoader(own, batch_size))
    learned = [*model.parameters(), *getattr(loss, "parameters", list)()]
    (row,) = history.epochs
    figures = [row.loss, row.val_loss or 0.0, row.accuracy or 0.0]
    return [*torch.cat([p.detach().flatten() for p in learned]).tolist(), *figures]


CASES = [(name, False) for name in LOSSES] + [("plain", True), ("class weights", True)]
KINDS = ({}, {"backend": "scratch"}, {"zero_stage": 1})


def on_a_rank(context: RankContext, folder: str, port: int) -> list[list[float]]:
    meet(context, folder)
    ours.init_process_group(
        init_method=f"tcp://127.0.0.1:{port}",
        world_size=context.world_size,
        rank=context.rank,
        timeout_s=60,
    )
    found = []
    for name, has_ignored in CASES:
        for kind in KINDS:
            given: dict[str, Any] = {"runs_with": take_part, **kind}
            found.append(trained(name, 4, has_ignored=has_ignored, **given))
    ours.destroy_process_group()
    leave()
    return found


def test_two_ranks_take_the_step_of_one_with_every_loss(
    cluster: Cluster, tmp_path: Path
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        given = str(tmp_path), probe.getsockname()[1]
    run = cluster.run(on_a_rank, 2, *given, limits=LIMITS, journal=False)
    for found in run.require_finished().values:
        results = iter(found)
        for name, has_ignored in CASES:
            alone = trained(name, 8, has_ignored=has_ignored)
            for kind in KINDS:
                assert next(results) == pytest.approx(alone, rel=1e-5, abs=1e-6), (
                    name,
                    kind,
                )


@pytest.mark.parametrize(("name", "has_ignored"), CASES)
def test_two_microbatches_are_one_batch_with_every_loss(
    name: str, has_ignored: bool
) -> None:
    whole = trained(name, 8, has_ignored=has_ignored)
    parts = {"gradient_accumulation_steps": 2, "has_ignored": has_ignored}
    assert trained(name, 4, **parts) == pytest.approx(whole, rel=1e-5, abs=1e-6)


def test_all_targets_ignored_is_a_step_that_changes_nothing() -> None:
    model = net()
    before = model.weight.detach().clone()
    own = TensorDataset(torch.randn(4, 2), torch.full((4,), IGNORED))
    trainer = PyTorchDDPTrainer(model, optimizer=sgd, verbose=False)
    history = trainer.fit(DataLoader(own, 2))
    assert history.losses == (0.0, 0.0)
    assert model.weight.equal(before)


def combined(outputs: Tensor, targets: Tensor) -> Tensor:
    return weighted(outputs, targets) + outputs.square().mean()


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (nn.CrossEntropyLoss(reduction="none"), r"\b8\b.*reduction"),
        (lambda outputs, targets: 1.0, r"\bfloat\b"),
    ],
)
def test_a_loss_that_is_no_number_is_one_line(loss: Any, said: str) -> None:
    with pytest.raises(EngineError, match=said):
        PyTorchDDPTrainer(net(), loss=loss, verbose=False).fit(DataLoader(data(), 8))


def test_a_combined_loss_is_refused_where_its_parts_cannot_be_joined() -> None:
    def fit(**config: Any) -> History:
        trainer = PyTorchDDPTrainer(net(), loss=combined, verbose=False, **config)
        return trainer.fit(DataLoader(data(), 4))

    assert len(fit().losses) == 3
    with pytest.raises(EngineError, match="cross-entropy"):
        fit(gradient_accumulation_steps=2)


# ── optimizers ──────────────────────────────────────────────────────────────────────


class TwoParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = net(), net()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.body(inputs))
        return outputs


def rates_of(model: TwoParts) -> list[dict[str, Any]]:
    """The head learns, and the body does not."""
    head = {"params": model.head.parameters(), "lr": RATE}
    return [{"params": model.body.parameters(), "lr": 0.0}, head]


@pytest.mark.parametrize("how", ["optimizer", "function"])
def test_an_optimizer_reaches_for_the_parts_of_the_model(how: str) -> None:
    model = TwoParts()
    made = torch.optim.SGD(rates_of(model), momentum=0.9)
    given: Any = made
    if how == "function":
        given = lambda parameters: torch.optim.SGD(rates_of(model))  # noqa: E731
    trainer = PyTorchDDPTrainer(model, optimizer=given, verbose=False)
    trainer.fit(DataLoader(data(), 8))
    assert model.body.weight.equal(net().weight)
    assert not model.head.weight.equal(net().weight)
    if how == "optimizer":  # it goes on where it is
        assert made.state[model.head.weight]["momentum_buffer"].abs().sum() > 0
        assert [group["lr"] for group in made.param_groups] == [0.0, RATE]


def test_what_the_optimizer_does_not_have_is_not_in_the_norm() -> None:
    def last_norm(frozen: bool) -> float:
        model = TwoParts()
        model.body.requires_grad_(not frozen)
        head = torch.optim.SGD(model.head.parameters(), lr=RATE)
        trainer = PyTorchDDPTrainer(model, optimizer=head, epochs=3, verbose=False)
        return trainer.fit(DataLoader(data(), 8)).epochs[-1].grad_norm

    assert last_norm(frozen=False) == pytest.approx(last_norm(frozen=True), abs=1e-6)


class Inner(torch.optim.SGD):
    """Has what pickle does not know of."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=RATE)
        self.slow = torch.zeros(1)


def test_rates_of_groups_and_one_rate_contradict_each_other() -> None:
    model = TwoParts()
    made = torch.optim.SGD(rates_of(model))
    trainer = PyTorchDDPTrainer(model, optimizer=made, learning_rate=0.1)
    with pytest.raises(EngineError, match=r"0\.1.* 0, 0\.5"):
        trainer.fit(DataLoader(data(), 8))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda model: torch.optim.LBFGS(model.parameters()), "LBFGS"),
        (lambda model: torch.optim.LBFGS, "LBFGS"),
        (lambda model: sgd(net().parameters()), r"\b2 parameters"),
        (lambda model: lambda own: sgd(net().parameters()), r"\b2 parameters"),
        (lambda model: Inner(model.parameters()), r"\bInner\b.*\bslow\b"),
        (lambda model: lambda parameters: None, "NoneType"),
        (lambda model: lambda: sgd(model.parameters()), "argument"),
        (lambda model: 0.1, r"\bfloat\b"),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_one_line(
    make: Callable[[nn.Module], Any], said: str
) -> None:
    model = net()
    trainer = PyTorchDDPTrainer(model, optimizer=make(model), verbose=False)
    with pytest.raises(EngineError, match=said) as caught:
        trainer.fit(DataLoader(data(), 8))
    assert "\n" not in str(caught.value)
    assert not dist.is_initialized()  # the refusal has left the group again


def test_an_optimizer_that_pickle_does_not_know_is_made_by_a_function() -> None:
    trainer = PyTorchDDPTrainer(net(), optimizer=Inner, verbose=False)
    assert len(trainer.fit(DataLoader(data(), 8)).losses) == 2


# ── models ──────────────────────────────────────────────────────────────────────────


class Locked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Locked(), "lock"),
        (nn.LazyLinear(2), "lazy"),
        (nn.Linear(2, 2, device="meta"), "meta"),
        (nn.Flatten(), "requires_grad"),
        (net().requires_grad_(False), "requires_grad"),
        (cross_entropy, "function"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_model_that_cannot_be_trained_is_one_line(model: Any, said: str) -> None:
    with pytest.raises(EngineError, match=said) as caught:
        PyTorchDDPTrainer(model, verbose=False).fit(DataLoader(data(), 8))
    assert "\n" not in str(caught.value)


def test_a_wrapper_that_spreads_a_model_is_left_out() -> None:
    wrapper, plain = nn.DataParallel(net()), net()
    for model in (wrapper, plain):
        trainer = PyTorchDDPTrainer(model, optimizer=sgd, verbose=False)
        trainer.fit(DataLoader(data(), 8))
    assert wrapper.module.weight.equal(plain.weight)
    assert not plain.weight.equal(net().weight)


# ── loaders ─────────────────────────────────────────────────────────────────────────


class Seen(nn.Linear):
    """Notes the first input of each sample, which is its number."""

    numbers: list[int]

    def __init__(self) -> None:
        super().__init__(1, 2)
        Seen.numbers = []

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            Seen.numbers += inputs[:, 0].int().tolist()
        return super().forward(inputs)


def numbers(num_samples: int = NUM_SAMPLES) -> TensorDataset:
    inputs = torch.arange(num_samples, dtype=torch.float32)[:, None]
    return TensorDataset(inputs, torch.zeros(num_samples, dtype=torch.long))


def seen(loader: DataLoader[Any], epochs: int = 1, **config: Any) -> list[int]:
    PyTorchDDPTrainer(Seen(), epochs=epochs, verbose=False, **config).fit(loader)
    return Seen.numbers


class Backwards(Sampler[int]):
    """Counts its epochs by itself."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self.num_samples, self.told = num_samples, -1

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        self.told = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([self.told, *reversed(range(self.num_samples - 1))])


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


class Names(Backwards):
    def __iter__(self) -> Iterator[Any]:
        return iter(["a", "b"])


def test_samplers_say_which_samples_and_how_many() -> None:
    own = numbers()
    few = seen(DataLoader(own, 4, sampler=RandomSampler(own, num_samples=6)))
    assert len(set(few)) == 6
    part = seen(DataLoader(own, 4, sampler=SequentialSampler(range(4))))
    assert part == [0, 1, 2, 3]
    half = seen(DataLoader(own, 4, sampler=SubsetRandomSampler([1, 3, 5])))
    assert sorted(half) == [1, 3, 5]
    drawn = WeightedRandomSampler([0.0] * 7 + [1.0] * 2, 20)
    assert set(seen(DataLoader(own, 4, sampler=drawn))) == {7, 8}
    assert len(Seen.numbers) == 20
    batches = BatchSampler(SequentialSampler(own), 3, drop_last=True)
    assert seen(DataLoader(own, batch_sampler=batches)) == [*range(9)]


def test_an_order_is_told_its_epoch_and_continues_after_a_resume(
    tmp_path: Path,
) -> None:
    def loader(seed: int = 3) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(numbers(), 4, shuffle=True, generator=generator)

    counted = seen(DataLoader(numbers(), 10, sampler=Backwards()), epochs=2)
    assert (counted[0], counted[NUM_SAMPLES]) == (0, 1)
    whole = seen(loader(), epochs=3)
    assert whole[:NUM_SAMPLES] != whole[NUM_SAMPLES : 2 * NUM_SAMPLES]
    assert seen(loader(4), epochs=3) != whole
    part = {"checkpoint_dir": tmp_path, "resume_from_checkpoint": True}
    first = seen(loader(), epochs=2, **part)
    assert first + seen(loader(), epochs=3, **part) == whole


def test_a_distributed_sampler_gives_its_seed() -> None:
    own = numbers()

    def order(seed: int) -> list[int]:
        sampler = DistributedSampler(own, 1, 0, seed=seed)
        return seen(DataLoader(own, 4, sampler=sampler))

    assert order(7) != order(0) == seen(DataLoader(own, 4, shuffle=True))


class Subset(DistributedSampler[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter([0])


class Own(DataLoader[Any]):
    def __iter__(self) -> Any:
        return iter([])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda own: DataLoader(own, 4, sampler=Endless()), "Endless"),
        (lambda own: DataLoader(own, 4, sampler=Names()), r"Names.*str"),
        (
            lambda own: DataLoader(own, 4, sampler=SequentialSampler(range(12))),
            r"SequentialSampler.*\b9\b",
        ),
        (lambda own: DataLoader(own, 4, sampler=Subset(own, 2, 0)), "Subset"),
        (
            lambda own: DataLoader(own, 4, sampler=DistributedSampler([1, 2], 2, 0)),
            "DistributedSampler",
        ),
        (lambda own: DataLoader(own, batch_size=None), "batch_size"),
        (lambda own: Own(own, 4), r"\bOwn\b"),
    ],
)
def test_a_loader_whose_wishes_cannot_be_had_is_one_line(
    make: Callable[[Any], DataLoader[Any]], said: str
) -> None:
    for size in (None, 2):
        trainer = PyTorchDDPTrainer(Seen(), batch_size=size, verbose=False)
        with pytest.raises(EngineError, match=said) as caught:
            trainer.fit(make(numbers()))
        assert "\n" not in str(caught.value)


def test_settings_of_the_workers_reach_the_ranks_loader() -> None:
    def collate(batch: Any) -> Any:
        return batch

    def init(worker: int) -> None:
        """Nothing."""

    given: dict[str, Any] = {
        "num_workers": 2,
        "collate_fn": collate,
        "pin_memory": True,
        "timeout": 7,
        "worker_init_fn": init,
        "multiprocessing_context": "spawn",
        "prefetch_factor": 5,
        "persistent_workers": True,
        "in_order": False,
    }
    loader = DataLoader(numbers(), 4, **given)
    made = Batches(read_loader(loader, None, "train_loader")).of([])
    assert isinstance(made, DataLoader)
    method = made.multiprocessing_context.get_start_method()  # type: ignore[union-attr]
    assert method == given.pop("multiprocessing_context")
    assert {name: getattr(made, name) for name in given} == given


def test_drop_last_leaves_out_a_part_of_the_validation_too() -> None:
    last = TensorDataset(torch.ones(9, 2), torch.tensor([0] * 8 + [1]))

    def accuracy(drops: bool) -> float | None:
        model = net()
        torch.nn.init.zeros_(model.weight)
        with torch.no_grad():
            model.bias.copy_(torch.tensor([1.0, 0.0]))  # class 0, whatever comes
        trainer = PyTorchDDPTrainer(model, learning_rate=1e-9, verbose=False)
        own = DataLoader(last, 4, drop_last=drops)
        return trainer.fit(DataLoader(data(), 8), own).best_accuracy

    assert accuracy(True) == 1.0
    assert accuracy(False) == pytest.approx(8 / 9)


# ── random numbers ──────────────────────────────────────────────────────────────────


class Noise(Dataset[tuple[Tensor, int]]):
    """What each sample draws, in a worker or without one."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        assert get_worker_info() is None
        return torch.rand(2), 0


class Heard(nn.Linear):
    """Notes what was drawn for it, and what it draws."""

    drawn: list[float]

    def __init__(self) -> None:
        super().__init__(2, 2)
        Heard.drawn = []

    def forward(self, inputs: Tensor) -> Tensor:
        Heard.drawn += [*inputs.flatten().tolist(), torch.rand(()).item()]
        return super().forward(inputs)


def noisy(context: RankContext, folder: str) -> list[float]:
    meet(context, folder)
    torch.manual_seed(0)  # as a script does that both ranks run
    trainer = PyTorchDDPTrainer(Heard(), verbose=False, epochs=2)
    trainer.runs_jobs_with = take_part
    trainer.fit(DataLoader(Noise(), 2))
    leave()
    return Heard.drawn


def test_no_two_ranks_draw_the_same_random_numbers(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = cluster.run(noisy, 2, str(tmp_path), limits=LIMITS, journal=False)
    first, second = run.require_finished().values
    assert len({*first, *second}) == len(first) + len(second)


def test_the_callers_generators_are_left_as_they_are() -> None:
    trainer = PyTorchDDPTrainer(Heard(), verbose=False)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    trainer.fit(DataLoader(Noise(), 2, shuffle=True))
    assert torch.get_rng_state().equal(before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]


def test_random_numbers_are_those_of_the_seed_also_after_a_resume(
    tmp_path: Path,
) -> None:
    def drawn(epochs: int, **config: Any) -> list[float]:
        trainer = PyTorchDDPTrainer(Heard(), verbose=False, epochs=epochs, **config)
        trainer.fit(DataLoader(Noise(), 2))
        return Heard.drawn

    whole = drawn(2)
    assert drawn(2) == whole != drawn(2, seed=1)
    part = {"checkpoint_dir": tmp_path, "resume_from_checkpoint": True}
    assert drawn(1, **part) + drawn(2, **part) == whole
    assert len(drawn(1, seed=2**64 - 1)) > 0


# ── what the caller has set up ──────────────────────────────────────────────────────


class FrozenNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.head(self.norms(inputs))
        return scores


@pytest.mark.parametrize("backend", ["pytorch-ddp", "scratch", "fsdp2"])
def test_a_layer_in_evaluation_mode_stays_there(backend: str) -> None:
    data = TensorDataset(torch.randn(16, 4) + 3, torch.arange(16) % 2)
    for frozen, counts in (("norms.0", [0, 4]), ("", [4, 4])):
        model = FrozenNorms()
        model.get_submodule(frozen).eval()  # of all: as an evaluation has left it
        trainer = PyTorchDDPTrainer(model, verbose=False, epochs=2, backend=backend)
        trainer.fit(DataLoader(data, 8), DataLoader(data, 8))
        assert [int(norm.num_batches_tracked) for norm in model.norms] == counts


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
def test_a_scheduler_that_nobody_would_step_is_refused() -> None:
    model = nn.Linear(4, 2)
    data = DataLoader(TensorDataset(torch.randn(8, 4), torch.arange(8) % 2), 8)

    def scheduled(parameters: Any) -> torch.optim.Optimizer:
        made = torch.optim.SGD(parameters, lr=0.5)
        torch.optim.lr_scheduler.StepLR(made, 1)
        return made

    with pytest.raises(EngineError, match="scheduler"):
        PyTorchDDPTrainer(model, optimizer=scheduled, verbose=False).fit(data)
    own = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(own, 1)
    trainer = PyTorchDDPTrainer(model, optimizer=own, verbose=False)
    with pytest.raises(EngineError, match="scheduler"):
        trainer.fit(data, epochs=2)
    rates = []
    for _ in range(2):
        rates.append(trainer.fit(data).epochs[0].learning_rate)
        scheduler.step()
    assert rates == pytest.approx([0.5, 0.05])
