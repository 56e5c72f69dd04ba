"""Every process reads what it needs of a batch, and training is the same as with whole batches."""

from __future__ import annotations

import random

import pytest
import torch
from tests.conformance.catalogue import made_as
from tests.conformance.reference import differences
from tests.runtime.jobs import Plain
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.batches.batch import make_batch
from penstock.batches.batch_parts import BatchPart, is_missing
from penstock.errors import RanksDiffer, RunError, SettingError
from penstock.ranks.processes.launch import launch

#: Schedules of two ranks; `copies` runs every stage on both, `replicas` one stage.
NAMES = ("1f1b", "interleaved", "chimera", "zb-h1", "replicas", "pipedream", "terapipe", "traced")
SAMPLES = 24

#: Features of a sample. A sample fills a cache line, so that parts of a batch lie at equal alignment
#: wherever they were read: the results of matrix products of MKL depend on it on some processors.
FEATURES = 16


class CountingReads:
    """A data set that records which samples were read."""

    def __init__(self, values):
        self.values, self.read = values, []

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        self.read.append(index)
        return self.values[index]


class Residual(nn.Module):
    """A model that must be traced; its second stage uses the inputs again."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 3)

    def forward(self, x):
        """Return the scores."""
        hidden = torch.tanh(self.first(x))
        return self.second(hidden + x)


def schedule_of(name, micro_batches):
    """A schedule of two ranks."""
    if name == "replicas":
        return ps.schedule("1f1b", 1, micro_batches, replicas=2)
    if name == "traced":
        return ps.schedule("1f1b", 2, micro_batches)
    return made_as(name, 4 if name == "interleaved" else 2, micro_batches)


def cases():
    """Some plans, drawn at random with a fixed seed."""
    rng = random.Random(5)
    rows = []
    for name in NAMES:
        micro_batches = 4 if name in ("chimera", "interleaved") else rng.choice([2, 3, 5])
        batch = rng.choice([4, 8, 9])
        rows.append((name, schedule_of(name, micro_batches), batch, rng.randrange(100)))
    return rows


def data(tokens):
    """Inputs and targets, some of which are ignored."""
    generator = torch.Generator().manual_seed(7)
    shape = (SAMPLES, 8) if tokens else (SAMPLES,)
    inputs = torch.randn(*shape, FEATURES, generator=generator)
    targets = torch.randint(0, 3, shape, generator=generator)
    targets[::5] = -100
    return inputs, targets


def token_loss(output, target):
    """Cross-entropy of samples or of tokens, without those that are ignored."""
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def train(name, schedule, batch, seed, executor, whole):
    """Losses, weights and, per process, the samples that were read."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(FEATURES, 5),
        nn.Tanh(),
        nn.Linear(5, 5),
        nn.Tanh(),
        nn.Linear(5, 4),
        nn.Linear(4, 3),
    )
    if name == "traced":
        model = Residual()
    stages = schedule.stages
    lengths = [6 // stages + (stage < 6 % stages) for stage in range(stages)]
    options = {"balance": lengths}
    if name == "traced":
        options = {"balance": [1, 1], "example": torch.zeros(2, FEATURES)}
    pipe = ps.Pipeline(
        model,
        loss=token_loss,
        optimizer=Plain,
        schedule=schedule,
        executor=executor,
        **options,
        deadline_s=60,
    )
    inputs, targets = data(name == "terapipe")
    x, y = CountingReads(inputs), CountingReads(targets)
    losses = []
    for epoch in range(2):
        reader = pipe.reader(x, y, batch=batch, seed=seed, epoch=epoch)
        rows = reader
        if whole:
            rows = []
            for part_x, part_y in reader:
                rows.append((part_x.value, part_y.value))
        losses += list(pipe.train(rows))
    result = {"losses": torch.stack(losses), "state": pipe.state_dict(), "x": x.read, "y": y.read}
    result["needs"] = str(pipe.needs)
    result["evaluated"] = pipe.eval_batch(*next(iter(pipe.reader(x, y, batch=batch))))
    result["output"] = pipe.forward(next(iter(pipe.reader(x, y, batch=batch)))[0])
    pipe.close()
    return result


def job():
    """All cases, on one process of two."""
    return [train(*case, "processes", False) for case in cases()]


def test_reading_what_is_needed_equals_reading_everything():
    """Over 1F1B, interleaved, bidirectional, zero-bubble, replicated, asynchronous and sliced plans,
    with losses that count targets which other processes have: to the bit.
    """
    ranks = launch(job, 2, threads=1)
    for number, case in enumerate(cases()):
        name = case[0]
        expected = train(*case, "threads", True)
        for results in ranks:
            result = results[number]
            for key in ("losses", "evaluated", "output"):
                assert torch.equal(result[key], expected[key]), (name, key)
        assert differences(ranks[0][number]["state"], expected["state"]) == [], name
    # Beside one sample per reader for its shape, nothing that is not needed was read.
    first, last = ranks[0][0], ranks[1][0]
    assert len(first["x"]) == len(last["y"]) > 2 * SAMPLES
    assert len(first["y"]) == len(last["x"]) == 4


def test_a_process_reads_only_what_it_needs():
    """One sample where nothing is needed; of copies of the first stage, the micro-batches of each."""
    for name, expected in {
        "1f1b": ("all inputs, no targets", "no inputs, all targets"),
        "replicas": ("2 of 4 micro-batches' inputs, all targets",) * 2,
        "chimera": ("2 of 4 micro-batches' inputs, all targets",) * 2,
    }.items():
        schedule = schedule_of(name, 4)
        assert needs_words(schedule) == list(expected), name


def needs_words(schedule):
    """What each rank of a schedule needs, in words."""
    from types import SimpleNamespace

    from penstock.runtime.batch_needs import needs_of

    words = []
    for rank, stages in enumerate(schedule.stages_of_rank):
        layers = {index: SimpleNamespace(runner=SimpleNamespace(entry=None)) for index in stages}
        assembly = SimpleNamespace(
            setting=SimpleNamespace(schedule=schedule, lengths=(1,) * schedule.stages),
            traced=SimpleNamespace(variants=None),
            interpreters={rank: SimpleNamespace(stages=layers)},
        )
        words.append(str(needs_of(assembly)))
    return words


def part(positions, samples=8):
    """Inputs of some samples."""
    return BatchPart(
        torch.ones(max(len(positions), 1), 4)[: len(positions) or 1], positions, samples
    )


def test_missing_samples_are_on_the_meta_device():
    """Micro-batches that are complete have values; all others, and the batch, have shapes."""
    y = BatchPart(torch.zeros(1, dtype=torch.int64), [], 8)
    batch = make_batch(part([2, 3, 4]), y, 4, step=0, training=True)
    assert [is_missing(value) for value in batch.inputs] == [True, False, True, True]
    assert [tuple(value.shape) for value in batch.inputs] == [(2, 4)] * 4
    whole = make_batch(torch.ones(8, 4), torch.zeros(8).long(), 4, step=0, training=True)
    assert batch.signature == whole.signature


@pytest.mark.parametrize(
    ("positions", "rows", "message"),
    [([1, 0], 2, "ascend"), ([7, 8], 2, "at most 7"), ([0, 1], 3, "one row for each position")],
)
def test_a_part_has_one_row_per_position(positions, rows, message):
    """Rows in another order would be trained with other targets."""
    with pytest.raises(SettingError, match=message):
        BatchPart(torch.ones(rows, 4), positions, 8)


def test_a_reader_of_pairs_reads_each_sample_once():
    """Inputs and targets come with one access."""
    pipe = ps.Pipeline(
        nn.Sequential(nn.Linear(4, 2)),
        loss=functional.mse_loss,
        balance=[1],
        micro_batches=2,
        executor="threads",
    )
    x, y = torch.randn(6, 4), torch.randn(6, 2)
    pairs = CountingReads(list(zip(x, y, strict=True)))
    for part_x, part_y in pipe.reader(pairs, batch=4, seed=None):
        assert part_x.is_whole
        assert torch.equal(part_y.value, y[: len(part_y)] if len(part_y) == 4 else y[4:])
    assert pairs.read == [0, 1, 2, 3, 4, 5]
    with pytest.raises(SettingError, match="are pairs"):
        next(iter(pipe.reader(x, batch=4)))
    with pytest.raises(SettingError, match="6 inputs and 5 targets"):
        pipe.reader(x, y[:5], batch=4)
    pipe.close()


def wrong_batch(kind):
    """What a rank says to a batch that is not what it needs, or not the other rank's."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    pipe = ps.Pipeline(
        model,
        loss=functional.cross_entropy,
        balance=[1, 1],
        micro_batches=4,
        executor="processes",
        deadline_s=60,
    )
    x, y = torch.ones(8, 4), torch.zeros(8, dtype=torch.int64)
    try:
        if kind == "missing":
            pipe.train_batch(part([0, 1, 2, 3]), y)
        elif kind == "order":
            list(pipe.train(pipe.reader(x, y, batch=4, seed=pipe.rank)))
        else:
            pipe.compare_with_one_device(*next(iter(pipe.reader(x, y, batch=8))))
    except (SettingError, RunError) as error:
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("kind", ["missing", "order"])
def test_a_rank_without_what_it_needs_is_refused_on_all_ranks(kind):
    """By name, before anything is computed."""
    results = launch(wrong_batch, 2, kind, threads=1)
    for rank, (name, message) in enumerate(results):
        if kind == "missing":
            assert "rank 0 needs the inputs of micro-batches 2, 3" in message
            assert (name == "SettingError") == (rank == 0)
        else:
            assert name == RanksDiffer.__name__
            assert "samples in order" in message


def test_a_comparison_needs_the_whole_batch_on_rank_0():
    """It runs the whole model there."""
    message = launch(wrong_batch, 2, "comparison", threads=1)[0][1]
    assert "compare_with_one_device runs the whole model on rank 0" in message
