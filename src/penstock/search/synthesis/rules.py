"""Rules for list scheduling: the well-known ones, and others near a rule that did well."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from penstock.search.synthesis.arrays import (
    DOWN,
    HOLD,
    UP,
    B,
    F,
    Floats,
    I,
    Ints,
    Spec,
    W,
    Words,
    Work,
)
from penstock.search.synthesis.build import Rule


@dataclass(frozen=True)
class Shape:
    """One micro-batch alone, and the pace of many.

    Attributes:
        head, tail: (C, 3) seconds before and after F, backward and W of each copy.
        pace: seconds of the busiest rank for one micro-batch of every route.
        need: (R,) what a rank must be able to hold.
    """

    head: Floats
    tail: Floats
    pace: float
    need: Floats

    @classmethod
    def of(cls, spec: Spec) -> Shape:
        """The shape of a problem."""
        copies = len(spec.copies)
        stages = copies // len(spec.counts)
        head, tail = np.zeros((copies, 3)), np.zeros((copies, 3))
        cost = spec.cost
        for first in range(0, copies, stages):
            row = range(first, first + stages)
            for copy in row:
                if copy > first:
                    head[copy, F] = head[copy - 1, F] + cost[copy - 1, F] + cost[copy - 1, UP]
                    tail[copy, I] = tail[copy - 1, I] + cost[copy - 1, I] + cost[copy, DOWN]
                tail[copy, I] = max(tail[copy, I], cost[copy, W])
            for copy in reversed(row):
                if copy == row[-1]:
                    head[copy, I] = head[copy, F] + cost[copy, F]
                    tail[copy, F] = tail[copy, I] + cost[copy, I]
                else:
                    head[copy, I] = head[copy + 1, I] + cost[copy + 1, I] + cost[copy + 1, DOWN]
                    tail[copy, F] = tail[copy + 1, F] + cost[copy + 1, F] + cost[copy, UP]
                head[copy, W] = head[copy, I] + cost[copy, I]
        held = [[copy for copy in row if copy >= 0] for row in spec.copies_of]
        pace = max(float(cost[row, : W + 1].sum()) for row in held) / len(spec.counts) or 1.0
        need = [
            cost[row, HOLD].sum() if len(spec.counts) == 1 else cost[row, HOLD].max()
            for row in held
        ]
        return cls(head, tail, pace, np.array(need))


def known(spec: Spec, shape: Shape, wholes: list[Ints]) -> Iterator[Rule]:
    """Rules worth a try anywhere: backwards first, forwards first, by what is left, by what a block
    repeated would be.
    """
    far = 10.0 * (shape.pace + 1.0) * (spec.counts.max() + len(spec.copies))
    kinds = [
        (0.0, -far, far),
        (0.0, -far, -2 * far),
        (-far, 0.0, far),
        (0.0, 0.0, 0.0),
        (0.0, 0.0, far),
    ]
    offsets = [np.array(each) - shape.tail for each in kinds]
    offsets += [np.array(each) + shape.head for each in kinds]
    offsets += [shape.head + np.array([0.0, 0.0, lag * shape.pace]) for lag in (1, 2, 4)]
    turns = shape.pace * np.arange(spec.counts.max())
    for offset, patience, cap, whole in product(
        offsets, (0.0, 0.5, 1.0), caps(spec, shape), wholes
    ):
        yield Rule(offset[:, :, None] + turns, np.array([patience]), cap, whole)


def as_played(spec: Spec, words: Words, work: Work) -> Rule:
    """The rule by which ops are due when the words, which were just played, start them."""
    due = np.zeros((len(spec.copies), 3, int(spec.counts.max())))
    whole = np.zeros((len(spec.copies), int(spec.counts.max())), np.int64)
    turn = np.zeros((len(spec.copies), 3), np.int64)
    for rank, length in enumerate(words.lengths):
        for code, start in zip(words.codes[rank, :length], work.start[rank, :length], strict=True):
            copy, kind = divmod(int(code), 4)
            for half in (I, W) if kind == B else (kind,):
                if half == I and kind == B:
                    whole[copy, turn[copy, I]] = 1
                due[copy, half, turn[copy, half]] = start
                turn[copy, half] += 1
    return Rule(due, np.ones(1), spec.limit.copy(), whole)


def caps(spec: Spec, shape: Shape) -> list[Floats]:
    """The limits; and what covers a micro-batch's way up and back, once and one and a half times."""
    way = np.zeros(len(spec.limit))
    for copy, (rank, *_) in enumerate(spec.copies):
        way[rank] += (
            spec.cost[copy, HOLD]
            * (shape.head[copy, W] - shape.head[copy, F])
            / shape.pace
            / len(spec.counts)
        )
    found = [spec.limit]
    for times, more in ((1.0, 0.0), (1.0, 1.0), (1.5, 1.0)):
        units = np.ceil(times * way / np.maximum(shape.need, 1e-300)) + more
        cap = np.minimum(spec.limit, np.maximum(shape.need, units * shape.need))
        if not any(np.array_equal(cap, other) for other in found):
            found.append(cap)
    return found


def wholes(spec: Spec, split: bool) -> list[Ints]:
    """Which backwards not to split: none where halves cost no more; else none, all, and all but a
    stage's last few.
    """
    none = np.zeros((len(spec.copies), int(spec.counts.max())), np.int64)
    if not split:
        return [none + 1]
    cheaper = spec.cost[:, B] < (spec.cost[:, I] + spec.cost[:, W]) * (1 - 1e-12)
    if not cheaper.any():
        return [none]
    stages = len(spec.copies) // len(spec.counts)
    number, stage = np.arange(none.shape[1])[None, :], (np.arange(len(none)) % stages)[:, None]
    counts = np.repeat(spec.counts, stages)[:, None]
    found = [none, none + 1]
    for last in (1, 2):
        found.append((number < counts - last * (stages - stage)).astype(np.int64))
        found.append((number < counts - last * stage).astype(np.int64))
    return [np.where(cheaper[:, None], each, 0) for each in found]


def near(rule: Rule, spec: Spec, shape: Shape, luck: np.random.Generator) -> Rule:
    """A rule like another one: some ops due earlier or later, another patience, a rank that holds
    more or less.
    """
    due, patience, cap, whole = rule.due.copy(), rule.patience.copy(), rule.cap.copy(), rule.whole
    spread = shape.pace * 10 ** luck.uniform(-1.5, 0.8)
    copy, kind = luck.integers(len(due)), luck.integers(3)
    scope = luck.integers(5)
    if scope == 0:
        due += (
            luck.normal(0.0, spread, due.shape[:2])[:, :, None]
            * (luck.random(due.shape[:2]) < 0.2)[:, :, None]
        )
    elif scope == 1:
        due[:, kind] += luck.normal(0.0, spread)
    elif scope == 2:
        due[copy:] += (
            luck.normal(0.0, spread, (3, 1)) if luck.random() < 0.5 else luck.normal(0.0, spread)
        )
    elif scope == 3:
        due += luck.normal(0.0, spread, due.shape) * (
            luck.random(due.shape) < 10 ** luck.uniform(-2, -0.5)
        )
    else:
        first = luck.integers(due.shape[2])
        due[copy, kind, first : first + luck.integers(1, 5)] += luck.normal(0.0, spread)
    if luck.random() < 0.3:
        patience[0] = luck.choice([0.0, 0.25, 0.5, 0.75, 1.0])
    if luck.random() < 0.4:
        rank = luck.integers(len(cap))
        step = spec.cost[:, HOLD].min() or spec.cost[:, HOLD].max() or 1.0
        most = sum(
            float(spec.cost[copy, HOLD]) for copy in spec.copies_of[rank] if copy >= 0
        ) * float(spec.counts.max())
        cap[rank] = min(
            max(shape.need[rank], min(cap[rank], most) + step * luck.integers(-2, 3)),
            spec.limit[rank],
        )
    if whole.any() and not whole.all() and luck.random() < 0.3:
        copy = luck.integers(len(whole))
        whole = whole.copy()
        whole[copy] = np.roll(whole[copy], luck.integers(-2, 3))
    return Rule(due, patience, cap, whole)
