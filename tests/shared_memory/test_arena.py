"""Slots in shared memory: what is reused, what is lent, what grows."""

from __future__ import annotations

import itertools
import mmap
import os
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared_memory.arena import Arena, OutOfSharedMemory, Pool, _size_class, split_place
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


def test_a_place_splits_into_file_and_offset_at_every_size():
    """Offsets have 40 bits: a segment may hold a terabyte."""
    for fd in (0, 1, 5, 1023, 2**20):
        for offset in (0, 1, 64, 2**39, 2**40 - 1):
            assert split_place(fd << 40 | offset) == (fd, offset)


def test_an_arena_counts_the_bytes_of_its_segments(arena):
    """The message on a shortage tells them; it begins with none."""
    assert (arena.nbytes, arena.segments) == (0, [])
    for length in (100, 100_000, 300, 1_000_000):
        arena.take(arena.pool(length))
        assert arena.nbytes == sum(len(segment.memory) for segment in arena.segments)
    assert len(arena.segments) == 3


def test_the_first_line_of_a_segment_belongs_to_no_slot(arena):
    """The receiver notes there that it has opened the segment."""
    for length in (100, 100_000, 1_000_000):
        slot = arena.take(arena.pool(length))
        if slot.segment.fd != arena.segments[0].fd or length == 100:
            assert split_place(slot.place)[1] == LINE


def test_free_slots_are_taken_with_as_few_looks_at_those_in_use_as_possible(arena):
    """A look reads memory that another process writes."""
    pool = arena.pool(1024)
    first, second, third = (arena.take(pool) for _ in range(3))
    first.free()
    second.free()
    assert arena.take(pool) is first, "the oldest"
    assert not pool.free, "the others were not looked at"
    third.free()
    assert arena.take(pool) is second, "the oldest again"
    second.free()
    third.free()
    # Now the oldest is in use, and all are looked at.
    pool.in_use.rotate(-pool.in_use.index(first))
    assert arena.take(pool) in (second, third)
    assert len(pool.free) == 1
    first.free()
    assert arena.take(pool) in (second, third), "a free slot is there, so that none is looked at"
    assert pool.in_use[0] is first


def test_a_slot_that_was_lent_returns_to_its_owner(arena):
    """Pools lend free slots to those of smaller messages."""
    pool, small = arena.pool(1024), arena.pool(512)
    first, second = arena.take(pool), arena.take(pool)
    first.free()
    second.free()
    assert {arena.take(small), arena.take(small)} == {first, second}
    assert set(pool.in_use) == {first, second}
    assert not small.in_use
    second.free()
    assert arena.take(pool) is second


def test_a_sweep_looks_at_a_limited_number_and_goes_on_where_it_stopped():
    """Allocation takes bounded time, however many messages are in flight."""
    pool = Pool(256)
    slots = [SimpleNamespace(words=[1], state=0) for _ in range(40)]
    pool.in_use.extend(slots)
    slots[20].words[0] = slots[38].words[0] = 0
    assert pool.take_free() is None
    assert list(pool.in_use) == slots[16:] + slots[:16]
    assert pool.take_free() is slots[20]
    assert pool.take_free() is slots[38]
    assert pool.free == []
    assert set(map(id, pool.in_use)) == {id(slot) for slot in slots if slot.words[0]}


def test_a_closed_arena_holds_no_slots_and_its_segments_are_closed(arena):
    """Slots and pools refer to each other, which only the garbage collector would resolve."""
    exclusive, pool = arena.exclusive_pool(512), arena.pool(512)
    for any_pool in (exclusive, pool):
        arena.take(any_pool).free()
        arena.take(any_pool)
        freed = arena.take(any_pool)
        freed.free()
        any_pool.free.append(freed)
    files = [segment.fd for segment in arena.segments]
    arena.close()
    assert [(len(p.free), len(p.in_use)) for p in (exclusive, pool)] == [(0, 0), (0, 0)]
    for fd in files:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


@pytest.mark.parametrize("nbytes", [256, 257, 320, 321, 1024, 1025, 1280, 1281, 2**20 + 1])
def test_a_size_class_is_the_least_of_four_per_power_of_two(nbytes):
    """Computed here by counting up."""
    quarters = ((4 + part) * 2**power // 4 for power in range(8, 30) for part in range(4))
    assert _size_class(nbytes) == next(size for size in quarters if size >= nbytes)


def test_segments_grow_with_the_memory_that_there_is(arena):
    """Each segment takes a file descriptor, of which a process may have a thousand."""
    for _ in range(6000):
        arena.take(arena.pool(1000))
    assert len(arena.segments) < 50
    assert arena.nbytes < 1.2 * 6000 * (1024 + LINE)
    sizes = [len(segment.memory) for segment in arena.segments]
    assert min(sizes) >= 32 * 1024
    assert sizes == sorted(sizes)


def test_a_slot_fills_a_segment_to_its_last_byte(arena):
    """A message at its end must not reach beyond it."""
    segment_bytes = len(arena.take(arena.pool(256)).segment.memory)
    pool = arena.exclusive_pool(segment_bytes - 3 * LINE - 256 - LINE)
    fits = arena.take(pool)
    assert fits.segment is arena.segments[0]
    assert fits.start + pool.nbytes == segment_bytes - LINE
    other = Arena()
    other.take(other.pool(256))
    wide = other.exclusive_pool(segment_bytes - 3 * LINE - 256)
    slot = other.take(wide)
    assert slot.segment is other.segments[0]
    assert slot.start + wide.nbytes == segment_bytes
    over = Arena()
    over.take(over.pool(256))
    assert over.take(over.exclusive_pool(wide.nbytes + LINE)).segment is not over.segments[0]
    for closing in (other, over):
        closing.close()


@pytest.mark.parametrize("pages", [8, 9, 20])
def test_a_segment_for_one_large_slot_has_room_for_its_own_line_as_well(arena, pages):
    """The slot with its line may be whole pages."""
    slot = arena.take(arena.exclusive_pool(pages * mmap.PAGESIZE - LINE))
    assert slot.start + slot.pool.nbytes <= len(slot.segment.memory)


def test_the_smallest_fitting_loan_is_taken(arena):
    """A larger one may be needed for a larger message."""
    slots = {size: arena.take(arena.pool(size)) for size in (4096, 1024, 2048)}
    for slot in slots.values():
        slot.free()
    assert [arena.take(arena.pool(1000)) for _ in range(3)] == [
        slots[1024],
        slots[2048],
        slots[4096],
    ]
