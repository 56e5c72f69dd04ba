"""Counting without computing: bytes are those that measuring finds, operations those of the
formulas, and no memory is taken.
"""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

from penstock.errors import LayerFailed, SettingError
from penstock.measure.profiler import profile
from penstock.measure.work import work_counter as counting
from penstock.measure.work.work_counter import count
from penstock.tracing.traced_chain import chain
from penstock.zoo.catalogue import model
from penstock.zoo.gpt import gpt_loss

PHASES = ("forward", "backward", "input_grad", "weight_grad")
BYTES = (
    "name",
    "kind",
    "parameters",
    "parameter_bytes",
    "buffer_bytes",
    "output_bytes_per_sample",
    "entry_bytes_per_sample",
    "activation_bytes_per_sample",
)
SMALL = {
    "vgg11_bn": ({"image": 32, "width": 4, "classes": 5}, torch.zeros(4, 3, 32, 32)),
    "vgg11": (
        {"image": 32, "width": 4, "classes": 5, "head": "torchvision"},
        torch.zeros(4, 3, 32, 32),
    ),
    "resnet18": ({"image": 32, "classes": 5}, torch.zeros(4, 3, 32, 32)),
    "gpt": (
        {"layers": 2, "width": 16, "heads": 2, "tokens": 8, "vocabulary": 11, "dropout": 0.1},
        torch.zeros(4, 8, dtype=torch.int64),
    ),
    "mlp": ({}, torch.zeros(4, 64)),
    "gnmt": ({"layers": 4, "hidden": 8, "vocabulary": 11}, torch.zeros(4, 2, 5, dtype=torch.int64)),
}


def ops(works):
    """Names of the ops of a phase."""
    return [work.op for work in works]


@pytest.mark.parametrize("name", SMALL)
def test_counted_bytes_and_names_are_those_of_a_measured_profile(name):
    """A plan made for hardware that is elsewhere must fit the run here: same fingerprint, same
    bytes.
    """
    options, example = SMALL[name]
    network = model(name, **options)
    counted, measured = (
        count(network, example),
        profile(network, example, sizes=(len(example),), repeats=1, device="cpu"),
    )
    assert (counted.fingerprint, counted.batch) == (measured.fingerprint, measured.batch)
    assert measured.device == "cpu"
    assert counted.input_bytes_per_sample == measured.input_bytes_per_sample
    for ours, theirs in zip(counted, measured, strict=True):
        kept_inside = (
            BYTES[:-1] if "lstm" in ours.name else BYTES
        )  # oneDNN's workspace is its own affair
        assert [getattr(ours, key) for key in kept_inside] == [
            getattr(theirs, key) for key in kept_inside
        ]


def test_a_loss_counts_with_the_last_layer():
    """Of a large vocabulary it keeps more than all blocks; what leaves the model is still the
    model's.
    """
    options, example = SMALL["gpt"]
    network, settings = model("gpt", **options), {"loss": gpt_loss, "targets": example}
    plain, counted = count(network, example), count(network, example, **settings)
    measured = profile(network, example, sizes=(4,), repeats=1, device="cpu", **settings)
    for ours, theirs in zip(counted, measured, strict=True):
        assert [getattr(ours, key) for key in BYTES] == [getattr(theirs, key) for key in BYTES]
    assert (
        counted.layers[-1].activation_bytes_per_sample
        >= plain.layers[-1].activation_bytes_per_sample + 8 * 11 * 4
    )
    assert counted.layers[-1].launches("backward") > plain.layers[-1].launches("backward")
    assert counted.layers[:-1] == plain.layers[:-1]


def test_a_linear_map_is_three_products_and_the_bytes_of_their_operands():
    """2 x in x out operations a sample; weights are read whatever the batch."""
    counted = count(nn.Sequential(nn.ReLU(), nn.Linear(8, 6)), torch.zeros(4, 8))
    (forward,) = counted.layers[1].forward
    assert (forward.op, forward.family, forward.launches) == ("addmm", "matrix", 1)
    assert (forward.flops, forward.flops_per_sample) == (0, 2 * 8 * 6)
    assert (forward.bytes, forward.bytes_per_sample) == (4 * (8 * 6 + 6), 4 * (8 + 6))
    assert counted.layers[1].flops("backward", 1) == pytest.approx(2 * 2 * 8 * 6, rel=0.1)
    assert ops(counted.layers[1].input_grad) == ["mm"]
    assert "mm" in ops(counted.layers[1].weight_grad)


def test_a_convolution_is_counted_kernel_by_kernel():
    """Gradients of input and weight are as many operations each as the forward; the bias goes over
    the output again.
    """
    counted = count(
        nn.Sequential(nn.ReLU(), nn.Conv2d(3, 5, 3, padding=1)), torch.zeros(2, 3, 8, 8)
    )
    layer = counted.layers[1]
    assert ops(layer.forward) == ["convolution", "bias"]
    assert ops(layer.backward) == [
        "convolution_backward_input",
        "convolution_backward_weight",
        "bias_backward",
    ]
    products = 2 * 5 * 3 * 9 * 64
    assert [work.flops_per_sample for work in (layer.forward[0], *layer.backward[:2])] == [
        products
    ] * 3
    assert layer.forward[1].bytes_per_sample == 2 * 4 * 5 * 64
    assert ops(layer.input_grad) == ["convolution_backward_input"]


@pytest.mark.parametrize("side", [1, 7, 14])
def test_adaptive_pooling_reads_its_input_and_writes_its_output(side):
    """One operation per number of the result and one pass over memory in either direction, also
    where the map becomes larger.
    """
    inputs, outputs = 8 * side * side, 8 * 7 * 7
    network = nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d((7, 7)))
    layer = count(network, torch.zeros(2, 8, side, side)).layers[1]
    (forward,) = layer.forward
    assert (forward.op, forward.family, forward.launches) == ("_adaptive_avg_pool2d", "other", 1)
    assert forward.flops_per_sample == outputs
    assert forward.bytes_per_sample == 4 * (inputs + outputs)
    assert layer.flops("backward", 1) == inputs
    assert "_adaptive_avg_pool2d_backward" in ops(layer.input_grad)
    assert layer.weight_grad == ()
    assert layer.parameters == 0


def test_the_torchvision_head_takes_time_and_memory_in_a_roofline_profile():
    """VGG-19 on CIFAR-100, as in the study: the pooled map is 49 times the features."""
    options = {"image": 32, "classes": 100, "head": "torchvision"}
    network = model("vgg19", device="meta", **options)
    counted = count(network, torch.zeros(2, 3, 32, 32, device="meta"), 128)
    pooling = next(layer for layer in counted if layer.name.endswith("avgpool"))
    assert pooling.output_bytes_per_sample == 4 * 512 * 49
    assert sum(layer.parameters for layer in counted) == 139_979_940


@pytest.mark.parametrize(
    ("layer", "family"),
    [
        (nn.Conv2d(4, 4, 3), "convolution_3x3"),
        (nn.Conv2d(4, 4, 3, stride=2), "convolution"),
        (nn.Conv2d(4, 4, 1), "convolution"),
        (nn.Conv2d(4, 4, 3, dilation=2), "convolution"),
        (nn.Conv2d(4, 4, 3, groups=4), "grouped_convolution"),
    ],
)
def test_convolutions_are_told_apart_by_what_can_be_done_about_them(layer, family):
    """Winograd's way is for 3 x 3 of stride 1; groups leave nothing to fill a device with."""
    counted = count(nn.Sequential(nn.ReLU(), layer), torch.zeros(2, 4, 9, 9))
    assert counted.layers[1].forward[0].family == family
    assert {work.family for work in counted.layers[1].backward if work.op != "bias_backward"} == {
        family
    }


def test_attention_is_two_products_forward_and_five_backward():
    """As torch's own counter says; on the CPU the fused kernel has a name that it does not know."""
    counted = count(
        model("gpt", layers=1, width=16, heads=2, tokens=8, vocabulary=11),
        torch.zeros(2, 8, dtype=torch.int64),
    )
    block = counted.layers[1]
    (forward,) = [work for work in block.forward if work.family == "attention"]
    (backward,) = [work for work in block.backward if work.family == "attention"]
    assert forward.flops_per_sample == 2 * 2 * 8 * 8 * 16
    assert backward.flops_per_sample == 5 * 2 * 8 * 8 * 16


def test_a_recurrent_layer_launches_once_for_every_step():
    """That is what a small batch pays for."""
    counted = count(
        model("gnmt", layers=4, hidden=8, vocabulary=11), torch.zeros(2, 2, 5, dtype=torch.int64)
    )
    (forward,) = [work for work in counted.layers[2].forward if work.family == "recurrent"]
    assert (forward.launches, forward.flops_per_sample) == (5, 2 * 5 * 4 * 8 * (16 + 8))
    assert counted.layers[2].activation_bytes_per_sample > 5 * 6 * 8 * 4


def test_views_launch_nothing_and_look_ups_read_no_more_than_they_return():
    """A flatten is free, and an embedding does not read its table."""
    counted = count(
        nn.Sequential(nn.Embedding(1000, 4), nn.Flatten()), torch.zeros(2, 3, dtype=torch.int64)
    )
    assert counted.layers[1].forward == counted.layers[1].backward == ()
    (look_up,) = counted.layers[0].forward
    assert (look_up.bytes, look_up.bytes_per_sample) == (0, 3 * 8 + 2 * 3 * 4 * 4)
    assert sum(work.bytes_at(1) for work in counted.layers[0].backward) >= 1000 * 4 * 4
    assert (counted.input_bytes_per_sample, counted.float_input_bytes_per_sample) == (24, 0)


def test_the_first_layer_of_a_chain_needs_no_input_gradient():
    """As a measured profile has it."""
    counted = count(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.zeros(2, 4))
    assert counted.layers[0].input_grad == ()
    assert counted.layers[1].input_grad != ()


def test_a_model_of_175_billion_parameters_is_counted_without_memory():
    """GPT-3 by the usual formula: 24 b t w² (1 + t / 6w) operations a block forward, 6 n (and the
    head) in all.
    """
    width, tokens = 12_288, 2048
    network = model(
        "gpt", device="meta", layers=96, width=width, heads=96, tokens=tokens, vocabulary=50_257
    )
    counted = count(network, torch.empty(1, tokens, dtype=torch.int64, device="meta"), 1536)
    assert counted.parameters == pytest.approx(175e9, rel=0.01)
    assert counted.flops("forward", 1) == pytest.approx(
        96 * 24 * tokens * width**2 * (1 + tokens / (6 * width)) + 2 * tokens * width * 50_257,
        rel=0.01,
    )
    assert counted.flops("backward", 1) == pytest.approx(2 * counted.flops("forward", 1), rel=0.02)
    assert counted.layers[1].forward == counted.layers[90].forward


@pytest.mark.parametrize(
    ("name", "forward"), [("vgg16", 30.96e9), ("resnet50", 8.2e9), ("vgg19", 39.3e9)]
)
def test_image_models_have_the_published_numbers_of_operations(name, forward):
    """Twice the multiply-adds of torchvision's tables: 15.47, 4.09 and 19.63 billion."""
    counted = count(model(name, device="meta"), torch.empty(1, 3, 224, 224, device="meta"))
    assert counted.flops("forward", 1) == pytest.approx(forward, rel=0.01)


def test_like_layers_are_counted_once_and_unlike_ones_apart(monkeypatch):
    """A hundred blocks take the time of two; one with a flag of its own is another layer."""

    class Scaled(nn.Module):
        def __init__(self, times):
            super().__init__()
            self.times = times

        def forward(self, x):
            for _ in range(self.times):
                x = x * 2
            return x

    calls = []
    real = counting._count_layer
    monkeypatch.setattr(
        counting,
        "_count_layer",
        lambda module, value, *, inner: calls.append(module) or real(module, value, inner=inner),
    )
    counted = count(
        nn.Sequential(nn.ReLU(), *(Scaled(1 + i % 2) for i in range(10))), torch.zeros(2, 3)
    )
    assert len(calls) == 2 * 3
    assert [layer.launches("forward") for layer in counted][1:] == [1, 2] * 5


def test_shared_weights_count_at_their_first_layer_and_stay_shared():
    """As everywhere else; and a layer with one weight twice is not like one with two."""
    tied, untied = nn.Linear(3, 3), nn.Linear(3, 3)
    counted = count(nn.Sequential(tied, nn.ReLU(), tied, untied), torch.zeros(2, 3))
    assert [layer.parameters for layer in counted] == [12, 0, 0, 12]


def test_the_model_and_torchs_random_numbers_are_left_alone():
    """Counting is looking."""
    network = nn.Sequential(
        OrderedDict(fc=nn.Linear(4, 4), bn=nn.BatchNorm1d(4), drop=nn.Dropout(0.5))
    ).eval()
    before, state = copy.deepcopy(network.state_dict()), torch.get_rng_state()
    count(network, torch.zeros(2, 4))
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())
    assert not any(module.training for module in network.modules())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_layer_that_takes_another_way_for_another_size_is_added_up_by_op():
    """Its line is then one of sums, and nothing is lost."""

    class Fickle(nn.Module):
        def forward(self, x):
            return (x * 2).sin() if len(x) > 2 else x * 2

    works = count(nn.Sequential(nn.ReLU(), Fickle()), torch.zeros(2, 3)).layers[1].forward
    assert {work.op: work.bytes_at(4) for work in works} == {"mul": 96, "sin": 96}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_that_are_no_parameters_dicts_and_whole_numbers_go_through(device):
    """A layer may hold a plain tensor, return a dict, and hand on what has no gradient."""

    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = torch.ones(3, device=device)

        def forward(self, x):
            return {"x": x + self.shift, "best": x.argmax(-1)}

    class Best(nn.Module):
        def forward(self, state):
            return state["best"]

    counted = count(
        nn.Sequential(nn.Linear(3, 3, device=device), Shifted(), Best()), torch.zeros(2, 3)
    )
    assert [layer.output_bytes_per_sample for layer in counted] == [12, 20, 8]
    assert ops(counted.layers[1].forward) == ["add", "argmax"]
    assert counted.layers[2].backward == ()


def test_a_layer_that_looks_at_values_is_named():
    """There are no values to look at."""

    class Curious(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum().item() > 0 else x

    with pytest.raises(LayerFailed, match="layer curious failed on the example"):
        count(nn.Sequential(OrderedDict(relu=nn.ReLU(), curious=Curious())), torch.zeros(2, 3))


def test_a_chain_may_be_given_and_an_example_without_samples_may_not():
    """As for measuring."""
    assert len(count(chain(nn.Sequential(nn.ReLU())), torch.zeros(2, 3), 7)) == 1
    with pytest.raises(SettingError, match="at least one sample"):
        count(nn.Sequential(nn.ReLU()), torch.zeros(0, 3))
    with pytest.raises(SettingError, match="batch 0 must be 1 or more"):
        count(nn.Sequential(nn.ReLU()), torch.zeros(2, 3), 0)
