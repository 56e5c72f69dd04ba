"""GNMT: the values between layers, and the number of parameters per layer."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import SettingError
from penstock.tracing.materialise import materialise
from penstock.tracing.traced_chain import chain
from penstock.zoo.catalogue import model

#: Bytes of parameters in PipeDream's profile of GNMT-8
#: (profiler/translation/profiles/gnmt/graph.txt), in the order of our layers.
PIPEDREAM = [
    132_382_720,
    67_174_400,
    50_364_416,
    33_587_200,
    33_587_200,
    132_382_720,
    41_979_904,
    50_364_416,
    50_364_416,
    50_364_416,
    132_512_000,
]


def small(layers=6, **options):
    """A GNMT of a few numbers, in evaluation mode."""
    torch.manual_seed(0)
    return model("gnmt", **{"layers": layers, "hidden": 4, "vocabulary": 7, **options}).eval()


def test_every_layer_has_as_many_parameters_as_in_pipedreams_profile():
    """The cuts of the paper can be compared only if the layers are the same."""
    network = chain(model("gnmt", device="meta"))
    parameter_counts = [
        sum(network.description.tensor(name).bytes for name in layer.parameters)
        for layer in network
    ]
    assert parameter_counts == PIPEDREAM


def test_layers_are_named_and_counted_as_stated():
    """Half of the LSTM layers read, half write."""
    names = [layer.name for layer in chain(model("gnmt16", device="meta"))]
    assert names == [
        "source_embedding",
        *(f"encoder.lstm{i}" for i in range(1, 9)),
        "target_embedding",
        *(f"decoder.lstm{i}" for i in range(1, 9)),
        "classifier",
    ]


def test_boundaries_carry_only_values_that_later_layers_need():
    """Each boundary may be a cut, and what stands in it crosses the link."""
    network, tokens = small(), torch.randint(0, 7, (2, 2, 5))
    boundary_keys = []
    state = tokens
    for layer in chain(network).modules:
        state = layer(state)
        boundary_keys.append(
            {key: value.shape[-1] for key, value in state.items()}
            if isinstance(state, dict)
            else None
        )
    reads = [
        {"x": 4, "target": 5},
        {"x": 8, "target": 5},
        {"x": 4, "target": 5},
        {"x": 4, "target": 5},
    ]
    writes = [{"x": 4, "memory": 4}, {"x": 4, "context": 4}, {"x": 4, "context": 4}, {"x": 4}]
    assert boundary_keys == [*reads, *writes, None]


def test_a_target_token_is_predicted_without_later_tokens():
    """The decoder must not see the tokens that it predicts; it may read the whole source."""
    network, tokens = small(), torch.randint(0, 7, (3, 2, 5))
    changed = tokens.clone()
    changed[:, 1, 3] = (changed[:, 1, 3] + 1) % 7
    before, after = network(tokens), network(changed)
    assert torch.equal(before[:, :3], after[:, :3])
    assert not torch.equal(before[:, 3:], after[:, 3:])
    changed = tokens.clone()
    changed[:, 0, 4] = (changed[:, 0, 4] + 1) % 7
    assert not torch.equal(before[:, 0], network(changed)[:, 0])


def test_with_and_without_gradients_it_gives_the_same_bits():
    """Recompute runs the forward once in each mode; the two LSTM kernels of oneDNN differ in the
    last bit.
    """
    network, tokens = small(hidden=16).train(), torch.randint(0, 7, (3, 2, 5))
    for dropout in (module for module in network.modules() if isinstance(module, torch.nn.Dropout)):
        dropout.p = 0.0
    with torch.no_grad():
        plain = network(tokens)
    assert not plain.requires_grad
    assert torch.equal(plain, network(tokens))


def test_layers_from_the_meta_device_run_after_they_are_materialised():
    """An LSTM keeps a second list of its weights, which must be those that were made."""
    traced = chain(model("gnmt", device="meta", layers=4, hidden=4, vocabulary=7))
    value = torch.randint(0, 7, (2, 2, 3))
    for module in materialise(traced, range(len(traced)), torch.device("cpu"), seed=1):
        value = module(value)
    assert value.shape == (2, 3, 7)
    assert value.isfinite().all()


@pytest.mark.parametrize("layers", [2, 5])
def test_an_odd_or_too_small_number_of_layers_is_refused(layers):
    """Half of them read and half write, and the last that writes is not the one that attends."""
    with pytest.raises(
        SettingError, match=f"even number, half of them in the encoder.*not {layers}"
    ):
        small(layers=layers)


def test_tokens_that_are_no_pairs_are_refused():
    """A GPT's input would otherwise be read as a batch of something else."""
    with pytest.raises(SettingError, match=r"shape \(batch, 2, t\).*not \(4, 5\)"):
        small()(torch.zeros(4, 5, dtype=torch.int64))
