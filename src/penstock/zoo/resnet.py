"""ResNet, cut between residual blocks: a skip connection never crosses a stage boundary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.zoo.catalogue import check_counts, check_image, register

if TYPE_CHECKING:
    from torch import nn


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
    from penstock.zoo.blocks.resnet import BasicBlock, build_resnet

    return build_resnet(BasicBlock, (2, 2, 2, 2), classes, image, channels)


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
    described in `Bottleneck` of `penstock.zoo.blocks.resnet`.
    """
    check_counts("resnet50", classes=classes, channels=channels)
    check_image("resnet50", image)
    from penstock.zoo.blocks.resnet import Bottleneck, build_resnet

    return build_resnet(Bottleneck, (3, 4, 6, 3), classes, image, channels)
