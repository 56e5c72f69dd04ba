"""Kernel: simulated annealing of words. Every move takes an op of the critical path past others of
its block.

A *block* is a run of ops on one rank that follow each other without a wait on the longest path.
Only a move that takes an op of a block before its first or behind its last can shorten that path
(Nowicki and Smutnicki 1996; Balas and Vazacopoulos 1998), so these are most of the moves.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.search.synthesis.arrays import Floats, Ints, Spec, Words, Work
from penstock.search.synthesis.compiled import compiled
from penstock.search.synthesis.play import play, sound


class Knobs(NamedTuple):
    """How to anneal.

    Attributes:
        moves: (1,) how many moves to try.
        heat: (2,) temperature of the first move and of the last, in seconds.
        goal: (1,) makespan at which to stop.
        dice: (1,) state of the random numbers; changes.
        splits: (1,) 1 if backwards may be split and joined.
    """

    moves: Ints
    heat: Floats
    goal: Floats
    dice: Ints
    splits: Ints


@compiled
def roll(dice: Ints) -> float:
    """A number in [0, 1): a linear congruential generator with 48 bits, as drand48."""
    dice[0] = (int(dice[0]) * 25214903917 + 11) & 0xFFFFFFFFFFFF
    return int(dice[0] >> 17) / 2147483648.0


@compiled
def anneal(spec: Spec, words: Words, work: Work, knobs: Knobs) -> float:
    """Shorten `words` in place. Returns the makespan of what they are at the end: the best that was
    seen.
    """
    ranks, size = words.codes.shape
    now = best = play(spec, words, work)
    kept, row = np.empty((ranks, size + 1), np.int64), np.empty(size + 1, np.int64)
    for rank in range(ranks):
        _copy(words, rank, kept[rank])
    path = np.empty(ranks * size, np.int64)
    length = _critical(words, work, path)
    heat, moves = knobs.heat[0], knobs.moves[0]
    cooling = (knobs.heat[1] / heat) ** (1.0 / max(1, moves))
    for _ in range(moves):
        if best <= knobs.goal[0]:
            break
        heat *= cooling
        chosen = int(roll(knobs.dice) * length)
        rank = path[chosen] // size
        _copy(words, rank, row)
        if not _moved(words, path, length, chosen, knobs):
            continue
        then = play(spec, words, work) if sound(spec, words, work, rank) else -1.0
        if then >= 0.0 and (then <= now or roll(knobs.dice) < np.exp((now - then) / heat)):
            now = then
            length = _critical(words, work, path)
            if now < best:
                best = now
                for other in range(ranks):
                    _copy(words, other, kept[other])
        else:
            _restore(words, rank, row)
    for rank in range(ranks):
        _restore(words, rank, kept[rank])
    return best


@compiled
def _copy(words: Words, rank: int, row: Ints) -> None:
    """Write the word of `rank`, and how long it is, into `row`."""
    size = words.lengths[rank]
    row[len(row) - 1] = size
    for place in range(size):
        row[place] = words.codes[rank, place]


@compiled
def _restore(words: Words, rank: int, row: Ints) -> None:
    """The word of `rank` as it was copied."""
    size = row[len(row) - 1]
    words.lengths[rank] = size
    for place in range(size):
        words.codes[rank, place] = row[place]


@compiled
def _critical(words: Words, work: Work, path: Ints) -> int:
    """Write the ops of a longest path into `path`, the last first, as rank x L + place. Returns how
    many they are.
    """
    last = 0
    for rank in range(1, len(words.lengths)):
        if work.free[rank] > work.free[last]:
            last = rank
    length = words.codes.shape[1]
    op, count = last * length + words.lengths[last] - 1, 0
    while op >= 0:
        path[count] = op
        count += 1
        op = work.cause[op // length, op % length]
    return count


@compiled
def _moved(words: Words, path: Ints, count: int, chosen: int, knobs: Knobs) -> bool:
    """Change the word of the rank of op `chosen` of the path, by a move out of its block. Whether
    anything has changed.
    """
    length = words.codes.shape[1]
    rank, place = path[chosen] // length, path[chosen] % length
    if knobs.splits[0] == 1 and roll(knobs.dice) < 0.15:
        return _split_or_join(words, rank, place, roll(knobs.dice) < 0.5)
    low = high = place
    i = chosen + 1
    while i < count and path[i] == path[i - 1] - 1 and low > 0:
        low -= 1
        i += 1
    i = chosen - 1
    while i >= 0 and path[i] == path[i + 1] + 1 and high < words.lengths[rank] - 1:
        high += 1
        i -= 1
    luck = roll(knobs.dice)
    if luck < 0.25:
        target = low
    elif luck < 0.5:
        target = high
    else:
        target = place + int(roll(knobs.dice) * 9) - 4
    target = min(max(target, 0), words.lengths[rank] - 1)
    return _shifted(words.codes, rank, place, target)


@compiled
def _shifted(codes: Ints, rank: int, source: int, target: int) -> bool:
    """Take the op at `source` to `target`, the others between move up. False if all of these are
    the same op.
    """
    code, changed = codes[rank, source], False
    step = 1 if target > source else -1
    for place in range(source, target, step):
        changed = changed or codes[rank, place + step] != code
        codes[rank, place] = codes[rank, place + step]
    codes[rank, target] = code
    return changed


@compiled
def _split_or_join(words: Words, rank: int, place: int, early: bool) -> bool:
    """Make I and W of the B at `place`; or make B of the I or W there and its other half, where the
    `early` or late one stood.
    """
    codes, size = words.codes, words.lengths[rank]
    copy, kind = codes[rank, place] >> 2, codes[rank, place] & 3
    if kind == 0:
        return False
    if kind == 3:
        for i in range(size, place + 1, -1):
            codes[rank, i] = codes[rank, i - 1]
        codes[rank, place], codes[rank, place + 1] = 4 * copy + 1, 4 * copy + 2
        words.lengths[rank] = size + 1
        return True
    turn, other = 0, -1
    for i in range(place):
        turn += codes[rank, i] == codes[rank, place]
    for i in range(size):
        if codes[rank, i] == 4 * copy + (3 - kind):
            if turn == 0:
                other = i
            turn -= 1
    first, second = min(place, other), max(place, other)
    codes[rank, first if early else second] = 4 * copy + 3
    for i in range(second if early else first, size - 1):
        codes[rank, i] = codes[rank, i + 1]
    words.lengths[rank] = size - 1
    return True
