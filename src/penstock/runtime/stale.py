"""A guard on the user's model: on a rank, layers that other ranks train keep the values from before the training.

Reading them by `model.state_dict()`, running them by `model(x)` or pickling the model would give wrong numbers without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from penstock.errors import RunError
from penstock.tracing.chain import TracedChain

#: Modules that a guard has hooks on.
_Modules = Iterable[nn.Module]


@dataclass
class Guard:
    """The layers of a model that this process does not train.

    Attributes:
        rank: this process's rank.
        layers: how many layers the model has.
        elsewhere: names of those that other ranks train, by index.
        stale: whether they have been trained since they had the right values here.
    """

    rank: int
    layers: int
    elsewhere: dict[int, str]
    stale: bool = False
    _handles: list[RemovableHandle] = field(default_factory=list)

    def watch(self, roots: Sequence[nn.Module], foreign: _Modules) -> None:
        """Put hooks on the modules that a user may read or run.

        Args:
            roots: the model, or the modules of a list.
            foreign: layers that other ranks train, where they are modules of the user's own.
        """
        for root in roots:
            hook = Hook(self, "state_dict()")
            self._handles.append(root.register_state_dict_pre_hook(hook))
        for module in foreign:
            hook = Hook(self, "forward()")
            self._handles.append(module.register_forward_pre_hook(hook))

    def check(self, call: str) -> None:
        """Refuse to read what is stale.

        Raises:
            RunError: it is.
        """
        if not self.stale:
            return
        names = list(self.elsewhere.values())
        shown = ", ".join(map(repr, names[:3])) + (", …" if len(names) > 3 else "")
        raise RunError(
            f"{call} of the model on rank {self.rank}: {len(names)} of its {self.layers} layers ({shown}) are trained on other ranks, and "
            "their values here are from before the training. Take pipe.model_state() (the whole state on every rank) or "
            "pipe.state_dict() (on rank 0); or call pipe.load_into(model) on every rank first. For averages of the weights "
            "there is pipe.ema()"
        )

    def release(self) -> None:
        """Take the hooks off. Copies of the modules keep hooks that do nothing any more."""
        self.stale = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class Hook:
    """A hook that refuses a call while its guard's layers are stale. Copies of a module share it; pickling is reading."""

    def __init__(self, guard: Guard, call: str) -> None:
        self.guard, self.call = guard, call

    def __call__(self, module: nn.Module, *args: Any) -> None:
        """Before the call, with the arguments that torch gives to hooks of its kind."""
        del module, args
        self.guard.check(self.call)

    def __deepcopy__(self, memo: dict[int, object]) -> Hook:
        return self

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        self.guard.check("pickling")
        return _no_hook, ()


def _nothing(*args: Any) -> None:
    """What a hook is in another process."""


def _no_hook() -> Callable[..., None]:
    return _nothing


def guards_of(roots: Iterable[nn.Module]) -> list[Guard]:
    """The guards that earlier pipelines have left on a model."""
    found: dict[int, Guard] = {}
    for root in roots:
        for hook in _hooks(root):
            found[id(hook.guard)] = hook.guard
    return list(found.values())


def _hooks(module: nn.Module) -> Iterator[Hook]:
    for part in module.modules():
        yield from (hook for hook in part._state_dict_pre_hooks.values() if isinstance(hook, Hook))


def stale_layers(traced: TracedChain) -> frozenset[int]:
    """Indices of layers that an earlier pipeline has trained on other ranks, and whose values here are older."""
    names: set[str] = set()
    for guard in guards_of(traced.roots):
        if guard.stale:
            names.update(guard.elsewhere.values())
    return frozenset(index for index, layer in enumerate(traced.layers) if layer.name in names)


def guard_model(traced: TracedChain, held: Collection[int], rank: int) -> Guard | None:
    """A guard on a model, in place of those that earlier pipelines have left.

    Args:
        traced: the chain with the user's own modules.
        held: layers that this process trains.
        rank: its rank.

    Returns:
        The guard; None where every layer with weights or buffers is trained here.
    """
    earlier = guards_of(traced.roots)
    stale = any(guard.stale for guard in earlier)
    for guard in earlier:
        guard.release()
    foreign = {index: module for index, module in enumerate(traced.modules)
               if index not in held and _has_values(module)}  # fmt: skip
    if not foreign:
        return None
    elsewhere = {index: traced.layers[index].name for index in foreign}
    guard = Guard(rank, len(traced), elsewhere, stale)
    # Modules that were cut out of a traced model are not the user's own, and share these with layers that run here.
    plain = not any(getattr(module, "whole_names", False) for module in traced.modules)
    local = {id(part) for index in held for part in traced.modules[index].modules()}
    guard.watch(
        traced.roots,
        [module for module in foreign.values() if plain and id(module) not in local],
    )
    return guard


def _has_values(module: nn.Module) -> bool:
    trained = any(parameter.requires_grad for parameter in module.parameters())
    return trained or next(iter(module.buffers()), None) is not None
