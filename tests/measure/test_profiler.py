"""Measuring a model: what is counted is exact, what is timed is there, and nothing of the user's is
touched. No test looks at a clock.
"""

from __future__ import annotations

import copy
from collections import OrderedDict

import pytest
import torch
from tests.measure.profiled import perceptron, quick, saved_bytes
from torch import nn

from penstock.errors import LayerFailed, SettingError
from penstock.measure import timed_passes as passes
from penstock.measure.analytic import analytic
from penstock.measure.profiler import profile
from penstock.profile.profile import Profile, check_timing
from penstock.tracing.traced_chain import chain
from penstock.zoo.catalogue import model

PHASES = ("forward", "backward", "input_grad", "weight_grad")

#: What layers of `Watched` saw: their label, their input, the number of threads. Copies of a module
#: share it.
SEEN: list[tuple[str, object, int]] = []


@pytest.fixture(autouse=True)
def nothing_seen():
    """Every test looks at its own layers."""
    SEEN.clear()


class Watched(nn.Module):
    """The identity, with a note of what came in."""

    def __init__(self, label):
        super().__init__()
        self.label = label

    def forward(self, x):
        """Note and return x."""
        SEEN.append(
            (
                self.label,
                copy.deepcopy(torch.utils._pytree.tree_map(torch.Tensor.detach, x)),
                torch.get_num_threads(),
            )
        )
        return x


@pytest.fixture
def split_inputs(monkeypatch):
    """How many inputs the backward in parts was asked for gradients of, call by call."""
    requests: list[int] = []
    real = passes.input_grad

    def spy(outputs, output_grads, inputs):
        requests.append(len(inputs))
        return real(outputs, output_grads, inputs)

    monkeypatch.setattr(passes, "input_grad", spy)
    return requests


# -- what is counted
# ------------------------------------------------------------------------------------------------------


def test_names_kinds_and_counts_are_those_of_the_layers():
    """Planners add these up; bytes are exact, not estimates."""
    measured = quick(perceptron(), torch.ones(3, 4), sizes=(2, 6), batch=12)
    assert [layer.name for layer in measured] == ["fc1", "relu", "drop", "fc2"]
    assert [layer.kind for layer in measured] == ["Linear", "ReLU", "Dropout", "Linear"]
    assert [layer.parameters for layer in measured] == [40, 0, 0, 16]
    assert [layer.parameter_bytes for layer in measured] == [160, 0, 0, 64]
    assert [layer.output_bytes_per_sample for layer in measured] == [32, 32, 32, 8]
    assert (measured.input_bytes_per_sample, measured.batch, measured.sizes) == (16, 12, (2, 6))
    assert measured.fingerprint == chain(perceptron()).fingerprint
    assert measured.torch_version == torch.__version__
    assert measured.machine["device"].startswith("cpu: ")
    assert measured.update_fixed_s > 0
    assert measured.update_s_per_byte >= 0
    assert measured.accumulate_s_per_byte > 0


def test_every_phase_has_a_time_and_a_spread_at_every_size():
    """Also those that do nothing: a ReLU has no weight gradient, and takes its some microseconds to
    find out.
    """
    measured = quick(perceptron(), torch.ones(3, 4), sizes=(6, 2, 2), repeats=3)
    for layer in measured:
        for phase in PHASES:
            timing = getattr(layer, phase)
            check_timing(timing, layer.name)
            assert timing.sizes == (2, 6)
            assert len(timing.spread_s) == 2
            assert min(timing.spread_s) >= 0
    assert all(seconds > 0 for seconds in measured.seconds("forward", 4))


def test_a_parameter_that_two_layers_use_is_counted_at_the_first():
    """Its memory is there once; the activations of both uses are two."""
    shared = nn.Linear(4, 4)
    head = nn.Linear(4, 4)
    head.weight = shared.weight
    measured = quick(nn.Sequential(shared, nn.Tanh(), shared, head), torch.ones(2, 4))
    assert [layer.parameters for layer in measured] == [20, 0, 0, 4]
    assert [layer.parameter_bytes for layer in measured] == [80, 0, 0, 16]
    assert saved_bytes(measured) == [16, 16, 0, 16]


def test_buffers_are_counted_apart_from_parameters():
    """They take memory, and no optimizer state."""
    measured = quick(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), torch.ones(2, 4))
    assert [layer.buffer_bytes for layer in measured] == [0, 6 * 4 + 6 * 4 + 8]
    assert [layer.parameter_bytes for layer in measured] == [120, 48]


# -- how it is measured
# ---------------------------------------------------------------------------------------------------


def test_sizes_are_a_batch_in_1_4_and_16_parts_and_a_single_sample():
    """All that plans may use; a batch is as large as the example unless said."""
    network = nn.Sequential(nn.Tanh())
    assert quick(network, torch.ones(2, 4), sizes=None, batch=32).sizes == (1, 2, 8, 32)
    measured = quick(network, torch.ones(3, 4), sizes=None)
    assert (measured.sizes, measured.batch) == ((1, 2, 3), 3)


def test_a_model_that_takes_no_single_sample_is_measured_from_two_on():
    """Batch norm over one value has nothing to normalise, and torch refuses it."""
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert quick(network, torch.ones(2, 4), sizes=None, batch=32).sizes == (2, 8, 32)
    with pytest.raises(LayerFailed, match="layer 1 failed on the example"):
        quick(network, torch.ones(2, 4), sizes=(1, 2))


def test_an_example_is_repeated_or_cut_to_the_size():
    """Two samples are enough to measure a batch of five hundred."""
    quick(nn.Sequential(Watched("x")), torch.tensor([[1.0], [2.0]]), sizes=(1, 5))
    assert {tuple(value.flatten().tolist()) for _, value, _ in SEEN} == {(1,), (1, 2, 1, 2, 1)}


def test_the_first_layer_is_not_asked_for_an_input_gradient_and_all_others_are(split_inputs):
    """Data needs no gradient; elsewhere the backward would seem cheaper than it is."""
    quick(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)), torch.ones(2, 4))
    assert split_inputs == [1, 1, 0] * (
        len(split_inputs) // 3
    )  # from the last layer to the first, pass by pass


class Add(nn.Module):
    """Works in place on what it is given, and says so nowhere."""

    def forward(self, x):
        """Add 1."""
        return x.add_(1)


class Block(nn.Sequential):
    """One layer of several, as blocks of convolutions usually are."""

    def forward(self, x):
        """Run the parts."""
        return super().forward(x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.ReLU(inplace=True),
        lambda: nn.Dropout(0.5, inplace=True),
        Add,
        lambda: Block(nn.Conv1d(1, 1, 1), nn.ReLU(inplace=True)),
        lambda: Block(Add(), nn.Conv1d(1, 1, 1)),
    ],
    ids=["ReLU", "dropout", "in silence", "inside a block", "at a block's beginning"],
)
def test_layers_that_work_in_place_are_measured_like_others(make, split_inputs):
    """Autograd forbids it on a leaf; their input gradients, of whole blocks even, were once left
    out of the backward.
    """
    measured = quick(nn.Sequential(nn.Linear(4, 4), make(), nn.Linear(4, 4)), torch.ones(2, 1, 4))
    assert split_inputs == [1, 1, 0] * (
        len(split_inputs) // 3
    )  # from the last layer to the first, pass by pass
    assert len(measured) == 3
    quick(nn.Sequential(make(), nn.Linear(4, 4)), torch.ones(2, 1, 4))


def test_a_layer_that_works_in_place_gets_the_same_input_every_time():
    """Repeats that fed on their own results would soon measure infinities, or zeros that are
    faster.
    """
    quick(
        nn.Sequential(nn.Linear(2, 2), Watched("given"), Add(), Watched("made")),
        torch.ones(2, 2),
        repeats=4,
    )
    inputs, outputs = (
        [value for label, value, _ in SEEN if label == which] for which in ("given", "made")
    )
    assert all(torch.equal(value, inputs[0]) for value in inputs)
    assert all(torch.equal(value, inputs[0] + 1) for value in outputs)


class Fork(nn.Module):
    """One tensor to nested ones: floats, tokens, nothing, a number."""

    def forward(self, x):
        """Nest."""
        return {"pair": (x, [x.exp()]), "order": torch.arange(len(x)), "none": None, "scale": 2}


class Merge(nn.Module):
    """Nested tensors to one."""

    def forward(self, value):
        """Add what is there."""
        first, (second,) = value["pair"]
        return (first + second)[value["order"]] * value["scale"]


def test_boundaries_of_nested_tensors_are_counted_and_measured_whole(split_inputs):
    """Skips and masks travel beside activations, and all of them cost."""
    measured = quick(nn.Sequential(nn.Linear(4, 4), Fork(), Merge()), torch.ones(2, 4))
    assert [layer.output_bytes_per_sample for layer in measured] == [16, 16 + 16 + 8, 16]
    assert split_inputs == [2, 1, 0] * (len(split_inputs) // 3)


def test_examples_may_be_nested_too():
    """A model's input may be tokens and a mask."""

    class Masked(nn.Module):
        def forward(self, value):
            tokens, mask = value["tokens"], value["mask"]
            return tokens.float() * mask

    measured = quick(
        nn.Sequential(Masked(), nn.Linear(3, 1)),
        {"tokens": torch.ones(2, 3, dtype=torch.int64), "mask": torch.ones(2, 3) > 0},
    )
    assert measured.input_bytes_per_sample == 3 * 8 + 3
    assert saved_bytes(measured) == [0, 12]


def test_a_model_of_tokens_is_measured_from_end_to_end(split_inputs):
    """GPT's input is integers, its first layer a table."""
    options = {"layers": 1, "width": 8, "heads": 2, "tokens": 4, "vocabulary": 11, "dropout": 0.1}
    measured = quick(model("gpt", device="meta", **options), torch.randint(0, 11, (2, 4)))
    assert [layer.name for layer in measured] == ["embedding", "blocks.0", "norm", "head"]
    assert [layer.output_bytes_per_sample for layer in measured] == [4 * 8 * 4] * 3 + [4 * 11 * 4]
    assert measured.input_bytes_per_sample == 32
    assert measured.layers[0].activation_bytes_per_sample > 0
    assert split_inputs[:4] == [1, 1, 1, 0]


@pytest.mark.parametrize(
    "make",
    [perceptron, lambda: model("resnet18", device="meta", image=32, classes=3)],
    ids=["real", "meta"],
)
def test_the_model_is_left_as_it_was(make):
    """A half-trained model is measured, and training continues; also in evaluation mode, and with
    gradients in it.
    """
    network = make().eval()
    if not next(network.parameters()).is_meta:
        network(torch.ones(1, 4)).sum().backward()
    tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    before = {
        name: (tensor, tensor._version, None if tensor.grad is None else tensor.grad.clone())
        for name, tensor in tensors.items()
    }
    values = {name: tensor.clone() for name, tensor in tensors.items()}
    quick(
        network,
        torch.ones(2, 4) if "fc1" in dict(network.named_children()) else torch.ones(2, 3, 32, 32),
    )
    for name, tensor in {
        **dict(network.named_parameters()),
        **dict(network.named_buffers()),
    }.items():
        same, version, grad = before[name]
        assert tensor is same
        assert tensor._version == version
        assert tensor.is_meta or torch.equal(tensor, values[name])
        assert (tensor.grad is None and grad is None) or torch.equal(tensor.grad, grad)
    assert not any(module.training for module in network.modules())


def test_dropouts_that_are_measured_leave_the_users_random_numbers_unchanged():
    """A data loader behind a measurement must shuffle as without one."""
    network = perceptron()
    state = torch.get_rng_state()
    quick(network, torch.ones(2, 4))
    assert torch.equal(torch.get_rng_state(), state)


def test_layers_are_measured_in_training_mode_with_gradients_whatever_the_caller_does():
    """In evaluation a dropout is free and keeps nothing; that is not what training costs."""
    with torch.no_grad():
        measured = quick(perceptron().eval(), torch.ones(2, 4))
    assert saved_bytes(measured) == [16, 32, 32, 32]


def test_progress_is_reported_after_every_pass():
    """A bar that knows how much there is to do."""
    calls = []
    quick(
        perceptron(),
        torch.ones(2, 4),
        sizes=(1, 2),
        progress=lambda done, total, name: calls.append((done, total, name)),
    )
    names = ["micro-batches of 1", "micro-batches of 2"]
    assert calls == [(done, 6, names[(done - 1) % 2]) for done in range(1, 7)]


def test_threads_are_as_told_and_afterwards_as_before():
    """Ranks share a machine's cores; a profile taken with all of them would promise too much."""
    measured = quick(nn.Sequential(Watched("x")), torch.ones(2, 4), threads=2)
    assert {threads for *_, threads in SEEN} == {2}
    assert measured.machine["threads"] == "2"
    assert torch.get_num_threads() == 1
    assert quick(nn.Sequential(Watched("x")), torch.ones(2, 4)).machine["threads"] == "1"


def test_a_layer_that_fails_is_named_and_all_is_put_back():
    """`mat1 and mat2 shapes cannot be multiplied` is said by any of fifty linear maps."""
    network = nn.Sequential(
        OrderedDict(
            first=nn.Linear(4, 8),
            body=nn.Sequential(OrderedDict(drop=nn.Dropout(), second=nn.Linear(9, 2))),
        )
    )
    state = torch.get_rng_state()
    with pytest.raises(
        LayerFailed,
        match=r"^layer body\.second failed on the example: RuntimeError: mat1 and mat2 shapes",
    ) as caught:
        quick(network, torch.ones(2, 4), threads=2)
    assert caught.value.layer == "body.second"
    assert torch.get_num_threads() == 1
    assert torch.equal(torch.get_rng_state(), state)


def test_a_measured_profile_comes_back_from_its_file_as_it_was(tmp_path):
    """With all the digits of the times, and whatever this machine is called."""
    measured = quick(perceptron(), torch.ones(3, 4), sizes=(1, 3), repeats=2)
    measured.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == measured


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 0}, r"^batch 0, sizes \[2\], repeats 1 and threads None must be 1 or more$"),
        ({"batch": -3, "sizes": None}, r"^batch -3, sizes "),
        ({"sizes": (0, 2)}, r"^batch 2, sizes \[0, 2\], repeats 1"),
        ({"repeats": 0}, r"repeats 0 and threads None must be 1 or more$"),
        ({"threads": 0}, r"repeats 1 and threads 0 must be 1 or more$"),
    ],
)
def test_settings_below_1_are_refused(settings, message):
    """0 once passed for 'as many as the example has'."""
    with pytest.raises(SettingError, match=message):
        quick(perceptron(), torch.ones(2, 4), **settings)


@pytest.mark.parametrize(
    "example",
    [torch.ones(0, 4), torch.tensor(3.0), [1, 2], {}, (torch.ones(2, 4), torch.tensor(1))],
)
def test_an_example_without_samples_is_refused(example):
    """There is nothing to repeat."""
    with pytest.raises(
        SettingError,
        match=r"^the example must be tensors with at least one sample in their first dimension$",
    ):
        quick(perceptron(), example)


class Skipping(nn.Module):
    """A skip over two layers, and a mask computed from the inputs, which is not sent."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x, mask):
        inner = self.first(x)
        return self.third(self.second(torch.relu(inner)).masked_fill(mask, 0.0) + inner)


def test_a_traced_model_is_measured_and_counted_by_what_crosses_its_boundaries():
    """Planner and runtime must mean the same bytes: two values of 6 numbers cross the first
    boundary, one the second, and no mask.
    """
    inputs = torch.randn(4, 4), torch.zeros(4, 1, dtype=torch.bool)
    traced = chain(Skipping(), inputs)
    measured = profile(traced, inputs, sizes=[2, 4], repeats=1)
    counted = analytic(traced, inputs, "V100")
    for result in (measured, counted):
        assert [layer.name for layer in result.layers] == ["first", "second", "third"]
        assert [layer.output_bytes_per_sample for layer in result.layers] == [24.0, 24.0, 8.0]
        assert [layer.parameters for layer in result.layers] == [30, 42, 14]
        assert result.fingerprint == traced.fingerprint
    value = inputs
    for index, module in enumerate(traced.modules[:-1]):
        value = module(value)
        crossing = traced.exits[index](value)
        assert (
            sum(tensor.nbytes for tensor in crossing.values())
            == 4 * measured.layers[index].output_bytes_per_sample
        )
