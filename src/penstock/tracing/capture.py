"""Capture of a model's graph: one run of torch.export on tensors without data, and its corrections.

torch.export was chosen over torch.fx for its coverage (docs/models.md has the figures). It handles
all Python control flow that does not depend on values of tensors, keeps composite ops whole (a
linear map, attention, dropout), so that autograd treats them as in the model, and records for which
other shapes its graph is valid. This module corrects or rejects what torch.export silently gets
wrong: autograd.Functions, `.data`, buffers that are replaced, and hooks on gradients.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from penstock.modules.export_output import quietly
from penstock.tracing.domain import Domain
from penstock.tracing.draws import Drawn, Draws
from penstock.tracing.fake_device_guard import keep_fake_device_guard
from penstock.tracing.faults import Refused, fault, line_of
from penstock.tracing.interception import Interceptor, intercepted
from penstock.tracing.outputs import Outputs
from penstock.tracing.python_state.attribute_reads import Reads, carried_message
from penstock.tracing.skeleton import replace_tensors

# torch.export changes global state of the process while it runs.
_EXPORT_LOCK = threading.RLock()


@dataclass(frozen=True, eq=False)
class Form:
    """Structure of a micro-batch's inputs.

    Attributes:
        spec: the nesting.
        leaves: tensors, of which only shape and dtype matter, and constants, which become part of
            the graph.
    """

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, inputs: Any) -> Form:
        """Return the form of inputs; a mapping that is not a dict is treated as a dict."""
        if isinstance(inputs, Mapping) and not isinstance(inputs, dict):
            inputs = dict(inputs)
        leaves, spec = pytree.tree_flatten(inputs)
        return cls(spec, tuple(leaves))

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors, in order."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def kind(self) -> tuple[object, ...]:
        """A key that must be equal for one graph to serve two inputs, whatever their shapes."""
        leaves = tuple(
            (leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else (type(leaf), repr(leaf))
            for leaf in self.leaves
        )
        return str(self.spec), leaves

    def on_meta(self) -> Form:
        """Return the same form with its tensors on the meta device."""
        leaves = tuple(
            torch.empty_like(leaf, device="meta") if isinstance(leaf, Tensor) else leaf
            for leaf in self.leaves
        )
        return Form(self.spec, leaves)

    def value(self, tensors: Sequence[Tensor]) -> Any:
        """Return inputs of this structure with other tensors."""
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)


def call(model: nn.Module, inputs: Any) -> Any:
    """Call a model with a micro-batch's inputs.

    A tensor is the only argument, a tuple or list the positional arguments, and a dict the keyword
    arguments.
    """
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


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
        buffers_before = [
            (module._buffers, key, buffer)
            for module in self.model.modules()
            for key, buffer in module._buffers.items()
        ]
        with self._interceptor:
            with self._draws.watching(), self._reads.recording():
                output = call(self.model, self._form.value(tensors))
            moving = self._outputs.flatten(output)
            for buffers, key, buffer in buffers_before:
                replacement = buffers.get(key)
                if replacement is buffer:
                    continue
                # The model has replaced its buffer. Copy the values into the original tensor, to
                # which the graph and other modules refer.
                buffers[key] = buffer
                if buffer is None or replacement is None or replacement.shape != buffer.shape:
                    raise Refused(
                        f"it gives its buffer {key!r} another shape as it runs, which only the "
                        "layer that has it would know"
                    )
                with torch.no_grad():
                    buffer.copy_(replacement.detach())
        return moving


def capture(
    skeleton: nn.Module,
    form: Form,
    *,
    training: bool,
    caches: Mapping[str, Collection[str]] | None = None,
) -> Capture:
    """Capture the graph of a model for inputs of a form, where possible for other shapes too.

    Args:
        skeleton: the model, from `skeleton_of`.
        form: form of the inputs.
        training: keep the training mode of every module; otherwise all are in evaluation mode.
        caches: by the path of a module, attributes that its forward may change, since an earlier
            capture has found that they are caches.

    Raises:
        ChainError: the model cannot be captured; the message has file and line of the reason.
    """
    request = _Request(skeleton, form, training, caches or {})
    with _EXPORT_LOCK:
        return _in_thread(lambda: _capture_or_fault(request))


@dataclass(frozen=True, eq=False)
class _Request:
    """Arguments of `capture`."""

    skeleton: nn.Module
    form: Form
    training: bool
    caches: Mapping[str, Collection[str]]


def _capture_or_fault(request: _Request) -> Capture:
    """Trace with sizes that may change, else with fixed ones; convert errors to ChainError."""
    try:
        return _capture_checked(request, dynamic=True)
    except Drawn as error:
        raise fault(request.skeleton, _locate_draw(request) or error) from error
    except Refused as error:
        raise fault(request.skeleton, error) from error
    except Exception:  # noqa: BLE001  # torch.export raises exceptions of all kinds
        # With fixed sizes torch.export supports more models.
        try:
            return _capture_checked(request, dynamic=False)
        except Drawn as error:
            raise fault(request.skeleton, _locate_draw(request) or error) from error
        except Exception as error:
            runs = not _fails_without_trace(request, error)
            raise fault(request.skeleton, error, runs=runs) from error


def _fails_without_trace(request: _Request, error: Exception) -> bool:
    """Return whether the model, called as it is on the meta device, raises an error like this one.

    A layer that does not fit its inputs does; an op that a trace does not support does not.
    """
    model = copy.deepcopy(request.skeleton)
    try:
        with torch.no_grad():
            call(model, request.form.on_meta().value(request.form.on_meta().tensors))
    except Exception as plain:  # noqa: BLE001  # of the model, of any kind
        return type(plain) is type(error) and _first_line(plain) == _first_line(error)
    return False


def _first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return str(error).strip().partition("\n")[0]


def _capture_checked(request: _Request, *, dynamic: bool) -> Capture:
    """Capture a graph, and check that attributes that may be caches are caches.

    The check is a second capture in which they are already filled: a cache stays as it is, while a
    counter goes on.

    Raises:
        Refused: the second forward changes an attribute again, or is another one.
    """
    captured = _export(request, dynamic=dynamic)
    sizes, tables = captured.reads.sizes, captured.reads.tables
    settled = captured.reads.settled
    if not (sizes or tables or settled):
        return captured
    filled = copy.deepcopy(request.skeleton)
    captured.reads.fill(filled)
    second = _export(replace(request, skeleton=filled), dynamic=dynamic)
    for path, name in settled:
        if second.reads.settled or _op_names(second) != _op_names(captured):
            raise Refused(carried_message(path, name, "in place"))
    second_sizes = second.reads.sizes
    for (path, name), value in sizes.items():
        if second_sizes.get((path, name)) != value:
            raise Refused(carried_message(path, name, f"to {value}"))
    return captured


def _op_names(captured: Capture) -> list[tuple[str, str]]:
    """Return what the ops of a graph are, in order."""
    return [(node.op, str(node.target)) for node in captured.graph.nodes]


def _locate_draw(request: _Request) -> Drawn | None:
    """Return the error of a model that draws random numbers, with the line that draws."""
    for dynamic in (True, False):
        try:
            _export(request, dynamic=dynamic, locate=True)
        except Drawn as error:
            return error
        except Exception:  # noqa: BLE001, S112  # the same exception as in the first attempt
            continue
    return None


def _in_thread(work: Callable[[], Capture]) -> Capture:
    """Run `work` in a new thread, without the dispatch modes and hooks of the caller's thread.

    A batch of a new form may arrive while saved-tensor hooks are installed, or under a fake tensor
    mode. Only autocast is copied from the caller, since a model may depend on dtypes.
    """
    autocast = [
        (device, torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    ]
    results: list[Capture] = []
    errors: list[BaseException] = []

    def run() -> None:
        """Do the work under the caller's autocast, and store its result or its error."""
        try:
            with ExitStack() as stack:
                for device, dtype in autocast:
                    stack.enter_context(torch.autocast(device, dtype))
                results.append(work())
        except BaseException as error:  # noqa: BLE001  # raised again in the caller's thread
            errors.append(error)

    keep_fake_device_guard()
    thread = threading.Thread(target=run, name="tracing")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def _export(request: _Request, *, dynamic: bool, locate: bool = False) -> Capture:
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
