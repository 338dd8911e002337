"""Every field of DistributedConfig: what it does, and that its test notices its loss.

Each function of engine_effects.py runs twice: as it is, when it passes, and with its
field taken out of DistributedConfig, so that everybody reads the default. Then it must
fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from distlab.engines import DistributedConfig, PyTorchDDPTrainer
from distlab.engines.start import take_part
from distlab.runner import Cluster, RankContext
from tests.corpora.both_ways import leave, meet
from tests.corpora.engine_ranks import LIMITS
from tests.workbench.engine_effects import EFFECTS
from tests.workbench.engine_probes import Net, loader


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
    default = getattr(DistributedConfig(), name)

    def ignore(config: object, value: object) -> None:
        """As if the value had not been given."""

    gone = property(lambda config: default, ignore)
    monkeypatch.setattr(DistributedConfig, name, gone)


@pytest.mark.parametrize("name", EFFECTS)
def test_a_field_has_its_effect(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    EFFECTS[name](tmp_path, monkeypatch)


@pytest.mark.parametrize("name", EFFECTS)
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


SHARES = (
    {"zero_stage": 1},
    {"backend": "fsdp2", "zero_stage": 2},
    {"backend": "fsdp2"},
)


class Counting(torch.optim.SGD):
    """Notes how many numbers it updates."""

    held = 0

    def step(self, closure: Any = None) -> Any:
        own = [p for group in self.param_groups for p in group["params"]]
        Counting.held = sum(
            getattr(p, "to_local", lambda p=p: p)().numel() for p in own
        )
        return super().step(closure)


def held_by(context: RankContext, folder: str) -> list[int]:
    """How many numbers the optimizer of this rank updates, by configuration."""
    meet(context, folder)
    found = []
    for config in SHARES:
        trainer = PyTorchDDPTrainer(
            Net(), optimizer=lambda own: Counting(own, lr=0.1), verbose=False, **config
        )
        trainer.runs_jobs_with = take_part
        trainer.fit(loader(), max_steps=1)
        found.append(Counting.held)
    leave()
    return found


def test_two_ranks_share_what_the_optimizer_holds(
    cluster: Cluster, tmp_path: Path
) -> None:
    run = cluster.run(held_by, 2, str(tmp_path), limits=LIMITS, journal=False)
    in_all = sum(parameter.numel() for parameter in Net().parameters())
    for one, other in zip(*run.require_finished().values, strict=True):
        assert max(one, other) < one + other == in_all
