"""Layers of ResNets."""

from __future__ import annotations

from collections import OrderedDict
from typing import final

from torch import Tensor, nn
from torch.nn import functional

from penstock.zoo.blocks.layers import HeConv2d

#: Channels inside the blocks of conv2_x to conv5_x: table 1 of the paper.
WIDTHS = (64, 128, 256, 512)


def _conv(channels: int, width: int, kernel: int, stride: int = 1) -> HeConv2d:
    """Return a convolution without bias that keeps the image size at stride 1."""
    return HeConv2d(channels, width, kernel, stride=stride, padding=kernel // 2, bias=False)


def _skip(channels: int, out: int, stride: int) -> nn.Sequential | None:
    """Return a projection where the shape changes (the paper's option B), else None for the
    identity.
    """
    if channels == out and stride == 1:
        return None
    return nn.Sequential(OrderedDict(conv=_conv(channels, out, 1, stride), bn=nn.BatchNorm2d(out)))


@final
class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions and a skip connection: (batch, channels, h, w) to (batch, width, h /
    stride, w / stride).

    Source: He et al. 2016, figure 5 left.
    """

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(channels, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.skip = _skip(channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Run the block."""
        inner = functional.relu(self.bn1(self.conv1(x)))
        shortcut = x if self.skip is None else self.skip(x)
        return functional.relu(self.bn2(self.conv2(inner)) + shortcut)


@final
class Bottleneck(nn.Module):
    """Convolutions of 1 x 1, 3 x 3 and 1 x 1 and a skip connection: (batch, channels, h, w) to
    (batch, 4 width, h / stride, w / stride).

    The 3 x 3 convolution has the stride, as in torchvision and all later work; in the paper the
    first 1 x 1 has it, which is less accurate and has as many parameters.

    Source: He et al. 2016, figure 5 right.
    """

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * self.expansion
        self.conv1 = _conv(channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _conv(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _conv(width, out, 1)
        self.bn3 = nn.BatchNorm2d(out)
        self.skip = _skip(channels, out, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Run the block."""
        inner = functional.relu(self.bn1(self.conv1(x)))
        inner = functional.relu(self.bn2(self.conv2(inner)))
        shortcut = x if self.skip is None else self.skip(x)
        return functional.relu(self.bn3(self.conv3(inner)) + shortcut)


def _stem(image: int, channels: int) -> nn.Sequential:
    """Return the layers before the first block, of the paper or of CIFAR versions."""
    small = image == 32
    stem: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=_conv(channels, WIDTHS[0], 3) if small else _conv(channels, WIDTHS[0], 7, stride=2),
        bn1=nn.BatchNorm2d(WIDTHS[0]),
        relu1=nn.ReLU(),
    )
    if not small:
        stem["pool1"] = nn.MaxPool2d(3, stride=2, padding=1)
    return nn.Sequential(stem)


def build_resnet(
    block: type[BasicBlock | Bottleneck],
    counts: tuple[int, ...],
    classes: int,
    image: int,
    channels: int,
) -> nn.Sequential:
    """Return a ResNet with `counts` blocks in conv2_x to conv5_x."""
    stem = _stem(image, channels)
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    block_channels = WIDTHS[0]
    for group, (count, width) in enumerate(zip(counts, WIDTHS, strict=True), start=2):
        for index in range(1, count + 1):
            stride = 2 if index == 1 and group > 2 else 1
            blocks[f"conv{group}_{index}"] = block(block_channels, width, stride)
            block_channels = width * block.expansion
    classifier = nn.Sequential(
        OrderedDict(
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(block_channels, classes),
        )
    )
    return nn.Sequential(
        OrderedDict(stem=stem, blocks=nn.Sequential(blocks), classifier=classifier)
    )
