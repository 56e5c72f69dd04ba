"""ResNet, cut between residual blocks: a skip connection never crosses a stage boundary."""

from __future__ import annotations

from collections import OrderedDict
from typing import final

from torch import Tensor, nn
from torch.nn import functional

from penstock.zoo.catalogue import check_counts, check_image, register
from penstock.zoo.layers import HeConv2d

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


def _resnet(
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


@register(
    "resnet18",
    parameters=11_689_512,
    input="float (batch, channels, image, image)",
    output="float (batch, classes)",
    source="He et al. 2016, table 1",
)
def resnet18(*, classes: int = 1000, image: int = 224, channels: int = 3) -> nn.Sequential:
    """ResNet-18: 8 basic blocks, each one layer; 11,689,512 parameters at 1,000 classes and 224
    pixels.

    Layers: `stem.conv1`, `stem.bn1`, `stem.relu1`, `stem.pool1` (224 only), `blocks.conv2_1`, ...,
    `blocks.conv5_2`, `classifier.pool`, `classifier.flatten`, `classifier.fc`: 15 in all, 14 at 32
    pixels.

    Args:
        classes: outputs per sample. Output: (batch, classes).
        image: pixels a side. Input: (batch, channels, image, image). 224 has the paper's stem, a 7
            x 7 convolution of stride 2 and a max-pool; 32 a 3 x 3 convolution of stride 1 and no
            pool, as is usual for CIFAR.
        channels: of the input.

    Raises:
        SettingError: image is neither 224 nor 32, or a count below 1.

    Source: He et al. 2016, "Deep residual learning for image recognition", table 1; He normal
    initial weights (section 3.4).
    """
    check_counts("resnet18", classes=classes, channels=channels)
    check_image("resnet18", image)
    return _resnet(BasicBlock, (2, 2, 2, 2), classes, image, channels)


@register(
    "resnet50",
    parameters=25_557_032,
    input="float (batch, channels, image, image)",
    output="float (batch, classes)",
    source="He et al. 2016, table 1",
)
def resnet50(*, classes: int = 1000, image: int = 224, channels: int = 3) -> nn.Sequential:
    """ResNet-50: 16 bottleneck blocks, each one layer; 25,557,032 parameters at 1,000 classes and
    224 pixels.

    Layers and options as in `resnet18`, the blocks from `blocks.conv2_1` to `blocks.conv5_3`: 23
    layers in all, 22 at 32 pixels.

    Raises:
        SettingError: image is neither 224 nor 32, or a count below 1.

    Source: He et al. 2016, "Deep residual learning for image recognition", table 1; stride as
    described in `Bottleneck`.
    """
    check_counts("resnet50", classes=classes, channels=channels)
    check_image("resnet50", image)
    return _resnet(Bottleneck, (3, 4, 6, 3), classes, image, channels)
