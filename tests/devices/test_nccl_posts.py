"""Where receives stand in programs that are played over NCCL, whose posted receives are kernels on
the device.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache

import pytest

from penstock.errors import PenstockError
from penstock.runtime.player import AHEAD_ON_DEVICE
from penstock.schedule.catalogue import schedule, schedules
from penstock.schedule.lower import Direction, lower, messages
from penstock.schedule.op import Op
from penstock.transport.communicators import communicator_keys
from penstock.verify.lowered import verify_lowered

NAMES = sorted(name for name, facts in schedules().items() if facts.synchronous)
SIZES = [(2, 2), (2, 5), (3, 6), (4, 4), (4, 8), (8, 8)]


@cache
def schedules_of(name: str) -> tuple:
    """A registered schedule in all sizes that it has."""
    schedules = []
    for stages, micro_batches in SIZES:
        try:
            schedules.append(schedule(name, stages=stages, micro_batches=micro_batches))
        except PenstockError:  # such as an odd number of stages for a family of two directions
            continue
    return tuple(schedules)


def crossings_of(example) -> list[tuple[int, int, int, int]]:
    """Rank and place of the op that makes a value, and of the op that takes it."""
    return [(link.source, start, link.target, end) for link, _, start, end in messages(example)]


def reached(example, crossings, rank: int, place: int) -> list[int]:
    """How far every rank comes when one stops before the op at a place, by playing the programs."""
    inputs = defaultdict(list)
    for source, start, target, end in crossings:
        inputs[target, end].append((source, start))
    done = [0] * example.ranks
    moved = True
    while moved:
        moved = False
        for here, program in enumerate(example.programs):
            end = place if here == rank else len(program)
            while done[here] < end and all(
                done[other] > at for other, at in inputs[here, done[here]]
            ):
                done[here] += 1
                moved = True
    return done


def early_posts(example, lowered) -> int:
    """How many receives wait for a message that is not sent before the receiving rank has played
    further ops.
    """
    crossings = crossings_of(example)
    makers = {(link, message): start for link, message, start, _ in messages(example)}
    early = 0
    for rank, program in enumerate(lowered.programs):
        place, done = 0, None
        for action in program:
            if isinstance(action, Op):
                place, done = place + 1, None
            elif action.direction is Direction.RECV:
                done = reached(example, crossings, rank, place) if done is None else done
                link = (action.peer, rank)
                early += done[action.peer] <= makers[link, action.message]
    return early


@pytest.mark.parametrize("name", NAMES)
def test_n5_no_receive_is_posted_before_the_last_op_that_its_message_depends_on(name):
    """Its kernel would stand on the device until this rank goes on, and a cudaFree before that
    would never end.
    """
    examples = schedules_of(name)
    assert examples, f"{name} has none of the sizes"
    for example in examples:
        for ahead in (AHEAD_ON_DEVICE, 4):
            assert early_posts(example, lower(example, ahead, after_dependencies=True)) == 0


@pytest.mark.parametrize("name", NAMES)
def test_programs_with_late_receives_finish_and_keep_the_order_of_their_links(name):
    """A receive that is moved behind the op that needs it, or behind another of its link, would be
    worse than an early one.
    """
    for example in schedules_of(name):
        lowered = lower(example, AHEAD_ON_DEVICE, after_dependencies=True)
        verify_lowered(lowered, schedule=example)


def test_early_posts_are_seen():
    """The keeper itself: with receives two ops ahead, the rule for gloo, 1F1B has some."""
    example = schedule("1f1b", stages=4, micro_batches=8)
    assert early_posts(example, lower(example, 2)) == 6
    assert early_posts(example, lower(example, 2, after_dependencies=True)) == 0


def open_receives(lowered, example) -> int:
    """The most receives that stand posted on one link, and whose op has not come yet."""
    takers = {(link, message): end for link, message, _, end in messages(example)}
    most = 0
    for rank, program in enumerate(lowered.programs):
        place = 0
        standing: dict[int, list[int]] = defaultdict(list)
        for action in program:
            if isinstance(action, Op):
                place += 1
                for peer, ends in standing.items():
                    standing[peer] = [end for end in ends if end >= place]
            elif action.direction is Direction.RECV:
                standing[action.peer].append(takers[(action.peer, rank), action.message])
                most = max(most, len(standing[action.peer]))
    return most


#: Schedules in whose order a link of two ranks has one more receive open. On two ranks one link
#: carries activations and gradients of both stages, and the delayed W of rank 1 come between them.
THREE_OPEN = {"interleaved-zero-bubble"}


@pytest.mark.parametrize("name", NAMES)
def test_n6_few_receives_of_a_link_are_open_at_once(name):
    """At most two: each holds a buffer, and the first of them processors of the device."""
    for example in schedules_of(name):
        lowered = lower(example, AHEAD_ON_DEVICE, after_dependencies=True)
        most = 3 if name in THREE_OPEN and example.ranks == 2 else 2
        assert open_receives(lowered, example) <= most


@pytest.mark.parametrize("name", NAMES)
def test_n7_a_rank_is_in_two_communicators_for_each_neighbour(name):
    """Each takes device memory: hundreds of MB over NVLink (nccl#964). What copies of a stage exchange
    needs two more for each of these.
    """
    for example in schedules_of(name):
        links = {link for link, *_ in messages(example)}
        links |= {link._replace(source=link.target, target=link.source) for link in links}
        keys = communicator_keys(links, ())
        for rank in range(example.ranks):
            neighbours = {end for link in links if rank in link for end in link if end != rank}
            of_links = sum(rank in link for link, _ in keys)
            assert of_links == 2 * len(neighbours)
