"""Checks of task 1.5, `trainer.broadcast_model`: the model's state, all of it."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.digests import digest
from distlab.grading.clause import clause
from distlab.grading.kit.baseline import make_model
from distlab.grading.kit.by_name import State, listed, some_of, wrong_names
from distlab.grading.kit.flat import flat
from distlab.grading.kit.messages import expect_messages
from distlab.grading.kit.values import Suspect, expect_values, same_everywhere
from distlab.grading.runs import Runs, RunSpec, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext, Run

WORLDS = (3, 2, 4, 7, 1)
FROZEN = "0.0.weight"  # the parameter that is not trained
UNSAVED = "1.table"  # the buffer that state_dict() leaves out


def broadcast_once(
    context: RankContext, unit: ModuleType, seed: int, src: int | None = None
) -> dict[str, Any]:
    """A different model on each rank, a part of it frozen; broadcast from `src`.

    All ranks but the source have nan somewhere, as in memory that nobody has filled.
    """
    norm = nn.BatchNorm1d(3)
    norm.register_buffer("table", torch.zeros(2), persistent=False)
    model = nn.Sequential(make_model(seed), norm).double()
    # The outermost module has a parameter of its own, without a dimension, and float32:
    # one long vector of all parameters would change that.
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    dict(model.named_parameters())[FROZEN].requires_grad_(False)
    _fill(model, seed + 31 * context.rank)
    if context.rank != (src or 0):
        dict(model.named_parameters())[FROZEN].data[0, 0] = torch.nan
    model.to(context.comm.device)
    before = _state(model)
    given = _held(model)
    if src is None:
        unit.broadcast_model(context.comm, model)
    else:
        unit.broadcast_model(context.comm, model, src)
    changed = _changed(given, _held(model))
    return {"before": before, "after": _state(model), "changed": changed}


Held = dict[str, tuple[torch.dtype, bool, int]]


def _held(model: nn.Module) -> Held:
    """What an optimizer has of the parameters, besides their values."""
    return {n: (p.dtype, p.requires_grad, id(p)) for n, p in model.named_parameters()}


def _changed(given: Held, held: Held) -> str:
    """How a parameter is another one than it was, or nothing."""
    for name, had in given.items():
        has = held.get(name, had)
        if has[0] != had[0]:
            return f"{name} now has dtype {has[0]}, expected {had[0]}"
        if has[1] != had[1]:
            return f"{name} now has requires_grad={has[1]}, expected {had[1]}"
        if has[2] != had[2]:
            return f"{name} is now another tensor, expected the same one"
    return "" if given.keys() >= held.keys() else "the model has new parameters"


def _states(run: Run, part: str) -> tuple[list[State], list[State]]:
    before = [value["before"][part] for value in run.values]
    after = [value["after"][part] for value in run.values]
    for rank, (had, has) in enumerate(zip(before, after, strict=True)):
        lost = [name for name in had if name not in has]
        if lost:
            raise NotYetError(
                f"after broadcast_model, the model on rank {rank} lacks "
                f"{listed(lost)}, expected it kept",
                rule="copy values into the model; leave its modules as they are",
            )
    return before, after


def _sources(world_size: int) -> list[RunSpec]:
    """From the default and the last rank, or from one between."""
    sources = (None, 2) if world_size == 3 else (world_size // 2,)
    return [
        on_ranks(broadcast_once, src=src).when(
            "" if src is None else f"with src = {src}"
        )
        for src in sources
    ]


def _broadcasts(runs: Runs) -> list[tuple[int, Run]]:
    """Runs with their source."""
    return [
        (dict(spec.values)["src"] or 0, runs.finished(spec))
        for spec in _sources(runs.world_size)
    ]


@clause("trainer.broadcast_model", "C1", worlds=WORLDS, runs=_sources)
def parameters_agree(runs: Runs) -> str | None:
    """Parameters equal those of src, in the caller's model."""
    for src, run in _broadcasts(runs):
        before, after = _states(run, "parameters")
        n = runs.world_size
        expect_values(
            [flat(state) for state in after],
            same_everywhere(flat(before[src]), n),
            what=some_of("the parameters", before[src], after),
            verb="are",
            suspects=_wrong_copies(before, src),
        )
        expect_messages(run, "the weights are right, but not through comm")
        changed = next((v["changed"] for v in run.values if v["changed"]), "")
        if changed:
            raise NotYetError(
                f"broadcast_model copied the right values, but {changed}",
                rule="copy the values into the existing parameters",
            )
    return None


@clause("trainer.broadcast_model", "C2", worlds=WORLDS, runs=_sources)
def buffers_agree(runs: Runs) -> str | None:
    """Buffers too: BatchNorm's running statistics and its integer counter."""
    for src, run in _broadcasts(runs):
        n = runs.world_size
        before, after = _states(run, "parameters")
        if wrong_names(before[src], after):
            raise NotJudgedError("the parameters do not agree: see C1")
        before, after = _states(run, "buffers")
        kept = [
            name
            for name, value in before[src].items()
            if any(not torch.equal(state[name], value) for state in before)
            and all(
                torch.equal(a[name], b[name])
                for a, b in zip(after, before, strict=True)
            )
        ]
        if kept:
            unsaved = ", which is not in state_dict()" * (kept == [UNSAVED])
            buffers = "buffers" if len(kept) > 1 else "buffer"
            raise NotYetError(
                f"every rank kept its own {buffers} {listed(kept)}{unsaved}, expected "
                f"rank {src}'s",
                slug="buffers-forgotten",
                evidence=[
                    (rank, "digest", digest(flat(state)))
                    for rank, state in enumerate(after)
                ],
                rule="a buffer registered with persistent=False is part of the model, "
                "too: model.buffers() has it"
                if unsaved
                else "a model holds parameters and buffers: broadcast both",
            )
        # Beside a large counter no error of the others is large: they are apart.
        had, has = [_floats(state) for state in before], [_floats(s) for s in after]
        expect_values(
            [flat(state) for state in has],
            same_everywhere(flat(had[src]), n),
            what=some_of("the buffers", had[src], has),
            verb="are",
            suspects=_wrong_copies(had, src),
        )
        _expect_counters(before[src], after, src)
    return None


def _floats(state: State) -> State:
    return {name: b for name, b in state.items() if b.is_floating_point()}


def _expect_counters(expected: State, actual: list[State], src: int) -> None:
    """Integers arrive as they are, however large."""
    for name, right in expected.items():
        if right.is_floating_point():
            continue
        for rank, state in enumerate(actual):
            if not torch.equal(state[name], right):
                raise NotYetError(
                    f"on rank {rank}, the buffer {name} holds {int(state[name])}, "
                    f"expected {int(right)} as on rank {src}, the source",
                    rule="give each tensor a broadcast of its own, in its own dtype: "
                    "a floating-point number can't hold every integer",
                )


def _wrong_copies(before: list[State], src: int) -> list[Suspect]:
    n = len(before)
    whole = [flat(state) for state in before]
    frozen = {name for name in before[0] if name == FROZEN}
    unfrozen = [
        flat({k: own[k] if k in frozen else v for k, v in before[src].items()})
        for own in before
    ]
    return [
        Suspect(
            slug="parameters-only-on-rank0",
            values=whole,
            sentence="broadcast_model changed no rank's model, expected rank "
            f"{src}'s values in each",
            rule="write into the model's own tensors, on every rank",
        ),
        Suspect(
            slug="source-ignored",
            values=same_everywhere(whole[0], n),
            sentence=f"with src = {src}, every rank has rank 0's values, expected rank "
            f"{src}'s",
            rule="the source is the argument src, not always rank 0",
        ),
        Suspect(
            slug="",
            values=unfrozen,
            sentence=f"every rank kept its own {FROZEN}, which is frozen "
            f"(requires_grad=False), expected rank {src}'s",
            rule="every parameter counts, whether it is trained or not",
        ),
        Suspect(
            slug="",
            values=same_everywhere(torch.stack(whole).mean(0), n),
            sentence="every rank has the mean of all ranks' values, expected rank "
            f"{src}'s values",
            rule="one rank's state is copied; nothing is averaged",
        ),
        Suspect(
            slug="",
            values=same_everywhere(torch.stack(whole).sum(0), n),
            sentence="every rank has the sum of all ranks' values, expected rank "
            f"{src}'s values",
            rule="one rank's state is copied; nothing is added",
        ),
    ]


def _fill(model: nn.Module, seed: int) -> None:
    """Numbers of its own for each parameter and buffer."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            numbers = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
            tensor.data.copy_(numbers)
        else:
            tensor.fill_((1 << 60) + 1 + seed % 1000)  # float64 would round it


def _state(model: nn.Module) -> dict[str, State]:
    return {
        "parameters": {
            n: p.detach().double() for n, p in _copied(model.named_parameters())
        },
        "buffers": dict(_copied(model.named_buffers())),
    }


def _copied(named: Any) -> list[tuple[str, Tensor]]:
    return [(name, tensor.detach().clone()) for name, tensor in named]
