"""Implementations of weight rules by name, and what all of them have in common."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from penstock.errors import SettingError, UnknownName
from penstock.optim.catalogue import ARITHMETIC, kind_of
from penstock.schedule.streaming.streams import Waves

#: Every rule with an optimizer that it goes with; some where the resumed state is of another kind.
RULES_AND_OPTIMIZERS = [
    ("none", "momentum"),
    ("stash", "adam"),
    ("vertical-sync", "momentum"),
    ("double-buffer", "adamw"),
    ("spectrain", "momentum"),
    ("xpipe", "adam"),
    ("pipeoptim", "sgd with decay"),
    ("pipeoptim", "adamw"),
    ("pipeoptim", "rmsprop"),
    ("pipemare", "adam"),
    ("avgpipe", "adam"),
    ("avgpipe", "momentum"),
    ("hetpipe", "adam"),
]


class Alone:
    """An exchange for a replica that has no others."""

    copies = 1

    def send_wave(self, wave, tensors):
        """Send to no replica."""

    def receive_wave(self, wave):
        """Receive from no replica."""
        return []


def weights_on(lab, module, rule, pair, stage=0):
    """Return weights under a rule, and their line."""
    micro_batches = 3 if rule in ("double-buffer", "xpipe", "pipeoptim") else 1
    pipelines = 3 if rule == "avgpipe" else 1
    line = lab.line_of(rule, stage, 3, micro_batches, batches=5, pipelines=pipelines)
    factory = (
        (lambda ps: torch.optim.RMSprop(ps, lr=0.01)) if pair == "rmsprop" else lab.PAIRS[pair][0]
    )
    facts = {"waves": Waves(2, 0), "exchange": Alone()} if rule == "hetpipe" else {}
    site = lab.site_of(module, line, rule, factory, staleness=2.0, **facts)
    return lab.make(site), line, site.update.optimizer


@pytest.mark.parametrize(("rule", "pair"), RULES_AND_OPTIMIZERS)
def test_a_run_that_is_saved_at_a_drain_and_loaded_elsewhere_goes_on_to_the_bit(lab, rule, pair):
    """Checkpoints are taken within a stream, after a drain. The rest of the stream must not depend
    on whether the run was interrupted there.
    """
    module = lab.mlp()
    weights, line, optimizer = weights_on(lab, module, rule, pair)
    lab.play(module, weights, line.ops, lab.vectors, lab.squares)
    weights.drain()

    file = io.BytesIO()
    torch.save(
        [module.state_dict(), optimizer.state_dict(), dict(weights.state()), dict(weights.facts())],
        file,
    )
    file.seek(0)
    values, of_optimizer, state, facts = torch.load(file)
    assert all(len(row) == len(list(module.parameters())) for row in state.values())
    other = lab.mlp(seed=7)
    resumed, _, other_optimizer = weights_on(lab, other, rule, pair)
    lab.play(
        other, resumed, line.ops, lambda n: lab.vectors(n + 500), lab.squares
    )  # whatever it did before is forgotten
    resumed.drain()
    other.load_state_dict(values)
    other_optimizer.load_state_dict(of_optimizer)
    resumed.load_state(state)
    resumed.load_facts(facts)

    later = lambda n: lab.vectors(n + 90)  # noqa: E731
    first = lab.play(module, weights, line.ops, later, lab.squares)
    second = lab.play(other, resumed, line.ops, later, lab.squares)
    weights.drain()
    resumed.drain()
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, module.parameters(), other.parameters()))


@pytest.mark.parametrize(("rule", "pair"), RULES_AND_OPTIMIZERS)
def test_a_checkpoint_of_another_rule_has_nothing_for_it_and_it_begins_anew(lab, rule, pair):
    """A run that began with `stash` may continue with any other rule."""
    module, other = lab.mlp(), lab.mlp()
    weights, line, _ = weights_on(lab, module, rule, pair)
    used, _, optimizer = weights_on(lab, other, rule, pair)
    lab.play(other, used, line.ops, lab.vectors, lab.squares)
    used.drain()
    optimizer.state.clear()
    other.load_state_dict(module.state_dict())
    used.load_state({})
    used.load_facts({})
    first = lab.play(module, weights, line.ops, lab.vectors, lab.squares)
    second = lab.play(other, used, line.ops, lab.vectors, lab.squares)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(("rule", "pair"), RULES_AND_OPTIMIZERS)
def test_no_more_is_held_than_the_rule_says(lab, rule, pair, stage):
    """Plans compute memory from the versions and `extra` of a rule, which must be an upper bound.
    The gradients that a prediction keeps, and the scratch memory for roots, are added.
    """
    module = lab.mlp()
    weights, line, _ = weights_on(lab, module, rule, pair, stage)
    size = sum(parameter.nbytes for parameter in module.parameters())
    most, graphs = 0, {}
    for op in line.ops:
        lab.play(module, weights, [op], lab.vectors, lab.squares, graphs=graphs)
        most = max(most, weights.held_bytes())
    extra = (
        lab.EXTRA.get(rule, 0)
        + (pair in ("sgd with decay", "rmsprop"))
        + (pair in ("adam", "adamw", "rmsprop") and rule in lab.OPTIMIZERS)
    )
    assert most <= (weights.peak_versions + extra) * size


@pytest.mark.parametrize(("rule", "pair"), RULES_AND_OPTIMIZERS)
def test_after_a_drain_parameters_can_be_evaluated_loaded_and_trained_on(lab, rule, pair):
    """The parameters of a drained stage are its newest version, in memory that others may write to."""
    module = lab.mlp()
    weights, line, _ = weights_on(lab, module, rule, pair)
    lab.play(module, weights, line.ops, lab.vectors, lab.squares)
    weights.drain()
    before = lab.values_of(module)
    weights.drain()
    assert all(map(torch.equal, module.parameters(), before))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    weights.load_state({})
    weights.before_forward(0)
    if rule not in ("spectrain", "xpipe", "pipeoptim"):
        assert all(not parameter.any() for parameter in module.parameters())
    weights.drain()
    assert all(not parameter.any() for parameter in module.parameters())


@pytest.mark.parametrize(("rule", "pair"), RULES_AND_OPTIMIZERS)
def test_frozen_parameters_and_buffers_are_left_alone(lab, rule, pair):
    """Batch norm's statistics are always the newest, as in PipeDream."""
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 3)
    ).double()
    weights, line, _ = weights_on(lab, module, rule, pair)
    frozen = module[2].weight
    place, before = frozen.data_ptr(), frozen.detach().clone()
    buffers = [buffer.data_ptr() for buffer in module.buffers()]
    lab.play(module, weights, line.ops, lab.vectors, lab.squares)
    weights.drain()
    assert frozen.data_ptr() == place
    assert torch.equal(frozen, before)
    assert [buffer.data_ptr() for buffer in module.buffers()] == buffers
    assert module[1].num_batches_tracked == len({n for kind, n in line.ops if kind == "F"})


@pytest.mark.parametrize(
    "rule", ["none", "stash", "spectrain", "xpipe", "pipeoptim", "pipemare", "avgpipe", "hetpipe"]
)
@pytest.mark.parametrize(
    "module", [nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)], ids=["no weights", "frozen"]
)
def test_a_stage_with_nothing_to_train_holds_nothing(lab, rule, module):
    """A stage may consist of activations and pools; no optimizer is created for it, so none is
    rejected.
    """
    line = lab.line_of(rule, 0, 1, 1, 2)
    weights = lab.make(lab.site_of(module, line, rule, torch.optim.Adagrad))
    for kind, number in line.ops:
        {"F": weights.before_forward, "B": weights.before_backward, "U": weights.update}[kind](
            number
        )
    weights.drain()
    assert (weights.versions, weights.held_bytes(), weights.state(), weights.facts()) == (
        1,
        0,
        {},
        {},
    )


def test_without_an_optimizer_gradients_add_up_and_nothing_moves(lab):
    """Users who update by hand decide when gradients are dropped, in a stream too."""
    module = lab.mlp()
    before = lab.values_of(module)
    weights = lab.make(lab.site_of(module, lab.line_of("stash", 0, 2, 1, 3), "stash", None))
    for number in range(2):
        weights.before_forward(number)
        loss = lab.squares(module(lab.vectors(0)[0]), lab.vectors(0)[1])
        weights.before_backward(number)
        loss.backward()
        weights.finished(number)
        weights.update(number + 1)
    assert all(map(torch.equal, module.parameters(), before))
    alone = copy.deepcopy(module)
    alone.zero_grad()
    lab.squares(alone(lab.vectors(0)[0]), lab.vectors(0)[1]).backward()
    assert all(
        torch.equal(a.grad, 2 * b.grad)
        for a, b in zip(module.parameters(), alone.parameters(), strict=True)
    )


@pytest.mark.parametrize(("rule", "pipelines"), [("stash", 1), ("spectrain", 1), ("avgpipe", 2)])
def test_without_an_optimizer_every_rule_has_a_single_version(lab, rule, pipelines):
    """No update creates another one; rules that need an optimizer of some kind accept none."""
    module = lab.mlp()
    line = lab.line_of(rule, 0, 2, 1, 4, pipelines=pipelines)
    weights = lab.make(lab.site_of(module, line, rule, None))
    places = [parameter.data_ptr() for parameter in module.parameters()]
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    for kind, number in line.ops:
        {"F": weights.before_forward, "B": weights.before_backward, "U": weights.update}[kind](
            number
        )
        if kind == "B":
            weights.finished(number)
    assert weights.versions == weights.peak_versions == 1
    assert weights.held_bytes() == sum(parameter.nbytes for parameter in module.parameters())
    assert [parameter.data_ptr() for parameter in module.parameters()] == places


def test_every_arithmetic_is_found_by_name():
    """Rules refer to them by name; a misspelt name must not select another one."""
    assert list(ARITHMETIC.entries()) == [
        "averaged",
        "corrected",
        "newest",
        "predicted",
        "versions",
        "waves",
    ]
    with pytest.raises(
        UnknownName, match=r"no weight arithmetic called 'version'\. Did you mean 'versions'\?"
    ):
        ARITHMETIC.find("version")


def test_a_class_derived_from_torchs_counts_as_torchs(lab):
    """Users log in `step`. AdamW derives from Adam, but does not count as Adam."""

    class Logged(torch.optim.Adam):
        pass

    class Own(torch.optim.Optimizer):
        pass

    parameters = [nn.Parameter(torch.ones(1))]
    assert kind_of(Logged(parameters)) == "Adam"
    assert kind_of(torch.optim.AdamW(parameters)) == "AdamW"
    assert kind_of(Own(parameters, {})) == "Own"
    sharded = type("Sharded", (torch.optim.SGD,), {"__module__": "torch.distributed.optim"})
    assert kind_of(sharded(parameters, lr=0.1)) == "SGD"
    rule = lab.rule_called("mine", optimizers=("Adam",), because="why not")
    line = lab.line_of("stash", 0, 1, 1, 2)
    assert lab.make(lab.site_of(lab.mlp(), line, "mine", Logged, rule=rule)).versions == 1
    message = r"^weight rule 'mine' has no formula for AdamW: why not; it goes with Adam \(stage 0; source: a paper\)$"
    with pytest.raises(SettingError, match=message):
        lab.make(lab.site_of(lab.mlp(), line, "mine", torch.optim.AdamW, rule=rule))


@pytest.mark.parametrize(
    ("allowed", "because", "listed"),
    [
        (("Adam",), "", "has no formula for SGD; it goes with Adam (stage 0;"),
        (("Adam", "AdamW"), "", "has no formula for SGD; it goes with Adam and AdamW (stage 0;"),
        (("Adam", "AdamW", "RMSprop"), "", "it goes with Adam, AdamW and RMSprop (stage 0;"),
        (("Adam",), "so it is", "has no formula for SGD: so it is; it goes with Adam (stage 0;"),
        (("SGD",), "", None),
        ((), "", None),
    ],
)
def test_the_optimizers_of_a_rule_are_listed_with_its_reason(lab, allowed, because, listed):
    """A rule without a list goes with all."""
    rule = lab.rule_called("mine", optimizers=allowed, because=because)
    site = lab.site_of(
        lab.mlp(), lab.line_of("stash", 0, 1, 1, 2), "mine", lab.PAIRS["sgd"][0], rule=rule
    )
    if listed is None:
        assert lab.make(site).versions == 1
        return
    with pytest.raises(SettingError) as refusal:
        lab.make(site)
    assert listed in str(refusal.value)
