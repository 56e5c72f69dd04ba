"""U-Net: a contracting and an expanding path, with skip connections between their levels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import SettingError
from penstock.zoo.catalogue import check_counts, register

if TYPE_CHECKING:
    from torch import nn


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

    Values between layers are dicts (see `State` in `penstock.zoo.blocks.unet`): a level's skip
    connection is passed through all layers up to the same level of the expanding path, so that a
    cut at the bottom sends the most. 2 levels + 2 layers in all.

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
    from penstock.zoo.blocks.unet import build_unet

    return build_unet(classes, channels, width, levels, per_pixel=per_pixel)
