"""Replicas in processes train to the same bits as replicas in threads, by whichever way sums go."""

from __future__ import annotations

import os

import pytest
import torch
from tests.stage.gradients.jobs import SCHEDULES, batch, model, sgd, trained
from torch.nn import functional

import penstock as ps
from penstock.runtime.interpreter import Interpreter
from penstock.stage.gradients import bucket_sum
from penstock.stage.gradients.bucket_sum import BucketSum
from penstock.transport.same_host import SameHostTransport

pytestmark = pytest.mark.usefixtures("functions_by_value")


def over_network(far: tuple[int, ...], schedule: str, options: dict[str, object]) -> object:
    """Train in a process; ranks in `far` are reached over the network alone."""
    rank = int(os.environ["RANK"])
    connect = SameHostTransport.connect
    SameHostTransport.connect = lambda self, store, size, *, willing: connect(
        self, store, size, willing=rank not in far
    )
    return trained(schedule, options, None)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shared_memory_sums_to_the_bits_of_threads(schedule):
    """With a parameter that is frozen and thawed, and gradients of two batches per step."""
    ranks = ps.Schedule.parse(SCHEDULES[schedule]).ranks
    reference = trained(schedule, {}, "threads")
    for result in ps.launch(over_network, ranks, (), schedule, {}, threads=1):
        assert result["losses"] == reference["losses"]
        for name, value in reference["weights"].items():
            assert torch.equal(result["weights"][name], value), name


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_buckets_between_hosts_sum_to_the_bits_of_threads(schedule):
    """Sent while the last backward runs, in the order of the ranks."""
    ranks = ps.Schedule.parse(SCHEDULES[schedule]).ranks
    reference = trained(schedule, {}, "threads")
    for result in ps.launch(over_network, ranks, (1,), schedule, {}, threads=1):
        assert result["losses"] == reference["losses"]
        for name, value in reference["weights"].items():
            assert torch.equal(result["weights"][name], value), name


@pytest.mark.parametrize(("hook", "tolerance"), [("fp16", 2e-3), ("bf16", 2e-2), ("powersgd", 0.3)])
def test_hooks_train_every_replica_alike_and_near_exact_sums(hook, tolerance):
    """All ranks end with the same bits, which differ from those of exact sums."""
    exact = trained("three", {}, "threads")["weights"]
    results = ps.launch(over_network, 3, (1,), "three", {"gradient_hook": hook}, threads=1)
    weights = [result["weights"] for result in results]
    differences = []
    for name, value in exact.items():
        assert torch.equal(weights[0][name], weights[1][name])
        assert torch.equal(weights[0][name], weights[2][name])
        differences.append(float((weights[0][name] - value).abs().max()))
    assert 0 < max(differences) < tolerance


@pytest.mark.parametrize("hook", ["fp16", "powersgd"])
def test_a_hook_without_effect_warns(hook):
    """Threads sum exactly; who sets a hook learns that it does nothing."""
    with pytest.warns(UserWarning, match=f"gradient_hook='{hook}' has no effect here"):
        result = trained("two", {"gradient_hook": hook}, "threads")
    exact = trained("two", {}, "threads")
    assert result["losses"] == exact["losses"]


def events_of_training(far: tuple[int, ...]) -> list[str]:
    """Return the order of ops and sent buckets of this rank, with small buckets."""
    events: list[str] = []
    start_op, end_op, send = Interpreter._start_op, Interpreter._end_op, BucketSum._send

    def record_start(self, step):
        events.append(f"start {step.text}")
        start_op(self, step)

    def record_end(self, op):
        end_op(self, op)
        events.append(f"end {op}")

    def record_send(self, bucket):
        events.append("send")
        send(self, bucket)

    bucket_sum.BUCKET_BYTES = 1
    Interpreter._start_op, Interpreter._end_op = record_start, record_end
    BucketSum._send = record_send
    over_network(far, "two", {})
    return events


def test_buckets_leave_before_the_last_backward_ends():
    """All but that of the parameters whose gradients come last, and none before that backward."""
    for rank, events in enumerate(ps.launch(events_of_training, 2, (1,), threads=1)):
        last = f"0B{rank + 2}"
        ends = [index for index, event in enumerate(events) if event == f"end {last}"]
        assert ends, events
        # From one end of the last backward to the next there is one batch.
        begins = [-1, *ends[:-1]]
        in_backward = 0
        for begin, end in zip(begins, ends, strict=True):
            batch = events[begin + 1 : end]
            if "send" not in batch:
                continue  # a batch without an update, or with other batches' buckets only
            start = max(i for i, event in enumerate(batch) if event.startswith("start"))
            in_backward += batch[start:].count("send")
        assert in_backward > 0


def resumed(far: tuple[int, ...], folder: str) -> dict[str, object]:
    """Train with a low rank, save, go on; resume from the checkpoint and train the same batches."""
    rank = int(os.environ["RANK"])
    connect = SameHostTransport.connect
    SameHostTransport.connect = lambda self, store, size, *, willing: connect(
        self, store, size, willing=rank not in far
    )

    def pipeline():
        return ps.Pipeline(
            model(),
            loss=functional.mse_loss,
            optimizer=sgd,
            balance=[5],
            schedule=ps.Schedule.parse(SCHEDULES["two"]),
            gradient_hook="powersgd-1",
            deadline_s=60,
        )

    def losses(pipe, numbers):
        return [float(pipe.train_batch(*batch(number))) for number in numbers]

    pipe = pipeline()
    losses(pipe, range(3))
    pipe.save(folder)
    whole = losses(pipe, range(3, 6)), {n: v.clone() for n, v in pipe.model_state().items()}
    # State of other steps must not be left over in a pipeline that loads.
    pipe.load(folder)
    again = losses(pipe, range(3, 6)), {n: v.clone() for n, v in pipe.model_state().items()}
    pipe.close()
    new = pipeline()
    new.load(folder)
    fresh = losses(new, range(3, 6)), new.model_state()
    new.close()
    return {"whole": whole, "again": again, "fresh": fresh}


def test_powersgd_resumed_from_a_checkpoint_trains_as_the_run_that_goes_on(tmp_path):
    """To the bit, in the same pipeline and in a new one."""
    for result in ps.launch(resumed, 2, (1,), str(tmp_path / "checkpoint"), threads=1):
        losses, weights = result["whole"]
        for other_losses, other_weights in (result["again"], result["fresh"]):
            assert other_losses == losses
            for name, value in weights.items():
                assert torch.equal(other_weights[name], value), name
