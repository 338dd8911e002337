"""Checks of the unit `trainer`: the model's state, and the mean gradient.

Everything is float64 and plain SGD. Adam would hide a gradient that is n times too
large, accuracy would hide almost anything, and world size 2 alone would hide a
hard-coded 2; none of them is used as proof. 1.7 has a file of its own, train_step.py.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm import COLLECTIVES
from distlab.grading.bench import Bench, Implementation
from distlab.grading.checks.train_step import train_steps
from distlab.grading.clause import clause
from distlab.grading.oracles import (
    Suspect,
    all_close,
    digest,
    expect_equal_bits,
    expect_values,
    same_everywhere,
)
from distlab.grading.reference import make_model
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext, Run
from distlab.runner.autopsy import Evidence, describe

__all__ = ["average_once", "broadcast_once", "train_steps"]

WORLDS = (3, 2, 4, 7, 1)

State = dict[str, Tensor]
"""A model's parameters or buffers by name, in float64."""


# ── 1.5 broadcast_model ─────────────────────────────────────────────────────────────


def broadcast_once(
    context: RankContext, unit: ModuleType, seed: int, src: int | None = None
) -> dict[str, Any]:
    """A different model on each rank, a part of it frozen; broadcast from `src`."""
    model = nn.Sequential(make_model(seed + context.rank), nn.BatchNorm1d(3)).double()
    next(model.parameters()).requires_grad_(False)
    _fill_buffers(model, seed + 31 * context.rank)
    before = _state(model)
    if src is None:
        unit.broadcast_model(context.comm, model)
    else:
        unit.broadcast_model(context.comm, model, src)
    return {"before": before, "after": _state(model)}


def _broadcasts(impl: Implementation, cluster: Bench) -> list[tuple[int, Run]]:
    """Runs with their source: from the default and the last rank, or one between."""
    n = cluster.world_size
    sources = (None, 2) if n == 3 else (n // 2,)
    return [(s or 0, cluster.run(impl, broadcast_once, src=s)) for s in sources]


@clause("trainer.broadcast_model", "C1", worlds=WORLDS)
def parameters_agree(impl: Implementation, cluster: Bench) -> str | None:
    """V: parameters equal those of src, in the caller's model."""
    for src, run in _broadcasts(impl, cluster):
        before, after = _states(run, "parameters")
        n = cluster.world_size
        expect_values(
            [_flat(state) for state in after],
            same_everywhere(_flat(before[src]), n),
            what="the parameters",
            verb="are",
            suspects=_wrong_copies(before, src),
            rule="every rank ends with what rank src had",
        )
    return None


@clause("trainer.broadcast_model", "C2", worlds=WORLDS)
def buffers_agree(impl: Implementation, cluster: Bench) -> str | None:
    """V: buffers too: BatchNorm's running statistics and its integer counter."""
    for src, run in _broadcasts(impl, cluster):
        before, after = _states(run, "buffers")
        n = cluster.world_size
        kept = [
            name
            for name, value in before[src].items()
            if any(not torch.equal(state[name], value) for state in before)
            and all(torch.equal(a[name], b[name]) for a, b in zip(after, before))
        ]
        if kept:
            raise NotYetError(
                f"the parameters agree, but every rank kept its own {_listed(kept)}",
                slug="buffers-forgotten",
                evidence=tuple(
                    Evidence(rank=rank, state="digest", text=digest(_flat(state)))
                    for rank, state in enumerate(after)
                ),
                rule="a model's state is its parameters and all its buffers",
            )
        expect_values(
            [_flat(state) for state in after],
            same_everywhere(_flat(before[src]), n),
            what="the buffers",
            verb="are",
            suspects=_wrong_copies(before, src),
            rule="every rank ends with what rank src had",
        )
    return None


def _wrong_copies(before: list[State], src: int) -> list[Suspect]:
    n = len(before)
    flat = [_flat(state) for state in before]
    frozen = {name for name in before[0] if name == FROZEN}
    unfrozen = [
        _flat({k: own[k] if k in frozen else v for k, v in before[src].items()})
        for own in before
    ]
    return [
        Suspect(
            slug="parameters-only-on-rank0",
            values=flat,
            sentence="every rank has what it had before: the caller's model was not "
            "changed",
            rule="write into the model's own tensors, on every rank",
        ),
        Suspect(
            slug="source-ignored",
            values=same_everywhere(flat[0], n),
            sentence=f"src is {src}, but every rank has rank 0's values",
            rule="the source is the argument src, not always rank 0",
        ),
        Suspect(
            slug="",
            values=unfrozen,
            sentence=f"{FROZEN} was left out: it is frozen (requires_grad=False), "
            "but part of the model",
            rule="every parameter counts, whether it is trained or not",
        ),
        Suspect(
            slug="",
            values=same_everywhere(torch.stack(flat).mean(0), n),
            sentence=f"every rank has the mean over the ranks, not rank {src}'s values",
            rule="one rank's state is copied; nothing is averaged",
        ),
        Suspect(
            slug="",
            values=same_everywhere(torch.stack(flat).sum(0), n),
            sentence=f"every rank has the sum over the ranks, not rank {src}'s values",
            rule="one rank's state is copied; nothing is added",
        ),
    ]


# ── 1.6 average_gradients ───────────────────────────────────────────────────────────


class Alike(nn.Module):
    """Parameters of unlike shapes, but 12 elements each.

    Reducing two of them in another order on another rank goes through without an
    error, as it does for the equal layers of a real model; only the values tell.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def made(*shape: int) -> nn.Parameter:
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            return nn.Parameter(values * 0.5)

        self.mix, self.bias = made(3, 4), made(12)
        self.gain, self.skew = made(1, 12), made(2, 6)
        self.head, self.tail = made(12, 1), made(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        """One number per sample, from `inputs` (B, 12)."""
        hidden = torch.tanh(inputs * self.gain + self.bias)
        hidden = hidden + hidden.roll(1, 1) * self.skew.reshape(-1)
        hidden = hidden + (hidden.reshape(-1, 3, 4) * self.mix).reshape(-1, 12)
        return (hidden * self.tail.reshape(-1)) @ self.head


def average_once(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """One backward on this rank's own data, then the averaging under test."""
    # A set of tensors is ordered by their addresses. Real processes have different
    # ones; forked ranks would not, and a loop over a set would look harmless.
    shifted = [torch.empty(16 * (1 + i)) for i in range(17 * context.rank)]
    model = Alike(seed)
    generator = torch.Generator().manual_seed(seed * 7919 + context.rank)
    inputs = torch.randn(4, 12, generator=generator, dtype=torch.float64)
    model(inputs * (1.0 + context.rank)).square().mean().backward()
    # Kept, so that no other tensor can get their addresses while the names count.
    given = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    own = {name: gradient.clone() for name, gradient in given.items()}
    unit.average_gradients(context.comm, model)
    after = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    names = {str(gradient.data_ptr()): name for name, gradient in given.items()}
    return {"own": own, "after": after, "names": names, "shifted": len(shifted)}


@clause("trainer.average_gradients", "C1", worlds=WORLDS)
def gradients_are_the_mean(impl: Implementation, cluster: Bench) -> str | None:
    """V: each gradient is the mean over the ranks."""
    run = cluster.run(impl, average_once)
    n = cluster.world_size
    own = [value["own"] for value in run.values]
    after = [value["after"] for value in run.values]
    for rank, state in enumerate(after):
        missing = [name for name in own[rank] if name not in state]
        if missing:
            raise NotYetError(
                f"after the call .grad of {_listed(missing)} is None on rank {rank}",
                rule="write the mean into the .grad that is there",
            )
    mean = {name: torch.stack([o[name] for o in own]).mean(0) for name in own[0]}
    right = [name for name in mean if all_close([a[name] for a in after], [mean[name]] * n)]
    if len(right) < len(mean) and _order_difference(run):
        raise NotJudgedError("the calls are in different orders: see C2")
    some = f" of {_listed([m for m in mean if m not in right])}" if right else ""
    expect_values(
        [_flat(state) for state in after],
        same_everywhere(_flat(mean), n),
        what=f"the averaged gradient{some}",
        suspects=_wrong_means([_flat(state) for state in own], _flat(mean)),
        rule="sum over the ranks, divided once by how many there are",
    )
    return None


@clause("trainer.average_gradients", "C2", worlds=WORLDS)
def same_calls_same_order(impl: Implementation, cluster: Bench) -> str | None:
    """J and X: one sequence of calls on all ranks, and the same bits after it."""
    run = cluster.run(impl, average_once)
    order = _order_difference(run)
    if order:
        raise order
    expect_equal_bits(
        [_flat(value["after"]) for value in run.values],
        what="the averaged gradient",
        slug="own-order-sum",
        rule="a collective gives every rank the same bits; own sums do not",
    )
    calls = run.ranks[0].calls()
    moved = run.ranks[0].sent_bytes
    return f"n = {cluster.world_size}: {len(calls)} calls, {moved:.0f} bytes per rank"


def _wrong_means(own: list[Tensor], mean: Tensor) -> list[Suspect]:
    n = len(own)
    found = [
        Suspect(
            slug="sum-not-mean",
            values=same_everywhere(mean * n, n),
            sentence=f"your gradient is exactly {n}.00 × the mean on every rank "
            f"({n} ranks): summed and never divided",
            rule="the mean is the sum divided by comm.world_size",
        ),
        Suspect(
            slug="divided-twice",
            values=same_everywhere(mean / n, n),
            sentence=f"your gradient is exactly 1/{n} of the mean on every rank: "
            "divided twice",
            rule="divide once, before or after the sum",
        ),
        Suspect(
            slug="own-gradient-only",
            values=own,
            sentence="every rank still has its own gradient: nothing was averaged "
            "in place",
            rule="write the mean into the .grad that is there",
        ),
        Suspect(
            slug="own-gradient-only",
            values=[gradient / n for gradient in own],
            sentence=f"every rank has its own gradient divided by {n}: divided, "
            "but never summed",
            rule="sum over the ranks, in place; then divide",
        ),
        Suspect(
            slug="rank0-gradient-for-all",
            values=same_everywhere(own[0], n),
            sentence="every rank has rank 0's gradient: the others' data is lost",
            rule="every rank's gradient counts: sum them, then divide",
        ),
    ]
    return found + [
        Suspect(
            slug="hard-coded-two" if wrong == 2 else "",
            values=same_everywhere(mean * (n / wrong), n),
            sentence=f"your gradient is {n}/{wrong} of the mean on {n} ranks: right "
            f"for {wrong} ranks only, a {wrong} is written in the code",
            rule="divide by comm.world_size, whatever it is",
        )
        for wrong in (2, 3, 4, 8)
        if wrong != n
    ]


def _order_difference(run: Run) -> NotYetError | None:
    """The first call at which two ranks do not do the same, if there is one.

    A call on a tensor that is no gradient of the model, such as a copy, has no name
    and is told from others by its shape alone.
    """
    sequences = [
        [
            (
                (call["op"], call["root"], call["reduce"], call["shape"]),
                record.value["names"].get(str(call["ptr"]), ""),
            )
            for call in record.calls()
            if call["op"] in COLLECTIVES
        ]
        for record in run.ranks
    ]
    first = sequences[0]
    for rank, other in enumerate(sequences[1:], 1):
        for index, ((act, name), (its_act, its_name)) in enumerate(
            zip(first, other, strict=False)
        ):
            if act != its_act or (name and its_name and name != its_name):
                return _name_the_difference(run, first, other, rank, index)
    return None


def _name_the_difference(
    run: Run, first: list[Any], other: list[Any], rank: int, index: int
) -> NotYetError:
    def what(sequence: list[Any]) -> str:
        (op, _root, reduce, shape), name = sequence[index]
        return f"called {op}{f' ({reduce})' if reduce else ''} on {name or shape}"

    acts = [sorted(map(repr, sequence)) for sequence in (first, other)]
    return NotYetError(
        f"in call #{index + 1} rank 0 {what(first)}, while rank {rank} {what(other)}",
        slug="different-order" if acts[0] == acts[1] else "collective-mismatch",
        evidence=tuple(
            Evidence(
                rank=record.rank,
                state="calls",
                text=", ".join(
                    f"{describe(c)} {record.value['names'].get(str(c['ptr']), '')}"
                    for c in record.calls()[:3]
                ),
            )
            for record in run.ranks
        ),
        rule="walk through model.parameters(): it has the same order on every rank",
    )


# ── shared ──────────────────────────────────────────────────────────────────────────

FROZEN = "0.0.weight"


def _fill_buffers(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand(buffer.shape, generator=generator))
        else:
            buffer.fill_(1 + seed % 1000)


def _state(model: nn.Module) -> dict[str, State]:
    return {
        "parameters": {n: p.detach().double() for n, p in _copied(model.named_parameters())},
        "buffers": {n: b.double() for n, b in _copied(model.named_buffers())},
    }


def _copied(named: Any) -> list[tuple[str, Tensor]]:
    return [(name, tensor.detach().clone()) for name, tensor in named]


def _states(run: Run, part: str) -> tuple[list[State], list[State]]:
    values = run.values
    return [v["before"][part] for v in values], [v["after"][part] for v in values]


def _flat(state: State) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in state.values()])


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
