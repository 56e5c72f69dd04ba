"""Models that torch.export silently gets wrong: corrected, or rejected with the user's line."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.errors import ChainError
from penstock.tracing.capture import capture
from penstock.tracing.form import Form
from penstock.tracing.outputs import Outputs
from penstock.tracing.skeleton import skeleton_of
from penstock.tracing.traced_chain import chain


class Looks(nn.Module):
    """Branches on a value."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        inner = self.first(x)
        if inner.sum() > 0:
            return inner
        return -inner


class Hooked(nn.Module):
    """Changes a gradient by a hook."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        inner = self.first(x)
        inner.register_hook(lambda grad: grad * 2)
        return inner


class Growing(nn.Module):
    """Stores its input in a tensor that is not a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.seen = nn.Linear(4, 4), torch.zeros(4)

    def forward(self, x):
        self.seen.add_(1)
        return self.first(x) + self.seen


class Longer(nn.Module):
    """Replaces its buffer by a longer one."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.seen = torch.cat([self.seen, self.seen])
        return self.first(x)


class Opaque(nn.Module):
    """Returns an object."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        self.first(x)
        return object()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            Looks,
            r"Looks cannot be traced: .*test_capture\.py:\d+, in forward: `if inner\.sum\(\) > 0:`: what it does next depends on.*model\.stem",
        ),
        (
            Hooked,
            r"Hooked cannot be traced: .*`inner\.register_hook.*it calls register_hook on a tensor",
        ),
        (Growing, r"the model changes seen as it runs, a tensor that is no buffer"),
        (Longer, r"Longer cannot be traced: it gives its buffer 'seen' another shape"),
        (Opaque, r"Opaque cannot be traced: it returns a object, which is no nesting of tensors"),
    ],
)
def test_a_model_that_cannot_be_traced_is_refused_with_its_line_and_a_remedy(kind, message):
    """An error of torch.export has a hundred lines without a reference to the user's code."""
    with pytest.raises(ChainError, match=message):
        chain(kind(), torch.randn(2, 4))


class Misfit(nn.Module):
    """Has a layer that does not fit the inputs."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 4)

    def forward(self, x):
        return self.first(x)


def test_a_model_that_does_not_fit_its_inputs_is_told_so_without_the_log_of_torch(caplog):
    """Advice on tracing would not help, and torch logs the error with hundreds of lines."""
    with pytest.raises(ChainError, match="Misfit fails on these inputs, also without a trace: "):
        chain(Misfit(), torch.randn(2, 4))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_model_that_cannot_be_copied_is_refused_with_the_reason():
    """Tracing must not change the user's model, so it runs a copy."""
    model = nn.ModuleList([nn.Linear(4, 4)])
    model.cache = model[0].weight * 2
    with pytest.raises(
        ChainError,
        match=r"ModuleList cannot be copied to be traced \(RuntimeError: Only Tensors created explicitly",
    ):
        skeleton_of(model)


def test_tracing_leaves_the_model_and_the_random_numbers_as_they_were():
    """Results of a run must not depend on whether its model was traced before."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    drawn, apply = torch.get_rng_state(), torch.autograd.Function.__dict__["apply"]
    capture(
        skeleton_of(model), Form.of(torch.randn(2, 4, generator=torch.Generator())), training=True
    )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.autograd.Function.__dict__["apply"] is apply


def test_a_graph_is_right_only_for_the_shapes_for_which_the_model_does_the_same():
    """Otherwise every batch would take the branch that the example took."""

    class Parity(nn.Module):
        def forward(self, x):
            return x + 1 if x.shape[1] % 2 else x - 1

    domain = capture(
        skeleton_of(Parity()), Form.of(torch.zeros(3, 6, dtype=torch.long)), training=True
    ).domain
    shapes = {(3, 6): True, (5, 8): True, (3, 7): False, (1, 6): False, (3,): False}
    assert {shape: domain.has([torch.zeros(shape)]) for shape in shapes} == shapes


def test_outputs_are_put_together_as_they_were():
    """Constants are returned unchanged, tensors and sizes in their places."""
    outputs = Outputs()
    computed = outputs.flatten({"a": (torch.ones(1), None, "word"), "b": [3, torch.zeros(2)]})
    assert len(computed) == 2
    assert outputs.value([1, 2]) == {"a": (1, None, "word"), "b": [3, 2]}
