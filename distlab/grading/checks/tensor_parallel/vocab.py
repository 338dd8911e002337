"""Checks of task 2.19: the loss, its gradient, and how much of the logits is sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.comm import Call, Comm, Wrapper
from distlab.grading.checks.tensor_parallel.shared import (
    DIVIDED,
    WORLDS,
    as_tensor,
    drawn,
)
from distlab.grading.clause import clause
from distlab.grading.kit.messages import calls_of_each, expect_messages
from distlab.grading.kit.values import (
    Suspect,
    all_close,
    expect_values,
    same_everywhere,
)
from distlab.grading.kit.when_raised import finished
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext, Run

TOKENS = 8  # N
COLUMNS = 32  # V / n
MOST = 6 * TOKENS  # elements that a rank may send: twice what three all_reduces need
LARGE = 900.0  # exp() of more than 709 is infinite in float64
LOGITS = {
    "small": "",
    "large": "with logits in the thousands, ",
    "masked": "when a token's logits on one rank are -inf, ",
}
"""The kinds of logits, with what a headline says of them: the small are usual ones."""

KINDS = {"view size": "with logits that are a view of columns"}

RULE_MAX = "comm.all_reduce(largest, ReduceOp.MAX)"

_REDUCED_BY = {
    "sum": "the ranks' largest logits were added up",
    "avg": "the ranks' largest logits were averaged",
    "min": "the ranks' largest logits were combined by MIN",
}

# ── what runs in the ranks ──────────────────────────────────────────────────────────


class _Watched(Wrapper):
    """A comm that notes how this rank's largest logits are put together, if they are.

    That is the operation of the all_reduce that got them; none is the empty word.
    """

    def __init__(self, inner: Comm, logits: Tensor) -> None:
        super().__init__(inner)
        self._largest = logits.detach().amax(1)
        self.reduced_by = ""

    def _around(self, call: Call, proceed: Callable[[], Any]) -> Any:
        if call.reduce_op and isinstance(call.sent, Tensor):
            given = call.sent.detach().reshape(-1)
            if torch.equal(given.to(self._largest), self._largest):
                self.reduced_by = call.reduce_op.value
        return proceed()

    def _wrap_group(self, group: Comm, ranks: Sequence[int]) -> Comm:
        return group


def losses_once(context: RankContext, unit: ModuleType, seed: int) -> dict[str, Any]:
    """The loss of small, large and masked logits, and the gradients of this rank's."""
    found: dict[str, Any] = {}
    for name in LOGITS:
        logits, targets = _batch(seed, context.world_size, name)
        mine = logits.chunk(context.world_size, 1)[context.rank]  # not in one piece
        mine = mine.to(context.comm.device).requires_grad_()
        comm = _Watched(context.comm, mine)
        loss = unit.vocab_parallel_cross_entropy(comm, mine, targets.to(comm.device))
        is_loss = isinstance(loss, Tensor) and loss.numel() == 1
        if is_loss and loss.requires_grad:
            loss.backward()
        found[name] = {
            "loss": as_tensor(loss).reshape(-1),
            "gradient": as_tensor(mine.grad),
            "reduced_by": comm.reduced_by,
        }
    return found


def _batch(seed: int, n: int, name: str) -> tuple[Tensor, Tensor]:
    """Logits (N, V), and targets, of which every rank has some.

    First columns of two ranks are among these, and last columns of two ranks. Where
    logits are small, the next rank has -inf in the same column, as padding has. Where
    they are masked, all its logits of a token are -inf. Where they are large, each
    token has one rank whose logits are far above the others'.
    """
    scale = LARGE if name == "large" else 1.0
    logits = drawn(seed, -11, TOKENS, n * COLUMNS) * scale
    if name == "large":
        for token in range(TOKENS):
            logits[token].view(n, COLUMNS)[token % n] += 2 * LARGE
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randint(0, COLUMNS, (TOKENS,), generator=generator)
    columns[:4] = torch.tensor([0, 0, COLUMNS - 1, COLUMNS - 1])
    ranks = (torch.arange(TOKENS) + seed) % n
    targets = ranks * COLUMNS + columns
    if name == "masked" and n > 1:
        for token in range(TOKENS):
            logits[token].view(n, COLUMNS)[(ranks[token] + 1) % n] = -torch.inf
    if name == "small" and n > 1:
        places = (targets + COLUMNS) % logits.shape[1]
        logits[torch.arange(TOKENS), places] = -torch.inf
        logits[torch.arange(TOKENS), (places // COLUMNS) * COLUMNS] = -torch.inf
        logits[torch.arange(TOKENS), (places // COLUMNS + 1) * COLUMNS - 1] = -torch.inf
    return logits, targets


class Right:
    """The same in one process."""

    def __init__(self, seed: int, n: int, name: str) -> None:
        self.n = n
        logits, self.targets = _batch(seed, n, name)
        self.logits = logits.requires_grad_()
        loss = nn.functional.cross_entropy(self.logits, self.targets)
        loss.backward()
        self.loss = loss.detach().reshape(1)
        self.gradients = list(as_tensor(self.logits.grad).chunk(n, 1))
        self.parts = list(self.logits.detach().chunk(n, 1))

    def picked(self, rank: int) -> Tensor:
        """The logit at the target's place in this rank's columns, if it were there."""
        columns = (self.targets - rank * COLUMNS).clamp(0, COLUMNS - 1)
        return self.parts[rank].gather(1, columns[:, None])[:, 0]

    def local(self, rank: int) -> Tensor:
        """The loss if this rank's columns were the whole vocabulary."""
        log_sum = self.parts[rank].logsumexp(1)
        return (log_sum - self.picked(rank)).mean().reshape(1)


# ── C1 the loss ─────────────────────────────────────────────────────────────────────


@clause("tensor_parallel.vocab_loss", "C1", worlds=WORLDS, runs=[on_ranks(losses_once)])
def loss_of_one_process(runs: Runs) -> str | None:
    """The mean over all tokens, also if all logits of a rank are -inf."""
    run, n = finished(runs, losses_once, KINDS), runs.world_size
    expect_messages(run, "without a message no rank can know the loss")
    for name, words in LOGITS.items():
        right = Right(runs.seed, n, name)
        losses = [value[name]["loss"] for value in run.values]
        if all_close(losses, [right.loss] * n):
            continue
        told = [float(loss[0]) for loss in losses if loss.numel()]
        suspects = [] if name == "masked" else _wrong_losses(right)  # nan equals nan
        known = any(all_close(losses, s.values) for s in suspects)
        if not known and any(not math.isfinite(loss) for loss in told):
            raise _not_finite(run, name, told[0])
        expect_values(
            losses,
            same_everywhere(right.loss, n),
            what=f"{words}the loss",
            suspects=suspects,
        )
    return None


def _not_finite(run: Run, name: str, loss: float) -> NotYetError:
    """A loss of inf, -inf or nan: what was subtracted before exp(), if anything?"""
    reduced_by = run.values[0][name]["reduced_by"]
    if name == "masked":
        why = ": -inf - (-inf) is nan" * math.isnan(loss)
        return NotYetError(
            f"{LOGITS[name]}the loss is {loss}, expected a number{why}",
            evidence=calls_of_each(run),
        )
    if name == "small" and reduced_by == "max":
        why = ": -inf * 0 and -inf - (-inf) are nan" * math.isnan(loss)
        return NotYetError(
            f"when some logits other than the target's are -inf, the loss is "
            f"{loss}, expected a number{why}",
            evidence=calls_of_each(run),
        )
    slug, sentence = "exp-overflow", f"{LOGITS[name]}the loss is {loss}"
    rule = "subtract the largest logit of all ranks before exp()"
    if reduced_by in _REDUCED_BY:
        slug = "not-the-largest-of-all"
        sentence += f": {_REDUCED_BY[reduced_by]}, expected their maximum"
        rule = RULE_MAX
        if reduced_by == "sum":
            rule += "; without an op all_reduce sums"
    elif loss == -math.inf:
        slug = ""
        sentence += ": the subtracted value is so large that every exp() is 0"
        rule = "subtract, for each token, the largest of its logits on all ranks"
    else:
        sentence += ", expected a number"
    return NotYetError(sentence, slug=slug, evidence=calls_of_each(run), rule=rule)


def _own_subtracted(right: Right) -> Tensor:
    """The loss if each rank takes the largest logit of its own columns off."""
    tops = torch.stack([part.amax(1) for part in right.parts])
    sums = [
        (part - top[:, None]).exp().sum(1)
        for part, top in zip(right.parts, tops, strict=True)
    ]
    owners = (right.targets // COLUMNS)[None]
    whole = right.logits.detach()
    picked = whole.gather(1, right.targets[:, None])[:, 0] - tops.gather(0, owners)[0]
    return (torch.stack(sums).sum(0).log() - picked).mean().reshape(1)


def _wrong_losses(right: Right) -> list[Suspect]:
    n, whole = right.n, right.logits.detach()
    others = torch.stack([right.picked(rank) for rank in range(n)]).sum(0)
    shifted = others - n * whole.amax(1)  # what is summed after the shift
    log_sum = whole.logsumexp(1)
    garbage = [
        (log_sum - others).mean().reshape(1),
        (log_sum - whole.amax(1) - shifted).mean().reshape(1),
    ]
    return [
        *(
            Suspect(
                slug="target-elsewhere-counted",
                values=same_everywhere(value, n),
                sentence="ranks without the target's column add the logit of another "
                "column, expected 0 from them",
                rule="a rank without the target's column adds 0",
            )
            for value in garbage
        ),
        Suspect(
            slug="local-loss-returned",
            values=[right.local(rank) for rank in range(n)],
            sentence="each rank computes the loss of its own columns, expected the sum "
            "of exp() over all ranks' columns",
            rule="the sum of exp is over all ranks' columns",
        ),
        Suspect(
            slug="not-the-largest-of-all",
            values=same_everywhere(_own_subtracted(right), n),
            sentence="each rank subtracts the largest logit of its own columns, "
            "expected the largest of all ranks",
            rule=f"the same value on all ranks: {RULE_MAX}",
        ),
        Suspect(
            slug="",
            values=same_everywhere(right.loss * TOKENS, n),
            sentence=f"the loss is the sum over the {TOKENS} tokens, expected the mean",
            rule="the mean over the tokens",
        ),
        Suspect(
            slug="",
            values=same_everywhere(right.loss / n, n),
            sentence=f"the loss is 1/{n} of the expected one, as if divided by the "
            "number of ranks, too",
            rule="all ranks have the same tokens: do not average over ranks",
        ),
    ]


# ── C2 its gradient ─────────────────────────────────────────────────────────────────


@clause("tensor_parallel.vocab_loss", "C2", worlds=WORLDS, runs=[on_ranks(losses_once)])
def gradient_of_one_process(runs: Runs) -> str | None:
    """Each rank's columns of the gradient."""
    run, n = finished(runs, losses_once, KINDS), runs.world_size
    for name, words in LOGITS.items():
        right = Right(runs.seed, n, name)
        if not all_close([v[name]["loss"] for v in run.values], [right.loss] * n):
            raise NotJudgedError("the loss is wrong: see C1")
        found = [value[name]["gradient"] for value in run.values]
        if all(not gradient.numel() for gradient in found):
            raise NotYetError(
                "no gradient reaches the logits from the loss, expected one on every "
                "rank",
                slug="autograd-cut-off",
                evidence=calls_of_each(run),
                rule="autograd must record the path from the logits to the loss: "
                "detach only the largest, and sum with reduce_from_region",
            )
        expect_values(
            found,
            right.gradients,
            what=f"{words}the gradient" if words else "the gradient of the logits",
            suspects=[
                Suspect(
                    slug="summed-in-both-directions",
                    values=[n * gradient for gradient in right.gradients],
                    sentence=f"the gradient of the logits is {n} × the expected one, "
                    f"as if summed over the {n} ranks",
                    rule="every rank continues with the same sum: backward copies its "
                    "gradient",
                ),
                Suspect(
                    slug="",
                    values=same_everywhere(torch.stack(right.gradients).sum(0), n),
                    sentence="the gradient of the logits is summed over the ranks, "
                    "expected each rank to keep that of its own columns",
                    rule="each rank keeps the gradient of its columns",
                ),
            ],
        )
    return None


# ── C3 what is sent ─────────────────────────────────────────────────────────────────


@clause(
    "tensor_parallel.vocab_loss", "C3", worlds=DIVIDED, runs=[on_ranks(losses_once)]
)
def little_is_sent(runs: Runs) -> str | None:
    """The numbers that a rank hands over, for one loss."""
    run, n = finished(runs, losses_once, KINDS), runs.world_size
    sent = [
        sum(math.prod(call["shape"] or []) for call in record.calls()) / len(LOGITS)
        for record in run.ranks
    ]
    if max(sent) > MOST:
        raise NotYetError(
            f"for the loss of {TOKENS} tokens, rank {sent.index(max(sent))} sends "
            f"{max(sent):.0f} elements, expected at most {MOST}",
            slug="logits-gathered",
            evidence=calls_of_each(run),
            rule="send sums over the columns, not the columns",
        )
    return (
        f"n = {n}: {max(sent):.0f} elements sent for {TOKENS} tokens; a rank's logits "
        f"are {TOKENS * COLUMNS}"
    )
