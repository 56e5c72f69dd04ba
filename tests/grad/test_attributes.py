"""Numbers, strings and flags of modules: what a second forward sees and leaves behind."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from penstock.grad.attributes import Attributes, is_torch_module


class Counting(nn.Module):
    """A module with attributes of every kind, some of which are no numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.calls, self.rate, self.mode, self.last, self.on = 0, 0.5, "a", None, False
        self.factor = 1 + 2j
        self.items, self.tensor = [0], torch.zeros(1)


class Scaling(nn.Linear):
    """A layer of torch with a forward of its own."""

    def forward(self, x):
        """Return twice the result."""
        return super().forward(x) * 2


def numbers(module):
    """The scalar attributes of a module."""
    kinds = (bool, int, float, complex, str, type(None))
    return {key: value for key, value in vars(module).items() if type(value) in kinds}


@pytest.mark.parametrize("seed", range(20))
def test_attributes_are_set_and_restored_whatever_happens_meanwhile(seed):
    """A slow reference: a copy of all scalars before, and of those that the first forward saw."""
    choose = random.Random(seed)
    module = Counting()
    layers = [nn.Sequential(module, nn.ReLU()), module]
    attributes = Attributes(layers)
    history = []
    for _ in range(4):
        history.append((attributes.contents(), numbers(module)))
        for name in choose.sample(["calls", "rate", "mode", "last", "on", "factor"], 3):
            setattr(module, name, choose.choice([None, 1, 2.5, "b", True, 3j, [1]]))
    before = numbers(module)
    lists = {key: value for key, value in vars(module).items() if type(value) is list}
    for contents, seen in choose.sample(history, 4):
        with attributes.with_contents(contents):
            present = numbers(module)
            assert {key: present[key] for key in seen} == seen
            assert list(map(type, (present[key] for key in seen))) == list(map(type, seen.values()))
            module.calls = "changed"
            module.rate = None
        restored = numbers(module)
        assert {key: restored[key] for key in before} == before
        for key, value in lists.items():
            assert vars(module)[key] is value or key not in before


def test_attributes_are_restored_after_an_error():
    """As buffers are."""
    module = Counting()
    attributes = Attributes([module])
    contents = attributes.contents()
    module.calls = 5
    context = attributes.with_contents(contents)
    context.__enter__()
    assert module.calls == 0
    assert not context.__exit__(KeyError, KeyError(), None)
    assert module.calls == 5


def test_attributes_that_a_module_got_later_are_restored_and_older_values_do_not_know_them():
    """A first forward may make a counter."""
    module = Counting()
    attributes = Attributes([module])
    early = attributes.contents()
    module.steps = 1
    late = attributes.contents()
    module.steps, module.calls = 2, 7
    with attributes.with_contents(early):
        assert (module.steps, module.calls) == (2, 0)
        module.steps = 9
    assert (module.steps, module.calls) == (2, 7)
    with attributes.with_contents(late):
        assert (module.steps, module.calls) == (1, 0)
    del module.steps
    module.extra = 4
    with attributes.with_contents(late):
        assert module.steps == 1
        module.extra = 5
    assert module.extra == 4


def test_lists_and_tensors_are_neither_replaced_nor_compared():
    """A number that has become a list stays one, and so does its contents."""
    module = Counting()
    attributes = Attributes([module])
    contents = attributes.contents()
    items, tensor = module.items, module.tensor
    module.items.append(1)
    module.mode = values = ["list"]
    attributes.contents()
    items = module.items = [0, 1]
    tensor = module.tensor = torch.ones(1)
    with attributes.with_contents(contents):
        assert module.items is items
        assert module.tensor is tensor
        assert module.mode == "a"
    assert module.items == [0, 1]
    assert module.mode in ("a", values)


def test_the_mode_of_training_is_a_switch_and_what_modules_keep_themselves_is_none():
    """Hooks and parameters belong to torch."""
    module = Counting()
    attributes = Attributes([module])
    contents = attributes.contents()
    module.eval()
    module._version = 99
    with attributes.with_contents(contents):
        assert (module.training, module.inner.training) == (True, True)
    assert (module.training, module.inner.training) == (False, False)


def test_a_hook_that_a_second_forward_registers_stays():
    """What torch keeps in every module is not the layer's state."""
    module = Counting()
    attributes = Attributes([module])
    calls = []
    with attributes.with_contents(attributes.contents()):
        module.inner.register_full_backward_hook(lambda *_: calls.append("inner"))
    module.inner(torch.ones(1, 1, requires_grad=True)).sum().backward()
    assert calls == ["inner"]


def test_layers_of_torch_alone_are_skipped():
    """They keep no such state; one part of another class is enough for all parts of its layer."""
    plain = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    mixed = nn.Sequential(nn.Dropout(0.5), Counting())
    dropout = mixed[0]
    attributes = Attributes([plain, mixed])
    contents = attributes.contents()
    assert len(contents) == len(list(mixed.modules()))
    dropout.p = 0.9
    with attributes.with_contents(contents):
        assert dropout.p == 0.5
    assert Attributes([plain]).contents() == []


def test_a_module_of_torch_runs_its_own_forward():
    """Subclasses and replaced forwards may do anything."""
    linear = nn.Linear(1, 1)
    assert is_torch_module(linear)
    assert not is_torch_module(Counting())
    linear.forward = lambda x: x
    assert not is_torch_module(linear)
    assert is_torch_module(nn.Sequential(Counting()))
    assert not is_torch_module(type("Layer", (nn.Linear,), {"__module__": "torchgeo.models"})(1, 1))
    normed = nn.utils.parametrizations.weight_norm(Scaling(1, 1))
    assert type(normed).__module__.startswith("torch.nn.utils.")
    assert not is_torch_module(normed)
