"""`CheckpointWriter`: what is captured of a rank, checked, written, and completed by an index."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from tests.conformance.reference import differences
from torch import nn
from torch.optim import SGD, Adam

import penstock as ps
from penstock.checkpoint.checkpoint import CheckpointWriter, Progress, VersionedStage
from penstock.checkpoint.checkpoint_files import file_sum, read_header
from penstock.checkpoint.checkpoint_index import RuleFacts, read_index, write_index
from penstock.checkpoint.checkpoint_options import CheckpointOptions
from penstock.checkpoint.optimizer_checkpoint import names_of
from penstock.errors import SettingError
from penstock.stage.stage_state import stage_tensors

IDENTITY = "0123456789abcdef" * 2
NAMES = tuple(f"step-00000012-stage-000{stage}-0123456789abcdef.safetensors" for stage in (0, 1))
COPIES = tuple(name.replace("-0123", "-copy-1-0123") for name in NAMES)


@pytest.fixture
def pipe():
    """A pipeline of two ranks that share a weight, after a step."""
    torch.manual_seed(0)
    first = nn.Linear(3, 3)
    model = nn.Sequential(first, nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = first.weight
    result = ps.Pipeline(
        model,
        loss=nn.functional.mse_loss,
        balance=[2, 1],
        micro_batches=2,
        optimizer=lambda params: SGD(params, lr=0.1, momentum=0.9),
        executor="threads",
    )
    step(result)
    yield result
    result.close()


def step(pipe):
    """Train for a step."""
    pipe.train_batch(torch.arange(12.0).reshape(4, 3), torch.ones(4, 3))


class Rule:
    """A weight rule with a trend, a number and further optimizers."""

    def __init__(self, value=1.0, optimizers=()):
        self.value, self.optimizers = value, optimizers

    def state(self):
        """Return nothing by parameter."""
        return {}

    def facts(self):
        """Return a number."""
        return {"updates": self.value}

    def more_optimizers(self):
        """Return further optimizers."""
        return self.optimizers


def writer_of(pipe, folder, *, progress=Progress(12), versioned=(), **options):
    """Return the writer of a checkpoint."""
    placed = pipe._assembly.placed
    options = CheckpointOptions(**options)
    return CheckpointWriter(folder, placed, progress, versioned, options, IDENTITY)


def versioned_of(pipe, *copies):
    """Return both stages once for each copy and its rule."""
    return [
        VersionedStage(pipe._assembly.placed.home[stage.index], stage, rule, copy)
        for stage in pipe._assembly.placed.local
        for copy, rule in copies
    ]


# -- names -----------------------------------------------------------------------------------------


def test_names_have_step_stage_copy_and_identity_in_the_order_of_the_stages(pipe, tmp_path):
    """They are those that an index accepts."""
    assert writer_of(pipe, tmp_path).names == NAMES
    names = writer_of(pipe, tmp_path, copies=2).names
    assert names == (NAMES[0], COPIES[0], NAMES[1], COPIES[1])
    assert (
        writer_of(pipe, tmp_path, progress=Progress(123456789))
        .names[0]
        .startswith("step-123456789-stage-0000-")
    )


# -- capture ---------------------------------------------------------------------------------------


def expected_state(pipe, stage):
    """Return the tensors of a stage's file; a tied weight is in that of the first stage."""
    placed = pipe._assembly.placed.local[stage]
    state = {f"model/{name}": tensor.clone() for name, tensor in stage_tensors(placed).items()}
    state.pop("model/2.weight", None)
    for parameter, name in names_of(placed).items():
        moment = placed.update.optimizer.state[parameter]["momentum_buffer"]
        state[f"optimizer/{name}/momentum_buffer"] = moment.clone()
    return state


def test_a_rank_captures_its_stages_as_they_are_at_that_moment(pipe, tmp_path):
    """Each with weights, buffers and the state of its optimizer, whatever is trained afterwards."""
    writer = writer_of(pipe, tmp_path)
    for rank in (0, 1):
        expected = expected_state(pipe, rank)
        contents = writer.capture(rank)
        step(pipe)
        assert list(contents) == [NAMES[rank]]
        content = contents[NAMES[rank]]
        assert differences(content.tensors, expected) == []
        assert all(tensor.is_contiguous() for tensor in content.tensors.values())
        assert not any(tensor.requires_grad for tensor in content.tensors.values())
        names = {key.removeprefix("optimizer/").rpartition("/")[0] for key in expected}
        assert set(content.facts) == {name for name in names if not name.startswith("model")}
        assert {row["kind"] for row in content.facts.values()} == {"torch.optim.sgd.SGD"}


def test_averages_are_captured_by_number_and_are_not_checked(pipe, tmp_path):
    """They follow from weights that are checked."""
    first, second = pipe.ema(decay=0.5), pipe.ema(decay=0.25)
    second.update()
    writer = writer_of(pipe, tmp_path, averages=[first, second])
    content = writer.capture(1)[NAMES[1]]
    stage = pipe._assembly.placed.local[1]
    for number, average in enumerate((first, second)):
        for name, tensor in average.averaged(stage).items():
            saved = content.tensors[f"average/{number}/{name}"]
            assert torch.equal(saved, tensor)
            assert saved.data_ptr() != tensor.data_ptr()
    assert "average/1/2.bias" in content.tensors
    assert not [key for key in content.checked if "average" in key]


def test_a_further_copy_has_the_state_of_its_optimizer_and_rule_alone(pipe, tmp_path):
    """After a drain all copies of a stage have the same weights; the first copy has a rule too."""
    versioned = versioned_of(pipe, (0, Rule(5.0)), (1, Rule(6.0)))
    writer = writer_of(pipe, tmp_path, versioned=versioned, copies=2)
    contents = writer.capture(1)
    assert list(contents) == [NAMES[1], COPIES[1]]
    first, second = (contents[name] for name in (NAMES[1], COPIES[1]))
    expected = expected_state(pipe, 1)
    expected["weights/updates"] = torch.tensor(5.0).double()
    assert differences(first.tensors, expected) == []
    assert second.tensors.keys() == {
        "copy-1/optimizer/2.bias/momentum_buffer",
        "copy-1/weights/updates",
    }
    assert second.tensors["copy-1/weights/updates"] == 6
    assert list(second.facts) == ["copy-1/2.bias"]
    assert list(first.facts) == ["2.bias"]
    assert [version.prefix for version in versioned] == ["", "copy-1/"] * 2
    assert replace(versioned[0], copy=12).prefix == "copy-12/"


def test_an_optimizer_whose_state_cannot_be_saved_is_refused_where_it_is(pipe, tmp_path):
    """That of a stage, and those that its weight rule has."""
    bad = Adam([nn.Parameter(torch.zeros(1))])
    bad.extra = torch.zeros(1)
    versioned = versioned_of(pipe, (0, Rule(optimizers=[bad])))
    with pytest.raises(SettingError, match="of Adam: it keeps tensors in its attribute 'extra'"):
        writer_of(pipe, tmp_path, versioned=versioned).capture(0)
    pipe._assembly.placed.local[1].update.optimizer.slow = torch.zeros(1)
    writer = writer_of(pipe, tmp_path)
    writer.capture(0)
    with pytest.raises(SettingError, match="of SGD: it keeps tensors in its attribute 'slow'"):
        writer.capture(1)


# -- checks and files ------------------------------------------------------------------------------


def test_files_have_what_was_captured_and_tell_their_checkpoint(pipe, tmp_path):
    """The result is what other ranks need to complete the checkpoint."""
    writer = writer_of(pipe, tmp_path / "new", progress=Progress(12))
    contents = writer.capture(0)
    result = writer.write(contents)
    path = tmp_path / "new" / NAMES[0]
    sums = file_sum(path)
    assert result == {
        "files": {NAMES[0]: [sums.bytes, sums.sha256, sums.header_sha256]},
        "keeps": False,
    }
    assert json.loads(json.dumps(result)) == result
    assert differences(load_file(path), contents[NAMES[0]].tensors) == []
    index = writer.index({NAMES[0]: sums}, {}, keeps=False)
    header = read_header(tmp_path / "new", NAMES[0], index)
    assert header.metadata == {
        "identity": IDENTITY,
        "step": "12",
        "optimizer": json.dumps(contents[NAMES[0]].facts),
    }


def test_state_of_a_rule_is_told_whichever_file_has_it(pipe, tmp_path):
    """Then the checkpoint belongs to this rule."""
    versioned = versioned_of(pipe, (1, Rule()))
    writer = writer_of(pipe, tmp_path, versioned=versioned, copies=2)
    assert writer.write(writer.capture(0))["keeps"] is True
    assert writer.write({}) == {"files": {}, "keeps": False}


def spoiled(pipe, names):
    """Return captured contents of both ranks, in which some tensors are NaN."""
    writer = writer_of(pipe, "")
    contents = writer.capture(0) | writer.capture(1)
    for content in contents.values():
        for name in content.tensors.keys() & names:
            content.tensors[name].fill_(math.nan)
    return contents


def test_nan_in_any_file_is_refused_with_all_names_before_a_file_is_written(pipe, tmp_path):
    """Of parameters and moments; the previous checkpoint stays."""
    names = {"model/2.bias", "optimizer/0.weight/momentum_buffer"}
    contents = spoiled(pipe, names)
    with pytest.raises(SettingError) as refusal:
        writer_of(pipe, tmp_path).write(contents)
    assert str(refusal.value).startswith(
        "there are NaN values in optimizer/0.weight/momentum_buffer, 2.bias at step 12: this run "
        "has diverged, and its checkpoint is not written, to keep the previous one. Resume"
    )
    assert list(tmp_path.iterdir()) == []
    result = writer_of(pipe, tmp_path, nonfinite=True).write(contents)
    assert list(result["files"]) == list(NAMES)


def test_nan_in_buffers_and_infinities_are_written(pipe, tmp_path):
    """Masks have them on purpose."""
    contents = spoiled(pipe, {"model/1.running_mean"})
    contents[NAMES[0]].tensors["model/0.bias"].fill_(math.inf)
    assert list(writer_of(pipe, tmp_path).write(contents)["files"]) == list(NAMES)


def test_nan_in_the_state_of_a_copy_is_refused(pipe, tmp_path):
    """It would reach the weights with the next average."""
    versioned = versioned_of(pipe, (0, Rule()), (1, Rule(math.nan)))
    writer = writer_of(pipe, tmp_path, versioned=versioned, copies=2)
    with pytest.raises(SettingError, match="there are NaN values in copy-1/weights/updates at"):
        writer.write(writer.capture(0))


def test_files_of_a_failed_save_are_removed_and_no_others(pipe, tmp_path):
    """Of all ranks, as far as they are visible here."""
    writer = writer_of(pipe, tmp_path)
    writer.write(writer.capture(0))
    other = NAMES[1].replace("0123", "3210")
    for name in (NAMES[1], other, "notes.txt"):
        (tmp_path / name).write_text("")
    writer.remove()
    assert {path.name for path in tmp_path.iterdir()} == {other, "notes.txt"}
    writer.remove()
    writer_of(pipe, tmp_path / "nowhere").remove()


# -- index -----------------------------------------------------------------------------------------


def test_an_index_has_all_of_the_progress(pipe, tmp_path):
    """Numbers of the scaler are written as they are compared, as floats."""
    progress = Progress(
        12, {"scale": 8, "steps": torch.tensor(3), "skipped": 1}, ('{"a": 1}',), ("S",), 0.0, (4, 0)
    )
    writer = writer_of(pipe, tmp_path, progress=progress)
    result = writer.write(writer.capture(0) | writer.capture(1))
    sums = {name: file_sum(tmp_path / name) for name in result["files"]}
    hosts = {NAMES[0]: "a", NAMES[1]: "b"}
    write_index(tmp_path, writer.index(sums, hosts, keeps=True))
    index = read_index(tmp_path)
    assert index.scaler == {"scale": 8.0, "steps": 3.0, "skipped": 1.0}
    assert (index.step, index.files, index.identity) == (12, NAMES, IDENTITY)
    assert (index.schedulers, index.scheduler_kinds) == (('{"a": 1}',), ("S",))
    assert (index.score, index.averages) == (0.0, (4, 0))
    assert (index.sums, index.hosts, index.rule) == (sums, hosts, None)
    assert index.fingerprint == pipe._assembly.placed.traced.fingerprint
    assert index.aliases == {"2.weight": "0.weight"}


@pytest.mark.parametrize(
    ("score", "expected"),
    [(None, None), (0.0, 0.0), (-2.5, -2.5), (math.nan, None), (math.inf, None), (-math.inf, None)],
)
def test_a_score_that_cannot_be_compared_is_not_recorded(pipe, tmp_path, score, expected):
    """A run that has diverged would be the best one for ever."""
    index = writer_of(pipe, tmp_path, progress=Progress(12, score=score)).index({}, {}, keeps=False)
    assert (index.score, index.scaler) == (expected, None)


@pytest.mark.parametrize(
    ("copies", "keeps", "expected"), [(1, False, False), (1, True, True), (2, False, True)]
)
def test_a_rule_keeps_state_if_a_file_has_it_or_a_stage_has_copies(
    pipe, tmp_path, copies, keeps, expected
):
    """Copies have optimizers of their own, which another rule does not have."""
    rule = RuleFacts("stash", 3, copies)
    index = writer_of(pipe, tmp_path, rule=rule).index({}, {}, keeps=keeps)
    assert index.rule == RuleFacts("stash", 3, copies, keeps=expected)
