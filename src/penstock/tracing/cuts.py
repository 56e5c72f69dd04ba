"""Division of a captured graph into layers: one for every module with weights of its own.

A layer also gets the ops around its module. Ops run in a fixed order, so a cut between any two of
them is valid, unless values that share memory would be sent separately and one of them is changed
later. Between two modules with weights the cut is placed where the fewest bytes cross; of cuts with
equally many bytes the last is taken, so that an activation function stays with the layer that
computes its input.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import fx, nn

from penstock.errors import ChainError
from penstock.tracing.flow import Flow
from penstock.tracing.ops import is_heavy

#: Path of a module, and the number of its call among the calls that use its weights, from 1. The
#: same in all graphs of a model.
Key = tuple[str, int]


@dataclass(frozen=True)
class Group:
    """Ops that use the weights of one call of a module.

    Attributes:
        key: the call.
        first, last: indices of the first and the last op in the order.
    """

    key: Key
    first: int
    last: int


def stack_of(node: fx.Node) -> list[tuple[str, str]]:
    """Return the modules in whose forward an op ran, outermost first.

    For each: an identifier of the call, and the qualified name in the model.
    """
    stack: Mapping[str, tuple[str, object]] = node.meta.get("nn_module_stack") or {}
    return [
        (call, _inner(path))
        for call, (path, _) in stack.items()
        if path == "model" or path.startswith("model.")
    ]


def _inner(path: str) -> str:
    """Return a path in the module stack as the qualified name in the user's model."""
    return path.removeprefix("model").removeprefix(".").partition("@")[0]


def groups_of(flow: Flow, model: nn.Module) -> list[Group]:
    """Return the calls of modules with weights that justify a layer, in order."""
    runs = _runs_with_weights(flow)
    groups: list[Group] = []
    calls: dict[str, int] = {}
    for run in runs:
        if run.is_heavy or _is_leaf(model, run.path):
            calls[run.path] = calls.get(run.path, 0) + 1
            groups.append(Group((run.path, calls[run.path]), run.first, run.last))
    return groups


@dataclass
class _Run:
    """Consecutive ops with weights in one call of a module."""

    call: str
    path: str
    first: int
    last: int
    is_heavy: bool


def _runs_with_weights(flow: Flow) -> list[_Run]:
    """Return the runs of consecutive ops with weights that belong to one call of a module."""
    runs: list[_Run] = []
    for index, node in enumerate(flow.order):
        weights = [
            source
            for source in node.all_input_nodes
            if source in flow.weights and source not in flow.recomputed
        ]
        if not weights:
            continue
        call, path = (stack_of(node) or [("", "")])[-1]
        # An op in the forward of the model itself belongs to the module whose weights it uses.
        path = path or flow.weights[weights[0]].rpartition(".")[0]
        if runs and (runs[-1].call, runs[-1].path) == (call, path):
            runs[-1].last = index
            runs[-1].is_heavy |= is_heavy(node)
        else:
            runs.append(_Run(call, path, index, index, is_heavy(node)))
    return runs


def _is_leaf(model: nn.Module, path: str) -> bool:
    """Return whether a path is that of a module without submodules."""
    try:
        return path != "" and not any(True for _ in model.get_submodule(path).children())
    except AttributeError:
        return False


def common_keys(one: Sequence[Key], other: Sequence[Key]) -> list[Key]:
    """Return keys that occur in both sequences in the same order (difflib's matching blocks)."""
    matcher = difflib.SequenceMatcher(None, one, other, autojunk=False)
    return [
        key
        for block in matcher.get_matching_blocks()
        for key in one[block.a : block.a + block.size]
    ]


def cut(
    flow: Flow, groups: Sequence[Group], keys: Sequence[Key], home: Mapping[str, int]
) -> list[int | None]:
    """Return for each key the index of the first op of its layer.

    Args:
        flow: the graph to cut.
        groups: from `groups_of`.
        keys: keys of the layers, in order; the first layer begins with the first op. The layer of a
            key that this graph does not have is empty: it begins where the next layer begins.
        home: for weights that belong to a layer already, its index: ops that use them must be in
            this layer.

    Returns:
        Indices in `flow.order`; None if there is no valid cut between a group and the previous one.
    """
    group_of = {group.key: index for index, group in enumerate(groups)}
    constraints = _SharedMemory.of(flow)
    windows = _windows(flow, len(keys), home)
    begins: list[int | None] = []
    next_begin = len(flow.order)
    # From the last layer to the first, because an empty layer begins where the next one does.
    for number in range(len(keys) - 1, -1, -1):
        group = group_of.get(keys[number])
        if group is None:
            begins.append(next_begin)
            continue
        if number == 0:
            begins.append(0)
            continue
        earliest, latest = windows[number]
        previous_end = groups[group - 1].last + 1 if group > 0 else 0
        candidates = range(
            max(previous_end, earliest), min(groups[group].first, next_begin, latest) + 1
        )
        valid = [position for position in candidates if constraints.allows(position)]
        begin = None
        if valid:
            # The fewest bytes; of equal cuts the last.
            begin = min(valid, key=lambda position: (flow.crossing[position], -position))
            next_begin = begin
        begins.append(begin)
    return begins[::-1]


@dataclass(frozen=True)
class _SharedMemory:
    """Memory that is changed in place and shared by several values.

    Attributes:
        spans: for each such memory the index of the last op that changes it, and for each value in
            it the indices of the op that makes it (-1 for an input) and of its last use.
    """

    spans: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]

    @classmethod
    def of(cls, flow: Flow) -> _SharedMemory:
        """Return the shared memory of a graph."""
        last_change: dict[int, int] = {}
        for index, changed in sorted(flow.changes.items()):
            last_change.update(dict.fromkeys(changed, index))
        values: dict[int, list[tuple[int, int]]] = {memory: [] for memory in last_change}
        for index, node in [*((-1, node) for node in flow.inputs), *enumerate(flow.order)]:
            memory = flow.memory_of[node]
            # A value that no op uses crosses no cut.
            if memory in values and node in flow.last_use:
                values[memory].append((index, flow.last_use[node]))
        return cls(
            tuple(
                (last_change[memory], tuple(spans))
                for memory, spans in values.items()
                if len(spans) > 1
            )
        )

    def allows(self, cut: int) -> bool:
        """Return whether a cut before op `cut` is valid.

        It is not if two values cross it that share memory which is changed after the cut: they
        would be sent as two separate tensors.
        """
        for last_change, spans in self.spans:
            crossing = sum(definition < cut <= last_use for definition, last_use in spans)
            if last_change >= cut and crossing >= 2:
                return False
        return True


def _windows(flow: Flow, count: int, home: Mapping[str, int]) -> list[tuple[int, int]]:
    """Return for each layer its earliest and its latest possible begin.

    With these, every op is in the layer to which its weights belong.
    """
    first, last = [len(flow.order)] * count, [-1] * count
    for index, node in enumerate(flow.order):
        for source in node.all_input_nodes:
            if source in flow.recomputed:
                continue
            layer = home.get(flow.weights.get(source, ""))
            if layer is not None:
                first[layer] = min(first[layer], index)
                last[layer] = max(last[layer], index)
    return [(max(last[:number], default=-1) + 1, min(first[number:])) for number in range(count)]


def segments_of(
    flow: Flow, model: nn.Module, keys: Sequence[Key], home: Mapping[str, int]
) -> list[range]:
    """Return the range of ops of every layer.

    Raises:
        ChainError: for inputs of this form the model uses its weights in another order.
    """
    begins = cut(flow, groups_of(flow, model), keys, home)
    bounds: list[int] = []
    for begin, key in zip(begins, keys, strict=True):
        if begin is None or (bounds and begin < bounds[-1]):
            raise ChainError(
                f"for inputs of this form the model runs {key[0]} in another order than for the "
                "example, so that its layers differ: make a chain for inputs of this form"
            )
        bounds.append(begin)
    bounds = [0, *bounds[1:], len(flow.order)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def layer_keys(flows: Sequence[Flow], model: nn.Module) -> list[Key]:
    """Return the keys of the finest division into layers that all graphs of a model allow.

    There is at least one.
    """
    grouped = [groups_of(flow, model) for flow in flows]
    keys = [group.key for group in grouped[0]]
    for groups in grouped[1:]:
        keys = common_keys(keys, [group.key for group in groups])
    for flow, groups in zip(flows, grouped, strict=True):
        begins = cut(flow, groups, keys, {})
        keys = [key for key, begin in zip(keys, begins, strict=True) if begin is not None]
    return keys or [("", 1)]
