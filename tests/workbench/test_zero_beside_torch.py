"""ZeRO as its users need it: beside torch in one process, and what is refused."""

from __future__ import annotations

import copy
import io
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distlab.curriculum import load
from distlab.given.sharded_optimizer import FreedMemoryError
from distlab.runner import Cluster
from tests.corpora.beside_torch import zero as beside
from tests.corpora.beside_torch import zero_models as models
from tests.corpora.beside_torch import zero_trainings as trainings
from tests.workbench.golden import Golden
from tests.workbench.refusals import refusal

OPTIMIZERS = [*beside.OPTIMIZERS]
EACH = [
    (name, OPTIMIZERS[place % 4], 1 + place % 3)
    for place, name in enumerate(beside.EACH)
]
ONCE = [kind for name in beside.ONCE for kind in beside.kinds_of(name)]


@pytest.fixture(scope="module", autouse=True)
def warm(cluster: Cluster) -> None:
    """Before ranks are forked: what each would import by itself."""
    cluster.warm("torch._dynamo", "tests.corpora.beside_torch.zero")


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_weights_are_those_of_torch_alone(cluster: Cluster, num_ranks: int) -> None:
    """A sample: each training in some way, on 2 or on 3 ranks."""
    kinds = (EACH + ONCE)[num_ranks % 2 :: 2]
    found = beside.Launches("reference").play(cluster, num_ranks, kinds)
    wrong = {k: v for k, v in found.items() if isinstance(v, str) or not v < 1e-11}
    assert wrong == {}


# ── in one process: what is refused, and what is not ────────────────────────────────


class Alone:
    """A communicator of one rank."""

    rank, world_size, device = 0, 1, torch.device("cpu")

    def reduce_scatter(self, output: Tensor, given: Tensor) -> None:
        output.copy_(given)

    all_gather = reduce_scatter

    def all_reduce(self, tensor: Tensor) -> None:
        """Nothing."""


Factory = Callable[..., torch.optim.Optimizer]
make_sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def make_zero(
    model: nn.Module, groups: Any = None, factory: Factory = make_sgd, stage: int = 1
) -> Any:
    unit = load("sharded_optimizer", "reference")
    groups = groups or [{"params": model.parameters()}]
    zero = unit.ShardedOptimizer(Alone(), model, groups, factory)
    return unit.at_stage(stage, zero)


def backward(model: nn.Module) -> None:
    model(torch.ones(2, models.WIDTH)).square().sum().backward()


def test_a_parameter_in_no_group_or_two_is_refused() -> None:
    model = models.Plain()
    with pytest.raises(ValueError, match=r"\bfirst\.bias\b"):
        make_zero(model, [{"params": model.first.weight}])
    groups = [{"params": model.parameters()}, {"params": [model.first.weight]}]
    with pytest.raises(ValueError, match=r"\.weight\b.* 2$"):
        make_zero(model, groups)
    strange = [{"params": [*model.parameters(), nn.Parameter(torch.ones(1))]}]
    with pytest.raises(ValueError, match=r"\bthe model$"):
        make_zero(model, strange)


def test_an_optimizer_that_needs_whole_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\bAdafactor\b"):
        make_zero(models.Plain(), factory=torch.optim.Adafactor)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_sparse_gradient_is_refused(stage: int) -> None:
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 2))
    zero = make_zero(model, stage=stage)

    def step() -> None:
        model(torch.tensor([1])).sum().backward()
        zero.step()

    with pytest.raises(ValueError, match=r"\bsparse\b"):
        step()


def test_gradients_that_would_be_lost_are_refused() -> None:
    model = models.Plain()
    zero = make_zero(model)
    backward(model)
    zero.reduce_gradients()
    backward(model)
    with pytest.raises(RuntimeError, match=r"^backward\(\)"):
        zero.step()
    with pytest.raises(RuntimeError, match=r"\bzero_grad\(\)"):
        zero.reduce_gradients()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_that_nobody_would_shard_are_refused(stage: int) -> None:
    model = models.Plain()
    model.branch.gain.requires_grad_(False)
    zero = make_zero(model, stage=stage)
    model.branch.gain.requires_grad_(True)
    backward(model)
    with pytest.raises(RuntimeError, match=r"\bbranch\.gain\b"):
        zero.step()
    zero.zero_grad()
    zero.add_param_group({"params": [model.branch.gain]})
    zero.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    backward(model)
    with pytest.raises(RuntimeError, match=r"\bparam_groups\b.*\badd_param_group\(\)"):
        zero.step()


def test_groups_that_cannot_be_added_are_refused(golden: Golden) -> None:
    model, told = models.Direct(), []
    model.branch.gain.requires_grad_(False)
    model.scale.requires_grad_(False)
    zero = make_zero(model, stage=3)
    for parameter, why in (
        (model.first.weight, r"^first\.weight\b"),
        (model.branch.gain, r"^branch\.gain\b.*\bfrozen\b"),
        (nn.Parameter(torch.ones(1)), r"\bthe model$"),
        (model.scale.requires_grad_(True), r"^scale\b.*\blayer\b"),
    ):
        told.append(refusal(ValueError, zero.add_param_group, {"params": [parameter]}))
        assert re.search(why, told[-1])
    golden("units/zero-groups", "\n".join(told))


def test_a_state_of_other_groups_is_refused() -> None:
    model = models.Plain()
    saved = make_zero(model).state_dict()
    other = models.Plain()
    groups = trainings.two_groups(other)
    with pytest.raises(ValueError, match=r"\bgroups\b.*\bparameters\b"):
        make_zero(other, groups).load_state_dict([saved])


def test_after_a_backward_that_raised_gradients_are_cleared_first() -> None:
    model = models.Plain()
    zero = make_zero(model, stage=2)
    weights = zero.full_state_dict()
    out = model(torch.ones(2, models.WIDTH))
    hook = model.first.weight.register_hook(_fail)
    with pytest.raises(ArithmeticError):
        out.sum().backward()
    hook.remove()
    with pytest.raises(RuntimeError, match=r"\bbackward\(\).*\bzero_grad\(\)"):
        model(torch.ones(2, models.WIDTH))
    zero.zero_grad()
    zero.step()
    assert all(map(torch.equal, weights.values(), zero.full_state_dict().values()))


def _fail(_: Tensor) -> None:
    raise ArithmeticError


def test_freed_weights_have_a_name_and_no_numbers() -> None:
    model = models.Plain()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    zero = make_zero(model, stage=3)
    weight = model.first.weight
    assert "first.weight" in repr(weight)
    assert (weight.shape, weight.numel(), weight.grad) == ((5, 5), 25, None)
    for use in (
        model.state_dict,
        model.first.state_dict,
        partial(model.load_state_dict, before),
        weight.norm,
        weight.tolist,
        partial(torch.save, weight, io.BytesIO()),
        partial(copy.deepcopy, model),
        partial(pickle.dumps, model),
        model.half,
    ):
        with pytest.raises(FreedMemoryError, match=r"full_state_dict\(\)"):
            use()
    after = zero.full_state_dict()
    assert list(after) == list(before)
    assert all(map(torch.equal, before.values(), after.values()))
    assert "first.weight" in repr(weight)


def test_what_a_layer_hides_in_an_object_is_refused() -> None:
    class Odd(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return {super().forward(x)}

    model = nn.Sequential(Odd(2, 2))
    make_zero(model, stage=3)
    with pytest.raises(TypeError, match=r"\bset\b.* 3\b"):
        model(torch.ones(1, 2))


def test_a_copy_of_the_model_has_no_optimizer() -> None:
    model = models.Plain()
    zero = make_zero(model, stage=2)
    backward(model)
    other = copy.deepcopy(model)
    backward_of_copy = other(torch.ones(1, models.WIDTH)).sum()
    grads = torch.autograd.grad(backward_of_copy, [*other.parameters()][:1])
    other.first.weight.grad = grads[0]
    other.zero_grad()
    assert other.first.weight.grad is None
    assert zero.buckets[0].shard.grad is not None
    model.zero_grad()
    assert zero.buckets[0].shard.grad is None


def test_it_is_one_of_torchs_optimizers() -> None:
    model = models.Plain()
    zero = make_zero(model, trainings.two_groups(model))
    assert isinstance(zero, torch.optim.Optimizer)
    assert zero.param_groups is zero.optimizer.param_groups
    scheduler = torch.optim.lr_scheduler.StepLR(zero, 1, 0.5)
    for _ in range(2):
        backward(model)
        zero.step()
        scheduler.step()
        zero.zero_grad()
    found = [group["lr"] for group in zero.optimizer.param_groups]
    assert found == pytest.approx([0.025, 0.0075])
