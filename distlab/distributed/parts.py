"""Map each public name to its task, and say whose code runs and whose error it is.

    name of the library ─▶ TABLE ─▶ tasks ─▶ `distlab use` ─▶ the learner's functions,
                                                             or the reference's

If a task hasn't passed, we use the reference's code, as everywhere else. A choice that
you make with `distlab use` or DISTLAB_IMPL takes effect in the next process.
"""

from __future__ import annotations

import ast
import functools
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from distlab.comm import PeerLost
from distlab.curriculum import Curriculum, load_curriculum
from distlab.curriculum.choose import Choice, Part, Side, chosen_unit
from distlab.curriculum.regions import functions_of
from distlab.paths import shown

_RING = (
    "ring_allreduce.chunk_bounds",
    "ring_allreduce.reduce_scatter",
    "ring_allreduce.all_reduce",
)
_GATHER = ("collectives.broadcast", "collectives.gather_scatter")
_BUCKETS = (
    "distributed_data_parallel.buckets",
    "distributed_data_parallel.hooks",
    "distributed_data_parallel.finish",
    "distributed_data_parallel.unused",
)

TABLE: dict[str, tuple[str, ...]] = {
    # the group; over TCP, the ranks meet through process_group's store
    "init_process_group": ("process_group.rendezvous",),
    "destroy_process_group": (),
    "is_initialized": (),
    "get_rank": (),
    "get_world_size": (),
    "get_distributed_info": (),
    "default_comm": (),
    "ReduceOp": (),
    "UnitError": (),
    # messages: of the transport, as in every task
    "send": (),
    "recv": (),
    # collectives
    "all_reduce": (*_RING, *_GATHER),  # MIN, MAX and PRODUCT by all_gather
    "broadcast": ("collectives.broadcast",),
    "reduce": (*_RING, *_GATHER),
    "all_gather": _GATHER,
    "gather": _GATHER,
    "reduce_scatter": ("collectives.gather_scatter", "collectives.all_to_all"),
    "scatter": ("collectives.all_to_all",),
    "all_to_all": ("collectives.all_to_all",),
    "barrier": ("collectives.all_reduce", "collectives.broadcast"),
    # training
    "DistributedDataParallel": _BUCKETS,
    "no_sync": ("distributed_data_parallel.finish",),
    "sync_gradients": ("distributed_data_parallel.hooks", *_BUCKETS[2:]),
    "DistributedSampler": ("data_loader.shard_indices", "data_loader.sampler"),
    "TensorParallel": (
        "trainer.broadcast_model",
        "tensor_parallel.copy_reduce",
        "tensor_parallel.linears",
        "tensor_parallel.block",
    ),
    "PipelineParallel": (
        "trainer.broadcast_model",
        "model_parallel.partition",
        "pipeline_parallel.forward_backward",
        "pipeline_parallel.execute",
        "pipeline_parallel.free",
        "pipeline_parallel.gpipe",
        "pipeline_parallel.one_f_one_b",
        "pipeline_parallel.interleaved",
    ),
    "checkpoint_scope": ("activation_checkpointing.checkpoint",),
    "memory_pool_scope": (),
    "elastic": (
        "fault_tolerance.save",
        "fault_tolerance.load",
        "fault_tolerance.full_state",
    ),
    "save_checkpoint": ("fault_tolerance.save", "fault_tolerance.full_state"),
    "load_checkpoint": ("fault_tolerance.load", "fault_tolerance.full_state"),
}
"""The tasks behind each public name; none if the name isn't a lesson of the course."""


class UnitError(RuntimeError):
    """Raised when a task's code raised an error; one line says how to get past it.

    The line names the task, whose code it is, its file and line, and the command that
    sets the task to the reference.

    Example:
        init_process_group()
        try:
            all_reduce(torch.ones(3))
        except UnitError as error:  # raised in the learner's ring, say
            print(error)
    """


def unit(name: str) -> Any:
    """Return a unit's module, where each task is the learner's or the reference's."""
    if name not in _MODULES:
        _MODULES[name] = _choice(name).load()
    return _MODULES[name]


_MODULES: dict[str, ModuleType] = {}


@dataclass
class _Source:
    """The folder and the side that we read units from; see `forget`."""

    default: Side = "auto"
    root: Path | None = None


_SOURCE = _Source()


@functools.cache
def _choice(name: str) -> Choice:
    return chosen_unit(_curriculum(), name, _SOURCE.default)


def _curriculum() -> Curriculum:
    return load_curriculum(_SOURCE.root)


def forget(default: Side = "auto", root: Path | None = None) -> None:
    """Read the units again the next time that they are needed.

    `default` applies to tasks for which `distlab use` has no setting: "auto" takes the
    learner's code if it has passed, and "mine" takes it wherever it is written. `root`
    is the course's folder; without it, we look for it from the working directory
    upward.
    """
    _SOURCE.default, _SOURCE.root = default, root
    _choice.cache_clear()
    _MODULES.clear()


def tasks(*public: str) -> list[Part]:
    """Return, by task number, whose code these public names, or all names, run."""
    wanted = {task for name in public or TABLE for task in TABLE[name]}
    units = dict.fromkeys(task.partition(".")[0] for task in sorted(wanted))
    parts = {part.task: part for name in units for part in _choice(name).parts}
    order = [task.id for task in _curriculum().tasks if task.id in wanted]
    return [parts[task] for task in order]


# ── what is said when a task's code raises an error ─────────────────────────────────


@contextmanager
def running(*refusals: type[Exception]) -> Iterator[None]:
    """Name the task whose code raises an error in this block.

    `refusals` are errors about the caller's arguments that the tasks' contracts allow.
    These pass through unchanged, and so does a lost peer, which isn't the fault of a
    task.

    Raises:
        UnitError: the code of a task raised an error.
    """
    passing: tuple[type[Exception], ...] = (PeerLost, UnitError, *refusals)
    try:
        yield
    except passing:
        raise
    except Exception as error:
        named = _named(error)
        if named is None:
            raise
        raise named from error


def _shown(path: Path) -> str:
    root = _curriculum().root
    is_away = root not in (Path.cwd(), *Path.cwd().parents)
    return str(path.relative_to(root)) if is_away else shown(path)


class _Line(NamedTuple):
    """A line of a unit's file, in a traceback."""

    choice: Choice
    path: Path
    number: int


def _named(error: Exception) -> UnitError | None:
    line = _line_of(error)
    if line is None:
        return None
    what = str(error).strip().partition("\n")[0]
    kind = type(error).__name__
    said = f"{kind}: {what}" if what else kind
    where = f"{_shown(line.path)}:{line.number}"
    part = _part_of(line)
    if part is None:
        name = line.choice.reference.unit
        return UnitError(f"unit {name} ({where}) raised {said}")
    if part.whose == "reference":
        return UnitError(
            f"{part.number} {part.task} (the reference's, {where}) raised {said}; "
            "check the arguments"
        )
    return UnitError(
        f"{part.number} {part.task} (yours, {where}) raised {said}; "
        f"`distlab use reference {part.task}` gets past it"
    )


def _line_of(error: Exception) -> _Line | None:
    """Return the innermost line of a unit, unless the caller's code runs inside it."""
    choices = [_choice(name) for name in _MODULES]
    loaded = {str(choice.reference.path): choice for choice in choices}
    loaded |= {str(choice.source.path): choice for choice in choices}
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        path = frame.f_code.co_filename
        if path in loaded:
            return _Line(loaded[path], Path(path), number)
        if not path.startswith(_OURS):
            return None
    return None


_OURS = (
    str(Path(__file__).parents[1]),
    str(Path(torch.__file__).parent),
    str(Path(functools.__file__).parent),  # contextlib and others
    "<",
)


def _part_of(line: _Line) -> Part | None:
    """Return the task in whose function the line is."""
    choice = line.choice
    is_source = line.path == choice.source.path
    tree = (choice.source if is_source else choice.reference).tree
    names = {
        name: task
        for task, functions in functions_of(choice.reference.text).items()
        for name in functions
    }
    parts = {part.task: part for part in choice.parts}
    for name, node in _functions(tree):
        last = node.end_lineno or node.lineno
        if name in names and node.lineno <= line.number <= last:
            return parts.get(names[name])
    return None


def _functions(
    body: ast.Module | ast.ClassDef, prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in body.body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield f"{prefix}{node.name}", node
