"""VGG: names, sizes for small images, and that its initial weights can learn."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from penstock.errors import SettingError
from penstock.zoo.catalogue import model


def parameter_count(network: nn.Module) -> int:
    """Numbers in all parameters."""
    return sum(parameter.numel() for parameter in network.parameters())


def test_vgg19_for_small_images_and_100_classes_has_the_count_of_the_literature():
    """docs/literature/vgg-19-profile.md: a first linear map of 512 instead of 25,088 inputs."""
    assert parameter_count(model("vgg19", device="meta", image=32, classes=100)) == 39_316_644


@pytest.mark.parametrize(("image", "parameters"), [(32, 139_979_940), (224, 139_979_940)])
def test_torchvision_head_has_the_parameters_of_torchvisions_vgg19(image, parameters):
    """Its pooling returns 7 x 7 whatever the image, so that CIFAR-100 is learned by the model that
    "A Study of Pipeline Parallelism in Deep Neural Networks" calls one of 138,000,000 parameters.
    """
    network = model("vgg19", device="meta", image=image, classes=100, head="torchvision")
    assert parameter_count(network) == parameters
    assert [type(layer) for layer in network.classifier] == [
        nn.AdaptiveAvgPool2d,
        nn.Flatten,
        type(network.classifier.fc6),
        nn.ReLU,
        nn.Dropout,
        type(network.classifier.fc7),
        nn.ReLU,
        nn.Dropout,
        type(network.classifier.fc8),
    ]


def test_both_heads_are_one_model_at_224_pixels():
    """The last feature map is 7 x 7 already: same weights by name, same logits."""
    torch.manual_seed(0)
    compact = model("vgg11", classes=3, width=1, dropout=0.0)
    pooled = model("vgg11", classes=3, width=1, dropout=0.0, head="torchvision")
    pooled.load_state_dict(compact.state_dict())
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(pooled(images), compact(images))


def test_torchvision_head_scales_with_the_width():
    """An eighth of the channels everywhere: 64 channels of 7 x 7 into 512 outputs."""
    classifier = model("vgg11", device="meta", image=32, width=8, head="torchvision").classifier
    shapes = [tuple(classifier.get_submodule(f"fc{index}").weight.shape) for index in (6, 7, 8)]
    assert shapes == [(512, 64 * 7 * 7), (512, 512), (1000, 512)]


@pytest.mark.parametrize("head", ["Compact", "", None, 7])
def test_unknown_head_is_refused_with_the_existing_ones(head):
    """A misspelt head would silently be the other model."""
    with pytest.raises(
        SettingError, match=rf"^vgg19 takes head of 'compact' or 'torchvision', not {head!r}$"
    ):
        model("vgg19", device="meta", head=head)


def test_vgg11_layers_have_the_names_of_the_papers_models():
    """Cuts are spoken of by these names."""
    network = model("vgg11", device="meta")
    assert list(network.features._modules)[:6] == [
        "conv1_1",
        "relu1_1",
        "pool1",
        "conv2_1",
        "relu2_1",
        "pool2",
    ]
    assert list(network.classifier._modules) == [
        "flatten",
        "fc6",
        "relu6",
        "drop6",
        "fc7",
        "relu7",
        "drop7",
        "fc8",
    ]
    assert "features.conv5_2.weight" in network.state_dict()


def test_batch_norm_is_between_convolution_and_relu():
    """Another order would be another model with the same parameter count."""
    names = list(model("vgg11_bn", device="meta").features._modules)
    assert names[:4] == ["conv1_1", "bn1_1", "relu1_1", "pool1"]


@pytest.mark.parametrize(
    ("name", "layers"),
    [("vgg11", 29), ("vgg13", 33), ("vgg16", 39), ("vgg19", 45), ("vgg16_bn", 52)],
)
def test_every_operation_is_a_separate_layer(name, layers):
    """The finer the layers, the more even the cuts; dropout 0 keeps the count, so that one plan
    fits both.
    """
    for dropout in (0.5, 0.0):
        network = model(name, device="meta", dropout=dropout)
        assert len(network.features) + len(network.classifier) == layers


def test_full_size_image_runs_through_all_shapes():
    """The first linear map fits the last feature map; on meta, so that nothing is computed."""
    network = model("vgg16", device="meta", channels=1, classes=7)
    features = network.features(torch.empty(2, 1, 224, 224, device="meta"))
    assert features.shape == (2, 512, 7, 7)
    assert network.classifier(features).shape == (2, 7)


@pytest.mark.parametrize(("name", "steps"), [("vgg11_bn", 5), ("vgg11", 20)])
def test_vgg11_at_32_pixels_learns_more_than_its_last_bias(name, steps):
    """Four samples of four classes: without a signal from the image, no weights reach a loss below
    ln 4.

    The plain net starts with logits near 0 and takes a dozen steps to leave the plateau; with
    torch's default weights it stays.
    """
    torch.manual_seed(0)
    network = model(name, image=32, classes=4, dropout=0.0)
    inputs, targets = torch.randn(4, 3, 32, 32), torch.arange(4)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(4), abs=0.05)
    assert min(losses) < 0.9 * math.log(4)
