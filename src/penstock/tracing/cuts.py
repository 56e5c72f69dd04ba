"""Where a captured graph is cut into layers: one for every module with weights of its own, with the
ops around it.

Ops run in one order, so that any cut between two of them is sound; where values share memory and
one is changed later, they must stay together. Of the places between two modules with weights that
is taken where the least has to cross; of equals the last, so that an activation stays with what
made its input.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import fx, nn

from penstock.errors import ChainError
from penstock.tracing.flow import Flow, is_heavy

#: A module and how manyth of its calls, of those that use its weights: the same in all graphs of a
#: model.
Key = tuple[str, int]


@dataclass(frozen=True)
class Group:
    """Ops with weights of one call of a module: the first and the last one's index in the order."""

    key: Key
    first: int
    last: int


def stack_of(node: fx.Node) -> list[tuple[str, str]]:
    """The modules that an op ran in, outermost first: call, and qualified name in the model."""
    stack: Mapping[str, tuple[str, object]] = node.meta.get("nn_module_stack") or {}
    return [
        (call, _inner(path))
        for call, (path, _) in stack.items()
        if path == "model" or path.startswith("model.")
    ]


def _inner(path: str) -> str:
    return path.removeprefix("model").removeprefix(".").partition("@")[0]


def groups_of(flow: Flow, model: nn.Module) -> list[Group]:
    """The calls of modules with weights that are worth a layer, in order."""
    found: list[tuple[str, str, int, int, bool]] = []
    for index, node in enumerate(flow.order):
        if not any(
            used in flow.weights and used not in flow.again for used in node.all_input_nodes
        ):
            continue
        call, path = (stack_of(node) or [("", "")])[-1]
        path = path or _owner(flow, node)
        if found and found[-1][:2] == (call, path):
            found[-1] = (call, path, found[-1][2], index, found[-1][4] or is_heavy(node))
        else:
            found.append((call, path, index, index, is_heavy(node)))
    groups, calls = [], dict[str, int]()
    for _, path, first, last, heavy in found:
        if heavy or _is_leaf(model, path):
            calls[path] = calls.get(path, 0) + 1
            groups.append(Group((path, calls[path]), first, last))
    return groups


def _owner(flow: Flow, node: fx.Node) -> str:
    """What stands in no module's forward but the model's own goes by the module whose weights it
    uses.
    """
    for used in node.all_input_nodes:
        if used in flow.weights and used not in flow.again:
            return flow.weights[used].rpartition(".")[0]
    return ""


def _is_leaf(model: nn.Module, path: str) -> bool:
    try:
        return path != "" and not any(True for _ in model.get_submodule(path).children())
    except AttributeError:
        return False


def common(one: Sequence[Key], other: Sequence[Key]) -> list[Key]:
    """Keys that stand in both, in the same order."""
    matcher = difflib.SequenceMatcher(None, one, other, autojunk=False)
    return [
        key
        for block in matcher.get_matching_blocks()
        for key in one[block.a : block.a + block.size]
    ]


def cut(
    flow: Flow, groups: Sequence[Group], keys: Sequence[Key], home: Mapping[str, int]
) -> list[int | None]:
    """For each key the index in the order where its layer begins; None where no place between it
    and the group before is sound.

    Args:
        flow: what is cut.
        groups: from `groups_of`.
        keys: of the layers, in order; the first layer begins with the first op. One that this graph
        does not have begins where the next
            begins: its layer has nothing to do.
        home: of weights that have a layer already, which: an op that uses one cannot go to another.
    """
    at = {group.key: index for index, group in enumerate(groups)}
    sound = _Soundness.of(flow)
    windows = _windows(flow, len(keys), home)
    found: list[int | None] = []
    following = len(flow.order)
    for number in range(len(keys) - 1, -1, -1):
        place = at.get(keys[number])
        if place is None or number == 0:
            found.append(following if place is None else 0)
            continue
        before = groups[place - 1].last + 1 if place > 0 else 0
        low, high = (
            max(before, windows[number][0]),
            min(groups[place].first, following, windows[number][1]),
        )
        possible = [where for where in range(low, high + 1) if sound.at(where)]
        chosen = (
            min(possible, key=lambda where: (flow.crossing[where], -where)) if possible else None
        )
        found.append(chosen)
        following = following if chosen is None else chosen
    return found[::-1]


@dataclass(frozen=True)
class _Soundness:
    """By memory that is changed: when last, and of the values in it when each is made and last
    used.
    """

    spans: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]

    @classmethod
    def of(cls, flow: Flow) -> _Soundness:
        """What a graph changes."""
        last = {
            memory: index for index, changed in sorted(flow.changes.items()) for memory in changed
        }
        values: dict[int, list[tuple[int, int]]] = {memory: [] for memory in last}
        for made, node in [*((-1, node) for node in flow.inputs), *enumerate(flow.order)]:
            if flow.alike[node] in values and node in flow.last_use:
                values[flow.alike[node]].append((made, flow.last_use[node]))
        return cls(
            tuple(
                (last[memory], tuple(spans)) for memory, spans in values.items() if len(spans) > 1
            )
        )

    def at(self, where: int) -> bool:
        """Whether no two values that cross share memory which is changed behind the cut: they would
        arrive as two.
        """
        return all(
            sum(made < where <= used for made, used in spans) < 2
            for last, spans in self.spans
            if last >= where
        )


def _windows(flow: Flow, count: int, home: Mapping[str, int]) -> list[tuple[int, int]]:
    """By layer, where it can begin at the earliest and at the latest, so that every op is where the
    weights are that it uses.
    """
    first, last = [len(flow.order)] * count, [-1] * count
    for index, node in enumerate(flow.order):
        for used in node.all_input_nodes:
            layer = home.get(flow.weights.get(used, "")) if used not in flow.again else None
            if layer is not None:
                first[layer], last[layer] = min(first[layer], index), max(last[layer], index)
    return [(max(last[:number], default=-1) + 1, min(first[number:])) for number in range(count)]


def segments_of(
    flow: Flow, model: nn.Module, keys: Sequence[Key], home: Mapping[str, int]
) -> list[range]:
    """The ops of every layer.

    Raises:
        ChainError: for inputs of this form the model uses its weights in another order.
    """
    begins = cut(flow, groups_of(flow, model), keys, home)
    bounds: list[int] = []
    for begin, key in zip(begins, keys, strict=True):
        if begin is None or (bounds and begin < bounds[-1]):
            raise ChainError(
                f"for inputs of this form the model runs {key[0]} in another order than for the example, so that its layers "
                "are others: make a chain for inputs of this form"
            )
        bounds.append(begin)
    bounds = [0, *bounds[1:], len(flow.order)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


def layer_keys(flows: Sequence[Flow], model: nn.Module) -> list[Key]:
    """The layers that all graphs of a model can be cut into, the most there are; at least one."""
    grouped = [groups_of(flow, model) for flow in flows]
    keys = [group.key for group in grouped[0]]
    for groups in grouped[1:]:
        keys = common(keys, [group.key for group in groups])
    for flow, groups in zip(flows, grouped, strict=True):
        begins = cut(flow, groups, keys, {})
        keys = [key for key, begin in zip(keys, begins, strict=True) if begin is not None]
    return keys or [("", 1)]
