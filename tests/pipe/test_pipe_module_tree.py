"""Modules of a `Pipe` by name, also where it is a part of another module, and their modes."""

from __future__ import annotations

import pytest
import torch
from tests.pipe import traced
from tests.pipe.layers import make_pipe
from torch import nn

import penstock as ps
from penstock.errors import SettingError


class Shared(nn.Module):
    """A model that uses one layer under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 5)
        self.again, self.head = self.stem, nn.Linear(5, 3)

    def forward(self, x):
        """Return the scores."""
        return self.head(self.again(self.stem(x)))


def inside(module: nn.Module) -> nn.Module:
    """Return a module that has this one as `net`."""
    whole = nn.Module()
    whole.net = module
    return whole


@pytest.mark.parametrize("remove_duplicate", [True, False])
def test_modules_of_a_traced_pipe_have_the_names_of_the_model_in_another_module(remove_duplicate):
    """A module that is used twice is listed once or twice, as the caller asks."""
    model = Shared()
    pipe = traced.make_pipe(model, (1, 2), chunks=1)
    names = []
    for module in (model, pipe):
        named = inside(module).named_modules(remove_duplicate=remove_duplicate)
        names.append([name for name, _ in named])
    assert names[1] == names[0]
    assert ("net.again" in names[0]) is not remove_duplicate


@pytest.mark.parametrize("make", [make_pipe, lambda: traced.make_pipe(Shared(), (1, 2), chunks=1)])
def test_modules_that_the_caller_has_visited_are_left_out(make):
    """By the set that torch passes from module to module."""
    pipe = make()
    visited = next(module for module in pipe.modules() if isinstance(module, nn.Linear))
    modules = [module for _, module in pipe.named_modules({visited})]
    assert visited not in modules
    assert sum(isinstance(module, nn.Linear) for module in modules) >= 1


def test_modes_of_a_traced_pipe_reach_the_model_and_all_partitions():
    """At once, and not at the next forward."""
    model = traced.make_transformer()
    pipe = traced.make_pipe(model, (2, 1))
    for mode in (False, True):
        assert pipe.train(mode) is pipe
        parts = [pipe, *pipe.partitions.modules(), *model.modules()]
        assert {part.training for part in parts} == {mode}


class Counted(nn.Module):
    """A model that has the number of targets of Trainer among its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, 6), nn.Linear(6, 3)
        self.accepts_loss_kwargs = True

    def forward(self, x, labels=None, num_items_in_batch=None):
        """Return scores, divided by the number if there is one."""
        scores = self.head(torch.tanh(self.stem(x)))
        return scores if num_items_in_batch is None else scores / num_items_in_batch


def test_a_number_of_targets_that_the_model_takes_by_name_is_passed_on_as_any_input():
    """Whether there are labels or not."""
    example = {"x": traced.X, "num_items_in_batch": torch.tensor(4)}
    model = Counted()
    pipe = ps.Pipe(model, [1, 1], chunks=1, devices=["cpu"] * 2, example=example)
    for count in (4, 7):
        inputs = {"x": traced.X, "num_items_in_batch": torch.tensor(count)}
        torch.testing.assert_close(pipe(**inputs), model(**inputs))


class Buffered(nn.Module):
    """A model that has a buffer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("cache", torch.ones(3), persistent=False)

    def forward(self, x):
        """Return the scores."""
        return self.head(x) * self.scale


def test_a_buffer_of_a_traced_model_itself_is_loaded_and_saved():
    """As its parameters are."""
    model = Buffered()
    pipe = ps.Pipe(ps.chain(model, traced.X), [1], devices=["cpu"])
    pipe.load_state_dict({**model.state_dict(), "scale": torch.full((3,), 2.0)})
    assert model.scale.tolist() == [2.0] * 3
    assert pipe.state_dict()["scale"].tolist() == [2.0] * 3
    assert sorted(inside(pipe).state_dict()) == sorted(inside(model).state_dict())
    with pytest.raises(RuntimeError, match=r'Missing key.*"scale"'):
        pipe.load_state_dict(model.head.state_dict(prefix="head."))


class KeywordOnly(Counted):
    """A model that names all of its keywords."""

    def __init__(self) -> None:
        super().__init__()
        del self.accepts_loss_kwargs

    def forward(self, x, *, labels=None):
        """Return the scores."""
        return super().forward(x, labels)


def test_only_a_model_with_any_keywords_takes_a_number_of_targets():
    """Names of keywords that it knows say nothing about others."""
    pipe = ps.Pipe(KeywordOnly(), [1, 1], chunks=1, devices=["cpu"] * 2, example={"x": traced.X})
    assert not pipe.accepts_loss_kwargs


def test_conversions_of_the_pipe_alone_leave_its_layers():
    """As of any module, which has no tensors itself."""
    pipe = make_pipe()
    before = [weight.data_ptr() for weight in pipe.parameters()]
    pipe.to_empty(device="cpu", recurse=False)
    assert [weight.data_ptr() for weight in pipe.parameters()] == before


def test_moving_to_the_place_of_another_tensor_is_denied():
    """By each name that torch has for that argument."""
    for arguments in ({"other": torch.rand(1)}, {"tensor": torch.rand(1)}, {"device": "cpu"}):
        with pytest.raises(TypeError, match="denied to move"):
            make_pipe().to(**arguments)
    with pytest.raises(SettingError, match="every_n_layers"):
        make_pipe().activation_checkpointing_enable(every_n_layers=2)
