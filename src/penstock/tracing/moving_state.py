"""Detection of state that forwards both change and read, such as the means of a codebook.

One process runs all micro-batches in turn, and each reads what the earlier ones have written.
Replicas of a layer read only what their own forwards have written, so they train to other numbers.
State that is only written (batch norm's running statistics in training, recorded values) does not
matter, nor do values that a forward computes once and reuses (a cache of positions).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from penstock.modules.data_flow import DataFlow, has_custom_function
from penstock.modules.deferred_batch_norm import DeferredBatchNorm
from penstock.modules.module_state import Content, ModuleState, content, differing_names
from penstock.modules.side_loss import collect_side_losses
from penstock.modules.state_names import full_name
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
    """Result of observing one forward.

    Attributes:
        output: the output of the forward.
        findings: descriptions of the state that it changes and reads.
        changed: names of the buffers that it has changed.
    """

    output: Any
    findings: tuple[str, ...]
    changed: frozenset[str]


def observe(
    state: ModuleState,
    run: Callable[[], Any],
    rerun: Callable[[], Any] | None,
    *,
    follow: bool = True,
) -> Observation:
    """Run a forward, and find the state that it both changes and reads.

    Args:
        state: state of the modules that run.
        run: the forward.
        rerun: the same forward on the same inputs with the same random numbers, to test Python
            state. It is called only if such state has changed, without gradients and on copies of
            the buffers. None if the forward cannot be repeated.
        follow: follow the data flow from op to op, which is not possible in compiled code.
    """
    contents, weights, values = state.buffer_contents(), state.weight_marks(), state.values()
    buffers = state.buffers()
    flow = DataFlow(buffers if follow else {})
    output, side_losses = _run_followed(run, flow if follow else nullcontext())
    findings = [
        f"weight {name} is changed by the forward itself"
        for name in differing_names(weights, state.weight_marks())
    ]
    changed = differing_names(contents, state.buffer_contents())
    harmless = _running_statistics(state)
    read = flow.names_in((output, side_losses)) | flow.read_by_python
    suspects, unread = [], []
    for name in changed:
        if name in read:
            suspects.append(name)
        elif name in harmless:
            pass
        elif _is_unfollowed(name, buffers, state, flow, follow=follow):
            suspects.append(name)
        else:
            unread.append(name)
    # Changed, and not read by this forward: only a backward of the user's could still read it.
    if unread and _may_read_backwards(state, output, rerun):
        suspects += unread
    findings += [f"buffer {name} is changed by a forward and read by the next" for name in suspects]
    findings += _moving_values(state, values, rerun)
    findings += _sparse_tables(state, flow)
    return Observation(output, tuple(findings), frozenset(changed))


def _run_followed(
    run: Callable[[], Any], context: AbstractContextManager[Any]
) -> tuple[Any, list[Tensor]]:
    """Run a forward in a context; return its output and its side losses."""
    side_losses: list[Tensor] = []
    outer = collect_side_losses(side_losses)
    try:
        with context:
            output = run()
    finally:
        collect_side_losses(outer)
    if outer is not None:
        outer.extend(side_losses)
    return output, side_losses


def steady_buffers(
    state: ModuleState, changed: frozenset[str]
) -> list[tuple[str, dict[str, Any], str]]:
    """Return the buffers that a forward did not change, without running statistics.

    Returns:
        For each: its name, the dict that contains it, and its key there.
    """
    unsteady = changed | _running_statistics(state)
    return [
        (full_name(path, key), module._buffers, key)
        for path, module in state.modules
        for key, buffer in module._buffers.items()
        if buffer is not None and key not in _STATISTICS and full_name(path, key) not in unsteady
    ]


def _running_statistics(state: ModuleState) -> frozenset[str]:
    """Return the names of the buffers of torch's own batch norms, and of ours."""
    return frozenset(
        full_name(path, key)
        for path, module in state.modules
        if isinstance(module, (_BatchNorm, _InstanceNorm))
        and type(module).forward in _STATISTICS_FORWARDS
        and "forward" not in vars(module)
        for key in module._buffers
    )


def _is_unfollowed(
    name: str, before: Mapping[str, Tensor], state: ModuleState, flow: DataFlow, *, follow: bool
) -> bool:
    """Return whether a buffer was changed in a way that is not followed.

    Then reads of it may have been missed too.
    """
    if not follow:
        return True
    return state.buffers().get(name) is before.get(name) and name not in flow.written


def _may_read_backwards(state: ModuleState, output: Any, rerun: Callable[[], Any] | None) -> bool:
    """Return whether the backward runs the user's code, which may read any state."""
    if not torch.is_grad_enabled():  # no graph: this forward will run again before its backward
        if rerun is None:
            return True
        snapshots = state.keep()
        with _on_copies(state), torch.enable_grad():
            output = rerun()
        state.put_back(snapshots)
    return has_custom_function(output)


def _moving_values(
    state: ModuleState, before: Mapping[str, Content], rerun: Callable[[], Any] | None
) -> list[str]:
    """Return descriptions of the Python variables that a second forward changes again."""
    values = state.values()
    moving = differing_names(before, values)
    if not moving:
        return []
    if rerun is not None:
        snapshots = state.keep()
        with _on_copies(state), torch.no_grad():
            # A cache is filled once: only what the second forward changes again moves on.
            output = rerun()
            second_values = state.values()
            moving = differing_names(values, second_values)
            # A list that only records, such as shapes or losses, does not change the next output.
            recorded = [name for name in moving if _is_container(second_values.get(name))]
            if recorded and content(output) == content(rerun()):
                moving = [name for name in moving if name not in recorded]
        state.put_back(snapshots)
    return [f"{name} is changed by every forward" for name in moving]


def _sparse_tables(state: ModuleState, flow: DataFlow) -> list[str]:
    """Return descriptions of weights whose sparse gradients are not declared by their modules.

    Replicas would not know how to add these gradients.
    """
    declared = {
        id(module.weight)
        for _, module in state.modules
        if keeps_sparse_gradients(module) and isinstance(module.weight, Tensor)
    }
    sparse = {id(table) for table in flow.sparse} - declared
    return [
        f"weight {name} has sparse gradients and is not the weight of an nn.Embedding or "
        "nn.EmbeddingBag"
        for name, weight in state.weights().items()
        if id(weight) in sparse
    ]


def _is_container(value: Content) -> bool:
    """Return whether a digest is that of a container, to which values may only be appended."""
    return isinstance(value, tuple) and bool(value) and value[0] in _CONTAINERS


@contextmanager
def _on_copies(state: ModuleState) -> Iterator[None]:
    """Replace the buffers by copies in this context, and discard side losses."""
    originals = [
        (module._buffers, key, buffer)
        for _, module in state.modules
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]
    copies: dict[int, Tensor] = {}
    outer = collect_side_losses([])
    try:
        for holder, key, buffer in originals:
            # One copy per buffer, so that a buffer of two modules stays shared.
            holder[key] = copies.setdefault(id(buffer), buffer.detach().clone())
        yield
    finally:
        collect_side_losses(outer)
        for holder, key, buffer in originals:
            holder[key] = buffer
