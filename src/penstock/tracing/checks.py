"""Value checks in a model's forward: `if labels.max() >= limit: raise ValueError(...)`, `assert`.

Tensors have no values while a model is traced, so a branch on a value cannot be decided. If the
other side of the branch only raises an error, the trace takes the branch on which the check passes,
and the check becomes an op of the graph that fails when a batch fails it.

The instructions that are read here are those of Python's compiler: a condition is located in the
source by the positions in the code object.
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

#: Largest number of instructions, with their caches, between the one that evaluates a truth value
#: and the jump that depends on it (measured for Python 3.13).
_MAX_DISTANCE = 6


def passing(frame: FrameType | None) -> bool | None:
    """Return the truth value for which the check that a frame is evaluating passes.

    Args:
        frame: frame of the Python code that evaluates the truth of a value.

    Returns:
        None if the frame evaluates something other than a check.
    """
    if frame is None:
        return None
    code, offset = frame.f_code, frame.f_lasti
    span = _spans(code).get(offset)
    if span is None:
        return None
    for statement, test, passing_value in _checks(code.co_filename):
        statement_span, test_span = _span_of(statement), _span_of(test)
        if span != statement_span and not _within(span, test_span):
            continue
        leaves = list(_leaves(test, passing_value, exact=True))
        for leaf, leaf_value, exact in leaves:
            if exact and _calls_bool(leaf, span):
                return leaf_value
        jumps = _jumps_within(code, statement_span, test_span)
        return _value_of_leaf(leaves, jumps, offset)
    return None


def _jumps_within(code: CodeType, statement_span: _Span, test_span: _Span) -> list[int]:
    """Return the offsets of the conditional jumps of one check."""
    spans = _spans(code)
    jumps = []
    for offset in _jumps(code):
        span = spans[offset]
        if span is not None and (span == statement_span or _within(span, test_span)):
            jumps.append(offset)
    return jumps


def record_check(value: Tensor, *, passes: bool, frame: FrameType) -> None:
    """Record a check as an op of the graph, which fails if the truth of `value` is not `passes`."""
    truth = value if value.dtype is torch.bool else value != 0
    torch._assert_async(truth if passes else ~truth, place_of(frame))


def record_sizes(value: Any, *, passes: bool) -> None:
    """Record a check on sizes that depend on values of tensors, like `record_check`."""
    module: Any = torch
    module._check(value if passes else module.sym_not(value))


def place_of(frame: FrameType) -> str:
    """Return the message of a failed check, with its file and line."""
    name, line = frame.f_code.co_filename, frame.f_lineno
    text = linecache.getline(name, line).strip()
    return (
        f"{name}:{line}: `{text}`: this check of the model's has failed for a value of this batch"
    )


@lru_cache(maxsize=256)
def _spans(code: CodeType) -> dict[int, _Span | None]:
    """Return the source position of every instruction, by its offset."""
    spans: dict[int, _Span | None] = {}
    for index, (first, last, begin, end) in enumerate(code.co_positions()):
        # There is one position for each unit of two bytes, caches included.
        is_complete = None not in (first, last, begin, end)
        span = (first, last, begin, end) if is_complete else None
        spans[2 * index] = span  # type: ignore[assignment]
    return spans


@lru_cache(maxsize=256)
def _jumps(code: CodeType) -> list[int]:
    """Return the offsets of all conditional jumps."""
    return [
        instruction.offset
        for instruction in dis.get_instructions(code)
        if "JUMP" in instruction.opname and "_IF_" in instruction.opname
    ]


def _span_of(node: ast.stmt | ast.expr) -> _Span:
    """Return the source position of a syntax node."""
    return node.lineno, node.end_lineno or node.lineno, node.col_offset, node.end_col_offset or 0


def _within(inner: _Span, outer: _Span) -> bool:
    """Return whether one source position lies within another."""
    first, last, begin, end = inner
    outer_first, outer_last, outer_begin, outer_end = outer
    return (outer_first, outer_begin) <= (first, begin) and (last, end) <= (outer_last, outer_end)


@lru_cache(maxsize=64)
def _checks(filename: str) -> list[tuple[ast.stmt, ast.expr, bool]]:
    """Return the checks in a file.

    Returns:
        For each statement whose only effect is to raise an error: the statement, its condition, and
            the truth value of the condition for which no error is raised.
    """
    try:
        tree = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        # The file is no Python source, or has changed since the code was compiled.
        return []
    checks: list[tuple[ast.stmt, ast.expr, bool]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            checks.append((node, node.test, True))
        elif isinstance(node, ast.If) and _only_raises(node.body):
            checks.append((node, node.test, False))
        elif isinstance(node, ast.If) and _only_raises(node.orelse):
            checks.append((node, node.test, True))
    return checks


def _only_raises(body: list[ast.stmt]) -> bool:
    """Return whether a block ends in a raise, after at most statements that build its message."""
    return (
        bool(body)
        and isinstance(body[-1], ast.Raise)
        and all(
            isinstance(statement, (ast.Expr, ast.Assign, ast.AnnAssign)) for statement in body[:-1]
        )
    )


def _calls_bool(leaf: ast.expr, span: _Span) -> bool:
    """Return whether a part of a condition is the call `bool(...)` at a source position.

    A call nested further inside may use its result in any way.
    """
    return (
        isinstance(leaf, ast.Call)
        and isinstance(leaf.func, ast.Name)
        and leaf.func.id == "bool"
        and _span_of(leaf) == span
    )


def _value_of_leaf(
    leaves: list[tuple[ast.expr, bool, bool]], jumps: list[int], offset: int
) -> bool | None:
    """Return the passing value of the leaf whose jump is at, or right behind, an offset.

    The leaves of a condition are evaluated in order, with one jump each. The code of a `finally`
    block occurs several times, so the jumps may be a multiple of the leaves.
    """
    jump = next((jump for jump in jumps if jump >= offset), None)
    if jump is None or jump - offset > 2 * _MAX_DISTANCE or len(jumps) % len(leaves):
        return None
    _, passing_value, exact = leaves[jumps.index(jump) % len(leaves)]
    return passing_value if exact else None


def _leaves(
    test: ast.expr, passing_value: bool, *, exact: bool
) -> Iterator[tuple[ast.expr, bool, bool]]:
    """Yield the parts of a condition that are evaluated one by one.

    For each: the part, its truth value for which the check passes, and whether that is the only
    value for which it passes. For `a or b` to be false, both must be false. For `a and b` to be
    false, b must be false if it is evaluated, since then a is true; the value of a depends on b.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _leaves(test.operand, not passing_value, exact=exact)
    elif isinstance(test, ast.BoolOp):
        needs_all = isinstance(test.op, ast.And) is passing_value
        *others, last = test.values
        for operand in others:
            yield from _leaves(operand, passing_value, exact=exact and needs_all)
        yield from _leaves(last, passing_value, exact=exact)
    elif isinstance(test, ast.Compare):
        # A chained comparison is a conjunction of its comparisons.
        for _ in test.ops[:-1]:
            yield test, passing_value, exact and passing_value
        yield test, passing_value, exact
    else:
        yield test, passing_value, exact
