"""Weight prediction: optimizers and weights that a paper has no formula for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.errors import SettingError
from penstock.weights.rule_types import Reads

REFUSED = [
    (
        "spectrain",
        lambda ps: torch.optim.SGD(ps, lr=0.1),
        r"'spectrain' has no formula for SGD with momentum=0: its paper .*; give it mo",
    ),
    (
        "spectrain",
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
        r"SGD with nesterov=True",
    ),
    (
        "spectrain",
        torch.optim.Adam,
        r"'spectrain' has no formula for Adam: its paper has no other; it goes with SGD ",
    ),
    (
        "xpipe",
        lambda ps: torch.optim.SGD(ps, lr=0.1),
        r"'xpipe' has no formula for SGD: .*; it goes with Adam and AdamW \(stage 0; so",
    ),
    ("xpipe", lambda ps: torch.optim.Adam(ps, amsgrad=True), r"Adam with amsgrad=True"),
    (
        "pipeoptim",
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
        r"SGD with nesterov=True: .*; omit nesterov",
    ),
    ("pipeoptim", lambda ps: torch.optim.RMSprop(ps, momentum=0.9), r"RMSprop with momentum"),
    ("pipeoptim", lambda ps: torch.optim.RMSprop(ps, centered=True), r"RMSprop with centered=True"),
    (
        "pipeoptim",
        torch.optim.Adagrad,
        r"'pipeoptim' has no formula for Adagrad: .* goes with SGD, Adam, AdamW and RMSprop",
    ),
]


@pytest.mark.parametrize(("rule", "factory", "message"), REFUSED)
def test_an_optimizer_that_the_paper_has_no_formula_for_is_refused_with_the_reason(
    lab, rule, factory, message
):
    """A wrong prediction would only make training worse, without an error."""
    with pytest.raises(SettingError, match=message):
        lab.make(lab.site_of(lab.mlp(), lab.line_of(rule, 0, 2, 1, 4), rule, factory))


def test_one_parameter_group_without_a_formula_is_enough_for_a_refusal(lab):
    """Whichever of them it is."""
    module = lab.mlp()
    line = lab.line_of("pipeoptim", 0, 2, 1, 3)
    first, *others = module.parameters()
    for nesterov in ((True, False), (False, True)):
        groups = [
            {"params": params, "nesterov": flag}
            for params, flag in zip(([first], others), nesterov, strict=True)
        ]
        site = lab.site_of(
            module, line, "pipeoptim", lambda _, g=groups: torch.optim.SGD(g, 0.1, momentum=0.9)
        )
        with pytest.raises(SettingError, match="no formula for SGD with nesterov=True"):
            lab.make(site)


def test_a_users_rule_that_predicts_does_so_with_the_optimizers_own_formula_or_is_refused(lab):
    """Rules with other names have no formula of their own."""
    line = lab.Line(0, 1, 1, 4, lambda at: Reads(at.at_forward, at.at_backward, 1, 1))
    rule = lab.rule_called("mine", arithmetic="predicted")
    module = lab.mlp()
    weights = lab.make(lab.site_of(module, line, "mine", lab.PAIRS["adam"][0], rule=rule))
    for version in (1, 2):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        weights.update(version)
    before = lab.values_of(module)
    weights.before_forward(2)
    # Of equal gradients Adam's step is the learning rate.
    for value, predicted in zip(before, lab.values_of(module), strict=True):
        torch.testing.assert_close(predicted, value - 0.01)
    with pytest.raises(
        SettingError,
        match=r"'mine' has no formula for Adagrad: .*; it supports SGD, Adam, AdamW, RMSprop",
    ):
        lab.make(lab.site_of(lab.mlp(), line, "mine", torch.optim.Adagrad, rule=rule))


@pytest.mark.parametrize("factory", [torch.optim.Adam, torch.optim.RMSprop])
def test_complex_weights_are_refused_where_the_formula_takes_roots(lab, factory):
    """torch treats real and imaginary parts separately; the formula does not define this."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.complex64))
    site = lab.site_of(module, lab.line_of("pipeoptim", 0, 2, 1, 4), "pipeoptim", factory)
    with pytest.raises(SettingError, match=r" on complex weights: .*; it is for real ones"):
        lab.make(site)
