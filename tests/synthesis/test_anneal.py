"""Annealing: its moves, its longest path, and its acceptance of moves, each against a reference."""

from __future__ import annotations

import math

import numpy as np
from tests.synthesis.requests import random_counts, random_encoding, random_problem, rows_of

from penstock.synthesis import anneal as kernels
from penstock.synthesis.anneal import AnnealSettings, anneal, random_unit
from penstock.synthesis.arrays import B, Encoding, F, I, W, make_workspace
from penstock.synthesis.evaluate import evaluate, is_valid


def cases(seeds):
    """Problems with sound random programs, evaluated."""
    for seed in range(seeds):
        rng = np.random.default_rng(5000 + seed)
        problem = random_problem(seed, limited=False)
        spec = problem.spec(random_counts(problem, rng))
        encoding, work = random_encoding(problem, spec, rng, swaps=0.0), make_workspace(spec)
        evaluate(spec, encoding, work)
        yield problem, spec, encoding, work, rng


def settings_of(moves=100, first=1.0, last=0.1, target=-1.0, seed=1, may_split=1):
    """Settings of a run."""
    return AnnealSettings(
        np.array([moves]),
        np.array([first, last]),
        np.array([target]),
        np.array([seed]),
        np.array([may_split]),
    )


def copy_of(encoding):
    """An independent copy of programs."""
    return Encoding(encoding.codes.copy(), encoding.lengths.copy())


def test_random_numbers_are_those_of_drand48():
    """48 bits of state, of which the upper 31 make the number."""
    state, expected = np.array([0x1234ABCD330E]), 0x1234ABCD330E
    for _ in range(50):
        expected = (expected * 0x5DEECE66D + 0xB) % 2**48
        assert random_unit(state) == (expected // 2**17) / 2**31
        assert int(state[0]) == expected


def test_rows_are_copied_with_their_lengths_and_restored():
    """Other rows stay as they are."""
    for _, _, encoding, _, rng in cases(10):
        rows = rows_of(encoding)
        rank = int(rng.integers(len(rows)))
        saved = np.full(encoding.codes.shape[1] + 1, -5)
        kernels._copy(encoding, rank, saved)
        encoding.codes[rank] = -1
        encoding.lengths[rank] = 1
        assert [len(row) for row in rows_of(encoding)].count(1) >= 1
        kernels._restore(encoding, rank, saved)
        assert rows_of(encoding) == rows


def test_a_longest_path_leads_back_along_causes_from_the_rank_that_ends_last():
    """Of ranks that end together the first; the path ends at an op that waits for nothing."""
    ties = 0
    for _, _, encoding, work, _ in cases(60):
        size = encoding.codes.shape[1]
        path = np.full(len(encoding.lengths) * size, -9)
        count = kernels._critical(encoding, work, path)
        ends = work.free.tolist()
        last = ends.index(max(ends))
        ties += ends.count(max(ends)) > 1
        expected = [last * size + int(encoding.lengths[last]) - 1]
        while (cause := int(work.cause[divmod(expected[-1], size)])) >= 0:
            expected.append(cause)
        assert path[:count].tolist() == expected
    assert ties > 0


def test_an_op_is_shifted_past_others_and_only_a_change_counts():
    """As a list does it; past equal ops nothing changes."""
    rng = np.random.default_rng(3)
    for _ in range(200):
        codes = rng.integers(0, 3, (2, 6))
        source, target = map(int, rng.integers(6, size=2))
        before = codes.tolist()
        row = codes[1].tolist()
        row.insert(target, row.pop(source))
        changed = kernels._shift(codes, 1, source, target)
        assert codes.tolist() == [before[0], row]
        assert changed == (row != before[1])


def split_or_join(row, place, early):
    """The same move on a list; None if it is not possible."""
    copy, kind = divmod(row[place], 4)
    if kind == F:
        return None
    if kind == B:
        return [*row[:place], 4 * copy + I, 4 * copy + W, *row[place + 1 :]]
    number = row[:place].count(row[place])
    other_code = 4 * copy + (W if kind == I else I)
    other = [i for i, code in enumerate(row) if code == other_code][number]
    first, second = sorted((place, other))
    result = list(row)
    result[first if early else second] = 4 * copy + B
    del result[second if early else first]
    return result


def test_backwards_are_split_in_place_and_joined_with_their_other_half():
    """The k-th I with the k-th W of the copy, at the place of either."""
    kinds = {F: 0, I: 0, W: 0, B: 0}
    for _, _, encoding, _, rng in cases(40):
        for rank, row in enumerate(rows_of(encoding)):
            for place, code in enumerate(row):
                early = bool(rng.integers(2))
                changed = copy_of(encoding)
                rows = rows_of(encoding)
                is_possible = kernels._split_or_join(changed, rank, place, early)
                expected = split_or_join(row, place, early)
                assert is_possible == (expected is not None)
                rows[rank] = row if expected is None else expected
                assert rows_of(changed) == rows
                kinds[code % 4] += 1
    assert min(kinds.values()) > 20


def move(encoding, path, index, state, may_split):
    """The move that these random numbers make, on lists; None if it changes nothing."""

    def draw():
        return random_unit(state)

    size = encoding.codes.shape[1]
    rank, place = divmod(path[index], size)
    row = rows_of(encoding)[rank]
    if may_split and draw() < 0.15:
        return split_or_join(row, place, draw() < 0.5)
    # The block: the ops of the path that follow each other on the rank.
    low = high = index
    while low + 1 < len(path) and path[low + 1] == path[low] - 1 and path[low] % size:
        low += 1
    while high and path[high - 1] == path[high] + 1 and path[high] % size + 1 < len(row):
        high -= 1
    choice = draw()
    if choice < 0.25:
        target = path[low] % size
    elif choice < 0.5:
        target = path[high] % size
    else:
        target = place + math.floor(draw() * 9) - 4
    target = max(0, min(target, len(row) - 1))
    changed = list(row)
    changed.insert(target, changed.pop(place))
    return changed if changed != row else None


def test_moves_take_an_op_of_the_path_out_of_its_block():
    """Half of them to its ends, half up to four places; one in seven splits or joins if it may."""
    count = 0
    for seed, (_, _, encoding, work, rng) in enumerate(cases(60)):
        path = np.zeros(encoding.codes.size, int)
        length = kernels._critical(encoding, work, path)
        for trial in range(12):
            index = int(rng.integers(length))
            rank = path[index] // encoding.codes.shape[1]
            may_split = trial % 3 == 0
            settings = settings_of(seed=1000 * seed + 77 * trial, may_split=int(may_split))
            state = settings.rng_state.copy()
            changed, rows = copy_of(encoding), rows_of(encoding)
            has_changed = kernels._try_move(changed, path, length, index, settings)
            row = move(encoding, path[:length].tolist(), index, state, may_split)
            assert has_changed == (row is not None)
            rows[rank] = rows[rank] if row is None else row
            assert rows_of(changed) == rows
            assert settings.rng_state[0] == state[0]
            count += has_changed
    assert count > 200


def slow_anneal(spec, encoding, work, settings):
    """The same search with lists: seconds of the best programs, and these."""
    current = best = evaluate(spec, encoding, work)
    best_rows = rows_of(encoding)
    path = np.zeros(encoding.codes.size, int)
    length = kernels._critical(encoding, work, path)
    (moves,), (first, last) = settings.moves.tolist(), settings.temperature.tolist()
    for number in range(1, moves + 1):
        if best <= settings.target[0]:
            break
        index = math.floor(random_unit(settings.rng_state) * length)
        rank = path[index] // encoding.codes.shape[1]
        before = encoding.codes[rank].copy(), int(encoding.lengths[rank])
        if not kernels._try_move(encoding, path, length, index, settings):
            continue
        proposed = -1.0
        if is_valid(spec, encoding, work, rank):
            proposed = evaluate(spec, encoding, work)
        temperature = first * (last / first) ** (number / moves)
        is_accepted = 0 <= proposed <= current or (
            proposed >= 0
            and random_unit(settings.rng_state) < math.exp((current - proposed) / temperature)
        )
        if not is_accepted:
            encoding.codes[rank], encoding.lengths[rank] = before
            continue
        current = proposed
        length = kernels._critical(encoding, work, path)
        if current < best:
            best, best_rows = current, rows_of(encoding)
    return best, best_rows


def test_longer_programs_are_accepted_by_metropolis_and_the_best_are_returned():
    """Step by step as a slow reference that draws the same random numbers."""
    improved = stopped = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        problem = random_problem(seed)
        spec = problem.spec(random_counts(problem, rng))
        encoding = random_encoding(problem, spec, rng, swaps=0.0)
        work = make_workspace(spec)
        before = evaluate(spec, encoding, work)
        numbers = {
            "moves": 60,
            "first": float(rng.choice([0.01, 2.0, 20.0])),
            "last": float(rng.choice([0.01, 0.5])),
            "target": float(rng.choice([-1.0, before * 0.9])),
            "seed": seed,
        }
        fast, slow = settings_of(**numbers), settings_of(**numbers)
        changed = copy_of(encoding)
        seconds = anneal(spec, changed, work, fast)
        expected, rows = slow_anneal(spec, copy_of(encoding), work, slow)
        assert (seconds, rows_of(changed)) == (expected, rows)
        assert fast.rng_state[0] == slow.rng_state[0]
        assert evaluate(spec, changed, work) == seconds
        improved += seconds < before
        stopped += numbers["target"] > 0 and seconds <= numbers["target"]
    assert improved > 6
    assert stopped > 0


def test_a_target_that_is_met_exactly_ends_the_search_before_the_first_move():
    """No random number is drawn, and no move at all is the same."""
    for _, spec, encoding, work, _ in cases(5):
        rows, before = rows_of(encoding), evaluate(spec, encoding, work)
        for options in ({"target": before}, {"moves": 0}):
            settings = settings_of(**options, seed=11)
            assert anneal(spec, encoding, work, settings) == before
            assert settings.rng_state[0] == 11
            assert rows_of(encoding) == rows
