"""Directions of predicted weights, where a parameter does not take part in every update."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.optim.directions import AdamDirection, RmspropDirection, SgdDirection


def test_a_parameter_without_a_gradient_keeps_its_bias_corrections():
    """Adam does not step it, so its next step has the corrections of its own number of steps."""
    both, once = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = torch.optim.Adam([both, once], lr=0.1)
    direction = AdamDirection(optimizer, [both, once], constant=False)
    for number in range(4):
        both.grad = torch.full((3,), 0.5)
        once.grad = torch.full((3,), 0.5) if number == 0 else None
        direction.remember()
        optimizer.step()
        # Reads the number of steps from the optimizer the first time, and counts from then on.
        moved = [torch.zeros(3), torch.zeros(3)]
        direction.move(moved, 1)
    # Of equal gradients all moments are equal to the gradient once corrected: a step of the
    # learning rate.
    assert int(optimizer.state[once]["step"]) == 1
    for weights in moved:
        torch.testing.assert_close(weights, torch.full((3,), -0.1))


def with_gradients(*parameters, seed):
    """Give parameters gradients by the seed; None stands for one without."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_one_update_of_sgd_ahead_is_the_last_step_again(maximize, weight_decay, momentum):
    """Of several groups, each with its own options; the gradient is that of the last step alone."""
    torch.manual_seed(0)
    held = [nn.Parameter(torch.randn(n + 1)) for n in range(3)]
    groups = [{"params": held[:1], "lr": 0.5}, {"params": held[:0:-1]}]
    optimizer = torch.optim.SGD(
        groups, lr=0.1, maximize=maximize, weight_decay=weight_decay, momentum=momentum
    )
    direction = SgdDirection(optimizer, held)
    for step in range(3):
        with_gradients(*held, seed=step)
        if step == 2:
            held[1].grad = None
        before = [parameter.detach().clone() for parameter in held]
        direction.remember()
        optimizer.step()
        moved = [weights.clone() for weights in before]
        direction.move(moved, 1)
        for place, (weights, parameter) in enumerate(zip(moved, held, strict=True)):
            if place == 1 and step == 2 and momentum:
                continue  # its buffer is that of the step before
            torch.testing.assert_close(weights, parameter.detach())
    again = SgdDirection(optimizer, held)
    again.load_state(direction.state())
    first, second = [torch.zeros(n + 1) for n in range(3)], [torch.zeros(n + 1) for n in range(3)]
    direction.move(first, 2.5)
    again.move(second, 2.5)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("eps", [1e-8, 0.5])
def test_one_update_of_adam_ahead_is_the_last_step_again(amsgrad, eps):
    """Also where epsilon is as large as the root: it is added to the corrected one."""
    torch.manual_seed(0)
    held = [nn.Parameter(torch.randn(n + 1, dtype=torch.float64)) for n in range(3)]
    groups = [{"params": held[:1], "lr": 0.5, "betas": (0.5, 0.7)}, {"params": held[:0:-1]}]
    optimizer = torch.optim.Adam(groups, lr=0.1, eps=eps, amsgrad=amsgrad)
    direction = AdamDirection(optimizer, held, constant=False)
    moved = [torch.zeros_like(parameter) for parameter in held]
    direction.move(moved, 3)
    assert not any(map(torch.any, moved))
    for step in range(4):
        for parameter in held:
            parameter.grad = torch.full_like(parameter, (-1.0) ** step + 0.1 * step)
        before = [parameter.detach().clone() for parameter in held]
        direction.remember()
        optimizer.step()
        moved = [weights.clone() for weights in before]
        direction.move(moved, 1)
        for weights, parameter in zip(moved, held, strict=True):
            torch.testing.assert_close(weights, parameter.detach())


def test_one_update_of_rmsprop_ahead_is_the_last_step_again():
    """Of groups with their own options, also a large epsilon, and with weight decay in the gradient."""
    torch.manual_seed(0)
    held = [nn.Parameter(torch.randn(n + 1, dtype=torch.float64)) for n in range(3)]
    groups = [{"params": held[:1], "lr": 0.3, "eps": 1e-3}, {"params": held[:0:-1]}]
    optimizer = torch.optim.RMSprop(groups, lr=0.1, eps=0.5, weight_decay=0.2)
    direction = RmspropDirection(optimizer, held)
    for step in range(3):
        for parameter in held:
            parameter.grad = torch.full_like(parameter, (-1.0) ** step + 0.1 * step)
        before = [parameter.detach().clone() for parameter in held]
        direction.remember()
        optimizer.step()
        moved = [weights.clone() for weights in before]
        direction.move(moved, 1)
        for weights, parameter in zip(moved, held, strict=True):
            torch.testing.assert_close(weights, parameter.detach())


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (SgdDirection, lambda params: torch.optim.SGD(params, lr=0.5)),
        (RmspropDirection, lambda params: torch.optim.RMSprop(params, lr=0.5)),
    ],
)
def test_last_gradients_come_back_as_copies_with_gaps(kind, make):
    """Copies of a stage in one process load the same tensors; a parameter may have had none."""

    def parameters_and_optimizer():
        parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
        return parameters, make(parameters)

    parameters, optimizer = parameters_and_optimizer()
    direction = kind(optimizer, parameters)
    assert direction.state() == {}
    for number in (0, 2):
        parameters[number].grad = torch.full((2,), 1.0 + number)
    direction.remember()
    optimizer.step()
    (row,) = direction.state().values()
    assert [g if g is None else g.tolist() for g in row] == [[1.0, 1.0], None, [3.0, 3.0]]
    expected = [torch.zeros(2) for _ in range(3)]
    direction.move(expected, 2.0)
    # Of another dtype, as of a run in another precision.
    saved = {key: [None if g is None else g.double() for g in row] for key in direction.state()}
    for _ in range(2):
        others, other_optimizer = parameters_and_optimizer()
        other_optimizer.load_state_dict(optimizer.state_dict())
        loaded = kind(other_optimizer, others)
        loaded.load_state(saved)
        assert loaded.held_bytes() == direction.held_bytes() or kind is RmspropDirection
        moved = [torch.zeros(2) for _ in range(3)]
        loaded.move(moved, 2.0)
        assert all(map(torch.equal, moved, expected))
        for gradient in loaded.state().popitem()[1]:
            if gradient is not None:
                gradient.fill_(7.0)
        loaded.load_state({})
        assert loaded.state() == {}
    assert moved[0].abs().sum() > 0
    assert moved[1].tolist() == [0, 0]


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adam", "rmsprop"])
def test_weights_move_in_proportion_to_the_number_of_updates(kind):
    """Which may be a fraction."""
    parameter = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer, make = {
        "sgd": (torch.optim.SGD([parameter], lr=0.1), SgdDirection),
        "momentum": (torch.optim.SGD([parameter], lr=0.1, momentum=0.9), SgdDirection),
        "adam": (
            torch.optim.Adam([parameter], lr=0.1),
            lambda *given: AdamDirection(*given, constant=False),
        ),
        "rmsprop": (torch.optim.RMSprop([parameter], lr=0.1), RmspropDirection),
    }[kind]
    direction = make(optimizer, [parameter])
    parameter.grad = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    direction.remember()
    optimizer.step()
    once = torch.zeros(3, dtype=torch.float64)
    direction.move([once], 1)
    assert once.all()
    for updates in (0.5, 2.25):
        moved = torch.zeros(3, dtype=torch.float64)
        direction.move([moved], updates)
        torch.testing.assert_close(moved, updates * once)


def test_a_restart_reads_the_numbers_of_steps_from_the_optimizer_again():
    """Its state may be another one then, of other numbers of steps."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    direction = AdamDirection(optimizer, [parameter], constant=False)
    parameter.grad = torch.ones(2)
    for _ in range(2):
        direction.remember()
        optimizer.step()
        direction.move([torch.zeros(2)], 1)
    optimizer.state[parameter]["step"].fill_(40)
    direction.restart()
    moved, expected = torch.zeros(2), torch.zeros(2)
    direction.move([moved], 1)
    AdamDirection(optimizer, [parameter], constant=False).move([expected], 1)
    assert torch.equal(moved, expected)
    assert moved.any()


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (SgdDirection, lambda params: torch.optim.SGD(params, lr=0.5)),
        (SgdDirection, lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.5)),
        (RmspropDirection, lambda params: torch.optim.RMSprop(params, lr=0.5)),
        (
            lambda *args: AdamDirection(*args, constant=False),
            lambda params: torch.optim.Adam(params, lr=0.5),
        ),
    ],
)
def test_parameters_without_state_stay_where_they_are(kind, make):
    """The optimizer may have an empty state for one, or none of the restored gradients' steps."""
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    used, unused = (nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = make([frozen, used, unused])
    direction = kind(optimizer, [used, unused])
    used.grad = torch.ones(2)
    direction.remember()
    optimizer.step()
    assert not optimizer.state[unused]
    moved = [torch.zeros(2), torch.zeros(2)]
    direction.move(moved, 1)
    assert moved[0].any()
    assert not moved[1].any()
    optimizer.state.clear()
    if kind is RmspropDirection or optimizer.defaults.get("momentum"):
        optimizer.state[used] = {"momentum_buffer": None} if kind is SgdDirection else {}
        moved = [torch.zeros(2), torch.zeros(2)]
        direction.move(moved, 1)
        assert not any(map(torch.any, moved))


def test_only_gradients_that_a_formula_needs_are_kept():
    """Momentum contains the gradient; a kept one is a plain tensor, without a graph of the decay."""
    momentum, plain = (nn.Parameter(torch.ones(3)) for _ in range(2))
    groups = [{"params": [momentum], "momentum": 0.9}, {"params": [plain], "weight_decay": 0.1}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    direction = SgdDirection(optimizer, [momentum, plain])
    for parameter in (momentum, plain):
        parameter.grad = torch.ones(3)
    direction.remember()
    assert direction.held_bytes() == plain.nbytes
    ((first, second),) = direction.state().values()
    assert first is None
    assert not second.requires_grad
    torch.testing.assert_close(second, torch.full((3,), 1.1))


def test_rmsprop_holds_the_gradients_and_the_memory_of_the_roots():
    """Both count, the second once there has been a prediction."""
    parameter = nn.Parameter(torch.ones(5))
    optimizer = torch.optim.RMSprop([parameter], lr=0.1)
    direction = RmspropDirection(optimizer, [parameter])
    parameter.grad = torch.ones(5)
    direction.remember()
    assert direction.held_bytes() == parameter.nbytes
    optimizer.step()
    direction.move([torch.zeros(5)], 1)
    assert direction.held_bytes() == 2 * parameter.nbytes
