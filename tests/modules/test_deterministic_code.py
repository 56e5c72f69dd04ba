"""Proofs that the code of a module draws no random numbers."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import relu

from penstock.modules import deterministic_code
from penstock.modules.randomness import prove_no_draws

_SCALE = 0.5


def scaled(value: Tensor) -> Tensor:
    """Call well-known ops only."""
    return relu(value) * _SCALE


def noisy(value: Tensor) -> Tensor:
    """Draw through an op that is not known."""
    return value + torch.randn_like(value)


class Block(nn.Module):
    """A base of modules whose forwards are the cases below."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])
        self.gain = nn.Parameter(torch.ones(4))
        self.rate = 0.1
        self.activation = functional.dropout


class Plain(Block):
    """Submodules, parameters, numbers, a function of this file, math, and a lambda."""

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = layer(value)
        if self.training and value.shape[0] > math.floor(2.5):
            value = self.shifted(value)
        double = lambda item: item * 2  # noqa: E731 - nested code
        return scaled(double(value) * self.gain).view(-1, 4)

    def shifted(self, value: Tensor) -> Tensor:
        """Use a number of the module."""
        return torch.cat([value + self.rate], dim=0)


class Derived(Plain):
    """A forward that calls that of its base."""

    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value)


class DrawsByOp(Block):
    def forward(self, value: Tensor) -> Tensor:
        return torch.bernoulli(value)


class DrawsInPlace(Block):
    def forward(self, value: Tensor) -> Tensor:
        return value.clone().uniform_()


class DrawsByFunction(Block):
    def forward(self, value: Tensor) -> Tensor:
        return noisy(value)


class DrawsByMethod(Block):
    def forward(self, value: Tensor) -> Tensor:
        return self.helper(value)

    def helper(self, value: Tensor) -> Tensor:
        """Draw."""
        return torch.rand_like(value)


class DrawsByAttribute(Block):
    def forward(self, value: Tensor) -> Tensor:
        return self.activation(value, self.rate)


class DrawsByImport(Block):
    def forward(self, value: Tensor) -> Tensor:
        from torch import rand as relu

        return relu(4)


class DrawsByLambda(Block):
    def forward(self, value: Tensor) -> Tensor:
        halve = lambda item: functional.dropout(item, 0.5)  # noqa: E731 - nested code
        return halve(value)


class DrawsByHost(Block):
    def forward(self, value: Tensor) -> Tensor:
        return value * random.random()


class DrawsByNewModule(Block):
    def forward(self, value: Tensor) -> Tensor:
        return Plain()(value)


class DrawsInSpecialMethod(Block):
    def forward(self, value: Tensor) -> Tensor:
        return self + value

    def __add__(self, value: Tensor) -> Tensor:
        return torch.rand_like(value)


class DrawsInDropout(nn.Dropout):
    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value)


class StoresAttribute(Block):
    def forward(self, value: Tensor) -> Tensor:
        self.forward = noisy
        return value


class LooksUpByText(Block):
    def forward(self, value: Tensor) -> Tensor:
        return getattr(torch, "rand")(4)  # noqa: B009 - that is the case


DRAWING = [
    DrawsByOp, DrawsInPlace, DrawsByFunction, DrawsByMethod, DrawsByAttribute, DrawsByImport,
    DrawsByLambda, DrawsByHost, DrawsByNewModule, DrawsInSpecialMethod, DrawsInDropout,
    StoresAttribute, LooksUpByText,
]  # fmt: skip


@pytest.mark.parametrize("kind", [Plain, Derived])
def test_code_of_submodules_and_known_ops_is_proven(kind):
    """Such code is what most modules of users consist of."""
    assert prove_no_draws(kind()) is not None
    assert prove_no_draws(nn.Sequential(kind(), nn.Dropout(0.0))) is not None


@pytest.mark.parametrize("kind", DRAWING)
def test_code_that_may_draw_is_not_proven(kind):
    """A wrong proof would let micro-batches draw the same numbers, or others than one device."""
    assert prove_no_draws(kind()) is None
    assert prove_no_draws(nn.Sequential(Plain(), kind())) is None


def test_a_module_of_torch_that_draws_prevents_a_proof():
    """Its code is not read; it is known to draw."""
    assert prove_no_draws(nn.Sequential(Plain(), nn.Dropout(0.1))) is None
    assert prove_no_draws(nn.Sequential(Plain(), nn.RReLU())) is None


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
@pytest.mark.parametrize("place", [lambda block: block, lambda block: block.layers[0]])
def test_a_hook_prevents_a_proof(register, place):
    """A hook may draw."""
    block = Plain()
    getattr(place(block), register)(lambda *_: None)
    assert prove_no_draws(block) is None


@pytest.mark.parametrize("module", ["global", "class", "instance"])
def test_a_proof_ends_when_a_name_gets_another_value(module, monkeypatch):
    """Functions may be replaced at any time during training; numbers may change."""
    block = Plain()
    proof = prove_no_draws(block)
    block.rate = 0.2
    assert proof.holds()
    if module == "global":
        monkeypatch.setitem(globals(), "scaled", noisy)
    elif module == "class":
        monkeypatch.setattr(Plain, "shifted", lambda self, value: noisy(value))
    else:
        block.rate = torch.rand
    assert not proof.holds()


def test_no_known_op_is_tagged_as_random():
    """The list is by hand; torch tags its ops."""
    tagged = set()
    for name in deterministic_code._OPS:
        packet = getattr(torch.ops.aten, name, None)
        for overload in [] if packet is None else packet.overloads():
            if torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags:
                tagged.add(name)
    assert tagged == set()
