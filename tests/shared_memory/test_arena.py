"""Slots in shared memory: what is reused, what is lent, what grows."""

from __future__ import annotations

import itertools
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared_memory.arena import Arena, OutOfSharedMemory, _size_class, split_place
from penstock.shared_memory.segment import LINE


@pytest.fixture
def arena():
    """An empty arena; closed when the test is over."""
    fresh_arena = Arena()
    yield fresh_arena
    fresh_arena.close()


def test_a_freed_slot_is_taken_again_and_the_last_freed_first(arena):
    """Its lines are the likeliest to be in the cache still."""
    pool = arena.pool(1000)
    slots = [arena.take(pool) for _ in range(4)]
    assert len({slot.place for slot in slots}) == 4
    for slot in (slots[1], slots[3]):
        slot.free()
    assert [arena.take(pool) for _ in range(2)] == [slots[3], slots[1]]


def test_a_place_names_the_segment_and_where_in_it(arena):
    """The receiver knows nothing else of it."""
    pool = arena.pool(300)
    for _ in range(200):
        slot = arena.take(pool)
        fd, offset = split_place(slot.place)
        assert fd == slot.segment.fd
        assert slot.start == offset + LINE == 8 * slot.state + LINE
        assert slot.start % LINE == 0
        assert slot.start + pool.nbytes <= len(slot.segment.memory)
    assert len({slot.place for slot in pool.in_use}) == 200
    assert len(arena.segments) > 1


def test_a_smaller_message_takes_a_larger_slot_that_is_free_up_to_four_times_its_size(arena):
    """Sequences of many lengths would else each keep memory; but one of a few bytes does not hold
    one of many.
    """
    large = arena.take(arena.pool(4096))
    large.free()
    assert arena.take(arena.pool(1024)) is large
    assert arena.take(arena.pool(4096)) is not large
    large.free()
    assert arena.take(arena.pool(1000)) is large  # 1000 bytes go where 1024 go
    large.free()
    assert arena.take(arena.pool(800)) is not large
    assert arena.take(arena.pool(4096)) is large


def test_an_exclusive_pool_neither_lends_nor_borrows(arena):
    """What entries lie in must never have held a message."""
    exclusive = arena.exclusive_pool(2048)
    for pool, others in (
        (exclusive, arena.pool(1024)),
        (arena.pool(2048), exclusive),
        (arena.pool(4096), exclusive),
    ):
        slot = arena.take(pool)
        slot.free()
        assert arena.take(others) is not slot
        assert arena.take(pool) is slot


def test_a_shortage_of_memory_says_how_much(arena, monkeypatch):
    """And leaves the arena as it was."""
    arena.take(arena.pool(100))
    before = arena.nbytes
    files = len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    def none(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", none)
    with pytest.raises(
        OutOfSharedMemory,
        match=rf"1,052,672 bytes in addition to the {before:,} in use .*No space left",
    ):
        arena.take(arena.pool(2**20))
    assert arena.nbytes == before
    assert len(os.listdir("/proc/self/fd")) == files  # noqa: PTH208
    monkeypatch.undo()
    assert arena.take(arena.pool(2**20)).pool is arena.pool(2**20)


@settings(deadline=None)
@given(st.integers(0, 2**42))
def test_room_is_whole_lines_and_less_than_a_quarter_more(nbytes):
    """Of a power of two, which most tensors are, nothing is wasted."""
    room = _size_class(nbytes)
    assert room >= max(nbytes, 256)
    assert room % LINE == 0
    assert nbytes < 256 or room < 1.25 * nbytes + 1
    assert _size_class(room) == room


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=30), st.integers(1, 8))
def test_no_two_messages_share_a_byte_and_memory_follows_what_is_in_flight(lengths, depth):
    """A queue of `depth` messages, any lengths, gone through three times."""
    arena, flying, grown = Arena(), [], []
    for _ in range(3):
        for length in lengths:
            if len(flying) == depth:
                flying.pop(0)[0].free()
            flying.append((arena.take(arena.pool(length)), length))
            spans = sorted((*split_place(slot.place), slot.start + size) for slot, size in flying)
            for (fd, _, end), (next_fd, start, _) in itertools.pairwise(spans):
                assert fd != next_fd or end <= start
        grown.append(arena.nbytes)
    whole = sum(LINE + _size_class(length) for length in lengths)
    assert grown[2] <= 1.2 * min(depth, 3 * len(lengths)) * whole + 2 * 32 * 1024 + 4096 * len(
        arena.segments
    )
    arena.close()
