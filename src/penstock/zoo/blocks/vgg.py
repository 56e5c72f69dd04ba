"""Layers of VGG."""

from __future__ import annotations

import math
from collections import OrderedDict

from torch import nn

from penstock.zoo.blocks.layers import HeConv2d, NormalLinear

#: Convolutions in each of the five blocks: table 1 of the paper, columns A, B, D and E. Every block
#: ends in a 2 x 2 max-pool.
BLOCKS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
#: Output channels of each block, as multiples of the first block's.
WIDTHS = (1, 2, 4, 8, 8)
#: Output channels of the paper's first block; and the width of its linear layers, as a multiple.
WIDTH, LINEAR = 64, 64
#: Pixels a side of the map that the pooling of the "torchvision" head returns.
POOLED_SIDE = 7


def build_features(depth: int, width: int, channels: int, *, batch_norm: bool) -> nn.Sequential:
    """Build the blocks of convolutions of `penstock.zoo.vgg.vgg`, each with a max-pool at its
    end.
    """
    features: OrderedDict[str, nn.Module] = OrderedDict()
    for block, (count, times) in enumerate(zip(BLOCKS[depth], WIDTHS, strict=True), start=1):
        for index in range(1, count + 1):
            features[f"conv{block}_{index}"] = HeConv2d(channels, width * times, 3, padding=1)
            if batch_norm:
                features[f"bn{block}_{index}"] = nn.BatchNorm2d(width * times)
            features[f"relu{block}_{index}"] = nn.ReLU()
            channels = width * times
        features[f"pool{block}"] = nn.MaxPool2d(2)
    return nn.Sequential(features)


def build_classifier(
    image: int, width: int, classes: int, dropout: float, *, pooled: bool
) -> nn.Sequential:
    """Build the classifier of `penstock.zoo.vgg.vgg`; with `pooled`, it begins with an adaptive
    average pooling.
    """
    side = POOLED_SIDE if pooled else image // 2 ** len(WIDTHS)
    classifier: OrderedDict[str, nn.Module] = OrderedDict()
    if pooled:
        classifier["avgpool"] = nn.AdaptiveAvgPool2d((POOLED_SIDE, POOLED_SIDE))
    classifier["flatten"] = nn.Flatten()
    std = 0.01 * math.sqrt(WIDTH / width)
    inputs = width * WIDTHS[-1] * side * side
    for index in (6, 7):
        classifier[f"fc{index}"] = NormalLinear(inputs, LINEAR * width, std=std)
        classifier[f"relu{index}"] = nn.ReLU()
        classifier[f"drop{index}"] = nn.Dropout(dropout)
        inputs = LINEAR * width
    classifier["fc8"] = NormalLinear(inputs, classes, std=std)
    return nn.Sequential(classifier)
