"""What a pipeline checks, and which parts it makes, in which order."""

from __future__ import annotations

import pytest
import torch
from tests.runtime.test_pipeline_training import plain_layers, threads
from torch import nn

import penstock as ps
from penstock.errors import SettingError
from penstock.runtime import pipeline as module
from penstock.runtime.assembly import Assembly
from penstock.stage.training_options import TrainingOptions


def recorded(monkeypatch, *names):
    """Let functions of the module record their calls in order: name, arguments and options."""
    log = []

    def recording(name, function):
        def call(*args, **options):
            log.append((name, args, options))
            return function(*args, **options)

        return call

    for name in names:
        monkeypatch.setattr(module, name, recording(name, getattr(module, name)))
    return log


def test_a_pipeline_is_constructed_in_the_order_in_which_ranks_can_compare(monkeypatch):
    """Settings before links, optimizers before weights are sent: ranks with different ones would
    wait for messages that never come.
    """
    names = (
        "next_settings_exchange",
        "place_on_hosts",
        "compare_settings",
        "world_of",
        "assemble",
        "compare_optimizers",
        "guard_for",
    )
    log = recorded(monkeypatch, *names)
    begin = module.Pipeline._begin
    monkeypatch.setattr(
        module.Pipeline,
        "_begin",
        lambda self, *args: log.append(("begin", args)) or begin(self, *args),
    )
    share = Assembly.share_weights
    monkeypatch.setattr(
        Assembly, "share_weights", lambda self: log.append(("share",)) or share(self)
    )
    model = plain_layers()
    pipe = threads(
        model, [2, 1], seed=5, check_data=False, accumulate=3, scaler=True, deadline_s=7.0
    )
    assert [entry[0] for entry in log] == [*names, "share", "begin"]
    _, (exchange, chain, setting, training), options = log[2]
    assert (exchange, options) == (None, {"check_data": False})
    assert (setting.lengths, training.seed) == ((2, 1), 5)
    assert chain.modules[0] is model[0]
    assert log[0][1][1].deadline_s == log[3][1][2].deadline_s == 7.0
    scaling, whole_chain = log[-1][1]
    assert whole_chain is chain
    assert pipe._global_step.scaler is scaling is not None
    assert pipe._global_step.options is pipe._training.options
    assert pipe._world.calls.check_data is False
    assert (pipe.accumulate, pipe.step) == (3, 0)
    assert threads(model, [2, 1])._world.calls.check_data is True


@pytest.mark.parametrize(
    ("layer", "schedule", "text"),
    [
        (nn.BatchNorm1d(4), ps.schedule("terapipe", 2, 2), "terapipe cuts sequences into slices"),
        (
            nn.Embedding(4, 4, max_norm=1.0),
            ps.schedule("1f1b", 2, 2, replicas=(2, 1)),
            "max_norm",
        ),
    ],
)
def test_layers_that_a_schedule_would_train_differently_are_refused(layer, schedule, text):
    """Before anything is constructed."""
    with pytest.raises(SettingError, match=text):
        threads(nn.Sequential(layer, nn.Linear(4, 2)), [1, 1], schedule=schedule)


def test_a_mesh_replicates_the_plan_and_its_copies_compare_only_on_request(monkeypatch):
    """Without a mesh, the configuration stays as it is."""
    log = recorded(monkeypatch, "plan_for_mesh", "replicated", "check")
    copies = []
    monkeypatch.setattr(module.CopyBatches, "of", lambda *args, **options: copies.append(options))
    pipe = threads(plain_layers(), [2, 1], check_data=False)
    assert [name for name, _, _ in log] == ["plan_for_mesh", "replicated", "check"]
    assert [args[1] for _, args, _ in log[:2]] == [None, None]
    assert log[2][1] == (pipe.setting,)
    assert copies == [{"compares": False}]


def test_layers_are_compiled_only_where_the_device_has_a_compiler(monkeypatch):
    """That of the first rank of this process is asked; before any stage is made."""
    devices = []

    def check_compiler(options, device):
        devices.append(device)
        raise SettingError("no compiler")

    monkeypatch.setattr(TrainingOptions, "check_compiler", check_compiler)
    monkeypatch.setattr(module, "assemble", None)
    with pytest.raises(SettingError, match="no compiler"):
        threads(plain_layers(), [2, 1])
    assert devices == [torch.device("cpu")]


class WithWeights(nn.Module):
    """A loss with a trainable weight."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output, target):
        """Return the scaled error."""
        return self.scale * (output - target).square().mean()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"optimizer": None, "clip_grad_norm": 1.0}, "clip_grad_norm is an option of the update"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)}, "optimizer=lambda params: "),
        ({"loss": WithWeights()}, "has 1 trainable weight of its own"),
    ],
)
def test_options_without_effect_and_weights_without_an_optimizer_are_refused(options, text):
    """They would be ignored without a word."""
    options = {"loss": nn.functional.mse_loss, "optimizer": torch.optim.Adam, **options}
    with pytest.raises(SettingError, match=text):
        ps.Pipeline(plain_layers(), balance=[2, 1], executor="threads", **options)
