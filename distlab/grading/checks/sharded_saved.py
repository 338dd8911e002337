"""Checks of 3.13, `sharded_optimizer.stage1`, C4: state that is saved, and taken up."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.grading.checks import sharded_runs as runs
from distlab.grading.checks.after import judged_after
from distlab.grading.checks.sharded_mistakes import owner_of_each
from distlab.grading.checks.sharded_runs import One, flat
from distlab.grading.checks.sharded_stage1 import (
    TASK,
    WORLDS,
    a_shard_of_the_state,
    found_after,
)
from distlab.grading.clause import clause
from distlab.grading.harness import Implementation, RankHarness, Scenario
from distlab.grading.oracles import all_close, same_everywhere
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext, Run

ALL_OF_IT = "what self.optimizer.state[shard] has, all of it, under its own names"


make_adam = partial(torch.optim.Adam, lr=0.1)
MOMENTS = ("exp_avg", "exp_avg_sq")


def _layer(seed: int) -> nn.Sequential:
    """One layer of four parameters, so that a shard has many pieces."""
    linears = [nn.Linear(a, b, dtype=torch.float64) for a, b in ((5, 3), (3, 2))]
    model = nn.Sequential(nn.Sequential(*linears))
    generator = torch.Generator().manual_seed(seed + 3)
    for p in model.parameters():
        drawn = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        p.data.copy_(drawn)
    return model


def keep_adams(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """What state_dict gives after a step of Adam, which keeps more than one thing."""
    rank, n = context.rank, context.world_size
    model = _layer(seed)
    alone = runs.Alone(rank, n, context.comm.device)
    groups = [{"params": list(model.parameters())}]
    zero = unit.Stage1(alone, model, groups, make_adam)
    gradient = runs.next_gradient(seed, runs.weights_of(model))
    runs.give_gradients(zero, gradient, rank, n)
    zero.optimizer.step()
    return zero.state_dict()


def _with_adam(world_size: int) -> list[tuple[Scenario, dict[str, Any]]]:
    return [(keep_adams, {})]


@clause(TASK, "C4", worlds=WORLDS, also=_with_adam)
def saved_by_name(impl: Implementation, harness: RankHarness) -> str | None:
    """R: each piece's state under its name; and a step at another number of ranks."""
    with judged_after(a_shard_of_the_state, impl, harness, "C2"):
        return _judge(impl, harness)


def _judge(impl: Implementation, harness: RankHarness) -> str:
    run, n = harness.run(impl, runs.train_stage1), harness.world_size
    one = One(harness.seed)
    for step in range(runs.STEPS):
        gradient = runs.mean_of(one.gradients(step, n))
        one.step(gradient, runs.MAX_NORM.get(step, 0.0))
    right = same_everywhere(flat(runs.weights_of(one.model)), n)
    if not all_close(found_after(run, runs.STEPS - 1), right):
        raise NotJudgedError("the weights first: see C1 and C3")
    momentum = {
        name: one.optimizer.state[p]["momentum_buffer"].reshape(-1)
        for name, p in runs.trained(one.model).items()
    }
    for rank, value in enumerate(run.values):
        _expect_pieces(value["saved"], momentum, rank)
    _expect_whole([value["saved"] for value in run.values], momentum)
    _expect_adams(harness.run(impl, keep_adams), harness.seed)
    _expect_resumed(run, one)
    m = runs.other_world(n)
    return f"saved at {n} rank{'s' * (n > 1)}, gone on with at {m}"


def _expect_pieces(saved: Any, momentum: dict[str, Tensor], rank: int) -> None:
    what = "state_dict gives"
    if not isinstance(saved, dict):
        raise NotYetError(f"{what} {saved!r:.40}, not a dict", fatal=True)
    for name, piece in saved.items():
        if name not in momentum:
            raise NotYetError(
                f"{what} {name!r:.30}: no trained parameter is called that",
                rule="bucket.names has the names, in the order of bucket.sizes",
            )
        if not isinstance(piece, dict) or not {"start", "stop"} <= piece.keys():
            raise NotYetError(f"{what} no start and stop under {name}")
        _expect_part(name, rank, piece, "momentum_buffer", momentum)


def _expect_part(
    name: str, rank: int, piece: dict[str, Any], key: str, whole: dict[str, Tensor]
) -> None:
    """What is saved under `key` is that of the piece's elements."""
    start, stop, own = piece["start"], piece["stop"], piece.get(key)
    if not isinstance(own, Tensor):
        raise NotYetError(f"state_dict gives no {key} under {name}", rule=ALL_OF_IT)
    right = whole[name][start:stop]
    if own.dtype != right.dtype:
        raise NotYetError(
            f"state_dict gives {key} of {name} as {own.dtype}, kept is {right.dtype}",
            rule="what was rounded when it was saved goes on from other numbers",
        )
    if own.shape != right.shape or not torch.allclose(own, right, rtol=1e-9):
        raise _wrong_piece(name, rank, (start, stop), own)


def _expect_adams(run: Run, seed: int) -> None:
    model = _layer(seed)
    optimizer = make_adam(model.parameters())
    gradient = runs.next_gradient(seed, runs.weights_of(model))
    for name, p in model.named_parameters():
        p.grad = gradient[name]
    optimizer.step()
    named = dict(model.named_parameters())
    right = {
        key: {n: optimizer.state[p][key].reshape(-1) for n, p in named.items()}
        for key in MOMENTS
    }
    for rank, saved in enumerate(run.values):
        for name, piece in saved.items():
            for key in MOMENTS:
                _expect_part(name, rank, piece, key, right[key])
            step = piece.get("step")
            is_number = isinstance(step, int | float)
            is_number |= isinstance(step, Tensor) and not step.dim()
            if not is_number or float(step) != 1.0:
                raise NotYetError(
                    f"after a step of Adam state_dict gives {step!r:.40} "
                    f"as the step under {name}, not 1",
                    rule=ALL_OF_IT,
                )


def _wrong_piece(
    name: str,
    rank: int,
    piece: tuple[int, int],
    own: Tensor,
) -> NotYetError:
    start, stop = piece
    if own.numel() != stop - start:
        message = (
            f"rank {rank} saves {own.numel()} numbers as elements {start} … {stop - 1} "
            f"of {name}"
        )
    else:
        message = (
            f"what rank {rank} saves as elements {start} … {stop - 1} of {name} is the "
            "state of others"
        )
    return NotYetError(
        message,
        slug="shard-under-whole-name",
        rule="bucket.pieces says which elements of which parameter the shard has, one "
        "piece after another",
    )


def _expect_whole(states: list[Any], momentum: dict[str, Tensor]) -> None:
    for name, whole in momentum.items():
        count = sum(s[name]["stop"] - s[name]["start"] for s in states if name in s)
        if count != whole.numel():
            raise NotYetError(
                f"{name} has {whole.numel()} elements, and all ranks together save the "
                f"state of {count}",
                slug="shard-under-whole-name" if count > whole.numel() else "",
                rule="each rank saves the pieces that it owns, and no others",
            )


def _expect_resumed(run: Run, one: One) -> None:
    n = runs.other_world(run.world_size)
    one.step(runs.next_gradient(one.seed, runs.weights_of(one.model)))
    right = flat(runs.weights_of(one.model))
    owners = owner_of_each(one.seed, n)
    for value in run.values:
        for resumed in value["resumed"]:
            if "error" in resumed:
                raise NotYetError(
                    f"load_state_dict on {n} ranks: {resumed['error']}",
                    rule="what state_dict gives is what load_state_dict reads",
                )
            mine = owners == resumed["rank"]
            if not torch.allclose(flat(resumed["weights"])[mine], right[mine]):
                raise NotYetError(
                    f"saved at {run.world_size} ranks, gone on with at {n}: the next "
                    f"step of rank {resumed['rank']} is not that of one process",
                    rule="all that the optimizer keeps belongs into the state",
                )
