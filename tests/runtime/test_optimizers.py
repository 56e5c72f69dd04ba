"""Optimizers and parameters: trained to the same numbers as in plain PyTorch, or refused before."""

from __future__ import annotations

import copy
import functools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler

import penstock as ps
from penstock.errors import RunError, SettingError

SCHEDULES = ["gpipe", "1f1b", "chimera", "zb-h1", "interleaved"]
INF = float("inf")


def model(tied=False, seed=0):
    """Four linear maps in double precision; with `tied` two of them share a weight."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = nn.Sequential(
            *(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh()),
            *(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4), nn.Identity()),
        ).double()
    if tied:
        network[4].weight = network[2].weight
    return network


def batch(number=0, samples=8):
    """Return inputs and labels."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(4, (samples,), generator=generator)


def sgd(params):
    """SGD with momentum and weight decay."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.05)


def adamw(params):
    """AdamW with weight decay."""
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def pipeline(network, **options):
    """A pipeline whose ranks are threads."""
    options = {
        "loss": functional.cross_entropy,
        "optimizer": sgd,
        "balance": [2, 2, 2, 2],
        "micro_batches": 4,
        **options,
    }
    return ps.Pipeline(network, executor="threads", **options)


def plain_step(
    network, optimizer, number, loss=functional.cross_entropy, clip=lambda parameters: None
):
    """Run one step on the undivided batch."""
    x, y = batch(number)
    optimizer.zero_grad()
    loss(network(x), y).backward()
    clip(list(network.parameters()))
    optimizer.step()


def furthest(network, other):
    """Return the largest relative difference of two models' weights."""
    pairs = zip(network.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def same_state(actual, expected):
    """Check that two optimizer states are the same."""
    assert actual["param_groups"] == expected["param_groups"]
    assert actual["state"].keys() == expected["state"].keys()
    for key, values in expected["state"].items():
        assert actual["state"][key].keys() == values.keys()
        for name, value in values.items():
            ours = actual["state"][key][name]
            if isinstance(value, torch.Tensor):
                assert ours.dtype == value.dtype or not value.dim()
                # torch casts a count to the parameter's dtype when it loads it
                assert torch.allclose(
                    ours.double(),
                    value.double(),
                    rtol=1e-6 if not value.dim() else 1e-9,
                    atol=1e-13,
                ), (key, name)
            else:
                assert ours == value


# -- factories
# ------------------------------------------------------------------------------------------------


def test_an_optimizer_over_all_of_the_model_or_one_for_all_stages_is_refused():
    """Each stage's step would step all weights: they were 73 % off after four steps."""
    network = model()
    with pytest.raises(
        SettingError, match=r"called with the 2 parameters of stage 0 and returned SGD"
    ):
        pipeline(network, optimizer=lambda params: sgd(network.parameters()))
    optimizers = []

    def cached(params):
        optimizers.append(sgd(params))
        return optimizers[0]

    with pytest.raises(SettingError, match=r"2 parameters of stage 1 .* not one optimizer for all"):
        pipeline(network, optimizer=cached)


def test_an_optimizer_in_place_of_a_factory_is_refused_with_what_to_write():
    """The error once was that an SGD object is not callable."""
    network = model()
    with pytest.raises(
        SettingError, match=r"Write optimizer=lambda params: torch\.optim\.SGD\(params"
    ):
        pipeline(network, optimizer=sgd(network.parameters()))


@pytest.mark.parametrize(
    "factory",
    [torch.optim.Adagrad, functools.partial(torch.optim.Adam, lr=0.01), adamw],
    ids=["class", "partial", "function"],
)
def test_classes_partials_and_functions_are_factories(factory):
    """These are the forms that users write."""
    network, plain = model(), model()
    pipe, optimizer = pipeline(network, optimizer=factory), factory(plain.parameters())
    for number in range(3):
        pipe.train_batch(*batch(number))
        plain_step(plain, optimizer, number)
    assert furthest(network, plain) < 1e-12


def test_parameters_that_a_factory_leaves_out_are_not_trained():
    """As in plain PyTorch. A stage may have none of the chosen ones, which version 0.1 refused."""
    network, plain = model(), model()
    only = [network[2].weight, network[6].weight]

    def chosen(params):
        return sgd([p for p in params if any(p is parameter for parameter in only)])

    pipe = pipeline(network, optimizer=chosen)
    optimizer = sgd([plain[2].weight, plain[6].weight])
    scheduler = pipe.scheduler(lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5))
    reference = lr_scheduler.ExponentialLR(optimizer, 0.5)
    for number in range(4):
        pipe.train_batch(*batch(number))
        plain.zero_grad()
        plain_step(plain, optimizer, number)
        scheduler.step()
        reference.step()
    assert furthest(network, plain) < 1e-12
    assert scheduler.get_last_lr() == reference.get_last_lr()
    same_state(pipe.optimizer_state_dict(), optimizer.state_dict())


def test_a_factory_that_chooses_by_identity_is_refused_where_stages_have_copies():
    """The copies have parameters of their own, which would silently be left out."""
    network = model()
    only = [network[2].weight, network[6].weight]

    def chosen(params):
        return sgd([p for p in params if any(p is parameter for parameter in only)])

    with pytest.raises(SettingError, match=r"for one copy of stage 1 than for another.* p\.ndim"):
        pipeline(network, optimizer=chosen, schedule="chimera")
    pipeline(
        network, optimizer=lambda params: sgd([p for p in params if p.ndim > 1]), schedule="chimera"
    )


# -- freezing and thawing
# --------------------------------------------------------------------------------------------------

CHANGES = {
    "a layer thawed, one frozen": ((0,), (6,)),
    "whole stages thawed": ((2, 4, 6), (0,)),
    "thawed and frozen again": ((0, 2, 4), (2,)),
}
OPTIONS = {
    "plain": {},
    "recompute": {"recompute": "always"},
    "norm": {"clip_grad_norm": 0.05},
    "value": {"clip_grad_value": 0.01},
}


def changes_and_options():
    """Schedules, tied weights, changes and options, of which any two meet."""
    for row, schedule in enumerate(SCHEDULES):
        for column, options in enumerate(OPTIONS):
            tied = bool((row + column // 2) % 2)
            change = list(CHANGES)[(row + column) % len(CHANGES)]
            name = f"{schedule}-{'tied' if tied else 'apart'}-{change}-{options}"
            yield pytest.param(schedule, tied, change, options, id=name)


@pytest.mark.parametrize(("schedule", "tied", "change", "options"), [*changes_and_options()])
def test_layers_frozen_and_thawed_while_training_are_trained_as_in_plain_pytorch(
    schedule, tied, change, options
):
    """Gradual unfreezing: layers that were frozen at first were never trained, 18 % off."""
    network, plain = model(tied), model(tied)
    frozen, later = CHANGES[change]

    def set_flags(layers, flag):
        for index in layers:
            network[index].requires_grad_(flag)
            plain[index].requires_grad_(flag)

    set_flags(frozen, False)
    chosen = OPTIONS[options]
    pipe, optimizer = pipeline(network, schedule=schedule, **chosen), sgd(plain.parameters())
    clips = {
        "norm": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.05),
        "value": lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 0.01),
    }
    for number in range(4):
        if number == 1:
            set_flags(frozen, True)
            set_flags(later, False)
        if number == 3:
            set_flags(later, True)
        pipe.train_batch(*batch(number))
        plain_step(plain, optimizer, number, clip=clips.get(options, lambda parameters: None))
    assert furthest(network, plain) < 1e-12
    same_state(pipe.optimizer_state_dict(), optimizer.state_dict())
    assert pipe.compare_with_one_device(*batch(9)).relative < 1e-6


def test_accumulated_gradients_of_layers_frozen_in_between_are_used():
    """Plain PyTorch steps with all gradients that exist."""
    network, plain = model(), model()
    pipe, optimizer = pipeline(network, accumulate=2), sgd(plain.parameters())
    for number in range(6):
        network[2].requires_grad_(number % 3 == 0)
        plain[2].requires_grad_(number % 3 == 0)
        x, y = batch(number)
        pipe.train_batch(x, y)
        (functional.cross_entropy(plain(x), y) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert furthest(network, plain) < 1e-12


def test_layers_of_a_model_on_the_meta_device_are_thawed_by_the_model_and_by_the_pipeline():
    """The stages have parameters other than the model's there."""
    with torch.device("meta"):
        network = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(4, 4))
    network.requires_grad_(False)
    pipe = ps.Pipeline(
        network, loss=functional.cross_entropy, optimizer=sgd, balance=[1, 1, 1], executor="threads"
    )
    x, y = batch()
    before = pipe.state_dict()
    network[2].requires_grad_(True)
    dict(pipe.named_parameters())["0.weight"].requires_grad_(True)
    pipe.train_batch(x.float(), y)
    after = pipe.state_dict()
    changed = [name for name, value in before.items() if not torch.equal(value, after[name])]
    assert changed == ["0.weight", "2.weight", "2.bias"]


@pytest.mark.parametrize("schedule", ["1f1b", "chimera"])
def test_a_checkpoint_has_the_state_of_what_was_thawed(schedule, tmp_path):
    """The state is saved by name, and loaded under another cut."""
    network, plain = model(tied=True), model(tied=True)
    network[0].requires_grad_(False)
    plain[0].requires_grad_(False)
    pipe, optimizer = pipeline(network, schedule=schedule), sgd(plain.parameters())
    for number in range(4):
        network[0].requires_grad_(number > 1)
        plain[0].requires_grad_(number > 1)
        pipe.train_batch(*batch(number))
        plain_step(plain, optimizer, number)
    pipe.save(tmp_path)
    other = model(tied=True, seed=3)
    again = pipeline(other, balance=[3, 3, 1, 1])
    again.load(tmp_path)
    again.train_batch(*batch(4))
    plain_step(plain, optimizer, 4)
    assert furthest(other, plain) < 1e-12
    same_state(again.optimizer_state_dict(), optimizer.state_dict())


def test_thawing_under_an_asynchronous_schedule_is_refused():
    """Its weight versions are those of the parameters that were trained at first."""
    network = model()
    network[0].requires_grad_(False)
    pipe = pipeline(network, schedule="pipedream")
    list(pipe.train([batch(0), batch(1)]))
    network[0].weight.requires_grad_(True)
    with pytest.raises(
        SettingError, match=r"^0\.weight had requires_grad=False .* pipedream is asyn"
    ):
        pipe.train_batch(*batch(2))
    network[0].weight.requires_grad_(False)
    network[2].requires_grad_(False)
    list(pipe.train([batch(2)]))


# -- losses with weights
# ------------------------------------------------------------------------------------------------


class Margin(nn.Module):
    """A loss with trainable class centres."""

    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.eye(4, dtype=torch.float64))

    def forward(self, output, target):
        """Return the loss."""
        return functional.cross_entropy(output @ self.centres, target)


MARGIN = Margin()


def by_global(output, target):
    """A loss that uses a global variable, as in scripts."""
    return helper(output, target)


def helper(output, target):
    """A function that the loss calls."""
    return sum(part(output, target) for part in [MARGIN])


def in_closure():
    """A loss that uses a variable of its closure."""
    margin = Margin()
    return lambda output, target: margin(output, target) + 0


def learnt_scale():
    """A loss with a trainable tensor that belongs to no module."""
    scale = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    return lambda output, target: functional.cross_entropy(output * scale.exp(), target)


LOSSES = {
    "module": Margin,
    "method": lambda: Margin().forward,
    "closure": in_closure,
    "global": lambda: by_global,
    "partial": lambda: functools.partial(
        lambda output, target, by: by(output, target), by=Margin()
    ),
    "tensor": learnt_scale,
}


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_with_weights_of_its_own_is_refused_when_the_pipeline_is_made(kind):
    """These weights would silently not be trained."""
    with pytest.raises(
        SettingError, match=r"1 trainable weight of its own.* no stage would train it"
    ):
        pipeline(model(), loss=LOSSES[kind]())


def test_a_loss_module_with_frozen_weights_or_buffers_is_accepted():
    """Such as class weights, or a teacher that is not trained."""
    margin = Margin().requires_grad_(False)
    margin.register_buffer("weight", torch.arange(1.0, 5.0, dtype=torch.float64))
    network, plain = model(), model()
    pipe, optimizer = pipeline(network, loss=margin), sgd(plain.parameters())
    pipe.train_batch(*batch())
    plain_step(plain, optimizer, 0, loss=margin)
    assert furthest(network, plain) < 1e-12


class Trainer:
    """An object with methods that are losses, and with the model among its attributes."""

    def __init__(self, network):
        self.model, self.margin, self.late = network, Margin(), False

    def with_margin(self, output, target):
        """A loss with weights that are not the model's."""
        return self.margin(output, target)

    def with_penalty(self, output, target):
        """A loss with the model's weights, as hand-written regularisation."""
        penalty = sum(parameter.square().sum() for parameter in self.model.parameters())
        return functional.cross_entropy(output, target) + 0.1 * penalty

    def with_late_penalty(self, output, target):
        """The same, but only after some batches."""
        if self.late:
            return self.with_penalty(output, target)
        return functional.cross_entropy(output, target)

    def with_own_penalty(self, output, target):
        """A loss with the weights of the last stage."""
        return functional.cross_entropy(output, target) + 0.1 * self.model[6].weight.square().sum()


@pytest.mark.parametrize("options", [{}, {"recompute": "always"}], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("with_margin", r"trainable weight of shape \(4, 4\) that is not the model's"),
        ("with_penalty", r"the loss uses \d\.\w+, which is not a parameter of the last stage, 3"),
        ("with_late_penalty", r"the loss uses \d\.\w+, which is not a parameter of the last stage"),
    ],
)
def test_a_loss_that_turns_out_to_use_other_weights_is_refused_before_a_step(
    method, message, options
):
    """In processes their gradients would be lost, and the penalty would be of old weights."""
    network = model()
    trainer = Trainer(network)
    pipe = pipeline(network, loss=getattr(trainer, method), **options)
    before: dict[str, torch.Tensor] = {}

    def train():
        for number in range(4):
            before.update(copy.deepcopy(network.state_dict()))
            trainer.late = number >= 2
            pipe.train_batch(*batch(number))

    with pytest.raises(RunError, match=message):
        train()
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())


@pytest.mark.parametrize(
    ("balance", "method"), [([2, 2, 2, 2], "with_own_penalty"), ([8], "with_penalty")]
)
def test_a_penalty_on_the_weights_of_the_last_stage_is_trained(balance, method):
    """They are on the rank that computes the loss."""
    network, plain = model(), model()
    pipe = pipeline(
        network, loss=getattr(Trainer(network), method), balance=balance, schedule="gpipe"
    )
    optimizer, loss = sgd(plain.parameters()), getattr(Trainer(plain), method)
    for number in range(3):
        pipe.train_batch(*batch(number))
        plain_step(plain, optimizer, number, loss=loss)
    assert furthest(network, plain) < 1e-12


class Hidden(nn.Module):
    """A layer that uses another layer's weight without registering it."""

    def __init__(self, other):
        super().__init__()
        self.other = [other]

    def forward(self, x):
        """Run the layer."""
        return x @ self.other[0].weight.T


@pytest.mark.parametrize("options", [{}, {"recompute": "always"}], ids=["kept", "recomputed"])
def test_a_layer_with_an_unregistered_weight_of_another_stage_is_refused(options):
    """The gradient would be lost where ranks are processes."""
    network = model()
    network[4] = Hidden(network[2])
    with pytest.raises(
        RunError, match=r"a layer of stage 2 uses 2\.weight, a parameter of another"
    ):
        pipeline(network, **options).train_batch(*batch())
    plain = copy.deepcopy(network)
    pipe = pipeline(network, balance=[2, 4, 2], **options)
    pipe.train_batch(*batch())
    plain_step(plain, sgd(plain.parameters()), 0)
    assert furthest(network, plain) < 1e-12


# -- clipping
# ------------------------------------------------------------------------------------------------


def test_a_gradient_that_is_nan_on_another_rank_is_in_the_norm():
    """A norm without it would hide what the clipped weights become: torch's own is NaN, too."""
    network = model()
    pipe = pipeline(network, clip_grad_norm=0.05, on_nonfinite="warn")
    network[6].weight.register_hook(lambda grad: torch.full_like(grad, float("nan")))
    pipe.train_batch(*batch())
    assert math.isnan(pipe.grad_norm)


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "options",
    [
        {"clip_grad_value": 0.01},
        *({"clip_grad_norm": 0.05, "clip_norm_type": n} for n in (1, 3.0, INF)),
    ],
    ids=["value", "norm 1", "norm 3", "infinite norm"],
)
def test_clipping_by_value_and_other_norms_is_torchs_own(options, schedule, tied):
    """Clipping is over all stages, after replicas and tied weights have been summed, and once for
    each step.
    """
    network, plain = model(tied), model(tied)
    pipe = pipeline(network, schedule=schedule, accumulate=2, **options)
    optimizer = sgd(plain.parameters())
    for number in range(6):
        x, y = batch(number)
        pipe.train_batch(x, y)
        (functional.cross_entropy(plain(x), y) / 2).backward()
        if number % 2:
            if "clip_grad_value" in options:
                torch.nn.utils.clip_grad_value_(plain.parameters(), 0.01)
            else:
                norm = torch.nn.utils.clip_grad_norm_(
                    plain.parameters(), 0.05, options["clip_norm_type"]
                )
                assert pipe.grad_norm == pytest.approx(float(norm), rel=1e-12)
            optimizer.step()
            optimizer.zero_grad()
    assert furthest(network, plain) < 1e-12


@pytest.mark.parametrize(
    "options", [{"clip_grad_value": 0.01}, {"clip_grad_norm": 0.01, "clip_norm_type": INF}]
)
def test_scaled_gradients_are_clipped_after_they_are_unscaled(options):
    """Otherwise nearly all of them would be at the limit."""
    network, plain = model().float(), model().float()
    scaling = {"init_scale": 1024.0, "growth_interval": 2}
    pipe = pipeline(network, scaler=scaling, **options)
    optimizer, scaler = sgd(plain.parameters()), torch.amp.GradScaler("cpu", **scaling)
    for number in range(4):
        x, y = batch(number)
        pipe.train_batch(x.float(), y)
        optimizer.zero_grad()
        scaler.scale(functional.cross_entropy(plain(x.float()), y)).backward()
        scaler.unscale_(optimizer)
        if "clip_grad_value" in options:
            torch.nn.utils.clip_grad_value_(plain.parameters(), 0.01)
        else:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01, INF)
        scaler.step(optimizer)
        scaler.update()
    assert furthest(network, plain) < 1e-5


def test_sparse_gradients_are_clipped_by_value():
    """Each row of an embedding's gradient counts once."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Flatten(), nn.Linear(12, 4))
    plain = copy.deepcopy(network)
    plain[0].sparse = False
    x, y = torch.randint(9, (8, 2), generator=torch.Generator().manual_seed(1)), batch()[1]
    pipe = ps.Pipeline(
        network,
        loss=functional.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, lr=1.0),
        balance=[1, 2],
        micro_batches=2,
        executor="threads",
        clip_grad_value=0.01,
    )
    pipe.train_batch(x, y)
    functional.cross_entropy(plain(x), y).backward()
    torch.nn.utils.clip_grad_value_(plain.parameters(), 0.01)
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    assert furthest(network, plain) < 1e-6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"clip_grad_value": 0.0},
            r"clip_grad_value is the largest absolute value .*above 0, not 0\.0",
        ),
        ({"clip_grad_norm": 1.0, "clip_norm_type": "max"}, r"clip_norm_type .* not 'max'"),
        ({"clip_norm_type": 1.0}, r"is an option of clip_grad_norm=, which is not given"),
        ({"clip_grad_norm": 1.0, "clip_grad_value": 1.0}, r"give one of them"),
        (
            {"clip_grad_value": 1.0, "optimizer": None},
            r"clip_grad_value is an option of the update",
        ),
        (
            {"clip_grad_value": 1.0, "schedule": "pipedream"},
            r"clip_grad_value: pipedream is asynchr",
        ),
    ],
)
def test_invalid_clipping_is_refused(options, message):
    """The argument is named, when the pipeline is constructed."""
    with pytest.raises(SettingError, match=message):
        pipeline(model(), **options)


# -- learning rates
# ------------------------------------------------------------------------------------------------


def no_decay(name, parameter):
    """Return two parameter groups."""
    return {"weight_decay": 0.0, "lr": 0.02} if parameter.dim() == 1 else {}


def grouped(network):
    """Return the same groups for plain PyTorch, in order of appearance."""
    rows = (
        [p for p in network.parameters() if p.dim() > 1],
        [p for p in network.parameters() if p.dim() == 1],
    )
    return [{"params": rows[0]}, {"params": rows[1], "weight_decay": 0.0, "lr": 0.02}]


@pytest.mark.parametrize("schedule", ["1f1b", "chimera", "interleaved"])
def test_learning_rates_set_by_hand_hold_for_all_stages(schedule):
    """Warm-up and decay are often written without a scheduler."""
    network, plain = model(), model()
    pipe = pipeline(network, schedule=schedule, parameter_groups=no_decay)
    optimizer = sgd(grouped(plain))
    assert pipe.learning_rates == [0.1, 0.02]
    for number in range(6):
        if number == 2:
            pipe.set_learning_rate(0.03)
            for group in optimizer.param_groups:
                group["lr"] = 0.03
        if number == 3:
            pipe.set_learning_rate([0.04, 0.05])
            optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 0.04, 0.05
        if number == 4:
            for groups in (pipe.param_groups, optimizer.param_groups):
                for group in groups:
                    group["lr"] *= 0.5
                groups[0]["momentum"] = 0.5
        pipe.train_batch(*batch(number))
        plain_step(plain, optimizer, number)
    assert furthest(network, plain) < 1e-12
    assert pipe.learning_rates == [0.02, 0.025]
    same_state(pipe.optimizer_state_dict(), optimizer.state_dict())


def test_learning_rates_that_are_tensors_change_once_and_not_once_for_every_stage():
    """All stages' optimizers once shared one tensor, which each stage's scheduler multiplied."""
    network, plain = model(), model()
    rate, other = torch.tensor(0.1, dtype=torch.float64), torch.tensor(0.1, dtype=torch.float64)
    pipe = pipeline(
        network, optimizer=lambda params: torch.optim.Adam(params, lr=rate, foreach=False)
    )
    optimizer = torch.optim.Adam(plain.parameters(), lr=other, foreach=False)
    scheduler = pipe.scheduler(lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5))
    reference = lr_scheduler.ExponentialLR(optimizer, 0.5)
    for number in range(3):
        pipe.train_batch(*batch(number))
        plain_step(plain, optimizer, number)
        scheduler.step()
        reference.step()
    for groups in (pipe.param_groups, optimizer.param_groups):
        groups[0]["lr"] *= 0.5
    pipe.train_batch(*batch(3))
    plain_step(plain, optimizer, 3)
    assert pipe.learning_rates == pytest.approx([0.1 / 16])
    assert furthest(network, plain) < 1e-12


def test_groups_and_learning_rates_that_cannot_be_set_are_refused():
    """The messages have the numbers and what to do."""
    pipe = pipeline(model(), parameter_groups=no_decay)
    with pytest.raises(SettingError, match="3 learning rates for 2 parameter groups"):
        pipe.set_learning_rate([0.1, 0.2, 0.3])
    with pytest.raises(SettingError, match=r"0 or above and finite, not -0\.1"):
        pipe.set_learning_rate(-0.1)
    with pytest.raises(SettingError, match="belong to the stages and cannot be replaced"):
        pipe.param_groups[0]["params"] = []
    assert len(pipe.param_groups[1]["params"]) == 4
    with pytest.raises(SettingError, match="this pipeline has no optimizer"):
        pipeline(model(), optimizer=None).set_learning_rate(0.1)

    def by_count(params):
        return sgd([{"params": [p]} for p in params] if len(params) < 4 else params)

    with pytest.raises(SettingError, match=r"have 1 and 2 parameter groups.*parameter_groups="):
        pipeline(model(), balance=[4, 2, 2], optimizer=by_count).set_learning_rate(0.1)


def test_learning_rates_by_hand_reach_the_optimizers_of_all_copies_of_an_asynchronous_rule():
    """Copies of the weights that take turns have optimizers of their own."""
    pipe = pipeline(model(), schedule="avgpipe")
    pipe.set_learning_rate(0.0)
    pipe.param_groups[0]["weight_decay"] = 0.0
    before = pipe.state_dict()
    list(pipe.train([batch(number) for number in range(6)]))
    after = pipe.state_dict()
    assert all(torch.allclose(after[name], value, atol=1e-12) for name, value in before.items())


def test_a_scheduler_in_place_of_a_function_or_over_another_optimizer_is_refused():
    """It would change a learning rate that no stage uses."""
    pipe, other = pipeline(model()), sgd(model().parameters())
    with pytest.raises(SettingError, match=r"lambda optimizer: StepLR\(optimizer, \.\.\.\)"):
        pipe.scheduler(lr_scheduler.StepLR(other, 2))
    with pytest.raises(SettingError, match="of another one: it ignores its argument"):
        pipe.scheduler(lambda optimizer: lr_scheduler.StepLR(other, 2))


def test_two_schedulers_on_a_rank_without_parameters_share_a_learning_rate():
    """Each once had its own there, so that a rank without parameters had another learning rate than
    its neighbours.
    """
    network = nn.Sequential(nn.Linear(6, 4), nn.Tanh()).double()
    pipe = pipeline(network, balance=[1, 1])
    first = pipe._assembly.optimizers()
    assert pipe._assembly.optimizers()[0] is first[0]
    alone = ps.Pipeline(
        nn.Sequential(nn.Tanh(), nn.ReLU()),
        loss=lambda o, t: o.mean(),
        optimizer=torch.optim.SGD,
        balance=[1, 1],
        executor="threads",
    )
    one = alone.scheduler(lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.5))
    two = alone.scheduler(lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.1))
    one.step()
    two.step()
    assert alone.learning_rates == pytest.approx([0.001 * 0.5 * 0.1])


# -- the state of plain PyTorch
# ----------------------------------------------------------------------------------------------

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


# -- inputs and states of models
# ---------------------------------------------------------------------------------------------


def test_inputs_and_targets_that_want_a_gradient_are_refused():
    """Plain PyTorch would set x.grad, and a pipeline does not."""
    pipe = pipeline(model())
    x, y = batch()
    with pytest.raises(
        SettingError, match=r"the inputs of a batch have a tensor of shape \(8, 6\) .*detach"
    ):
        pipe.train_batch(x.clone().requires_grad_(), y)
    soft = torch.full((8, 4), 0.25, dtype=torch.float64, requires_grad=True)
    with pytest.raises(SettingError, match="the targets of a batch have a tensor"):
        pipe.train_batch(x, soft)
    pipe.eval_batch(x.clone().requires_grad_(), y)


def test_unexpected_names_are_refused_unless_they_are_to_be_skipped():
    """A prefix or an old name would otherwise silently leave the model untrained."""
    pipe = pipeline(model())
    state = {name: value + 1 for name, value in pipe.state_dict().items()}
    wrong = {**state, "8.weight": torch.ones(1)}
    del wrong["0.bias"]
    with pytest.raises(SettingError, match=r"it has no '0\.bias'; the model has no '8\.weight'"):
        pipe.load_state_dict(wrong)
    with pytest.raises(SettingError, match=r"Take 'module\.' off its names"):
        pipe.load_state_dict({f"module.{name}": value for name, value in state.items()})
    result = pipe.load_state_dict(wrong, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["0.bias"], ["8.weight"])
    assert torch.equal(pipe.state_dict()["0.weight"], state["0.weight"])
    assert not torch.equal(pipe.state_dict()["0.bias"], state["0.bias"])
    assert pipe.load_state_dict(state) == ([], [])
