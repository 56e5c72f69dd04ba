"""ResNet: blocks as layers, two stems, shapes."""

from __future__ import annotations

import pytest
import torch

from penstock.zoo.catalogue import model


@pytest.mark.parametrize(
    ("name", "blocks", "width"), [("resnet18", 8, 512), ("resnet50", 16, 2048)]
)
@pytest.mark.parametrize(("image", "side"), [(224, 7), (32, 4)])
def test_blocks_are_layers_and_end_in_the_papers_feature_map(name, blocks, width, image, side):
    """A skip connection inside a layer is the only one that no cut can sever."""
    network = model(name, device="meta", image=image, channels=1, classes=7)
    features = network.blocks(network.stem(torch.empty(2, 1, image, image, device="meta")))
    assert len(network.blocks) == blocks
    assert features.shape == (2, width, side, side)
    assert network.classifier(features).shape == (2, 7)


def test_only_the_stem_for_large_images_has_a_pool():
    """At 32 pixels a stem that divides the side by 4 would leave a last map of 1 x 1."""
    assert list(model("resnet18", device="meta").stem._modules) == [
        "conv1",
        "bn1",
        "relu1",
        "pool1",
    ]
    assert list(model("resnet18", device="meta", image=32).stem._modules) == [
        "conv1",
        "bn1",
        "relu1",
    ]


def test_blocks_are_named_after_the_papers_groups():
    """Table 1 of the paper is the map to read a cut by."""
    names = list(model("resnet50", device="meta").blocks._modules)
    assert names[:4] == ["conv2_1", "conv2_2", "conv2_3", "conv3_1"]
    assert names[-1] == "conv5_3"


def test_only_the_first_block_of_a_group_projects_its_skip():
    """Where shapes agree the skip is the input itself: no parameters, no work. ResNet-18's first
    group changes no shape.
    """
    blocks = model("resnet18", device="meta").blocks.named_children()
    assert [name for name, block in blocks if block.skip is not None] == [
        "conv3_1",
        "conv4_1",
        "conv5_1",
    ]


def test_resnet18_learns_a_batch_by_heart_in_a_few_steps():
    """Initial weights and skips let the gradient through."""
    torch.manual_seed(0)
    network = model("resnet18", image=32, classes=4)
    inputs, targets = torch.randn(4, 3, 32, 32), torch.arange(4)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
