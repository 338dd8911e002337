"""Every field of DistributedConfig: what it does, and that its test notices its loss.

Each function of engine_effects.py runs twice: as it is, when it passes, and with its
field taken out of DistributedConfig, so that everybody reads the default. Then it must
fail.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from distlab.engines import DistributedConfig, PyTorchDDPTrainer
from tests.workbench.engine_effects import EFFECTS
from tests.workbench.engine_probes import Net, loader

STARTS_RANKS = {"num_gpus", "lr_scaling"}


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    Net.seen.clear()
    Net.newest = None


def without_effects(names: set[str]) -> set[str]:
    """The fields among `names` that nothing here shows the effect of."""
    return names - EFFECTS.keys()


def take_out(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whatever is given for the field, it has its default, in started ranks too."""
    (field,) = (one for one in fields(DistributedConfig) if one.name == name)

    def ignore(config: object, value: object) -> None:
        """As if the value had not been given."""

    gone = property(lambda config: field.default, ignore)
    monkeypatch.setattr(DistributedConfig, name, gone)


CASES = [
    pytest.param(name, marks=pytest.mark.slow if name in STARTS_RANKS else ())
    for name in EFFECTS
]


@pytest.mark.parametrize("name", CASES)
def test_a_field_has_its_effect(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    EFFECTS[name](tmp_path, monkeypatch)


@pytest.mark.parametrize("name", CASES)
def test_what_shows_the_effect_fails_without_the_field(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_out(monkeypatch, name)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        EFFECTS[name](tmp_path, monkeypatch)


def test_every_field_is_shown() -> None:
    named = {field.name for field in fields(DistributedConfig)}
    assert without_effects(named) == set()
    assert EFFECTS.keys() <= named
    assert without_effects(named | {"a_new_field"}) == {"a_new_field"}


# ── what takes two ranks to be seen ─────────────────────────────────────────────────


def counting(folder: Path) -> Any:
    """Makes an optimizer that writes down how many numbers this rank updates."""

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            own = [p for group in self.param_groups for p in group["params"]]
            held = sum(getattr(p, "to_local", lambda p=p: p)().numel() for p in own)
            (folder / f"{os.environ['RANK']}.txt").write_text(str(held))
            return super().step(closure)

    return lambda parameters: Counting(parameters, lr=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [{"zero_stage": 1}, {"backend": "fsdp2", "zero_stage": 2}, {"backend": "fsdp2"}],
    ids=str,
)
def test_two_ranks_share_what_the_optimizer_holds(
    config: dict[str, Any], tmp_path: Path
) -> None:
    model = Net()
    trainer = PyTorchDDPTrainer(
        model, optimizer=counting(tmp_path), verbose=False, num_gpus=2, **config
    )
    trainer.fit(loader(), max_steps=1)
    held = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(held) == 2
    assert max(held) < sum(held) == sum(p.numel() for p in model.parameters())
