"""The methods of a pipeline for its optimizers, in the order in which they ask its parts."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import SettingError
from penstock.runtime import optimizer_methods
from penstock.runtime.optimizer_methods import Optimizing


class Pipe(Optimizing):
    """A pipeline whose parts record."""

    def __init__(self, *, stream=True, more=False, replicas=1, unshared=None):
        self.log = log = []
        self._accumulate, self._accumulated = 3, 0
        self.setting = SimpleNamespace(schedule=ps.schedule("gpipe", stages=1, micro_batches=1))
        self._global_step = SimpleNamespace(scaler=None, grad_norm=None, skipped=0)

        @contextmanager
        def whole():
            log.append("whole")
            yield
            log.append("divided")

        def check_unshared(what, instead):
            log.append((what, instead))
            if unshared:
                raise unshared

        self._assembly = SimpleNamespace(
            check_unshared=check_unshared,
            whole_optimizer_state=whole,
            optimizer_replicas=replicas,
            drop_state_of_replicas=lambda: log.append("drop"),
            setting=SimpleNamespace(schedule=SimpleNamespace(name="hetpipe")),
            optimizers=lambda: self.optimizers,
        )
        weights = SimpleNamespace(
            has_more_optimizers=lambda: more, restart=lambda: log.append("restart")
        )
        self._stream = None
        if stream:
            self._stream = SimpleNamespace(
                weights=weights,
                empty=lambda: log.append("empty"),
                flush=lambda: log.append("flush"),
            )


@pytest.fixture(autouse=True)
def plain_state(monkeypatch):
    """Record what is collected and restored."""
    monkeypatch.setattr(
        optimizer_methods,
        "plain_state",
        SimpleNamespace(
            collect=lambda assembly: assembly.log.append("collect") or {"a": 1},
            restore=lambda assembly, state: assembly.log.append(("restore", state)),
        ),
    )


def logged(pipe):
    """Let a pipeline's assembly have its log, and return it."""
    pipe._assembly.log = pipe.log
    return pipe


@pytest.mark.parametrize("stream", [False, True])
def test_the_state_is_that_after_all_batches_in_flight(stream):
    """And whole while it is collected, where replicas divide it."""
    pipe = logged(Pipe(stream=stream))
    assert pipe.optimizer_state_dict() == {"a": 1}
    flush = ["flush"] if stream else []
    unshared = ("optimizer_state_dict", "use pipe.save")
    assert pipe.log == [unshared, *flush, "whole", "collect", "divided"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stream_begins_anew_with_a_loaded_state(stream):
    """It is empty before, and its rule starts from the weights afterwards."""
    pipe = logged(Pipe(stream=stream))
    pipe.load_optimizer_state_dict({"b": 2})
    calls = ["empty"] * stream + [("restore", {"b": 2}), "drop"] + ["restart"] * stream
    assert pipe.log == [("load_optimizer_state_dict", "use pipe.load"), *calls]


@pytest.mark.parametrize("kind", [{"more": True}, {"replicas": 2}])
def test_several_optimizers_of_a_stage_are_not_one(kind):
    """Those of a weight rule, and those of copies of a stage."""
    for call, words in (
        (lambda pipe: pipe.optimizer_state_dict(), "has no form in plain PyTorch"),
        (lambda pipe: pipe.load_optimizer_state_dict({}), "cannot be taken from plain PyTorch"),
    ):
        pipe = logged(Pipe(**kind))
        message = rf"^the optimizer's state {words}: hetpipe keeps several copies"
        with pytest.raises(SettingError, match=message):
            call(pipe)
        assert pipe.log[1:] in (["flush"], ["empty"])


def test_shared_layers_are_refused_before_anything_happens():
    """A state of parts has no plain form."""
    for call in ("optimizer_state_dict", "load_optimizer_state_dict"):
        pipe = logged(Pipe(unshared=SettingError("shared")))
        with pytest.raises(SettingError, match="shared"):
            getattr(pipe, call)(*[{}][: call.startswith("load")])
        assert len(pipe.log) == 1


def test_the_number_of_batches_per_step_changes_between_steps_alone():
    """The message has the number of batches that wait."""
    pipe = Pipe()
    pipe.accumulate = 5
    assert pipe.accumulate == 5
    for waiting in (1, 2):
        pipe._accumulated = waiting
        with pytest.raises(SettingError, match=f"gradients of {waiting} batches wait"):
            pipe.accumulate = 1
    assert pipe.accumulate == 5
    pipe._accumulated = 0
    with pytest.raises(SettingError, match="1 or more, not 0"):
        pipe.accumulate = 0
    pipe.setting.schedule = ps.schedule("pipedream", stages=2)
    with pytest.raises(SettingError, match="accumulate=2: pipedream is asynchronous"):
        pipe.accumulate = 2
    assert pipe.accumulate == 5


def test_scale_norm_and_skipped_steps_are_those_of_the_global_step():
    """The scale is 1 without a scaler."""
    pipe = Pipe()
    assert (pipe.loss_scale, pipe.skipped, pipe.grad_norm) == (1.0, 0, None)
    pipe._global_step.scaler = SimpleNamespace(scale=256.0)
    pipe._global_step.grad_norm, pipe._global_step.skipped = 0.5, 3
    assert (pipe.loss_scale, pipe.skipped, pipe.grad_norm) == (256.0, 3, 0.5)


def test_learning_rates_are_those_of_the_groups_of_all_stages():
    """One for all groups, or one each."""
    pipe = Pipe()
    pipe.optimizers = [
        torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.1, 0.2)])
        for _ in range(2)
    ]
    assert pipe.learning_rates == [0.1, 0.2]
    pipe.set_learning_rate([0.3, 0.4])
    assert pipe.learning_rates == [0.3, 0.4]
    pipe.set_learning_rate(0.5)
    rates = [group["lr"] for optimizer in pipe.optimizers for group in optimizer.param_groups]
    assert rates == [0.5] * 4
    assert [len(group["params"]) for group in pipe.param_groups] == [2, 2]
    # A fused optimizer keeps its learning rate as a tensor.
    for optimizer in pipe.optimizers:
        optimizer.param_groups[1]["lr"] = torch.tensor(0.25)
    assert pipe.learning_rates == [0.5, 0.25]
    assert [type(rate) for rate in pipe.learning_rates] == [float, float]
