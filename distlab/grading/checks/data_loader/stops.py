"""Loaders that are stopped, and others that go on from their state: for task 1.15."""

from __future__ import annotations

import copy
import json
from types import ModuleType
from typing import Any

from distlab.grading.checks.data_loader.steps import Batches, Numbered
from distlab.grading.kit.plans import disturb
from distlab.runner import RankContext

SAMPLES, SIZE, EPOCH = 23, 5, 2  # 5 steps, the last one of 3 samples
STEPS = 5
RANKS = (2, 1, 3)
MOVES = ((2, 1), (4, 2), (2, 3), (1, 4), (3, 8))  # ranks before and after
STOPS = (2, 1, 3, 0, 4, 5)  # steps after which the state is taken

Record = dict[str, Any]


class _Maker:
    """Makes loaders of the unit under test, in processes that are nobody's twin."""

    def __init__(self, unit: ModuleType, seed: int) -> None:
        # Above 256, so that a number that was read from a file is another object.
        self._unit, self._seed, self._made = unit, seed % 2**31 + 1000, 0

    def __call__(self, rank: int, n: int, **other: Any) -> Any:
        self._made += 1
        disturb(self._unit, self._made)
        wanted = {"num_samples": SAMPLES, "size": SIZE, "seed": self._seed, **other}
        data = Numbered(wanted.pop("num_samples"))
        size = wanted.pop("size")
        return self._unit.DistributedDataLoader(data, size, rank, n, **wanted)

    def whole(self, rank: int, n: int, epoch: int) -> Batches:
        """An epoch without a stop."""
        loader = self(rank, n)
        loader.set_epoch(epoch)
        return _delivered(loader)


def stop_and_go_on(context: RankContext, unit: ModuleType, seed: int) -> Record:
    """Everything that the clauses need, from one process."""
    if context.rank:
        return {}
    make = _Maker(unit, seed)
    first = _state_after(make, 0, 2, 2)[0]
    if not isinstance(first, dict):
        return {"state": f"{first!r:.60}"}
    problem = _as_json(first)[1]
    found = {"state": None, "json": problem}
    try:
        return {**found, **_tried(make, problem)}
    except Exception:
        if not problem:
            raise
        return {**found, "same": None}  # what else fails by it


def _tried(make: _Maker, problem: str) -> Record:
    return {
        "same": [_gone_on(make, n, n, stop) for n in RANKS for stop in STOPS],
        "over": [_gone_on(make, n, n, None) for n in (2, 1)],
        "used": [_gone_on(make, 2, 2, 0, used=True)],
        "moved": [_gone_on(make, n, m, stop) for n, m in MOVES for stop in (2, 4)],
        "snapshot": "" if problem else _snapshot(make),
        "differing": "" if problem else _differing(make),
        "refused": {name: _refused(make, change) for name, change in CHANGES.items()}
        | {name: _refused(make, own, saved) for name, (saved, own) in PAIRS.items()},
    }


def _delivered(loader: Any, stop: int | None = None) -> Batches:
    """What iterating gives; after `stop` batches the loop is left."""
    found: Batches = []
    if stop == 0:
        return found
    for batch in loader:
        found.append(batch[0].tolist())
        if len(found) == stop or len(found) > 4 * STEPS:
            break
    return found


def _state_after(
    make: _Maker, rank: int, n: int, stop: int | None, **other: Any
) -> tuple[Any, Any]:
    """The state after so many batches, None: after the loop; and the loader."""
    loader = make(rank, n, **other)
    loader.set_epoch(EPOCH)
    _delivered(loader, stop)
    return loader.state_dict(), loader


def _as_json(state: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The state as it comes out of a file; or itself, and why it cannot be written."""
    try:
        return json.loads(json.dumps(state)), ""
    except (TypeError, ValueError) as error:
        return state, str(error)


def _gone_on(
    make: _Maker, before: int, after: int, stop: int | None, used: bool = False
) -> Record:
    """Stopped on `before` ranks, continued on `after`: what each delivers then."""
    rest, later, whole = [], [], []
    for rank in range(after):
        state = _as_json(_state_after(make, rank % before, before, stop)[0])[0]
        loader = make(rank, after)
        if used:
            _delivered(loader, 3)
        try:
            loader.load_state_dict(state)
        except ValueError as error:
            which = {"before": before, "after": after, "stop": stop}
            return {**which, "refused": str(error)}
        if rank % 2:
            loader.set_epoch(EPOCH)  # as a training loop does; it is this epoch still
        rest.append(_delivered(loader))
        loader.set_epoch(EPOCH + 1)
        later.append(_delivered(loader))
        whole.append(make.whole(rank, after, EPOCH))
    others = {e: make.whole(0, after, e) for e in (0, EPOCH + 1)}
    return {
        "before": before,
        "after": after,
        "refused": "",
        "stop": stop,
        "rest": rest,
        "later": later[0],
        "whole": whole,
        "others": others,
    }


def _snapshot(make: _Maker) -> str:
    """What is wrong with the state as a thing of its own; if it is plain."""
    state, loader = _state_after(make, 1, 2, 2)
    kept = copy.deepcopy(state)
    _delivered(loader, 1)
    loader.state_dict()
    if state != kept:
        return (
            "a state that state_dict returned changed while its loader continued, "
            "expected it to stay as it was"
        )
    fresh = make(1, 2)
    try:
        fresh.load_state_dict(state)
    except ValueError:
        return ""  # told by `_gone_on`
    _delivered(fresh, 1)
    fresh.state_dict()
    if state != kept:
        return (
            "the state given to load_state_dict changed while the new loader "
            "continued, expected it to stay as it was"
        )
    return ""


def _differing(make: _Maker) -> str:
    """What is not the same in the states of all ranks, whatever their number."""
    first: dict[str, Any] = _state_after(make, 0, 2, 2)[0]
    for rank, n in ((1, 2), (2, 3)):
        other: dict[str, Any] = _state_after(make, rank, n, 2)[0]
        absent = object()
        names = [
            str(name)
            for name in {**first, **other}
            if first.get(name, absent) != other.get(name, absent)
        ]
        if names:
            return ", ".join(names)
    return ""


CHANGES: dict[str, dict[str, Any]] = {
    "num_samples": {"num_samples": SAMPLES + 2},
    "global_batch_size": {"size": SIZE + 1},
    "shuffle": {"shuffle": False},
    "seed": {"seed": 987_654_321},
    "num_workers": {"num_workers": 2},
}
IN_ORDER = {"shuffle": False}
# What the loader has that saves, and the one that loads instead of the usual settings.
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shuffle (False)": (IN_ORDER, {}),
    "seed (0)": ({"seed": 0}, {}),
    "seed (both without shuffle)": (IN_ORDER, {**IN_ORDER, **CHANGES["seed"]}),
}


def _refused(
    make: _Maker, change: dict[str, Any], saved: dict[str, Any] | None = None
) -> dict[str, Any]:
    """How the state of a loader is met by one that differs: the error, or nothing.

    `saved` is what the first loader has otherwise, and `change` the second.

    And what the loader delivers then, beside what it would have without the state.
    """
    state = _as_json(_state_after(make, 0, 2, 2, **(saved or {}))[0])[0]
    loader, untouched = make(0, 2, **change), make(0, 2, **change)
    try:
        loader.load_state_dict(state)
    except ValueError:
        if "num_workers" in change:
            return {"error": "ValueError"}  # no data worker can be started here
        found = {"got": _delivered(loader), "wanted": _delivered(untouched)}
        return {"error": "ValueError", **found}
    except Exception as error:
        return {"error": type(error).__name__}
    return {"error": ""}
