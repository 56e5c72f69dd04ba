"""Layers of the U-Net."""

from __future__ import annotations

from collections import OrderedDict
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.zoo.blocks.layers import HeConv2d

#: Values between layers: the activation `x`, and `skip1`, `skip2`, ...: outputs of the contracting
#: path, each as far as the level of the expanding path that uses it.
State = dict[str, Tensor]


@final
class DoubleConv(nn.Module):
    """Twice a 3 x 3 convolution, batch norm and ReLU: (batch, channels, h, w) to (batch, width, h,
    w).
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv1 = HeConv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = HeConv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer."""
        inner = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(inner)))


@final
class Down(nn.Module):
    """A double convolution, whose output is a skip connection, and a max-pool that halves the
    sides. The first level takes the images themselves.
    """

    def __init__(self, channels: int, width: int, level: int) -> None:
        super().__init__()
        self.level = level
        self.body = DoubleConv(channels, width)

    def forward(self, value: Tensor | State) -> State:
        """Run the layer."""
        state = {"x": value} if isinstance(value, Tensor) else value
        features = self.body(state["x"])
        return {**state, f"skip{self.level}": features, "x": functional.max_pool2d(features, 2)}


@final
class Bottom(nn.Module):
    """A double convolution between the two paths."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.body = DoubleConv(channels, width)

    def forward(self, state: State) -> State:
        """Run the layer."""
        return {**state, "x": self.body(state["x"])}


@final
class Up(nn.Module):
    """Doubled sides, concatenated with this level's skip connection: (batch, 2 width, h, w) to
    (batch, width, 2 h, 2 w).

    The skip connection is dropped, since no later layer needs it.
    """

    def __init__(self, width: int, level: int) -> None:
        super().__init__()
        self.level = level
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.body = DoubleConv(2 * width, width)

    def forward(self, state: State) -> State:
        """Run the layer."""
        output = dict(state)
        skip = output.pop(f"skip{self.level}")
        output["x"] = self.body(torch.cat([skip, self.up(state["x"])], dim=1))
        return output


@final
class PixelScores(nn.Module):
    """Class scores at every pixel; or their mean over the image: (batch, classes)."""

    def __init__(self, width: int, classes: int, *, per_pixel: bool) -> None:
        super().__init__()
        self.per_pixel = per_pixel
        self.conv = nn.Conv2d(width, classes, 1)

    def forward(self, state: State) -> Tensor:
        """Run the layer."""
        scores: Tensor = self.conv(state["x"])
        return scores if self.per_pixel else scores.mean(dim=(2, 3))


def build_unet(
    classes: int, channels: int, width: int, levels: int, *, per_pixel: bool
) -> nn.Sequential:
    """Build the model of `penstock.zoo.unet.unet`, whose arguments these are."""
    down: OrderedDict[str, nn.Module] = OrderedDict()
    up: OrderedDict[str, nn.Module] = OrderedDict()
    # Made in the order of execution, so that a whole model draws the same initial weights as ranks
    # that make their layers one by one.
    level_channels = channels
    for level in range(1, levels + 1):
        level_width = width * 2 ** (level - 1)
        down[f"level{level}"] = Down(level_channels, level_width, level)
        level_channels = level_width
    bottom = Bottom(level_channels, 2 * level_channels)
    for level in range(levels, 0, -1):
        up[f"level{level}"] = Up(width * 2 ** (level - 1), level)
    return nn.Sequential(
        OrderedDict(
            down=nn.Sequential(down),
            bottom=bottom,
            up=nn.Sequential(up),
            scores=PixelScores(width, classes, per_pixel=per_pixel),
        )
    )
