"""Checks of task 2.4, `activation_checkpointing.first_function`, on one rank."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from distlab.grading.clause import clause
from distlab.grading.kit import when_raised
from distlab.grading.kit.messages import reports_made
from distlab.grading.kit.plans import worked_out
from distlab.grading.kit.values import Suspect, brief, expect_values
from distlab.grading.runs import Runs, on_ranks
from distlab.grading.verdict import NotJudgedError, NotYetError
from distlab.runner import RankContext
from distlab.saved_tensors import SavedTensors

# 1 first would hide a factor that is forgotten, equal ones which of the two it is.
# 0.1 and 0.7 have no exact float32.
FACTORS = ((3.0, 5.0), (1.0, -2.0), (0.1, 0.7), (-0.5, -0.5), (2.0, 0.0))
SHAPES = (((), "float32"), ((2,), "bfloat16"), ((0, 3), "float64"))
TWO = (2.0, 0.25)  # the factors there: exact in every dtype
KINDS = {
    "view size": "for a tensor that is a transposed view",
    "0-d": "for a tensor of shape []",
}
RULE_BACK = "gradient * backward_factor for the tensor, None for the two numbers"


def scale_and_back(
    context: RankContext, unit: ModuleType, seed: int
) -> list[dict[str, Any]]:
    """The middle of a short chain, for each pair of factors: forward, then backward."""
    device = context.comm.device
    cases: list[dict[str, Any]] = []
    chains = []
    specials = [_special(unit, *kind) for kind in SHAPES]
    for number, (forth, back) in enumerate(FACTORS):
        given = _numbers(seed + number).to(device).requires_grad_()
        inner = given * 2.0
        if number % 2:  # columns lie side by side in memory
            inner = inner.t().contiguous().t()
        before = inner.detach().clone()
        with SavedTensors() as kept:
            outer = unit.Scale.apply(inner, forth, back)
        if not isinstance(outer, Tensor):
            what = type(outer).__name__
            what = "None" if outer is None else f"a {what}"
            return [{"wrong": f"Scale.apply returned {what}, expected a tensor"}]
        case = {
            "given": before,
            "outer": outer.detach().clone(),
            "changed": not torch.equal(inner.detach(), before),
            "shared": outer.data_ptr() == inner.data_ptr(),
            "kept": kept.peak,
        }
        cases.append(case)
        chains.append((given, outer))
    cases[0]["special"] = [fault for *_, fault in specials]
    context.report("backward")
    for case, (given, outer) in zip(cases, chains, strict=True):
        if outer.requires_grad and outer.shape == given.shape:
            _back(case, given, outer)
    cases[0]["special back"] = [
        _special_back(given, made) for given, made, fault in specials if not fault
    ]
    return cases


def _special(
    unit: ModuleType, shape: tuple[int, ...], dtype: str
) -> tuple[Tensor, Tensor, str]:
    """A tensor of another kind, what forward made of it, and what is wrong there."""
    given = torch.ones(shape, dtype=getattr(torch, dtype))
    given.view(-1)[:1] = torch.inf
    given.requires_grad_()
    made = unit.Scale.apply(given * 1.0, *TWO)
    if not isinstance(made, Tensor):
        return given, given, "no tensor"  # told of the first pair of factors
    if made.dtype != given.dtype or made.shape != given.shape:
        kinds = _kind(given), _kind(made)
        fault = (
            f"forward turned a {kinds[0]} into a {kinds[1]}, expected no such change"
        )
        return given, made, fault
    expected = TWO[0] * given
    fault = f"forward turned {brief(given, 3)} into {brief(made, 3)}"
    is_right = torch.equal(made, expected)
    return given, made, "" if is_right else f"{fault}, expected {brief(expected, 3)}"


def _special_back(given: Tensor, made: Tensor) -> str:
    """What is wrong with the gradient, if one of those that arrive is inf."""
    arriving = torch.ones_like(given)
    arriving.view(-1)[:1] = torch.inf
    expected = TWO[1] * arriving
    if made.requires_grad:
        made.backward(arriving)
    is_right = given.grad is not None and torch.equal(given.grad, expected)
    fault = (
        f"backward turned the incoming {brief(arriving, 3)} into {brief(given.grad, 3)}"
    )
    return "" if is_right else f"{fault}, expected {brief(expected, 3)}"


def _kind(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} tensor of shape {list(tensor.shape)}"


def _back(case: dict[str, Any], given: Tensor, outer: Tensor) -> None:
    """Backward from a gradient that another branch may still need."""
    arriving = 2.0 * outer.detach()
    lent = arriving.clone()
    outer.backward(lent)
    case["gradient"], case["lent_changed"] = given.grad, not torch.equal(lent, arriving)


def _numbers(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, generator=generator, dtype=torch.float64)


@clause(
    "activation_checkpointing.first_function",
    "C1",
    worlds=(1,),
    runs=[on_ranks(scale_and_back)],
)
def forward_scales(runs: Runs) -> str | None:
    """The result for four pairs of factors."""
    cases = _cases(runs, "C1")
    given = torch.stack([case["given"] for case in cases])
    forth, back = (_column(index) for index in (0, 1))
    expect_values(
        [torch.stack([case["outer"] for case in cases])],
        [given * forth],
        what="the result of forward",
        suspects=[
            Suspect(slug=slug, values=[values], sentence=sentence)
            for slug, values, sentence in (
                (
                    "factors-swapped",
                    given * back,
                    "forward multiplied by backward_factor, expected forward_factor",
                ),
                (
                    "",
                    given,
                    "forward returned the tensor unchanged, expected it times "
                    "forward_factor",
                ),
                (
                    "",
                    given * forth * back,
                    "forward multiplied by both factors, expected forward_factor alone",
                ),
            )
        ],
        rule="tensor * forward_factor",
    )
    if any(case["changed"] for case in cases):
        raise NotYetError(
            "forward modified its argument, expected a new tensor",
            slug="input-changed",
            rule="tensor * factor is a new tensor, tensor *= factor works in place",
        )
    pairs = zip(cases, FACTORS, strict=True)
    same = [forth for case, (forth, _) in pairs if case["shared"]]
    if same:
        raise NotYetError(
            f"with forward_factor {same[0]:g}, forward returned a tensor that shares "
            "its argument's memory, expected a new tensor",
            slug="nothing-copied",
            rule="tensor * forward_factor returns a new tensor, also for the factor 1",
        )
    for change in filter(None, cases[0]["special"]):
        raise NotYetError(
            f"with forward_factor {TWO[0]:g}, {change}",
            rule="tensor * forward_factor keeps shape and dtype",
        )
    return f"{len(FACTORS)} pairs of factors"


@clause(
    "activation_checkpointing.first_function",
    "C2",
    worlds=(1,),
    runs=[on_ranks(scale_and_back)],
)
def backward_scales(runs: Runs) -> str | None:
    """The gradient at the beginning of the chain."""
    cases = _cases(runs, "C2")
    if any(case.get("gradient") is None for case in cases):
        raise NotYetError(
            "after backward(), the tensor before Scale has .grad None, expected the "
            "incoming gradient times backward_factor",
            slug="gradient-chain-cut",
            rule=RULE_BACK,
        )
    given = torch.stack([case["given"] for case in cases])
    forth, back = (_column(index) for index in (0, 1))
    arriving = 2.0 * torch.stack([case["outer"] for case in cases])
    guesses = (
        (
            "factors-swapped",
            arriving * forth,
            "backward multiplied by forward_factor, expected backward_factor",
        ),
        (
            "",
            arriving,
            "backward returned the incoming gradient unchanged, expected it times "
            "backward_factor",
        ),
        (
            "",
            arriving * back * forth,
            "backward multiplied by both factors, expected backward_factor alone",
        ),
        (
            "factor-of-last-call",
            arriving * FACTORS[-1][1],
            f"after {len(FACTORS)} forward calls with different factors, each backward "
            "multiplied by the last call's backward_factor, expected that of its own",
        ),
        (
            "arriving-gradient-ignored",
            torch.ones_like(given) * back,
            "backward returned backward_factor, expected the incoming gradient times "
            "backward_factor",
        ),
        (
            "arriving-gradient-ignored",
            given * back,
            "backward returned tensor * backward_factor, expected the incoming "
            "gradient times backward_factor",
        ),
    )
    expect_values(
        [torch.stack([case["gradient"] for case in cases])],
        [arriving * back * 2.0],
        what="the gradient before Scale",
        suspects=[
            Suspect(slug=slug, values=[value * 2.0], sentence=sentence)
            for slug, value, sentence in guesses
        ],
        rule=RULE_BACK,
    )
    for change in filter(None, cases[0]["special back"]):
        raise NotYetError(f"with backward_factor {TWO[1]:g}, {change}", rule=RULE_BACK)
    if any(case["lent_changed"] for case in cases):
        raise NotYetError(
            "backward modified the incoming gradient in place, expected a new tensor",
            slug="autograd-input-changed",
            rule="gradient * factor returns a new tensor; gradient *= factor changes a "
            "tensor that another branch of the graph may still need",
        )
    worst = max(case["kept"] for case in cases)
    if worst:
        raise NotYetError(
            f"forward saved {worst} bytes of tensors for backward, expected no tensor, "
            "as backward only needs a number",
            slug="kept-for-nothing",
            rule="a number is enough: ctx.backward_factor = backward_factor",
        )
    return "the incoming gradient times the factor; no tensor saved"


def _cases(runs: Runs, clause_id: str) -> list[dict[str, Any]]:
    """What the run has of each pair of factors; a failure goes to its clause."""
    try:
        run = worked_out(runs, scale_and_back)
    except NotYetError as failure:
        went_forward = failure.run is not None and reports_made(failure.run)
        if clause_id == "C1" and went_forward:
            raise NotJudgedError("what failed is backward: see C2") from None
        raise when_raised.told(failure, KINDS) from None
    cases: list[dict[str, Any]] = run.values[0]
    for case in cases:
        if "wrong" in case:
            raise NotYetError(
                case["wrong"], slug="returned-none", rule="forward returns a tensor"
            )
    return cases


def _column(index: int) -> Tensor:
    column = torch.tensor([pair[index] for pair in FACTORS], dtype=torch.float64)
    return column.reshape(-1, 1, 1)
