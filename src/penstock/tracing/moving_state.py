"""What a forward reads that forwards change: state that moves from micro-batch to micro-batch.

One process runs all micro-batches, and each finds what those before it have left. Copies of a layer
find only what their own have left, so they train to other numbers. State that is only written
(batch norm's running statistics in training, what a layer records) does not matter, nor does what a
forward makes once and finds again (a cache of positions).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from penstock.tracing.data_flow import DataFlow, has_custom_function
from penstock.tracing.deferred_batch_norm import DeferredBatchNorm
from penstock.tracing.module_state import Content, ModuleState, content, differing
from penstock.tracing.side_loss import collect_side_losses
from penstock.tracing.single_copy import keeps_sparse_gradients

#: Forwards that write running statistics and, in training, do not read them.
_STATISTICS_FORWARDS: Final = (
    _BatchNorm.forward,
    _InstanceNorm.forward,
    nn.SyncBatchNorm.forward,
    DeferredBatchNorm.forward,
)
_STATISTICS: Final = ("running_mean", "running_var", "num_batches_tracked")
_CONTAINERS: Final = ("mapping", "sequence", "set")


@dataclass(frozen=True)
class Observation:
    """What one forward has shown.

    Attributes:
        made: what it returned.
        findings: the state that it moves and reads, in words.
        changed: the buffers that it has changed, by name.
    """

    made: Any
    findings: tuple[str, ...]
    changed: frozenset[str]


def observe(
    state: ModuleState,
    run: Callable[[], Any],
    again: Callable[[], Any] | None,
    *,
    follow: bool = True,
) -> Observation:
    """Run a forward and find out which state of the modules moves.

    Args:
        state: of the modules that run.
        run: the forward.
        again: the same forward on the same inputs with the same random numbers, for state of
        Python: called, without gradients and on
            copies of the buffers, only where such state has changed. None where it cannot be run
            again.
        follow: whether to follow from op to op what is read; compiled code cannot be followed.
    """
    contents, weights, values = state.buffer_contents(), state.weight_marks(), state.values()
    buffers = state.buffers()
    flow = DataFlow(buffers if follow else {})
    sides: list[Tensor] = []
    outer = collect_side_losses(sides)
    try:
        with flow if follow else nullcontext():
            made = run()
    finally:
        collect_side_losses(outer)
    if outer is not None:
        outer.extend(sides)
    findings = [
        f"weight {name} is changed by the forward itself"
        for name in differing(weights, state.weight_marks())
    ]
    changed = differing(contents, state.buffer_contents())
    harmless = _running_statistics(state)
    doubtful = [name for name in changed if name not in harmless]
    read = flow.names_in((made, sides)) | flow.read_by_python
    suspects = [
        name
        for name in changed
        if name in read or (name in doubtful and _unseen(name, buffers, state, flow, follow=follow))
    ]
    rest = [name for name in doubtful if name not in suspects]
    if rest and _may_read_backwards(state, made, again):
        suspects += rest
    findings += [f"buffer {name} is changed by a forward and read by the next" for name in suspects]
    findings += _moving_values(state, values, again)
    findings += _sparse_tables(state, flow)
    return Observation(made, tuple(findings), frozenset(changed))


def steady_buffers(
    state: ModuleState, changed: frozenset[str]
) -> list[tuple[str, dict[str, Any], str]]:
    """The buffers that a forward has left alone and that are no running statistics: name, holder,
    key.
    """
    harmless = _running_statistics(state)
    return [
        (f"{name}.{key}" if name else key, module._buffers, key)
        for name, module in state.modules
        for key, buffer in module._buffers.items()
        if buffer is not None
        and key not in _STATISTICS
        and (f"{name}.{key}" if name else key) not in changed | harmless
    ]


def _running_statistics(state: ModuleState) -> frozenset[str]:
    """The buffers of torch's own batch norms, and ours."""
    return frozenset(
        f"{name}.{key}" if name else key
        for name, module in state.modules
        if isinstance(module, (_BatchNorm, _InstanceNorm))
        and type(module).forward in _STATISTICS_FORWARDS
        and "forward" not in vars(module)
        for key in module._buffers
    )


def _unseen(
    name: str, before: Mapping[str, Tensor], state: ModuleState, flow: DataFlow, *, follow: bool
) -> bool:
    """Whether a buffer has changed by something that is not followed, so that reads may be missing
    too.
    """
    if not follow:
        return True
    return state.buffers().get(name) is before.get(name) and name not in flow.written


def _may_read_backwards(state: ModuleState, made: Any, again: Callable[[], Any] | None) -> bool:
    """Whether the backward has code of the user's, which may read what the forward has written."""
    if not torch.is_grad_enabled():  # no graph: this forward will run again before its backward
        if again is None:
            return True
        kept = state.keep()
        with _aside(state), torch.enable_grad():
            made = again()
        state.put_back(kept)
    return has_custom_function(made)


def _moving_values(
    state: ModuleState, before: Mapping[str, Content], again: Callable[[], Any] | None
) -> list[str]:
    """Values of Python that a second forward on the same inputs changes again, in words."""
    values = state.values()
    moving = differing(before, values)
    if not moving:
        return []
    if again is not None:
        kept = state.keep()
        with _aside(state), torch.no_grad():
            first = again()
            later = state.values()
            moving = differing(values, later)
            recorded = [name for name in moving if _is_container(later.get(name))]
            if recorded and content(first) == content(again()):
                moving = [name for name in moving if name not in recorded]
        state.put_back(kept)
    return [f"{name} is changed by every forward" for name in moving]


def _sparse_tables(state: ModuleState, flow: DataFlow) -> list[str]:
    """Weights with sparse gradients, in words, whose modules do not say so: copies would not know
    how to add them up.
    """
    known = {
        id(module.weight)
        for _, module in state.modules
        if keeps_sparse_gradients(module) and isinstance(module.weight, Tensor)
    }
    sparse = {id(table) for table in flow.sparse} - known
    return [
        f"weight {name} has sparse gradients and is not the weight of an nn.Embedding or nn.EmbeddingBag"
        for name, weight in state.weights().items()
        if id(weight) in sparse
    ]


def _is_container(value: Content) -> bool:
    """Whether a value is a list or its like: something that may only be recorded in."""
    return isinstance(value, tuple) and bool(value) and value[0] in _CONTAINERS


@contextmanager
def _aside(state: ModuleState) -> Iterator[None]:
    """Let copies stand in the places of the buffers meanwhile, and side losses go nowhere."""
    own = [
        (module._buffers, key, buffer)
        for _, module in state.modules
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    copies: dict[int, Tensor] = {}
    outer = collect_side_losses([])
    try:
        for holder, key, buffer in own:
            holder[key] = copies.setdefault(id(buffer), buffer.detach().clone())
        yield
    finally:
        collect_side_losses(outer)
        for holder, key, buffer in own:
            holder[key] = buffer
