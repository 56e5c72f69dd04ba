"""Weight prediction: ops read weights extrapolated to later updates."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from penstock.errors import RunError
from penstock.weights.rule_types import Reads

#: (stage, stages, micro-batches)
PLACES = [
    (0, 1, 1),
    (0, 2, 1),
    (0, 4, 1),
    (2, 4, 1),
    (3, 4, 1),
    (0, 4, 2),
    (1, 4, 2),
    (0, 3, 3),
    (1, 4, 4),
    (3, 4, 2),
]


def moved(side, way="ahead"):
    """Return a version moved by the optimizer's direction at this moment, literally."""

    def read(line):
        def weights(versions, number, optimizer):
            reads = line.use(number).reads
            version, ahead = getattr(reads, side), getattr(reads, f"{side}_ahead")
            assert version == len(versions) - 1, "predictions are made of the newest"
            return getattr(optimizer, way)(versions[version], ahead) if ahead else versions[version]

        return weights

    return read


def bellwether(line, side):
    """Return the prediction of a batch's first micro-batch, which all of the batch read."""
    created = {}

    def weights(versions, number, optimizer):
        use = line.use(number)
        if use.first:
            created.clear()
            created[use.batch] = moved(side, "ahead_xpipe")(line)(versions, number, optimizer)
        return created[use.batch]

    return weights


def agree(lab, name, place, pair, forward, backward, **facts):
    """Check that a stream equals its literal reference."""
    line = lab.line_of(name, *place, batches=9)
    module, data = facts.pop("module", lab.mlp()), facts.pop("data", lab.vectors)
    factory, formula = lab.PAIRS[pair] if isinstance(pair, str) else pair
    losses, newest = lab.literal(
        module, line, data, lab.squares, formula(), forward(line), backward(line)
    )
    weights = lab.make(lab.site_of(module, line, name, factory, **facts))
    before = [parameter.data_ptr() for parameter in module.parameters()]
    assert lab.close(lab.play(module, weights, line.ops, data, lab.squares), losses)
    weights.drain()
    assert lab.close(lab.values_of(module), newest)
    assert [parameter.data_ptr() for parameter in module.parameters()] == before


@pytest.mark.parametrize("place", [place for place in PLACES if place[2] == 1])
def test_spectrain_moves_weights_by_momentum_before_both_passes(lab, place):
    """Ŵ = W - s lr v, with s = ⌊k/2⌋ + N - k - 1 before a forward and ⌊k/2⌋ before a backward."""
    agree(lab, "spectrain", place, "momentum", moved("forward"), moved("backward"))


def test_spectrain_with_dampening_is_the_papers_exponential_average(lab):
    """v = γ v + (1 - γ) g. torch's first v is g itself: the paper's begins at (1 - γ) g, which
    fades.
    """

    class Paper(lab.Sgd):
        def step(self, weights, grads, scale=1.0):
            g = self.momentum
            self.v = (
                grads
                if self.v is None
                else [g * v + (1 - g) * new for v, new in zip(self.v, grads, strict=True)]
            )
            return [w - self.lr * v for w, v in zip(weights, self.v, strict=True)]

    factory = lambda ps: torch.optim.SGD(ps, lr=0.3, momentum=0.9, dampening=0.9)  # noqa: E731
    agree(
        lab,
        "spectrain",
        (0, 4, 1),
        (factory, lambda: Paper(0.3, 0.9)),
        moved("forward"),
        moved("backward"),
    )


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("pair", "extra"), [("adam", 3.0), ("adamw", 3.0), ("adam", 1.0), ("adam", 2.0)]
)
def test_xpipe_predicts_once_for_all_micro_batches_of_a_batch(lab, place, pair, extra):
    """The first micro-batch's prediction is read by the others even if an update has come between,
    which does not change it.
    """
    sides = [lambda line, side=side: bellwether(line, side) for side in ("forward", "backward")]
    agree(lab, "xpipe", place, pair, *sides, rule=lab.rule_called("xpipe", extra=extra))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("pair", ["sgd", "sgd with decay", "momentum", "adam", "adamw", "rmsprop"])
def test_pipeoptim_predicts_with_the_optimizers_own_formula_before_forwards_only(lab, place, pair):
    """ΔW: g, v, m̂ / (√v̂ + ε), g / (√E + ε)."""
    pairs = {"rmsprop": (lambda ps: torch.optim.RMSprop(ps, lr=0.01), lambda: lab.RmsProp(0.01))}
    newest = lambda line: lambda versions, number, optimizer: versions[-1]  # noqa: E731
    agree(lab, "pipeoptim", place, pairs.get(pair, pair), moved("forward"), newest)


@pytest.mark.parametrize("rule", ["spectrain", "pipeoptim"])
def test_layers_that_save_their_weights_as_they_are_find_what_the_backward_reads(lab, rule):
    """Convolutions and norms save the parameter, linear layers a view of it, weight norm a tensor
    computed from two parameters.
    """
    torch.manual_seed(0)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(16, 4))
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Flatten(), normed
    ).double()
    data = lambda n: (  # noqa: E731
        torch.randn(3, 2, 6, 6, generator=torch.Generator().manual_seed(n), dtype=torch.float64),
        torch.ones(1),
    )
    agree(
        lab,
        rule,
        (2, 4, 1) if rule == "spectrain" else (0, 4, 2),
        "momentum",
        moved("forward"),
        moved("backward"),
        module=module,
        data=data,
    )


def test_a_forward_that_reads_ahead_reads_what_the_next_updates_make_if_gradients_stay(lab):
    """The purpose of the formula: with a constant gradient, plain gradient descent is predicted
    exactly.
    """
    module = nn.Linear(3, 2).double()
    line = lab.Line(0, 1, 1, 8, lambda at: Reads(at.at_forward, at.at_backward, 3, 0))
    weights = lab.make(lab.site_of(module, line, "pipeoptim", lab.PAIRS["sgd"][0]))
    step = torch.randn(2, 3, dtype=torch.float64)
    foreseen, actual = [], []
    for number in range(8):
        weights.before_forward(number)
        foreseen.append(module.weight.detach().clone())
        weights.before_backward(number)
        actual.append(module.weight.detach().clone())
        module.weight.grad = step.clone()
        weights.finished(number)
        weights.update(number + 1)
    assert all(torch.allclose(foreseen[n], actual[n + 3]) for n in range(1, 5))


@pytest.mark.parametrize(
    "options",
    [{"foreach": True}, {"foreach": False}, {"fused": True}, {"amsgrad": True}, {"maximize": True}],
)
def test_every_way_to_run_adam_is_foreseen(lab, options):
    """The implementations single, foreach and fused have the same state; with amsgrad the square is
    the largest so far.
    """
    module = lab.mlp()
    line = lab.line_of("pipeoptim", 0, 2, 1, 6)
    factory = lambda ps: torch.optim.Adam(ps, lr=0.01, **options)  # noqa: E731
    weights = lab.make(lab.site_of(module, line, "pipeoptim", factory))
    optimizer = weights._update.optimizer
    lab.play(module, weights, line.ops, lab.vectors, lab.squares)
    weights.drain()
    before = lab.values_of(module)
    state = {
        p: {key: value.clone() for key, value in moments.items()}
        for p, moments in optimizer.state.items()
    }
    weights.before_forward(0)
    for parameter, old, moments in zip(module.parameters(), before, state.values(), strict=True):
        step = moments["step"].item()
        square = moments["max_exp_avg_sq" if "amsgrad" in options else "exp_avg_sq"] / (
            1 - 0.999**step
        )
        expected = old - 0.01 * (moments["exp_avg"] / (1 - 0.9**step)) / (square.sqrt() + 1e-8)
        assert torch.allclose(parameter.data, expected, rtol=1e-12)


def test_each_group_of_parameters_is_moved_at_its_own_learning_rate(lab):
    """One group may also have momentum and another none."""
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)).double()

    def groups(ps):
        fast = {"params": ps[:2], "lr": 0.1, "momentum": 0.9}
        return torch.optim.SGD([fast, {"params": ps[2:], "lr": 0.01}])

    line = lab.Line(0, 1, 1, 8, lambda at: Reads(at.at_forward, at.at_backward, 2, 0))
    weights = lab.make(lab.site_of(module, line, "pipeoptim", groups))
    for version in (1, 2):
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        weights.update(version)
    before = lab.values_of(module)
    weights.before_forward(2)
    for n, (parameter, old) in enumerate(zip(module.parameters(), before, strict=True)):
        assert torch.allclose(parameter.data, old - (2 * 0.1 * 1.9 if n < 2 else 2 * 0.01))


def test_what_has_had_no_gradient_stays_where_it_is(lab):
    """A part of the model that no batch has used has no direction yet."""
    module = nn.ModuleDict({"used": nn.Linear(5, 3), "unused": nn.Linear(2, 2)}).double()
    module.forward = module["used"].forward
    line = lab.line_of("pipeoptim", 0, 4, 1, 6)
    for pair in ("sgd", "momentum", "adam"):
        weights = lab.make(lab.site_of(module, line, "pipeoptim", lab.PAIRS[pair][0]))
        before = lab.values_of(module["unused"])
        lab.play(module, weights, line.ops, lab.vectors, lab.squares)
        weights.drain()
        assert all(map(torch.equal, lab.values_of(module["unused"]), before))


def test_with_memory_for_both_predictions_of_a_batch_each_is_computed_once(lab):
    """Less memory costs further passes over the weights."""
    counts = {}
    for stage, extra in ((0, 3.0), (1, 3.0), (2, 3.0), (1, 2.0), (1, 1.0)):
        module, line = lab.mlp(), lab.line_of("xpipe", stage, 3, 3, batches=5)
        rule = lab.rule_called("xpipe", extra=extra)
        weights = lab.make(lab.site_of(module, line, "xpipe", lab.PAIRS["adam"][0], rule=rule))
        moves, move = [], weights._direction.move
        weights._direction.move = lambda values, updates, moves=moves, move=move: moves.append(
            move(values, updates)
        )
        lab.play(module, weights, line.ops, lab.vectors, lab.squares)
        counts[stage, extra] = len(moves)
    assert counts == {(0, 3.0): 5, (1, 3.0): 5, (2, 3.0): 5, (1, 2.0): 9, (1, 1.0): 9}


def test_a_stage_that_predicts_nothing_takes_no_more_memory_than_its_weights(lab):
    """PipeOptim's last stage reads the newest version in both passes, so it needs no memory for
    predictions.
    """
    held = []
    for stage in range(4):
        module = lab.mlp()
        line = lab.line_of("pipeoptim", stage, 4, 1, 8)
        weights = lab.make(lab.site_of(module, line, "pipeoptim", lab.PAIRS["momentum"][0]))
        lab.play(module, weights, line.ops, lab.vectors, lab.squares)
        assert weights.peak_versions == 1
        held.append(
            weights.held_bytes() / sum(parameter.nbytes for parameter in module.parameters())
        )
    assert held == [2, 2, 2, 1]


@pytest.mark.parametrize("pair", ["sgd", "adam"])
def test_tensors_that_a_direction_keeps_are_memory_of_the_rule(lab, pair):
    """SGD without momentum has no state from which the last step could be read; Adam's roots need
    scratch memory.
    """
    module = lab.mlp()
    line = lab.line_of("pipeoptim", 0, 4, 1, 8)
    weights = lab.make(lab.site_of(module, line, "pipeoptim", lab.PAIRS[pair][0]))
    lab.play(module, weights, line.ops, lab.vectors, lab.squares)
    assert weights.held_bytes() == 3 * sum(parameter.nbytes for parameter in module.parameters())


@pytest.mark.parametrize(("rule", "stage", "ahead"), [("pipeoptim", 0, 0), ("spectrain", 2, 1)])
def test_a_w_that_comes_after_a_later_update_than_its_i_reads_the_newest(lab, rule, stage, ahead):
    """Deferred weight gradients may come after the next update, when the weights that the I read
    are no longer available. What the rule predicts is predicted from the newest.
    """
    module = nn.Linear(2, 2)
    line = lab.line_of(rule, stage, 4, 1, 6)
    weights = lab.make(lab.site_of(module, line, rule, lab.PAIRS["momentum"][0]))
    weights.before_forward(0)
    weights.before_forward(1)
    weights.before_backward(0)
    weights._in_flight[1] = weights._in_flight[0]
    weights.before_backward(1)
    module.weight.grad = torch.ones(2, 2)
    weights.finished(0)
    weights.update(1)
    newest = module.weight.detach().clone()
    weights.before_backward(1)
    torch.testing.assert_close(module.weight.detach(), newest - 0.02 * ahead)


@pytest.mark.parametrize(("step", "number", "version"), [(-1, 4, 0), (1, 0, 1)])
def test_a_rule_that_predicts_from_another_version_than_the_newest_is_refused(
    lab, step, number, version
):
    """Only one version is kept, and a later one does not exist yet."""
    module = lab.mlp()
    line = lab.Line(
        0, 4, 1, 8, lambda at: Reads(max(at.at_forward + step, 0), at.at_backward, 1, 0)
    )
    weights = lab.make(lab.site_of(module, line, "pipeoptim", lab.PAIRS["momentum"][0]))
    message = (
        f"stage 0: the forward of micro-batch {number} reads weight version {version}, 1 ahead, "
        f"and the newest is {1 - version}: predictions are made of the"
    )
    with pytest.raises(RunError, match=message):
        lab.play(module, weights, line.ops, lab.vectors, lab.squares)


def test_a_backward_whose_version_is_gone_is_refused(lab):
    """Only a W, whose I has read the right version, may read the newest in its place."""
    module = lab.mlp()
    line = lab.Line(0, 4, 1, 8, lambda at: Reads(at.at_forward, at.at_forward, 0, 0))
    weights = lab.make(lab.site_of(module, line, "pipeoptim", lab.PAIRS["momentum"][0]))
    message = (
        "stage 0: the backward of micro-batch 1 reads weight version 0, 0 ahead, and the newest"
    )
    for _ in range(2):  # also in the stream after one that failed
        with pytest.raises(RunError, match=message):
            lab.play(module, weights, line.ops, lab.vectors, lab.squares)
        weights.drain()


@pytest.mark.parametrize(
    ("rule", "pair"), [("pipeoptim", "momentum"), ("spectrain", "momentum"), ("xpipe", "adam")]
)
def test_a_stage_holds_no_more_copies_than_its_rule_is_planned_with(lab, rule, pair):
    """Plans count the rule's copies of the weights beside the newest version; several micro-batches
    read one prediction, which could be stored for each direction.
    """
    for stage in range(3):
        module = lab.mlp()
        line = lab.line_of(rule, stage, 3, 2, 8)
        site = lab.site_of(module, line, rule, lab.PAIRS[pair][0])
        weights = lab.make(site)
        lab.play(module, weights, line.ops, lab.vectors, lab.squares)
        size = sum(parameter.nbytes for parameter in module.parameters())
        assert weights._working.held_bytes() <= (1 + site.rule.extra) * size


def test_loaded_state_is_used_with_the_counts_of_the_loaded_optimizer(lab):
    """The direction counts Adam's steps by itself; those of before the load are forgotten first."""
    module = lab.mlp()
    line = lab.line_of("pipeoptim", 0, 2, 1, batches=4)
    site = lab.site_of(module, line, "pipeoptim", lab.PAIRS["adam"][0])
    weights = lab.make(site)
    lab.play(module, weights, line.ops, lab.vectors, lab.squares)
    weights.drain()
    optimizer = site.update.optimizer
    for state in optimizer.state.values():
        state["step"].fill_(100)
    weights._direction.move([torch.zeros_like(p) for p in module.parameters()], 1)
    for state in optimizer.state.values():
        state["step"].fill_(1)
    weights.load_state(weights.state())
    fresh = lab.make(site)
    moved, expected = ([torch.zeros_like(p) for p in module.parameters()] for _ in range(2))
    weights._direction.move(moved, 1)
    fresh._direction.move(expected, 1)
    assert all(map(torch.equal, moved, expected))
    assert any(map(torch.any, moved))


def test_after_a_drain_the_counts_of_steps_are_those_of_the_optimizer(lab):
    """Between runs its state may have been replaced by that of another optimizer."""
    module = lab.mlp()
    line = lab.line_of("pipeoptim", 0, 2, 1, batches=4)
    site = lab.site_of(module, line, "pipeoptim", lab.PAIRS["adam"][0])
    weights, fresh = lab.make(site), lab.make(site)
    lab.play(module, weights, line.ops, lab.vectors, lab.squares)
    weights.drain()
    for state in site.update.optimizer.state.values():
        state["step"].fill_(50)
    read = []
    for running in (weights, fresh):
        running.before_forward(0)
        running.before_forward(1)
        read.append(lab.values_of(module))
        running.drain()
    assert all(map(torch.equal, *read))
