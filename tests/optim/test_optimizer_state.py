"""The state of an optimizer as tensors by name, for checkpoints."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.errors import SettingError
from penstock.optim.optimizer_state import (
    PARAMETER_SHAPED,
    load_optimizer_state,
    optimizer_state,
    state_device,
)


def parameters():
    """Return three parameters, of which the second gets no gradient."""
    weights = [nn.Parameter(torch.ones(n + 1)) for n in range(3)]
    for parameter in weights[::2]:
        parameter.grad = torch.full_like(parameter, 0.5)
    return weights


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
        torch.optim.Adam,
        torch.optim.Adagrad,
        lambda ps: torch.optim.AdamW(ps, fused=True),
    ],
)
def test_what_is_loaded_goes_on_as_what_was_saved(make):
    """Moments and counters by parameter; a parameter without state has none afterwards."""
    one, two = parameters(), parameters()
    first, second = make(one), make(two)
    first.step()
    load_optimizer_state(second, two, optimizer_state(first, one))
    assert two[1] not in second.state or make is torch.optim.Adagrad
    with torch.no_grad():
        for parameter, other_parameter in zip(one, two, strict=True):
            other_parameter.copy_(parameter)
    first.step()
    second.step()
    assert all(map(torch.equal, one, two))


def test_what_is_loaded_is_a_copy():
    """Otherwise two copies of a stage would share their moments."""
    one, two = parameters(), parameters()
    first, second = torch.optim.Adam(one), torch.optim.Adam(two)
    first.step()
    state = optimizer_state(first, one)
    load_optimizer_state(second, two, state)
    second.step()
    assert [state["step"][0].item(), second.state[two[0]]["step"].item()] == [1, 2]


class Counting(torch.optim.Optimizer):
    """An optimizer with a plain number, and any other value, in its state."""

    def __init__(self, ps, history=None) -> None:
        super().__init__(ps, {})
        self.history = history

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["count"] = state.get("count", 0) + 1
            state["nothing"] = None
            if self.history is not None:
                state["history"] = self.history


def test_plain_numbers_come_back_as_numbers():
    """Some optimizers count without tensors."""
    ps = parameters()
    first, second = Counting(ps), Counting(ps)
    first.step()
    first.step()
    load_optimizer_state(second, ps, optimizer_state(first, ps))
    assert second.state[ps[0]] == {"count": 2}
    assert not isinstance(second.state[ps[0]]["count"], torch.Tensor)


def test_what_a_checkpoint_cannot_hold_is_refused():
    """A history of closures, for example."""
    ps = parameters()
    optimizer = Counting(ps, history=[1])
    optimizer.step()
    with pytest.raises(
        SettingError,
        match=r"Counting keeps a list as 'history': a checkpoint can hold tensors and plain numbers",
    ):
        optimizer_state(optimizer, ps)


def test_what_is_loaded_replaces_all_state():
    """A parameter that had none when it was saved has none, and keys that were not saved are gone."""
    held = parameters()
    for parameter in held:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.Adam(held)
    optimizer.step()
    load_optimizer_state(optimizer, held, {"exp_avg": [None, torch.ones(2), None]})
    assert [held[n] in optimizer.state for n in range(3)] == [False, True, False]
    assert list(optimizer.state[held[1]]) == ["exp_avg"]


def test_moments_are_on_the_device_of_the_parameter_and_counters_on_the_host():
    """Kernels that run as a whole on the device read the counters there too."""
    plain, capturable, fused = (nn.Parameter(torch.ones(2, device="meta")) for _ in range(3))
    optimizer = torch.optim.Adam(
        [{"params": [plain]}, {"params": [capturable], "capturable": True}, {"params": [fused]}]
    )
    optimizer.param_groups[2]["fused"] = True
    held = [plain, capturable, fused]
    counters, moments = ([torch.ones(shape) for _ in held] for shape in ((), (2,)))
    load_optimizer_state(optimizer, held, {"step": counters, "exp_avg": moments})
    devices = [optimizer.state[parameter]["step"].device.type for parameter in held]
    assert devices == ["cpu", "meta", "meta"]
    assert {optimizer.state[parameter]["exp_avg"].device.type for parameter in held} == {"meta"}
    meta, cpu = torch.device("meta"), torch.device("cpu")
    for value, counts_on_device, device in (
        (torch.ones(()), False, cpu),
        (torch.ones(()), True, meta),
        (torch.ones(1), False, meta),
        (torch.ones((), device="meta"), False, meta),
    ):
        assert state_device(value, plain, counts_on_device=counts_on_device) == device


def test_a_name_that_one_parameter_lacks_hides_no_other_name():
    """Parameters of one optimizer may have state of different kinds."""
    held = parameters()
    optimizer = torch.optim.Adam(held)
    first, second = torch.ones(1), torch.ones(2)
    rows = {
        "a": [None, second, None],
        "b": [first, None, None],
        "plain/n": [first.sum(), None, None],
    }
    load_optimizer_state(optimizer, held, rows)
    assert optimizer.state[held[0]] == {"b": first, "n": 1.0}
    assert optimizer.state[held[1]].keys() == {"a"}
    assert held[2] not in optimizer.state


def test_large_numbers_come_back_exactly():
    """A count of tokens is above what float32 can hold."""
    held = parameters()
    optimizer = Counting(held)
    optimizer.state[held[0]]["count"] = 2**40 + 1
    load_optimizer_state(optimizer, held, optimizer_state(optimizer, held))
    assert optimizer.state[held[0]] == {"count": 2**40 + 1}


def test_rows_have_an_entry_for_every_parameter_also_where_few_have_state():
    """The place in the row names the parameter."""
    held = parameters()
    optimizer = torch.optim.Adam(held)
    optimizer.state[held[2]] = {"exp_avg": torch.ones(3)}
    (row,) = optimizer_state(optimizer, held).values()
    assert [None if value is None else value.tolist() for value in row] == [None, None, [1, 1, 1]]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("Adam", {"amsgrad": True}),
        ("NAdam", {}),
        ("RAdam", {}),
        ("Adamax", {}),
        ("Adadelta", {}),
        ("Adagrad", {}),
        ("ASGD", {}),
        ("RMSprop", {"centered": True, "momentum": 0.5}),
        ("Rprop", {}),
    ],
)
def test_state_in_the_shape_of_the_parameter_is_known_by_its_key(name, options):
    """It is checked against the parameter when it is loaded, and sharded as the parameter is."""
    parameter = nn.Parameter(torch.ones(2, 3))
    parameter.grad = torch.ones(2, 3)
    optimizer = getattr(torch.optim, name)([parameter], **options)
    optimizer.step()
    state = optimizer.state[parameter].items()
    keys = {key for key, value in state if isinstance(value, torch.Tensor) and value.dim()}
    assert keys
    assert keys <= PARAMETER_SHAPED
