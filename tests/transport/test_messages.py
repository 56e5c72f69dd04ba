"""Tags of messages between hosts."""

from __future__ import annotations

import itertools

import pytest
import torch

from penstock.errors import RunError
from penstock.schedule.lower import Message
from penstock.schedule.op import Kind
from penstock.transport.messages import checked_tensors, message_tag
from penstock.transport.payload import Payload

KINDS = (Kind.F, Kind.B, Kind.E, Kind.L, Kind.U)
#: Both ends of every range, and the powers of two at which one field would reach into the next.
STAGES = (0, 1, 2, 511, 512, 1022, 1023)
MICRO_BATCHES = (0, 1, 2, 4095, 4096, 8190, 8191)
TENSORS = (0, 1, 2, 15, 16, 30, 31)


def test_no_two_tensors_share_a_tag():
    """gloo matches messages of a link by their tag alone."""
    names = list(itertools.product(KINDS, STAGES, MICRO_BATCHES, TENSORS))
    tags = {message_tag(Message(*name[:3]), name[3]) for name in names}
    assert len(tags) == len(names)
    assert min(tags) >= 0
    assert max(tags) < 2**31


def test_micro_batches_wrap_where_none_is_in_flight_any_more():
    """A stream goes on for ever, and a tag has 31 bits."""
    first, later = (message_tag(Message(Kind.F, 3, number), 0) for number in (5, 5 + 8192))
    assert first == later


@pytest.mark.parametrize(("stage", "tensors"), [(1024, 1), (0, 33)])
def test_what_fits_no_tag_is_refused(stage, tensors):
    """Another message would be taken for it."""
    payload = Payload.of([torch.zeros(1) for _ in range(tensors)])
    with pytest.raises(RunError, match=rf"stage {stage} sends {tensors} tensors"):
        checked_tensors(payload, Message(Kind.F, stage, 0))
