"""The table of strategies: ours, and one that another package registers."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from distlab.cli import train_verb
from distlab.engines import DistributedConfig, EngineError, strategies
from distlab.engines.config import config_from
from distlab.engines.strategies import (
    LIMITS,
    ONLY_SOME,
    find_strategy,
    is_rank,
    rank_of_launcher,
    ranks_of_job,
    register_strategy,
)
from distlab.engines.strategy import Strategy
from distlab.registry import written_names
from tests.workbench.other_package import install_package, run_beside

ROOT = Path(__file__).parents[2]
ENGINES = ROOT / "distlab" / "engines"
OURS = ("pytorch-ddp", "fsdp2", "scratch", "deepspeed", "horovod", "ray", "tensorflow")


def test_every_file_of_a_strategy_is_in_the_table() -> None:
    names = strategies.strategy_names()
    assert set(OURS) <= {*names}
    assert names[0] == strategies.DEFAULT == config_from({}).backend
    files = {path.stem for path in ENGINES.glob("*_strategy.py")}
    homes = {f"{one.factory.__module__}.py" for one in strategies.strategies()}
    own = {home.split(".")[-2] for home in homes}
    assert files - own <= {"ray_strategy"}  # whose ranks are torch's
    for one in strategies.strategies():
        assert issubclass(one.factory, Strategy)  # type: ignore[arg-type]


def test_the_help_text_reads_the_names_without_importing_torch() -> None:
    names = written_names(ENGINES, "strategy", strategies.GROUP)
    assert {*names} == {*strategies.strategy_names()}
    assert train_verb.DEFAULT == strategies.DEFAULT
    code = (
        "import sys; from distlab.cli.app import app\n"
        "try:\n    app(['train', '--help'])\n"
        "finally:\n    assert 'torch' not in sys.modules"
    )
    done = run_beside(ROOT, "-c", code)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in names)


def test_an_entry_names_fields_that_exist() -> None:
    known = {field.name for field in fields(DistributedConfig)}
    assert {*LIMITS, *ONLY_SOME} <= known
    for one in strategies.strategies():
        assert {*one.takes} <= {*ONLY_SOME, "address"}
        assert {*one.implied_by, *one.refusals} <= known
        assert {*one.zero_stages} <= {0, 1, 2, 3}
        assert one.default_stage in one.zero_stages


def test_no_reader_of_the_table_names_a_strategy_that_is_installed_apart() -> None:
    apart = [one.name for one in strategies.strategies() if one.needs]
    assert apart
    readers = ("strategies", "start", "script", "rank", "worker", "strategy", "config")
    for reader in readers:
        code = (ENGINES / f"{reader}.py").read_text().split('"""', 2)[2]
        named = [name for name in apart if f'backend == "{name}"' in code]
        assert (reader, named) == (reader, [])


def test_a_launcher_is_known_by_the_variable_in_its_entry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    assert (is_rank(), rank_of_launcher(), ranks_of_job(7)) == (False, 0, 7)
    launched = [one for one in strategies.strategies() if one.rank_variable]
    assert launched
    for one in launched:
        with monkeypatch.context() as set_here:
            set_here.setenv(one.rank_variable, "3")
            set_here.setenv(one.world_size_variable, "5")
            assert (is_rank(), rank_of_launcher(), ranks_of_job(7)) == (True, 3, 5)


def test_a_name_belongs_to_one_module() -> None:
    class Other(Strategy):
        """From elsewhere."""

    with pytest.raises(ValueError, match=r"distlab\.engines\.torch_strategy"):
        register_strategy("fsdp2", Other)
    assert find_strategy("fsdp2").factory is not Other


def test_a_strategy_that_is_not_installed_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for one in strategies.strategies():
        if not one.needs:
            one.expect_installed()
            continue
        top = one.needs.partition(".")[0]
        with monkeypatch.context() as hidden:
            hidden.setitem(sys.modules, top, None)
            hidden.setitem(sys.modules, one.needs, None)
            with pytest.raises(EngineError, match=f"{one.name} needs {top}") as caught:
                one.expect_installed()
        assert "\n" not in str(caught.value)


# ── another package ─────────────────────────────────────────────────────────────────

AVERAGING = '''
"""Gradients that are averaged one after the other, once backward() is done."""

import torch.distributed as dist

from distlab.engines.optimizers import make_optimizer
from distlab.engines.strategies import register_strategy
from distlab.engines.torch_strategy import InDefaultGroup


class Averaging(InDefaultGroup):
    def __init__(self, config, model, optimizer):
        super().__init__(config, model)
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, 0)
        self.optimizer = make_optimizer(model, optimizer)
        self.forward = model

    def step(self):
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.world_size
        return super().step()


register_strategy(
    "averaging", Averaging, communication_backends=("gloo",), keeps_optimizer=True
)
'''
POINTS = """
[distlab.strategies]
averaging = other_strategies.averaging
broken = other_strategies.missing
silent = other_strategies
"""
SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
from distlab.engines import PyTorchDDPTrainer


def main(out, backends):
    torch.manual_seed(1)
    inputs = torch.randn(48, 4, dtype=torch.double)
    loader = DataLoader(TensorDataset(inputs, (inputs[:, 0] > 0).long()), 8)
    found = {}
    for backend in backends:
        torch.manual_seed(2)
        model = torch.nn.Linear(4, 2, dtype=torch.double)
        given = {"backend": backend} if backend else {}
        trainer = PyTorchDDPTrainer(
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9),
            verbose=False,
            epochs=2,
            **given,
            **({} if "RANK" in os.environ else {"num_gpus": 2}),
        )
        history = trainer.fit(loader)
        weights = torch.nn.utils.parameters_to_vector(model.parameters()).tolist()
        name = f"{history.backend} {history.num_gpus}"
        found[name] = [list(history.losses), weights]
    Path(out + os.environ.get("RANK", "")).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
"""


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A folder in which a package with strategies is installed, as pip would do it."""
    install_package(tmp_path, "other_strategies", POINTS, averaging=AVERAGING)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.slow
def test_another_packages_strategy_trains_as_torchs_ddp_does(other: Path) -> None:
    done = run_beside(other, "train.py", "found", "averaging", "pytorch-ddp")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((other / "found").read_text())
    for own, expected in zip(found["averaging 2"], found["pytorch-ddp 2"], strict=True):
        assert own == pytest.approx(expected, abs=1e-12)
    line = ("--script", "train.py", "--num-gpus", "2", "--backend", "averaging")
    done = run_beside(other, "-m", "distlab", "train", *line, "--", "ranks", "")
    assert done.returncode == 0, done.stderr
    for rank in "01":
        ranks = json.loads((other / f"ranks{rank}").read_text())
        assert ranks["averaging 2"] == [
            pytest.approx(one, abs=1e-12) for one in found["averaging 2"]
        ]


@pytest.mark.slow
def test_the_command_line_knows_it_and_refuses_a_broken_one(other: Path) -> None:
    helped = run_beside(other, "-m", "distlab", "train", "--help")
    assert helped.returncode == 0
    assert "averaging" in helped.stdout
    refused = {
        "broken": r"other_strategies.missing",
        "silent": r"no strategy 'silent'",
        "averagin": r"averaging",
    }
    for backend, said in refused.items():
        line = ("--script", "train.py", "--backend", backend)
        done = run_beside(other, "-m", "distlab", "train", *line)
        assert done.returncode == 2
        assert said in done.stderr
        assert "Traceback" not in done.stderr
