"""Rules for list scheduling: their due times, caps and masks, each against plain loops."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from tests.synthesis.requests import problem_of, random_counts, random_encoding, random_problem

from penstock.simulate.costs import Costs
from penstock.synthesis.arrays import (
    DOWN,
    HOLD,
    UP,
    B,
    F,
    I,
    W,
    empty_encoding,
    make_workspace,
)
from penstock.synthesis.encoding import decode
from penstock.synthesis.evaluate import evaluate
from penstock.synthesis.list_schedule import list_schedule
from penstock.synthesis.problem import Constraints
from penstock.synthesis.rules import (
    Rule,
    Shape,
    _shifted_due,
    memory_caps,
    neighbour,
    rule_of_times,
    standard_rules,
    unsplit_masks,
)


def specs(seeds, **options):
    """Random problems as arrays."""
    for seed in range(seeds):
        problem = random_problem(seed, **options)
        yield problem, problem.spec(random_counts(problem, np.random.default_rng(seed)))


def test_heads_and_tails_are_the_longest_paths_of_one_micro_batch_alone():
    """A graph of its ops: a W follows its I, and may be the longer way to the end."""
    longer = 0
    for problem, spec in specs(40):
        stages, cost = problem.stages, spec.cost

        def inputs(copy, kind, stages=stages, cost=cost):
            stage = copy % stages
            if kind == W:
                return [(copy, I, 0.0)]
            if kind == F:
                return [(copy - 1, F, cost[copy - 1, UP])] if stage else []
            if stage == stages - 1:
                return [(copy, F, 0.0)]
            return [(copy + 1, I, cost[copy + 1, DOWN])]

        @cache
        def head(copy, kind, inputs=inputs, cost=cost):
            ends = [head(c, k) + cost[c, k] + delay for c, k, delay in inputs(copy, kind)]
            return max(ends, default=0.0)

        @cache
        def tail(copy, kind, inputs=inputs, cost=cost):
            after = [0.0]
            for c in range(len(cost)):
                for k in (F, I, W):
                    for source, source_kind, delay in inputs(c, k):
                        if (source, source_kind) == (copy, kind):
                            after.append(delay + cost[c, k] + tail(c, k))
            return max(after)

        shape = Shape.of(spec)
        for copy in range(len(cost)):
            for kind in (F, I, W):
                assert shape.head[copy, kind] == head(copy, kind)
                assert shape.tail[copy, kind] == tail(copy, kind)
            longer += copy % stages > 0 and tail(copy, I) == cost[copy, W] > 0
    assert longer > 3


def test_the_pace_is_that_of_the_busiest_rank_and_the_need_that_of_one_micro_batch():
    """On two routes a rank has one copy of each micro-batch; the pace is never 0."""
    for problem, spec in specs(40):
        shape, busiest = Shape.of(spec), 0.0
        for rank, copies in enumerate(problem.copies_of_rank):
            stages = [copy % problem.stages for copy in copies]
            costs = problem.costs
            seconds = [
                costs.forward[s] + costs.input_grad[s] + costs.weight_grad[s] for s in stages
            ]
            sizes = [costs.memory[s] for s in stages]
            busiest = max(busiest, sum(seconds) / len(problem.routes))
            assert shape.need[rank] == (sum(sizes) if len(problem.routes) == 1 else max(sizes))
        assert shape.pace == pytest.approx(busiest or 1.0)
    free = problem_of(Costs(forward=(0.0,) * 2), 2, Constraints("linear"))
    assert Shape.of(free.spec((2,))).pace == 1.0


def test_standard_rules_order_kinds_by_the_path_and_micro_batches_by_the_pace():
    """Thirteen offsets, three patiences, every cap and mask; the offsets are spelled out."""
    for _, spec in specs(6):
        shape = Shape.of(spec)
        masks, caps = unsplit_masks(spec, split=True), memory_caps(spec, shape)
        rules = list(standard_rules(spec, shape, masks))
        per_offset = 3 * len(caps) * len(masks)
        assert len(rules) == 13 * per_offset
        for rule in rules:
            for m in range(1, int(spec.counts.max())):
                steps = rule.due[:, :, m] - rule.due[:, :, m - 1]
                assert steps == pytest.approx(np.full(steps.shape, shape.pace), rel=1e-6)
        settings = [
            (rule.patience[0], rule.cap.tolist(), rule.whole.tolist())
            for rule in rules[:per_offset]
        ]
        assert settings == [
            (patience, cap.tolist(), mask.tolist())
            for patience in (0.0, 0.5, 1.0)
            for cap in caps
            for mask in masks
        ]
        offsets = [rule.due[:, :, 0] for rule in rules[::per_offset]]
        lasts = [rule.due.max(axis=2) for rule in rules[::per_offset]]
        orders = [(I, F, W), (W, I, F), (F, I, W)]
        for first in (0, 5):
            for number, order in enumerate(orders):
                for early, late in pairwise(order):
                    assert (
                        lasts[first + number][:, early].max()
                        < offsets[first + number][:, late].min()
                    )
        assert offsets[3] == pytest.approx(-shape.tail)
        assert offsets[8] == pytest.approx(shape.head)
        assert offsets[4][:, :W] == pytest.approx(-shape.tail[:, :W])
        assert offsets[9][:, :W] == pytest.approx(shape.head[:, :W])
        for number in (4, 9):
            assert lasts[number][:, :W].max() < offsets[number][:, W].min()
        for number, lag in enumerate((1, 2, 4)):
            expected = shape.head.copy()
            expected[:, W] += lag * shape.pace
            assert offsets[10 + number] == pytest.approx(expected)
        # Within a kind, `-tail` or `head` orders the copies.
        for number in range(10):
            base = -shape.tail if number < 5 else shape.head
            shift = offsets[number] - base
            assert np.ptp(shift, axis=0) == pytest.approx(np.zeros(3), abs=1e-6)


@pytest.mark.parametrize(
    ("number", "program"),
    [(0, "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3 0U1"), (2, "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3 0U1")],
)
def test_backwards_first_is_one_forward_one_backward_and_forwards_first_is_gpipe(number, program):
    """With the memory of 1F1B, and whole backwards."""
    costs = Costs(forward=(1.0,) * 3, backward=(2.0,) * 3)
    limit = 3 if number == 0 else 4
    problem = problem_of(costs, 4, Constraints("linear", limit, split=False))
    spec = problem.spec((4,))
    shape = Shape.of(spec)
    masks = unsplit_masks(spec, split=False)
    rules = list(standard_rules(spec, shape, masks))
    rule = rules[number * len(rules) // 13]
    encoding, work = empty_encoding(spec), make_workspace(spec)
    list_schedule(spec, rule, encoding, work)
    row = decode(problem, spec, encoding, work).programs[0]
    assert " ".join(map(str, row)) == program


def test_the_rule_of_programs_has_ops_due_at_their_starts():
    """A whole backward is due as both halves, in the turn of each; others stay split."""
    whole_count = 0
    for problem, spec in specs(30):
        rng = np.random.default_rng(problem.micro_batches)
        encoding, work = random_encoding(problem, spec, rng, swaps=0.0), make_workspace(spec)
        evaluate(spec, encoding, work)
        due = np.zeros((len(spec.copies), 3, int(spec.counts.max())))
        whole = np.zeros(due.shape[::2], int)
        for copy in range(len(spec.copies)):
            rank = spec.copies[copy, 0]
            row = encoding.codes[rank, : encoding.lengths[rank]].tolist()
            places = [place for place, code in enumerate(row) if code // 4 == copy]
            for kind, codes in ((F, (F,)), (I, (I, B)), (W, (W, B))):
                ops = [place for place in places if row[place] % 4 in codes]
                due[copy, kind, : len(ops)] = work.start[rank, ops]
                if kind == I:
                    whole[copy, : len(ops)] = [row[place] % 4 == B for place in ops]
        rule = rule_of_times(spec, encoding, work)
        assert rule.due.tolist() == due.tolist()
        assert rule.whole.tolist() == whole.tolist()
        assert rule.patience.tolist() == [1.0]
        assert rule.cap.tolist() == spec.limit.tolist()
        assert rule.cap is not spec.limit
        whole_count += int(whole.sum())
    assert whole_count > 20


def test_caps_are_the_limits_and_what_the_path_of_a_micro_batch_needs():
    """Once, with one more, and one and a half times with one more; equal caps count once."""
    lengths = set()
    for problem, spec in specs(40):
        shape = Shape.of(spec)
        need = []
        for rank, copies in enumerate(problem.copies_of_rank):
            held = 0.0
            for copy in copies:
                seconds = shape.head[copy, W] - shape.head[copy, F]
                micro_batches = seconds / (shape.pace * len(problem.routes))
                held += spec.cost[copy, HOLD] * micro_batches
            need.append((rank, held))
        expected = [spec.limit.tolist()]
        for factor, extra in ((1, 0), (1, 1), (1.5, 1)):
            cap = []
            for rank, held in need:
                units = math.ceil(round(factor * held / shape.need[rank], 9)) + extra
                units = max(units, 1)
                cap.append(min(spec.limit[rank], units * shape.need[rank]))
            if cap not in expected:
                expected.append(cap)
        caps = memory_caps(spec, shape)
        assert len(caps) == len(expected)
        assert all(cap == pytest.approx(other) for cap, other in zip(caps, expected, strict=True))
        lengths.add(len(caps))
    assert len(lengths) > 1
    zero = Costs(forward=(1.0,) * 2, activation_bytes=(0.0, 1.0))
    spec = problem_of(zero, 3, Constraints("linear", 5)).spec((3,))
    for cap in memory_caps(spec, Shape.of(spec)):
        assert np.isfinite(cap).all()


def test_backwards_are_not_split_where_halves_cost_more():
    """None, all, and all but the last few of a stage: one or two per stage that is behind or ahead;
    only copies whose whole backward is cheaper, and rounding is no difference.
    """
    for problem, spec in specs(40):
        stages, most = problem.stages, int(spec.counts.max())
        ones = np.ones((len(spec.copies), most), int)
        assert [mask.tolist() for mask in unsplit_masks(spec, split=False)] == [ones.tolist()]
        cheaper = [row[B] < row[I] + row[W] for row in spec.cost]
        expected = [(lambda *_: False)]
        if any(cheaper):
            expected.append(lambda *_: True)
            for last in (1, 2):
                expected.append(lambda s, m, count, last=last, p=stages: m < count - last * (p - s))
                expected.append(lambda s, m, count, last=last: m < count - last * s)
        masks = unsplit_masks(spec, split=True)
        assert len(masks) == len(expected)
        for mask, rule in zip(masks, expected, strict=True):
            for copy in range(len(spec.copies)):
                count = int(spec.counts[copy // stages])
                row = [cheaper[copy] and rule(copy % stages, m, count) for m in range(most)]
                assert mask[copy].tolist() == row
    rounded = Costs(forward=(1.0,), input_grad=(0.1,), weight_grad=(0.2,), backward=(0.3,))
    spec = problem_of(rounded, 2, Constraints("linear")).spec((2,))
    assert 0.1 + 0.2 > 0.3
    assert len(unsplit_masks(spec, split=True)) == 1


def test_neighbours_stay_near_a_rule_and_leave_it_as_it_was():
    """Patience in quarters; one cap within need and limit, by up to two of the smallest sizes; one
    copy's whole backwards rolled by up to two; due times of every scope.
    """
    seen = {"patience": set(), "cap": set(), "whole": 0, "copies": set(), "kinds": set()}
    for seed in range(400):
        rng = np.random.default_rng(seed)
        problem = random_problem(seed % 7, "v", 4)
        spec = problem.spec((4,))
        shape = Shape.of(spec)
        due = np.zeros((4, 3, 4))
        whole = (np.arange(4)[None, :] < 2) * np.ones((4, 1), int)
        start = shape.need + 1.0
        rule = Rule(due, np.array([0.6]), np.minimum(start, spec.limit), whole)
        before = [array.copy() for array in rule]
        after = neighbour(rule, spec, shape, rng)
        assert all(np.array_equal(one, other) for one, other in zip(rule, before, strict=True))
        seen["patience"].add(float(after.patience[0]))
        assert (after.cap >= shape.need).all()
        assert (after.cap <= spec.limit).all()
        changes = np.flatnonzero(after.cap != rule.cap)
        assert len(changes) <= 1
        for rank in changes:
            steps = (after.cap[rank] - rule.cap[rank]) / spec.cost[:, HOLD].min()
            assert abs(steps) <= 2
            seen["cap"].add(round(float(steps), 3))
        rolled = [copy for copy in range(4) if not np.array_equal(after.whole[copy], whole[copy])]
        assert len(rolled) <= 1
        for copy in rolled:
            assert sorted(after.whole[copy]) == sorted(whole[copy])
        seen["whole"] += len(rolled)
        changed = after.due != 0
        kinds = changed.any(axis=(0, 2))
        seen["kinds"].add(tuple(kinds.tolist()))
        copies = changed.any(axis=(1, 2))
        seen["copies"].add(tuple(copies.tolist()))
        # The last copies alone, all ops of a kind, or few of each.
        assert np.isfinite(after.due).all()
    assert seen["patience"] == {0.6, 0.0, 0.25, 0.5, 0.75, 1.0}
    assert {-1.0, 1.0, 2.0} <= seen["cap"]
    assert 50 < seen["whole"] < 150
    suffixes = {tuple(copy >= first for copy in range(4)) for first in range(4)}
    singles = {tuple(copy == one for copy in range(4)) for one in range(4)}
    assert suffixes | singles <= seen["copies"]
    assert {(True, False, False), (False, True, False), (False, False, True)} <= seen["kinds"]


def slow_shift(due, pace, rng):
    """The same random numbers, op by op."""
    shifted = due.copy()
    copies, _, turns = due.shape
    spread = pace * 10 ** rng.uniform(-1.5, 0.8)
    copy, kind, scope = rng.integers(copies), rng.integers(3), rng.integers(5)
    if scope == 0:
        shift, chance = rng.normal(0.0, spread, (copies, 3)), rng.random((copies, 3))
        for c, k in np.ndindex(copies, 3):
            for m in range(turns if chance[c, k] < 0.2 else 0):
                shifted[c, k, m] += shift[c, k]
    elif scope == 1:
        shift = rng.normal(0.0, spread)
        for c, m in np.ndindex(copies, turns):
            shifted[c, kind, m] += shift
    elif scope == 2:
        by_kind = rng.random() < 0.5
        shifts = rng.normal(0.0, spread, (3, 1))[:, 0] if by_kind else [rng.normal(0.0, spread)] * 3
        for c, k, m in np.ndindex(due.shape):
            shifted[c, k, m] += shifts[k] if c >= copy else 0.0
    elif scope == 3:
        shift, chance = rng.normal(0.0, spread, due.shape), rng.random(due.shape)
        share = 10 ** rng.uniform(-2, -0.5)
        for place in np.ndindex(due.shape):
            shifted[place] += shift[place] if chance[place] < share else 0.0
    else:
        first = rng.integers(turns)
        count, shift = rng.integers(1, 5), rng.normal(0.0, spread)
        for m in range(first, min(first + count, turns)):
            shifted[copy, kind, m] += shift
    return shifted


def test_due_times_are_shifted_for_copies_kinds_later_stages_ops_or_micro_batches():
    """By up to some of the pace, and the original stays."""
    for seed in range(150):
        rng = np.random.default_rng(seed)
        due = rng.random((4, 3, 6))
        before = due.copy()
        pace = float(rng.uniform(0.5, 9))
        shape = Shape(np.zeros((4, 3)), np.zeros((4, 3)), pace, np.ones(2))
        shifted = _shifted_due(due, shape, np.random.default_rng(seed + 1000))
        expected = slow_shift(due, pace, np.random.default_rng(seed + 1000))
        assert shifted == pytest.approx(expected, rel=1e-12)
        assert np.array_equal(due, before)


def test_stages_that_save_nothing_change_caps_by_the_largest_size_or_by_one():
    """A step of 0 would change no cap."""
    for memory, step in (((0.0, 2.0), 2.0), ((0.0, 0.0), 1.0)):
        costs = Costs(forward=(1.0,) * 2, activation_bytes=memory)
        spec = problem_of(costs, 4, Constraints("linear", 100)).spec((4,))
        shape = Shape.of(spec)
        rule = Rule(np.zeros((2, 3, 4)), np.zeros(1), np.full(2, 4.0), np.zeros((2, 4), np.int64))
        steps = set()
        for seed in range(200):
            after = neighbour(rule, spec, shape, np.random.default_rng(seed))
            most = [size * 4 for size in memory]
            for rank in np.flatnonzero(after.cap != rule.cap):
                steps.add((after.cap[rank] - min(4.0, most[rank])) / step)
        assert {1.0, 2.0} <= steps
        assert all(number == int(number) for number in steps)
