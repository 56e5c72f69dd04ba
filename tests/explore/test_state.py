"""The state of the page, and the link that holds it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.explore.choices import choices
from penstock.explore.state import (
    MAX_MICRO_BATCHES,
    MAX_QUERY,
    MAX_RANKS,
    RECOMPUTE,
    BadState,
    Choice,
    State,
    parse_state,
)
from penstock.simulate.costs import LINKS

seconds = st.floats(0, 1e9, allow_nan=False, allow_subnormal=False)
whole_bytes = st.integers(0, 2**53).map(float)
VALUES = {
    "int": st.integers(-10, 10_000),
    "float": st.floats(-1e4, 1e4, allow_nan=False),
    "bool": st.booleans(),
    "ints": st.lists(st.integers(0, 99), min_size=1, max_size=8).map(tuple),
    "floats": st.lists(st.floats(0, 1), min_size=1, max_size=8).map(tuple),
}


def lists(elements):
    """One value or several."""
    return st.lists(elements, min_size=1, max_size=5).map(tuple)


@st.composite
def schedule_choices(draw):
    """Any schedule with any of its options."""
    entry = draw(st.sampled_from(sorted(choices())))
    options = []
    for field in choices()[entry].fields:
        if draw(st.booleans()):
            values = st.sampled_from(field.words) if field.kind == "str" else VALUES[field.kind]
            options.append((field.name, draw(values)))
    return Choice(entry, tuple(options))


def optional(values):
    """Also no value."""
    return st.none() | values


states = st.builds(
    State,
    ranks=st.integers(1, MAX_RANKS),
    micro_batches=st.integers(1, MAX_MICRO_BATCHES),
    a=schedule_choices(),
    b=optional(schedule_choices()),
    replicas=lists(st.integers(1, 16)),
    batches=st.integers(1, 32),
    forward=lists(seconds),
    backward=optional(lists(seconds)),
    input_grad=optional(lists(seconds)),
    weight_grad=optional(lists(seconds)),
    update=optional(lists(seconds)),
    activation_bytes=optional(lists(whole_bytes)),
    weight_bytes=optional(lists(whole_bytes)),
    boundary_bytes=optional(lists(whole_bytes)),
    bandwidth=optional(lists(st.integers(1, 2**53).map(float))),
    latency=optional(lists(seconds)),
    links=st.sampled_from(LINKS),
    overlap=st.booleans(),
    recompute=st.sampled_from(RECOMPUTE),
    memory_limit=optional(st.integers(1, 2**53)),
)


@settings(max_examples=150, deadline=None)
@given(states)
def test_a_link_holds_the_whole_state(state):
    """A shared address must show the same page, to the last digit."""
    assert parse_state(state.query) == state


def test_an_empty_link_is_the_default_page():
    """Fields that are empty or absent have their defaults, so links are short."""
    assert parse_state("") == State() == parse_state("forward=&b=&ranks=")
    assert State().query == "a=1f1b"


def test_an_alias_is_read_as_its_schedule():
    """Papers name them so."""
    assert parse_state("a=dapple").a.schedule == "1f1b"


@pytest.mark.parametrize(
    ("query", "field", "message"),
    [
        ("ranks=0", "ranks", "from 1 to 64"),
        ("ranks=65", "ranks", "from 1 to 64"),
        ("ranks=4.0", "ranks", "whole number"),
        ("ranks=٤", "ranks", "whole number"),
        ("ranks=" + "9" * 5000, "ranks", "whole number"),
        ("micro_batches=-1", "micro_batches", "whole number"),
        ("replicas=1,2,x", "replicas", "whole number"),
        ("forward=-1", "forward", "is not a quantity"),
        ("forward=nan", "forward", "is not a quantity"),
        ("forward=1e308", "forward", "too large"),
        ("forward=1,2,", "forward", "is not a quantity"),
        ("activation_bytes=1PB", "activation_bytes", "is not a quantity"),
        ("bandwidth=0", "bandwidth", "never delivers"),
        ("memory_limit=0", "memory_limit", "at least 1 byte"),
        ("links=wifi", "links", "one of duplex"),
        ("overlap=maybe", "overlap", "one of yes, no"),
        ("recompute=selective", "recompute", "one of never"),
        ("a=pipedreams", "a", "no schedule called"),
        ("a=1f1b&a.chunks=2", "a.chunks", "no option 'chunks'"),
        ("a=interleaved&a.chunks=two", "a.chunks", "a whole number"),
        ("a=interleaved&a.chunks=100000", "a.chunks", "a whole number"),
        ("a=gpipe&a.backward_order=up", "a.backward_order", "one of forward, reverse"),
        ("a=bpipe&a.ratio=inf", "a.ratio", "a number"),
        ("a=1f1b&a.warm_up=4,,1", "a.warm_up", "whole numbers"),
        ("b.chunks=2", "b", "name a schedule"),
        ("ranks=4&ranks=5", "ranks", "occurs twice"),
        ("__class__=1", "__class__", "no field of this page"),
        ("c.x=1", "c.x", "no field of this page"),
        ("forward=" + "1," * 20_000, "", "more than the"),
        ("&".join(f"x{i}=1" for i in range(200)), "", "cannot be read"),
    ],
)
def test_a_bad_field_is_named(query, field, message):
    """The page puts the message beside the field."""
    with pytest.raises(BadState) as refused:
        parse_state(query)
    assert message in refused.value.problems[field]
    assert all(len(text) < 1200 for text in refused.value.problems.values())


def test_good_fields_of_a_bad_link_are_kept():
    """One typing error does not cost the other twenty fields."""
    with pytest.raises(BadState, match="forward") as refused:
        parse_state("ranks=6&forward=x&b=gpipe")
    assert refused.value.state == State(ranks=6, b=Choice("gpipe"))
    assert refused.value.texts == {"forward": "x"}


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200) | st.from_regex(r"[a-z_.]{0,9}=[^&]{0,9}(&[ab]=[a-z0-9-]*)?"))
def test_any_text_is_a_state_or_refused(query):
    """A link is foreign input."""
    try:
        state = parse_state(query)
    except BadState as refused:
        state = refused.state
    assert parse_state(state.query) == state


def test_the_longest_state_fits_into_a_link():
    """64 ranks with numbers of five digits in every field."""
    values = tuple(0.012345 + i / 1000 for i in range(64))
    amounts = tuple(float(123_456_789 + i) for i in range(64))
    state = State(64, 64, forward=values, backward=values, input_grad=values, weight_grad=values)
    full = State(
        **{
            **vars(state),
            "update": values,
            "activation_bytes": amounts,
            "weight_bytes": amounts,
            "boundary_bytes": amounts[1:],
        }
    )
    assert len(full.query) < MAX_QUERY
    assert parse_state(full.query) == full
