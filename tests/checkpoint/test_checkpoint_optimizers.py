"""State of optimizers, schedulers, scalers and rules: that of another one is refused by its name."""

from __future__ import annotations

import pytest
import torch
from tests.checkpoint.small_runs import (
    adam,
    assert_refused,
    batch,
    everything,
    pipeline,
    sgd,
    trained,
)
from tests.conformance.reference import differences
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LinearLR,
    SequentialLR,
    StepLR,
)

import penstock as ps
from penstock.errors import SettingError

# -- optimizers
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "expected"),
    [(adam, sgd), (sgd, adam), (adam, lambda params: AdamW(params, lr=0.01))],
    ids=["adam to sgd", "sgd to adam", "adam to adamw"],
)
def test_the_state_of_another_optimizer_is_refused_by_name(tmp_path, saved, expected):
    """Its learning rate and decay would be used, and its moments would be ignored."""
    trained(optimizer=saved).save(tmp_path)
    pipe = trained(3, optimizer=expected)
    name = type(pipe._assembly.stages[0].update.optimizer).__name__
    assert_refused(
        tmp_path,
        rf"it holds the state of torch\.optim\.\w+\.\w+, and the optimizer of this "
        rf"pipeline is torch\.optim\.\w+\.{name}\. "
        "To load weights, buffers and step, and start with a new optimizer, pass skip='optimizer'",
        by=pipe,
    )
    pipe.load(tmp_path, skip="optimizer")
    fresh = pipeline(optimizer=expected)
    fresh.load(tmp_path, skip="optimizer")
    assert pipe.step == fresh.step == 2
    assert differences(everything(pipe), everything(fresh)) == []
    rates = {
        group["lr"]
        for stage in fresh._assembly.stages
        for group in stage.update.optimizer.param_groups
    }
    assert rates == {expected([nn.Parameter(torch.zeros(1))]).param_groups[0]["lr"]}


def test_an_optimizer_class_of_a_script_is_the_same_when_the_script_is_imported():
    """`__main__.Lion` of a run is `train.Lion` in a notebook that loads its checkpoint."""
    from penstock.optim.class_names import same_class

    assert same_class("__main__.Lion", "recipes.train.Lion")
    assert same_class("torch.SequentialLR(__main__.A, x.B)", "torch.SequentialLR(y.A, x.B)")
    assert not same_class("__main__.Lion", "recipes.train.Tiger")
    assert not same_class("mine.Adam", "torch.optim.adam.Adam")
    assert not same_class("x.Chained(x.A)", "x.Chained(x.A, x.A)")


def by_dim(name, parameter):
    """Return two parameter groups: biases do not decay."""
    return {"weight_decay": 0.5} if parameter.dim() > 1 else {}


def test_other_parameter_groups_are_refused(tmp_path):
    """Otherwise the options of one group would apply to all parameters, or vice versa."""
    trained(parameter_groups=by_dim).save(tmp_path / "two")
    trained().save(tmp_path / "one")
    assert_refused(
        tmp_path / "two",
        (
            r"0\.weight and 0\.bias were in two parameter groups \(weight_decay 0\.5 and "
            r"0\) when it was saved, and are in one here"
        ),
    )
    assert_refused(
        tmp_path / "one",
        r"0\.weight and 0\.bias were in one parameter group when it was saved, and are in two here",
        by=trained(3, parameter_groups=by_dim),
    )
    again = pipeline(balance=[1, 1, 1], parameter_groups=by_dim)
    again.load(tmp_path / "two")


def test_parameters_that_no_gradient_has_reached_have_no_state_and_need_none(tmp_path):
    """They were frozen, or their branch was never run."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    trained(model=model).save(tmp_path)
    pipe = trained()
    pipe.load(tmp_path)
    assert sum(len(stage.update.optimizer.state) for stage in pipe._assembly.stages) == 2


class Lookahead(SGD):
    """An optimizer that keeps its slow weights in an attribute."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.slow = [torch.zeros(1)]


class Curvature(SGD):
    """An optimizer that keeps statistics by layer."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.factors = {"layer": torch.zeros(1)}


class Wrapper(SGD):
    """An optimizer that wraps another one."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.base_optimizer = Adam(params)


class OwnStateDict(SGD):
    """An optimizer with additional entries in its state_dict."""

    def state_dict(self):
        return {**super().state_dict(), "trust": 3}


class Counting(SGD):
    """An optimizer with one number for all parameters."""

    def step(self, closure=None):
        super().step(closure)
        self.state["calls"] = {"count": 1}


class ZeroRedundancyOptimizer(SGD):
    """A class of the same name as torch's, which needs a process group and is tested below."""


class Sharded(torch.Tensor):
    """A tensor subclass that has more than its values."""


class Quantised(SGD):
    """An optimizer that keeps tensors of its own class."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["scale"] = torch.ones(1).as_subclass(Sharded)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            Lookahead,
            r"of Lookahead: it keeps tensors in its attribute 'slow', and not in Lookahead\.state",
        ),
        (Curvature, r"of Curvature: it keeps tensors in its attribute 'factors'"),
        (
            Wrapper,
            (
                r"of Wrapper: part of it lies in another optimizer, the Adam in its "
                r"attribute 'base_optimizer'"
            ),
        ),
        (OwnStateDict, r"of OwnStateDict: its own state_dict\(\) has trust besides"),
        (
            Counting,
            (
                r"of Counting: Counting\.state has the key 'calls', which is no parameter "
                r"of its groups"
            ),
        ),
        (ZeroRedundancyOptimizer, r"of a ZeroRedundancyOptimizer: it is divided over the ranks"),
        (
            Quantised,
            (
                r"of Quantised: it keeps a Sharded as 'scale'; a file can hold dense "
                r"tensors of torch's own"
            ),
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_optimizer_whose_state_cannot_be_saved_is_refused(tmp_path, kind, message):
    """If its state were silently left out, a run would resume with an empty optimizer."""

    def make(params):
        return (
            kind(params)
            if kind in (Lookahead, Curvature, Wrapper)
            else kind(params, lr=0.1, momentum=0.5)
        )

    pipe = trained(optimizer=make)
    with pytest.raises(SettingError, match=f"a checkpoint cannot hold the state {message}"):
        pipe.save(tmp_path / "new")
    assert not list(tmp_path.glob("new/*"))


def test_gradients_that_wait_for_their_step_are_not_left_out_silently(tmp_path):
    """Training would resume without them."""
    pipe = trained(accumulate=2, steps=3)
    with pytest.raises(
        SettingError, match=r"the gradients of 1 batches wait for their step, and a"
    ):
        pipe.save(tmp_path)
    pipe.train_batch(*batch(3))
    pipe.save(tmp_path)
    other = pipeline(accumulate=2)
    other.load(tmp_path)
    for run in (pipe, other):
        run.train_batch(*batch(4))
        run.train_batch(*batch(5))
    assert differences(everything(other), everything(pipe)) == []


# -- schedulers, scaler, weight rule
# ------------------------------------------------------------------------------------------


def with_scheduler(*makes, steps=2):
    """Return a pipeline with learning-rate schedulers."""
    pipe = pipeline()
    schedulers = [pipe.scheduler(make) for make in makes]
    for number in range(steps):
        pipe.train_batch(*batch(number))
        for scheduler in schedulers:
            scheduler.step()
    return pipe


def halving(optimizer):
    """A scheduler that halves the learning rate every second step."""
    return StepLR(optimizer, 2, gamma=0.5)


def cosine(optimizer):
    """Another scheduler."""
    return CosineAnnealingLR(optimizer, 10)


def test_the_state_of_another_scheduler_is_refused_whether_it_was_made_before_or_after(tmp_path):
    """Schedulers are constructed before loading by some users, and after it by others."""
    with_scheduler(halving).save(tmp_path)
    message = (
        r"scheduler 0 is torch\.optim\.lr_scheduler\.CosineAnnealingLR here, and the "
        r"checkpoint has the state of "
        r"torch\.optim\.lr_scheduler\.StepLR"
    )
    before = with_scheduler(cosine, steps=3)
    assert_refused(tmp_path, message, by=before)
    before.load(tmp_path, skip="schedulers")
    after = pipeline()
    after.load(tmp_path)
    with pytest.raises(
        SettingError, match=r"CosineAnnealingLR, and the checkpoint that was loaded"
    ):
        after.scheduler(cosine)
    expected = with_scheduler(halving)
    after.scheduler(halving)
    assert differences(everything(after), everything(expected)) == []


def test_chained_schedulers_are_compared_by_their_parts(tmp_path):
    """Their class alone is SequentialLR in both cases."""

    def chained(last):
        return lambda optimizer: SequentialLR(
            optimizer, [LinearLR(optimizer, 0.5, total_iters=2), last(optimizer)], [2]
        )

    with_scheduler(chained(lambda optimizer: ExponentialLR(optimizer, 0.5))).save(tmp_path)
    with_scheduler(chained(lambda optimizer: ExponentialLR(optimizer, 0.5))).load(tmp_path)
    assert_refused(
        tmp_path,
        r"SequentialLR\(.*CosineAnnealingLR\) here, and .*SequentialLR\(.*ExponentialLR\)",
        by=with_scheduler(chained(cosine)),
    )


def test_schedulers_that_are_missing_or_too_many_are_refused(tmp_path):
    """Without its scheduler the learning rate would stay constant."""
    with_scheduler(halving).save(tmp_path / "one")
    assert_refused(
        tmp_path / "one",
        r"it has the state of 1 learning-rate schedulers, and this pipeline has 2",
        by=with_scheduler(halving, halving),
    )
    pipe = pipeline()
    pipe.load(tmp_path / "one")
    with pytest.raises(
        SettingError, match=r"state of 1 learning-rate schedulers, and 0 were made here"
    ):
        pipe.train_batch(*batch())
    pipe.eval_batch(*batch())
    pipe.save(tmp_path / "copy")  # nothing is lost on the way
    later = pipeline()
    later.load(tmp_path / "copy")
    assert later.scheduler(halving).state_dict()["last_epoch"] == 2
    later.train_batch(*batch())
    pipe.load(tmp_path / "one", skip="schedulers")
    pipe.train_batch(*batch())


def test_loading_for_evaluation_needs_neither_optimizer_nor_scheduler(tmp_path):
    """Evaluation needs the weights alone."""
    pipe = with_scheduler(halving)
    pipe.save(tmp_path)
    look = pipeline(None)
    look.load(tmp_path)
    assert torch.equal(look.forward(batch()[0]), pipe.forward(batch()[0]))


def test_a_loss_scaler_needs_the_state_of_a_loss_scaler(tmp_path):
    """With its initial scale it would skip steps that the saved run did not skip."""
    scaling = {"autocast": torch.float16, "scaler": {"init_scale": 8.0}}
    trained(**scaling).save(tmp_path / "scaled")
    trained().save(tmp_path / "plain")
    assert_refused(
        tmp_path / "scaled",
        r"it has the state of a loss scaler \(scale 8\), and this pipeline has none",
        skip="schedulers",
    )
    assert_refused(
        tmp_path / "plain",
        r"it was saved without a loss scaler, and this pipeline has one, which would start with",
        by=trained(3, **scaling),
    )
    trained().load(tmp_path / "scaled", skip="scaler")
    pipe = trained(**scaling)
    pipe.load(tmp_path / "plain", skip=["scaler"])
    assert pipe.loss_scale == 8.0
    with pytest.raises(
        SettingError, match=r"skip is any of optimizer, schedulers, scaler, weight_rule"
    ):
        pipe.load(tmp_path / "plain", skip="scalar")


def test_the_state_of_a_weight_rule_is_refused_by_another_rule(tmp_path):
    """It would silently ignore the state and start from the weights."""

    def stream(schedule, **options):
        return pipeline(schedule=schedule, **options)

    pipe = stream(ps.schedule("avgpipe", 2, 2, pipelines=2), balance=(2, 1))
    list(pipe.train([batch(number) for number in range(6)]))
    pipe.save(tmp_path)
    other = stream("pipedream")
    assert_refused(
        tmp_path,
        (
            r"it has the state of weight rule 'avgpipe' with 2 pipelines, and this "
            r"pipeline has 'stash'"
        ),
        by=other,
    )
    assert_refused(
        tmp_path,
        r"rule 'avgpipe' with 2 pipelines, and this pipeline has 'avgpipe' with 3 pipelines",
        by=stream(ps.schedule("avgpipe", 2, 2, pipelines=3)),
    )
    other.load(tmp_path, skip="weight_rule")
    assert differences(other.state_dict(), pipe.state_dict()) == []
    assert other.step == 6
