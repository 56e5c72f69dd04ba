"""The update of one stage: creation of its optimizer, over which parameters, and lifetime of
gradients.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD

from penstock.errors import SettingError
from penstock.optim.factory import check_factory
from penstock.optim.update import Update


def parameters(*values):
    """Return parameters with one element each, and a gradient of 1."""
    weights = [nn.Parameter(torch.tensor([float(value)])) for value in values]
    for parameter in weights:
        parameter.grad = torch.ones(1)
    return weights


def sgd(params):
    """Plain gradient descent."""
    return SGD(params, lr=0.5)


def test_a_step_moves_the_weights_by_the_optimizers_rule():
    """U creates the next weight version."""
    held = parameters(1, 2)
    update = Update.make(held, sgd)
    update.step()
    assert [parameter.item() for parameter in held] == [0.5, 1.5]


def test_gradients_stay_after_a_step_until_the_next_batch_begins():
    """Users read them between batches: norms, clipping, logs."""
    held = parameters(1)
    update = Update.make(held, sgd)
    update.step()
    assert held[0].grad is not None
    update.begin()
    assert held[0].grad is None


def test_a_batch_that_begins_before_any_update_finds_the_gradients_there():
    """Asynchronous schedules update within a batch, and users may have set a gradient themselves."""
    held = parameters(1)
    update = Update.make(held, sgd)
    update.begin()
    assert held[0].grad is not None
    update.step()
    update.begin()
    held[0].grad = torch.ones(1)
    update.begin()
    assert held[0].grad is not None


def test_zero_drops_gradients_at_once_and_for_good():
    """The next batch must not drop gradients that were set afterwards."""
    held = parameters(1, 2)
    update = Update.make(held, sgd)
    update.step()
    update.zero()
    assert [parameter.grad for parameter in held] == [None, None]
    held[0].grad = torch.ones(1)
    update.begin()
    assert held[0].grad is not None


def test_without_an_optimizer_gradients_add_up_and_nothing_moves():
    """Users who update by hand decide when gradients are dropped."""
    held = parameters(1)
    update = Update.make(held, None)
    update.step()
    update.begin()
    assert (held[0].item(), held[0].grad.item()) == (1, 1)
    assert update.optimizer is None
    update.zero()
    assert held[0].grad is None


def test_the_optimizer_gets_all_parameters_in_a_list_and_frozen_ones_too():
    """As with model.parameters(): frozen parameters may become trainable; a generator would be
    empty when read again.
    """
    held = parameters(1, 2, 3)
    held[1].requires_grad_(False)
    held[1].grad = None
    arguments = []

    def factory(params):
        arguments.append(params)
        return sgd(params)

    update = Update.make(tuple(held), factory)
    assert arguments == [held]
    assert isinstance(arguments[0], list)
    assert update.parameters == [held[0], held[2]]
    update.step()
    assert [parameter.item() for parameter in held] == [0.5, 2.0, 2.5]


def test_a_thawed_parameter_is_trained_in_its_place_and_a_frozen_one_keeps_its_gradient():
    """The order determines in which order norms are added; a parameter with a gradient is stepped,
    as by torch's optimizers.
    """
    held = parameters(1, 2, 3)
    held[1].requires_grad_(False)
    update = Update.make(held, sgd)
    assert update.trains
    held[1].requires_grad_(True)
    held[0].requires_grad_(False)
    update.refresh()
    assert update.parameters == held
    update.step()
    assert [parameter.item() for parameter in held] == [0.5, 1.5, 2.5]
    for parameter in held:
        parameter.requires_grad_(False)
    assert not update.trains


def test_a_stage_without_parameters_has_no_optimizer():
    """torch's optimizers reject an empty list, but a stage of ReLUs and pools is legal."""

    def factory(params):
        raise AssertionError(f"was called with {params}")

    update = Update.make([], factory)
    assert (update.parameters, update.optimizer) == ([], None)
    update.step()
    update.begin()


def test_a_factory_may_leave_parameters_out_or_all_of_a_stage():
    """`[p for p in params if p.ndim > 1]` is legal in plain PyTorch too; the gradients of the
    others are dropped as well.
    """
    held = parameters(1, 2)
    partial = Update.make(held, lambda params: sgd(params[:1]))
    partial.step()
    assert [parameter.item() for parameter in held] == [0.5, 2.0]
    none = Update.make(held, lambda params: sgd([p for p in params if p.ndim > 1]))
    assert none.optimizer is None
    none.step()
    none.begin()
    assert [parameter.grad for parameter in held] == [None, None]


def test_a_frozen_stage_has_an_optimizer_unless_the_factory_filters():
    """As in plain PyTorch: without a filter the stage is trained once it is trainable, with a
    filter it is not.
    """
    held = [nn.Parameter(torch.ones(1), requires_grad=False)]
    assert Update.make(held, sgd).optimizer is not None
    filtered = Update.make(held, lambda params: sgd([p for p in params if p.requires_grad]))
    assert filtered.optimizer is None
    whole = nn.Parameter(torch.ones(1, dtype=torch.int8), requires_grad=False)
    assert Update.make([whole], sgd).optimizer is None


@pytest.mark.parametrize(
    "factory",
    [
        lambda params: sgd([*params, *parameters(1)]),
        lambda params: sgd([p.detach().clone() for p in params]),
        lambda params: SGD([{"params": parameters(5)}, {"params": params}], lr=0.1),
    ],
    ids=["more", "copies", "groups"],
)
def test_an_optimizer_over_other_parameters_is_refused(factory):
    """An optimizer over model.parameters() would step every weight once for every stage."""
    message = r"^optimizer= was called with the 2 parameters of stage 3 and returned SGD over .*besides these.*lambda params: torch"
    with pytest.raises(SettingError, match=message):
        Update.make(parameters(1, 2), factory, place="stage 3")


class Twice(torch.optim.Optimizer):
    """An optimizer that needs a closure."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure):
        """Call it."""
        closure()


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Twice])
def test_an_optimizer_that_needs_a_closure_is_refused_by_name(kind):
    """It would fail at the first update, on every rank."""
    with pytest.raises(
        SettingError, match=rf"^{kind.__name__} cannot step a pipeline: .* closure="
    ):
        Update.make(parameters(1), kind)


def test_an_optimizer_in_place_of_a_factory_is_refused_with_the_lambda_to_write():
    """Users of plain PyTorch have an optimizer at hand."""
    message = r"Write optimizer=lambda params: torch.optim.SGD\(params, lr=0.1, momentum=0.9\)$"
    with pytest.raises(SettingError, match=message):
        check_factory(SGD(parameters(1), lr=0.1, momentum=0.9))
    groups = [{"params": parameters(1)}, {"params": parameters(2), "lr": 0.3}]
    with pytest.raises(SettingError, match="Its 2 parameter groups go into parameter_groups="):
        check_factory(torch.optim.AdamW(groups))
    used = SGD(parameters(1), lr=0.1, momentum=0.9)
    used.step()
    with pytest.raises(SettingError, match=r"pipe\.load_optimizer_state_dict"):
        check_factory(used)
    with pytest.raises(SettingError, match="not 'adam'"):
        check_factory("adam")
    check_factory(None)
    check_factory(torch.optim.Adam)


@pytest.mark.parametrize(("result", "kind"), [(None, "NoneType"), (SGD, "type"), ([], "list")])
def test_what_is_no_optimizer_is_refused_with_its_kind(result, kind):
    """`optimizer=lambda params: SGD` forgets the call, and would fail at the first update, on every
    rank.
    """
    message = f"^optimizer= is a function from parameters to a torch.optim.Optimizer; this one returned {kind}$"
    with pytest.raises(SettingError, match=message):
        Update.make(parameters(1), lambda _: result)


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.Adam(params, lr=0.1),
        lambda params: SGD(params, lr=0.1, momentum=0.9),
    ],
)
def test_any_optimizer_of_torchs_keeps_its_state_from_step_to_step(make):
    """Momentum is per stage, and must survive between batches."""
    (held,), (alone,) = parameters(1), parameters(1)
    update, plain = Update.make([held], make), make([alone])
    for _ in range(3):
        update.begin()
        held.grad = torch.full((1,), 2.0)
        alone.grad = torch.full((1,), 2.0)
        update.step()
        plain.step()
    assert torch.equal(held, alone)


def test_an_advance_steps_behind_autograds_back_and_drops_the_gradients():
    """In a stream, graphs in flight have saved the weights; the caller is responsible for what they
    read.
    """
    held = parameters(1, 2)
    update = Update.make(held, sgd)
    graph = held[0] * held[1]
    before = [parameter._version for parameter in held]
    update.advance()
    assert [parameter.item() for parameter in held] == [0.5, 1.5]
    assert [parameter.grad for parameter in held] == [None, None]
    assert [parameter._version for parameter in held] == before
    graph.backward()
    assert [parameter.grad.item() for parameter in held] == [1.5, 0.5]
    update.begin()
    assert held[0].grad is not None


def test_an_advance_without_an_optimizer_leaves_gradients_and_weights():
    """As `step` does."""
    held = parameters(1)
    Update.make(held, None).advance()
    assert (held[0].item(), held[0].grad.item()) == (1, 1)


def test_another_optimizer_is_over_the_same_parameters_with_a_state_of_its_own():
    """Copies of the weights that take turns have the same parameters, but momentum of their own."""
    held = parameters(1, 2)
    held.append(nn.Parameter(torch.ones(1), requires_grad=False))
    update = Update.make(held, lambda params: SGD(params, lr=0.5, momentum=0.9))
    other = update.new_optimizer()
    assert other.param_groups[0]["params"] == held
    update.advance(other)
    assert [parameter.item() for parameter in held] == [0.5, 1.5, 1]
    assert (len(other.state), len(update.optimizer.state)) == (2, 0)


def test_a_factory_that_makes_something_else_the_second_time_is_refused():
    """The factory returns prepared objects, and then None."""
    held = parameters(1)
    results = [sgd(held), None]
    update = Update.make(held, lambda _: results.pop(0))
    with pytest.raises(SettingError, match=r"this one returned NoneType$"):
        update.new_optimizer()
    results = [sgd(held), sgd(parameters(2))]
    update = Update.make(held, lambda _: results.pop(0), place="stage 3")
    with pytest.raises(SettingError, match=r"1 parameter of stage 3 and returned SGD over 1 para"):
        update.new_optimizer()


def test_a_factory_that_returns_the_same_optimizer_twice_is_refused():
    """The copies of the weights would share one momentum."""
    held = parameters(1)
    only = sgd(held)
    update = Update.make(held, lambda _: only)
    with pytest.raises(SettingError, match="returned the same optimizer twice"):
        update.new_optimizer()


def test_an_optimizer_that_was_returned_for_an_earlier_copy_is_refused():
    """Whichever of them: a factory may take turns between prepared ones."""
    held = parameters(1)
    prepared = [sgd(held), sgd(held)]
    results = [*prepared, prepared[1], prepared[0]]
    update = Update.make(held, lambda _: results.pop(0))
    assert update.new_optimizer() is prepared[1]
    for _ in range(2):
        with pytest.raises(SettingError, match="returned the same optimizer twice"):
            update.new_optimizer()


def test_complex_parameters_are_trained_and_whole_numbers_are_none():
    """Of a stage, and of those that another stage steps."""
    turn = nn.Parameter(torch.ones(1, dtype=torch.complex64))
    whole = nn.Parameter(torch.ones(1, dtype=torch.int64), requires_grad=False)
    lent = nn.Parameter(torch.ones(1, dtype=torch.complex64))
    update = Update.make([turn, whole, lent], sgd, borrowed=[lent, whole])
    assert (update.candidates, update.borrowed_candidates) == ([turn], [lent])


def test_a_skipped_step_counts_and_its_gradients_are_dropped_by_the_next_batch():
    """Steps are compared between ranks; without a factory the user keeps the gradients."""
    for factory in (sgd, None):
        (weight,) = parameters(1.0)
        update = Update.make([weight], factory)
        update.skip()
        update.skip()
        assert update.steps == 2
        assert weight.item() == 1.0
        assert weight.grad is not None
        update.begin()
        assert (weight.grad is None) == (factory is not None)
        assert not update.stepping


def test_a_step_that_fails_does_not_count_as_complete():
    """The stage is then of no single step."""
    (weight,) = parameters(1.0)
    update = Update.make([weight], sgd)
    update.step()
    assert (update.steps, update.stepping) == (1, False)

    def fail():
        raise ValueError("planted")

    update.optimizer.step = fail
    with pytest.raises(ValueError, match="planted"):
        update.step()
    assert (update.steps, update.stepping) == (1, True)


def test_what_replicas_update_is_neither_stepped_nor_kept_here():
    """Its state is dropped, also what was loaded later; gradients are not summed into a later one."""
    here, there = parameters(1.0, 1.0)
    update = Update.make([here, there], lambda params: SGD(params, lr=0.5, momentum=0.9))
    update.step()
    assert len(update.optimizer.state) == 2
    update.leave_to_replicas([there])
    assert list(update.optimizer.state) == [here]
    values = here.item(), there.item()
    update.step()
    assert here.item() < values[0]
    assert there.item() == values[1]
    assert there.grad is None
    update.optimizer.state[there] = {"momentum_buffer": torch.ones(1)}
    update.drop_state_of_replicas()
    assert list(update.optimizer.state) == [here]
    alone = Update.make([there], None)
    alone.leave_to_replicas([there])


def test_borrowed_parameters_are_refreshed_and_zeroed_but_not_stepped():
    """Their gradients accumulate here too; another stage steps them."""
    stepped, lent, frozen = parameters(1.0, 1.0, 1.0)
    frozen.requires_grad_(requires_grad=False)
    update = Update.make([stepped, lent, frozen], sgd, borrowed=[lent, frozen])
    assert (update.parameters, update.borrowed) == ([stepped], [lent])
    assert update.trains
    frozen.requires_grad_()
    lent.requires_grad_(requires_grad=False)
    update.refresh()
    assert update.borrowed == [lent, frozen], "one that was trained stays, in its place"
    update.step()
    assert lent.item() == frozen.item() == 1.0
    update.zero()
    assert stepped.grad is lent.grad is frozen.grad is None


def test_a_stage_trains_if_any_parameter_requires_a_gradient():
    """One is enough, also a borrowed one."""
    first, second = parameters(1.0, 2.0)
    update = Update.make([first, second], sgd, borrowed=[second])
    for flags, trains in (((True, False), True), ((False, True), True), ((False, False), False)):
        for parameter, flag in zip((first, second), flags, strict=True):
            parameter.requires_grad_(requires_grad=flag)
        assert update.trains is trains


@pytest.mark.parametrize("clip_value", [None, 0.25, 0.0])
def test_gradients_are_limited_before_the_step(clip_value):
    """By value and of either sign; without a limit they stay."""
    *weights, lent = parameters(1.0, 1.0, 1.0)
    weights[1].grad = torch.full((1,), -3.0)
    Update.make([*weights, lent], sgd, borrowed=[lent], clip_value=clip_value).step()
    moves = [-0.5, 1.5] if clip_value is None else [-clip_value / 2, clip_value / 2]
    assert [weight.item() for weight in weights] == [1.0 + move for move in moves]
    assert lent.grad.item() == 1.0, "the stage that steps it limits the sum"


def test_an_advance_drops_gradients_also_where_the_factory_took_no_parameter():
    """They would be added to those of the next batch; without a factory they are the user's."""
    held = parameters(1)
    update = Update.make(held, lambda _: SGD([], lr=0.1))
    assert update.optimizer is None
    update.advance()
    assert (held[0].grad, held[0].item()) == (None, 1.0)
