"""N8: tensors that were sent are not changed before they have left, and what arrives is a copy.

The transport here delivers as late as a device may: the receiver gets a copy that is made when it
waits, of tensors that must still be what they were when they were sent.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import pytest
import torch
from tests.conformance.catalogue import EVERY, REPLICATED
from tests.conformance.models import CASES, lengths_of, made
from tests.conformance.reference import layers_of

import penstock as ps
from penstock.ranks import thread_world as threads
from penstock.transport.in_process import MemoryTransport
from penstock.transport.payload import Payload

RECOMPUTE = ["never", "except_last", "always"]


def sizes_that_send():
    """Every schedule in its smallest and its largest size, and with copies of stages: messages of
    sizes in between are the same.
    """
    sizes = defaultdict(list)
    for key, schedule in EVERY.items():
        if schedule.ranks > 1:  # one rank sends nothing
            sizes[schedule.name, key in REPLICATED].append((key, schedule))
    for (_, has_copies), keys in sizes.items():
        yield from keys if has_copies or len(keys) < 2 else (keys[0], keys[-1])


def grid():
    """The schedules, with models and ways to recompute by turns, which meet each other."""
    for number, (key, schedule) in enumerate(sizes_that_send()):
        name = list(CASES)[number % len(CASES)]
        recompute = RECOMPUTE[(number + number // len(CASES)) % len(RECOMPUTE)]
        yield pytest.param(schedule, name, recompute, id=f"{key}-{name}-{recompute}")


class Sent:
    """A payload on its way, with what its tensors were when it was sent."""

    def __init__(self, payload):
        self.payload, self.nbytes = payload, payload.nbytes
        self.versions = [tensor._version for tensor in payload.tensors]
        self.contents = [tensor.detach().clone() for tensor in payload.tensors]

    def deliver(self, message):
        """A copy for the receiver."""
        tensors = self.payload.tensors
        assert [tensor._version for tensor in tensors] == self.versions, (
            f"{message} was changed in place before it had left"
        )
        assert all(map(torch.equal, tensors, self.contents)), f"{message} was overwritten"
        return self.payload.with_tensors([tensor.detach().clone() for tensor in tensors])


@dataclass(frozen=True)
class LateArrival:
    """A posted receive whose message is copied when it is waited for."""

    arrival: object
    message: object

    def wait(self):
        """See `Arrival.wait`."""
        return self.arrival.wait().deliver(self.message)


@dataclass(frozen=True)
class LateTransport(MemoryTransport):
    """Copies at the last moment instead of handing tensors over."""

    shares: bool = False

    def send(self, peer, message, payload, signature):
        """See `Transport.send`."""
        super().send(peer, message, Sent(payload), signature)
        return payload.nbytes

    def post(self, peer, message, signature):
        """See `Transport.post`."""
        return LateArrival(super().post(peer, message, signature), message)


def train(schedule, name, recompute, **options):
    """Losses of two steps, and the parameters afterwards: the second step reads what the update of
    the first has changed.
    """
    case = CASES[name]
    model, x, y = made(case)
    pipe = ps.Pipeline(
        model,
        loss=case.loss,
        balance=lengths_of(len(layers_of(model)), schedule.stages),
        schedule=schedule,
        recompute=recompute,
        executor="threads",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        **options,
    )
    losses = [float(pipe.train_batch(x, y)) for _ in range(2)]
    return losses, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(("schedule", "name", "recompute"), [*grid()])
def test_n8_what_was_sent_stays_as_it_was_until_it_is_delivered(
    schedule, name, recompute, monkeypatch
):
    """A device reads a tensor that was sent at any time until the receiver has it: optimizer steps,
    gradient synchronisation and clipping come after sends.
    """
    options = {"clip_grad_norm": 0.5}
    expected_losses, expected = train(schedule, name, recompute, **options)
    monkeypatch.setattr(threads, "MemoryTransport", LateTransport)
    losses, parameters = train(schedule, name, recompute, **options)
    assert losses == expected_losses
    assert all(map(torch.equal, parameters, expected))


def test_a_change_before_delivery_is_noticed():
    """The stand-in itself."""
    tensor = torch.zeros(2)
    sent = Sent(Payload.of(tensor))
    tensor.add_(1)
    with pytest.raises(AssertionError, match="was changed in place before it had left"):
        sent.deliver("F0 from rank 0")
