"""Residual networks for images: ResNet-18, ResNet-50, and a narrow ResNet-18.

The names of the parameters and buffers are torchvision's, so that its weights load.

Source: He et al., Deep Residual Learning (arXiv 1512.03385), table 1; the stride of a
bottleneck is in its 3 × 3 convolution, as in torchvision; He et al., Delving Deep into
Rectifiers (arXiv 1502.01852), section 2.2, for the first weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor, nn


def conv(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Conv2d:
    """A convolution without a bias, padded so that stride 1 keeps height and width."""
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)


class BasicBlock(nn.Module):
    """Two 3 × 3 convolutions, and the input added to what they give."""

    expansion: ClassVar[int] = 1  # channels of the output over `width`

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) to (N, width, H / stride, W / stride)."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        added: Tensor = self.relu(out)
        return added


class Bottleneck(nn.Module):
    """1 × 1 to fewer channels, 3 × 3, 1 × 1 to more; the input is added."""

    expansion: ClassVar[int] = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1, self.bn1 = conv(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = conv(width, outputs, 1), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        """(N, inputs, H, W) to (N, 4 · width, H / stride, W / stride)."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        added: Tensor = self.relu(out)
        return added


Block = type[BasicBlock] | type[Bottleneck]


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Sequential | None:
    """What gives the input the shape of the output; None if it has it already."""
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))


class ResNet(nn.Module):
    """(N, in_channels, H, W) to (N, num_classes); any H and W of at least 32.

    With `small_images` the first convolution is 3 × 3 with stride 1 and there is no
    pooling after it, so that images of 8 × 8 to 32 × 32 pixels are enough.
    """

    def __init__(
        self,
        block: Block,
        num_blocks: Sequence[int],
        *,
        num_classes: int = 1000,
        in_channels: int = 3,
        width: int = 64,
        small_images: bool = False,
    ) -> None:
        super().__init__()
        size, stride = (3, 1) if small_images else (7, 2)
        self.conv1 = conv(in_channels, width, size, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = (
            nn.Identity() if small_images else nn.MaxPool2d(3, stride=2, padding=1)
        )
        inputs = width
        for stage, count in enumerate(num_blocks):
            blocks = []
            for number in range(count):
                first_stride = 2 if stage > 0 and number == 0 else 1
                blocks.append(block(inputs, width << stage, first_stride))
                inputs = (width << stage) * block.expansion
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.num_stages = len(num_blocks)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(inputs, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(
                    module.weight, mode="fan_out", nonlinearity="relu"
                )

    def forward(self, x: Tensor) -> Tensor:
        """Images to scores."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in range(self.num_stages):
            x = self.get_submodule(f"layer{stage + 1}")(x)
        scores: Tensor = self.fc(self.avgpool(x).flatten(1))
        return scores


def resnet18(num_classes: int = 1000, in_channels: int = 3) -> ResNet:
    """11,689,512 parameters with 1,000 classes."""
    return ResNet(
        BasicBlock, (2, 2, 2, 2), num_classes=num_classes, in_channels=in_channels
    )


def resnet50(num_classes: int = 1000, in_channels: int = 3) -> ResNet:
    """25,557,032 parameters with 1,000 classes."""
    return ResNet(
        Bottleneck, (3, 4, 6, 3), num_classes=num_classes, in_channels=in_channels
    )


def narrow_resnet18(num_classes: int = 10, in_channels: int = 1) -> ResNet:
    """ResNet-18 with a quarter of the channels, for images of 8 × 8 to 32 × 32."""
    return ResNet(
        BasicBlock,
        (2, 2, 2, 2),
        num_classes=num_classes,
        in_channels=in_channels,
        width=16,
        small_images=True,
    )
