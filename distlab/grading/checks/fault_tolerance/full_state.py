"""Checks of 4.5, `fault_tolerance.full_state`: what is saved, and how a run resumes."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from distlab.checkpoints.training_state import Run, random_state, set_random_state
from distlab.grading.checks.fault_tolerance.disks import listed
from distlab.grading.checks.fault_tolerance.players import (
    ITEMS,
    Player,
    Sharded,
    digest,
    drawn_since,
    new_model,
    new_run,
    take_step,
    through_files,
)
from distlab.grading.clause import clause
from distlab.grading.kit.plans import worked_out
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext

TASK = "fault_tolerance.full_state"
SIZES = (3, 1)
RESIZED = ((3, 2), (2, 3), (2, 1))
BEFORE, AFTER = 3, 4
PARTS = ("scheduler", "scaler", "loader", "average")
SHARED = ("parameters", "master", "optimizer", *PARTS, "factors")
OWN = ("buffers", "random", "residuals")
SLUGS = {
    "optimizer": "optimizer-forgotten",
    "residuals": "residuals-forgotten",
    "python": "random-forgotten",
    "numpy": "random-forgotten",
    "torch": "random-forgotten",
}


def trained(seed: int, size: int) -> list[Player]:
    """Ranks after some steps."""
    players = [Player(rank, seed) for rank in range(size)]
    for _ in range(BEFORE):
        take_step(players)
    return players


def state_of(unit: ModuleType, player: Player) -> Any:
    """full_state, called on this rank."""
    set_random_state(player.random)
    return unit.full_state(player.run)


def restore(
    unit: ModuleType, player: Player, shared: Any, owns: Any, size: int
) -> None:
    """restore, called on this rank of a new process, which has read its own copy."""
    unit.restore(player.run, deepcopy(shared), deepcopy(owns), player.rank, size)
    player.random = random_state()


# ── C1 and C2 ───────────────────────────────────────────────────────────────────────


def keys_of(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """The keys of both states: of a full run, a small one and a sharded one."""
    players = trained(seed, 2)
    states = [state_of(unit, player) for player in players]
    plain = new_model()
    small = Run(model=plain, optimizer=torch.optim.SGD(plain.parameters(), lr=0.1))
    sharded = Run(model=plain, optimizer=Sharded(0))
    found = [
        [sorted(map(str, one)) for one in state]
        for state in (states[0], unit.full_state(small), unit.full_state(sharded))
    ]
    unlike = [
        name
        for name in states[0][0]
        if digest(states[0][0][name]) != digest(states[1][0].get(name))
    ]
    names = [sorted(states[0][place].get(key, ())) for place, key in _BY_NAME]
    return {"keys": found, "unlike": unlike, "names": names}


_BY_NAME = ((0, "parameters"), (1, "buffers"))
_RUNS = ("", "for a run with a model and SGD only, ", "for a sharded optimizer, ")


def _wanted(place: int, which: int) -> set[str]:
    """The keys of shared (0) or own (1), for one of _RUNS."""
    if which == 0:
        return set((SHARED, OWN)[place])
    found = {"parameters", "master"} if place == 0 else {"buffers", "random"}
    return found | ({"optimizer"} if place == which - 1 else set())


def _expect_keys(runs: Runs, place: int) -> None:
    record = worked_out(runs, keys_of).values[0]
    called = ("shared", "own")[place]
    for which, keys in enumerate(record["keys"]):
        wanted, got = _wanted(place, which), set(keys[place])
        missing, extra = sorted(wanted - got), sorted(got - wanted)
        if missing:
            name = missing[0]
            elsewhere = name in keys[1 - place]
            more = f", not in `{('shared', 'own')[1 - place]}`" if elsewhere else ""
            slug = SLUGS.get(name, "")
            slug = "random-forgotten" if name == "random" else slug
            raise NotYetError(
                f"{_RUNS[which]}full_state returned no {listed([name])} in `{called}`, "
                f"expected it there{more}",
                slug="" if elsewhere else slug,
            )
        if extra and not set(extra) <= _wanted(1 - place, which):
            raise NotYetError(
                f"{_RUNS[which]}full_state returned {listed(extra)} in `{called}`, "
                "expected no such key"
            )
        if extra:
            raise NotYetError(
                f"{_RUNS[which]}full_state returned {listed(extra)} in `{called}`, "
                + (
                    "expected it in `shared`, because all ranks have the same"
                    if place
                    else "expected it in `own`, because each rank has its own"
                )
            )
    model = new_model()
    named = model.named_buffers() if place else model.named_parameters()
    wanted_names = sorted(name for name, _ in named)
    if (got_names := record["names"][place]) != wanted_names:
        raise NotYetError(
            _other_names(called, _BY_NAME[place][1], got_names, wanted_names)
        )


def _other_names(called: str, key: str, got: list[str], wanted: list[str]) -> str:
    """The first name too many, or too few."""
    where = f'`{called}["{key}"]`'
    for name in (name for name in got if name not in wanted):
        return f'full_state put "{name}" into {where}, expected the model\'s {key} only'
    name = next(name for name in wanted if name not in got)
    return (
        f'full_state left "{name}" out of {where}, expected all of the model\'s {key}'
    )


@clause(TASK, "C1", worlds=(1,), plays=(2,), runs=[on_ranks(keys_of)])
def what_is_shared(runs: Runs) -> str | None:
    """The keys of `shared`; two ranks have the same."""
    _expect_keys(runs, 0)
    unlike = worked_out(runs, keys_of).values[0]["unlike"]
    if unlike:
        raise NotYetError(
            f'full_state returned `shared` with another "{unlike[0]}" on rank 0 than '
            "on "
            "rank 1, expected the same on every rank"
        )
    return None


@clause(TASK, "C2", worlds=(1,), plays=(2,), runs=[on_ranks(keys_of)])
def what_is_own(runs: Runs) -> str | None:
    """The keys of `own`."""
    _expect_keys(runs, 1)
    return None


# ── C3 ──────────────────────────────────────────────────────────────────────────────


def resume(context: RankContext, unit: ModuleType, seed: int, size: int) -> Any:
    """What differs after restore, and the step in which the runs part, by rank."""
    players = trained(seed, size)
    shared, owns = through_files([state_of(unit, player) for player in players])
    before = [player.items() for player in players]
    again = [Player(rank, seed + 7) for rank in range(size)]
    new = [player.items() for player in again]
    for player in again:
        restore(unit, player, shared, owns, size)
    restored = [player.items() for player in again]
    states = [player.random for player in again]
    parted = None
    for step in range(AFTER):
        take_step(players)
        take_step(again)
        same = all(
            all(map(torch.equal, one.run.master, other.run.master))
            for one, other in zip(players, again, strict=True)
        )
        if not same and parted is None:
            parted = BEFORE + step + 1
    ends = [(one.items(), two.items()) for one, two in zip(players, again, strict=True)]
    final = [[name for name in ITEMS if one[name] != two[name]] for one, two in ends]
    return {
        "parted": parted,
        "unlike": [
            [name for name in ITEMS if one[name] != other[name]]
            for one, other in zip(before, restored, strict=True)
        ],
        "of_rank_0": [
            [name for name in ITEMS if one[name] == before[0][name]] for one in restored
        ],
        "as_new": [
            [name for name in ITEMS if one[name] == other[name]]
            for one, other in zip(new, restored, strict=True)
        ],
        "drawn": [
            drawn_since(own["random"], state)
            for own, state in zip(owns, states, strict=True)
        ],
        "final": final,
        "sharded": _sharded(unit, players, seed, size),
        "others": _other_models(unit, shared, owns, seed, size),
    }


def _sharded(
    unit: ModuleType, players: list[Player], seed: int, new: int
) -> list[list[int] | str]:
    """Whose states the sharded optimizer of each of `new` ranks gets from restore.

    As a weight spans several ranks, the real one refuses a state without the others.
    """
    runs = [replace(p.run, optimizer=Sharded(p.rank)) for p in players]
    shared, owns = through_files([unit.full_state(run) for run in runs])
    found = []
    for rank in range(new):
        optimizer = Sharded(rank)
        run = replace(new_run(seed), optimizer=optimizer)
        unit.restore(run, deepcopy(shared), deepcopy(owns), rank, new)
        found.append(_starts_of(optimizer.loaded))
    return found


def _other_models(
    unit: ModuleType, shared: Any, owns: Any, seed: int, size: int
) -> dict[str, list[Any]]:
    """What restore says to each of _OTHERS, and whether it changed it."""
    return {
        what: _refusal(unit, make(seed), shared, owns, size)
        for what, make in _OTHERS.items()
    }


def _with_buffer(seed: int) -> Run:
    run = new_run(seed)
    run.model.register_buffer("more", torch.zeros(2))
    return run


def _without_buffers(seed: int) -> Run:
    run = new_run(seed)
    run.model[1]._buffers.clear()  # type: ignore[index]
    return run


_OTHERS = {
    "with other shapes": lambda seed: new_run(seed, width=5),
    "with one more buffer": _with_buffer,
    "without buffers": _without_buffers,
}


def _refusal(
    unit: ModuleType, run: Run, shared: Any, owns: Any, size: int
) -> list[Any]:
    tensors = [*run.model.parameters(), *run.model.buffers(), *run.master]
    before = digest(tensors)
    try:
        unit.restore(run, shared, owns, 0, size)
    except ValueError as error:
        said = str(error)
    except Exception as error:
        said = f"~{type(error).__name__}"
    else:
        said = "~nothing"
    return [said, before == digest(tensors)]


RESUMED = [on_ranks(resume, size=size) for size in SIZES]


@clause(TASK, "C3", worlds=(1,), plays=SIZES, runs=RESUMED, after=("C1", "C2"))
def bit_equal(runs: Runs) -> str | None:
    """Every item after restore; the weights after each later step; another model."""
    for size in SIZES:
        record = worked_out(runs, resume, size=size).values[0]
        _expect_restored(record, size)
        for what, (said, same) in record["others"].items():
            _expect_refused(what, said, same)
        _expect_sharded(record, size, f"after restore on the same {size} ranks")
    return f"{AFTER} steps after the resume; dropout, master weights, residuals"


def _expect_refused(what: str, said: str, same: bool) -> None:
    if said.startswith("~") or not same:
        got = f"raised {said[1:]}" if said.startswith("~") else "changed it"
        raise NotYetError(
            f"for a model {what}, restore {got}, expected a ValueError and an "
            "unchanged model",
            slug="half-restored" if not same else "",
            rule="call require_same_model first, with parameters and buffers"
            if not same
            else "",
        )


def _expect_restored(record: dict[str, Any], size: int) -> None:
    wrong = [rank for rank in range(size) if record["unlike"][rank]]
    if not wrong:
        if record["parted"] is not None or any(record["final"]):
            step = record["parted"] or BEFORE + AFTER
            raise NotYetError(
                f"after restore on {size} rank{'s' * (size > 1)}, all state is as "
                "saved, "
                f"but training differs in step {step}: was a parameter or the "
                "optimizer replaced by another object?",
                played=size,
            )
        return
    rank = wrong[0]
    name = record["unlike"][rank][0]
    is_as_new = name in record["as_new"][rank]
    is_drawn = name in ("python", "numpy", "torch")  # and goes on in any case
    slug, rule = SLUGS.get(name, "") * (is_as_new or is_drawn), ""
    if rank and name in record["of_rank_0"][rank]:
        slug, rule = "state-of-rank-0", "owns[rank] is this rank's own state"
    elif name in record["drawn"][rank]:
        raise NotYetError(
            f"after restore on {size} rank{'s' * (size > 1)}, {ITEMS[name]} on rank "
            f"{rank} are some draws past the saved state, expected exactly that state",
            rule="set_random_state last: a part may draw when it is loaded",
            played=size,
        )
    parted = record["parted"]
    later = f": training differs from step {parted} on" if parted else ""
    got = f"rank {rank} didn't get back {ITEMS[name]} as saved"
    if slug == "state-of-rank-0":
        got = f"rank {rank} has rank 0's values in {ITEMS[name]}, expected its own"
    elif is_as_new:
        got = f"rank {rank} has {ITEMS[name]} of a new run, expected what was saved"
    raise NotYetError(
        f"after restore on {size} rank{'s' * (size > 1)}, {got}{later}",
        slug=slug,
        rule=rule,
        evidence=[
            (
                number,
                "wrong" if unlike else "right",
                f"not restored: {', '.join(unlike)}" if unlike else "all restored",
            )
            for number, unlike in enumerate(record["unlike"])
        ],
        played=size,
    )


# ── C4 ──────────────────────────────────────────────────────────────────────────────


def resize(
    context: RankContext, unit: ModuleType, seed: int, old: int, new: int
) -> Any:
    """What the ranks of another number have after restore."""
    players = trained(seed, old)
    shared, owns = through_files([state_of(unit, player) for player in players])
    again = [Player(rank, seed + 7 + rank) for rank in range(new)]
    kept = [p.run.hook.residuals.state_dict(p.run.model) for p in players]
    mean = {name: sum(one[name] for one in kept) / old for name in kept[0]}
    total = {name: sum(one[name] for one in kept) for name in kept[0]}
    for player in again:
        restore(unit, player, shared, owns, new)
    items, first = [player.items() for player in again], players[0].items()
    residuals = [p.run.hook.residuals.state_dict(p.run.model) for p in again]
    return {
        "unlike": [
            [n for n in (*SHARED, "buffers") if one[n] != first[n]] for one in items
        ],
        "residuals": [_which(one, mean, total, kept[0]) for one in residuals],
        "draws": [[one[n] for one in items] for n in ("python", "numpy", "torch")],
        "sharded": _sharded(unit, players, seed, new),
    }


def _starts_of(loaded: Any) -> list[int] | str:
    """Whose states a sharded optimizer got; like the real one, it takes one or many."""
    every = [loaded] if isinstance(loaded, dict) else loaded
    try:
        return [
            one["state"][name]["start"]
            for one in every
            for name in one["param_groups"][0]["names"]
        ]
    except (TypeError, KeyError):
        return "what its state_dict() did not return"


def _which(one: Any, mean: Any, total: Any, first: Any) -> str:
    """What the residuals of a rank are."""
    for called, other in (("mean", mean), ("first", first), ("sum", total)):
        if one.keys() == other.keys() and all(
            torch.allclose(one[n], other[n], atol=1e-6) for n in one
        ):
            return called
    return "none" if not one else "other"


RESIZES = [on_ranks(resize, old=old, new=new) for old, new in RESIZED]


@clause(TASK, "C4", worlds=(1,), plays=(2, 3, 1), runs=RESIZES, after=("C3",))
def another_number(runs: Runs) -> str | None:
    """After restore on more and on fewer ranks."""
    for old, new in RESIZED:
        record = worked_out(runs, resize, old=old, new=new).values[0]
        setting = f"when {old} ranks save and {new} restore"
        _expect_resized(record, old, setting)
    return ", ".join(f"{old} to {new}" for old, new in RESIZED) + " ranks"


def _expect_resized(record: dict[str, Any], old: int, setting: str) -> None:
    for rank, unlike in enumerate(record["unlike"]):
        if unlike:
            name = unlike[0]
            whose = "rank 0's" if name == "buffers" else "what was saved"
            raise NotYetError(
                f"{setting}, rank {rank} has other values in {ITEMS[name]}, expected "
                f"{whose}",
                slug=SLUGS.get(name, ""),
            )
    for rank, which in enumerate(record["residuals"]):
        is_of_one = which == "first"
        if which != "mean" and old > 1:
            got = {
                "first": "the residuals that rank 0 saved",
                "sum": "the sum of all residuals",
                "none": "no residuals",
            }
            raise NotYetError(
                f"{setting}, rank {rank} gets {got.get(which, 'other residuals')}, "
                f"expected the mean of all {old} ranks' residuals",
                slug="residuals-of-one-rank" if is_of_one else "",
                rule="DDP divides the sum by the number of ranks: the mean keeps it",
            )
    for name, states in zip(("Python", "numpy", "torch"), record["draws"], strict=True):
        if len(set(states)) < len(states):
            raise NotYetError(
                f"{setting}, two ranks draw the same random numbers from {name}, "
                "expected different ones",
                slug="same-random-numbers",
                rule="seed_all with a number that depends on the rank",
            )
    _expect_sharded(record, old, setting)


def _expect_sharded(record: dict[str, Any], old: int, setting: str) -> None:
    for rank, got in enumerate(record["sharded"]):
        if got != list(range(old)):
            shown = got if isinstance(got, str) else f"the states of ranks {got}"
            raise NotYetError(
                f"{setting}, rank {rank}'s sharded optimizer loads {shown}, expected "
                f"the states of all {old} ranks in order"
            )
