"""Joined batches of copies: sizes and positions against a slow reference, without processes."""

from __future__ import annotations

import random
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from penstock.batches.batch import common_sample_count
from penstock.batches.batch_parts import BatchPart
from penstock.errors import RanksDiffer, RunError, SettingError
from penstock.ranks.mesh.copy_batches import (
    CopyBatches,
    _describe_samples,
    _Shares,
)


@pytest.mark.parametrize("seed", range(20))
def test_positions_are_those_of_micro_batches_in_turn(seed):
    """A slow reference: the joined batch as a list of the copies that its samples are of."""
    choose = random.Random(seed)
    copies, micro_batches = choose.randint(1, 4), choose.randint(1, 4)
    by_copy = tuple(
        tuple(choose.randint(1, 5) for _ in range(micro_batches)) for _ in range(copies)
    )
    shares = _Shares(by_copy)
    owners, sizes = [], []
    for number in range(micro_batches):
        for copy in range(copies):
            owners += [copy] * by_copy[copy][number]
            sizes.append(by_copy[copy][number])
    assert shares.sizes == tuple(sizes)
    for copy in range(copies):
        expected = [position for position, owner in enumerate(owners) if owner == copy]
        assert shares.positions(copy) == expected


def batches_of(copy, copies, micro_batches=2, **more):
    """What joins the batches of a process of a copy, without groups of processes."""
    batches = object.__new__(CopyBatches)
    batches.mesh = SimpleNamespace(
        copies=copies,
        stages=2,
        pipeline=tuple(range(10, 10 + 2 * copies)),
        pipelines=[tuple(range(2 * copies))],
        copy_of=lambda rank: rank // 2,
    )
    batches.world = SimpleNamespace(local_ranks=(2 * copy + 1,), failures=[])
    batches.world.abandon = batches.world.failures.append
    batches.schedule = SimpleNamespace(micro_batches=micro_batches * copies)
    batches.gathers_inputs = batches.compares = False
    batches._shares = batches._last_stage_group = None
    for name, value in more.items():
        setattr(batches, name, value)
    return batches


def test_a_process_has_the_rows_of_its_copy_and_gets_back_its_outputs():
    """Outputs may have several rows per sample."""
    shares = _Shares(((2, 1), (3, 3)))
    for copy, positions in ((0, [0, 1, 5]), (1, [2, 3, 4, 6, 7, 8])):
        batches = batches_of(copy, 2, _exchange_shares=lambda *_: shares)
        x = torch.arange(float(len(positions)))
        joined_x, joined_y = batches.joined(x, x * 2)
        for part, values in ((joined_x, x), (joined_y, x * 2)):
            assert list(part.positions) == positions
            assert (part.samples, part.sizes) == (9, (2, 3, 1, 3))
            assert torch.equal(part.value, values)
        rows = torch.arange(18).reshape(9, 2).flatten()
        expected = [row for position in positions for row in (2 * position, 2 * position + 1)]
        assert batches.outputs_of_copy(rows).tolist() == expected
        assert batches.joined(x, None)[1] is None
        part = BatchPart(x, positions, 9)
        assert batches.joined(part, None) == (part, None)
        assert batches.outputs_of_copy(rows) is rows


def test_a_single_copy_keeps_its_batch():
    """Its processes only compare what they have."""
    batches = batches_of(0, 1, _exchange_shares=lambda *_: _Shares(((2, 1),)))
    x, y = torch.zeros(3), torch.ones(3)
    assert batches.joined(x, y) == (x, y)
    assert batches.outputs_of_copy(x) is x


def test_a_batch_that_no_copy_can_use_stops_the_others():
    """They would wait for it."""
    batches = batches_of(0, 2)
    for x, y, text in (
        (torch.zeros(3), torch.zeros(2), "a batch has 3 inputs and 2 targets"),
        (torch.zeros(0), None, "samples"),
    ):
        with pytest.raises(SettingError, match=text) as raised:
            batches.joined(x, y)
        assert batches.world.failures.pop() is raised.value
    assert common_sample_count([torch.zeros(3, 1), torch.zeros(3)], torch.zeros(3)) == 3


def exchanging(batches, monkeypatch, rows):
    """Let the processes of a job have sent these rows; None stands for that of this process."""
    sent = []
    module = "penstock.ranks.mesh.copy_batches.dist"

    def gather(received, row, group, async_op):
        sent.append(row.tolist())
        for target, values in zip(received, rows, strict=True):
            target.copy_(row if values is None else torch.tensor(values))
        return "work"

    def wait_for(work, waited_for):
        assert (work, waited_for) == ("work", "the batches of all copies of the pipeline")

    monkeypatch.setattr(f"{module}.all_gather", gather)
    monkeypatch.setattr(f"{module}.get_world_size", lambda _: len(rows))
    batches._all_processes, batches._batch_number = None, 0
    batches.world.wait_for = wait_for
    return sent


@pytest.mark.parametrize(
    ("counts", "by_copy"),
    [
        ((5, 4), ((3, 2), (2, 2))),
        ((5, 1), ((5,), (1,))),
        ((1, 7), ((1,), (7,))),
        ((2, 3), ((1, 1), (2, 1))),
    ],
)
def test_all_copies_have_as_many_micro_batches_as_the_smallest_batch_allows(
    monkeypatch, counts, by_copy
):
    """The first process of each copy tells its samples; processes are numbered in the job."""
    batches = batches_of(0, 2)
    batches.mesh.pipeline, batches.mesh.pipelines = (3, 1, 0, 2), [(3, 1, 0, 2)]
    x = torch.zeros(counts[0], 2)
    rows = exchanging(batches, monkeypatch, [None, [1, 2, 3], None, None])
    with pytest.raises(RanksDiffer):
        batches._exchange_shares(x, None, counts[0])
    row = rows[0]
    assert row[0] == counts[0]
    first, second = [counts[0], *row[1:]], [counts[1], *row[1:]]
    # Processes 3 and 1 are of copy 0, processes 0 and 2 of copy 1.
    exchanging(batches, monkeypatch, [second, first, second, first])
    assert batches._exchange_shares(x, None, counts[0]).by_copy == by_copy


def test_contents_are_compared_where_processes_must_have_the_same(monkeypatch):
    """Only then, and of the first batches whole."""
    x, y = torch.ones(2, 3), torch.ones(2)
    for compares in (False, True):
        batches = batches_of(0, 1, compares=compares)
        batches.mesh.pipeline = (1, 0)
        sent = exchanging(batches, monkeypatch, [None, None])
        batches._exchange_shares(x, y, 2)
        batches._exchange_shares(x, y * 2, 2)
        assert batches._batch_number == 2
        assert (sent[0][2] == 0) is not compares
        assert (sent[0][2] != sent[1][2]) is compares
        assert sent[0][1] == sent[1][1]
        batches._batch_number = 5  # none of the first ones, nor a power of two
        batches._exchange_shares(x, y, 2)
        assert sent[2] == [*sent[0][:2], 0]


def test_processes_of_a_copy_with_other_batches_are_named_with_their_copy():
    """By their ranks in the job; copies may have other contents, and not other shapes."""
    batches = batches_of(0, 2)
    batches.mesh.pipelines = [(3, 1, 0, 2), (7, 5, 4, 6)]
    rows = [(4, 1, 20)] * 8
    for process in (3, 1, 7, 5):
        rows[process] = (5, 1, 10)
    batches._check_same(rows, "form")
    rows[5] = (5, 1, 11)
    with pytest.raises(
        RanksDiffer, match=r"^the processes \[1, 3, 5, 7\] of copy 0 of the pipeline"
    ):
        batches._check_same(rows, "form")
    rows[5] = (5, 2, 10)
    with pytest.raises(RanksDiffer, match="on this process form for each sample: pad the batches"):
        batches._check_same(rows, "form")


def test_samples_are_described_without_their_number():
    """Structure, shapes behind the first dimension, types and constants."""
    x = {"a": torch.zeros(5, 2, 3), "b": [torch.zeros(5, dtype=torch.int64), 7]}
    text = _describe_samples(x)
    assert text == _describe_samples({"a": torch.ones(9, 2, 3), "b": [torch.zeros(9).long(), 7]})
    for other in (
        {"a": torch.zeros(5, 2, 4), "b": [torch.zeros(5, dtype=torch.int64), 7]},
        {"a": torch.zeros(5, 2, 3), "b": [torch.zeros(5, dtype=torch.int32), 7]},
        {"a": torch.zeros(5, 2, 3), "b": [torch.zeros(5, dtype=torch.int64), 8]},
        {"a": torch.zeros(5, 2, 3), "c": [torch.zeros(5, dtype=torch.int64), 7]},
    ):
        assert _describe_samples(other) != text


@pytest.mark.parametrize(("copies", "width"), [(1, 1), (2, 1), (1, 2)])
def test_batches_are_joined_where_there_are_copies_or_processes_that_share_layers(
    monkeypatch, copies, width
):
    """Elsewhere all ranks have the same batch. All inputs are needed where the model has the loss."""
    given = []
    monkeypatch.setattr(CopyBatches, "__init__", lambda self, *facts: given.append(facts))
    monkeypatch.setattr("penstock.ranks.mesh.copy_batches.DistributedWorld", SimpleNamespace)
    mesh = SimpleNamespace(copies=copies, width=width)
    world, setting = SimpleNamespace(), SimpleNamespace(schedule="schedule")
    for variants in (None, "variants"):
        traced = SimpleNamespace(variants=variants)
        copy_batches = CopyBatches.of(mesh, world, setting, traced, compares=True)
        assert (copy_batches is None) is (copies * width == 1)
        if copy_batches is not None:
            assert given.pop() == (mesh, world, "schedule", variants is not None, True)
        assert CopyBatches.of(None, world, setting, traced, compares=True) is None


@pytest.mark.parametrize(("rank", "group"), [(2, "group 2"), (1, None), (6, "group 3")])
def test_the_last_stage_of_every_pipeline_has_a_group_made_by_all_processes(
    monkeypatch, rank, group
):
    """In one order, and closed when the run is stopped. A single process needs none."""
    requests, watched = [], []
    module = "penstock.ranks.mesh.copy_batches.dist"

    def new_group(processes, timeout, backend):
        requests.append((processes, timeout, backend))
        return f"group {len(requests)}"

    monkeypatch.setattr(f"{module}.new_group", new_group)
    monkeypatch.setattr(f"{module}.get_rank", lambda: rank)
    mesh = SimpleNamespace(pipelines=[(0, 2, 1, 3), (4, 6, 5, 7)])
    world = SimpleNamespace(deadline_s=7.0, watch_group=watched.append)
    schedule = SimpleNamespace(ranks_of_stage=[(0, 2), (1, 3)])
    batches = CopyBatches(mesh, world, schedule, gathers_inputs=False, compares=True)
    limit = timedelta(seconds=7.0)
    assert requests == [(processes, limit, "gloo") for processes in (None, [2, 3], [6, 7])]
    assert (batches._all_processes, batches._last_stage_group) == ("group 1", group)
    assert watched == ["group 1", *([group] if group else [])]
    schedule.ranks_of_stage = [(0,), (1,)]
    alone = CopyBatches(mesh, world, schedule, gathers_inputs=False, compares=True)
    assert alone._last_stage_group is None


@pytest.mark.parametrize("gathers_inputs", [False, True])
def test_the_last_stage_has_the_targets_of_all_copies(gathers_inputs):
    """In the order of the joined batch; inputs only where the model computes its loss."""
    shares = _Shares(((2, 1), (3, 3)))
    batches = batches_of(1, 2, _exchange_shares=lambda *_: shares, gathers_inputs=gathers_inputs)
    batches._last_stage_group = "group"
    counts = []

    def gather(value, counts_of_copies):
        counts.append(counts_of_copies)
        return [torch.tensor([0.0, 1.0, 5.0]), torch.tensor([2.0, 3.0, 4.0, 6.0, 7.0, 8.0])]

    batches._gather = gather
    x = torch.zeros(6)
    joined_x, joined_y = batches.joined(x, x)
    whole = [joined_x, joined_y] if gathers_inputs else [joined_y]
    for part in whole:
        assert part.value.tolist() == list(range(9))
        assert list(part.positions) == list(range(9))
        assert (part.samples, part.sizes) == (9, (2, 3, 1, 3))
    if not gathers_inputs:
        assert list(joined_x.positions) == [2, 3, 4, 6, 7, 8]
    assert counts == [[3, 6]] * len(whole)


def test_values_of_all_copies_arrive_with_their_constants(monkeypatch):
    """Each from the process of its copy that runs the last stage, as bytes."""
    batches, waited, sources = batches_of(1, 2), [], []
    batches.schedule.ranks_of_stage = [(0, 2), (1, 3)]
    batches.world.wait_for = lambda work, what: waited.append(work)

    def broadcast(content, source, group, async_op):
        assert content.dtype is torch.uint8
        sources.append(source)
        if source != 13:
            content.fill_(0)
        return len(sources)

    monkeypatch.setattr("penstock.ranks.mesh.copy_batches.dist.broadcast", broadcast)
    value = [5, torch.ones(3, 2), "x", torch.ones(3, dtype=torch.int64)]
    first, second = batches._gather(value, [2, 3])
    assert (first[0], first[2]) == (second[0], second[2]) == (5, "x")
    assert torch.equal(second[1], value[1])
    assert torch.equal(second[3], value[3])
    assert torch.equal(first[1], torch.zeros(2, 2))
    assert torch.equal(first[3], torch.zeros(2, dtype=torch.int64))
    assert sources == [11, 11, 13, 13]
    assert waited == [1, 2, 3, 4]


def test_targets_are_sent_with_their_values_however_they_lie_in_memory(monkeypatch):
    """That of lazily conjugated ones has others; a single sample may have any stride."""
    batches, sent = batches_of(0, 1), []
    batches.schedule.ranks_of_stage = [(0,), (1,)]
    batches.world.wait_for = lambda *_: None
    monkeypatch.setattr(
        "penstock.ranks.mesh.copy_batches.dist.broadcast",
        lambda content, source, group, async_op: sent.append(content),
    )
    numbers = torch.tensor([1 + 2j, 3 - 4j])
    ((values,),) = batches._gather([numbers.conj()], [2])
    assert values.tolist() == sent[0].view(torch.complex64).tolist() == [1 - 2j, 3 + 4j]
    ((value,),) = batches._gather([numbers[:1].conj().imag], [1])
    assert value.tolist() == sent[1].view(torch.float32).tolist() == [-2.0]


def test_a_rank_that_is_lost_while_groups_are_made_is_an_error_of_the_run(monkeypatch):
    """torch's own error names neither the rank nor what it did."""

    def refuse(*_):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr("penstock.ranks.mesh.copy_batches.dist.new_group", refuse)
    with pytest.raises(RunError, match="could not connect to the other ranks of the mesh: Connec"):
        CopyBatches(None, SimpleNamespace(deadline_s=7.0), None, False, True)
