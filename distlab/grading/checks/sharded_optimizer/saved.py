"""Checks of 3.15, `sharded_optimizer.state`: what is saved, and what continues."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.grading.checks.sharded_optimizer import scenarios, shards
from distlab.grading.checks.sharded_optimizer.mistakes import owner_of_each
from distlab.grading.checks.sharded_optimizer.scenarios import One
from distlab.grading.checks.sharded_optimizer.stage1 import WORLDS
from distlab.grading.clause import clause
from distlab.grading.kit.flat import flat
from distlab.grading.runs import Runs, RunSpec, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext, Run

TASK = "sharded_optimizer.state"
ALL_OF_IT = "save every entry of self.optimizer.state[shard], under its own key"


MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "trace")


class Traced(torch.optim.Adam):
    """Adam that keeps an entry which no optimizer of torch has."""

    def step(self, closure: Any = None) -> Any:
        """The same; then keep a trace of each gradient."""
        loss = super().step(closure)
        for p, state in self.state.items():
            if p.grad is not None:
                state["trace"] = p.grad.detach().to(torch.float32)
        return loss


make_adam = partial(Traced, lr=0.1, amsgrad=True)


def _layer(seed: int) -> nn.Sequential:
    """A layer of four parameters, so that a shard has many ranges; a layer of 3."""
    linears = [nn.Linear(a, b, dtype=torch.float64) for a, b in ((5, 3), (3, 2))]
    tied = nn.Sequential(*linears, linears[1])  # its parameters have two names each
    model = nn.Sequential(tied, scenarios.Scale())
    generator = torch.Generator().manual_seed(seed + 3)
    for p in model.parameters():
        drawn = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        p.data.copy_(drawn)
    return model


def _gradient(seed: int, model: nn.Module) -> dict[str, Tensor]:
    """A drawn one, the same on every rank; one element is infinite, one layer's 0."""
    gradient = shards.drawn_gradient(seed, scenarios.weights_of(model))
    gradient["1.gain"].zero_()
    next(iter(gradient.values())).view(-1)[0] = torch.inf
    return gradient


def keep_adams(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """What state_by_name gives before and after a step that leaves several entries."""
    rank, n = context.rank, context.world_size
    model = _layer(seed)
    alone = shards.Alone(rank, n, context.comm.device, context.comm.local_rank)
    groups = [{"params": list(model.parameters())}]
    zero = unit.ShardedOptimizer(alone, model, groups, make_adam)
    shards.give_gradients(zero, _gradient(seed, model), rank, n)
    before = zero.state_by_name()
    zero.optimizer.step()
    return {"before": before, "after": zero.state_by_name()}


def _after_steps(seed: int) -> One:
    """One process after the steps of `shards.save_state`."""
    one = One(seed)
    for step in range(scenarios.STEPS):
        one.step(shards.drawn_gradient(seed + step, scenarios.weights_of(one.model)))
    return one


def _after_adam(seed: int) -> tuple[Any, dict[str, nn.Parameter]]:
    """One process after the step of `keep_adams`: the state, and the parameters.

    By the formulas of Adam's first step: see kit/plain_sgd.py on torch's optimizers.
    """
    model = _layer(seed)
    gradient = _gradient(seed, model)
    named = dict(model.named_parameters())
    state = {}
    for name, p in named.items():
        mean, squares = 0.1 * gradient[name], 0.001 * gradient[name].square()
        entries = (mean, squares, squares, gradient[name].float())
        state[p] = dict(zip(MOMENTS, entries, strict=True))
    return state, named


# ── C1 ──────────────────────────────────────────────────────────────────────────────


def _with_adam(world_size: int) -> list[RunSpec]:
    adams = on_ranks(keep_adams).when("with the state of Adam")
    return [on_ranks(shards.save_state), adams]


@clause(TASK, "C1", worlds=WORLDS, runs=_with_adam)
def saved_by_name(runs: Runs) -> str | None:
    """The moments of each range, under its name; each element on one rank."""
    run, adams = runs.finished(shards.save_state), runs.finished(keep_adams)
    one = _after_steps(runs.seed)
    _expect_ranges(
        [value["saved"] for value in run.values],
        "momentum_buffer",
        one.optimizer.state,
        scenarios.trained(one.model),
    )
    kept, named = _after_adam(runs.seed)
    states = [value["after"] for value in adams.values]
    _expect_ranges(states, "exp_avg", kept, named)
    empty = [value["before"] for value in adams.values]
    full = {name: p.reshape(-1) for name, p in named.items()}
    for rank, saved in enumerate(empty):
        _expect_entries(saved, "", full, rank)
    _expect_complete(empty, full, "before the first step, ")
    return None


def _expect_ranges(
    states: list[Any], key: str, kept: Any, named: dict[str, nn.Parameter]
) -> None:
    full = {name: kept[p][key].reshape(-1) for name, p in named.items()}
    for rank, saved in enumerate(states):
        try:
            _expect_entries(saved, key, full, rank)
        except NotYetError as failure:
            raise _full_names(failure, states, full) from None
    _expect_complete(states, full)


def _full_names(
    failure: NotYetError, states: list[Any], full: dict[str, Tensor]
) -> NotYetError:
    """Call it so only if some ranks claim the same elements of a parameter."""
    for name, values in full.items():
        entries = [state.get(name, {}) for state in states if not failure.fatal]
        count = sum(e.get("stop", 0) - e.get("start", 0) for e in entries)
        if count > values.numel():
            return failure.but(slug="shard-under-full-name")
    return failure


def _expect_entries(saved: Any, key: str, full: dict[str, Tensor], rank: int) -> None:
    what = "state_by_name returned"
    if not isinstance(saved, dict):
        raise NotYetError(f"{what} {saved!r:.40}, expected a dict", fatal=True)
    for name, entry in saved.items():
        if name not in full:
            raise NotYetError(
                f"{what} the key {name!r:.30}, expected names of trained parameters",
                rule="bucket.names has the names, in the order of bucket.sizes",
                fatal=True,
            )
        if not isinstance(entry, dict) or not {"start", "stop"} <= entry.keys():
            raise NotYetError(
                f"{what} no start and stop for {name}, expected both", fatal=True
            )
        own = entry.get(key)
        if isinstance(own, Tensor):
            _expect_range(name, rank, entry, own, full[name])


def _expect_range(
    name: str, rank: int, entry: dict[str, Any], own: Tensor, full: Tensor
) -> None:
    start, stop = entry["start"], entry["stop"]
    right = full[start:stop]
    if own.shape == right.shape and torch.allclose(own.to(right), right, rtol=1e-6):
        return
    finite = right.isfinite()
    is_other = own.shape != right.shape or not torch.allclose(
        own[finite].to(right), right[finite], rtol=1e-6
    )
    if not is_other:
        raise NotYetError(
            f"rank {rank} saves a finite number for elements {start} to {stop - 1} of "
            f"{name}, expected inf as in the optimizer"
        )
    if own.numel() != stop - start:
        message = (
            f"rank {rank} saves {own.numel()} values for its part of {name}, elements "
            f"{start} to {stop - 1}, expected {stop - start}"
        )
    else:
        message = (
            f"rank {rank} saves elements {start} to {stop - 1} of `{name}` with the "
            "optimizer state of other elements, expected their own"
        )
    raise NotYetError(
        message,
        rule="bucket.shard_ranges lists which elements of which parameter the shard "
        "has, one range after another",
    )


def _expect_complete(
    states: list[Any], full: dict[str, Tensor], when: str = ""
) -> None:
    for name, values in full.items():
        count = sum(s[name]["stop"] - s[name]["start"] for s in states if name in s)
        if count != values.numel():
            raise NotYetError(
                f"{when}all ranks together save the state of {count} elements of "
                f"{name}, expected {values.numel()}",
                slug="shard-under-full-name" if count > values.numel() else "",
                rule="each rank saves the ranges that it owns, and no others",
            )


# ── C2 ──────────────────────────────────────────────────────────────────────────────


@clause(TASK, "C2", worlds=WORLDS, runs=_with_adam, after=("C1",))
def continued_elsewhere(runs: Runs) -> str | None:
    """All that SGD and Adam keep; and a step at another number of ranks."""
    return _continued(runs)


def _continued(runs: Runs) -> str:
    run, n = runs.finished(shards.save_state), runs.world_size
    one = _after_steps(runs.seed)
    named = scenarios.trained(one.model)
    for value in run.values:
        for name, entry in value["saved"].items():
            _expect_entry(name, entry, "momentum_buffer", one.optimizer.state, named)
    _expect_adams(runs.finished(keep_adams), runs.seed)
    _expect_plain(run)
    _expect_continued(run, one)
    m = shards.other_world(n)
    return f"saved at {n} rank{'s' * (n > 1)}, continued at {m}"


def _expect_entry(
    name: str,
    entry: dict[str, Any],
    key: str,
    state: Any,
    named: dict[str, nn.Parameter],
) -> None:
    own = entry.get(key)
    if not isinstance(own, Tensor):
        raise NotYetError(
            f"state_by_name returned no {key} for {name}, expected the optimizer's",
            rule=ALL_OF_IT,
        )
    right = state[named[name]][key].reshape(-1)[entry["start"] : entry["stop"]]
    if own.dtype != right.dtype:
        raise NotYetError(
            f"state_by_name returns {key} of {name} as {own.dtype}, expected "
            f"{right.dtype} as in the optimizer",
            rule="a run that continues from rounded state computes other weights",
        )
    if own.shape != right.shape or not torch.allclose(own, right, rtol=1e-9):
        raise NotYetError(
            f"state_by_name returned a {key} of {name} that differs from the "
            "optimizer's, expected the same values",
            rule=ALL_OF_IT,
        )


def _expect_plain(run: Run) -> None:
    """An int, a bool, None and a text are saved as they are."""
    for rank, value in enumerate(run.values):
        if "error" in value["plain"]:
            raise NotYetError(
                "when the optimizer keeps an int, a bool, None and a str, "
                f"state_by_name raised {value['plain']['error']:.60}",
                rule="copy what isn't a tensor as it is",
            )
        for name, entry in value["plain"].items():
            for key, right in shards.PLAIN.items():
                found = entry[key]
                if type(found) is not type(right) or found != right:
                    is_absent = isinstance(found, str) and found == "nothing"
                    saves = f"no {key}" if is_absent else f"{key} = {found!r}"
                    raise NotYetError(
                        f"rank {rank} saves {saves} for {name}, expected {right!r} as "
                        "in the optimizer",
                        rule=ALL_OF_IT,
                    )


def _expect_adams(run: Run, seed: int) -> None:
    state, named = _after_adam(seed)
    for value in run.values:
        for name, entry in value["after"].items():
            for key in MOMENTS:
                _expect_entry(name, entry, key, state, named)
            step = entry.get("step")
            is_number = isinstance(step, int | float)
            is_number |= isinstance(step, Tensor) and not step.dim()
            if not is_number or float(step) != 1.0:
                raise NotYetError(
                    f"after a step of Adam, state_by_name returns step {step!r:.40} "
                    f"for {name}, expected 1",
                    rule=ALL_OF_IT,
                )


def _expect_continued(run: Run, one: One) -> None:
    n = shards.other_world(run.world_size)
    weights = scenarios.weights_of(one.model)
    one.step(shards.drawn_gradient(one.seed + scenarios.STEPS, weights))
    right = flat(scenarios.weights_of(one.model))
    owners = owner_of_each(one.seed, n)
    for value in run.values:
        for resumed in value["resumed"]:
            if "error" in resumed:
                raise NotYetError(
                    f"when a state of {run.world_size} ranks was loaded on {n}, "
                    f"load_state_dict raised {resumed['error']}",
                    rule="load_state_dict reads what state_by_name returns",
                )
            mine = owners == resumed["rank"]
            if not torch.allclose(flat(resumed["weights"])[mine], right[mine]):
                raise NotYetError(
                    f"after a state of {run.world_size} ranks was loaded on {n}, rank "
                    f"{resumed['rank']}'s next step gave other weights than expected",
                    rule="the state must contain all that the optimizer keeps",
                )
