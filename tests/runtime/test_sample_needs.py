"""Which samples a process needs, and a reader of exactly these, against plain loops."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
from tests.runtime.test_batch_needs import CountingReads, part

import penstock as ps
from penstock.batches.batch import make_batch
from penstock.batches.batch_parts import BatchPart
from penstock.batches.sample_order import order_checksum
from penstock.errors import SettingError
from penstock.runtime.batch_needs import (
    BatchNeeds,
    BatchReader,
    SampleNeeds,
    check_needs,
    needs_of,
)

#: Schedules of several kinds: copies of stages, several stages on a rank, and a stream.
SCHEDULES = {
    "1f1b": lambda: ps.schedule("1f1b", 3, 4),
    "copies": lambda: ps.schedule("1f1b", 2, 5, replicas=(2, 1)),
    "chimera": lambda: ps.schedule("chimera", 2, 4),
    "interleaved": lambda: ps.schedule("interleaved", 4, 4, chunks=2),
    "stream": lambda: ps.schedule("pipedream", 3, 2, replicas=(2, 1, 1)),
}


def assembly_of(schedule, ranks, *, entries=(), traced=False):
    """Return the assembly of a process with some of the ranks.

    `entries` are the stages of a traced model that start with the inputs, beside the first.
    """
    interpreters = {
        rank: SimpleNamespace(
            stages={
                index: SimpleNamespace(
                    runner=SimpleNamespace(entry=0 if index in entries else None)
                )
                for index in schedule.stages_of_rank[rank]
            }
        )
        for rank in ranks
    }
    return SimpleNamespace(
        setting=SimpleNamespace(schedule=schedule, lengths=(1,) * schedule.stages),
        traced=SimpleNamespace(variants=object() if traced else None),
        interpreters=interpreters,
    )


def forwards(schedule, rank, stage):
    """Return the micro-batches whose forward a rank runs on a stage; all of them in a stream."""
    everything = set(range(schedule.micro_batches))
    if schedule.stream is not None:
        return everything if stage in schedule.stages_of_rank[rank] else set()
    ops = [op for op in schedule.programs[rank] if op.stage == stage]
    return {op.micro_batch for op in ops if op.kind.value == "F"}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("entries", "traced"), [((), False), ((1,), True), ((), True)])
def test_inputs_are_needed_where_a_stage_reads_them_and_targets_by_the_last_stage(
    name, entries, traced
):
    """The last stage of a traced model needs all inputs, by which a loss in the model is counted."""
    schedule = SCHEDULES[name]()
    last = schedule.stages - 1
    for ranks in [*([rank] for rank in range(schedule.ranks)), range(schedule.ranks), []]:
        inputs, targets = set(), set()
        for rank in ranks:
            for stage in (0, *entries):
                inputs |= forwards(schedule, rank, stage)
            if last in schedule.stages_of_rank[rank]:
                targets = set(range(schedule.micro_batches))
                inputs |= targets if traced else set()
        needs = needs_of(assembly_of(schedule, ranks, entries=entries, traced=traced))
        assert (needs.inputs.numbers, needs.targets.numbers) == (inputs, targets)
        assert (bool(needs.inputs), bool(needs.targets)) == (bool(inputs), bool(targets))
        words = []
        for numbers, kind in ((inputs, "inputs"), (targets, "targets")):
            count, total = len(numbers), schedule.micro_batches
            share = "all" if count == total else f"{count} of {total} micro-batches'"
            words.append(f"{share if count else 'no'} {kind}")
        assert str(needs) == ", ".join(words)


@pytest.mark.parametrize("samples", [1, 2, 3, 4, 9, 10])
def test_positions_are_those_of_the_samples_of_the_micro_batches(samples):
    """Also of a batch that has fewer samples than micro-batches."""
    schedule = ps.schedule("1f1b", 2, 4)
    rows = torch.arange(samples).unsqueeze(1)
    batch = make_batch(rows, None, 4, step=0, training=True)
    for numbers in ((), (0,), (3,), (1, 2), (0, 1, 2, 3)):
        needs = SampleNeeds(frozenset(numbers), schedule)
        expected = [
            int(row)
            for number in numbers
            if number < len(batch.inputs)
            for row in batch.inputs[number]
        ]
        assert needs.positions(samples) == expected


def test_slices_of_sequences_need_the_samples_of_their_micro_batch():
    """All slices of a micro-batch are cut from the same samples."""
    schedule = ps.schedule("terapipe", 2, 3)
    slicing = schedule.slicing
    for number in range(len(slicing.share)):
        micro_batch = slicing.micro_batch_of[number]
        needs = SampleNeeds(frozenset([number]), schedule)
        assert needs.positions(6) == [2 * micro_batch, 2 * micro_batch + 1]
    everything = SampleNeeds(frozenset(range(len(slicing.share))), schedule)
    one = SampleNeeds(frozenset([0]), schedule)
    words = str(BatchNeeds(everything, one))
    assert words == f"all inputs, 1 of {len(slicing.share)} micro-batches' targets"


@pytest.mark.parametrize("samples", [2, 4, 5, 11])
def test_slices_of_samples_are_micro_batches_of_their_own(samples):
    """Of unlike sizes; a batch that is too small for them has one sample in each."""
    schedule = ps.schedule("autopipe", 3, 4)
    slicing = schedule.slicing
    assert slicing.along == "samples"
    rows = torch.arange(samples).unsqueeze(1)
    batch = make_batch(rows, None, 4, step=0, training=True, slicing=slicing)
    for number in range(len(slicing.share)):
        needs = SampleNeeds(frozenset([number]), schedule)
        parts = batch.inputs[number : number + 1]
        assert needs.positions(samples) == [int(row) for part in parts for row in part]


def test_reading_asks_for_the_needed_samples_alone():
    """By their numbers in the data set; the order of all samples identifies the batch."""
    schedule = ps.schedule("1f1b", 2, 2)
    queries = []

    def read(numbers):
        queries.append(numbers)
        return torch.tensor(numbers).unsqueeze(1)

    indices = torch.tensor([7, 5, 9, 2])
    for numbers, positions, query in (((1,), [2, 3], [9, 2]), ((), [], [7])):
        part = SampleNeeds(frozenset(numbers), schedule).read(read, indices)
        assert (list(part.positions), part.samples) == (positions, 4)
        assert part.value.flatten().tolist() == query
        assert part.order == order_checksum([7, 5, 9, 2])
        assert queries.pop() == query
    with pytest.raises(SettingError, match="at least one sample"):
        SampleNeeds(frozenset([1]), schedule).read(read, [])
    with pytest.raises(SettingError, match="one row for each position"):
        SampleNeeds(frozenset([1]), schedule).read(lambda numbers: torch.ones(3, 1), indices)


def message_of(x, y, *, inputs, targets, refused, micro_batches=4):
    """Check a batch on rank 1, which needs some micro-batches; return the message, if any."""
    schedule = SimpleNamespace(
        placement={(0, number): 1 for number in inputs} | {(1, n): 1 for n in range(4)},
        stream=None,
        micro_batches=micro_batches,
        slicing=None,
        stages_of_rank=[[], [0, 1] if targets else [0]],
        stages=2,
    )
    assembly = assembly_of(schedule, [1])
    errors = []
    assembly.world = SimpleNamespace(local_ranks=(1,), abandon=errors.append)
    batch = make_batch(x, y, micro_batches, step=0, training=True)
    if not refused:
        check_needs(assembly, batch)
        assert errors == []
        return ""
    with pytest.raises(SettingError) as e:
        check_needs(assembly, batch)
    assert errors == [e.value], "the other ranks are stopped"
    return str(e.value)


WHOLE = torch.ones(8, 1)


@pytest.mark.parametrize(
    ("x", "y", "inputs", "targets", "words"),
    [
        (WHOLE, WHOLE, (0, 1, 2, 3), True, ""),
        (part([0, 1, 6, 7]), WHOLE, (0, 3), True, ""),
        (part([0, 1, 6]), WHOLE, (0, 3), True, "inputs of micro-batches 3"),
        (part([]), WHOLE, (3, 0), True, "inputs of micro-batches 0, 3"),
        (part([]), WHOLE, (), True, ""),
        (WHOLE, part([0, 1]), (0,), False, ""),
        (WHOLE, part([0, 1]), (0,), True, "targets of micro-batches 1, 2, 3"),
        (part([]), part([]), (1,), False, "inputs of micro-batches 1"),
        (
            part([0, 1]),
            part([2, 3, 4, 5, 6, 7]),
            (2,),
            True,
            "inputs of micro-batches 2 and the targets of micro-batches 0",
        ),
        (part([0, 1]), None, (0, 2), False, "inputs of micro-batches 2"),
        # Of a batch of 2 samples, micro-batches 2 and 3 do not exist.
        (part([0, 1], 2), torch.ones(2, 1), (0, 1, 2, 3), True, ""),
        (part([0], 2), torch.ones(2, 1), (0, 1, 2, 3), True, "inputs of micro-batches 1"),
    ],
)
def test_what_is_missing_of_a_batch_is_named(x, y, inputs, targets, words):
    """And all ranks are stopped; samples that are not needed may be missing."""
    message = message_of(x, y, inputs=inputs, targets=targets, refused=bool(words))
    if not words:
        assert message == ""
    else:
        assert message.startswith(f"rank 1 needs the {words}, and this batch has not all of them")


def reader_of(inputs, targets, batch, *, needed=(0, 1, 2), drop_last=False, wanted=None):
    """Return a reader of micro-batches of three, in reverse order."""
    schedule = ps.schedule("1f1b", 2, 3)
    wanted = needed if wanted is None else wanted
    needs = BatchNeeds(
        SampleNeeds(frozenset(needed), schedule), SampleNeeds(frozenset(wanted), schedule)
    )
    return BatchReader(
        needs, inputs, targets, batch, lambda n: torch.arange(n).flip(0), drop_last=drop_last
    )


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("samples", "batch"), [(7, 3), (6, 3), (1, 1), (8, 5), (5, 5)])
def test_an_epoch_has_every_sample_once_in_its_order(samples, batch, drop_last, pairs):
    """The last batch has the remainder, or is left out."""
    values = [(torch.tensor([n]), torch.tensor([10 * n])) for n in range(samples)]
    x, y = (torch.stack(column) for column in zip(*values, strict=True))
    reader = reader_of(values if pairs else x, None if pairs else y, batch, drop_last=drop_last)
    order = list(reversed(range(samples)))
    expected = [order[start : start + batch] for start in range(0, samples, batch)]
    if drop_last:
        expected = [row for row in expected if len(row) == batch]
    assert len(reader) == len(expected)
    for _ in range(2):
        rows = [(a.value.flatten().tolist(), b.value.flatten().tolist()) for a, b in reader]
        assert rows == [(row, [10 * number for number in row]) for row in expected]
    part_of_epoch = [a.value.flatten().tolist() for a, _ in reader.batches(1, 99)]
    assert part_of_epoch == expected[1:]
    assert [a.value.flatten().tolist() for a, _ in reader.batches(0, 1)] == expected[:1]


@pytest.mark.parametrize("seed", range(12))
def test_a_reader_reads_what_is_needed_of_inputs_and_of_targets(seed):
    """Pairs are read once for both; where nothing is needed, one sample shows the form, once."""
    rng = random.Random(seed)
    numbers = (0, 1, 2)
    needed, requested = (tuple(sorted(rng.sample(numbers, rng.randint(0, 3)))) for _ in range(2))
    samples, batch = 11, rng.choice([3, 4])
    pairs = rng.random() < 0.5
    values = [(torch.tensor([n]), {"y": torch.tensor([10 * n])}) for n in range(samples)]
    x, y = (CountingReads([row[side] for row in values]) for side in (0, 1))
    source = CountingReads(values)
    reader = reader_of(
        *((source, None) if pairs else (x, y)), batch, needed=needed, wanted=requested
    )
    order = list(reversed(range(samples)))
    reads = {"x": [], "y": [], "pairs": []}
    for index, (part_x, part_y) in enumerate(reader):
        row = order[index * batch : (index + 1) * batch]
        needs = reader._needs
        columns = []
        for name, samples_read, sample_needs in (
            ("x", part_x, needs.inputs),
            ("y", part_y, needs.targets),
        ):
            positions = sample_needs.positions(len(row))
            assert (list(samples_read.positions), samples_read.samples) == (positions, len(row))
            value = samples_read.value if name == "x" else samples_read.value["y"]
            factor = 1 if name == "x" else 10
            if positions:
                assert value.flatten().tolist() == [factor * row[p] for p in positions]
                reads[name] += [row[position] for position in positions]
            elif index == 0 and not reads[name]:
                reads[name].append(row[0])
            assert samples_read.order == order_checksum(row)
            columns += positions
        reads["pairs"] += [row[position] for position in sorted(set(columns))]
    if pairs:
        assert source.read == (reads["pairs"] if needed or requested else [order[0]])
    else:
        assert (x.read, y.read) == (reads["x"], reads["y"])


@pytest.mark.parametrize(
    ("inputs", "targets", "batch", "drop_last", "words"),
    [
        (WHOLE, WHOLE[:7], 2, False, "8 inputs and 7 targets: every input needs its own target"),
        (WHOLE[:7], WHOLE, 2, False, "7 inputs and 8 targets: every input needs its own target"),
        (WHOLE, WHOLE, 0, False, "batch is a whole number of 1 or more, not 0"),
        (WHOLE, WHOLE, -1, False, "batch is a whole number of 1 or more, not -1"),
        (WHOLE, WHOLE, True, False, "batch is a whole number of 1 or more, not True"),
        (WHOLE, WHOLE, 2.0, False, "batch is a whole number of 1 or more, not 2.0"),
        (WHOLE, WHOLE, 9, True, "no batch of 9 can be made of 8 samples"),
        ([], None, 1, False, "no batch of 1 can be made of 0 samples"),
    ],
)
def test_readers_without_a_batch_are_refused(inputs, targets, batch, drop_last, words):
    """With the numbers."""
    with pytest.raises(SettingError, match=f"^{words}"):
        reader_of(inputs, targets, batch, drop_last=drop_last)
    assert len(reader_of(WHOLE, WHOLE, 8, drop_last=True)) == 1


@pytest.mark.parametrize("samples", [[(1, 2, 3)] * 2, [torch.ones(2)] * 2, [{"x": 1, "y": 2}] * 2])
def test_samples_that_are_no_pairs_are_refused(samples):
    """The message has their type."""
    with pytest.raises(SettingError, match="pairs of an input and a target, not"):
        next(iter(reader_of(samples, None, 2)))


def test_samples_that_cannot_be_stacked_are_refused():
    """With the class of the data set; the error of torch is the cause."""
    samples = [torch.ones(1), torch.ones(2)]
    with pytest.raises(SettingError, match=r"^the samples of list cannot be stacked: stack") as e:
        next(iter(reader_of(samples, WHOLE[:2], 2)))
    assert isinstance(e.value.__cause__, RuntimeError)
    with pytest.raises(SettingError, match=r"^the samples of list cannot be stacked"):
        next(iter(reader_of([object(), object()], WHOLE[:2], 2)))


def test_a_part_that_is_whole_says_so():
    """Callers may then take its values for those of the batch."""
    assert BatchPart(WHOLE, range(8), 8).is_whole
    assert not part([0, 1]).is_whole


def test_a_process_in_the_middle_reads_one_sample_of_inputs_and_one_of_targets():
    """They have unlike shapes, by which the messages of batches are compared."""
    x, y = CountingReads(torch.ones(6, 2)), CountingReads(torch.zeros(6, 3, dtype=torch.int64))
    for part_x, part_y in reader_of(x, y, 3, needed=()):
        assert (part_x.on_meta.shape, part_y.on_meta.shape) == ((3, 2), (3, 3))
        assert part_y.on_meta.dtype == torch.int64
    assert (x.read, y.read) == ([5], [5])
