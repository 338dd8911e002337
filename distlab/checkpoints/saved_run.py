"""Save and resume a run on all ranks together.

    packed   full_state ─▶ compare between ranks ─▶ shared or own ─▶ pass to `save`
    resume   load ─▶ check against the run ─▶ all agree ─▶ restore ─▶ all succeeded

If one rank has an error, all ranks raise one. If one rank can't apply a state, no rank
keeps it.
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

from distlab.checkpoints.files import (
    JSON,
    TEMPORARY,
    CheckpointError,
    bytes_of,
    decode_manifest,
    exchange,
    manifest_name,
    manifest_steps,
    step_of,
    unfit,
)
from distlab.checkpoints.named_run import (
    APART,
    LAYOUT,
    NAMES,
    for_run,
    layout_of,
    plain_names,
)
from distlab.checkpoints.training_state import (
    EXTRA,
    Run,
    State,
    Stateful,
    flatten,
    pack,
    random_state,
    require_same_model,
    set_random_state,
    unpack,
)
from distlab.comm import Comm, Disk
from distlab.dtensors import is_sharded

KIND = "optimizer_kind"
"""Key in the shared state for the optimizer's class, if it is one of torch's."""

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
    """Return the tensors and metadata of this rank's shard, for `save`; collective.

    `tasks` is the unit fault_tolerance, and we add `shared` and `own` to what its
    full_state returns. If an item of the shared state differs between ranks, such as a
    position in a rank's own data, each rank saves its own. If a rank can't collect its
    state, `save` raises a CheckpointError on all ranks.

    Raises:
        ValueError: the ranks save different steps, or the model has a tensor without
            full values in memory: a lazy one, one on the meta device, or a DTensor.
        Exception: the error of full_state, if it fails on every rank.
    """
    everywhere: State = {}
    mine: State = {}
    raised: Exception | None = None
    report: dict[str, JSON]
    try:
        _require_memory(run.model)
        with within():
            everywhere, mine = tasks.full_state(run)
        about: State = {NAMES: _optimizer_names(run), KIND: _optimizer_kind(run)}
        about[LAYOUT] = layout_of(run.model)
        everywhere = {**everywhere, **about, **(shared or {})}
        mine = {**mine, **(own or {})}
        report = {"marks": {name: mark_of(v, name) for name, v in everywhere.items()}}
    except TypeError as error:
        raised, report = None, {"error": str(error)}
    except Exception as error:
        raised, report = error, {"error": one_line(error), "raised": True}
    reports = exchange(comm, {**report, "step": step})
    steps = [one["step"] for one in reports]
    if len(set(steps)) > 1:
        raise ValueError(
            f"the ranks save different steps ({steps}, in rank order): call save with "
            "the same step on every rank"
        )
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
    """Check that rank 0 sees the shards of all ranks next to the manifest; collective.

    If each node has its own folder, every rank can write its shard without an error,
    but no rank can ever load them all.

    Raises:
        CheckpointError: on all ranks, if rank 0 doesn't see a shard.
    """
    said = ""
    if comm.rank == 0:
        try:
            names = disk.names()
            manifest = decode_manifest(disk.read(manifest_name(step)))
            lost = [r for r, f in enumerate(manifest.files) if f.name not in names]
            if lost:
                said = (
                    f"step {step} was not saved, because rank 0 doesn't see the shard "
                    f"of rank {lost[0]}: use one folder that all ranks share"
                )
        except (OSError, ValueError) as error:
            said = f"step {step} was not saved: rank 0: {one_line(error)}"
    said = exchange(comm, said)[0]
    if said:
        raise CheckpointError(said)


def mark_of(value: Any, name: str = "") -> int:
    """Return a checksum that almost certainly changes if any bit of a state changes.

    Raises:
        TypeError: a value in the state is neither a tensor nor plain data.
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
    """Sort each dict by its keys, so that the order of insertion doesn't matter."""
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
    """Return the names whose marks differ between ranks."""
    names = dict.fromkeys(name for one in marks for name in one)
    return [name for name in names if len({one.get(name) for one in marks}) > 1]


def _optimizer_names(run: Run) -> list[list[str | None]] | None:
    """Return the parameter names of each group, in order; None where there is none."""
    if run.is_sharded:
        return None
    named = {id(p): name for name, p in run.model.named_parameters()}
    named |= {id(copy): f"master {i}" for i, copy in enumerate(run.master)}
    plain = plain_names(named.values())
    found = []
    for group in getattr(run.optimizer, "param_groups", []):
        names = [named.get(id(p)) for p in group["params"]]
        found.append([None if one is None else plain[one] for one in names])
    return found or None


def _optimizer_kind(run: Run) -> str | None:
    kind = type(getattr(run.optimizer, "optimizer", run.optimizer))
    return kind.__name__ if kind.__module__.startswith("torch.optim.") else None


# ── resuming ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """The state that a run was set to, as passed to this rank's restore().

    `refused` has a line for each newer checkpoint that was incomplete.
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

    Returns None if no rank has found a checkpoint. `check` may refuse the shared state
    with a ValueError. If this function raises, no rank's run has changed.

    Raises:
        CheckpointError: there are checkpoints but none is complete, there are shards of
            several steps but no manifest, the ranks found different checkpoints, or
            another rank raised an error.
        ValueError: the checkpoint belongs to another run, with different parameters or
            without a part of this one.
        DiskError: the folder can't be read.
    """
    found: Resumed | None = None
    raised: Exception | None = None
    try:
        with within():
            checkpoint = tasks.load(disk())
        if checkpoint is None:
            _require_no_lost_manifests(disk())
        else:
            shared, owns = unpack(checkpoint)
            shared = merged(shared, owns, comm.rank, comm.world_size, run)
            if check is not None:
                check(shared)
            shared, owns = for_run(run, shared, owns)
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
            "use one folder that all ranks share"
        )
    if found is not None:
        apply(comm, tasks, run, found.shared, found.owns, within=within)
    return found


def _require_no_lost_manifests(disk: Disk) -> None:
    """Refuse shards of several steps without a manifest.

    A first save that was cut short leaves shards of one step. The next save removes
    what it finds of earlier steps, so those of two steps had manifests once.
    """
    names = [name for name in disk.names() if not name.endswith(TEMPORARY)]
    steps = {s for name in names if (s := step_of(name)) is not None}
    if len(steps) > 1 and not manifest_steps(names):
        raise CheckpointError(
            f"there are shards of the steps {', '.join(map(str, sorted(steps)))}, but "
            f"no manifest, such as {manifest_name(max(steps))}: copy the manifests "
            "too, or remove the shards to start from the beginning"
        )


def require_newest(comm: Comm, tasks: Any, disk: Disk, step: int) -> None:
    """Require on rank 0 that no complete checkpoint has a later step than `step`.

    Raises:
        CheckpointError: one has; only rank 0 raises it.
    """
    if comm.rank or not any(s > step for s in manifest_steps(disk.names())):
        return
    try:
        newest = tasks.load(disk)
    except CheckpointError:  # none of them is complete
        return
    if newest is not None and newest.step > step:
        raise CheckpointError(
            f"the folder has a checkpoint of step {newest.step}, which a resume would "
            f"take instead of step {step}: continue from it with load_checkpoint(), or "
            "use another folder"
        )


def apply(
    comm: Comm,
    tasks: Any,
    run: Run,
    shared: State,
    owns: list[State],
    *,
    within: Within = nullcontext,
) -> None:
    """Call restore() on all ranks, and undo it if one of them fails; collective.

    Raises:
        CheckpointError: another rank raised an error; this run is unchanged.
        Exception: the error of restore(); this run is unchanged.
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
    """Return the shared state, including the items that each rank saved for itself.

    If the number of ranks has changed, all ranks take rank 0's buffers and the extra
    state of its modules.

    Raises:
        ValueError: the number of ranks has changed, and an item that differed between
            ranks is needed.
    """
    apart = owns[rank].get(APART, {}) if len(owns) == size else owns[0].get(APART, {})
    if len(owns) != size:
        needed = {*run.parts, "parameters", "master", "optimizer", "factors"}
        wanted = sorted(needed & set(apart) - {EXTRA})
        if wanted:
            raise ValueError(
                f"the state of {wanted[0]!r} differed between ranks when it was saved, "
                f"so only {len(owns)} ranks can load it, but there are {size}: resume "
                "with as many ranks as then"
            )
    return {**shared, **apart}


def _agree(comm: Comm, raised: Exception | None, value: int) -> list[int]:
    """Return the value of each rank, but raise on all ranks if one has an error."""
    said = "" if raised is None else one_line(raised)
    reports = exchange(comm, [said, value])
    if raised is not None:
        raise raised
    for rank, (error, _) in enumerate(reports):
        if error:
            raise CheckpointError(f"rank {rank}: {error}")
    return [value for _, value in reports]


def one_line(error: Exception) -> str:
    """Return an error's text on one line, with its type where that adds information."""
    text = " ".join(str(error).split())
    kind = type(error).__name__
    return (
        text if isinstance(error, ValueError | OSError) and text else f"{kind}: {text}"
    )


# ── does it fit ─────────────────────────────────────────────────────────────────────


def fitted(
    run: Run, shared: State, owns: list[State], step: int
) -> tuple[State, list[State]]:
    """Rename the state for the run's model and check that it fits; change nothing yet.

    Raises:
        ValueError: the state doesn't fit the run; the message says where.
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
    for name, part in run.parts.items():
        if hasattr(part, "param_groups"):
            _require_same_kind(f"the optimizer {name!r}", part, shared[name])
    return shared, owns


def _require_memory(model: nn.Module) -> None:
    """Require that all parameters and buffers are whole and have memory."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            why = "has no shape yet: call the model with a batch first"
        elif tensor.is_meta:
            why = "is on the meta device, which has no memory: call to_empty() first"
        elif is_sharded(tensor):
            why = "is a DTensor, but a checkpoint needs whole tensors"
        else:
            continue
        raise ValueError(f'"{name}" {why}')


def _renamed(
    model: nn.Module, shared: State, owns: list[State]
) -> tuple[State, list[State]]:
    """Rename the saved state if torch.compile or DDP wraps only one of the models."""
    own = [name for name, _ in model.named_parameters()]
    own += [name for name, _ in model.named_buffers()]
    here = {plain: name for name, plain in plain_names(own).items()}
    saved = [*shared["parameters"], *(name for one in owns for name in one["buffers"])]
    now = {name: here.get(to, to) for name, to in plain_names(saved).items()}

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


def _wanted_buffers(model: nn.Module, saved: State) -> State:
    """Drop saved non-persistent buffers whose shape has changed; keep the model's."""
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
                f'the checkpoint is from another model: "{name}" is {own[name].dtype} '
                f"in the model, but {value.dtype} in the checkpoint"
            )


def _require_like(master: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
    own, other = ([(*t.shape,) for t in tensors] for tensors in (master, saved))
    if own != other:
        raise ValueError(
            f"the checkpoint has {len(other)} master weights, but the run {len(own)}"
            + (", of other shapes" if len(own) == len(other) else "")
        )


def _require_optimizer(run: Run, shared: State, owns: list[State], step: int) -> None:
    """Require an optimizer of the saved class, with the saved parameters in order."""
    is_there = "optimizer" in (owns[0] if run.is_sharded else shared)
    if not is_there:
        other = "sharded" if "optimizer" in owns[0] else "not sharded"
        raise ValueError(
            f"the optimizer in the checkpoint of step {step} is {other}, but this one "
            f"is {'sharded' if run.is_sharded else 'not'}"
        )
    was, kind = shared.get(KIND), _optimizer_kind(run)
    if was is not None and kind is not None and was != kind:
        raise ValueError(
            f"the checkpoint has the state of {was}, but the optimizer is {kind}: "
            "resume with the same optimizer"
        )
    groups = getattr(run.optimizer, "param_groups", None)
    if run.is_sharded or groups is None:
        return
    _require_same_kind("the optimizer", run.optimizer, shared["optimizer"])
    before, now = shared.get(NAMES), _optimizer_names(run)
    for one, name in _pairs(before, now):
        if one != name and one is not None and name is not None:
            raise ValueError(
                f'the optimizer of the checkpoint has "{one}" where this one has '
                f'"{name}": make its groups in the same order'
            )


def _require_same_kind(what: str, optimizer: Any, state: Any) -> None:
    """Check that the saved groups have this optimizer's settings and the right shapes.

    One side may have more settings, because a scheduler adds some, and so does a newer
    torch.
    """
    groups, saved = optimizer.param_groups, state.get("param_groups", [])
    here, there = ([len(g["params"]) for g in found] for found in (groups, saved))
    if here != there:
        raise ValueError(
            f"the checkpoint is from another optimizer: the groups of "
            f"{what} have {there} parameters, but this one's have {here}"
        )
    for group, one in zip(groups, saved, strict=True):
        lacking = [
            name for name in getattr(optimizer, "defaults", ()) if name not in one
        ]
        unknown = [name for name in one if name not in group and name in _SETTINGS]
        if lacking and unknown:
            raise ValueError(
                f"the checkpoint is from another optimizer: {what} was "
                f"saved with {', '.join(map(repr, unknown))}, but a "
                f"{type(optimizer).__name__} needs {', '.join(map(repr, lacking))}"
            )
    states = state.get("state", {})
    flat = [p for group in groups for p in group["params"]]
    numbers = [number for group in saved for number in group["params"]]
    for number, p in zip(numbers, flat, strict=True):
        _require_moments(states.get(number, {}), p)


_SETTINGS = {
    "momentum",
    "dampening",
    "nesterov",
    "betas",
    "eps",
    "alpha",
    "rho",
    "lambd",
    "etas",
    "step_sizes",
    "centered",
    "lr_decay",
    "momentum_decay",
    "max_iter",
    "history_size",
    "beta2_decay",
}
"""Settings that only some of torch's optimizers have."""


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
                f"the checkpoint is from another optimizer: {key!r} has shape "
                f"{tuple(value.shape)} for a parameter of shape {tuple(p.shape)}"
            )


# ── all or nothing ──────────────────────────────────────────────────────────────────


class _NamedPart:
    """Wraps a part of the run so that its errors name the part."""

    def __init__(self, name: str, part: Stateful) -> None:
        self.name, self.part = name, part

    def state_dict(self) -> State:
        """Return the part's state."""
        return self.part.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Load the part's state.

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
    """A copy of a run before restore(), in CPU memory."""

    def __init__(self, run: Run) -> None:
        self.run = run
        model = run.model
        tensors = [*model.parameters(), *model.buffers(), *run.master]
        self.tensors = [(t, t.detach().to("cpu", copy=True)) for t in tensors]
        inner = getattr(run.optimizer, "optimizer", run.optimizer)
        self.loads: list[tuple[Callable[[Any], Any], Any]] = []
        for part in (inner, *run.parts.values()):
            with suppress(Exception):  # a part may have no state yet
                self.loads.append((part.load_state_dict, deepcopy(part.state_dict())))
        self.kept = {
            name: deepcopy(getattr(run.hook, name).state_dict(model))
            for name in ("residuals", "factors")
            if hasattr(run.hook, name)
        }
        self.random = random_state()

    def put_back(self) -> None:
        """Restore the run, as far as its parts allow it."""
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
