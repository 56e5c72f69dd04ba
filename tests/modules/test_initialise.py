"""Initial values of a traced model on the meta device: by its own methods, or an error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.errors import ChainError
from penstock.modules.initialise import initial_values
from penstock.tracing.materialise import materialise
from penstock.tracing.traced_chain import chain


class Angles(nn.Module):
    """A table computed by the constructor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x):
        return torch.arange(x.shape[0])[:, None] * self.table


class Model(nn.Module):
    """Initialises its weights by the methods of several libraries."""

    def __init__(self):
        super().__init__()
        self.angles, self.first, self.scale, self.norm = (
            Angles(),
            nn.Linear(4, 4),
            nn.Parameter(torch.ones(4)),
            nn.BatchNorm1d(4),
        )

    def forward(self, x):
        return self.norm(self.first(x + self.angles(x)) * self.scale)


class WithInitWeights(Model):
    """With `_init_weights`, the method of the transformers library."""

    def _init_weights(self, module):
        if isinstance(module, Angles):
            module.table.copy_(torch.arange(4.0))
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)
        if isinstance(module, WithInitWeights):
            nn.init.ones_(module.scale)


class Resetting(WithInitWeights):
    """With `reset_parameters`, torch's method, for its own tensors."""

    def _init_weights(self, module):
        if isinstance(module, Angles):
            module.table.copy_(torch.arange(4.0))

    def reset_parameters(self):
        nn.init.constant_(self.scale, 3.0)


def on_meta(kind):
    """Return a model without memory."""
    with torch.device("meta"):
        return kind()


def test_weights_are_initialised_by_reset_parameters_and_then_by_the_enclosing_model():
    """The constructor does both in this order; statistics begin as in batch norm."""
    inputs = torch.randn(3, 4)
    traced = chain(on_meta(WithInitWeights), inputs)
    layers = materialise(traced, range(len(traced)), torch.device("cpu"), seed=1)
    state = {name: value for layer in layers for name, value in layer.state_dict().items()}
    assert set(state) == set(WithInitWeights().state_dict())
    assert torch.equal(state["first.weight"], torch.full((4, 4), 0.5))
    assert torch.equal(state["scale"], torch.ones(4))
    assert torch.equal(state["norm.running_var"], torch.ones(4))
    assert state["first.bias"].abs().max() <= 0.5
    plain = WithInitWeights()
    plain.load_state_dict(state)
    value = inputs
    for layer in layers:
        value = layer(value)
    torch.testing.assert_close(value, plain(inputs))


def test_a_module_without_reset_parameters_is_initialised_by_the_enclosing_module():
    """For example a parameter of the model itself."""
    traced = chain(on_meta(Resetting), torch.randn(3, 4))
    layers = materialise(traced, range(len(traced)), torch.device("cpu"), seed=1)
    state = {name: value for layer in layers for name, value in layer.state_dict().items()}
    assert torch.equal(state["scale"], torch.full((4,), 3.0))


def test_a_tensor_that_nothing_gives_a_value_is_refused_by_name():
    """Training from uninitialised memory would give an arbitrary result."""
    traced = chain(on_meta(Model), torch.randn(3, 4))
    with pytest.raises(
        ChainError,
        match=r"scale \(Model\) is on the meta device, and neither reset_parameters\(\) of its module nor",
    ):
        materialise(traced, range(len(traced)), torch.device("cpu"), seed=1)


def test_a_table_that_only_the_constructor_computes_is_refused_by_name():
    """Every rank recomputes from it, and on the meta device it has no values."""

    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.angles, self.first = Angles(), nn.Linear(4, 4)

        def forward(self, x):
            return self.first(x + self.angles(x))

    traced = chain(on_meta(Alone), torch.randn(3, 4))
    layer = materialise(traced, [0], torch.device("cpu"), seed=1)[0]
    with pytest.raises(ChainError, match=r"angles\.table \(Angles\) is on the meta device"):
        layer(torch.randn(3, 4))


class Calls(list):
    """A list that a copied model shares with its original."""

    def __deepcopy__(self, memo):
        return self


class Log(nn.Module):
    """A module that records its resets, with tensors of several dtypes."""

    def __init__(self, name, calls, *, dtypes=(torch.float32,), inner=None):
        super().__init__()
        self.name, self.calls = name, calls
        for number, dtype in enumerate(dtypes):
            self.register_buffer(f"buffer{number}", torch.zeros(2, dtype=dtype))
        if inner is not None:
            self.inner = inner

    def reset_parameters(self):
        """Set all own buffers to one."""
        self.calls.append(f"reset {self.name}")
        for buffer in self._buffers.values():
            buffer.fill_(1)


class LogAround(Log):
    """A model that initialises its modules after their resets."""

    def _init_weights(self, module):
        self.calls.append(f"init {module.name}")


def values_of(model, *names, aliases=()):
    """Return the initial values of some tensors of a model by their names, one name each."""
    meta_tensors = {name: model.state_dict(keep_vars=True)[name] for name in names}
    all_names = {**dict.fromkeys(names), **dict(aliases)}
    first_names = {name: first or name for name, first in all_names.items()}
    return initial_values(model, first_names, meta_tensors, torch.device("cpu"))


def test_without_tensors_nothing_runs():
    """A stage may have layers without any; its model is not copied for them."""
    calls = Calls()
    assert values_of(on_meta(lambda: LogAround("a", calls))) == {}
    assert calls == []


def test_resets_run_before_the_model_initialises_each_from_the_inside_to_the_outside():
    """Each method once, and only those of modules with, or around, a requested tensor."""
    calls = Calls()

    def build():
        inner = LogAround("inner", calls, inner=Log("leaf", calls))
        model = LogAround("model", calls, inner=inner)
        model.other = Log("other", calls)
        return model

    values = values_of(on_meta(build), "inner.inner.buffer0", "buffer0")
    assert list(values) == ["inner.inner.buffer0", "buffer0"]
    assert calls == [
        "reset leaf",
        "reset model",
        "init leaf",
        "init inner",
        "init model",
    ]
    calls.clear()
    values_of(on_meta(build), "inner.inner.buffer0", "buffer0", "other.buffer0")
    assert calls == [
        *("reset leaf", "reset other", "reset model"),
        *("init leaf", "init inner", "init other", "init model"),
    ]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool]
)
def test_a_tensor_keeps_its_dtype_and_its_kind(dtype):
    """The model on the meta device is a pattern, and stays there."""
    model = on_meta(lambda: Log("a", [], dtypes=(dtype,)))
    (value,) = values_of(model, "buffer0").values()
    assert (value.dtype, value.device.type, value.tolist()) == (dtype, "cpu", [1, 1])
    assert model.buffer0.is_meta


@pytest.mark.parametrize("trained", [True, False])
def test_parameters_are_trained_as_in_the_model(trained):
    """A frozen weight stays frozen."""
    model = on_meta(lambda: nn.Linear(2, 2).requires_grad_(trained))
    values = values_of(model, "weight", "bias")
    assert all(isinstance(value, nn.Parameter) for value in values.values())
    assert all(value.requires_grad is trained for value in values.values())
    assert values["weight"].abs().max() <= 0.5**0.5


def test_init_weights_may_write_trained_parameters_in_place():
    """The transformers library calls it under `torch.no_grad`."""

    class Direct(nn.Linear):
        def _init_weights(self, module):
            module.weight.fill_(2.0)

    (value,) = values_of(on_meta(lambda: Direct(1, 1, bias=False)), "weight").values()
    assert (value.item(), value.requires_grad, value.is_leaf) == (2.0, True, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64, torch.uint8])
def test_values_of_any_dtype_that_no_method_has_set_are_noticed(dtype):
    """One element that was left out makes a floating-point tensor unset."""

    class Careless(Log):
        def reset_parameters(self):
            if dtype.is_floating_point:
                self.buffer0[0] = 1

    with pytest.raises(ChainError, match=r"^buffer0 \(Careless\) is on the meta device"):
        values_of(on_meta(lambda: Careless("a", [], dtypes=(dtype,))), "buffer0")


def test_tensors_without_elements_need_no_values():
    """There is nothing to set."""

    class Empty(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.empty(0, 3))
            self.register_buffer("counts", torch.empty(0, dtype=torch.int64))

    values = values_of(on_meta(Empty), "table", "counts")
    assert [value.shape for value in values.values()] == [(0, 3), (0,)]


def test_a_tied_tensor_is_initialised_by_the_module_of_its_first_name():
    """Once: the other module would draw other values. Both modules see the same tensor."""
    calls = Calls()

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Log("first", calls), Log("second", calls)
            self.second.buffer0 = self.first.buffer0

        def _init_weights(self, module):
            if module is self:
                calls.append(self.first.buffer0 is self.second.buffer0)

    values = values_of(
        on_meta(Tied), "first.buffer0", aliases=[("second.buffer0", "first.buffer0")]
    )
    assert list(values) == ["first.buffer0"]
    assert calls == ["reset first", True]


def transformer():
    """Return a small transformer."""
    return nn.Transformer(4, 2, 1, 1, 8, batch_first=True)


def test_the_closest_module_with_a_reset_is_used_and_a_transformer_in_addition():
    """nn.Transformer initialises what its layers have initialised before, as its constructor does;
    nn.MultiheadAttention has only a private method.
    """
    torch.manual_seed(0)
    expected = dict(transformer().named_parameters())
    values = values_of(on_meta(transformer), *expected)
    assert values.keys() == expected.keys()
    for name, value in values.items():
        if value.dim() > 1:  # Xavier's, with its own bound
            bound = (6 / sum(value.shape)) ** 0.5
            assert value.abs().max() <= bound, name
    assert values["encoder.layers.0.self_attn.in_proj_bias"].tolist() == [0.0] * 12
    # By nn.Linear alone it would be within 1 / sqrt(8).
    assert values["encoder.layers.0.linear2.weight"].abs().max() > 8**-0.5
