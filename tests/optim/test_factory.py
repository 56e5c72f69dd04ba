"""What an optimizer factory may return, and the messages that say what to write instead."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from penstock.errors import SettingError
from penstock.optim.factory import (
    _required_arguments,
    check_alike,
    check_factory,
    group_numbers,
    make_optimizer,
)


def parameters(*shapes):
    """Return parameters of these shapes."""
    return [nn.Parameter(torch.ones(shape)) for shape in shapes]


class Custom(torch.optim.Optimizer):
    """An optimizer that is not torch's: with options that its constructor does not take or names
    otherwise, and a step with arguments that it can do without.
    """

    def __init__(self, params, lr, scale=1, *, fused=False):
        super().__init__(params, {"lr": lr, "scale": scale, "fused": fused, "hidden": 3})

    def step(self, closure=None, *more, **named):
        """Nothing."""


class Needy(Custom):
    """An optimizer whose step needs several arguments, of all kinds."""

    def step(self, first, /, second, third=3, *more, fourth, fifth=5, **named):
        """Nothing."""


def test_a_factory_gets_a_list_of_its_own():
    """One that sorts or extends it must not change that of the stage."""
    held = parameters((1,), (2,))

    def factory(params):
        params.reverse()
        params.pop()
        return SGD(params, lr=0.1)

    optimizer = make_optimizer(factory, held, "stage 1")
    assert optimizer.param_groups[0]["params"] == held[1:]
    assert [tuple(parameter.shape) for parameter in held] == [(1,), (2,)]


def test_only_torchs_message_on_an_empty_list_means_a_stage_without_an_optimizer():
    """Other errors of the factory are the user's, and come as they are."""
    held = parameters((1,))
    assert make_optimizer(lambda _: SGD([], lr=0.1), held, "stage 1") is None

    def fail(_):
        raise ValueError("a bad learning rate")

    with pytest.raises(ValueError, match=r"^a bad learning rate$"):
        make_optimizer(fail, held, "stage 1")

    def run_out(_):
        raise RuntimeError("empty parameter list")

    with pytest.raises(RuntimeError, match=r"^empty parameter list$"):
        make_optimizer(run_out, held, "stage 1")


@pytest.mark.parametrize("seed", range(20))
def test_parameters_of_others_are_counted_in_all_groups(seed):
    """The first of them is shown by its shape; one that is equal is not the same."""
    choose = random.Random(seed)
    held = parameters(*[(1,)] * choose.randint(1, 4))
    others = [nn.Parameter(torch.ones(2, number + 1)) for number in range(choose.randint(0, 3))]
    mixed = [*choose.sample(held, choose.randint(1, len(held))), *others]
    choose.shuffle(mixed)
    cut = choose.randint(1, len(mixed))
    groups = [{"params": part} for part in (mixed[:cut], mixed[cut:])]

    def factory(_):
        return AdamW(groups)

    if not others:
        assert isinstance(make_optimizer(factory, held, "stage 3"), AdamW)
        return
    first = next(tuple(parameter.shape) for parameter in mixed if parameter.ndim == 2)
    numbers = [f"{len(some)} parameter{'s' * (len(some) > 1)}" for some in (held, others)]
    with pytest.raises(SettingError) as raised:
        make_optimizer(factory, held, "stage 3")
    assert str(raised.value).startswith(
        f"optimizer= was called with the {numbers[0]} of stage 3 and returned AdamW over "
        f"{numbers[1]} besides these, the first of shape {first}. It is called once"
    )
    assert "optimizer=lambda params: torch.optim.AdamW(params, ...)" in str(raised.value)


def test_a_step_may_have_arguments_that_it_can_do_without():
    """The first required one is named, and the class by its own name."""
    held = parameters((1,))
    optimizer = make_optimizer(lambda params: Custom(params, 0.1), held, "stage 1")
    assert _required_arguments(optimizer) == []
    needy = Needy(held, 0.1)
    assert _required_arguments(needy) == ["first", "second", "fourth"]
    with pytest.raises(
        SettingError, match=r"^Needy cannot step a pipeline: its step\(\) needs first="
    ):
        make_optimizer(lambda _: needy, held, "stage 1")
    needy.step = max  # compiled, without a signature
    assert make_optimizer(lambda _: needy, held, "stage 1") is needy


def test_an_optimizer_in_place_of_a_factory_is_shown_as_the_call_to_write():
    """Options that its constructor takes, where they or their types are not the default's."""
    start = (
        "optimizer= is a function that creates an optimizer, since every stage has its own; this "
    )
    calls = {
        "torch.optim.SGD(params)": SGD(parameters((1,))),
        "torch.optim.SGD(params, lr=0.1, nesterov=True, momentum=0.9)": SGD(
            parameters((1,)), lr=0.1, momentum=0.9, nesterov=True
        ),
        "Custom(params, lr=0.1)": Custom(parameters((1,)), 0.1),
        "Custom(params, lr=1, scale=1.0, fused=True)": Custom(parameters((1,)), 1, 1.0, fused=True),
    }
    for call, optimizer in calls.items():
        with pytest.raises(SettingError) as raised:
            check_factory(optimizer)
        text = str(raised.value)
        assert text.startswith(f"{start}{type(optimizer).__name__} is an optimizer. Write ")
        written = text.partition("Write optimizer=lambda params: ")[2]
        assert sorted(written[:-1].split("(")[1].split(", ")) == sorted(
            call[:-1].split("(")[1].split(", ")
        )
        assert written.startswith(call.partition("(")[0])


def test_a_class_without_a_signature_is_shown_without_its_options():
    """Its constructor may be compiled."""
    compiled = type("Compiled", (SGD,), {"__signature__": "none"})(parameters((1,)), lr=0.1)
    other = type("Compiled", (SGD,), {})(parameters((1,)), lr=0.1)
    type(other).__init__ = max  # has no signature, as inspect reports by another error
    for optimizer in (compiled, other):
        with pytest.raises(
            SettingError, match=r"Write optimizer=lambda params: Compiled\(params, ...\)"
        ):
            check_factory(optimizer)


def test_groups_and_state_of_an_optimizer_have_places_of_their_own():
    """Both of them are named, and neither if there is none."""
    optimizer = SGD([{"params": parameters((1,))} for _ in range(3)], lr=0.1, momentum=0.9)
    with pytest.raises(SettingError, match=r"momentum=0\.9\)\. Its 3 parameter groups go into"):
        check_factory(optimizer)
    two = SGD([{"params": parameters((1,))} for _ in range(2)], lr=0.1)
    with pytest.raises(SettingError, match=r"lr=0\.1\)\. Its 2 parameter groups go into"):
        check_factory(two)
    plain = SGD(parameters((1,)), lr=0.1, momentum=0.9)
    with pytest.raises(SettingError, match=r"momentum=0\.9\)$"):
        check_factory(plain)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(1)
    optimizer.step()
    with pytest.raises(SettingError, match=r"groups go .*\}\. Load its state by pipe\.load_opt"):
        check_factory(optimizer)


def test_what_cannot_be_called_is_quoted():
    """A class and a function can be called; None is no optimizer at all."""
    for value in (3, [SGD], "adam"):
        with pytest.raises(SettingError) as raised:
            check_factory(value)
        assert str(raised.value).endswith(f"AdamW(params, lr=1e-3), not {value!r}")
    for value in (None, SGD, lambda params: params):
        check_factory(value)


@pytest.mark.parametrize("seed", range(30))
def test_copies_are_alike_if_common_parameters_have_one_group_as_in_the_first(seed):
    """A tied parameter is in one of them alone; None, for one left out, is a choice like others."""
    choose = random.Random(seed)
    groups = {name: choose.choice([None, 0, 1]) for name in "abcd"}
    copies = [
        {name: group for name, group in groups.items() if choose.random() < 0.8}
        for _ in range(choose.randint(1, 3))
    ]
    if choose.random() < 0.5:
        name = choose.choice("abcd")
        copies[-1][name] = 2
    differ = False
    for copy in copies:
        for name in copy:
            if name in copies[0] and copies[0][name] != copy[name]:
                differ = True
    if differ:
        with pytest.raises(SettingError, match="for one copy of stage 7 than for another"):
            check_alike(7, copies)
    else:
        check_alike(7, copies)


def test_groups_are_numbered_by_parameter():
    """In the order of the optimizer; without one there is none."""
    first, second, third = parameters((1,), (1,), (1,))
    optimizer = SGD([{"params": [third]}, {"params": [second, first]}], lr=0.1)
    assert group_numbers(optimizer) == {id(third): 0, id(first): 1, id(second): 1}
    assert group_numbers(None) == {}


def test_only_classes_of_torch_optim_have_its_name_in_front():
    """Other packages' names may begin with torch."""
    other = type("Lion", (SGD,), {"__module__": "torchlion.optim"})(parameters((1,)), lr=0.1)
    with pytest.raises(SettingError, match=r"Write optimizer=lambda params: Lion\(params"):
        check_factory(other)
