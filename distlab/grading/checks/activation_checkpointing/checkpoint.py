"""Checks of task 2.5, `activation_checkpointing.checkpoint`: bits, numbers, memory."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from distlab.digests import digest
from distlab.grading.checks.activation_checkpointing.special import (
    FUNCTION,
    faults_of,
    faults_of_draws,
    unlike,
)
from distlab.grading.clause import clause
from distlab.grading.runs import Runs, RunSpec, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext, Run
from distlab.saved_tensors import SavedTensors

WORLDS = (3, 2, 4, 5, 1)
WIDTH, ROWS, BLOCKS, HIDDEN = 6, 5, 4, 12
STORED = BLOCKS * ROWS * WIDTH * 8  # bytes of all blocks' inputs
DROPOUT = 0.4
AGAIN = (
    "in backward: set forward's random state, run the block, restore the current one"
)


def make_blocks(seed: int, dropout: float) -> list[nn.Module]:
    """Blocks of the same shape; the second one is used twice, as tied layers are."""
    generator = torch.Generator().manual_seed(seed)
    blocks: list[nn.Module] = []
    for _ in range(BLOCKS - 1):
        layers = nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH)
        blocks.append(nn.Sequential(*layers[:2], nn.Dropout(dropout), layers[2]))
        blocks[-1].double()
        for parameter in blocks[-1].parameters():
            values = torch.randn(
                parameter.shape, generator=generator, dtype=torch.float64
            )
            parameter.data.copy_(values * 0.5)
    return [*blocks, blocks[1]]


def there_and_back(
    context: RankContext, unit: ModuleType, seed: int, dropout: float = 0.0
) -> dict[str, Any]:
    """Forward and backward through all blocks, without and with checkpoint."""
    found: dict[str, Any] = {}
    for name, run in (("plain", _plain), ("again", unit.checkpoint)):
        blocks = [b.to(context.comm.device) for b in make_blocks(seed, dropout)]
        parameters = list(nn.ModuleList(blocks).parameters())
        generator = torch.Generator().manual_seed(seed * 7919 + context.rank)
        data = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
        torch.manual_seed(seed * 1009 + context.rank)
        data = data.to(context.comm.device)
        found[name] = _measure(run, blocks, parameters, data)
    found["ones"] = _from_ones(make_blocks(seed, 0.0), data.cpu())
    if "wrong" not in found["again"]:
        found["tokens"] = _tokens(unit.checkpoint, context.comm.device)
        found["special"] = faults_of(unit.checkpoint, context.comm.device)
        if dropout:
            found["draws"] = faults_of_draws(unit.checkpoint, context.comm.device)
    return found


def _tokens(run: Any, device: torch.device) -> str:
    """What goes wrong in a block whose input is integers, or nothing."""
    table = nn.Embedding.from_pretrained(
        torch.ones(4, 3, dtype=torch.float64), freeze=False
    ).to(device)
    try:
        run(table, torch.tensor([1, 3, 3], device=device)).sum().backward()
    except RuntimeError as error:
        return f"your code raised RuntimeError: {error}"
    if table.weight.grad is None or table.weight.grad[3, 0] != 2:
        return "the block's parameters have no gradient or a wrong one"
    return ""


def _from_ones(blocks: list[nn.Module], data: Tensor) -> list[Tensor | None]:
    """The parameters' gradients if each block's backward starts from ones."""
    middle = blocks[0](data)
    torch.autograd.backward(middle, torch.ones_like(middle))
    middle = middle.detach() + data
    for block in blocks[1:]:
        middle = block(middle)
        torch.autograd.backward(middle, torch.ones_like(middle))
        middle = middle.detach()
    return [p.grad for p in nn.ModuleList(blocks).parameters()]


def _plain(block: nn.Module, tensor: Tensor) -> Tensor:
    result: Tensor = block(tensor)
    return result


def _measure(
    run: Any, blocks: list[nn.Module], parameters: list[nn.Parameter], data: Tensor
) -> dict[str, Any]:
    calls: list[str] = []
    hooks = [
        block.register_forward_pre_hook(lambda *_: calls.append("block"))
        for block in dict.fromkeys(blocks)
    ]
    start = data.clone().requires_grad_()
    with SavedTensors([*parameters]) as kept:
        first = run(blocks[0], data)  # data needs no gradient
        if not isinstance(first, Tensor):
            return {"wrong": type(first).__name__}
        middle = first + start
        for block in blocks[1:]:
            middle = run(block, middle)
        held, forward_calls = kept.live, len(calls)
        after_forward = torch.rand(3, dtype=torch.float64)
        (middle * middle.detach()).sum().backward()
    for hook in hooks:
        hook.remove()
    return {
        "result": middle.detach(),
        "start": start.grad,
        "gradients": [p.grad for p in parameters],
        "between": after_forward,
        "later": torch.rand(3, dtype=torch.float64),
        "held": held,
        "peak": kept.peak,
        "calls": (forward_calls, len(calls)),
    }


# ── C1 ──────────────────────────────────────────────────────────────────────────────


@clause(
    "activation_checkpointing.checkpoint",
    "C1",
    worlds=WORLDS,
    runs=[on_ranks(there_and_back)],
)
def same_bits(runs: Runs) -> str | None:
    """Result and gradients, bit by bit, against the blocks without checkpoint."""
    try:
        run = runs.finished(there_and_back)
    except NotYetError as error:
        raise _past_named(error) from error
    note = expect_same_bits(run)
    for fault in run.values[0]["special"]:
        if FUNCTION in fault:
            rule = "a block can be called; nothing else is known of it"
            raise NotYetError(fault, rule=rule)
    return note


def expect_same_bits(run: Run) -> str:
    """What a run without random numbers must have given.

    Raises:
        NotYetError: it has not.
    """
    _expect_tensors(run)
    for rank, value in enumerate(run.values):
        plain, again = value["plain"], value["again"]
        if not torch.equal(plain["result"], again["result"]):
            there = unlike(again["result"], plain["result"])
            message = f"on rank {rank}, the result of the blocks {there}"
            raise _differ(run, "result", f"{message} without checkpoint")
        if again["start"] is None:
            raise NotYetError(
                "after backward(), the input of the checkpointed blocks has .grad "
                "None, expected the gradient to flow back through them",
                slug="gradient-chain-cut",
                rule="backward returns the tensor's gradient at the tensor's position",
            )
        if any(gradient is None for gradient in again["gradients"]):
            raise NotYetError(
                f"after backward() on rank {rank}, parameters of the checkpointed "
                "blocks have .grad None, expected their gradients",
                slug="parameters-without-gradient",
                rule="result.backward(gradient) writes the parameters' .grad; "
                "torch.autograd.grad returns only the gradients it is asked for",
            )
        if not _same_gradients(plain, again):
            raise _wrong_gradients(run, rank)
    if run.values[0]["tokens"]:
        raise NotYetError(
            "for a block whose input is integers, such as token ids, "
            f"{run.values[0]['tokens']}"[:200],
            slug="tokens-need-no-gradient",
            rule="the tensor in backward requires a gradient if forward's tensor did: "
            "ctx.needs_input_grad[2]",
        )
    for fault in run.values[0]["special"]:
        if FUNCTION not in fault:
            raise NotYetError(fault)
    return f"n = {run.world_size}: result and gradients are equal bit for bit"


def _past_named(error: NotYetError) -> NotYetError:
    """Torch's message says what happened, and not why."""
    if "backward through the graph a second time" not in error.message:
        return error
    said, cut, _ = error.message.partition(" (or directly")
    return error.but(
        message=f"{said}, expected it to end at the block's input" if cut else said,
        slug="past-not-cut",
        rule="in backward start from tensor.detach(), a leaf tensor: autograd "
        "itself runs the backward of the layers before the block",
    )


def _expect_tensors(run: Run) -> None:
    wrong = [r for r, v in enumerate(run.values) if "wrong" in v["again"]]
    if wrong:
        kind = run.values[wrong[0]]["again"]["wrong"]
        what = "None" if kind == "NoneType" else f"a {kind}"
        raise NotYetError(
            f"a checkpointed block returned {what}, expected the block's result",
            slug="returned-none",
            rule="forward returns what the block returns",
            fatal=True,
        )


def _same_gradients(plain: dict[str, Any], again: dict[str, Any]) -> bool:
    mine = [again["start"], *again["gradients"]]
    pairs = zip(mine, [plain["start"], *plain["gradients"]], strict=True)
    return all(a is not None and torch.equal(a, b) for a, b in pairs)


def _wrong_gradients(run: Run, rank: int) -> NotYetError:
    value = run.values[rank]
    found, expected = value["again"]["gradients"], value["plain"]["gradients"]
    if _alike(found, [2 * gradient for gradient in expected]):
        return _differ(
            run,
            "gradients",
            f"on rank {rank}, the parameters' gradients are 2 × those without "
            "checkpoint",
        )
    if _alike(found, value["ones"]):
        return _differ(
            run,
            "gradients",
            "the backward of each block starts from ones, expected it to start from "
            "the incoming gradient",
            slug="arriving-gradient-ignored",
            rule="result.backward(gradient), with the argument of backward",
        )
    blocks = nn.ModuleList(make_blocks(0, 0.0))
    names = [f"parameter {name} of the blocks" for name, _ in blocks.named_parameters()]
    which, got, right = next(
        (name, got, right)
        for name, got, right in zip(
            ["the blocks' input", *names],
            [value["again"]["start"], *found],
            [value["plain"]["start"], *expected],
            strict=True,
        )
        if not torch.equal(got, right)
    )
    there = unlike(got, right)
    message = f"on rank {rank}, the gradient of {which} {there} without checkpoint"
    return _differ(run, "gradients", message)


def _alike(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(map(torch.allclose, found, expected))


def _differ(
    run: Run,
    what: str,
    message: str,
    slug: str = "",
    rule: str = "expected: the result and gradients of the block without checkpoint",
) -> NotYetError:
    return NotYetError(
        message,
        slug=slug,
        evidence=[
            (
                rank,
                what,
                f"without {_digest(value['plain'][what])}   "
                f"with checkpoint {_digest(value['again'][what])}",
            )
            for rank, value in enumerate(run.values)
        ],
        rule=rule,
    )


def _digest(value: Tensor | list[Tensor]) -> str:
    return digest(*(value if isinstance(value, list) else [value]))


# ── C2 ──────────────────────────────────────────────────────────────────────────────


def _with_dropout(world_size: int) -> list[RunSpec]:
    return [on_ranks(there_and_back), on_ranks(there_and_back, dropout=DROPOUT)]


@clause("activation_checkpointing.checkpoint", "C2", worlds=WORLDS, runs=_with_dropout)
def same_random_numbers(runs: Runs) -> str | None:
    """With dropout the same bits; random numbers drawn afterwards too."""
    try:
        same_bits(runs)
    except NotYetError:  # what is wrong there is not the random numbers
        raise NotJudgedError("it fails without random numbers, too: see C1") from None
    run = runs.finished(there_and_back, dropout=DROPOUT)
    note = expect_same_random_numbers(run)
    for fault in run.values[0]["draws"]:
        raise NotYetError(fault, rule=AGAIN)
    return note


def expect_same_random_numbers(run: Run) -> str:
    """What a run with dropout must have given, if one without it is right.

    Raises:
        NotYetError: it has not.
    """
    _expect_tensors(run)
    for rank, value in enumerate(run.values):
        plain, again = value["plain"], value["again"]
        if not torch.equal(plain["result"], again["result"]):
            message = (
                f"with dropout, forward on rank {rank} drew other random numbers than "
                "without checkpoint, expected the same ones"
            )
            raise _differ(run, "result", message)
        if not _same_gradients(plain, again):
            raise NotYetError(
                f"with dropout, the second run of a block on rank {rank} used another "
                "dropout mask than the first, expected the same one",
                slug="recomputed-with-other-numbers",
                rule=AGAIN,
            )
        if not torch.equal(plain["between"], again["between"]):
            raise _moved(rank, "forward")
        if not torch.equal(plain["later"], again["later"]):
            raise _moved(rank, "backward")
    for fault in run.values[0]["draws"]:
        if FUNCTION not in fault:
            raise NotYetError(fault, rule=AGAIN)
    return f"n = {run.world_size}: also with dropout {DROPOUT}"


def _moved(rank: int, where: str) -> NotYetError:
    return NotYetError(
        f"after {where} on rank {rank}, torch.rand gives other numbers than without "
        "checkpoint, expected the same ones",
        slug="random-numbers-moved",
        rule=AGAIN,
    )


# ── C3 ──────────────────────────────────────────────────────────────────────────────


@clause(
    "activation_checkpointing.checkpoint",
    "C3",
    worlds=WORLDS,
    runs=[on_ranks(there_and_back)],
)
def inputs_kept_only(runs: Runs) -> str | None:
    """What autograd keeps between forward and backward, and how often blocks run."""
    return expect_inputs_only(runs.finished(there_and_back))


def expect_inputs_only(run: Run) -> str:
    """What may be kept, and how often a block may run.

    Raises:
        NotYetError: more is kept, or it ran more often.
    """
    _expect_tensors(run)
    plain, again = run.values[0]["plain"], run.values[0]["again"]
    forward, both = again["calls"]
    if again["held"] > STORED:
        some = (
            ""
            if both - forward not in range(1, BLOCKS)
            else (
                "when the first block's input needs no gradient, backward ran only "
                f"{both - forward} of the {BLOCKS} blocks again and autograd kept "
                f"{again['held']} bytes, expected {STORED}, the blocks' inputs"
            )
        )
        raise NotYetError(
            some
            or f"between forward and backward, autograd keeps {again['held']} bytes, "
            f"expected only the inputs of the {BLOCKS} blocks, {STORED} bytes",
            slug="" if some else "recompute-kept-all",
            rule="keep the block's input, and recompute the rest",
        )
    if (forward, both) != (BLOCKS, 2 * BLOCKS):
        raise NotYetError(
            f"forward ran the {BLOCKS} blocks {forward} times and backward ran them "
            f"{both - forward} times, expected each block once in each",
            rule="run it once without a graph, and once with a graph",
        )
    share = again["held"] / plain["held"]
    return (
        f"autograd saves {again['held']} of {plain['held']} bytes ({share:.0%}), "
        f"at the peak {again['peak']} of {plain['peak']}"
    )
