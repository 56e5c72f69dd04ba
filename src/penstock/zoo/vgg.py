"""VGG, with and without batch normalisation. Its first layers have large activations and few
weights, its last layers the reverse.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, final

from penstock.errors import SettingError
from penstock.zoo.catalogue import check_counts, check_dropout, check_image, register

if TYPE_CHECKING:
    from torch import nn

#: Forms of the classifier. They are one model at 224 pixels, where the last feature map is 7 x 7.
HEADS = ("compact", "torchvision")
#: Parameters without and with batch normalisation, at 1,000 classes and 224 x 224 pixels of 3
#: channels.
PARAMETERS = {
    11: (132_863_336, 132_868_840),
    13: (133_047_848, 133_053_736),
    16: (138_357_544, 138_365_992),
    19: (143_667_240, 143_678_248),
}


@final
@dataclass(frozen=True)
class Variant:
    """A column of the paper's table.

    Attributes:
        depth: 11, 13, 16 or 19 layers with weights.
        batch_norm: normalise after every convolution (torchvision's `_bn`; the convolutions keep
            their biases).
    """

    depth: int
    batch_norm: bool

    @property
    def name(self) -> str:
        """The name in the catalogue, for example "vgg16_bn"."""
        return f"vgg{self.depth}" + "_bn" * self.batch_norm


def vgg(
    variant: Variant,
    *,
    classes: int = 1000,
    image: int = 224,
    channels: int = 3,
    dropout: float = 0.5,
    width: int = 64,
    head: str = "compact",
) -> nn.Sequential:
    """VGG; each convolution, normalisation, ReLU, pool, dropout and linear map is a layer.

    Names are those of the paper's Caffe models: `features.conv1_1`, `features.bn1_1` (if any),
    `features.relu1_1`, ..., `features.pool5`, `classifier.flatten`, `classifier.fc6`,
    `classifier.relu6`, `classifier.drop6`, ..., `classifier.fc8`.

    depth                    11            13            16            19
    parameters               132,863,336   133,047,848   138,357,544   143,667,240
    with batch norm          132,868,840   133,053,736   138,365,992   143,678,248
    layers                   29            33            39            45
    with batch norm          37            43            52            61

    Parameters are at 1,000 classes and image=224. At image=32 the last feature map is 1 x 1. There
    the two heads are two models: with "compact", `fc6` takes 512 numbers instead of 25,088, and
    VGG-19 at 100 classes has 39,316,644 parameters; with "torchvision" it has 139,979,940.

    Args:
        variant: the depth, with or without batch norm.
        classes: outputs per sample. Output: (batch, classes).
        image: pixels a side, 224 or 32. Input: (batch, channels, image, image).
        channels: of the input.
        dropout: share of `fc6` and `fc7` outputs dropped in training; at 0 the two layers stay in
            the chain and do nothing.
        width: channels of the first block. The other blocks have 2, 4, 8 and 8 times as many, `fc6`
            and `fc7` 64 times, so that width=8 is a VGG with an eighth of the paper's channels
            everywhere, for machines without a GPU.
        head: "compact" flattens the last feature map. "torchvision" first brings it to 7 x 7 by
            adaptive average pooling, `classifier.avgpool`, as torchvision's VGG does, so that one
            more layer precedes `classifier.flatten` and the parameters do not depend on `image`.

    Raises:
        SettingError: image is neither 224 nor 32, dropout not in [0, 1), a count below 1, or the
            head is unknown.

    Source: Simonyan and Zisserman 2015, "Very deep convolutional networks for large-scale image
    recognition", table 1. Initial weights as in torchvision: He normal for convolutions, N(0,
    0.01²) for linear maps. Without batch norm the logits then start near 0, and the loss stays at
    its first value for long: at 32 pixels, batch 16 and SGD with momentum 0.9, VGG-11 for about 40
    steps at lr=0.02, VGG-19 for about 90 at lr=0.03.
    """
    name = variant.name
    check_counts(name, classes=classes, channels=channels, width=width)
    check_image(name, image)
    check_dropout(name, dropout)
    if head not in HEADS:
        raise SettingError(f"{name} takes head of {' or '.join(map(repr, HEADS))}, not {head!r}")
    from torch import nn

    from penstock.zoo.blocks.vgg import build_classifier, build_features

    features = build_features(variant.depth, width, channels, batch_norm=variant.batch_norm)
    pooled = head == "torchvision"
    classifier = build_classifier(image, width, classes, dropout, pooled=pooled)
    return nn.Sequential(OrderedDict(features=features, classifier=classifier))


for _depth, _counts in PARAMETERS.items():
    for _batch_norm, _count in zip((False, True), _counts, strict=True):
        _variant = Variant(_depth, _batch_norm)
        register(
            _variant.name,
            parameters=_count,
            input="float (batch, channels, image, image)",
            output="float (batch, classes)",
            source="Simonyan and Zisserman 2015, table 1",
        )(partial(vgg, _variant))
