"""One run of a model on tensors without contents, written down op by op: torch.export's graph of
it, with what the graph holds for.

torch.export was chosen over torch.fx by what they can do (docs/models.md has the figures): it takes
every form of Python that does not look at values of tensors, keeps composite ops whole (a linear
map, attention, dropout), so that autograd does what it does in the model, and knows for which other
shapes its graph is right. What it gets wrong without a word is put right here, or refused:
functions with a backward of their own, `.data`, buffers that are replaced, and hooks on gradients.
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
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from penstock.errors import ChainError
from penstock.tracing.domain import Domain
from penstock.tracing.draws import Drawn, Draws
from penstock.tracing.faults import Refused, fault, line_of
from penstock.tracing.interception import Interceptor, intercepted
from penstock.tracing.outputs import Outputs
from penstock.tracing.plain import contents
from penstock.tracing.quiet import quietly
from penstock.tracing.reads import Reads, carried

# torch.export changes things of the whole process while it runs.
_ONE_AT_A_TIME = threading.RLock()


@dataclass(frozen=True, eq=False)
class Form:
    """Inputs without their contents: nesting, tensors' forms, and all that is no tensor, which
    becomes part of the graph.
    """

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, inputs: Any) -> Form:
        """The form of some inputs; a mapping of another kind than dict is taken as a dict."""
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
        """What must be the same for one graph to serve two inputs, whatever their shapes."""
        leaves = tuple(
            (leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else (type(leaf), repr(leaf))
            for leaf in self.leaves
        )
        return str(self.spec), leaves

    def on_meta(self) -> Form:
        """The same, with nothing in memory."""
        leaves = tuple(
            torch.empty_like(leaf, device="meta") if isinstance(leaf, Tensor) else leaf
            for leaf in self.leaves
        )
        return Form(self.spec, leaves)

    def value(self, tensors: Sequence[Tensor]) -> Any:
        """The inputs with other tensors."""
        given = iter(tensors)
        return pytree.tree_unflatten(
            [next(given) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves], self.spec
        )


def call(model: nn.Module, inputs: Any) -> Any:
    """A model on a micro-batch's inputs: a tensor is its argument, a tuple or list its arguments, a
    dict its keyword arguments.
    """
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


@dataclass(frozen=True, eq=False)
class Capture:
    """A graph over flat tensors: what holds its constants, how outputs nest, and for which shapes
    it is right.
    """

    graph: fx.Graph
    holder: fx.GraphModule
    outputs: Outputs
    domain: Domain
    functions: Mapping[str, Any]
    reads: Reads


class _Flat(nn.Module):
    """The model on its inputs' tensors one by one, to its outputs' tensors one by one."""

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
        """Run the model."""
        before = [
            (part._buffers, key, buffer)
            for part in self.model.modules()
            for key, buffer in part._buffers.items()
        ]
        with self._interceptor:
            with self._draws.watching(), self._reads.recording():
                output = call(self.model, self._form.value(tensors))
            moving = self._outputs.flatten(output)
            for holder, key, buffer in before:
                made = holder.get(key)
                if made is buffer:
                    continue
                # The model has put another tensor in its place: the same values in the same tensor,
                # where others find them.
                holder[key] = buffer
                if buffer is None or made is None or made.shape != buffer.shape:
                    raise Refused(
                        f"it gives its buffer {key!r} another shape as it runs, which only the layer that has it would know"
                    )
                with torch.no_grad():
                    buffer.copy_(made.detach())
        return moving


def skeleton_of(
    model: nn.Module,
    before: nn.Module | None = None,
    written: Mapping[str, Collection[str]] | None = None,
) -> nn.Module:
    """A copy of a model whose parameters and buffers are on the meta device: what it does, without
    its weights.

    Args:
        model: the model.
        before: an earlier skeleton.
        written: by the path of a module, attributes that the copy has from `before`: caches of the
        forward, which may hold by now what
            cannot be copied.
    """
    made: dict[int, object] = {}
    for path, names in (written or {}).items():
        values = [vars(model.get_submodule(path)).get(name) for name in names]
        made.update((id(value), None) for value in values if contents(value))
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in made:
            empty: Tensor = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
            )
            made[id(tensor)] = (
                nn.Parameter(empty, tensor.requires_grad)
                if isinstance(tensor, nn.Parameter)
                else empty
            )
    try:
        copied = copy.deepcopy(model, made)
    except Exception as error:
        raise ChainError(
            f"{type(model).__name__} cannot be copied to be traced ({type(error).__name__}: {error}). A tensor that the model "
            "keeps must be a buffer, or none that autograd has made; locks, files and their like it should make when "
            "they are needed"
        ) from error
    for path, names in (written or {}).items():
        held = vars(copied.get_submodule(path))
        old = {} if before is None else vars(before.get_submodule(path))
        for name in names:
            held.pop(name, None)
            held.update({name: old[name]} if name in old else {})
    return copied


def capture(
    skeleton: nn.Module,
    form: Form,
    *,
    training: bool,
    caches: Mapping[str, Collection[str]] | None = None,
) -> Capture:
    """Write down what a model does with inputs of a form, and of other shapes where it does the
    same with these.

    Args:
        skeleton: the model, from `skeleton_of`.
        form: of the inputs.
        training: in the modes that its parts have; else all of them in evaluation mode.
        caches: by the path of a module, attributes that its forward may change, since another graph
        has found them to be caches.

    Raises:
        ChainError: the model does what cannot be written down; the message has its file and line.
    """
    request = _Request(skeleton, form, training, caches or {})
    with _ONE_AT_A_TIME:
        return _apart(lambda: _captured(request))


@dataclass(frozen=True, eq=False)
class _Request:
    """What is to be written down, see `capture`."""

    skeleton: nn.Module
    form: Form
    training: bool
    caches: Mapping[str, Collection[str]]


def _captured(request: _Request) -> Capture:
    try:
        return _checked(request, dynamic=True)
    except Drawn as error:
        raise fault(request.skeleton, _located(request) or error) from error
    except Refused as error:
        raise fault(request.skeleton, error) from error
    except Exception:  # noqa: BLE001  # torch.export raises of all kinds; with sizes that are numbers it can do more
        try:
            return _checked(request, dynamic=False)
        except Drawn as error:
            raise fault(request.skeleton, _located(request) or error) from error
        except Exception as error:
            raise fault(request.skeleton, error) from error


def _checked(request: _Request, *, dynamic: bool) -> Capture:
    """A graph; what may be caches of the forward is held against a second call that finds them
    filled.

    Raises:
        Refused: the second call changes them again.
    """
    made = _exported(request, dynamic=dynamic)
    sizes, tables = made.reads.sizes, made.reads.tables
    if not sizes and not tables:
        return made
    other = copy.deepcopy(request.skeleton)
    for path, name in sizes:
        vars(other.get_submodule(path))[name] += _AWAY
    for (path, name), (shape, dtype) in tables.items():
        vars(other.get_submodule(path))[name] = torch.zeros(shape, dtype=dtype)
    again = _exported(replace(request, skeleton=other), dynamic=dynamic).reads.sizes
    for (path, name), value in sizes.items():
        if again.get((path, name)) != value:
            raise Refused(carried(path, name, f"to {value}"))
    return made


#: Added to a number that may be a counter: a counter goes on from there.
_AWAY = 1_000_003


def _located(request: _Request) -> Drawn | None:
    """The error of a model that draws, with the line."""
    for dynamic in (True, False):
        try:
            _exported(request, dynamic=dynamic, locate=True)
        except Drawn as error:
            return error
        except Exception:  # noqa: BLE001, S112  # the same that made the first try fail
            continue
    return None


def _apart(work: Callable[[], Capture]) -> Capture:
    """Work in a thread of its own, where there is nothing of what surrounds the caller: a batch of
    another form may come up while a rank counts what autograd keeps, or on fake tensors. Only
    autocast is the caller's: a model may go by dtypes.
    """
    autocast = [
        (kind, torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
        if torch.is_autocast_enabled(kind)
    ]
    found: list[Capture] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            with ExitStack() as surroundings:
                for kind, dtype in autocast:
                    surroundings.enter_context(torch.autocast(kind, dtype))
                found.append(work())
        except BaseException as error:  # noqa: BLE001  # raised again where it was asked for
            failed.append(error)

    thread = threading.Thread(target=run, name="tracing")
    thread.start()
    thread.join()
    if failed:
        raise failed[0]
    return found[0]


def _exported(request: _Request, *, dynamic: bool, locate: bool = False) -> Capture:
    form = request.form
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    outputs, interceptor = Outputs(), Interceptor()
    model = _faked(request.skeleton, mode)
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


def _faked(skeleton: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy with tensors of the CPU, as far as the model can see."""
    made: dict[int, object] = {}
    with mode:
        for tensor in (*skeleton.parameters(), *skeleton.buffers()):
            if id(tensor) not in made:
                fake: Tensor = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
                )
                made[id(tensor)] = (
                    nn.Parameter(fake, tensor.requires_grad)
                    if isinstance(tensor, nn.Parameter)
                    else fake
                )
    return copy.deepcopy(skeleton, made)


def _dimensions(tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Which sizes may change: samples, and tokens. Sides of images and the like seldom do; where
    they do, they have a graph each.
    """
    auto = torch.export.Dim.AUTO

    def of(tensor: Tensor) -> dict[int, Any]:
        free = tensor.dim() if not tensor.is_floating_point() else 2 if tensor.dim() == 3 else 1
        return {dim: auto for dim in range(min(free, tensor.dim())) if tensor.shape[dim] > 1}

    return {"tensors": tuple(of(tensor) for tensor in tensors)}


@contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Models of transformers return keys and values for generation unless told otherwise; in a
    pipeline these would travel to its end.
    """
    configs = {
        id(config): config
        for part in model.modules()
        if (config := vars(part).get("config")) is not None
    }
    before = []
    for config in configs.values():
        if getattr(config, "use_cache", False) is True:
            with suppress(AttributeError, TypeError):
                config.use_cache = False
                before.append(config)
    try:
        yield
    finally:
        for config in before:
            config.use_cache = True


def _check_constants(holder: fx.GraphModule) -> None:
    """A tensor of the trace among the constants is one that the model hid from it.

    Raises:
        Refused: there is one.
    """
    known = {id(tensor) for tensor in (*holder.parameters(), *holder.buffers())}
    for node in holder.graph.find_nodes(op="get_attr"):
        value = constant(holder, node.target)
        if isinstance(value, torch.Generator):
            raise Refused(
                "it draws from a torch.Generator of its own, whose sequence would depend on the order of micro-batches and on the "
                "cut: leave `generator` out, then draws depend on seed, step, layer and micro-batch",
                place=line_of(next(iter(node.users))),
            )
        if isinstance(value, Tensor) and (value.is_meta or isinstance(value, FakeTensor)):
            shape = tuple(value.shape)
            named = str(node.target).removeprefix("model.")
            if id(value) in known and not named.startswith("lifted_tensor"):
                continue
            raise Refused(
                f"it uses a tensor of shape {shape} ({named}) that it has hidden from tracing, or that is on the meta device and no "
                "buffer, so that its values are not known"
            )


def constant(holder: nn.Module, target: Any) -> Any:
    """What a get_attr node stands for."""
    value: Any = holder
    for name in str(target).split("."):
        value = getattr(value, name)
    return value
