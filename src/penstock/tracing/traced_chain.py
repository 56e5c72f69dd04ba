"""Conversion of a model, or of a list of modules, into a chain of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from penstock.errors import ChainError
from penstock.model.chain import Chain, Layer, TensorFacts
from penstock.modules.skippable import with_skip_carriers
from penstock.modules.state_names import full_name, parameters_of, prefix_of
from penstock.tracing.layers_of_trace import Part, trace
from penstock.tracing.sequential import check_containers, container_tensors, runs_otherwise
from penstock.tracing.traced_layer import Entry, leave
from penstock.tracing.variants import Variants
from penstock.values.constants import dtype_name


@dataclass(frozen=True, eq=False)
class TracedChain:
    """A chain and the modules that run its layers.

    `modules[i]` takes the output of `modules[i - 1]`.

    Attributes:
        description: the chain.
        modules: the modules, one for each layer.
        aliases: for every name of a tensor in the model's `state_dict`, the name that the chain
            uses.
        entries: by layer, what a stage that begins with this layer runs first: `entries[i](crossed,
            inputs)` combines what was sent over the boundary with the micro-batch's inputs, which
            every rank has, and returns the input of layer i. A layer without an entry takes what
            was sent.
        exits: by layer, what a stage that ends with this layer runs last: `exits[i](output)`
            returns what is sent over the boundary. Of a layer without an exit the output is sent.
        variants: the graphs of a traced model.
        container_names: those keys of `aliases` that belong to a container but to no layer, as of
            `self.weight = self[0].weight` in an nn.Sequential.
        order: names of the parameters in the order of `model.parameters()`; if empty, they are in
            the order of the layers.
        roots: the model passed to `chain`, or the modules of a list.
    """

    description: Chain
    modules: tuple[nn.Module, ...]
    aliases: dict[str, str]
    entries: Mapping[int, nn.Module] = field(default_factory=dict)
    exits: Mapping[int, Callable[[Any], Any]] = field(default_factory=dict)
    variants: Variants | None = None
    container_names: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    roots: tuple[nn.Module, ...] = ()

    def first_name(self, name: str) -> str:
        """Return the name of a tensor in the chain, given any of its names in the model."""
        return self.aliases.get(name, name)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the layers' parameters with their names in the chain; a tied one once per layer.

        Parameters of layers that are not materialised yet are on the meta device.
        """
        for layer, module in zip(self.layers, self.modules, strict=True):
            for alias, parameter in parameters_of(layer.name, module):
                yield self.first_name(alias), parameter

    def parameter_names(self) -> list[str]:
        """Return the chain's names of all parameters, in the order of `model.parameters()`."""
        ordered = [self.first_name(name) for name in self.order]
        by_layer = [name for name, _ in self.named_parameters()]
        return [*dict.fromkeys((*ordered, *by_layer))]

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers, in the order in which they run."""
        return self.description.layers

    @property
    def fingerprint(self) -> str:
        """See `Chain.fingerprint`."""
        return self.description.fingerprint

    @property
    def parameter_count(self) -> int:
        """See `Chain.parameter_count`."""
        return self.description.parameter_count

    def __len__(self) -> int:  # number of layers
        return len(self.modules)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.description)

    def __getitem__(self, index: int) -> Layer:
        return self.description[index]


def chain(model: nn.Module | Sequence[nn.Module], example: Any = None) -> TracedChain:
    """Make a chain of layers from a model.

    An `nn.Sequential`, or a list of modules, is divided at its modules: nested ones are flattened,
    and a layer is a module, named by its qualified name in `model`. Any other model is traced on
    `example`, and a layer is what runs around one module with weights of its own; see
    docs/models.md. Either way the layers hold the model's own tensors, so that training them trains
    the model.

    Args:
        model: any model; or a list of modules, each of which takes the output of the previous one:
            a tensor, or nested tuples, lists and dicts of tensors. Modules may be on the meta
            device.
        example: inputs of a model that must be traced, two or more samples: a tensor for
            `model(x)`, a tuple or list for `model(*x)`, a dict for `model(**x)`. Batches may later
            have other numbers of samples and tokens. Not needed otherwise.

    Raises:
        ChainError: the model must be traced and there is no example, or it cannot be traced; it has
            no layers; or a layer's weights have no shape yet.

    Examples:
        >>> from torch import nn
        >>> chain([nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)]).description
        <Chain: 3 layers, 58 parameters>
    """
    if isinstance(model, nn.Module):
        # Tensors of a container itself belong to none of its layers: such a model has to be traced.
        is_sequential = not runs_otherwise(model) and not any(container_tensors(model, ""))
        if example is not None and not is_sequential:
            return replace(_trace_chain(model, example), roots=(model,))
        named = list(_flatten(model, ""))
        # Nothing could be flattened: the model is one module, which only a trace can cut.
        if len(named) == 1 and named[0][1] is model:
            raise _needs_example(model)
        roots = [(model, "")]
    else:
        roots = [(module, str(index)) for index, module in enumerate(_modules(model))]
        named = []
        for module, name in roots:
            named += _flatten(module, name)
    if not named:
        raise ChainError("the model has no layers")
    check_containers(roots, named)
    return _with_containers(_describe(_parts(named)), roots, named)


def as_chain(
    model: TracedChain | nn.Module | Sequence[nn.Module], example: Any = None
) -> TracedChain:
    """Return a chain unchanged, and make one of anything else; see `chain`."""
    return model if isinstance(model, TracedChain) else chain(model, example)


def _parts(named: Sequence[tuple[str, nn.Module]]) -> list[Part]:
    """Return the description of each module for the chain."""
    parts = []
    for (name, module), (_, carrier) in zip(named, with_skip_carriers(named), strict=True):
        inner_names = tuple(inner_name for inner_name, _ in module.named_modules(prefix=name))
        parts.append(Part(name, type(module).__name__, inner_names, carrier))
    return parts


def _needs_example(model: nn.Module) -> ChainError:
    """Return the error for a model whose layers are not known without a trace."""
    reason = (
        "has a forward or hooks of its own"
        if isinstance(model, nn.Sequential)
        else "is not an nn.Sequential"
    )
    return ChainError(
        f"{type(model).__name__} {reason}, so where it may be cut is not known. Let it be traced "
        "on an example of its inputs: ps.chain(model, example); or give its layers in order: "
        "ps.chain([model.stem, *model.blocks, model.head])"
    )


def _modules(model: object) -> list[nn.Module]:
    """Return the modules of a list; reject anything else."""
    if not isinstance(model, Iterable):
        raise ChainError(
            f"a chain is made of a model or a list of modules, not {type(model).__name__}"
        )
    modules = list(model)
    for module in modules:
        if not isinstance(module, nn.Module):
            raise ChainError(f"a chain is made of nn.Module objects, not {type(module).__name__}")
    return modules


def _with_containers(
    described: TracedChain,
    roots: Sequence[tuple[nn.Module, str]],
    named: Sequence[tuple[str, nn.Module]],
) -> TracedChain:
    """Add the containers' names for tensors of their layers, and the order of the parameters."""
    name_of: dict[int, str] = {}
    for name, module in named:
        for tensor_name, tensor in (
            *module.named_parameters(name, remove_duplicate=False),
            *module.named_buffers(name, remove_duplicate=False),
        ):
            name_of.setdefault(id(tensor), tensor_name)
    container_aliases = {
        name: name_of[id(tensor)]
        for module, root in roots
        for name, tensor in container_tensors(module, root)
    }
    order = [name for module, root in roots for name, _ in module.named_parameters(root)]
    return replace(
        described,
        aliases={**described.aliases, **container_aliases},
        container_names=tuple(container_aliases),
        order=tuple(order),
        roots=tuple(module for module, _ in roots),
    )


def _trace_chain(model: nn.Module, example: Any) -> TracedChain:
    """Return the chain of a model that is traced on an example."""
    parts, variants = trace(model, example)
    described = _describe(parts)
    inner = range(1, len(parts))
    return replace(
        described,
        variants=variants,
        entries={index: Entry(variants) for index in inner},
        exits=dict.fromkeys(range(len(parts) - 1), leave),
        order=tuple(name for name, _ in model.named_parameters()),
    )


def _flatten(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield layers with their names.

    An nn.Sequential that does more than call its children in turn is one layer.
    """
    if runs_otherwise(module):
        yield name, module
        return
    for child_name, child in module._modules.items():
        if child is not None:
            yield from _flatten(child, full_name(name, child_name))


def _describe(parts: Sequence[Part]) -> TracedChain:
    """Return the chain of some parts, with the facts of all tensors."""
    tensors = _Tensors()
    layers = []
    for part in parts:
        prefix = prefix_of(part.name, part.module)
        parameters = tensors.add(part.module.named_parameters(prefix, remove_duplicate=False))
        buffers = tensors.add(part.module.named_buffers(prefix, remove_duplicate=False))
        layers.append(Layer(part.name, part.kind, part.modules, parameters, buffers))
    description = Chain(tuple(layers), tuple(tensors.facts.values()))
    return TracedChain(description, tuple(part.module for part in parts), tensors.aliases)


class _Tensors:
    """The tensors of a chain. Each is named as where it occurs first.

    Attributes:
        aliases: for every name of a tensor, the name in the chain.
        facts: by name in the chain.
    """

    def __init__(self) -> None:
        self._first_names: dict[int, str] = {}
        self.aliases: dict[str, str] = {}
        self.facts: dict[str, TensorFacts] = {}

    def add(self, named: Iterable[tuple[str, Tensor]]) -> tuple[str, ...]:
        """Add the tensors of a layer. Returns their names in the chain, each once."""
        names = []
        for name, tensor in named:
            if nn.parameter.is_lazy(tensor):
                raise ChainError(
                    f"{name} has no shape yet: run the model once on an example before it is made "
                    "a chain"
                )
            first_name = self._first_names.setdefault(id(tensor), name)
            self.aliases[name] = first_name
            names.append(first_name)
            if first_name not in self.facts:
                self.facts[first_name] = TensorFacts(
                    first_name,
                    tuple(tensor.shape),
                    dtype_name(tensor.dtype),
                    tensor.numel() * tensor.element_size(),
                    isinstance(tensor, nn.Parameter) and tensor.requires_grad,
                )
        return tuple(dict.fromkeys(names))
