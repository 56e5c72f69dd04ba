"""Checkpoints are complete or refused: damaged and mixed files, foreign state, and state that
cannot be saved.
"""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file
from tests.conformance.reference import differences
from tests.runtime.jobs import checkpoint_verdicts, saved_by_two_ranks
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
from penstock.checkpoint import checkpoint_files, checkpoint_index
from penstock.errors import FileError, SettingError


def sgd(params):
    """SGD with momentum, so that there is state."""
    return SGD(params, lr=0.1, momentum=0.9)


def adam(params):
    """Adam."""
    return Adam(params, lr=0.01)


def pipeline(optimizer=sgd, *, balance=(2, 1), schedule="1f1b", model=None, **options):
    """Return a pipeline of two stages with 23 weights."""
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return ps.Pipeline(
        model,
        loss=nn.functional.mse_loss,
        balance=list(balance),
        schedule=schedule,
        micro_batches=2,
        optimizer=optimizer,
        executor="threads",
        **options,
    )


def batch(number=0):
    """Return four samples."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)


def trained(steps=2, optimizer=sgd, **options):
    """Return a pipeline that has been trained for some steps."""
    pipe = pipeline(optimizer, **options)
    for number in range(steps):
        pipe.train_batch(*batch(number))
    return pipe


def everything(pipe):
    """Return all state that a checkpoint restores."""
    stages = pipe._assembly.stages
    moments = {
        f"{stage.index} {place} {key}": torch.as_tensor(value)
        for stage in stages
        if stage.update.optimizer is not None
        for place, parameter in enumerate(stage.update.parameters)
        for key, value in stage.update.optimizer.state.get(parameter, {}).items()
    }
    rates = [
        torch.tensor(float(group["lr"]))
        for stage in stages
        if stage.update.optimizer is not None
        for group in stage.update.optimizer.param_groups
    ]
    step = {"step": torch.tensor(pipe.step)}
    return pipe.state_dict() | moments | {f"rate {n}": rate for n, rate in enumerate(rates)} | step


def assert_refused(folder, message, *, by=None, **options):
    """Check that `load` raises, and that the pipeline is unchanged."""
    pipe = by or trained(3)
    before = {key: value.clone() for key, value in everything(pipe).items()}
    with pytest.raises(FileError, match=message) as refusal:
        pipe.load(folder, **options)
    assert differences(everything(pipe), before) == []
    return str(refusal.value)


def refused_by(pipe, folder):
    """Return the message of `load`; None if it accepts the checkpoint."""
    try:
        pipe.load(folder)
    except FileError as error:
        return str(error)
    return None


# -- damage
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [0x01, 0x80, 0xFF])
def test_any_damaged_byte_is_refused_or_changes_nothing(tmp_path, change):
    """A flipped bit in a weight's exponent would only be noticed weeks later, in the results."""
    whole = trained(optimizer=adam)
    whole.save(tmp_path)
    expected = everything(whole)
    pipe = pipeline(adam)
    refused = 0
    for file in sorted(tmp_path.iterdir()):
        content = file.read_bytes()
        for place in range(change % 7, len(content), 67):
            file.write_bytes(
                content[:place] + bytes([content[place] ^ change]) + content[place + 1 :]
            )
            refusal = refused_by(pipe, tmp_path)
            if refusal is None:
                assert differences(everything(pipe), expected) == []
            else:
                assert file.name in refusal
                refused += 1
        file.write_bytes(content)
    assert refused > 40


def test_loaded_state_does_not_depend_on_the_files(tmp_path):
    """Views of a file would change with it, and truncating it would crash the process."""
    trained(optimizer=adam).save(tmp_path)
    pipe = pipeline(adam)
    pipe.load(tmp_path)
    expected = everything(pipe)
    for file in tmp_path.glob("step-*"):
        with file.open("r+b") as content:
            content.write(bytes(file.stat().st_size))
    assert differences(everything(pipe), expected) == []


@pytest.mark.parametrize("length", [0, 4, 100, -1])
def test_a_truncated_file_is_refused_by_its_name(tmp_path, length):
    """The cause may be an interrupted copy or a full disk."""
    trained().save(tmp_path)
    file = min(tmp_path.glob("*stage-0001*"))
    file.write_bytes(file.read_bytes()[:length])
    assert_refused(tmp_path, rf"(cannot read )?{file.name} of the checkpoint ")


def test_files_of_two_steps_are_not_one_checkpoint(tmp_path):
    """Stage 0 is of step 2 and stage 1 of step 3."""
    pipe = trained(2)
    pipe.save(tmp_path / "a")
    pipe.train_batch(*batch(5))
    pipe.save(tmp_path / "b")
    earlier, later = (min((tmp_path / name).glob("*stage-0001*")) for name in ("a", "b"))
    shutil.copy(earlier, later)
    assert_refused(
        tmp_path / "b",
        (
            rf"{later.name} of .*b: belongs to the checkpoint of step 2 \(identity \w+\), "
            rf"not to that of step 3 "
        ),
    )


def test_files_of_two_runs_at_one_step_are_not_one_checkpoint(tmp_path):
    """Names of tensors, shapes and step are the same: only the identity differs."""
    for name, seed in (("a", 1), ("b", 2)):
        torch.manual_seed(seed)
        trained(2, model=nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))).save(
            tmp_path / name
        )
    first, second = (min((tmp_path / name).glob("*stage-0000*")) for name in ("a", "b"))
    shutil.copy(first, second)
    assert_refused(tmp_path / "b", rf"{second.name} of .*: belongs to the checkpoint of step 2 ")


def test_an_index_of_another_checkpoint_is_refused(tmp_path):
    """The index is of step 2 and the files are of step 3."""
    pipe = trained(2)
    pipe.save(tmp_path)
    index = (tmp_path / "checkpoint.json").read_bytes()
    pipe.train_batch(*batch(5))
    pipe.save(tmp_path)
    (tmp_path / "checkpoint.json").write_bytes(index)
    assert_refused(
        tmp_path, r"cannot read step-00000002-stage-0000-\w+\.safetensors .*: No such file"
    )


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "step-1", "a" * 500, ""])
def test_an_index_that_names_foreign_files_is_refused_though_its_checksum_is_right(tmp_path, name):
    """A forged index can have the right checksum; no file outside of the folder is read."""
    trained().save(tmp_path)
    index = checkpoint_index.read_index(tmp_path)
    changed = checkpoint_index.Checkpoint(
        index.step, index.fingerprint, (name, *index.files), identity=index.identity, sums={}
    )
    checkpoint_index.write_index(tmp_path, changed)
    assert_refused(
        tmp_path, r"checkpoint\.json is damaged: it names '.*', which is not a file of a"
    )


def test_a_folder_without_an_index_is_refused_with_what_it_has(tmp_path):
    """It may be empty, or have the files of an interrupted save."""
    assert_refused(tmp_path, r"holds no checkpoint: there is no checkpoint\.json[^.]*\.$")
    trained().save(tmp_path)
    (tmp_path / "checkpoint.json").unlink()
    assert_refused(tmp_path, r"Its step files are from a save that was interrupted")
    assert_refused(tmp_path / "a\0b", r"holds no checkpoint")
    with pytest.raises(FileError, match=r"cannot write the checkpoint .*: embedded null byte"):
        trained().save(tmp_path / "a\0b")
    (tmp_path / "file").write_text("")
    assert_refused(tmp_path / "file", r"file holds no checkpoint")


def test_a_checkpoint_survives_a_loss_of_power(tmp_path, monkeypatch):
    """Files and their names are on the disk before the index is replaced, and the index before old
    files are deleted.
    """
    pipe = trained()
    pipe.save(tmp_path)
    old = set(tmp_path.iterdir())
    happened = []
    monkeypatch.setattr(checkpoint_files, "sync_file", lambda path: happened.append(path.suffix))
    for module in (checkpoint_files, checkpoint_index):
        monkeypatch.setattr(module, "sync_folder", lambda path: happened.append("folder"))
    write = checkpoint_index.write_json

    def write_json(path, value, *, durable):
        assert durable
        assert happened.count("folder") == 2
        assert all(file.exists() for file in old)
        write(path, value, durable=durable)

    monkeypatch.setattr(checkpoint_index, "write_json", write_json)
    pipe.save(tmp_path)
    assert sorted(happened) == [".partial", ".partial", "folder", "folder", "folder"]


# -- values
# ------------------------------------------------------------------------------------------------


def test_nan_weights_do_not_replace_a_good_checkpoint(tmp_path):
    """The run has to resume from the previous one."""
    pipe = trained()
    pipe.save(tmp_path)
    expected = everything(pipe)
    with torch.no_grad():
        pipe._assembly.stages[1].update.parameters[0][0, 0] = math.nan
    with pytest.raises(
        SettingError, match=r"there are NaN values in 2\.weight at step 2: this run has"
    ):
        pipe.save(tmp_path)
    good = pipeline()
    good.load(tmp_path)
    assert differences(everything(good), expected) == []
    pipe.save(tmp_path / "look", allow_nonfinite=True)
    assert_refused(
        tmp_path / "look", r"does not fit: NaN values in 2\.weight: the run had diverged"
    )
    good.load(tmp_path / "look", allow_nonfinite=True)
    assert torch.isnan(good.state_dict()["2.weight"]).sum() == 1


def test_nan_moments_are_refused_and_infinite_buffers_are_not(tmp_path):
    """The next step would make NaN weights of NaN moments.

    Masks are full of infinities, and NaN in a buffer is left to the model.
    """

    class Mask(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.tensor([-math.inf, math.nan]))

        def forward(self, x):
            return x

    torch.manual_seed(0)
    pipe = trained(model=nn.Sequential(nn.Linear(3, 4), Mask(), nn.Linear(4, 1)))
    pipe.save(tmp_path)
    again = pipeline(model=nn.Sequential(nn.Linear(3, 4), Mask(), nn.Linear(4, 1)))
    again.load(tmp_path)
    optimizer = pipe._assembly.stages[0].update.optimizer
    next(iter(optimizer.state.values()))["momentum_buffer"].fill_(math.nan)
    with pytest.raises(
        SettingError, match=r"NaN values in optimizer/0\.(weight|bias)/momentum_buffer at step 2"
    ):
        pipe.save(tmp_path)


def test_a_model_of_another_dtype_is_refused_and_the_message_says_in_what_it_differs(tmp_path):
    """A copy would silently round every weight."""
    trained(
        model=nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(), steps=0
    ).save(tmp_path)
    assert_refused(
        tmp_path,
        (
            r"another model: .*0\.weight is float64 \(4, 3\) in the checkpoint and "
            r"float32 \(4, 3\) in the model"
        ),
    )


def test_complex_weights_of_double_precision_come_back(tmp_path):
    """safetensors does not have this dtype."""

    class Turn(nn.Module):
        def __init__(self, fill):
            super().__init__()
            self.turn = nn.Parameter(torch.full((3,), fill, dtype=torch.complex128))

        def forward(self, x):
            return (x * self.turn).real.float()

    pipe, other = (
        pipeline(balance=[1, 1], model=nn.Sequential(Turn(fill), nn.Linear(3, 1)))
        for fill in (1 + 2j, 0j)
    )
    pipe.save(tmp_path)
    other.load(tmp_path)
    assert torch.equal(
        other.state_dict()["0.turn"], torch.full((3,), 1 + 2j, dtype=torch.complex128)
    )


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


# -- ranks in processes
# ------------------------------------------------------------------------------------------------


def test_ranks_in_processes_refuse_together_and_change_nothing(tmp_path):
    """One damaged file, a rank that reads another checkpoint, a sharded optimizer. Without a joint
    decision, a rank that finds no fault would already have loaded: a mixture of two steps. Where
    ranks have disks of their own, each has its files, and gets those of the other when it loads.
    """
    by_rank = ps.launch(checkpoint_verdicts, 2, tmp_path, threads=1)
    first, second = by_rank
    assert first["same before and after"] == second["same before and after"] == [True] * 3
    damaged = first["damaged"]
    assert damaged == second["damaged"]
    assert "rank 1 on host " in damaged
    assert "stage-0001" in damaged
    assert "(nothing was loaded on any rank)" in damaged
    assert "rank 0 on host" not in damaged
    for name in ("two steps", "zero"):
        assert first[name] == second[name]
    assert "reads the checkpoint of step 1" in first["two steps"]
    assert "and rank 0 on host" in first["two steps"]
    assert (first["own files"], second["own files"]) == (["stage-0000"], ["stage-0001"])
    assert first["same after fetching"] is second["same after fetching"] is True
    assert first["fetched"] == second["fetched"] == ["stage-0000", "stage-0001"]
    assert "stage-0001" in first["lost"]
    assert "is on none of the hosts" in first["lost"]
    assert "every host wrote to its own disk. Start a rank on the host that has it" in first["lost"]
    assert "cannot hold the state of a ZeroRedundancyOptimizer" in first["zero"]
    assert first["loss after"] == second["loss after"] == first["loss expected"]


def test_files_of_processes_have_their_checksums_in_the_index(tmp_path):
    """They can be verified by `sha256sum` and read by any reader of safetensors."""
    import hashlib

    saved_by_two_ranks(tmp_path)
    index = json.loads((tmp_path / "checkpoint.json").read_text())
    for name, row in index["sums"].items():
        content = (tmp_path / name).read_bytes()
        assert (hashlib.sha256(content).hexdigest(), len(content)) == (row["sha256"], row["bytes"])
        assert load_file(tmp_path / name)
