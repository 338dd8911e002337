"""Random numbers and the environment per rank, and code that never comes to an end."""

from __future__ import annotations

import os
import random
import re
import threading
from typing import Any

import numpy as np
import pytest
import torch

from distlab.runner import RankContext, RunnerError
from distlab.sim import generators, run
from tests.workbench.golden import Golden
from tests.workbench.refusals import refusal

ATTEMPTS: list[int] = []


def pass_on(ctx: RankContext) -> None:
    n, box = ctx.world_size, torch.zeros(1)
    ctx.comm.sendrecv(box, (ctx.rank + 1) % n, box.clone(), (ctx.rank - 1) % n)


def draws(ctx: RankContext, kind: str, before: int, after: int) -> list[float]:
    """`before` numbers, a message, then three times `after` numbers and a message."""
    one = {
        "torch": lambda: float(torch.rand(1)),
        "normal": lambda: float(torch.randn(1)),
        "python": random.random,
        "gauss": lambda: random.gauss(0, 1),
        "numpy": lambda: float(np.random.rand()),
        "randn": lambda: float(np.random.randn()),
    }[kind]
    ATTEMPTS.append(ctx.rank)
    numbers = [one() for _ in range(before)]
    pass_on(ctx)
    for _ in range(3):
        if ctx.rank:
            numbers += [one() for _ in range(after)]
        pass_on(ctx)
    return numbers


def alone(kind: str, seed: int, count: int) -> list[float]:
    torch_numbers = torch.Generator().manual_seed(seed)
    python, numpy = random.Random(seed), np.random.RandomState(seed)
    one = {
        "torch": lambda: float(torch.rand(1, generator=torch_numbers)),
        "normal": lambda: float(torch.randn(1, generator=torch_numbers)),
        "python": python.random,
        "gauss": lambda: python.gauss(0, 1),
        "numpy": lambda: float(numpy.rand()),
        "randn": lambda: float(numpy.randn()),
    }[kind]
    return [one() for _ in range(count)]


@pytest.mark.parametrize("carrier", ["auto", "greenlets", "threads"])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (0, 1), (3, 0), (0, 211)])
@pytest.mark.parametrize(
    "kind", ["torch", "normal", "python", "gauss", "numpy", "randn"]
)
def test_a_ranks_numbers_are_those_it_would_draw_alone(
    kind: str, before: int, after: int, carrier: Any
) -> None:
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    values = run(
        draws, 3, kind, before, after, seed=7, isolate=True, carrier=carrier
    ).values
    for rank, numbers in enumerate(values):
        assert numbers == alone(kind, 7 + rank, before + (3 * after if rank else 0))
    first = float(torch.rand(1)), random.random(), float(np.random.rand())
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    assert first == (float(torch.rand(1)), random.random(), float(np.random.rand()))


@pytest.mark.parametrize(
    ("before", "after", "attempts"), [(1, 1, 1), (3, 0, 1), (0, 1, 2), (0, 0, 1)]
)
def test_only_who_draws_late_starts_a_run_over(
    before: int, after: int, attempts: int
) -> None:
    ATTEMPTS.clear()
    run(draws, 3, "torch", before, after)
    assert len(ATTEMPTS) == 3 * attempts


def test_a_generator_that_cannot_be_looked_into_is_always_swapped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generators, "engine_memory", lambda generator: None)
    values = run(draws, 3, "torch", 0, 2, seed=7).values
    assert values == [alone("torch", 7 + rank, 6 if rank else 0) for rank in range(3)]


def test_the_look_sees_every_draw() -> None:
    memory = generators.engine_memory(torch.default_generator)
    assert memory is not None
    for draw in (
        lambda: torch.rand(1),
        lambda: torch.randn(1),
        lambda: torch.randn(1),  # the second of a pair: no number is drawn for it
        lambda: torch.rand(624),  # as many as the engine has words
        lambda: torch.manual_seed(3),
    ):
        before = memory.raw
        draw()
        assert memory.raw != before
    before = memory.raw
    torch.zeros(3).add_(1)
    assert memory.raw == before


def looks_around(ctx: RankContext) -> list[str]:
    os.environ["MINE"] = str(ctx.rank)
    os.environ.pop("DISTLAB_TEST_TAKEN", None)
    pass_on(ctx)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MINE")
    return [os.environ[name] for name in names] + [os.getenv("HOME_OF_ALL", "")]


def test_each_rank_has_its_own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME_OF_ALL", "here")
    monkeypatch.setenv("DISTLAB_TEST_TAKEN", "kept")
    monkeypatch.delenv("RANK", raising=False)
    values = run(looks_around, 3, isolate=True).values
    assert values == [[str(r), str(r), "3", str(r), "here"] for r in range(3)]
    assert os.environ["DISTLAB_TEST_TAKEN"] == "kept"
    assert "RANK" not in os.environ
    assert "MINE" not in os.environ


def spins(ctx: RankContext, stubborn: bool) -> None:
    pass_on(ctx)
    while ctx.rank == 1:
        try:
            while True:
                pass  # THE SPIN
        except BaseException:
            if not stubborn:
                raise
            stubborn = False


@pytest.mark.parametrize("stubborn", [False, True])
@pytest.mark.parametrize("carrier", ["greenlets", "threads"])
def test_a_rank_that_spins_is_ended_by_the_wall_clock(
    carrier: Any, stubborn: bool
) -> None:
    before = threading.active_count()
    place = r"rank 1\b.*test_sim_isolation\.py:\d+"
    with pytest.raises(RunnerError, match=rf"\b0\.2 s\b.*{place}"):
        run(spins, 3, stubborn, wall_limit_s=0.2, carrier=carrier)
    assert threading.active_count() == before


@pytest.mark.parametrize("stubborn", [False, True])
@pytest.mark.parametrize("carrier", ["greenlets", "threads"])
def test_a_rank_that_holds_on_to_its_turn_is_named(
    carrier: Any, stubborn: bool
) -> None:
    place = r"rank 1\b.*test_sim_isolation\.py:\d+"
    with pytest.raises(RunnerError, match=rf"\b0\.2 s\b.*{place}"):
        run(spins, 3, stubborn, turn_limit_s=0.2, carrier=carrier)


def test_each_limit_has_its_own_words(golden: Golden) -> None:
    told = [
        refusal(RunnerError, run, spins, 3, False, **{limit: 0.2})
        for limit in ("wall_limit_s", "turn_limit_s")
    ]
    golden("sim/time-limits", re.sub(r"\.py:\d+", ".py:<line>", "\n".join(told)))


@pytest.mark.parametrize("limit", ["wall_limit_s", "turn_limit_s"])
def test_a_run_in_time_does_not_feel_the_limit(limit: str) -> None:
    done = run(draws, 3, "torch", 1, 1, **{limit: 60.0})
    assert done.outcome == "finished"
