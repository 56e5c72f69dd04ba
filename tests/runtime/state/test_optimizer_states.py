"""The optimizer state of a pipeline in the form of plain PyTorch, and back."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.runtime.against_plain import (
    adamw,
    batch,
    furthest,
    grouped,
    model,
    no_decay,
    pipeline,
    plain_step,
    same_state,
    sgd,
)
from torch import nn

import penstock as ps
from penstock.errors import SettingError

FACTORIES = {
    "sgd": sgd,
    "sgd without momentum": lambda params: torch.optim.SGD(params, lr=0.1),
    "adamw": adamw,
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "rprop": torch.optim.Rprop,
    "radam": torch.optim.RAdam,
}


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("groups", [False, True], ids=["one group", "groups"])
@pytest.mark.parametrize("name", FACTORIES)
def test_the_optimizers_state_goes_to_plain_pytorch_and_back(name, groups, tied):
    """Training continues in plain PyTorch, and here again, as if it had been in one place."""
    make = FACTORIES[name]
    network, plain, other = model(tied), model(tied), model(tied)
    options = {"parameter_groups": no_decay} if groups else {}
    optimizer = make(grouped(plain) if groups else plain.parameters())
    second = make(grouped(other) if groups else other.parameters())
    pipe = pipeline(network, optimizer=make, schedule="chimera", **options)
    for number in range(2):
        pipe.train_batch(*batch(number))
        plain_step(plain, optimizer, number)
    same_state(pipe.optimizer_state_dict(), optimizer.state_dict())
    other.load_state_dict(pipe.state_dict())
    second.load_state_dict(pipe.optimizer_state_dict())
    for number in range(2, 4):
        plain_step(other, second, number)
        plain_step(plain, optimizer, number)
    again = pipeline(
        model(tied, seed=5), optimizer=make, schedule="zb-h1", balance=[3, 1, 1, 3], **options
    )
    again.load_state_dict(other.state_dict())
    state = second.state_dict()
    again.load_optimizer_state_dict(state)
    for number in range(4, 6):
        again.train_batch(*batch(number))
        plain_step(plain, optimizer, number)
    expected = plain.state_dict()
    restored = again.state_dict()
    assert restored.keys() == expected.keys()
    assert all(torch.allclose(restored[key], value, atol=1e-9) for key, value in expected.items())
    same_state(again.optimizer_state_dict(), optimizer.state_dict())


class Branches(nn.Module):
    """A model that registers its layers in another order than it runs them, and one that it never
    runs.
    """

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(8, 4)
        self.unused = nn.Linear(3, 3)
        self.first = nn.Linear(6, 8)

    def forward(self, x):
        """Run the layers."""
        return self.last(torch.tanh(self.first(x)))


def test_the_state_is_numbered_as_the_model_registers_its_parameters():
    """The chain of a traced model has them in the order in which they run."""
    torch.manual_seed(0)
    network = Branches().double()
    plain = copy.deepcopy(network)
    chain = ps.chain(network, batch()[0])
    pipe = pipeline(chain, balance=[1] * len(chain), optimizer=adamw)
    optimizer = adamw(plain.parameters())
    pipe.train_batch(*batch())
    plain_step(plain, optimizer, 0)
    same_state(pipe.optimizer_state_dict(), optimizer.state_dict())
    pipe.load_optimizer_state_dict(optimizer.state_dict())
    pipe.train_batch(*batch(1))
    plain_step(plain, optimizer, 1)
    assert furthest(network, plain) < 1e-12


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    """The messages have the numbers of both."""
    network = model()
    pipe = pipeline(network)
    pipe.train_batch(*batch())
    before = copy.deepcopy(pipe.optimizer_state_dict())
    with pytest.raises(
        SettingError, match=r"groups have 4 and 4 parameters; this pipeline's have 8"
    ):
        pipe.load_optimizer_state_dict(sgd(grouped(model())).state_dict())
    with pytest.raises(SettingError, match=r"with 'state' and 'param_groups', not \['0\.bias'"):
        pipe.load_optimizer_state_dict(network.state_dict())
    wrong = copy.deepcopy(before)
    wrong["state"][0], wrong["state"][1] = wrong["state"][1], wrong["state"][0]
    with pytest.raises(
        SettingError, match=r"momentum_buffer of parameter 0 has shape \(8,\) .*0\.weight"
    ):
        pipe.load_optimizer_state_dict(wrong)
    same_state(pipe.optimizer_state_dict(), before)
    with pytest.raises(SettingError, match="keeps several copies of the weights"):
        pipeline(model(), schedule="avgpipe").optimizer_state_dict()


def test_a_loaded_state_is_the_pipelines_own():
    """Otherwise replicas in one process would share the tensors, and training would change the
    caller's.
    """
    pipe = pipeline(model(), schedule="chimera")
    pipe.train_batch(*batch())
    state = pipe.optimizer_state_dict()
    before = copy.deepcopy(state)
    pipe.load_optimizer_state_dict(state)
    pipe.train_batch(*batch(1))
    same_state(state, before)


def test_under_an_asynchronous_schedule_the_state_is_that_of_the_newest_weights():
    """The pipeline drains first, and continues from the loaded state."""
    network = model()
    pipe = pipeline(network, schedule="pipedream")
    list(pipe.train([batch(number) for number in range(3)]))
    state = pipe.optimizer_state_dict()
    assert sorted(state["state"]) == list(range(8))
    pipe.load_optimizer_state_dict(state)
    list(pipe.train([batch(4)]))
