"""Messages between hosts: tags, names of headers, and forms."""

from __future__ import annotations

import itertools

import pytest
import torch

from penstock.errors import RunError
from penstock.schedule.lower import Link, Message
from penstock.schedule.op import Kind
from penstock.transport.distributed import LOSS_TAG
from penstock.transport.messages import (
    checked_tensors,
    describe,
    differ_in_strides_only,
    form_text,
    header_key,
    header_name,
    message_tag,
)
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
    assert max(tags) < 2**31 - 1, "the largest tag closes a group"


def test_micro_batches_wrap_where_none_is_in_flight_any_more():
    """A stream goes on for ever, and a tag has 31 bits."""
    first, later = (message_tag(Message(Kind.F, 3, number), 0) for number in (5, 5 + 8192))
    assert first == later
    assert 0 <= message_tag(Message(Kind.B, 1023, 10**12), 31) < 2**31 - 1


@pytest.mark.parametrize(("stage", "tensors"), [(1024, 1), (0, 33)])
def test_what_fits_no_tag_is_refused(stage, tensors):
    """Another message would be taken for it."""
    payload = Payload.of(["constant", *(torch.zeros(1) for _ in range(tensors))])
    with pytest.raises(RunError, match=rf"stage {stage} sends {tensors} tensors"):
        checked_tensors(payload, Message(Kind.F, stage, 0))


@pytest.mark.parametrize(("stage", "tensors"), [(1023, 1), (0, 32), (1023, 0)])
def test_what_just_fits_a_tag_passes(stage, tensors):
    """In order, and without the constants."""
    values = [torch.zeros(1) for _ in range(tensors)]
    payload = Payload.of([*values, "constant"])
    assert checked_tensors(payload, Message(Kind.F, stage, 0)) == values


def test_the_name_of_a_header_has_all_that_its_form_depends_on():
    """Of two links, kinds, stages or signatures neither reads the header of the other."""
    keys = [
        header_key(signature, Link(*link), Message(kind, stage, 7))
        for signature in ("a", "b")
        for link in ((0, 1), (1, 0), (0, 11))
        for kind in KINDS
        for stage in (1, 2)
    ]
    assert len(set(map(header_name, keys))) == len(keys)
    assert header_key("a", Link(0, 1), Message(Kind.F, 1, 7)) == header_key(
        "a", Link(0, 1), Message(Kind.F, 1, 8)
    )
    assert header_name(keys[0]) == "penstock/header/a/0-1/1F"
    assert describe(Message(Kind.B, 12, 3)) == "12B3"


ROWS = torch.zeros(2, 3)
COLUMNS = torch.zeros(3, 2).t()


@pytest.mark.parametrize(
    ("announced", "later", "only_strides"),
    [
        (ROWS, COLUMNS, True),
        (COLUMNS, ROWS, True),
        ([ROWS, COLUMNS], [COLUMNS, ROWS], True),
        (torch.zeros(1, 3).expand(2, 3), ROWS, False),
        ([ROWS, torch.zeros(1, 3).expand(2, 3)], [COLUMNS, ROWS], False),
        (ROWS, torch.zeros(1, 3).expand(2, 3), True),
        (ROWS, torch.zeros(3, 2), False),
        (ROWS, ROWS.double(), False),
        (ROWS, torch.zeros(2, 3, requires_grad=True), False),
        (ROWS, [ROWS], False),
        ([ROWS, 1], [COLUMNS, 1], True),
        ([ROWS, 1], [COLUMNS, 2], False),
    ],
)
def test_a_message_of_other_strides_may_use_the_announced_form(announced, later, only_strides):
    """Unless elements of the announced one were sent once for several."""
    first, second = Payload.of(announced), Payload.of(later)
    assert differ_in_strides_only(first.form(), second.form(), first.forms()) is only_strides


def test_tensors_that_share_memory_differ_in_no_more_than_strides():
    """They are sent one by one."""
    base = torch.zeros(2, 3)
    first, second = Payload.of([base, base[:1]]), Payload.of([base, torch.zeros(1, 3)])
    assert first.shared
    assert differ_in_strides_only(first.form(), second.form(), first.forms())


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        (Payload.of(torch.zeros(2, 3)), "a tensor of float32[2, 3]"),
        (
            Payload.of(torch.zeros(2, requires_grad=True)),
            "a tensor of float32[2] with a gradient",
        ),
        (
            Payload.row([torch.zeros(2, dtype=torch.int64), torch.zeros(())]),
            "* of int64[2], float32[]",
        ),
        (
            Payload("*", (torch.zeros(1), torch.zeros(2)), (False, True)),
            "* of float32[1], float32[2] with a gradient",
        ),
        (Payload("*", (), ()), "* of nothing"),
    ],
)
def test_a_form_reads_as_text(payload, text):
    """It stands in the message on a form that changes."""
    assert form_text(payload.form()) == text


def test_a_form_with_constants_names_them_and_the_nesting():
    """Flags of gradients belong to tensors alone."""
    text = form_text(Payload.of((1.5, torch.zeros(2, requires_grad=True))).form())
    assert text.endswith(" of 1.5, float32[2] with a gradient")
    assert not text.startswith("a tensor")


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_of_an_expanded_tensor_only_distinct_elements_are_sent_whichever_dimension_it_is(dim):
    """Another tensor of that shape has more, so that the announced form does not fit it."""
    shape = [2, 3, 4]
    first = Payload.of(torch.ones([1 if n == dim else shape[n] for n in range(3)]).expand(shape))
    second = Payload.of(torch.ones(shape))
    assert not differ_in_strides_only(first.form(), second.form(), first.forms())
    assert differ_in_strides_only(second.form(), first.form(), second.forms())


def test_losses_and_times_of_clocks_have_tags_that_no_message_has():
    """gloo matches messages by them."""
    names = itertools.product(KINDS, (*STAGES, 3, 7), (*range(70), *MICRO_BATCHES), range(32))
    tags = {message_tag(Message(*name[:3]), name[3]) for name in names}
    assert not tags & {LOSS_TAG, LOSS_TAG + 1}
    assert LOSS_TAG % 32 == 0
