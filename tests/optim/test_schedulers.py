"""Schedulers over the optimizers of several stages."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    CyclicLR,
    ExponentialLR,
    LRScheduler,
    MultiStepLR,
    ReduceLROnPlateau,
    StepLR,
)

from penstock.errors import SettingError
from penstock.optim.schedulers import Schedulers, stand_in


def optimizers(*groups):
    """Return an optimizer for each number of groups."""
    return [
        SGD([{"params": [nn.Parameter(torch.ones(1))]} for _ in range(count)], lr=1.0, momentum=0.9)
        for count in groups
    ]


def stepped(schedulers, held, times):
    """Step optimizers and scheduler as training does."""
    for _ in range(times):
        for optimizer in held:
            optimizer.step()
        schedulers.step()


def test_all_move_as_one():
    """All stages have the same learning rate."""
    held = optimizers(1, 1)
    schedulers = Schedulers(lambda optimizer: StepLR(optimizer, 2, gamma=0.5), held)
    stepped(schedulers, held, 4)
    assert schedulers.get_last_lr() == [0.25]
    assert [optimizer.param_groups[0]["lr"] for optimizer in held] == [0.25, 0.25]


def test_the_state_is_that_of_the_first_scheduler():
    """All ranks save the state of the first stage's."""
    held = optimizers(1, 2)
    schedulers = Schedulers(lambda optimizer: StepLR(optimizer, 2), held)
    assert schedulers.state_dict()["base_lrs"] == [1.0]
    assert json.loads(schedulers.as_json())["base_lrs"] == [1.0]


def test_a_state_goes_into_optimizers_that_have_other_groups():
    """A user's factory may create groups by the stage's parameters: state per group then stays the
    stage's own.
    """
    held = optimizers(2)
    schedulers = Schedulers(lambda optimizer: MultiStepLR(optimizer, [2, 3], gamma=0.5), held)
    stepped(schedulers, held, 3)
    others = optimizers(1, 2)
    restored = Schedulers(
        lambda optimizer: MultiStepLR(optimizer, [2, 3], gamma=0.5), others, schedulers.as_json()
    )
    assert restored.get_last_lr() == [1.0]
    assert [group["lr"] for group in others[1].param_groups] == [0.25, 0.25]
    assert restored.state_dict()["last_epoch"] == 3


def test_the_best_metric_so_far_is_kept_and_infinity_with_it():
    """Python's JSON can represent infinity, with which a plateau scheduler begins."""
    held = optimizers(1)
    schedulers = Schedulers(
        lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, factor=0.1), held
    )
    again = Schedulers(
        lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, factor=0.1),
        optimizers(1),
        schedulers.as_json(),
    )
    assert again.state_dict()["best"] == float("inf")
    schedulers.step(torch.tensor(2.0))
    schedulers.step(torch.tensor(3.0))
    assert json.loads(schedulers.as_json())["best"] == 2.0
    assert schedulers.get_last_lr() == pytest.approx([0.1])


def test_a_stand_in_steps_nothing_and_knows_the_rate():
    """For ranks without parameters to train."""
    optimizer = stand_in(lambda params: SGD(params, lr=2.0))
    assert Schedulers(lambda optimizer: StepLR(optimizer, 1), [optimizer]).get_last_lr() == [2.0]


class Odd(LRScheduler):
    """A scheduler with state that no file can hold."""

    def get_lr(self):
        """Return the unchanged rates."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self):
        """Return an unsupported state."""
        return {"odd": object()}


def test_a_state_that_no_checkpoint_can_hold_is_refused_by_its_class():
    """The error comes before a file is written without the state."""
    with pytest.raises(
        SettingError, match="the state of Odd cannot go into a checkpoint: Object of type object"
    ):
        Schedulers(Odd, optimizers(1)).as_json()


def test_a_learning_rate_that_is_a_tensor_stays_one_when_a_state_is_loaded():
    """A compiled step, or one that a graph has captured, reads the tensor."""
    held = optimizers(1)
    schedulers = Schedulers(lambda optimizer: StepLR(optimizer, 2, gamma=0.5), held)
    stepped(schedulers, held, 2)
    parameter = nn.Parameter(torch.ones(1))
    other = SGD([parameter], lr=torch.tensor(1.0, dtype=torch.float64), momentum=0.9)
    restored = Schedulers(lambda optimizer: StepLR(optimizer, 2, gamma=0.5), [other])
    rate = other.param_groups[0]["lr"]
    restored.load_json(schedulers.as_json())
    assert other.param_groups[0]["lr"] is rate
    assert (rate.item(), rate.dtype) == (0.5, torch.float64)


@pytest.mark.parametrize(("saved", "here"), [(1, 2), (2, 1), (3, 2)])
def test_lists_by_group_of_another_optimizer_are_not_taken(saved, here):
    """A stage's optimizer may have more groups than the one that was saved, or fewer: what is one
    number for all is restored, and rates stay.
    """

    def with_groups(count):
        groups = [{"params": [nn.Parameter(torch.ones(1))]} for _ in range(count)]
        return SGD(groups, lr=1.0)

    def make(optimizer):
        return StepLR(optimizer, 2, gamma=0.5)

    first = Schedulers(make, [with_groups(saved)])
    first._optimizers[0].step()
    for _ in range(5):
        first.step()
    optimizer = with_groups(here)
    restored = Schedulers(make, [optimizer])
    restored.load_json(first.as_json())
    state = restored.state_dict()
    assert state["last_epoch"] == 5
    assert len(state["base_lrs"]) == len(state["_last_lr"]) == here
    assert [group["lr"] for group in optimizer.param_groups] == [1.0] * here


def test_rates_of_another_number_of_groups_are_left_alone():
    """The stage's own rates stay, also if the state says nothing of rates."""
    (held,) = optimizers(2)
    schedulers = Schedulers(lambda optimizer: StepLR(optimizer, 1, gamma=0.5), [held])
    held.param_groups[0]["lr"] = 0.125
    state = schedulers.state_dict()
    for rates in ([0.75], [0.1, 0.2, 0.3], None):
        fitting = {key: value for key, value in state.items() if key != "_last_lr"}
        schedulers.load_state_dict(fitting if rates is None else {**fitting, "_last_lr": rates})
        assert [group["lr"] for group in held.param_groups] == [0.125, 1.0]
    schedulers.load_state_dict({**state, "_last_lr": [0.75, 0.25]})
    assert [group["lr"] for group in held.param_groups] == [0.75, 0.25]


def test_a_stand_in_is_one_number_where_the_factory_takes_it_and_never_warns(recwarn):
    """Then all shapes up to four dimensions at once, then each of the others alone."""
    attempts = []

    def factory(refused):
        def make(parameters):
            attempts.append([parameter.ndim for parameter in parameters])
            if len(attempts) <= refused:
                raise ValueError("not these")
            return SGD(parameters, lr=0.5)

        return make

    every = [[1], [1, 2, 3, 4], [2], [3], [4]]
    for refused in range(5):
        attempts.clear()
        optimizer = stand_in(factory(refused))
        assert attempts == every[: refused + 1]
    with pytest.raises(SettingError, match="this rank has no parameters"):
        stand_in(factory(100))
    StepLR(optimizer, 1).step()
    assert not recwarn.list


def test_a_resumed_scheduler_keeps_options_that_were_restored_before_it(recwarn):
    """A new scheduler sets learning rate and momentum to initial values."""

    def cyclic(optimizer):
        return CyclicLR(optimizer, 0.1, 1.0, step_size_up=2, cycle_momentum=True)

    held = optimizers(1)
    schedulers = Schedulers(cyclic, held)
    stepped(schedulers, held, 3)
    (group,) = held[0].param_groups
    others = optimizers(1, 1)
    for other in others:
        other.param_groups[0].update(lr=group["lr"], momentum=group["momentum"])
    resumed = Schedulers(cyclic, others, schedulers.as_json(), schedulers.kind)
    for other in others:
        for name in ("lr", "momentum"):
            assert other.param_groups[0][name] == group[name]
    stepped(schedulers, held, 2)
    stepped(resumed, others, 2)
    assert [other.param_groups[0]["lr"] for other in others] == [group["lr"]] * 2
    fresh = optimizers(1)
    fresh[0].param_groups[0]["momentum"] = 0.5
    Schedulers(cyclic, fresh)
    assert fresh[0].param_groups[0]["momentum"] != 0.5


def test_a_saved_state_of_another_class_is_refused_in_its_place():
    """By its name, or by its entries where the name is not known."""
    saved = Schedulers(lambda optimizer: StepLR(optimizer, 2), optimizers(1))
    text = saved.as_json()
    assert saved.kind == "torch.optim.lr_scheduler.StepLR"
    for kind, words in ((saved.kind, saved.kind), (None, "another one")):
        with pytest.raises(SettingError) as refusal:
            Schedulers(lambda optimizer: ExponentialLR(optimizer, 0.5), optimizers(1), text, kind)
        assert str(refusal.value) == (
            "this scheduler is torch.optim.lr_scheduler.ExponentialLR, and the checkpoint that was "
            f"loaded has the state of {words} in its place. Make the same schedulers in the same "
            "order; to begin them anew, load it with skip='schedulers'"
        )
    for kind in (saved.kind, "StepLR", "x.StepLR", None):
        state = json.loads(text)
        fits = saved.fits(kind, state)
        assert fits is (kind in (saved.kind, None))
    assert not saved.fits(None, {"last_epoch": 1})
    assert saved.fits(None, json.loads(text) | {"_private": 1})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            StepLR(SGD([nn.Parameter(torch.ones(1))], lr=1.0), 2),
            r"such as lambda optimizer: StepLR\(optimizer, \.\.\.\), since .* this is a StepLR itself$",
        ),
        (
            lambda optimizer: None,
            r"such as lambda .*: StepLR\(optimizer, 10\); this one returned NoneType$",
        ),
        (lambda optimizer: StepLR, r"this one returned type$"),
        (
            lambda optimizer, other=SGD([nn.Parameter(torch.ones(1))], lr=1.0): StepLR(other, 2),
            r"got a StepLR of another one: it ignores its argument\. Write lambda optimizer: StepLR",
        ),
    ],
)
def test_what_makes_no_scheduler_of_its_optimizer_is_refused_with_what_to_write(make, message):
    """A scheduler itself, nothing, a class, and a scheduler of an optimizer that is at hand."""
    with pytest.raises(SettingError, match=message):
        Schedulers(make, optimizers(1, 1))


def test_a_scheduler_of_the_optimizer_of_another_stage_is_refused():
    """A function that remembers its first optimizer would step the rates of one stage alone."""
    held = optimizers(1, 1)
    with pytest.raises(SettingError, match="got a StepLR of another one"):
        Schedulers(lambda _: StepLR(held[0], 2), held)


def test_arguments_of_a_step_reach_all_schedulers():
    """A metric, or the number of an epoch."""
    held = optimizers(1, 1)
    plateau = Schedulers(
        lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, factor=0.5), held
    )
    for metric in (1.0, 2.0, 3.0):
        plateau.step(metrics=metric)
    assert [optimizer.param_groups[0]["lr"] for optimizer in held] == [0.25, 0.25]
    assert plateau.state_dict()["best"] == 1.0


def test_schedulers_do_not_share_a_learning_rate_that_is_a_tensor():
    """Each would change it for all stages."""
    rate = torch.tensor(1.0)
    held = [SGD([nn.Parameter(torch.ones(1))], lr=rate) for _ in range(3)]
    schedulers = Schedulers(lambda optimizer: StepLR(optimizer, 1, gamma=0.5), held)
    stepped(schedulers, held, 2)
    assert [float(optimizer.param_groups[0]["lr"]) for optimizer in held] == [0.25] * 3


def test_tensors_in_a_state_become_numbers_and_lists():
    """At any depth; other values stay."""

    class Deep(LRScheduler):
        def get_lr(self):
            return [group["lr"] for group in self.optimizer.param_groups]

        def state_dict(self):
            return {
                "one": torch.tensor([2.5]),
                "row": (torch.tensor([1, 2]), "text", None),
                "map": {"x": [torch.tensor(True)]},
            }

    state = json.loads(Schedulers(Deep, optimizers(1)).as_json())
    assert state == {"one": 2.5, "row": [[1, 2], "text", None], "map": {"x": [True]}}


def test_a_factory_that_refuses_its_optimizer_is_reported_and_not_tried_again():
    """The message on a wrong result is that of any stage."""
    calls = []

    def factory(parameters):
        calls.append(parameters)
        return "no optimizer"

    with pytest.raises(SettingError, match="this one returned str"):
        stand_in(factory)
    assert len(calls) == 1
    optimizer = stand_in(lambda params: SGD([p for p in params if p.ndim > 1], lr=0.25))
    assert [p.ndim for p in optimizer.param_groups[0]["params"]] == [2, 3, 4]


def test_learning_rates_are_numbers_also_where_the_optimizers_are_tensors():
    """They are printed, and compared."""
    held = SGD([nn.Parameter(torch.ones(1))], lr=torch.tensor(0.5))
    (rate,) = Schedulers(lambda optimizer: StepLR(optimizer, 2), [held]).get_last_lr()
    assert (type(rate), rate) == (float, 0.5)


def test_a_scheduler_of_a_script_fits_where_the_script_is_imported():
    """Its class is then one of `__main__` in the checkpoint."""
    schedulers = Schedulers(Odd, optimizers(1))
    name = schedulers.kind.rpartition(".")[2]
    assert schedulers.fits(f"__main__.{name}", {})
    assert not schedulers.fits(f"elsewhere.{name}", {})
    assert not schedulers.fits("__main__.Other", {})


@pytest.mark.parametrize("missing", ["step", "state_dict"])
def test_an_object_that_lacks_a_method_of_a_scheduler_is_none(missing):
    """One that can step has to be saved, and the other way round."""
    methods = {name: lambda *_: None for name in ("step", "state_dict") if name != missing}
    half = type("Half", (), methods)
    with pytest.raises(SettingError, match="this one returned Half"):
        Schedulers(lambda _: half(), optimizers(1))


def test_a_scheduler_may_call_something_else_its_optimizer():
    """Only one that is another optimizer shows that the function ignores its argument."""

    class Named:
        """A scheduler of the user, with the name of its optimizer."""

        optimizer = "sgd"

        def step(self):
            """Do nothing."""

        def state_dict(self):
            """Return no state."""
            return {}

    assert Schedulers(lambda _: Named(), optimizers(1)).state_dict() == {}
