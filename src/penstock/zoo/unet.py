"""U-Net: a contracting and an expanding path, with skip connections between their levels."""

from __future__ import annotations

from collections import OrderedDict
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from penstock.errors import SettingError
from penstock.zoo.catalogue import check_counts, register
from penstock.zoo.layers import HeConv2d

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


@register(
    "unet",
    parameters=31_037_698,
    input="float (batch, channels, image, image)",
    output="float (batch, classes), or per pixel (batch, classes, image, image)",
    source="Ronneberger et al. 2015, figure 1",
)
def unet(
    *,
    classes: int = 2,
    image: int = 224,
    channels: int = 3,
    width: int = 64,
    levels: int = 4,
    per_pixel: bool = False,
) -> nn.Sequential:
    """U-Net: 31,037,698 parameters at 2 classes, 3 channels, 64 numbers wide and 4 levels.

        images -> down.level1 ... down.level<n> -> bottom -> up.level<n> ... up.level1 -> scores

    Values between layers are dicts (see `State`): a level's skip connection is passed through all
    layers up to the same level of the expanding path, so that a cut at the bottom sends the most. 2
    levels + 2 layers in all.

    With w = width, the double convolutions, of 3 x 3 and without biases, take i inputs to o outputs
    with 9 (i o + o²) + 4 o parameters, and every level of the expanding path has 8 w² 4^(level - 1)
    + w 2^(level - 1) more.

    Args:
        classes: scored at every pixel.
        image: pixels a side, a multiple of 2^levels. Input: (batch, channels, image, image).
        channels: of the input.
        width: channels after the first level; every further level has twice as many.
        levels: number of times that the contracting path halves the sides.
        per_pixel: whether the output is the scores at every pixel, (batch, classes, image, image),
            as for segmentation; else their mean over the image, (batch, classes), with which it
            learns to classify.

    Raises:
        SettingError: image is no multiple of 2^levels, per_pixel is no flag, or a count is below 1.

    Source: Ronneberger, Fischer and Brox 2015, "U-Net: convolutional networks for biomedical image
    segmentation", figure 1; with padding, so that nothing need be cropped, and batch norm, as is
    now usual.
    """
    check_counts(
        "unet", classes=classes, channels=channels, image=image, width=width, levels=levels
    )
    if image % 2**levels:
        raise SettingError(
            f"unet takes image a multiple of {2**levels}, for {levels} halvings, not {image}: "
            "choose fewer levels, or another size"
        )
    if not isinstance(per_pixel, bool):
        raise SettingError(f"unet takes per_pixel=True or False, not {per_pixel!r}")
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
