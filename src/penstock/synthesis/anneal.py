"""Kernel: simulated annealing of encoded programs. Every move shifts an op of the critical path
past other ops of its block.

A *block* is a run of ops on one rank that follow each other without a wait on the longest path.
Only a move that takes an op of a block before its first or behind its last can shorten that path
(Nowicki and Smutnicki 1996; Balas and Vazacopoulos 1998), so these are most of the moves.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.compiled import compiled
from penstock.synthesis.arrays import B, Encoding, F, Floats, I, Ints, Spec, W, Workspace
from penstock.synthesis.evaluate import evaluate, is_valid


class AnnealSettings(NamedTuple):
    """Settings of a run. One-element arrays, since kernels take arrays.

    Attributes:
        moves: (1,) number of moves to try.
        temperature: (2,) temperature of the first move and of the last, in seconds.
        target: (1,) makespan at which to stop.
        rng_state: (1,) state of the random numbers; changes.
        may_split: (1,) 1 if backwards may be split and joined.
    """

    moves: Ints
    temperature: Floats
    target: Floats
    rng_state: Ints
    may_split: Ints


@compiled
def random_unit(rng_state: Ints) -> float:
    """Return a random number in [0, 1) by a 48-bit linear congruential generator, as drand48."""
    # Neither Python's nor NumPy's generator: this one draws the same numbers compiled and in plain
    # Python.
    rng_state[0] = (int(rng_state[0]) * 25214903917 + 11) & 0xFFFFFFFFFFFF
    return int(rng_state[0] >> 17) / 2147483648.0


@compiled
def anneal(spec: Spec, encoding: Encoding, work: Workspace, settings: AnnealSettings) -> float:
    """Shorten `encoding` in place to the best programs that were found. Return their makespan."""
    ranks, size = encoding.codes.shape
    current = best = evaluate(spec, encoding, work)
    best_rows, saved_row = np.empty((ranks, size + 1), np.int64), np.empty(size + 1, np.int64)
    for rank in range(ranks):
        _copy(encoding, rank, best_rows[rank])
    path = np.empty(ranks * size, np.int64)
    length = _critical(encoding, work, path)
    temperature, moves = settings.temperature[0], settings.moves[0]
    cooling = (settings.temperature[1] / temperature) ** (1.0 / max(1, moves))
    for _ in range(moves):
        if best <= settings.target[0]:
            break
        temperature *= cooling
        # Only a move on the critical path can shorten the programs.
        index = int(random_unit(settings.rng_state) * length)
        rank = path[index] // size
        _copy(encoding, rank, saved_row)
        if not _try_move(encoding, path, length, index, settings):
            continue
        proposed = evaluate(spec, encoding, work) if is_valid(spec, encoding, work, rank) else -1.0
        # Metropolis's rule: programs that are longer by little, or early, are accepted too.
        if proposed >= 0.0 and (
            proposed <= current
            or random_unit(settings.rng_state) < np.exp((current - proposed) / temperature)
        ):
            current = proposed
            length = _critical(encoding, work, path)
            if current < best:
                best = current
                for other in range(ranks):
                    _copy(encoding, other, best_rows[other])
        else:
            _restore(encoding, rank, saved_row)
    for rank in range(ranks):
        _restore(encoding, rank, best_rows[rank])
    return best


@compiled
def _copy(encoding: Encoding, rank: int, saved_row: Ints) -> None:
    """Write the codes of `rank`, and their number, into `saved_row`."""
    size = encoding.lengths[rank]
    saved_row[len(saved_row) - 1] = size
    for place in range(size):
        saved_row[place] = encoding.codes[rank, place]


@compiled
def _restore(encoding: Encoding, rank: int, saved_row: Ints) -> None:
    """Restore the codes of `rank` from a copy."""
    size = saved_row[len(saved_row) - 1]
    encoding.lengths[rank] = size
    for place in range(size):
        encoding.codes[rank, place] = saved_row[place]


@compiled
def _critical(encoding: Encoding, work: Workspace, path: Ints) -> int:
    """Write the ops of a longest path into `path`, the last first, as rank x L + place. Return
    their number.
    """
    last = 0
    for rank in range(1, len(encoding.lengths)):
        if work.free[rank] > work.free[last]:
            last = rank
    length = encoding.codes.shape[1]
    op, count = last * length + encoding.lengths[last] - 1, 0
    while op >= 0:
        path[count] = op
        count += 1
        op = work.cause[op // length, op % length]
    return count


@compiled
def _try_move(
    encoding: Encoding, path: Ints, count: int, index: int, settings: AnnealSettings
) -> bool:
    """Change the codes of the rank of op `index` of the path, by a move out of its block. Return
    whether anything has changed.
    """
    length = encoding.codes.shape[1]
    rank, place = path[index] // length, path[index] % length
    if settings.may_split[0] == 1 and random_unit(settings.rng_state) < 0.15:
        return _split_or_join(encoding, rank, place, random_unit(settings.rng_state) < 0.5)
    # The block of the op: `path` goes backwards in time, so its places fall by one from op to op.
    low = high = place
    i = index + 1
    while i < count and path[i] == path[i - 1] - 1 and low > 0:
        low -= 1
        i += 1
    i = index - 1
    while i >= 0 and path[i] == path[i + 1] + 1 and high < encoding.lengths[rank] - 1:
        high += 1
        i -= 1
    # Half of the moves go to an end of the block; the others, of up to 4 places, explore.
    rng = random_unit(settings.rng_state)
    if rng < 0.25:
        target = low
    elif rng < 0.5:
        target = high
    else:
        target = place + int(random_unit(settings.rng_state) * 9) - 4
    target = min(max(target, 0), encoding.lengths[rank] - 1)
    return _shift(encoding.codes, rank, place, target)


@compiled
def _shift(codes: Ints, rank: int, source: int, target: int) -> bool:
    """Move the op at `source` to `target`; the ops between shift by one. Return False if all of
    these are the same op.
    """
    code, changed = codes[rank, source], False
    step = 1 if target > source else -1
    for place in range(source, target, step):
        changed = changed or codes[rank, place + step] != code
        codes[rank, place] = codes[rank, place + step]
    codes[rank, target] = code
    return changed


@compiled
def _split_or_join(encoding: Encoding, rank: int, place: int, early: bool) -> bool:
    """Split the B at `place` into I and W; or join the I or W there with its other half to a B, at
    the place of the earlier half if `early`, else of the later. Return whether that was possible.
    """
    codes, size = encoding.codes, encoding.lengths[rank]
    copy, kind = codes[rank, place] >> 2, codes[rank, place] & 3
    if kind == F:
        return False
    if kind == B:
        for i in range(size, place + 1, -1):
            codes[rank, i] = codes[rank, i - 1]
        codes[rank, place], codes[rank, place + 1] = 4 * copy + I, 4 * copy + W
        encoding.lengths[rank] = size + 1
        return True
    # Codes have no micro-batch: the other half of the k-th I is the k-th W, and the other way round.
    k = 0
    for i in range(place):
        k += codes[rank, i] == codes[rank, place]
    other_code = 4 * copy + (W if kind == I else I)
    count, other = 0, -1
    for i in range(size):
        if codes[rank, i] == other_code:
            if count == k:
                other = i
            count += 1
    first, second = min(place, other), max(place, other)
    joined, removed = (first, second) if early else (second, first)
    codes[rank, joined] = 4 * copy + B
    for i in range(removed, size - 1):
        codes[rank, i] = codes[rank, i + 1]
    encoding.lengths[rank] = size - 1
    return True
