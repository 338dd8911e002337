"""torchft with real replicas, of which one is killed; `make test-torchft`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from distlab.engines import EngineError, PyTorchDDPTrainer
from distlab.engines.torchft_strategy import LIFE
from distlab.models.mlp import make_mlp
from tests.corpora import engine_ranks as ranks

os.environ.setdefault("RUST_LOG", "error")  # or torchft logs each message
pytest.importorskip("torchft", reason="`make test-torchft` installs it")
ROOT = Path(__file__).parents[2]
LIMIT_S = 240.0
CASES: dict[str, dict[str, Any]] = {
    "two": {"num_gpus": 2},
    "three": {"num_gpus": 3},
    "microbatches": {"num_gpus": 2, "gradient_accumulation_steps": 3, "batch_size": 2},
    "clipped": {"num_gpus": 2, "gradient_clipping": 0.01},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_steps_are_those_of_torch_ddp(case: dict[str, Any]) -> None:
    given: dict[str, Any] = {"epochs": 2, "batch_size": 8, "verbose": False, **case}
    histories, weights = [], []
    for backend in ("pytorch-ddp", "torchft"):
        model = make_mlp()
        trainer = PyTorchDDPTrainer(
            model, optimizer=ranks.momentum, backend=backend, **given
        )
        histories.append(trainer.fit(*ranks.loaders(), max_steps=20))
        weights.append(torch.nn.utils.parameters_to_vector(model.parameters()))
    expected, found = histories
    assert (found.backend, found.num_gpus) == ("torchft", case["num_gpus"])
    assert len(found.losses) == len(expected.losses) >= 10
    gap = float((weights[0] - weights[1]).detach().abs().max())
    print(f"largest difference to DDP: weights {gap:.1e}")
    assert gap <= 1e-10
    assert found.best_accuracy == expected.best_accuracy
    assert found.epochs[-1].val_loss == pytest.approx(expected.epochs[-1].val_loss)


# ── a replica is killed ─────────────────────────────────────────────────────────────

SCRIPT = '''
"""Trains on digits. Each replica notes its steps, and stops at some to be looked at.

At step `hold`, every replica that was there from the start waits for the file `go`.
"""

import json, os, sys, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
from distlab.data.digits import load_digits_split
from distlab.engines import PyTorchDDPTrainer
from distlab.engines.torchft_strategy import LIFE, TorchFT
from distlab.engines.torchft_strategy import LIFE
from distlab.models.mlp import make_mlp

out, hold = Path(sys.argv[1]), int(sys.argv[2])
name = os.environ["RANK"] + "." + os.environ[LIFE]
notes = (out / f"steps.{name}").open("a", buffering=1)
num_steps = 0


class Noted(TorchFT):
    def __init__(self, *own):
        super().__init__(*own)
        (out / f"pid.{name}").write_text(str(os.getpid()))

    def share_state(self, state, take):
        self.position = state
        super().share_state(state, take)

    def learn(self, *own):
        number = self.position()["num_steps"]
        if number == hold and self.life == 0 and not self.is_in_step:
            (out / f"held.{name}").touch()
            while not (out / "go").exists():
                time.sleep(0.01)
        return super().learn(*own)

    def step(self):
        number = self.position()["num_steps"]
        if number == 5 and self.life == 0:
            (out / f"here.{name}").touch()
            if self.rank == int(sys.argv[3]):
                # Inside a step, while the others wait for its gradients.
                time.sleep(600)
        norm = super().step()
        note = [time.time(), number, self.num_present]
        notes.write(json.dumps(note) + "\\n")
        return norm


from distlab.engines import strategies
strategies.find_strategy("torchft")
strategies._table["torchft"] = __import__("dataclasses").replace(
    strategies._table["torchft"], factory=Noted
)
digits = load_digits_split()
train = TensorDataset(digits.train_inputs, digits.train_targets)
held_out = TensorDataset(digits.held_out_inputs, digits.held_out_targets)
torch.manual_seed(0)
model = make_mlp()
trainer = PyTorchDDPTrainer(
    model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    epochs=3,
    verbose=False,
)
history = trainer.fit(
    DataLoader(train, 16, shuffle=True), DataLoader(held_out, 100)
)
weights = torch.nn.utils.parameters_to_vector(model.parameters()).tolist()
found = [history.num_gpus, list(history.losses), history.best_accuracy, weights]
(out / f"found.{name}").write_text(json.dumps(found))
'''


@contextlib.contextmanager
def training(folder: Path, num_replicas: int, hold: int, killed: int) -> Iterator[Any]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    line = [sys.executable, "-m", "distlab", "train", "--script", str(script)]
    line += ["--backend", "torchft", "--num-gpus", str(num_replicas)]
    line += ["--", str(folder), str(hold), str(killed)]
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(line, cwd=ROOT, stderr=said)
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def wait_for(path: Path, process: Any) -> None:
    until = time.monotonic() + LIMIT_S
    while not path.exists():
        said = (path.parent / "said").read_text()
        assert process.poll() is None, said
        assert time.monotonic() < until, f"{path.name} is missing: {said}"
        time.sleep(0.02)


def steps(folder: Path, name: str) -> list[tuple[float, int, int]]:
    lines = (folder / f"steps.{name}").read_text().splitlines()
    return [tuple(json.loads(line)) for line in lines]


@pytest.mark.parametrize(("num_replicas", "killed"), [(2, 1), (3, 0)])
def test_a_replica_that_is_killed_is_left_out_and_comes_back(
    num_replicas: int, killed: int, tmp_path: Path
) -> None:
    hold = 20
    others = [replica for replica in range(num_replicas) if replica != killed]
    with training(tmp_path, num_replicas, hold, killed) as process:
        for replica in range(num_replicas):
            wait_for(tmp_path / f"here.{replica}.0", process)
        killed_s = time.time()
        os.kill(int((tmp_path / f"pid.{killed}.0").read_text()), signal.SIGKILL)
        # The others train without it up to the step where they wait for its return.
        for replica in others:
            wait_for(tmp_path / f"held.{replica}.0", process)
        wait_for(tmp_path / f"pid.{killed}.1", process)
        (tmp_path / "go").touch()
        assert process.wait(LIMIT_S) == 0, (tmp_path / "said").read_text()
    taken = steps(tmp_path, f"{others[0]}.0")
    numbers = [number for _, number, _ in taken]
    assert numbers == [*range(len(numbers))]
    present = [num for _, _, num in taken]
    # All five steps before it, and none after it until the replica comes back.
    assert present[:5] == [num_replicas] * 5
    assert present[5:hold] == [num_replicas - 1] * (hold - 5)
    assert present[-1] == num_replicas
    joined = steps(tmp_path, f"{killed}.1")
    assert joined[0][1] >= hold
    assert joined[-1][1] == numbers[-1]
    next_s = min(at_s for at_s, number, _ in taken if number == 5) - killed_s
    print(f"{num_replicas} replicas: next step {next_s:.2f} s after the kill, back at")
    print(f"step {joined[0][1]} of {len(numbers)}")
    names = [*(f"{replica}.0" for replica in others), f"{killed}.1"]
    found = [json.loads((tmp_path / f"found.{name}").read_text()) for name in names]
    for num_gpus, losses, accuracy, weights in found:
        assert num_gpus == num_replicas
        assert len(losses) == len(numbers)
        assert losses[-1] < losses[0]
        assert accuracy > 0.8
        assert weights == found[0][3]  # bit for bit


def is_alive(pid: str) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has prctl")
def test_replicas_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    with training(tmp_path, 2, hold=0, killed=-1) as process:
        for replica in range(2):
            wait_for(tmp_path / f"held.{replica}.0", process)
        pids = [(tmp_path / f"pid.{replica}.0").read_text() for replica in range(2)]
        assert all(map(is_alive, pids))
        process.kill()
        process.wait()
        until = time.monotonic() + LIMIT_S
        while any(map(is_alive, pids)):
            assert time.monotonic() < until
            time.sleep(0.02)


class KillsReplica0:
    """A loss that kills replica 0 in its sixth forward."""

    num_calls = 0

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        is_first = (os.environ["RANK"], os.environ[LIFE]) == ("0", "0")
        if is_first and self.num_calls == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.nn.functional.cross_entropy(outputs, targets)


def test_fit_returns_though_rank_0_was_killed() -> None:
    loader, _ = ranks.loaders()
    model = make_mlp()
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    trainer = PyTorchDDPTrainer(
        model,
        loss=KillsReplica0(),
        optimizer=ranks.momentum,
        backend="torchft",
        num_gpus=2,
        batch_size=8,
        verbose=False,
    )
    history = trainer.fit(loader, epochs=2)
    size = len(loader.dataset)  # type: ignore[arg-type]
    assert len(history.losses) == 2 * -(-size // 16)
    after = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    assert not torch.equal(before, after)
    assert bool(after.isfinite().all())


def failing(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("the loss is wrong")


def test_a_failure_is_one_line() -> None:
    loader, _ = ranks.loaders()
    trainer = PyTorchDDPTrainer(
        make_mlp(), loss=failing, backend="torchft", num_gpus=2, verbose=False
    )
    with pytest.raises(EngineError, match=r"rank \d .*RuntimeError: the loss is wrong"):
        trainer.fit(loader)


def test_a_checkpoint_of_ddp_is_continued(tmp_path: Path) -> None:
    loader, _ = ranks.loaders()
    given: dict[str, Any] = {"batch_size": 8, "num_gpus": 2, "checkpoint_dir": tmp_path}
    make: dict[str, Any] = {"optimizer": ranks.momentum, "verbose": False}
    whole, other = make_mlp(), make_mlp()
    PyTorchDDPTrainer(whole, **make, **given, epochs=2).fit(loader)
    (tmp_path / "epoch_0002.pt").unlink()
    again = {"backend": "torchft", "resume_from_checkpoint": True, "epochs": 2}
    history = PyTorchDDPTrainer(other, **make, **given, **again).fit(loader)
    assert len(history.epochs) == 2
    pairs = zip(whole.parameters(), other.parameters(), strict=True)
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) <= 1e-10
    assert (tmp_path / "epoch_0002.pt").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mixed_precision": "fp16"}, "torchft"),
        ({"communication_backend": "nccl"}, "torchft"),
        ({"zero_stage": 1}, "torchft"),
        ({"monitor_dir": "a"}, "monitor_dir"),
        ({"num_nodes": 2, "num_gpus": 2}, "one node"),
    ],
)
def test_what_it_cannot_do_is_one_line(given: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineError, match=said) as caught:
        PyTorchDDPTrainer(make_mlp(), backend="torchft", **given)
    assert "\n" not in str(caught.value)
