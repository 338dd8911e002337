"""Checks of the unit `trainer`: weights against one process, bits between ranks.

Everything is float64 and plain SGD. Adam would hide a gradient that is n times too
large, accuracy would hide almost anything, and world size 2 alone would hide a
hard-coded 2; none of them is used as proof.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.grading.bench import Bench, Implementation
from distlab.grading.clause import clause
from distlab.grading.oracles import (
    Suspect,
    all_close,
    close,
    digest,
    expect_equal_bits,
    expect_values,
    same_everywhere,
)
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext, Run
from distlab.runner.autopsy import Evidence, describe

WORLDS = (3, 2, 4, 7, 1)
SAMPLES_PER_RANK = 4
STEPS = 4
LEARNING_RATE = 0.2


def make_model(seed: int) -> nn.Sequential:
    """A small float64 network; the same seed gives the same weights."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3))
    model.double()
    for parameter in model.parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data.copy_(values * 0.5)
    return model


def make_batch(seed: int, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """One rank's share of one global batch: inputs (4, 6) and class numbers (4,)."""
    generator = torch.Generator().manual_seed(seed * 7919 + step * 101 + rank)
    inputs = torch.randn(
        SAMPLES_PER_RANK, 6, generator=generator, dtype=torch.float64
    ) * (1.0 + rank)
    targets = torch.randint(0, 3, (SAMPLES_PER_RANK,), generator=generator)
    return inputs, targets


# ── 1.5 broadcast_model ─────────────────────────────────────────────────────────────


def broadcast_models(context: RankContext, unit: ModuleType, seed: int) -> Any:
    """A different model on each rank; broadcast once from 0, once from the last."""
    results = []
    for src in (0, context.world_size - 1):
        model = nn.Sequential(make_model(seed + context.rank), nn.BatchNorm1d(3))
        model.double()
        _fill_buffers(model, seed + 31 * context.rank + src)
        before = _state(model)
        if src == 0:
            unit.broadcast_model(context.comm, model)
        else:
            unit.broadcast_model(context.comm, model, src)
        results.append({"src": src, "before": before, "after": _state(model)})
    return results


@clause("trainer.broadcast_model", "C1", worlds=WORLDS)
def parameters_agree(impl: Implementation, cluster: Bench) -> str | None:
    """V: parameters equal those of src, in the caller's model."""
    run = cluster.run(impl, broadcast_models)
    for which in range(2):
        before, after = _states(run, which, "parameters")
        _expect_source(before, after, run.values[0][which]["src"], "the parameters")
    return None


@clause("trainer.broadcast_model", "C2", worlds=WORLDS)
def buffers_agree(impl: Implementation, cluster: Bench) -> str | None:
    """V: buffers too: BatchNorm's running statistics and its integer counter."""
    run = cluster.run(impl, broadcast_models)
    for which in range(2):
        before, after = _states(run, which, "buffers")
        if cluster.world_size > 1 and all_close(after, before):
            raise NotYetError(
                "the parameters agree, but every rank kept its own buffers "
                "(BatchNorm's running mean and variance)",
                slug="buffers-forgotten",
                evidence=_digests(after),
                rule="a model's state is its parameters and its buffers",
            )
        _expect_source(before, after, run.values[0][which]["src"], "the buffers")
    return None


def _expect_source(
    before: list[Tensor], after: list[Tensor], src: int, what: str
) -> None:
    n = len(before)
    mean = torch.stack(before).mean(0)
    expect_values(
        after,
        same_everywhere(before[src], n),
        what=what,
        suspects=[
            Suspect(
                slug="parameters-only-on-rank0",
                values=before,
                sentence=f"{what} are as they were on every rank: the caller's model "
                "was not changed",
                rule="write into the model's own tensors, on every rank",
            ),
            Suspect(
                slug="source-ignored",
                values=same_everywhere(before[0], n),
                sentence=f"src is {src}, but every rank has rank 0's values",
                rule="the source is the argument src, not always rank 0",
            ),
            Suspect(
                slug="",
                values=same_everywhere(mean, n),
                sentence=f"{what} are the mean over the ranks, not those of rank {src}",
                rule="one rank's state is copied; nothing is averaged",
            ),
        ],
        rule="every rank ends with what rank src had",
    )


# ── 1.6 average_gradients ───────────────────────────────────────────────────────────


def average_once(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """One backward on this rank's own data, then the averaging under test."""
    # A set of tensors is ordered by their addresses. Real processes have different
    # ones; forked ranks would not, and a loop over a set would look harmless.
    shifted = [torch.empty(16 * (1 + i)) for i in range(17 * context.rank)]
    model = make_model(seed)
    inputs, targets = make_batch(seed, 0, context.rank)
    nn.functional.cross_entropy(model(inputs), targets).backward()
    own = _gradients(model)
    unit.average_gradients(context.comm, model)
    names = {
        str(p.grad.data_ptr()): name
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return {
        "own": own,
        "after": _gradients(model),
        "names": names,
        "shifted": len(shifted),
    }


@clause("trainer.average_gradients", "C1", worlds=WORLDS)
def gradients_are_the_mean(impl: Implementation, cluster: Bench) -> str | None:
    """V: each gradient is the mean over the ranks."""
    run = cluster.run(impl, average_once)
    own = [value["own"] for value in run.values]
    mean = torch.stack(own).mean(0)
    missing = [r for r, value in enumerate(run.values) if value["after"] is None]
    if missing:
        raise NotYetError(
            f"after the call some .grad is None on rank {missing[0]}",
            rule="write the mean into the .grad that is there",
        )
    order = _order_difference(run)
    if order and not all_close([v["after"] for v in run.values], [mean] * len(own)):
        raise order
    expect_values(
        [value["after"] for value in run.values],
        same_everywhere(mean, len(own)),
        what="the averaged gradient",
        suspects=_wrong_means(own, mean),
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
        [value["after"] for value in run.values],
        what="the averaged gradient",
        slug="own-order-sum",
        rule="a collective gives every rank the same bits; own sums do not",
    )
    calls = run.ranks[0].calls()
    moved = run.ranks[0].sent_bytes
    return f"n = {cluster.world_size}: {len(calls)} calls, {moved:.0f} bytes per rank"


def _wrong_means(own: list[Tensor], mean: Tensor) -> list[Suspect]:
    n = len(own)

    def everywhere(factor: float) -> list[Tensor]:
        return same_everywhere(mean * factor, n)

    found = [
        Suspect(
            slug="sum-not-mean",
            values=everywhere(n),
            sentence=f"your gradient is exactly {n}.00 × the mean on every rank "
            f"({n} ranks): summed and never divided",
            rule="the mean is the sum divided by comm.world_size",
        ),
        Suspect(
            slug="divided-twice",
            values=everywhere(1 / n),
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
            slug="rank0-gradient-for-all",
            values=same_everywhere(own[0], n),
            sentence="every rank has rank 0's gradient: the others' data is lost",
            rule="every rank's gradient counts: sum them, then divide",
        ),
        Suspect(
            slug="divided-twice",
            values=[gradient / n for gradient in own],
            sentence=f"every rank has its own gradient divided by {n}: divided, "
            "but never summed",
            rule="sum over the ranks first; then divide",
        ),
    ]
    for wrong in (2, 3, 4, 8):
        if wrong != n:
            found.append(
                Suspect(
                    slug="hard-coded-two" if wrong == 2 else "",
                    values=everywhere(n / wrong),
                    sentence=f"your gradient is {n}/{wrong} of the mean on {n} ranks: "
                    f"right for {wrong} ranks only, a {wrong} is written in the code",
                    rule="divide by comm.world_size, whatever it is",
                )
            )
    return found


def _order_difference(run: Run) -> NotYetError | None:
    """The first call at which two ranks do not do the same, if there is one."""
    sequences = [
        [
            (call["op"], call["shape"], record.value["names"].get(str(call["ptr"]), ""))
            for call in record.calls()
            if call["op"] not in ("send", "recv", "isend", "irecv", "sendrecv")
        ]
        for record in run.ranks
    ]
    for rank, sequence in enumerate(sequences[1:], 1):
        if [s[:2] for s in sequence] == [s[:2] for s in sequences[0]] and not any(
            a[2] and b[2] and a[2] != b[2]
            for a, b in zip(sequence, sequences[0], strict=True)
        ):
            continue
        return _name_the_difference(run, sequences[0], sequence, rank)
    return None


def _name_the_difference(
    run: Run, first: list[Any], other: list[Any], rank: int
) -> NotYetError:
    index = next(
        (i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b),
        min(len(first), len(other)),
    )

    def what(sequence: list[Any]) -> str:
        if index >= len(sequence):
            return "made no more calls"
        op, shape, name = sequence[index]
        return f"called {op} on {name or shape}"

    return NotYetError(
        f"in call #{index + 1} rank 0 {what(first)}, while rank {rank} {what(other)}",
        slug="different-order",
        evidence=tuple(
            Evidence(
                rank=record.rank,
                state="calls",
                text=", ".join(
                    f"{describe(c)} {c['shape']}" for c in record.calls()[:3]
                ),
            )
            for record in run.ranks
        ),
        rule="walk through model.parameters(): it has the same order on every rank",
    )


# ── 1.7 train_step ──────────────────────────────────────────────────────────────────


def train_steps(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """Four steps from equal weights, each rank on its own share of each batch."""
    model = make_model(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(STEPS):
        inputs, targets = make_batch(seed, step, context.rank)
        loss = unit.train_step(
            context.comm,
            model,
            optimizer,
            nn.functional.cross_entropy,
            inputs,
            targets,
        )
        losses.append(_number(loss))
    return {"weights": _weights(model), "losses": losses}


@clause("trainer.train_step", "C1", worlds=WORLDS)
def weights_of_one_process(impl: Implementation, cluster: Bench) -> str | None:
    """V and X: after four steps the weights are one process's, on every rank."""
    run = cluster.run(impl, train_steps)
    n, seed = cluster.world_size, cluster.seed
    weights = [value["weights"] for value in run.values]
    expected, _ = simulate(seed, n, _mean_gradient)
    if n == 1 or not all_close(weights, same_everywhere(expected[0], n)):
        expect_values(
            weights,
            same_everywhere(expected[0], n),
            what=f"the weights after {STEPS} steps",
            suspects=_wrong_training(run, seed, n),
            rule="zero the gradients, forward, backward, average, then step",
        )
    expect_equal_bits(
        weights,
        what=f"the weights after {STEPS} steps",
        rule="every rank must apply the very same averaged gradient",
    )
    worst = max(float((w - expected[0]).abs().max()) for w in weights)
    marks = sorted({digest(w) for w in weights})
    return (
        f"n = {n}: largest weight difference to one process {worst:.0e}, "
        f"digest {marks[0]} on all {n}"
    )


@clause("trainer.train_step", "C2", worlds=WORLDS)
def loss_of_the_whole_batch(impl: Implementation, cluster: Bench) -> str | None:
    """V: the returned number is the mean loss over all ranks."""
    run = cluster.run(impl, train_steps)
    n = cluster.world_size
    losses = [value["losses"] for value in run.values]
    if any(loss is None for rank in losses for loss in rank):
        raise NotYetError(
            "train_step returned no number",
            slug="returned-none",
            rule="return the mean loss over all ranks as a float",
        )
    _, local = simulate(cluster.seed, n, _mean_gradient)
    expected = local.mean(1)
    expect_values(
        [torch.tensor(rank, dtype=torch.float64) for rank in losses],
        same_everywhere(expected, n),
        what="the returned loss",
        suspects=[
            Suspect(
                slug="local-loss-returned",
                values=[local[:, rank] for rank in range(n)],
                sentence="every rank returned the loss of its own share only",
                rule="average the loss over the ranks, as you did the gradients",
            ),
            Suspect(
                slug="sum-loss-returned",
                values=same_everywhere(expected * n, n),
                sentence=f"the returned loss is {n} × the mean: summed, never divided",
                rule="divide the sum by comm.world_size",
            ),
        ],
        rule="the mean loss over the whole batch, the same on every rank",
    )
    return None


def simulate(
    seed: int,
    world_size: int,
    combine: Callable[[list[Tensor], int], Tensor],
    *,
    zeroed: bool = True,
) -> tuple[list[Tensor], Tensor]:
    """All ranks' training in this one process: the reference, and its wrong twins.

    `combine(gradients, rank)` is the gradient that `rank` applies. Returns each rank's
    weights after the last step, and the local losses (STEPS, world_size).
    """
    models = [make_model(seed) for _ in range(world_size)]
    kept = [torch.zeros_like(_weights(models[0])) for _ in range(world_size)]
    losses = torch.zeros(STEPS, world_size, dtype=torch.float64)
    for step in range(STEPS):
        gradients = []
        for rank, model in enumerate(models):
            inputs, targets = make_batch(seed, step, rank)
            loss = nn.functional.cross_entropy(model(inputs), targets)
            parts = torch.autograd.grad(loss, list(model.parameters()))
            gradients.append(
                torch.cat([part.reshape(-1) for part in parts]) + kept[rank]
            )
            losses[step, rank] = loss.detach()
        for rank, model in enumerate(models):
            applied = combine(gradients, rank)
            if not zeroed:
                kept[rank] = applied
            _apply(model, applied)
    return [_weights(model) for model in models], losses


def _mean_gradient(gradients: list[Tensor], rank: int) -> Tensor:
    return torch.stack(gradients).mean(0)


def _wrong_training(run: Run, seed: int, n: int) -> list[Suspect]:
    def trained(
        combine: Callable[[list[Tensor], int], Tensor], *, zeroed: bool = True
    ) -> list[Tensor]:
        return simulate(seed, n, combine, zeroed=zeroed)[0]

    own = trained(lambda gradients, rank: gradients[rank])
    own_over_n = trained(lambda gradients, rank: gradients[rank] / n)
    only_scalars = _only_scalars_reduced(run)
    suspects = [
        Suspect(
            slug="",
            values=same_everywhere(_weights(make_model(seed)), n),
            sentence="the weights are as they were: no step was taken",
            rule="optimizer.step() applies the gradient",
        ),
        Suspect(
            slug="sum-not-mean",
            values=trained(lambda gradients, rank: torch.stack(gradients).sum(0)),
            sentence=f"the weights moved by {n} × the mean gradient: summed and never "
            "divided",
            rule="the mean is the sum divided by comm.world_size",
        ),
        Suspect(
            slug="gradients-not-zeroed",
            values=trained(_mean_gradient, zeroed=False),
            sentence="each step also applied the gradients of the steps before it",
            rule="optimizer.zero_grad() before backward",
        ),
    ]
    if only_scalars:
        sentence = (
            "the loss was averaged, but each rank stepped with its own gradient: "
            "averaging a number does not average what autograd made of it"
        )
        rule = "call average_gradients between backward() and step()"
        return [
            Suspect(slug="loss-not-gradients", values=v, sentence=sentence, rule=rule)
            for v in (own, own_over_n)
        ] + suspects
    stepped = Suspect(
        slug="stepped-before-averaging"
        if _gradients_reduced(run)
        else ("own-gradient-only"),
        values=own,
        sentence="each rank stepped with its own gradient"
        + (": the averaging came after the step" if _gradients_reduced(run) else ""),
        rule="call average_gradients between backward() and step()",
    )
    return [stepped, *suspects]


def _only_scalars_reduced(run: Run) -> bool:
    """Whether numbers were reduced, and nothing larger: the loss, not the gradients."""
    sizes = [_numel(call) for call in run.ranks[0].calls()]
    return bool(sizes) and max(sizes) <= 1


def _gradients_reduced(run: Run) -> bool:
    return any(_numel(call) > 1 for call in run.ranks[0].calls())


def _numel(call: dict[str, Any]) -> int:
    count = 1
    for size in call["shape"] or []:
        count *= size
    return count


# ── shared ──────────────────────────────────────────────────────────────────────────


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return float(value) if isinstance(value, int | float) else None


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).clone()


def _gradients(model: nn.Module) -> Tensor | None:
    parts = [p.grad for p in model.parameters()]
    if any(part is None for part in parts):
        return None
    return torch.cat([part.reshape(-1) for part in parts if part is not None]).clone()


def _apply(model: nn.Module, gradient: Tensor) -> None:
    offset = 0
    for parameter in model.parameters():
        part = gradient[offset : offset + parameter.numel()]
        parameter.data -= LEARNING_RATE * part.reshape(parameter.shape)
        offset += parameter.numel()


def _fill_buffers(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand(buffer.shape, generator=generator))
        else:
            buffer.fill_(1 + seed % 1000)


def _state(model: nn.Module) -> dict[str, Tensor]:
    def flat(tensors: Any) -> Tensor:
        return torch.cat([t.detach().reshape(-1).double() for t in tensors])

    return {
        "parameters": flat(model.parameters()),
        "buffers": flat(model.buffers()),
    }


def _states(run: Run, which: int, part: str) -> tuple[list[Tensor], list[Tensor]]:
    results = [value[which] for value in run.values]
    return [r["before"][part] for r in results], [r["after"][part] for r in results]


def _digests(values: list[Tensor]) -> tuple[Evidence, ...]:
    return tuple(
        Evidence(rank=rank, state="digest", text=digest(value))
        for rank, value in enumerate(values)
    )


__all__ = ["close", "make_batch", "make_model", "simulate"]
