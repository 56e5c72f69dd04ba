"""A plain stack of linear layers: the smallest model, for trying things out."""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import TYPE_CHECKING

from penstock.zoo.catalogue import check_counts, register

if TYPE_CHECKING:
    from torch import nn


@register(
    "mlp",
    parameters=29_770,
    input="float (batch, features)",
    output="float (batch, classes)",
    source="Rumelhart, Hinton and Williams 1986, with ReLU for the sigmoid",
)
def mlp(
    *, features: int = 64, hidden: int = 64, layers: int = 8, classes: int = 10
) -> nn.Sequential:
    """Linear, ReLU, Linear, ..., Linear: `layers` linear maps in a chain of 2 x layers - 1.

    Layers are called `fc1`, `relu1`, ..., `fc<layers>`. With n = layers >= 2, h = hidden, the
    parameters are (features + 1) h + (n - 2) (h + 1) h + (h + 1) classes: 29,770 at the defaults.
    Initial weights are those of He et al. 2015 for ReLU, N(0, 2 / width): with torch's own default,
    eight layers lose the signal and the network learns nothing for epochs.

    Args:
        features: numbers per sample; the defaults fit the 8 x 8 digits of scikit-learn. Input:
            (batch, features).
        hidden: width of every layer but the last.
        layers: number of linear maps; 1 is linear regression.
        classes: outputs per sample. Output: (batch, classes).

    Raises:
        SettingError: an option is below 1.
    """
    check_counts("mlp", features=features, hidden=hidden, layers=layers, classes=classes)
    from torch import nn

    from penstock.zoo.blocks.layers import NormalLinear

    chain: OrderedDict[str, nn.Module] = OrderedDict()
    width = features
    for index in range(1, layers):
        chain[f"fc{index}"] = NormalLinear(width, hidden, std=math.sqrt(2 / width))
        chain[f"relu{index}"] = nn.ReLU()
        width = hidden
    chain[f"fc{layers}"] = NormalLinear(width, classes, std=math.sqrt(1 / width))
    return nn.Sequential(chain)
