"""Loading: what is read is verified and complete before the first weight changes, on all ranks."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from tests.checkpoint.ranks_in_threads import in_ranks
from tests.conformance.reference import differences
from torch import nn
from torch.optim import Adam

import penstock as ps
from penstock.checkpoint import checkpoint_load
from penstock.checkpoint.checkpoint import Progress, VersionedStage
from penstock.checkpoint.checkpoint_files import write_file
from penstock.checkpoint.checkpoint_index import RuleFacts, read_index, write_index
from penstock.checkpoint.checkpoint_load import load
from penstock.checkpoint.checkpoint_options import CheckpointOptions, parse_skip
from penstock.checkpoint.optimizer_checkpoint import names_of
from penstock.errors import CheckpointDamaged, FileError
from penstock.stage.stage_state import stage_tensors


def pipeline(optimizer=Adam, seed=0, sizes=(3, 4, 2), balance=(2, 1)):
    """Return a pipeline, of two stages by default."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(*sizes[:2]), nn.BatchNorm1d(sizes[1]), nn.Linear(*sizes[1:]))
    return ps.Pipeline(
        model,
        loss=nn.functional.mse_loss,
        balance=[*balance],
        micro_batches=2,
        optimizer=optimizer and (lambda params: optimizer(params, lr=0.01)),
        executor="threads",
    )


def train(pipe, steps=2):
    """Train for some steps and return the pipeline."""
    generator = torch.Generator().manual_seed(pipe.step)
    for _ in range(steps):
        pipe.train_batch(torch.randn(4, 3, generator=generator), torch.ones(4, 2))
    return pipe


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A folder with a checkpoint, and everything in it by name."""
    folder = tmp_path_factory.mktemp("checkpoint") / "original"
    train(pipeline()).save(folder)
    return folder, contents(folder)


@pytest.fixture
def saved(original, tmp_path):
    """A copy of the checkpoint, which a test may change."""
    folder = tmp_path / "saved"
    folder.mkdir()
    for path in original[0].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture
def pipe():
    """A pipeline that has been trained otherwise."""
    result = train(pipeline(seed=5), 1)
    yield result
    result.close()


def contents(folder):
    """Return all tensors of a checkpoint by name."""
    return {
        key: tensor
        for name in read_index(folder).files
        for key, tensor in load_file(folder / name).items()
    }


def rewrite(folder, change=lambda tensors, texts: None, **fields):
    """Write the files of a checkpoint again with changed tensors and texts, and a fitting index."""
    index = read_index(folder)
    sums = {}
    for name in index.files:
        tensors = load_file(folder / name)
        with safe_open(folder / name, framework="pt") as content:
            texts = content.metadata()
        change(tensors, texts)
        sums[name] = write_file(folder / name, tensors, texts)
    write_index(folder, replace(index, sums=sums, **fields))


def state_of(pipe):
    """Return everything that loading changes, by the names of a checkpoint."""
    assembly = pipe._assembly
    tensors = {f"model/{name}": tensor for name, tensor in pipe.state_dict().items()}
    for stage in assembly.stages:
        names = names_of(stage)
        optimizer = stage.update.optimizer
        for parameter, state in optimizer.state.items() if optimizer else ():
            for key, value in state.items():
                tensors[f"optimizer/{names[parameter]}/{key}"] = value.clone()
    return tensors


def load_into(pipe, folder, versioned=(), begin_anew=None, local=None, **options):
    """Load a checkpoint into the stages of a pipeline."""
    placed = pipe._assembly.placed
    if local is not None:
        stages = [placed.local[number] for number in local]
        placed = replace(placed, local=stages, at_home=stages)
    return load(folder, pipe._world, placed, versioned, CheckpointOptions(**options), begin_anew)


def refusal_of(pipe, folder, kind=FileError, **options):
    """Return the message of an error, after which nothing has changed."""
    before = state_of(pipe)
    with pytest.raises(FileError) as refusal:
        load_into(pipe, folder, **options)
    assert type(refusal.value) is kind
    assert differences(state_of(pipe), before) == []
    return str(refusal.value)


# -- what is loaded ------------------------------------------------------------------------------


def test_all_state_is_replaced_and_gradients_are_dropped(original, pipe):
    """A new pipeline, and one that has been trained otherwise, are then the same."""
    folder, tensors = original
    new = pipeline(seed=7)
    for one in (pipe, new):
        assert load_into(one, folder) == Progress(2)
        assert differences(state_of(one), tensors) == []
        for stage in one._assembly.stages:
            assert all(parameter.grad is None for parameter in stage.update.candidates)


def test_a_process_changes_and_verifies_what_it_has(saved, original, pipe):
    """Tensors of the stages of others may be of any value, if all headers are right."""
    file = saved / read_index(saved).files[1]
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    before = state_of(pipe)
    load_into(pipe, saved, local=[0])
    after = state_of(pipe)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed
    assert not [name for name in changed if "/2." in name]
    mine = {name: tensor for name, tensor in original[1].items() if "/2." not in name}
    assert differences({name: after[name] for name in mine}, mine) == []
    assert "is damaged: its SHA-256" in refusal_of(pipe, saved, CheckpointDamaged, local=[1])
    file.write_bytes(file.read_bytes()[:-1])
    assert "has " in refusal_of(pipe, saved, CheckpointDamaged, local=[0])


def test_group_numbers_of_two_files_are_not_compared(saved, original):
    """Stages count their groups by their own parameters; other stages here have those of both."""

    def renumber(tensors, texts):
        if "model/2.bias" in tensors:
            texts["optimizer"] = texts["optimizer"].replace('"group": 0', '"group": 1')

    rewrite(saved, renumber)
    one = pipeline(balance=(3,))
    load_into(one, saved)
    assert differences(state_of(one), original[1]) == []

    def renumber_one(tensors, texts):
        texts["optimizer"] = texts["optimizer"].replace('"group": 0', '"group": 1', 1)

    rewrite(saved, renumber_one)
    assert "were in two parameter groups when it was saved" in refusal_of(one, saved)


def test_a_process_reads_a_tied_weight_from_the_file_of_another_stage(tmp_path):
    """It is saved once, under its first name; its own optimizer does not step it."""

    def tied(value):
        first = nn.Linear(3, 3, bias=False)
        nn.init.constant_(first.weight, value)
        model = nn.Sequential(first, nn.Tanh(), nn.Linear(3, 3, bias=False))
        model[2].weight = first.weight
        options = {"balance": [2, 1], "micro_batches": 2, "executor": "threads"}
        return ps.Pipeline(model, loss=nn.functional.mse_loss, **options)

    tied(2.0).save(tmp_path)
    for local, name in ((0, "0.weight"), (1, "2.weight")):
        pipe = tied(5.0)
        load_into(pipe, tmp_path, local=[local])
        weight = stage_tensors(pipe._assembly.placed.local[local])[name]
        assert (weight == 2.0).all()


def test_without_optimizer_state_is_cleared_and_options_stay(saved, pipe):
    """To start with a new optimizer: what the checkpoint has of the old one does not matter."""

    def spoil(tensors, texts):
        for name, tensor in tensors.items():
            if name.startswith("optimizer/"):
                tensor.fill_(math.nan)
        texts["optimizer"] = texts["optimizer"].replace("torch.optim", "other")

    rewrite(saved, spoil)
    assert "it holds the state of other.adam.Adam" in refusal_of(pipe, saved)
    for stage in pipe._assembly.stages:
        stage.update.optimizer.param_groups[0]["lr"] = 0.5
    load_into(pipe, saved, skip=parse_skip("optimizer"))
    for stage in pipe._assembly.stages:
        assert len(stage.update.optimizer.state) == 0
        assert stage.update.optimizer.param_groups[0]["lr"] == 0.5


def test_a_pipeline_without_an_optimizer_takes_the_weights(saved, original):
    """For evaluation."""
    look = pipeline(None)
    load_into(look, saved)
    model = {name: row for name, row in original[1].items() if name.startswith("model/")}
    assert differences(state_of(look), model) == []


PARTS = {
    "scaler": {"scale": 8.0, "steps": 1.0, "skipped": 0.0},
    "schedulers": ('{"last_epoch": 1}',),
    "scheduler_kinds": ("torch.optim.lr_scheduler.StepLR",),
    "averages": (7,),
}


@pytest.mark.parametrize(
    ("skip", "expected"),
    [
        ("", PARTS),
        ("scaler", PARTS | {"scaler": None}),
        ("schedulers", PARTS | {"schedulers": (), "scheduler_kinds": ()}),
        ("averages", PARTS | {"averages": ()}),
        ("optimizer", {}),
    ],
)
def test_progress_has_what_was_not_skipped(saved, pipe, skip, expected):
    """What is skipped must not be saved again as if it had been loaded."""
    rewrite(saved, **PARTS)
    progress = load_into(pipe, saved, scaler=True, skip=parse_skip(skip))
    assert progress == Progress(2, **expected)


# -- what does not fit ---------------------------------------------------------------------------


def test_all_that_does_not_fit_is_in_one_message(saved, pipe):
    """Users would else find one mistake after the other; each part can be skipped."""

    def spoil(tensors, texts):
        if "model/2.bias" in tensors:
            tensors["model/2.bias"] = torch.zeros(9)
            tensors["model/stranger"] = torch.zeros(1)
            tensors["optimizer/2.bias/exp_avg"] = torch.zeros(9)

    rule = RuleFacts("avgpipe", 2, 1, keeps=True)
    rewrite(saved, spoil, rule=rule, **PARTS)
    average = SimpleNamespace(averaged=lambda stage: {}, n_averaged=0, restart=print)
    options = {
        "schedulers": [SimpleNamespace(fits=lambda kind, state: False, kind="Other")],
        "rule": RuleFacts("stash", 1, 1),
        "averages": [average, average],
    }
    parts = {
        "": "2.bias has shape (9,) in the state and (2,) in the model",
        "none": "the state has 'stranger', which the model does not have",
        "optimizer": "exp_avg of 2.bias is float32 (9,) in the state",
        "schedulers": "scheduler 0 is Other here",
        "scaler": "it has the state of a loss scaler (scale 8)",
        "weight_rule": "it has the state of weight rule 'avgpipe' with 2 pipelines",
        "averages": "it has 1 running averages of the weights, and this pipeline has 2",
    }
    text = refusal_of(pipe, saved, **options)
    assert text.startswith(f"the checkpoint {saved} does not fit: {parts['']}")
    assert [part for part in parts.values() if part not in text] == []
    for skip in ("schedulers", "scaler", "weight_rule", "averages"):
        text = refusal_of(pipe, saved, skip=parse_skip(skip), **options)
        assert [name for name, part in parts.items() if part not in text] == [skip]
    text = refusal_of(pipe, saved, skip=parse_skip("optimizer"), **options)
    assert [name for name, part in parts.items() if part in text] == ["", "none"]


@pytest.mark.parametrize("name", ["model/0.weight", "optimizer/2.bias/exp_avg_sq", "weights/x"])
def test_nan_is_refused_by_its_name_and_may_be_allowed(saved, pipe, name):
    """The next step would make NaN weights of NaN moments."""

    def spoil(tensors, texts):
        if name in tensors or name == "weights/x":
            tensors[name] = torch.full_like(tensors.get(name, torch.ones(1)), math.nan)

    rewrite(saved, spoil)
    text = refusal_of(pipe, saved)
    assert f"does not fit: NaN values in {name.removeprefix('model/')}: the run had diver" in text
    load_into(pipe, saved, nonfinite=True)
    after = state_of(pipe)
    assert name == "weights/x" or torch.isnan(after[name]).all()
    with suppress(FileError):
        load_into(pipe, saved, skip=parse_skip("optimizer"))
        assert not name.startswith("model/")


def test_a_checkpoint_of_another_model_is_refused_with_what_differs(saved):
    """Before its tensors are read."""
    file = saved / read_index(saved).files[0]
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    other = pipeline(sizes=(3, 5, 2))
    index = read_index(saved)
    text = refusal_of(other, saved)
    assert text.startswith(
        f"{saved} is a checkpoint of another model: its layers and shapes have fingerprint "
        f"{index.fingerprint}, this model's have {other._assembly.placed.traced.fingerprint}: "
        "0.weight is float32 (4, 3) in the checkpoint and float32 (5, 3) in the model"
    )


def test_a_damaged_text_of_plain_state_is_named_with_its_file(saved, pipe):
    """Of any file: plain state of a parameter may be in the file of any stage."""

    def spoil(tensors, texts):
        if "model/2.bias" in tensors:
            texts["optimizer"] = '{"2.bias": 3}'

    rewrite(saved, spoil)
    name = read_index(saved).files[1]
    text = refusal_of(pipe, saved, CheckpointDamaged, local=[0])
    assert text.startswith(f"cannot read {name} of the checkpoint {saved}: its optimizer state")


# -- copies of stages and weight rules -----------------------------------------------------------


class Rule:
    """A weight rule that notes what it is given, in order."""

    def __init__(self, log):
        self.log = log

    def load_state(self, state):
        """Note tensors."""
        row = {key: [None if t is None else t.tolist() for t in row] for key, row in state.items()}
        self.log.append(row)

    def load_facts(self, facts):
        """Note numbers."""
        self.log.append(facts)


def with_copies(tensors, texts):
    """Add the state of a second copy, and of the weight rule of both."""
    if "model/2.bias" not in tensors:
        return
    facts = json.loads(texts["optimizer"])
    for prefix, value in (("", 1.0), ("copy-1/", 2.0)):
        tensors[f"{prefix}weights/2.bias/trend"] = torch.full((2,), value)
        tensors[f"{prefix}weights/updates"] = torch.tensor(10 * value).double()
    for key in ("exp_avg", "exp_avg_sq", "step"):
        tensors[f"copy-1/optimizer/2.bias/{key}"] = tensors[f"optimizer/2.bias/{key}"] + 1
    facts["copy-1/2.bias"] = facts["2.bias"] | {"options": facts["2.bias"]["options"] | {"lr": 0.5}}
    texts["optimizer"] = json.dumps(facts)


def versioned_of(pipe, copy, log):
    """Return the stages of a pipeline as one of their copies."""
    return [VersionedStage(0, stage, Rule(log), copy) for stage in pipe._assembly.placed.local]


@pytest.mark.parametrize(("copy", "more"), [(0, 0.0), (1, 1.0)])
def test_each_copy_of_a_stage_has_its_own_state(saved, original, pipe, copy, more):
    """Its moments, options, tensors of the rule and numbers."""
    rewrite(saved, with_copies)
    log = []
    versioned = versioned_of(pipe, copy, log)
    load_into(pipe, saved, versioned, lambda: versioned)
    after = state_of(pipe)
    moments = {name: row for name, row in original[1].items() if "/2.bias/" in name}
    assert moments
    for name, tensor in moments.items():
        assert torch.equal(after[name], tensor + more)
    optimizer = pipe._assembly.placed.local[1].update.optimizer
    assert optimizer.param_groups[0]["lr"] == (0.5 if copy else 0.01)
    assert log == [
        {},
        {"updates": 10.0 * (1 + copy)},
        {"trend": [None, [1.0 + copy] * 2]},
        {"updates": 10.0 * (1 + copy)},
    ]


def test_a_copy_that_was_not_saved_begins_with_the_optimizer_of_the_first(saved, original, pipe):
    """A run goes on with more copies; the state of the rule is of each copy alone."""
    rewrite(saved, with_copies)
    log = []
    versioned = versioned_of(pipe, 2, log)
    load_into(pipe, saved, versioned, lambda: versioned)
    assert differences(state_of(pipe), original[1]) == []
    assert log == [{}, {}] * 2


def test_rules_begin_anew_before_and_after_the_weights_and_then_get_their_state(saved, pipe):
    """Batches in flight still read the old weights; rules start from the new ones."""
    rewrite(saved, with_copies)
    log = []
    versioned = versioned_of(pipe, 0, log)
    before = state_of(pipe)["model/2.bias"]

    def begin_anew():
        now = state_of(pipe)["model/2.bias"]
        log.append("old" if torch.equal(now, before) else "new")
        return versioned

    for skip, states in (("", 4), ("weight_rule", 0)):
        log.clear()
        load_into(pipe, saved, versioned, begin_anew, skip=parse_skip(skip))
        assert log[:2] == ["old", "new"] if not skip else ["new", "new"]
        assert len(log) == 2 + states
    log.clear()
    rewrite(saved, fingerprint="f00")
    refusal_of(pipe, saved, versioned=versioned, begin_anew=begin_anew)
    assert log == []


# -- averages ------------------------------------------------------------------------------------


class OneAverage:
    """A running average of the biases of a pipeline."""

    def __init__(self, pipe):
        self.tensors = {
            id(stage): {
                name: torch.full_like(tensor, -1.0)
                for name, tensor in stage_tensors(stage).items()
                if name.endswith("bias")
            }
            for stage in pipe._assembly.placed.local
        }
        self.n_averaged = -1

    def averaged(self, stage):
        """Return the averaged tensors of a stage."""
        return self.tensors[id(stage)]

    def restart(self, count):
        """Set the number of updates."""
        self.n_averaged = count


@pytest.mark.parametrize(
    ("counts", "skip", "expected"),
    [((7, 0), "", (7, 0)), ((7, 0), "averages", (0, 0)), ((), "averages", (0, 0))],
)
def test_averages_continue_or_begin_anew(saved, pipe, counts, skip, expected):
    """Each has its own values and number of updates."""

    def add(tensors, texts):
        for name in [key.removeprefix("model/") for key in tensors if key.endswith(".bias")]:
            if tensors.get(f"model/{name}") is not None:
                for number, _ in enumerate(counts):
                    shape = tensors[f"model/{name}"].shape
                    tensors[f"average/{number}/{name}"] = torch.full(shape, 10.0 + number)

    rewrite(saved, add, averages=counts)
    averages = [OneAverage(pipe), OneAverage(pipe)]
    progress = load_into(pipe, saved, averages=averages, skip=parse_skip(skip))
    assert tuple(average.n_averaged for average in averages) == expected
    assert progress.averages == (() if skip else counts)
    for number, average in enumerate(averages):
        value = -1.0 if skip else 10.0 + number
        rows = [row for part in average.tensors.values() for row in part.values()]
        assert len(rows) == 3
        assert all((row == value).all() for row in rows)


# -- several processes ---------------------------------------------------------------------------


def load_in_ranks(pipes, folders, monkeypatch):
    """Load on one rank per pipeline; return the errors, or progress."""

    def job(world):
        placed = pipes[world.rank]._assembly.placed
        return load(folders[world.rank], world, placed, [], CheckpointOptions())

    return in_ranks(len(pipes), job, monkeypatch)


@pytest.fixture
def two_pipes(pipe):
    """Two pipelines, for two ranks."""
    other = train(pipeline(seed=6), 1)
    yield [pipe, other]
    other.close()


def test_ranks_that_read_different_checkpoints_load_nothing(
    saved, original, two_pipes, tmp_path, monkeypatch
):
    """Hosts may have different disks under one path; equal copies of a folder are one checkpoint."""
    assert load_in_ranks(two_pipes, [saved, original[0]], monkeypatch) == [Progress(2)] * 2
    before = [state_of(pipe) for pipe in two_pipes]
    train(pipeline()).save(tmp_path / "later")
    for error in load_in_ranks(two_pipes, [saved, tmp_path / "later"], monkeypatch):
        assert type(error) is FileError
        assert str(error) == (
            f"rank 1 on host host1 reads the checkpoint of step 2 in {tmp_path / 'later'}, and "
            f"rank 0 on host host0 that of step 2 in {saved}: load from one folder, on a disk that "
            "all hosts share (nothing was loaded on any rank)"
        )
    for pipe, state in zip(two_pipes, before, strict=True):
        assert differences(state_of(pipe), state) == []


def test_if_one_rank_refuses_no_rank_loads(saved, original, two_pipes, monkeypatch):
    """The message has the rank and its host; the other rank has found no fault."""
    rewrite(saved, lambda tensors, texts: tensors.pop("model/2.bias", None))
    before = [state_of(pipe) for pipe in two_pipes]
    for error in load_in_ranks(two_pipes, [original[0], saved], monkeypatch):
        assert type(error) is FileError
        assert str(error) == (
            f"rank 1 on host host1: the checkpoint {saved} does not fit: the state has no "
            "'2.bias', which stage 1 needs\n(nothing was loaded on any rank)"
        )
    for pipe, state in zip(two_pipes, before, strict=True):
        assert differences(state_of(pipe), state) == []


@pytest.mark.parametrize(("size", "told"), [(1, []), (3, [0])])
def test_an_unexpected_error_is_raised_and_the_ranks_of_others_are_told(
    saved, pipe, monkeypatch, size, told
):
    """They wait for the report of this one."""

    def fail(folder):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(checkpoint_load, "fetch_missing", lambda folder, world: None)
    monkeypatch.setattr(checkpoint_load, "read_index", fail)
    ranks = []

    def run(job):
        ranks.append(0)
        with pytest.raises(ZeroDivisionError, match="a defect"):
            job(0)

    world = SimpleNamespace(local_ranks=(0,), size=size, run=run)
    with pytest.raises(ZeroDivisionError, match="a defect"):
        load(saved, world, pipe._assembly.placed, [], CheckpointOptions())
    assert ranks == told


def test_missing_files_are_fetched_before_anything_is_read(saved, pipe, monkeypatch):
    """From the disks of other hosts."""
    happened = []
    read = checkpoint_load.read_index
    monkeypatch.setattr(
        checkpoint_load, "fetch_missing", lambda folder, world: happened.append(("fetch", folder))
    )
    monkeypatch.setattr(
        checkpoint_load, "read_index", lambda folder: happened.append("read") or read(folder)
    )
    load_into(pipe, saved)
    assert happened == [("fetch", saved), "read"]
