"""The recipe: optimizers beside a reference, mixtures, the average, schedules."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from distlab.recipe import mixing
from distlab.recipe.average import WeightAverage
from distlab.recipe.optimizers import LAMB, LARS, OPTIMIZERS, make_optimizer
from distlab.recipe.schedules import image_size, learning_rate_factor

STEPS, DECAY = 6, 0.01


def gradients(step: int) -> list[Tensor]:
    """Of a matrix, with a zero row, of a bias, and of weights that are all zero."""
    generator = torch.Generator().manual_seed(step)
    shapes = ((4, 3), (4,), (2, 2))
    rows = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    rows[0][0] = 0
    return rows


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(99)
    matrix = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    bias = torch.randn(4, generator=generator, dtype=torch.float64)
    zeros = torch.zeros(2, 2, dtype=torch.float64)
    return [nn.Parameter(one) for one in (matrix, bias, zeros)]


def trained(optimizer: torch.optim.Optimizer, weights: list[nn.Parameter]) -> None:
    for step in range(STEPS):
        for one, gradient in zip(weights, gradients(step), strict=True):
            one.grad = gradient
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        optimizer.step()


def norm(numbers: list[float]) -> float:
    return math.sqrt(math.fsum(x * x for x in numbers))


def lars_reference(index: int) -> list[float]:
    """Algorithm 1 of the LARS paper in Python's floats; biases: plain SGD."""
    start = parameters()[index]
    w, v = start.flatten().tolist(), [0.0] * start.numel()
    for step in range(STEPS):
        g, rate = gradients(step)[index].flatten().tolist(), 0.1 / (step + 1)
        ratio, decay = 1.0, 0.0
        if start.dim() > 1:
            decay = DECAY
            below = norm(g) + decay * norm(w)
            if norm(w) > 0 and below > 0:
                ratio = 0.02 * norm(w) / below
        v = [
            0.9 * m + rate * ratio * (x + decay * y)
            for m, x, y in zip(v, g, w, strict=True)
        ]
        w = [y - m for y, m in zip(w, v, strict=True)]
    return w


def lamb_reference(index: int) -> list[float]:
    """Algorithm 2 of the LAMB paper in Python's floats; biases: plain Adam."""
    start = parameters()[index]
    w = start.flatten().tolist()
    m, v = [0.0] * len(w), [0.0] * len(w)
    for step in range(STEPS):
        g, rate = gradients(step)[index].flatten().tolist(), 0.1 / (step + 1)
        m = [0.9 * a + 0.1 * x for a, x in zip(m, g, strict=True)]
        v = [0.999 * b + 0.001 * x * x for b, x in zip(v, g, strict=True)]
        one, two = 1 - 0.9 ** (step + 1), 1 - 0.999 ** (step + 1)
        r = [(a / one) / (math.sqrt(b / two) + 1e-6) for a, b in zip(m, v, strict=True)]
        ratio = 1.0
        if start.dim() > 1:
            r = [x + DECAY * y for x, y in zip(r, w, strict=True)]
            ratio = norm(w) / norm(r) if norm(w) > 0 and norm(r) > 0 else 1.0
        w = [y - rate * ratio * x for y, x in zip(w, r, strict=True)]
    return w


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_large_batch_optimizers_are_those_of_their_papers(name: str) -> None:
    weights = parameters()
    optimizer: torch.optim.Optimizer = (
        LARS(weights, lr=0.1, weight_decay=DECAY, trust=0.02)
        if name == "lars"
        else LAMB(weights, lr=0.1, weight_decay=DECAY)
    )
    trained(optimizer, weights)
    reference = lars_reference if name == "lars" else lamb_reference
    for index, one in enumerate(weights):
        expected = torch.tensor(reference(index), dtype=torch.float64)
        assert (one.detach().flatten() - expected).abs().max() <= 1e-10


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_closure_is_called_once_and_its_loss_returned(name: str) -> None:
    def fresh() -> tuple[nn.Linear, torch.optim.Optimizer]:
        model = nn.Linear(3, 2, dtype=torch.float64)
        nn.init.constant_(model.weight, 0.5)
        nn.init.zeros_(model.bias)
        return model, make_optimizer(name, model, lr=0.1)

    inputs = torch.arange(6, dtype=torch.float64).view(2, 3)
    models, losses = [], list[Tensor]()
    for with_closure in (False, True):
        model, optimizer = fresh()

        def closure() -> Tensor:
            optimizer.zero_grad()  # noqa: B023
            loss: Tensor = model(inputs).pow(2).sum()  # noqa: B023
            loss.backward()
            losses.append(loss)
            return loss

        for _ in range(3):
            if with_closure:
                assert optimizer.step(closure) is losses[-1]
            else:
                closure()
                assert optimizer.step() is None
        models.append(model)
    assert len(losses) == 6
    assert len({loss.item() for loss in losses}) == 3
    assert torch.equal(models[0].weight, models[1].weight)


@pytest.mark.parametrize("name", ["sgd", "adamw", "lars", "lamb"])
def test_norms_may_have_another_weight_decay(name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    optimizer = make_optimizer(
        name, model, lr=0.1, weight_decay=0.5, norm_weight_decay=0.0
    )
    decays = {
        id(p): group["weight_decay"]
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert [decays[id(p)] for p in model.parameters()] == [0.5, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="'adam'"):
        make_optimizer("adam", model, lr=0.1)


def test_mixup_mixes_images_and_targets_alike() -> None:
    torch.manual_seed(0)
    targets = torch.arange(6)
    images = nn.functional.one_hot(targets, 6).double().view(6, 1, 2, 3)
    mixed, soft = mixing.mixup(images, targets, 6, 1.0)
    assert (mixed.flatten(1) - soft).abs().max() < 1e-6
    assert not torch.equal(soft, nn.functional.one_hot(targets, 6).float())


def test_cutmix_targets_have_the_share_of_the_area() -> None:
    torch.manual_seed(1)
    targets = torch.arange(8)
    images = targets.view(8, 1, 1, 1).expand(8, 1, 10, 12).float()
    shares = set()
    for _ in range(20):
        mixed, soft = mixing.cutmix(images, targets, 8, 1.0)
        for own, row, weights in zip(targets, mixed, soft, strict=True):
            counted = torch.bincount(row.flatten().long(), minlength=8) / row.numel()
            assert (counted - weights).abs().max() < 1e-6
            shares.add(round(float(weights[own]), 4))
    assert len(shares) > 5


def test_mixtures_are_refused_for_classes_that_are_not_there() -> None:
    with pytest.raises(ValueError, match=r"\b7\b.* 5\b"):
        mixing.mixup(torch.zeros(2, 1, 2, 2), torch.tensor([0, 7]), 5, 0.2)
    with pytest.raises(ValueError, match=r"-1\b.* 5\b"):
        mixing.mixup(torch.zeros(2, 1, 2, 2), torch.tensor([0, -1]), 5, 0.2)


@pytest.mark.parametrize("soft", [False, True])
def test_smoothing_is_that_of_the_paper(soft: bool) -> None:
    torch.manual_seed(2)
    logits, targets = torch.randn(5, 4, dtype=torch.float64), torch.arange(5) % 4
    wanted = nn.functional.one_hot(targets, 4).double()
    if soft:
        wanted = wanted.lerp(wanted.roll(1, 0), 0.3)
    smooth = 0.9 * wanted + 0.1 / 4
    expected = -(smooth * logits.log_softmax(1)).sum(1).mean()
    given = wanted if soft else targets
    assert abs(mixing.cross_entropy(logits, given, 0.1) - expected) < 1e-12


def test_the_average_is_an_exponential_one_and_can_be_swapped_in() -> None:
    model = nn.Linear(2, 1).double()
    average, expected = WeightAverage(model, 0.5), model.weight.detach().clone()
    for step in range(1, 13):
        with torch.no_grad():
            model.weight += step
        average.update(model)
        decay = min(0.5, step / (step + 9))
        expected = decay * expected + (1 - decay) * model.weight.detach()
    own = model.weight.detach().clone()
    with average.in_place_of(model):
        assert (model.weight - expected).abs().max() < 1e-12
    assert torch.equal(model.weight, own)
    other = WeightAverage(model, 0.5)
    other.load_state_dict(average.state_dict())
    assert torch.equal(other.weights["weight"], average.weights["weight"])
    assert other.num_updates == 12
    with pytest.raises(ValueError, match=r"\bdecay\b.* 1\b"):
        WeightAverage(model, 1)


def test_an_average_shows_a_nan_and_restarts_from_finite_weights() -> None:
    model = nn.Linear(2, 1, bias=False).double()
    average, fine = WeightAverage(model, 0.5), model.weight.detach().clone()
    for value in (torch.nan, torch.inf):
        with torch.no_grad():
            model.weight[0, 0] = value
        average.update(model)
        assert average.weights["weight"].isfinite().tolist() == [[False, True]]
        with torch.no_grad():
            model.weight.copy_(fine)  # from a checkpoint, say
        average.update(model)
        assert torch.allclose(average.weights["weight"], fine)


def test_the_learning_rate_rises_and_falls() -> None:
    def factor(step: int, **given: float) -> float:
        return learning_rate_factor(
            step, num_steps=110, warmup_steps=10, first=0.1, **given
        )

    assert factor(0) == pytest.approx(0.1)
    assert factor(5) == pytest.approx(0.55)
    assert factor(10) == pytest.approx(1)
    assert factor(60) == pytest.approx(0.5)
    assert factor(110) == pytest.approx(0)
    assert factor(110, last=0.2) == pytest.approx(0.2)
    steps = [
        learning_rate_factor(s, num_steps=90, schedule="step", step_size=30)
        for s in (29, 30, 89)
    ]
    assert steps == pytest.approx([1, 0.1, 0.01])
    with pytest.raises(ValueError, match=r"\b5 steps\b.* 5\b"):
        learning_rate_factor(0, num_steps=5, warmup_steps=5)
    with pytest.raises(ValueError, match="'linear'"):
        learning_rate_factor(0, num_steps=5, schedule="linear")


def test_an_average_of_another_model_is_refused() -> None:
    average = WeightAverage(nn.Linear(2, 2), 0.5)
    before = average.weights["weight"].clone()
    other = WeightAverage(nn.Linear(2, 3), 0.5).state_dict()
    with pytest.raises(ValueError, match=r"\bweight\b.*\(2, 2\).*\(3, 2\)"):
        average.load_state_dict(other)
    assert torch.equal(average.weights["weight"], before)
    with pytest.raises(ValueError, match=r"\b0\.weight\b"):
        average.update(nn.Sequential(nn.Linear(2, 2)))


def test_images_grow() -> None:
    sizes = [
        image_size(e, num_epochs=9, smallest=16, largest=28, multiple=4)
        for e in range(9)
    ]
    assert sizes[:4] == [16, 16, 16, 16]
    assert sizes[6:] == [28, 28, 28]
    assert sizes == sorted(sizes)
    assert 20 in sizes
    with pytest.raises(ValueError, match=r"\b32\b.*\b28\b"):
        image_size(0, num_epochs=9, smallest=32, largest=28)
    small = mixing.resized(torch.rand(2, 1, 28, 28), 16)
    assert small.shape == (2, 1, 16, 16)
