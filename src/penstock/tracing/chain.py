"""From a model, or a list of modules, to a chain of layers with its modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from penstock.errors import ChainError
from penstock.model.chain import Chain, Layer, TensorFacts
from penstock.tracing.names import parameters_of, prefix_of
from penstock.tracing.sequential import check_containers, container_tensors, runs_otherwise
from penstock.tracing.skippable import carrying
from penstock.tracing.trace import Part, trace
from penstock.tracing.traced import Entry, leave
from penstock.tracing.variants import Variants


@dataclass(frozen=True, eq=False)
class TracedChain:
    """A chain and the modules that run its layers: `modules[i]` takes what `modules[i - 1]`
    returned.

    `aliases` has every name that `state_dict` of the whole model uses for a shared tensor, with the
    name that the chain uses. `container_names` are those of them that a container has, and no
    layer: `self.weight = self[0].weight` in an nn.Sequential. `order` has the parameters' names as
    `model.parameters()` gives them; empty, they are in the order of the layers.

    Where a stage begins at layer i, what it takes is `entries[i](crossed, inputs)`: what came over
    the boundary, with what can be made again of the micro-batch's inputs, which every rank has;
    where one ends after layer i, `exits[i](made)` is what crosses. Layers that are in neither have
    nothing of the kind: what one returns crosses, and the next one takes.

    `variants` are the graphs of a traced model. `roots` are the model as it was given, or the
    modules of a list.
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

    def parameter_names(self) -> list[str]:
        """The chain's names of all parameters, each once, in the order of `model.parameters()`."""
        by_layer = [
            name
            for layer, module in zip(self.layers, self.modules, strict=True)
            for name, _ in parameters_of(layer.name, module)
        ]
        return [*dict.fromkeys(self.aliases.get(name, name) for name in (*self.order, *by_layer))]

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

    def __len__(self) -> int:
        return len(self.modules)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.description)

    def __getitem__(self, index: int) -> Layer:
        return self.description[index]


def chain(model: nn.Module | Sequence[nn.Module], example: Any = None) -> TracedChain:
    """Make a chain of layers from a model.

    An `nn.Sequential`, or a list of modules, is taken as it is: nested ones are flattened, and a
    layer is a module, named by its qualified name in `model`. Any other model is traced on
    `example`, and a layer is what runs around one module with weights of its own; see
    docs/models.md. Either way the layers hold the model's own tensors, so that training them trains
    the model.

    Args:
        model: any model; or a list of modules, each of which takes what the one before returned: a
        tensor, or nested tuples, lists and
            dicts of tensors. Modules on the meta device are welcome.
        example: inputs of a model that must be traced, two or more samples: a tensor for
        `model(x)`, a tuple or list for `model(*x)`, a
            dict for `model(**x)`. Batches may later have other numbers of samples and tokens. Not
            needed otherwise.

    Raises:
        ChainError: the model must be traced, and there is no example, or it cannot be; or it has no
        layers, or a layer's weights have
            no shape yet.
    """
    if isinstance(model, nn.Module):
        if example is not None and (runs_otherwise(model) or any(container_tensors(model, ""))):
            return replace(_traced(model, example), roots=(model,))
        named = list(_flatten(model, ""))
        if len(named) == 1 and named[0][1] is model:
            has = (
                "has a forward or hooks of its own"
                if isinstance(model, nn.Sequential)
                else "is not an nn.Sequential"
            )
            raise ChainError(
                f"{type(model).__name__} {has}, so where it may be cut is not known. Let it be traced on an example of its inputs: "
                "ps.chain(model, example); or give its layers in order: ps.chain([model.stem, *model.blocks, model.head])"
            )
        roots = [(model, "")]
    else:
        roots = [(part, str(index)) for index, part in enumerate(_parts(model))]
        named = [pair for part, name in roots for pair in _flatten(part, name)]
    if not named:
        raise ChainError("the model has no layers")
    check_containers(roots, named)
    described = _describe(
        [
            Part(
                name,
                type(module).__name__,
                tuple(part for part, _ in module.named_modules(prefix=name)),
                carried,
            )
            for (name, module), (_, carried) in zip(named, carrying(named), strict=True)
        ]
    )
    described = replace(described, roots=tuple(part for part, _ in roots))
    return _with_containers(described, roots, named)


def _parts(model: object) -> list[nn.Module]:
    if not isinstance(model, Iterable):
        raise ChainError(
            f"a chain is made of a model or a list of modules, not {type(model).__name__}"
        )
    parts = list(model)
    for part in parts:
        if not isinstance(part, nn.Module):
            raise ChainError(f"a chain is made of nn.Module objects, not {type(part).__name__}")
    return parts


def _with_containers(
    described: TracedChain,
    roots: Sequence[tuple[nn.Module, str]],
    named: Sequence[tuple[str, nn.Module]],
) -> TracedChain:
    """The chain with the names that containers have for tensors of their layers, and the order of
    the whole model's parameters.
    """
    first: dict[int, str] = {}
    for name, module in named:
        for tensor_name, tensor in (
            *module.named_parameters(name, remove_duplicate=False),
            *module.named_buffers(name, remove_duplicate=False),
        ):
            first.setdefault(id(tensor), tensor_name)
    more = {
        name: first[id(tensor)]
        for module, root in roots
        for name, tensor in container_tensors(module, root)
    }
    order = [name for module, root in roots for name, _ in module.named_parameters(root)]
    return replace(
        described,
        aliases={**described.aliases, **more},
        container_names=tuple(more),
        order=tuple(order),
    )


def _traced(model: nn.Module, example: Any) -> TracedChain:
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
    """Layers with their names; an nn.Sequential that does more than calling its children in turn is
    one layer.
    """
    if runs_otherwise(module):
        yield name, module
        return
    for child_name, child in module._modules.items():
        if child is not None:
            yield from _flatten(child, f"{name}.{child_name}" if name else child_name)


def _describe(parts: Sequence[Part]) -> TracedChain:
    first_name: dict[int, str] = {}
    aliases: dict[str, str] = {}
    facts: dict[str, TensorFacts] = {}
    layers = []
    for part in parts:
        prefix = prefix_of(part.name, part.module)
        parameters = _names(
            part.module.named_parameters(prefix, remove_duplicate=False), first_name, aliases, facts
        )
        buffers = _names(
            part.module.named_buffers(prefix, remove_duplicate=False), first_name, aliases, facts
        )
        layers.append(Layer(part.name, part.kind, part.modules, parameters, buffers))
    return TracedChain(
        Chain(tuple(layers), tuple(facts.values())), tuple(part.module for part in parts), aliases
    )


def _names(
    named: Iterator[tuple[str, Tensor]],
    first_name: dict[int, str],
    aliases: dict[str, str],
    facts: dict[str, TensorFacts],
) -> tuple[str, ...]:
    names = []
    for name, tensor in named:
        if nn.parameter.is_lazy(tensor):
            raise ChainError(
                f"{name} has no shape yet: run the model once on an example before it is made a chain"
            )
        canonical = first_name.setdefault(id(tensor), name)
        aliases[name] = canonical
        names.append(canonical)
        facts.setdefault(
            canonical,
            TensorFacts(
                canonical,
                tuple(tensor.shape),
                str(tensor.dtype).removeprefix("torch."),
                tensor.numel() * tensor.element_size(),
                isinstance(tensor, nn.Parameter) and tensor.requires_grad,
            ),
        )
    return tuple(dict.fromkeys(names))
