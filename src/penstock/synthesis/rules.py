"""Rules for list scheduling: well-known ones, and neighbours of a rule that did well."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from penstock.synthesis.arrays import (
    DOWN,
    HOLD,
    UP,
    B,
    Encoding,
    F,
    Floats,
    I,
    Ints,
    Spec,
    W,
    Workspace,
)
from penstock.synthesis.list_schedule import Rule


@dataclass(frozen=True)
class Shape:
    """Heads and tails of one micro-batch alone, the pace of many, and the least memory.

    Attributes:
        head, tail: (C, 3) seconds before and after F, backward and W of each copy.
        pace: seconds of the busiest rank for one micro-batch of every route.
        need: (R,) the least memory that a rank needs.
    """

    head: Floats
    tail: Floats
    pace: float
    need: Floats

    @classmethod
    def of(cls, spec: Spec) -> Shape:
        """Return the shape of a problem."""
        head, tail = _heads_and_tails(spec)
        pace, need = 0.0, []
        for row in spec.copies_of:
            copies = [copy for copy in row if copy >= 0]
            pace = max(pace, float(spec.cost[copies, : W + 1].sum()))
            sizes = spec.cost[copies, HOLD]
            need.append(sizes.sum() if len(spec.counts) == 1 else sizes.max())
        # The pace divides: if no op takes time, it is 1.
        return cls(head, tail, pace / len(spec.counts) or 1.0, np.array(need))


def _heads_and_tails(spec: Spec) -> tuple[Floats, Floats]:
    """Return the seconds before and after F, backward and W of each copy, for one micro-batch
    alone.
    """
    copies, cost = len(spec.copies), spec.cost
    stages = copies // len(spec.counts)
    head, tail = np.zeros((copies, 3)), np.zeros((copies, 3))
    for first in range(0, copies, stages):
        route = range(first, first + stages)
        for copy in route:
            if copy > first:
                head[copy, F] = head[copy - 1, F] + cost[copy - 1, F] + cost[copy - 1, UP]
                tail[copy, I] = tail[copy - 1, I] + cost[copy - 1, I] + cost[copy, DOWN]
            # The stage's own W, which may run after everything else, can be the longer way to the
            # end.
            tail[copy, I] = max(tail[copy, I], cost[copy, W])
        for copy in reversed(route):
            if copy == route[-1]:
                head[copy, I] = head[copy, F] + cost[copy, F]
                tail[copy, F] = tail[copy, I] + cost[copy, I]
            else:
                head[copy, I] = head[copy + 1, I] + cost[copy + 1, I] + cost[copy + 1, DOWN]
                tail[copy, F] = tail[copy + 1, F] + cost[copy + 1, F] + cost[copy, UP]
            head[copy, W] = head[copy, I] + cost[copy, I]
    return head, tail


def standard_rules(spec: Spec, shape: Shape, masks: list[Ints]) -> Iterator[Rule]:
    """Yield the standard rules: backwards first, forwards first, by the remaining path, and by the
    offsets of a repeated block.

    Args:
        spec: the problem.
        shape: its shape.
        masks: choices of backwards that are not split.
    """
    # Above any difference of due times, so that an offset of `far` orders kinds whatever the times
    # are.
    far = 10.0 * (shape.pace + 1.0) * (spec.counts.max() + len(spec.copies))
    # Offsets of F, backward and W: backwards first and W last; W even before backwards; forwards
    # first and W last; by time alone; by time, and W last.
    kinds = [
        (0.0, -far, far),
        (0.0, -far, -2 * far),
        (-far, 0.0, far),
        (0.0, 0.0, 0.0),
        (0.0, 0.0, far),
    ]
    offsets = [np.array(kind_offsets) - shape.tail for kind_offsets in kinds]
    offsets += [np.array(kind_offsets) + shape.head for kind_offsets in kinds]
    offsets += [shape.head + np.array([0.0, 0.0, lag * shape.pace]) for lag in (1, 2, 4)]
    turns = shape.pace * np.arange(spec.counts.max())
    for offset, patience, cap, whole in product(
        offsets, (0.0, 0.5, 1.0), memory_caps(spec, shape), masks
    ):
        yield Rule(offset[:, :, None] + turns, np.array([patience]), cap, whole)


def rule_of_times(spec: Spec, encoding: Encoding, work: Workspace) -> Rule:
    """Return the rule by which ops are due when these programs, just evaluated, start them."""
    due = np.zeros((len(spec.copies), 3, int(spec.counts.max())))
    whole = np.zeros((len(spec.copies), int(spec.counts.max())), np.int64)
    turn = np.zeros((len(spec.copies), 3), np.int64)
    for rank, length in enumerate(encoding.lengths):
        for code, start in zip(
            encoding.codes[rank, :length], work.start[rank, :length], strict=True
        ):
            copy, kind = divmod(int(code), 4)
            for half in (I, W) if kind == B else (kind,):
                if half == I and kind == B:
                    whole[copy, turn[copy, I]] = 1
                due[copy, half, turn[copy, half]] = start
                turn[copy, half] += 1
    return Rule(due, np.ones(1), spec.limit.copy(), whole)


def memory_caps(spec: Spec, shape: Shape) -> list[Floats]:
    """Return choices of memory to use: the limits; and what a micro-batch's path up and back needs,
    once and one and a half times.
    """
    path_memory = np.zeros(len(spec.limit))
    for copy, (rank, *_) in enumerate(spec.copies):
        path_s = shape.head[copy, W] - shape.head[copy, F]
        path_memory[rank] += spec.cost[copy, HOLD] * path_s / shape.pace / len(spec.counts)
    choices = [spec.limit]
    for factor, extra in ((1.0, 0.0), (1.0, 1.0), (1.5, 1.0)):
        # A rank whose stages save nothing needs 0 bytes of memory; 1e-300 keeps the division
        # defined.
        units = np.ceil(factor * path_memory / np.maximum(shape.need, 1e-300)) + extra
        cap = np.minimum(spec.limit, np.maximum(shape.need, units * shape.need))
        if not any(np.array_equal(cap, other) for other in choices):
            choices.append(cap)
    return choices


def unsplit_masks(spec: Spec, split: bool) -> list[Ints]:
    """Return choices of backwards that are not split: none if halves cost no more; else none, all,
    and all but a stage's last few.
    """
    none = np.zeros((len(spec.copies), int(spec.counts.max())), np.int64)
    if not split:
        return [none + 1]
    # More than rounding: B is often given as the sum of I and W.
    cheaper = spec.cost[:, B] < (spec.cost[:, I] + spec.cost[:, W]) * (1 - 1e-12)
    if not cheaper.any():
        return [none]
    stages = len(spec.copies) // len(spec.counts)
    number, stage = np.arange(none.shape[1])[None, :], (np.arange(len(none)) % stages)[:, None]
    counts = np.repeat(spec.counts, stages)[:, None]
    masks = [none, none + 1]
    for last in (1, 2):
        masks.append((number < counts - last * (stages - stage)).astype(np.int64))
        masks.append((number < counts - last * stage).astype(np.int64))
    return [np.where(cheaper[:, None], mask, 0) for mask in masks]


def neighbour(rule: Rule, spec: Spec, shape: Shape, rng: np.random.Generator) -> Rule:
    """Return a random rule near another one: some ops due earlier or later, another patience, a
    rank that uses more or less memory.
    """
    patience, cap, whole = rule.patience.copy(), rule.cap.copy(), rule.whole
    due = _shifted_due(rule.due, shape, rng)
    if rng.random() < 0.3:
        patience[0] = rng.choice([0.0, 0.25, 0.5, 0.75, 1.0])
    if rng.random() < 0.4:
        rank = rng.integers(len(cap))
        step = spec.cost[:, HOLD].min() or spec.cost[:, HOLD].max() or 1.0
        sizes = [float(spec.cost[copy, HOLD]) for copy in spec.copies_of[rank] if copy >= 0]
        most = sum(sizes) * float(spec.counts.max())
        changed = min(cap[rank], most) + step * rng.integers(-2, 3)
        cap[rank] = min(max(shape.need[rank], changed), spec.limit[rank])
    if whole.any() and not whole.all() and rng.random() < 0.3:
        copy = rng.integers(len(whole))
        whole = whole.copy()
        whole[copy] = np.roll(whole[copy], rng.integers(-2, 3))
    return Rule(due, patience, cap, whole)


def _shifted_due(original: Floats, shape: Shape, rng: np.random.Generator) -> Floats:
    """Return due times with some ops earlier or later: of random copies, of one kind, of the later
    stages, of random ops, or of a few successive micro-batches.
    """
    due = original.copy()
    # From a thirtieth of a micro-batch's time to six of them, evenly in its logarithm: which scale
    # helps differs from problem to problem.
    spread = shape.pace * 10 ** rng.uniform(-1.5, 0.8)
    copy, kind = rng.integers(len(due)), rng.integers(3)
    scope = rng.integers(5)
    if scope == 0:
        shift = rng.normal(0.0, spread, due.shape[:2])
        selected = rng.random(due.shape[:2]) < 0.2
        due += shift[:, :, None] * selected[:, :, None]
    elif scope == 1:
        due[:, kind] += rng.normal(0.0, spread)
    elif scope == 2:
        by_kind = rng.random() < 0.5
        due[copy:] += rng.normal(0.0, spread, (3, 1)) if by_kind else rng.normal(0.0, spread)
    elif scope == 3:
        shift = rng.normal(0.0, spread, due.shape)
        selected = rng.random(due.shape) < 10 ** rng.uniform(-2, -0.5)
        due += shift * selected
    else:
        first = rng.integers(due.shape[2])
        due[copy, kind, first : first + rng.integers(1, 5)] += rng.normal(0.0, spread)
    return due
