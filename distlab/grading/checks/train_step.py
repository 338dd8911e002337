"""Checks of task 1.7, `trainer.train_step`: weights of one process, loss of the batch.

The weights tell that something is wrong; what the ranks did when (zero_grad, backward,
collectives, step) tells which mistake it is where several lead to the same weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm import COLLECTIVES
from distlab.grading.bench import Bench, Implementation
from distlab.grading.clause import clause
from distlab.grading.oracles import (
    Suspect,
    all_close,
    digest,
    expect_equal_bits,
    expect_values,
    same_everywhere,
)
from distlab.grading.reference import (
    LEARNING_RATE,
    STEPS,
    Rule,
    bent,
    make_batch,
    make_model,
    train,
    weights_of,
)
from distlab.grading.verdict import NotYetError
from distlab.runner import RankContext, RankRecord, Run

WORLDS = (3, 2, 4, 7, 1)
BEND_WORLD = 3  # where a second optimiser is tried as well


class Watched(torch.optim.SGD):
    """Plain SGD that notes when it is called; or SGD with a bend, see `bent`."""

    def __init__(
        self, model: nn.Module, note: Callable[[str], None], with_bend: bool
    ) -> None:
        super().__init__(model.parameters(), lr=LEARNING_RATE)
        self._note, self._with_bend = note, with_bend

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See `torch.optim.Optimizer.zero_grad`."""
        self._note("zero_grad")
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """See `torch.optim.Optimizer.step`."""
        loss = None
        if closure:
            with torch.enable_grad():
                loss = closure()
        self._note("step")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    gradient = parameter.grad
                    change = bent(gradient) if self._with_bend else gradient
                    parameter -= LEARNING_RATE * change
        return loss


def train_steps(
    context: RankContext, unit: ModuleType, seed: int, with_bend: bool = False
) -> dict[str, Any]:
    """Some steps from equal weights, each rank on its own share of each batch."""
    events: list[tuple[str, float]] = []

    def note(what: str) -> None:
        events.append((what, time.monotonic()))

    model = make_model(seed)
    model.zero_grad = lambda set_to_none=True: optimizer.zero_grad(set_to_none)  # type: ignore[method-assign,misc]
    first = next(model.parameters())  # its gradient is the last one to be ready
    first.register_post_accumulate_grad_hook(lambda _: note("backward"))
    optimizer = Watched(model, note, with_bend)
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
        note("returned")
    return {"weights": weights_of(model), "losses": losses, "events": events}


@clause("trainer.train_step", "C1", worlds=WORLDS)
def weights_of_one_process(impl: Implementation, cluster: Bench) -> str | None:
    """V and X: after some steps the weights are one process's, on every rank."""
    run = cluster.run(impl, train_steps)
    n, seed = cluster.world_size, cluster.seed
    weights = [value["weights"] for value in run.values]
    expected = train(seed, n).weights
    if not all_close(weights, expected):
        expect_values(
            weights,
            expected,
            what=f"the weights after {STEPS} steps",
            verb="are",
            suspects=_wrong_training(run, seed, n),
            rule=_what_was_odd(run),
        )
    expect_equal_bits(
        weights,
        what=f"the weights after {STEPS} steps",
        rule="every rank must apply the very same averaged gradient",
    )
    if n == BEND_WORLD:
        _expect_with_bend(impl, cluster)
    worst = max(float((w - expected[0]).abs().max()) for w in weights)
    marks = sorted({digest(w) for w in weights})
    return (
        f"n = {n}: largest weight difference to one process {worst:.0e}, "
        f"digest {marks[0]} on all {n}"
    )


def _expect_with_bend(impl: Implementation, cluster: Bench) -> None:
    run = cluster.run(impl, train_steps, with_bend=True)
    n, seed = cluster.world_size, cluster.seed
    what = (
        "with SGD the weights are right; with an optimizer whose step is not "
        "proportional to the gradient, as Adam's is not, they"
    )
    expect_values(
        [value["weights"] for value in run.values],
        train(seed, n, with_bend=True).weights,
        what=what,
        verb="are",
        suspects=[
            Suspect(
                slug="weights-not-gradients",
                values=train(
                    seed, n, _own, with_bend=True, average_weights=True
                ).weights,
                sentence=f"{what} are not: weights were averaged, not gradients",
                rule="average the gradients between backward() and step()",
            )
        ],
        rule="every rank must step with the mean gradient, whatever the optimizer",
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
            rule="return the mean loss over all ranks as a float, on every rank",
        )
    right = train(cluster.seed, n)
    # Once the weights have gone astray (C1) only the first loss can be compared.
    weights = [value["weights"] for value in run.values]
    steps = STEPS if all_close(weights, right.weights) else 1
    local = right.losses[:steps]
    expected = local.mean(1)
    expect_values(
        [torch.tensor(rank[:steps], dtype=torch.float64) for rank in losses],
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
            Suspect(
                slug="",
                values=same_everywhere(expected / n, n),
                sentence=f"the returned loss is 1/{n} of the mean: divided twice",
                rule="divide once, after the sum",
            ),
            Suspect(
                slug="",
                values=same_everywhere(local[:, 0], n),
                sentence="every rank returned rank 0's loss",
                rule="every rank's loss counts: sum them, then divide",
            ),
        ],
        rule="the mean loss over the whole batch, the same on every rank",
    )
    return None


# ── which mistake it was ────────────────────────────────────────────────────────────


def _own(gradients: list[Tensor], rank: int) -> Tensor:
    return gradients[rank]


def _wrong_training(run: Run, seed: int, n: int) -> list[Suspect]:
    def trained(rule: Rule, **how: Any) -> list[Tensor]:
        return train(seed, n, rule, **how).weights

    def times(factor: float) -> list[Tensor]:
        return trained(lambda gradients, rank: torch.stack(gradients).sum(0) * factor)

    slug, sentence = _why_own(run)
    between = "call average_gradients between backward() and step()"
    found = [
        Suspect(slug=slug, values=trained(_own), sentence=sentence, rule=between),
        Suspect(
            slug=slug,
            values=trained(lambda gradients, rank: gradients[rank] / n),
            sentence=sentence,
            rule=between,
        ),
        _no_step(run, seed, n),
        Suspect(
            slug="sum-not-mean",
            values=times(1.0),
            sentence=f"the weights moved by {n} × the mean gradient: summed and never "
            "divided",
            rule="the mean is the sum divided by comm.world_size",
        ),
        Suspect(
            slug="divided-twice",
            values=times(1 / n**2),
            sentence=f"the weights moved by 1/{n} of the mean gradient: divided twice",
            rule="divide once: the loss, or the gradients, not both",
        ),
        Suspect(
            slug="gradients-not-zeroed",
            values=trained(lambda g, rank: torch.stack(g).mean(0), zeroed=False),
            sentence="each step also applied the gradients of the steps before it",
            rule="optimizer.zero_grad() before backward",
        ),
        Suspect(
            slug="rank0-gradient-for-all",
            values=trained(lambda gradients, rank: gradients[0]),
            sentence="every rank's weights went where rank 0's data alone leads",
            rule="every rank's gradient counts: sum them, then divide",
        ),
    ]
    return found + [
        Suspect(
            slug="hard-coded-two" if wrong == 2 else "",
            values=times(1 / wrong),
            sentence=f"the weights moved by {n}/{wrong} of the mean gradient: right "
            f"for {wrong} ranks only",
            rule="divide by comm.world_size, whatever it is",
        )
        for wrong in (2, 3, 4, 8)
        if wrong != n
    ]


def _why_own(run: Run) -> tuple[str, str]:
    """Why each rank may have stepped with its own gradient, from what it did when."""
    alone = "each rank stepped with its own gradient"
    order = _first_step(run.ranks[0])
    if "step" in order and "gradients" in order[order.index("step") :]:
        return "stepped-before-averaging", f"{alone}: the averaging came after the step"
    if "backward" in order and "number" in order[: order.index("backward")]:
        return (
            "loss-not-gradients",
            f"the loss was averaged, but {alone}: averaging a number does not average "
            "what autograd made of it",
        )
    return "own-gradient-only", f"{alone}: the gradients were not averaged in place"


def _no_step(run: Run, seed: int, n: int) -> Suspect:
    slug, why = "", "optimizer.step() was not called"
    order = _first_step(run.ranks[0])
    if "backward" not in order:
        why = "backward() was not called, so there are no gradients"
    elif "step" in order:
        why = "the step had no gradient to apply"
        between = order[order.index("backward") : order.index("step")]
        if "zero_grad" in between:
            slug = "gradients-wiped"
            why = "zero_grad() came between backward() and step()"
    return Suspect(
        slug=slug,
        values=same_everywhere(weights_of(make_model(seed)), n),
        sentence=f"the weights are as they were: {why}",
        rule="the order is: zero_grad, forward, backward, average, step",
    )


def _what_was_odd(run: Run) -> str:
    """The rule to show where no known mistake fits: a count that is off, if there is."""
    for what, call in (("backward", "loss.backward"), ("step", "optimizer.step")):
        for record in run.ranks:
            count = sum(name == what for name, _ in record.value["events"])
            if count != STEPS:
                return (
                    f"in {STEPS} calls of train_step rank {record.rank} called "
                    f"{call}() {count} times"
                )
    return "zero the gradients, forward, backward, average, then step"


def _first_step(record: RankRecord) -> list[str]:
    """What a rank did in its first train_step, in order.

    "zero_grad", "backward", "step"; "number" for a collective on a single element,
    and "gradients" for one on more.
    """
    events = [(when, what) for what, when in record.value["events"]]
    end = next(when for when, what in events if what == "returned")
    events += [
        (call["t"], "gradients" if _numel(call) > 1 else "number")
        for call in record.calls()
        if call["op"] in COLLECTIVES - {"barrier"}
    ]
    return [what for when, what in sorted(events) if when < end]


def _numel(call: dict[str, Any]) -> int:
    count = 1
    for size in call["shape"] or []:
        count *= size
    return count


def _number(value: Any) -> float | None:
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    return float(value) if isinstance(value, int | float) else None
