"""U-Net: results of its chain, values at its boundaries, and refusals."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from penstock.errors import SettingError
from penstock.tracing.traced_chain import chain
from penstock.zoo.catalogue import model


def small(**options):
    """A U-Net of a few numbers."""
    torch.manual_seed(0)
    return model("unet", **{"classes": 5, "image": 8, "width": 4, "levels": 2, **options})


def plain(network, x, *, per_pixel):
    """The paper's figure, with skips in variables."""

    def twice(body, value):
        return functional.relu(body.bn2(body.conv2(functional.relu(body.bn1(body.conv1(value))))))

    first = twice(network.down.level1.body, x)
    second = twice(network.down.level2.body, functional.max_pool2d(first, 2))
    value = twice(network.bottom.body, functional.max_pool2d(second, 2))
    value = twice(network.up.level2.body, torch.cat([second, network.up.level2.up(value)], dim=1))
    value = twice(network.up.level1.body, torch.cat([first, network.up.level1.up(value)], dim=1))
    scores = network.scores.conv(value)
    return scores if per_pixel else scores.mean(dim=(2, 3))


@pytest.mark.parametrize("per_pixel", [True, False])
def test_the_chain_computes_what_the_figure_draws(per_pixel):
    """Skips in dicts are the skips of the paper."""
    network, x = small(per_pixel=per_pixel), torch.randn(2, 3, 8, 8)
    sides = network(x)
    assert sides.shape == ((2, 5, 8, 8) if per_pixel else (2, 5))
    torch.testing.assert_close(sides, plain(network, x, per_pixel=per_pixel))


def test_a_skip_crosses_the_boundaries_between_its_ends_only():
    """Every boundary may be a cut, and its values are sent over the link."""
    value, boundary_keys = torch.randn(2, 3, 8, 8), []
    for layer in chain(small()).modules[:-1]:
        value = layer(value)
        boundary_keys.append(sorted(value))
    assert boundary_keys == [
        ["skip1", "x"],
        ["skip1", "skip2", "x"],
        ["skip1", "skip2", "x"],
        ["skip1", "x"],
        ["x"],
    ]


def test_layers_are_named_after_the_down_and_up_paths():
    """Plans and checkpoints name them."""
    names = [layer.name for layer in chain(model("unet", device="meta"))]
    assert names == [
        *(f"down.level{n}" for n in (1, 2, 3, 4)),
        "bottom",
        *(f"up.level{n}" for n in (4, 3, 2, 1)),
        "scores",
    ]


def test_images_that_cannot_be_halved_so_often_are_refused():
    """A skip of another size than what comes up beside it would fail in the middle of a run."""
    with pytest.raises(
        SettingError,
        match=r"unet takes image a multiple of 16, for 4 halvings, not 24: choose fewer levels",
    ):
        model("unet", image=24)
    with pytest.raises(SettingError, match=r"unet takes per_pixel=True or False, not 'yes'"):
        model("unet", per_pixel="yes")
