"""Which mistake a wrong training was: by the weights, and by what happened when.

Several mistakes lead to the same weights. What the ranks did in which order
(zero_grad, backward, collectives, step) tells them apart.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from distlab.comm import COLLECTIVES
from distlab.grading.kit.baseline import STEPS, Rule, make_model, train
from distlab.grading.kit.flat import weights_of
from distlab.grading.kit.values import Suspect, same_everywhere
from distlab.runner import RankRecord, Run


def own_gradient(gradients: list[Tensor], rank: int) -> Tensor:
    """The rule of a rank that does not listen to the others."""
    return gradients[rank]


def suspects_of(run: Run, seed: int, n: int) -> list[Suspect]:
    """What known mistakes would have led to, given what the ranks did."""
    if _has_odd_count(run):  # two steps look like a wrong divisor, and so on
        return [_no_step(run, seed, n)]
    return [*_unshared(run, seed, n), _no_step(run, seed, n), *_misweighted(seed, n)]


def _unshared(run: Run, seed: int, n: int) -> list[Suspect]:
    """Each rank alone, with its own gradient or a share of it."""
    rules: dict[str, Rule] = {
        "its own gradient": own_gradient,
        f"1/{n} of its own gradient": lambda gradients, rank: gradients[rank] / n,
    }
    found = []
    for which, rule in rules.items():
        slug, sentence = _why_own(run, which)
        found.append(
            Suspect(
                slug=slug,
                values=train(seed, n, rule).weights,
                sentence=sentence,
                rule="call average_gradients between backward() and step()",
            )
        )
    return found


def _misweighted(seed: int, n: int) -> list[Suspect]:
    """All with the same gradient, but not with the mean of one step."""

    def trained(rule: Rule, **how: Any) -> list[Tensor]:
        return train(seed, n, rule, **how).weights

    def times(factor: float) -> list[Tensor]:
        return trained(lambda gradients, rank: torch.stack(gradients).sum(0) * factor)

    found = [
        Suspect(
            slug="sum-not-mean",
            values=times(1.0),
            sentence=f"each step used the sum of the ranks' gradients, {n} × the mean, "
            "expected the mean",
            rule="the mean is the sum divided by comm.world_size",
        ),
        Suspect(
            slug="divided-twice",
            values=times(1 / n**2),
            sentence=f"each step used 1/{n} of the mean gradient, as if divided by {n} "
            "twice, expected the mean",
            rule="divide once: the loss, or the gradients, not both",
        ),
        Suspect(
            slug="gradients-not-zeroed",
            values=trained(lambda g, rank: torch.stack(g).mean(0), zeroed=False),
            sentence="each step also applied the gradients of all earlier steps, "
            "expected only its own",
            rule="optimizer.zero_grad() before backward",
        ),
        Suspect(
            slug="rank0-gradient-for-all",
            values=trained(lambda gradients, rank: gradients[0]),
            sentence="every rank stepped with rank 0's gradient, expected the mean of "
            "all ranks' gradients",
            rule="every rank's gradient counts: sum them, then divide",
        ),
    ]
    return found + [
        Suspect(
            slug="hard-coded-two" if wrong == 2 and n > 3 else "",
            values=times(1 / wrong),
            sentence=f"with {n} ranks, the weights moved as if the sum of the "
            f"gradients had been divided by {wrong}, expected by {n}",
            rule="divide by comm.world_size, whatever it is",
        )
        for wrong in (2, 3, 4, 8)
        if wrong != n
    ]


def _why_own(run: Run, which: str) -> tuple[str, str]:
    """Why each rank may have stepped with its own gradient, from what it did when."""
    alone = f"each rank stepped with {which}"
    order = _first_step(run.ranks[0])
    if "step" in order and "gradients" in order[order.index("step") :]:
        return (
            "stepped-before-averaging",
            f"{alone}, as the averaging came after optimizer.step(), expected it "
            "before",
        )
    if "backward" in order and "number" in order[: order.index("backward")]:
        return (
            "loss-not-gradients",
            f"the ranks averaged the loss before backward(), but {alone}, expected "
            "averaged gradients",
        )
    return "own-gradient-only", f"{alone}, expected the mean of all ranks' gradients"


def _no_step(run: Run, seed: int, n: int) -> Suspect:
    slug, why = "", "optimizer.step() was never called"
    order = _first_step(run.ranks[0])
    if "backward" not in order:
        why = "backward() was never called, so there are no gradients"
    elif "step" in order:
        why = "the step had no gradient to apply"
        between = order[order.index("backward") : order.index("step")]
        if "zero_grad" in between:
            slug = "gradients-wiped"
            why = "zero_grad() came between backward() and step()"
    return Suspect(
        slug=slug,
        values=same_everywhere(weights_of(make_model(seed)), n),
        sentence=f"after {STEPS} steps, every rank's weights are unchanged: {why}",
        rule="the order is: zero_grad, forward, backward, average, step",
    )


def _has_odd_count(run: Run) -> bool:
    """Whether a rank did not call backward and step once per train_step."""
    # backward may be missing for a good reason: torch.autograd.grad does without.
    expected = {"backward": (0, STEPS), "step": (STEPS,)}
    for record in run.ranks:
        names = [name for name, _ in record.value["events"]]
        if any(names.count(name) not in counts for name, counts in expected.items()):
            return True
    return False


def _first_step(record: RankRecord) -> list[str]:
    """What a rank did in its first train_step, in order.

    "zero_grad", "backward", "step"; "number" for a collective on a single element,
    and "gradients" for one on more.
    """
    events = [(when, what) for what, when in record.value["events"]]
    end = next(when for when, what in events if what == "returned")
    events += [
        (call["t"], "gradients" if math.prod(call["shape"] or []) > 1 else "number")
        for call in record.calls()
        if call["op"] in COLLECTIVES - {"barrier"}
    ]
    return [what for when, what in sorted(events) if when < end]
