"""Checks of values in a model's forward: `if labels.max() >= limit: raise ValueError(...)` and
`assert`.

While a model is traced its tensors have no values, so that a branch on one cannot be decided. Where
the other side of the branch only raises, there is one way to go on: the branch is taken as if the
check passed, and the check itself becomes an op of the graph, which fails when a batch fails it.
"""

from __future__ import annotations

import ast
import dis
import linecache
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

#: First line, last line, first column, last column.
_Span = tuple[int, int, int, int]

#: Instructions, with their caches, between the one that asks for a truth and the jump that goes by
#: it, in Python 3.13.
_DISTANCE = 6


def passing(frame: FrameType | None) -> bool | None:
    """Which truth value lets the check pass that a frame is about to decide; None where it decides
    something else than a check.

    Args:
        frame: of the Python code that asks for the truth of a value.
    """
    if frame is None:
        return None
    code, offset = frame.f_code, frame.f_lasti
    spans = _spans(code)
    span = spans.get(offset)
    if span is None:
        return None
    for statement, test, wanted in _checks(code.co_filename):
        whole, inner = _span_of(statement), _span_of(test)
        if span == whole or _within(span, inner):
            leaves = list(_leaves(test, wanted, exact=True))
            called = [sign for leaf, sign, exact in leaves if exact and _calls_bool(leaf, span)]
            if called:
                return called[0]
            jumps = [
                at
                for at in _jumps(code)
                if (there := spans[at]) is not None and (there == whole or _within(there, inner))
            ]
            return _answer(leaves, jumps, offset)
    return None


def record_check(value: Tensor, *, passes: bool, frame: FrameType) -> None:
    """Make an op of a check: it fails when the truth of `value` is not `passes`."""
    truth = value if value.dtype is torch.bool else value != 0
    torch._assert_async(truth if passes else ~truth, place_of(frame))


def record_sizes(value: Any, *, passes: bool) -> None:
    """The same for a condition on numbers that were read from tensors."""
    module: Any = torch
    module._check(value if passes else module.sym_not(value))


def place_of(frame: FrameType) -> str:
    """The failing check in words, with its file and line."""
    name, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(name, line).strip()
    return (
        f"{name}:{line}: `{text}`: this check of the model's has failed for a value of this batch"
    )


@lru_cache(maxsize=256)
def _spans(code: CodeType) -> dict[int, _Span | None]:
    """By offset of an instruction, where it stands in the source."""
    found: dict[int, _Span | None] = {}
    for index, (first, last, begin, end) in enumerate(code.co_positions()):
        known = first is not None and last is not None and begin is not None and end is not None
        found[2 * index] = (first, last, begin, end) if known else None  # type: ignore[assignment]
    return found


@lru_cache(maxsize=256)
def _jumps(code: CodeType) -> list[int]:
    """The offsets of all conditional jumps."""
    return [
        each.offset
        for each in dis.get_instructions(code)
        if "JUMP" in each.opname and "_IF_" in each.opname
    ]


def _span_of(node: ast.stmt | ast.expr) -> _Span:
    return node.lineno, node.end_lineno or node.lineno, node.col_offset, node.end_col_offset or 0


def _within(inner: _Span, outer: _Span) -> bool:
    return (outer[0], outer[2]) <= (inner[0], inner[2]) and (inner[1], inner[3]) <= (
        outer[1],
        outer[3],
    )


@lru_cache(maxsize=64)
def _checks(filename: str) -> list[tuple[ast.stmt, ast.expr, bool]]:
    """Per statement of a file that only checks: it, its test, and the truth of that with which
    nothing is raised.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return []
    found: list[tuple[ast.stmt, ast.expr, bool]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            found.append((node, node.test, True))
        elif isinstance(node, ast.If) and _only_raises(node.body):
            found.append((node, node.test, False))
        elif isinstance(node, ast.If) and _only_raises(node.orelse):
            found.append((node, node.test, True))
    return found


def _only_raises(body: list[ast.stmt]) -> bool:
    """Whether a block ends in a raise, and before it at most puts its message together."""
    return (
        bool(body)
        and isinstance(body[-1], ast.Raise)
        and all(isinstance(each, (ast.Expr, ast.Assign, ast.AnnAssign)) for each in body[:-1])
    )


def _calls_bool(leaf: ast.expr, span: _Span) -> bool:
    """Whether a part of a test is the call `bool(...)` at a place: a call further inside may make
    anything of its answer.
    """
    return (
        isinstance(leaf, ast.Call)
        and isinstance(leaf.func, ast.Name)
        and leaf.func.id == "bool"
        and _span_of(leaf) == span
    )


def _answer(
    leaves: list[tuple[ast.expr, bool, bool]], jumps: list[int], offset: int
) -> bool | None:
    """The truth that is wanted of the part whose jump stands at an offset, or right behind it.

    Parts of a test are decided in their order, with one jump each; a `finally` stands in the code
    several times.
    """
    at = next((jump for jump in jumps if jump >= offset), None)
    if at is None or at - offset > 2 * _DISTANCE or len(jumps) % len(leaves):
        return None
    _, sign, exact = leaves[jumps.index(at) % len(leaves)]
    return sign if exact else None


def _leaves(test: ast.expr, wanted: bool, *, exact: bool) -> Iterator[tuple[ast.expr, bool, bool]]:
    """The parts of a test that are decided one by one, each with the truth that it must have, and
    whether it must have that exactly.

    Of `a or b`, which must be false, both must be. Of `a and b`, which must be false, b alone must
    be if a is known and true; what a must be depends on b.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _leaves(test.operand, not wanted, exact=exact)
    elif isinstance(test, ast.BoolOp):
        every = isinstance(test.op, ast.And) is wanted
        for number, part in enumerate(test.values):
            last = number == len(test.values) - 1
            yield from _leaves(part, wanted, exact=exact and (every or last))
    elif isinstance(test, ast.Compare):
        for number in range(len(test.ops)):
            last = number == len(test.ops) - 1
            yield test, wanted, exact and (wanted or last)
    else:
        yield test, wanted, exact
