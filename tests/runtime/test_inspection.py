"""Facts about a pipeline, from the parts that have them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from penstock.batches.sample_order import sample_order
from penstock.errors import RunError, SettingError
from penstock.event import Timeline
from penstock.runtime import inspection
from penstock.runtime.inspection import Inspection
from penstock.runtime.player import Mode


def pipe_of(*, stages=(), local_ranks=(0,), lengths=(1, 1, 1), played=None, stream=None):
    """Return a pipeline with stand-ins for its parts."""
    pipe = Inspection()
    pipe.setting = SimpleNamespace(
        lengths=lengths,
        schedule=SimpleNamespace(first_micro_batches=lambda n: SimpleNamespace(slicing=f"{n} cut")),
    )
    pipe.calls = []
    pipe._world = SimpleNamespace(
        local_ranks=local_ranks, calls=SimpleNamespace(enter=pipe.calls.append)
    )
    pipe._settings_exchange = None
    pipe._assembly = SimpleNamespace(
        stages=[SimpleNamespace(index=index) for index in stages], interpreters="interpreters"
    )
    pipe._player = SimpleNamespace(played=played, rows=lambda: {0: ["played"], 1: []})
    pipe._stream, pipe._copies = stream, None
    return pipe


@pytest.mark.parametrize(
    ("local_ranks", "stages", "facts"),
    [
        ((0, 1, 2), (0, 1, 2), (0, True, True, True)),
        ((0,), (0,), (0, True, True, False)),
        ((2,), (2,), (2, False, False, True)),
        ((1,), (1,), (1, False, False, False)),
        # A rank in a V has the first and the last stage; another may have rank 0 and none of them.
        ((1,), (2, 0), (1, False, True, True)),
        ((0,), (1,), (0, True, False, False)),
    ],
)
def test_a_process_knows_its_rank_and_its_ends_of_the_model(local_ranks, stages, facts):
    """Who prints, who reads inputs, and who has the loss: three questions."""
    pipe = pipe_of(local_ranks=local_ranks, stages=stages)
    assert (pipe.rank, pipe.is_main, pipe.is_first, pipe.is_last) == facts


def test_weights_have_one_version_without_a_stream():
    """For each stage."""
    assert pipe_of(lengths=(2, 1)).weight_versions == (1, 1)
    weights = SimpleNamespace(peak_versions=lambda: (3, 1))
    assert pipe_of(stream=SimpleNamespace(weights=weights)).weight_versions == (3, 1)


@pytest.fixture
def measured(monkeypatch):
    """What timelines are measured of."""
    calls = []

    def measure(world, schedule, interpreters, rows, weights):
        assert world.local_ranks == (0,)
        assert schedule.first_micro_batches(1).slicing == "1 cut"
        assert interpreters == "interpreters"
        calls.append((rows, weights))
        return Timeline.of([], 1, 1, (0,))

    monkeypatch.setattr(inspection, "measured_timeline", measure)
    return calls


def test_a_timeline_is_that_of_the_last_batch_or_of_the_window_of_a_stream(measured):
    """An evaluation in a stream is a batch of its own; names of hosts are those of the ranks."""
    weights = SimpleNamespace(by_rank="rules")
    stream = SimpleNamespace(weights=weights, window=lambda: {0: ["window"]})
    pipe = pipe_of(played=(3, Mode.TRAIN))
    timeline = pipe.timeline()
    assert (timeline.slicing, timeline.hosts) == ("3 cut", ())
    pipe = pipe_of(played=(2, Mode.EVALUATE), stream=stream)
    pipe._settings_exchange = SimpleNamespace(hosts=["a", "b"])
    timeline = pipe.timeline()
    assert (timeline.slicing, timeline.hosts) == ("2 cut", ("a", "b"))
    timeline = pipe_of(stream=stream).timeline()
    assert timeline.slicing is None
    played = {0: ["played"], 1: []}
    assert measured == [(played, {}), (played, "rules"), ({0: ["window"]}, "rules")]
    assert pipe.calls == ["timeline"]


def test_without_a_batch_there_is_no_timeline(measured):
    """Also in a stream that has not completed one."""
    stream = SimpleNamespace(window=lambda: {0: [], 1: []})
    empty = pipe_of()
    empty._player.rows = dict
    for pipe in (empty, pipe_of(stream=stream)):
        with pytest.raises(RunError, match="train a batch first"):
            pipe.timeline()
    assert not measured


def test_parameters_are_those_of_the_local_stages_each_once():
    """One that several stages use is that of its home."""
    tied, first, second, third = (nn.Parameter(torch.ones(1)) for _ in range(4))
    rows = [
        ([tied, first], []),
        ([second, tied, third], [tied, third]),
    ]
    pipe = pipe_of()
    pipe._assembly.stages = [
        SimpleNamespace(parameters=parameters, update=SimpleNamespace(borrowed=borrowed))
        for parameters, borrowed in rows
    ]
    names = {tied: "tied", first: "first", second: "second", third: "third"}
    pipe._assembly.names = lambda stage: {p: names[p] for p in stage.parameters}
    assert [name for name, _ in pipe.named_parameters()] == ["tied", "first", "second"]
    expected = [tied, first, second]
    assert all(p is e for p, e in zip(pipe.parameters(), expected, strict=True))


def test_a_reader_has_an_order_by_seed_and_epoch(monkeypatch):
    """Or the samples' own."""
    readers = []
    monkeypatch.setattr(inspection, "needs_of", lambda assembly: "needs")
    monkeypatch.setattr(
        inspection, "BatchReader", lambda *args, **options: readers.append((args, options))
    )
    pipe = pipe_of()
    pipe.reader("x", "y", batch=3)
    pipe.reader("x", batch=3, seed=5, epoch=2, drop_last=True)
    pipe.reader("x", batch=3, seed=None, epoch=2)
    assert [(args[:4], options) for args, options in readers] == [
        (("needs", "x", "y", 3), {"drop_last": False}),
        (("needs", "x", None, 3), {"drop_last": True}),
        (("needs", "x", None, 3), {"drop_last": False}),
    ]
    orders = [args[4](9).tolist() for args, _ in readers]
    assert orders == [
        sample_order(9, 0, 0).tolist(),
        sample_order(9, 5, 2).tolist(),
        list(range(9)),
    ]


def test_the_comparison_needs_one_copy_of_the_whole_model(monkeypatch):
    """It drains first, and keeps the outputs of its batch alone."""
    pipe = pipe_of()
    log = []
    batch = SimpleNamespace(keeps_outputs=False)
    pipe._drain = lambda: log.append("drain")
    pipe._batch = lambda x, y, training, call: log.append((x, y, training, call)) or batch
    pipe._training = "training"
    pipe._player.play = lambda *args: log.append(args)
    pipe._player.mean_loss = lambda batch: "loss"

    def compare(assembly, play, batch, training):
        return batch.keeps_outputs, play(), training

    monkeypatch.setattr(inspection, "compare", compare)
    result = pipe.compare_with_one_device(1, 2)
    assert result == (True, "loss", "training")
    assert log == ["drain", (1, 2, True, "compare_with_one_device"), (batch, Mode.COMPARE)]
    pipe._copies = object()
    with pytest.raises(SettingError, match="this pipeline has a mesh"):
        pipe.compare_with_one_device(1, 2)
