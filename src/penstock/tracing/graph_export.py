"""One run of torch.export on tensors without data, and the corrections of its graph.

torch.export silently gets some things wrong: autograd.Functions, `.data`, buffers that are replaced,
and hooks on gradients. These are corrected or rejected here.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from penstock.modules.export_output import quietly
from penstock.tracing.domain import Domain
from penstock.tracing.draws import Draws
from penstock.tracing.faults import Refused, line_of
from penstock.tracing.form import Form, call
from penstock.tracing.interception import Interceptor, intercepted
from penstock.tracing.outputs import Outputs
from penstock.tracing.python_state.attribute_reads import Reads
from penstock.tracing.skeleton import replace_tensors


@dataclass(frozen=True, eq=False)
class Request:
    """What to trace.

    Attributes:
        skeleton: the model, from `skeleton_of`.
        form: form of the inputs.
        training: whether to keep the training mode of every module; otherwise all are in evaluation
            mode.
        caches: by the path of a module, attributes that its forward may change, since an earlier
            capture has found that they are caches.
    """

    skeleton: nn.Module
    form: Form
    training: bool
    caches: Mapping[str, Collection[str]]


@dataclass(frozen=True, eq=False)
class Capture:
    """A graph over flat tensors.

    Attributes:
        graph: the graph.
        holder: the module with the graph's constants.
        outputs: how the outputs nest.
        domain: for which input shapes the graph is valid.
        functions: autograd.Functions that the model calls, by name.
        reads: attributes that the forward reads or changes.
    """

    graph: fx.Graph
    holder: fx.GraphModule
    outputs: Outputs
    domain: Domain
    functions: Mapping[str, Any]
    reads: Reads


def export_graph(request: Request, *, dynamic: bool, locate: bool = False) -> Capture:
    """Run torch.export on a fake copy of the model, and return the graph with what was observed.

    Args:
        request: what to trace.
        dynamic: whether sizes of the inputs may change; else the graph holds for these sizes alone.
        locate: whether to find the place that draws random numbers.
    """
    # It imports SymPy, half a second that only a trace needs.
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    form = request.form
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    outputs, interceptor = Outputs(), Interceptor()
    model = _fake_copy(request.skeleton, mode)
    if not request.training:
        model.eval()
    lengths = {size for tensor in form.tensors for size in tensor.shape}
    reads = Reads(model, request.caches, lengths)
    flat = _Flat(model, form, outputs, interceptor, (Draws(model, locate), reads))
    flat.training = model.training
    with mode:
        tensors = tuple(
            torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu") for leaf in form.tensors
        )
    with (
        quietly(),
        intercepted(interceptor),
        torch.enable_grad(),
        without_caches(model),
    ):
        program = torch.export.export(
            flat, tensors, dynamic_shapes=_dimensions(tensors) if dynamic else None, strict=False
        )
        try:
            holder = program.module(check_guards=False)
        except TypeError:  # torch before 2.9 has no guards in there
            holder = program.module()
    assert isinstance(holder, fx.GraphModule)
    _check_constants(holder)
    return Capture(
        holder.graph, holder, outputs, Domain.of(holder.graph), interceptor.functions, reads
    )


class _Flat(nn.Module):
    """Wrapper of a model that takes and returns its tensors one by one."""

    def __init__(
        self,
        model: nn.Module,
        form: Form,
        outputs: Outputs,
        interceptor: Interceptor,
        watches: tuple[Draws, Reads],
    ) -> None:
        super().__init__()
        self.model, (self._draws, self._reads) = model, watches
        self._form, self._outputs, self._interceptor = form, outputs, interceptor

    def forward(self, *tensors: Tensor) -> tuple[Any, ...]:
        """Run the model.

        Raises:
            Refused: the model replaces a buffer by a tensor of another shape.
        """
        original_buffers = [
            (module._buffers, key, buffer)
            for module in self.model.modules()
            for key, buffer in module._buffers.items()
        ]
        with self._interceptor:
            with self._draws.watching(), self._reads.recording():
                output = call(self.model, self._form.value(tensors))
            moving = self._outputs.flatten(output)
            for buffers, key, original in original_buffers:
                _restore_buffer(buffers, key, original)
        return moving


def _restore_buffer(buffers: dict[str, Tensor | None], key: str, original: Tensor | None) -> None:
    """Put a buffer that the model has replaced back, with the values of its replacement.

    The graph and other modules refer to the original tensor.

    Raises:
        Refused: the replacement has another shape.
    """
    replacement = buffers.get(key)
    if replacement is original:
        return
    buffers[key] = original
    if original is None or replacement is None or replacement.shape != original.shape:
        raise Refused(
            f"it gives its buffer {key!r} another shape as it runs, which only the layer that has "
            "it would know"
        )
    with torch.no_grad():
        original.copy_(replacement.detach())


def _fake_copy(skeleton: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Return a copy with fake tensors that appear to be on the CPU."""
    memo: dict[int, object] = {}
    with mode:
        replace_tensors(skeleton, memo, "cpu")
    return copy.deepcopy(skeleton, memo)


def _dimensions(tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Return which sizes torch.export should treat as dynamic: samples, and tokens.

    Sides of images and similar sizes seldom change; inputs of other such sizes get a graph of
    their own.
    """

    def dynamic_sizes(tensor: Tensor) -> dict[int, Any]:
        """Return the dimensions of an input whose sizes may change."""
        # Floats are (samples, tokens, features), or have samples first; integers are tokens.
        leading = 2 if tensor.dim() == 3 else 1
        if not tensor.is_floating_point():
            leading = tensor.dim()
        return {
            dim: torch.export.Dim.AUTO
            for dim in range(min(leading, tensor.dim()))
            if tensor.shape[dim] > 1
        }

    return {"tensors": tuple(dynamic_sizes(tensor) for tensor in tensors)}


@contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Switch off the key-value caches of models of the transformers library in this context.

    By default these models return keys and values for generation; in a pipeline they would be sent
    from stage to stage up to the last.
    """
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        if config is not None:
            configs[id(config)] = config
    changed = []
    for config in configs.values():
        if getattr(config, "use_cache", False) is True:
            # A configuration may be frozen.
            with suppress(AttributeError, TypeError):
                config.use_cache = False
                changed.append(config)
    try:
        yield
    finally:
        for config in changed:
            config.use_cache = True


def _check_constants(holder: fx.GraphModule) -> None:
    """Raise an error if a constant of the graph is a tensor without data, or a generator.

    Raises:
        Refused: there is such a constant.
    """
    state_ids = {id(tensor) for tensor in (*holder.parameters(), *holder.buffers())}
    for node in holder.graph.find_nodes(op="get_attr"):
        value = constant(holder, node.target)
        if isinstance(value, torch.Generator):
            raise Refused(
                "it draws from a torch.Generator of its own, whose sequence would depend on the "
                "order of micro-batches and on the cut: leave `generator` out, then draws depend "
                "on seed, step, layer and micro-batch",
                place=line_of(next(iter(node.users))),
            )
        if isinstance(value, Tensor) and (value.is_meta or isinstance(value, FakeTensor)):
            name = str(node.target).removeprefix("model.")
            # Parameters and buffers are fake in the trace; the layers have the real ones.
            if id(value) in state_ids and not name.startswith("lifted_tensor"):
                continue
            raise Refused(
                f"it uses a tensor of shape {tuple(value.shape)} ({name}) that it has hidden from "
                "tracing, or that is on the meta device and no buffer, so that its values are not "
                "known"
            )


def constant(holder: nn.Module, target: Any) -> Any:
    """Return the object that a get_attr node refers to."""
    value: Any = holder
    for name in str(target).split("."):
        value = getattr(value, name)
    return value
