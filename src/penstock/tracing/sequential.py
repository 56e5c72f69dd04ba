"""Properties of an nn.Sequential besides its children: a forward, hooks or tensors of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import is_not

from torch import Tensor, nn

from penstock.errors import ChainError
from penstock.modules.hooks import has_hooks


def runs_otherwise(module: nn.Module) -> bool:
    """Return whether a module does anything but call its children in turn."""
    kind = type(module)
    return (
        kind.forward is not nn.Sequential.forward
        or kind.__call__ is not nn.Module.__call__
        or getattr(kind, "__iter__", None) is not nn.Sequential.__iter__
        or "forward" in vars(module)
        or has_hooks(module)
    )


def container_tensors(module: nn.Module, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and persistent buffers of containers themselves, with their names.

    Containers are `module` and the modules below it that a chain divides into layers.

    Args:
        module: the outermost container.
        name: its name in the model.
    """
    if runs_otherwise(module):
        return
    prefix = f"{name}." if name else ""
    persistent = {
        key: buffer
        for key, buffer in module._buffers.items()
        if key not in module._non_persistent_buffers_set
    }
    for key, tensor in (*module._parameters.items(), *persistent.items()):
        if tensor is not None:
            yield f"{prefix}{key}", tensor
    for key, child in module._modules.items():
        if child is not None:
            yield from container_tensors(child, f"{prefix}{key}")


def check_containers(
    roots: Iterable[tuple[nn.Module, str]], layers: Iterable[tuple[str, nn.Module]]
) -> None:
    """Raise an error if a container has tensors that no layer has: they would be in no stage.

    Args:
        roots: the outermost containers with their names.
        layers: the layers with their names.

    Raises:
        ChainError: there is such a tensor.
    """
    layer_tensors = {
        id(tensor) for _, layer in layers for tensor in (*layer.parameters(), *layer.buffers())
    }
    for module, root in roots:
        for name, tensor in container_tensors(module, root):
            if id(tensor) in layer_tensors:
                continue
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            raise ChainError(
                f"{name} is a {kind} of an nn.Sequential itself, which runs its children alone, "
                "and no layer among them has it: it would be in no stage, neither trained nor "
                "saved. Let the layer that uses it have it; or let the model be traced, with all "
                "that it has, by ps.chain(model, example)"
            )


class ContainerWatch:
    """Detects layers that have been replaced in the containers of a model, after it was divided.

    Args:
        roots: the model, or the modules of a list.
    """

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        containers: list[nn.Module] = []
        pending = list(roots)
        while pending:
            module = pending.pop()
            if not runs_otherwise(module):
                containers.append(module)
                pending += [child for child in module._modules.values() if child is not None]
        self._layers = [(module, [*module._modules.values()]) for module in containers]

    def check(self) -> None:
        """Raise if a container has other layers. Takes about a microsecond per container.

        Raises:
            ChainError: it has; the layers that are there now would not be trained.
        """
        for container, layers in self._layers:
            present = [*container._modules.values()]
            if len(present) != len(layers) or any(map(is_not, present, layers)):
                raise ChainError(
                    f"the layers of {type(container).__name__} are others than when it was divided "
                    "into stages, so that new ones would not be trained: make the Pipeline anew, "
                    "after the change"
                )
