"""Streams of a `Pipeline`: timeline, versions, failures, evaluation and checkpoints in between."""

from __future__ import annotations

import math

import pytest
import torch
from tests.runtime.failing import Trap
from tests.runtime.streams import batches, pipeline

import penstock as ps
from penstock.errors import RunError, StageFailed
from penstock.schedule.op import Kind


def test_the_timeline_has_the_last_completed_batches_numbered_from_0():
    """So it can be compared with the simulated one, at any point of the stream."""
    pipe = pipeline()
    for count in (2, 40):
        for _ in pipe.train(batches(count)):
            pass
        timeline = pipe.timeline()
        expected = ps.schedule("pipedream", 3, 1, batches=min(count, 7))
        events = {
            rank: tuple(event.op for event in timeline.compute if event.rank == rank)
            for rank in range(3)
        }
        assert tuple(events.values()) == expected.programs
        assert timeline.peak_in_flight == ps.simulate(expected, ps.Costs()).peak_in_flight


def test_the_timeline_leaves_out_micro_batches_that_a_small_batch_does_not_have():
    """The last batch of an epoch may have fewer samples than micro-batches."""
    pipe = pipeline(micro_batches=4)
    for _ in pipe.train([*batches(3), *batches(1, samples=2)]):
        pass
    assert (
        sum(event.op.kind is Kind.F for event in pipe.timeline().compute if event.rank == 0)
        == 3 * 4 + 2
    )


@pytest.mark.parametrize(
    ("weights", "versions"),
    [("stash", (3, 2, 1)), ("none", (1, 1, 1)), ("vertical-sync", (3, 3, 3))],
)
def test_versions_are_counted_and_their_bytes_are_in_the_peak_memory(weights, versions):
    """The paper's cost of asynchrony: S - s versions on stage s, or p, or one."""
    pipe = pipeline(weights=weights)
    for _ in pipe.train(batches(12)):
        pass
    assert pipe.weight_versions == versions
    flush = pipeline("1f1b")
    flush.train_batch(*batches(1)[0])
    first = flush.timeline().peak_memory
    flush.train_batch(
        *batches(1)[0]
    )  # the very first graph copies its input, to see whether layers change it; so does a stream's
    stage_bytes = [4 * (8 * 8 + 8), 4 * (8 * 8 + 8), 4 * (8 * 8 + 8 + 8 * 4 + 4)]
    expected = [(count - 1) * size for count, size in zip(versions, stage_bytes, strict=True)]
    version_bytes = [(count - 1) * _saved(flush, stage) for stage, count in enumerate((3, 2, 1))]
    more = [a - b for a, b in zip(pipe.timeline().peak_memory, first, strict=True)]
    assert more == [a + b for a, b in zip(expected, version_bytes, strict=True)]


def _saved(pipe, stage):
    """Return the bytes of activations that one micro-batch holds on a stage."""
    return pipe._assembly.interpreters[stage].activation_meter.peak


def test_an_op_that_fails_in_mid_stream_is_named_and_ends_the_stream():
    """Some stages have had updates that others have not: the weights are of no single version."""
    pipe = pipeline(trap=Trap("raise", "B", at=4))
    with pytest.raises(StageFailed, match=r"rank 1.*1B4.*a planted failure"):
        list(pipe.train(batches(9)))
    with pytest.raises(RunError, match="cannot go on after a batch that failed"):
        pipe.train_batch(*batches(1)[0])
    with pytest.raises(RunError, match="cannot go on after a batch that failed"):
        pipe.flush()


def test_loading_a_checkpoint_restarts_a_failed_stream(tmp_path):
    """Loading replaces the inconsistent weights."""
    trap = Trap("raise", "F", at=8)
    pipe = pipeline(trap=trap)
    for step, _ in enumerate(pipe.train(batches(4))):
        if step == 3:
            pipe.save(tmp_path)
    with pytest.raises(StageFailed):
        list(pipe.train(batches(9)))
    pipe.load(tmp_path)
    trap.armed = False
    fresh = pipeline(trap=Trap("never"))
    fresh.load(tmp_path)
    assert pipe.step == fresh.step == 4
    assert [float(loss) for loss in pipe.train(batches(5))] == [
        float(loss) for loss in fresh.train(batches(5))
    ]


def test_evaluating_in_mid_stream_leaves_updates_on():
    """Evaluation drains the stream, which then fills again and continues to update."""
    pipe, plain = pipeline(), pipeline()
    for step, _ in enumerate(pipe.train(batches(12))):
        if step == 4:
            pipe.eval_batch(*batches(1)[0])
            pipe.forward(batches(1)[0][0])
    for count in (7, 5):  # where the first had drained
        list(plain.train(batches(12)[:7] if count == 7 else batches(12)[7:]))
    assert all(
        torch.equal(value, plain.state_dict()[name]) for name, value in pipe.state_dict().items()
    )


@pytest.mark.parametrize(
    ("name", "options"),
    [("pipedream", {}), ("avgpipe", {}), ("hetpipe", {}), ("2bw", {"micro_batches": 4})],
)
def test_outside_the_stream_the_model_is_the_one_that_a_checkpoint_has(name, options, tmp_path):
    """Whatever copies and versions a rule uses; with AvgPipe it is the reference model, which no
    batch reads.
    """
    pipe = pipeline(name, **options)
    list(pipe.train(batches(7)))
    x, y = batches(1)[0]
    assert pipe.compare_with_one_device(x, y).worst[1] < 1e-6
    pipe.save(tmp_path)
    alone = pipeline("gpipe", balance=(6,))
    alone.load(tmp_path)
    torch.testing.assert_close(alone.eval_batch(x, y), pipe.eval_batch(x, y))


@pytest.mark.parametrize("replicas", [2, (2, 1, 1)])
def test_synchronised_replicas_stream_and_are_saved_once(replicas, tmp_path):
    """PipeDream's stages on several ranks: gradients are summed at every U.

    Two pipelines of one micro-batch each compute what one pipeline computes whose micro-batch is
    the whole batch.
    """
    pipe, alike = (
        pipeline(ps.schedule("pipedream", 3, 2, replicas=replicas), micro_batches=None),
        pipeline(),
    )
    losses = [float(loss) for loss in pipe.train(batches(6))]
    expected = [float(loss) for loss in alike.train(batches(6))]
    assert len(losses) == 6
    if replicas == 2:
        assert losses == pytest.approx(expected, rel=1e-5)
    pipe.save(tmp_path)
    alone = pipeline("gpipe", balance=(6,))
    alone.load(tmp_path)
    assert all(
        torch.equal(value, pipe.state_dict()[name]) for name, value in alone.state_dict().items()
    )


def test_a_stream_without_an_optimizer_accumulates_gradients():
    """As a synchronous schedule does: the user updates the weights."""
    pipe = pipeline(optimizer=None)
    count = len(list(pipe.train(batches(3))))
    grads = {name: parameter.grad for name, parameter in pipe.chain.modules[0].named_parameters()}
    assert count == 3
    assert all(grad is not None and math.isfinite(float(grad.sum())) for grad in grads.values())


def test_a_stage_without_weights_streams_too():
    """It may have only an activation function, or frozen layers."""
    pipe = pipeline(balance=(1, 1, 4), trap=None)
    assert len(list(pipe.train(batches(5)))) == 5
    assert pipe.weight_versions[1] == 1


def test_gradients_are_dropped_when_all_batches_in_flight_are_done():
    """A loop written for one device calls `zero_grad` after every batch. In mid-stream that would
    drop a part of the gradients of later batches.
    """
    results = []
    for call in ("zero_grad", "flush"):
        pipe = pipeline()
        losses = []
        for loss in pipe.train(batches(8)):
            losses.append(float(loss))
            if len(losses) == 3:
                getattr(pipe, call)()
        results.append((losses, pipe.state_dict()))
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_accumulated_gradients_of_a_stream_without_an_optimizer_are_dropped():
    """The caller updates the weights between the batches."""
    pipe = pipeline(optimizer=None)
    list(pipe.train(batches(3)))
    assert all(parameter.grad is not None for parameter in pipe.parameters())
    pipe.zero_grad()
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_every_batch_of_a_stream_of_one_stage_has_its_loss():
    """Such a stream completes a batch when it is fed, also the first one after a flush."""
    pipe, plain = pipeline(balance=(6,)), pipeline("gpipe", balance=(6,))
    for count in (3, 2, 1):
        losses = list(pipe.train(batches(count)))
        expected = [plain.train_batch(*batch) for batch in batches(count)]
        torch.testing.assert_close(losses, expected)
