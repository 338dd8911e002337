"""A run that all ranks save and resume together, and what they agree on before that.

    packed   full_state ─▶ compared between ranks ─▶ shared or own ─▶ for `save`
    resume   load ─▶ checked against the run ─▶ all agree ─▶ restore ─▶ all have it

An error on one rank is an error on all, and a state that can't be applied on one of
them is applied on none.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn, no_grad
from torch.nn.parameter import is_lazy

from distlab.comm import Comm, Disk
from distlab.given.checkpoint import (
    JSON,
    CheckpointError,
    bytes_of,
    decode_manifest,
    exchange,
    manifest_name,
    unfit,
)
from distlab.given.training_state import (
    EXTRA,
    Run,
    State,
    Stateful,
    flatten,
    pack,
    plain_name,
    random_state,
    require_same_model,
    set_random_state,
    unpack,
)

APART = "apart"
"""In a rank's own state: what full_state calls shared, and differs between ranks."""
NAMES = "optimizer_names"
"""In the shared state: the parameters of each group of the optimizer, in its order."""

Within = Callable[[], AbstractContextManager[Any]]

# ── saving ──────────────────────────────────────────────────────────────────────────


def packed(
    comm: Comm,
    tasks: Any,
    run: Run,
    *,
    step: int = 0,
    shared: State | None = None,
    own: State | None = None,
    within: Within = nullcontext,
) -> tuple[dict[str, Tensor], dict[str, JSON]]:
    """The tensors and the meta of this rank's shard, for `save`; collective.

    `tasks` is the unit fault_tolerance, and `shared` and `own` are added to what its
    full_state returns. An item of the shared state that isn't the same on all ranks,
    such as a position in a rank's own data, becomes each rank's own. If a rank can't
    tell its state, `save` raises a CheckpointError on all ranks.

    Raises:
        ValueError: the ranks save different steps, or the model has tensors that are
            not here: lazy, on the meta device, a DTensor.
        Exception: the error of full_state, if every rank has one.
    """
    everywhere: State = {}
    mine: State = {}
    raised: Exception | None = None
    report: dict[str, JSON]
    try:
        _require_memory(run.model)
        with within():
            everywhere, mine = tasks.full_state(run)
        everywhere = {**everywhere, NAMES: _optimizer_names(run), **(shared or {})}
        mine = {**mine, **(own or {})}
        report = {"marks": {name: mark_of(v, name) for name, v in everywhere.items()}}
    except TypeError as error:
        raised, report = None, {"error": str(error)}
    except Exception as error:
        raised, report = error, {"error": one_line(error), "raised": True}
    reports = exchange(comm, {**report, "step": step})
    steps = [one["step"] for one in reports]
    if len(set(steps)) > 1:
        raise ValueError(f"the ranks save different steps: {steps}, in rank order")
    if raised is not None and all("raised" in one for one in reports):
        raise raised
    if "error" in report:
        return {}, unfit(report["error"])
    marks = [one["marks"] for one in reports if "marks" in one]
    apart = differing(marks)
    if apart:
        mine[APART] = {n: everywhere.pop(n) for n in apart if n in everywhere}
    return pack(everywhere, mine, comm.rank, comm.world_size)


def expect_shared(comm: Comm, disk: Disk, step: int) -> None:
    """See that rank 0 finds the shards of all ranks beside the manifest; collective.

    With a folder of its own on each node every rank writes its shard without an error,
    and no rank can ever load them all.

    Raises:
        CheckpointError: it doesn't; on all ranks.
    """
    said = ""
    if comm.rank == 0:
        try:
            names = disk.names()
            manifest = decode_manifest(disk.read(manifest_name(step)))
            lost = [r for r, f in enumerate(manifest.files) if f.name not in names]
            if lost:
                said = (
                    f"step {step} was not saved: rank 0 doesn't see the shard of rank "
                    f"{lost[0]}: all ranks need one folder that they share"
                )
        except (OSError, ValueError) as error:
            said = f"step {step} was not saved: rank 0: {one_line(error)}"
    said = exchange(comm, said)[0]
    if said:
        raise CheckpointError(said)


def mark_of(value: Any, name: str = "") -> int:
    """A number that differs, in all likelihood, if any bit of a state differs.

    Raises:
        TypeError: a value in it is no tensor and no plain data.
    """
    tensors: dict[str, Tensor] = {}
    outline = flatten(value, name, tensors)
    mark = zlib.crc32(json.dumps(_in_order(outline)).encode())
    for key in sorted(tensors):
        tensor = tensors[key]
        about = f"{key} {tensor.dtype} {list(tensor.shape)}"
        mark = zlib.crc32(bytes_of(tensor).data, zlib.crc32(about.encode(), mark))
    return mark


def _in_order(outline: JSON) -> JSON:
    """With the entries of each dict by their keys, however they were made."""
    if isinstance(outline, list):
        return [_in_order(one) for one in outline]
    if not isinstance(outline, dict):
        return outline
    ((kind, content),) = outline.items()
    content = _in_order(content)
    if kind in ("dict", "counter"):
        content.sort(key=lambda item: (str(type(item[0])), item[0]))
    return {kind: content}


def differing(marks: Sequence[Mapping[str, int]]) -> list[str]:
    """The names that have not the same mark on every rank."""
    names = dict.fromkeys(name for one in marks for name in one)
    return [name for name in names if len({one.get(name) for one in marks}) > 1]


def _optimizer_names(run: Run) -> list[list[str | None]] | None:
    """Which parameters each group has, in order; None for one that has no name."""
    if run.is_sharded:
        return None
    named = {id(p): name for name, p in run.model.named_parameters()}
    named |= {id(copy): f"master {i}" for i, copy in enumerate(run.master)}
    plain = _plain_names(named.values())
    found = []
    for group in getattr(run.optimizer, "param_groups", []):
        names = [named.get(id(p)) for p in group["params"]]
        found.append([None if one is None else plain[one] for one in names])
    return found or None


# ── resuming ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """The state that a run was set to, as this rank's restore got it.

    `refused` has a line for each newer checkpoint that was not complete.
    """

    step: int
    shared: State
    owns: list[State]
    refused: tuple[str, ...]


def resume(
    comm: Comm,
    tasks: Any,
    disk: Callable[[], Disk],
    run: Run,
    *,
    check: Callable[[State], None] | None = None,
    within: Within = nullcontext,
) -> Resumed | None:
    """Set `run` to the newest complete checkpoint on `disk()`; collective.

    None: no rank has found one. `check` may refuse the shared state with a ValueError.
    When it raises, no rank's run has changed.

    Raises:
        CheckpointError: there are checkpoints, and none is complete; the ranks found
            different ones; another rank raised an error.
        ValueError: it is of another run: other parameters, no such part.
        DiskError: the folder cannot be read.
    """
    found: Resumed | None = None
    raised: Exception | None = None
    try:
        with within():
            checkpoint = tasks.load(disk())
        if checkpoint is not None:
            shared, owns = unpack(checkpoint)
            shared = merged(shared, owns, comm.rank, comm.world_size, run)
            if check is not None:
                check(shared)
            shared, owns = fitted(run, shared, owns, checkpoint.step)
            found = Resumed(
                step=int(checkpoint.step),
                shared=shared,
                owns=owns,
                refused=tuple(checkpoint.refused),
            )
    except Exception as error:
        raised = error
    steps = _agree(comm, raised, found.step if found else -1)
    if len(set(steps)) > 1:
        said = (f"rank {r} step {s}" for r, s in enumerate(steps) if s >= 0)
        none = [f"rank {r} none" for r, s in enumerate(steps) if s < 0]
        raise CheckpointError(
            f"the ranks found different checkpoints: {', '.join([*said, *none])}; "
            "all ranks need one folder that they share"
        )
    if found is not None:
        apply(comm, tasks, run, found.shared, found.owns, within=within)
    return found


def apply(
    comm: Comm,
    tasks: Any,
    run: Run,
    shared: State,
    owns: list[State],
    *,
    within: Within = nullcontext,
) -> None:
    """restore() on all ranks, or on none: collective.

    Raises:
        CheckpointError: another rank raised an error; this run is as it was.
        Exception: the error of restore(); this run is as it was.
    """
    before, raised = _Before(run), None
    parts = {name: _NamedPart(name, part) for name, part in run.parts.items()}
    try:
        with within():
            named = replace(run, parts=parts)
            tasks.restore(named, shared, owns, comm.rank, comm.world_size)
    except Exception as error:
        raised = error
    try:
        _agree(comm, raised, 0)
    except BaseException:
        before.put_back()
        raise


def merged(shared: State, owns: list[State], rank: int, size: int, run: Run) -> State:
    """The shared state, with what is this rank's own in its place.

    Another number of ranks takes rank 0's extra state of modules, as it does its
    buffers.

    Raises:
        ValueError: there are more or fewer ranks than then, and each had its own.
    """
    apart = owns[rank].get(APART, {}) if len(owns) == size else owns[0].get(APART, {})
    if len(owns) != size:
        needed = {*run.parts, "parameters", "master", "optimizer", "factors"}
        wanted = sorted(needed & set(apart) - {EXTRA})
        if wanted:
            raise ValueError(
                f"the state of {wanted[0]!r} was not the same on all ranks when it was "
                f"saved: {len(owns)} ranks can load it, and these are {size}"
            )
    return {**shared, **apart}


def _agree(comm: Comm, raised: Exception | None, value: int) -> list[int]:
    """The value of each rank, unless one has an error: then all raise."""
    said = "" if raised is None else one_line(raised)
    reports = exchange(comm, [said, value])
    if raised is not None:
        raise raised
    for rank, (error, _) in enumerate(reports):
        if error:
            raise CheckpointError(f"rank {rank}: {error}")
    return [value for _, value in reports]


def one_line(error: Exception) -> str:
    """What an error says; its type, too, where that says more than the text."""
    text = " ".join(str(error).split())
    kind = type(error).__name__
    return (
        text if isinstance(error, ValueError | OSError) and text else f"{kind}: {text}"
    )


# ── does it fit ─────────────────────────────────────────────────────────────────────


def fitted(
    run: Run, shared: State, owns: list[State], step: int
) -> tuple[State, list[State]]:
    """The state under the names of the run's model; nothing has changed yet.

    Raises:
        ValueError: it doesn't fit the run; one line says what.
    """
    _require_memory(run.model)
    shared = {"parameters": {}, "master": [], **shared}
    shared, owns = _renamed(run.model, shared, [{"buffers": {}, **o} for o in owns])
    for own in owns:
        own["buffers"] = _wanted_buffers(run.model, own["buffers"])
        require_same_model(run.model, shared["parameters"], own["buffers"])
    _require_dtypes(run.model, {**shared["parameters"], **owns[0]["buffers"]})
    _require_like(run.master, shared["master"])
    missing = [name for name in sorted(run.parts) if name not in shared]
    if missing:
        raise ValueError(
            f"the checkpoint of step {step} has no {missing[0]!r}: it was saved "
            "without it"
        )
    for name, where in (("residuals", owns[0]), ("factors", shared)):
        if hasattr(run.hook, name) and name not in where:
            raise ValueError(
                f"the checkpoint of step {step} has no {name!r} of a compression hook: "
                "it was saved without one"
            )
    _require_optimizer(run, shared, owns, step)
    return shared, owns


def _require_memory(model: nn.Module) -> None:
    """All its parameters are here, and can be filled."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            why = "has no shape yet: call the model with a batch first"
        elif tensor.is_meta:
            why = "is on the meta device, without memory: call to_empty() first"
        elif hasattr(tensor, "full_tensor"):
            why = "is a DTensor, and a checkpoint has whole tensors"
        else:
            continue
        raise ValueError(f'"{name}" {why}')


def _renamed(
    model: nn.Module, shared: State, owns: list[State]
) -> tuple[State, list[State]]:
    """Wrapped by torch.compile or torch's DDP or not, then or now: the same model."""
    own = [name for name, _ in model.named_parameters()]
    own += [name for name, _ in model.named_buffers()]
    here = {plain: name for name, plain in _plain_names(own).items()}
    saved = [*shared["parameters"], *(name for one in owns for name in one["buffers"])]
    now = {name: here.get(to, to) for name, to in _plain_names(saved).items()}

    def under_new_names(state: State, *keys: str) -> State:
        found = {
            key: {now.get(name, name): value for name, value in state[key].items()}
            for key in keys
            if key in state
        }
        return {**state, **found}

    return under_new_names(shared, "parameters", "factors"), [
        under_new_names(one, "buffers", "residuals") for one in owns
    ]


def _plain_names(names: Any) -> dict[str, str]:
    found = {name: plain_name(name) for name in names}
    own = [plain for plain in found.values() if not plain.startswith("master ")]
    if own and all(plain.startswith("module.") for plain in own):
        found = {name: plain.removeprefix("module.") for name, plain in found.items()}
    return found


def _wanted_buffers(model: nn.Module, saved: State) -> State:
    """Without those that no state_dict() has and that have another shape by now."""
    own = dict(model.named_buffers())
    passing = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    kept = {
        name: value
        for name, value in saved.items()
        if name not in passing or value.shape == own[name].shape
    }
    return kept | {name: own[name] for name in passing & {*own} if name not in kept}


def _require_dtypes(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, value in saved.items():
        if own[name].dtype != value.dtype:
            raise ValueError(
                f'the checkpoint is of another model: "{name}" is {own[name].dtype} in '
                f"the model, and {value.dtype} in the checkpoint"
            )


def _require_like(master: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
    own, other = ([(*t.shape,) for t in tensors] for tensors in (master, saved))
    if own != other:
        raise ValueError(
            f"the checkpoint has {len(other)} master weights, and the run {len(own)}"
            + (", of other shapes" if len(own) == len(other) else "")
        )


def _require_optimizer(run: Run, shared: State, owns: list[State], step: int) -> None:
    """Its groups have the parameters that the saved ones had, in the same order."""
    is_there = "optimizer" in (owns[0] if run.is_sharded else shared)
    if not is_there:
        other = "sharded" if "optimizer" in owns[0] else "not sharded"
        raise ValueError(
            f"the optimizer in the checkpoint of step {step} is {other}, and this one "
            f"is {'sharded' if run.is_sharded else 'not'}"
        )
    groups = getattr(run.optimizer, "param_groups", None)
    if run.is_sharded or groups is None:
        return
    saved = shared["optimizer"].get("param_groups", [])
    here, there = ([len(g["params"]) for g in found] for found in (groups, saved))
    if here != there:
        raise ValueError(
            f"the checkpoint is of another optimizer: its groups have {there} "
            f"parameters, and those of this one {here}"
        )
    before, now = shared.get(NAMES), _optimizer_names(run)
    for one, name in _pairs(before, now):
        if one != name and one is not None and name is not None:
            raise ValueError(
                f'the optimizer of the checkpoint has "{one}" where this one has '
                f'"{name}": make its groups in the same order'
            )
    states = shared["optimizer"].get("state", {})
    flat = [p for group in groups for p in group["params"]]
    numbers = [number for group in saved for number in group["params"]]
    for number, p in zip(numbers, flat, strict=True):
        _require_moments(states.get(number, {}), p)


def _pairs(before: Any, now: Any) -> list[tuple[str | None, str | None]]:
    if before is None or now is None:
        return []
    return [
        pair
        for one, other in zip(before, now, strict=False)
        for pair in zip(one, other, strict=False)
    ]


_LIKE_PARAMETER = ("exp_avg", "exp_avg_sq", "momentum_buffer", "max_exp_avg_sq")


def _require_moments(state: State, p: Tensor) -> None:
    for key in _LIKE_PARAMETER:
        value = state.get(key)
        if isinstance(value, Tensor) and value.shape != p.shape:
            raise ValueError(
                f"the checkpoint is of another optimizer: {key!r} has shape "
                f"{tuple(value.shape)} for a parameter of shape {tuple(p.shape)}"
            )


# ── all or nothing ──────────────────────────────────────────────────────────────────


class _NamedPart:
    """A part whose errors say which part it is."""

    def __init__(self, name: str, part: Stateful) -> None:
        self.name, self.part = name, part

    def state_dict(self) -> State:
        """That of the part."""
        return self.part.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """See `Stateful`.

        Raises:
            ValueError: the part refused the state.
        """
        try:
            self.part.load_state_dict(state)
        except Exception as error:
            raise ValueError(f"{self.name!r} can't be loaded: {one_line(error)}") from (
                error
            )


class _Before:
    """What a run was before restore(), in memory of the CPU."""

    def __init__(self, run: Run) -> None:
        self.run = run
        model = run.model
        tensors = [*model.parameters(), *model.buffers(), *run.master]
        self.tensors = [(t, t.detach().to("cpu", copy=True)) for t in tensors]
        inner = getattr(run.optimizer, "optimizer", run.optimizer)
        self.loads: list[tuple[Callable[[Any], Any], Any]] = []
        for part in (inner, *run.parts.values()):
            with suppress(Exception):  # one that has no state yet
                self.loads.append((part.load_state_dict, deepcopy(part.state_dict())))
        self.kept = {
            name: deepcopy(getattr(run.hook, name).state_dict(model))
            for name in ("residuals", "factors")
            if hasattr(run.hook, name)
        }
        self.random = random_state()

    def put_back(self) -> None:
        """As far as the parts allow it."""
        with no_grad():
            for tensor, value in self.tensors:
                tensor.copy_(value)
        for load, state in self.loads:
            with suppress(Exception):
                load(state)
        for name, state in self.kept.items():
            with suppress(Exception):
                getattr(self.run.hook, name).load_state_dict(self.run.model, state)
        set_random_state(self.random)
