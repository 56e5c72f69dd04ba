"""Loading of copies of stages, weight rules and averages, and in several processes."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from tests.checkpoint.loading import (
    load_into,
    pipeline,
    refusal_of,
    rewrite,
    state_of,
    train,
)
from tests.checkpoint.ranks_in_threads import in_ranks
from tests.conformance.reference import differences

from penstock.checkpoint import checkpoint_load
from penstock.checkpoint.checkpoint import Progress, VersionedStage
from penstock.checkpoint.checkpoint_index import INDEX, read_index
from penstock.checkpoint.checkpoint_load import load
from penstock.checkpoint.checkpoint_options import CheckpointOptions, parse_skip
from penstock.errors import FileError
from penstock.stage.stage_state import stage_tensors

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


def test_ranks_that_read_different_checkpoints_of_schema_1_load_nothing(
    saved, tmp_path, two_pipes, monkeypatch
):
    """Such checkpoints have no identity: their content tells them apart."""
    folders = [saved, tmp_path / "other"]
    shutil.copytree(saved, folders[1])
    for step, folder in zip((2, 3), folders, strict=True):
        index = replace(read_index(folder), step=step, schema=1, identity="", sums={})
        index = replace(index, scheduler_kinds=(), rule=None, aliases={}, checksum="")
        (folder / INDEX).write_text(json.dumps(asdict(index)))
    for error in load_in_ranks(two_pipes, folders, monkeypatch):
        assert "rank 1 on host host1 reads the checkpoint of step 3 in" in str(error)
    assert load_in_ranks(two_pipes, [saved, saved], monkeypatch) == [Progress(2)] * 2


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


@pytest.mark.parametrize(("size", "expected"), [(1, []), (3, [0])])
def test_an_unexpected_error_is_raised_and_the_ranks_of_others_are_told(
    saved, pipe, monkeypatch, size, expected
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
    assert ranks == expected


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
