"""The image models: parameter counts, shapes, and torchvision's logits."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from distlab.models.image_models import IMAGE_MODELS, make_image_model
from distlab.models.vit import VisionTransformer

COUNTS = {
    "resnet18": 11_689_512,
    "resnet50": 25_557_032,
    "vit_s_16": 22_050_664,
    "vit_b_16": 86_567_656,
}
"""torchvision's, with 1,000 classes; that of vit_s_16 is the paper's, 22 million."""


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def make(name: str, **sizes: int) -> nn.Module:
    with torch.device("meta"):
        return make_image_model(name, **{"num_classes": 1000, **sizes})


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts(name: str) -> None:
    assert count(make(name)) == COUNTS[name]


@pytest.mark.parametrize("image_size", [8, 28])
@pytest.mark.parametrize("name", ["narrow_resnet18", "narrow_vit"])
def test_small_images(name: str, image_size: int) -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    model, same, other = (
        make_image_model(
            name, num_classes=10, in_channels=1, image_size=image_size, seed=seed
        )
        for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), state)
    images = torch.randn(3, 1, image_size, image_size)
    assert model(images).shape == (3, 10)
    pairs = list(zip(model.parameters(), same.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    pairs = list(zip(model.parameters(), other.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("name", "image_size", "named"),
    [
        ("resnet19", 224, "'resnet19'"),
        ("resnet18", 28, r"\b32 × 32\b.*\b28\b"),
        ("narrow_resnet18", 7, r"\b8 × 8\b.*\b7\b"),
        ("vit_b_16", 28, r"\b224 × 224\b.*\b28\b"),
        ("narrow_vit", 30, r"\b30 × 30\b"),
    ],
)
def test_refused(name: str, image_size: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make_image_model(name, num_classes=10, image_size=image_size)


def test_an_image_of_another_size_is_refused() -> None:
    model = make_image_model("narrow_vit", num_classes=10, in_channels=1, image_size=8)
    with pytest.raises(ValueError, match=r"\b8 × 8\b.*\b28 × 28\b"):
        model(torch.zeros(1, 1, 28, 28))
    with pytest.raises(ValueError, match=r"\b3 heads\b.*\b64\b"):
        VisionTransformer(num_heads=3, dim=64, mlp_dim=64)


_WHY = "torchvision is not installed: pip install --no-deps torchvision==0.28.*"


@pytest.fixture(scope="module")
def models() -> Any:
    """torchvision.models, or skip.

    Built for CUDA, torchvision registers no operators beside a CPU torch, and its
    import asks for some of them: they are declared here, and none is ever called.
    """
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip(_WHY)
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou) -> Tensor")
    return importlib.import_module("torchvision.models")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "resnet50", "vit_b_16"])
def test_torchvision_gives_the_same_logits(models: Any, name: str) -> None:
    torch.manual_seed(0)
    theirs = getattr(models, name)().double().eval()
    if name.startswith("vit"):  # its head starts at zero: all logits would be equal
        nn.init.normal_(theirs.heads.head.weight)
    for module in theirs.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    ours = make_image_model(name, num_classes=1000).double().eval()
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 224, 224, dtype=torch.float64)
    with torch.no_grad():
        expected, found = theirs(images), ours(images)
    assert expected.std() > 0.01
    assert (found - expected).abs().max() <= 1e-10 * expected.abs().max()


def test_every_name_is_made() -> None:
    for name in IMAGE_MODELS:
        assert count(make(name, num_classes=7)) > 0
