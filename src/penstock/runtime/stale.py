"""A guard on the user's model: on a rank, layers that other ranks train keep the values from before
the training.

Reading them by `model.state_dict()`, running them by `model(x)` or pickling the model would give
wrong numbers without a word.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from penstock.errors import RunError
from penstock.tracing.chain import TracedChain

#: Where torch looks for what to run in place of a module's forward and hooks; a module's copies do
#: not have it.
_CALL = "_compiled_call_impl"


@dataclass
class Guard:
    """The layers of a model that this process does not train.

    Attributes:
        rank: this process's rank.
        layers: how many layers the model has.
        elsewhere: names of those that other ranks train, by index.
        stale: whether they have been trained since they had the right values here.
        successor: the guard of a later pipeline over the same model, which has taken this one's
        place.
    """

    rank: int
    layers: int
    elsewhere: dict[int, str]
    stale: bool = False
    successor: Guard | None = None
    _handles: list[RemovableHandle] = field(default_factory=list)
    _calls: list[_Call] = field(default_factory=list)

    def watch(
        self, roots: Sequence[nn.Module], layers: Iterable[nn.Module], *, copies: bool
    ) -> None:
        """Guard the modules that a user may read or run.

        Args:
            roots: the model, or the modules of a list that have layers which other ranks train.
            layers: those layers, where they are modules of the user's own.
            copies: whether the pipeline itself may copy the model.
        """
        for root in roots:
            hook = Hook(self, copies=copies)
            self._handles.append(root.register_state_dict_pre_hook(hook))  # type: ignore[no-untyped-call]
        for module in dict.fromkeys([*roots, *layers]):
            self._calls.append(_Call(self, module))

    def check(self, call: str) -> None:
        """Refuse to read what is stale.

        Raises:
            RunError: it is.
        """
        if not self.stale:
            return
        names = list(dict.fromkeys(self.elsewhere.values()))
        shown = ", ".join(map(repr, names[:3])) + (", …" if len(names) > 3 else "")
        raise RunError(
            f"{call} of the model on rank {self.rank} would give wrong values: {len(names)} of its {self.layers} layers ({shown}) are trained on other ranks, and "
            "their values here are from before the training. Take pipe.model_state() (the whole state on every rank), "
            "pipe.state_dict() (on rank 0) or pipe.forward(x); or call pipe.load_into(model) on every rank first. For averages of "
            "the weights there is pipe.ema()"
        )

    def mark(self) -> None:
        """Other ranks have trained their layers."""
        guard: Guard | None = self
        while guard is not None:
            guard.stale = True
            guard = guard.successor

    def release(self) -> None:
        """Take the guard off the model. Copies of the modules keep hooks that do nothing any more."""
        self.stale = False
        for handle in self._handles:
            handle.remove()
        for call in self._calls:
            call.remove()
        self._handles.clear()
        self._calls.clear()


class _Call:
    """A check before a module is run.

    No forward hook: a module with hooks is taken for another one, by `ps.chain` and where traced
    models are watched for changes.
    """

    def __init__(self, guard: Guard, module: nn.Module) -> None:
        self._guard, self._module = guard, weakref.ref(module)
        self._before = vars(module).get(_CALL)
        vars(module)[_CALL] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What `module(...)` is."""
        self._guard.check("running")
        module = self._module()
        assert module is not None
        run = self._before or module._call_impl
        return run(*args, **kwargs)

    def remove(self) -> None:
        """Let the module be run as before."""
        module = self._module()
        if module is None or vars(module).get(_CALL) is not self:
            return
        if self._before is None:
            del vars(module)[_CALL]
        else:
            vars(module)[_CALL] = self._before


class Hook:
    """A hook that refuses to read the state while its guard's layers are stale. Copying and
    pickling are reading too.
    """

    def __init__(self, guard: Guard, *, copies: bool) -> None:
        self.guard, self._copies = guard, copies

    def __call__(self, module: nn.Module, *args: Any) -> None:
        """Before `state_dict`, with the arguments that torch gives to hooks."""
        del module, args
        self.guard.check("state_dict()")

    def __deepcopy__(self, memo: dict[int, object]) -> Callable[..., None]:
        if not self.guard.stale:
            return _nothing  # a copy has the right values, and keeps them
        if not self._copies:
            self.guard.check("copying")
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
    """Indices of layers that an earlier pipeline has trained on other ranks, and whose values here
    are older.
    """
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
    foreign = {
        index: module
        for index, module in enumerate(traced.modules)
        if index not in held and _has_values(module)
    }
    if not foreign:
        for guard in earlier:
            guard.release()
        return None
    elsewhere = {index: traced.layers[index].name for index in foreign}
    guard = Guard(rank, len(traced), elsewhere, stale)
    for other in earlier:
        other.release()
        other.successor = guard
    inside = {id(part) for module in foreign.values() for part in module.modules()}
    traced_model = any(getattr(module, "whole_names", False) for module in traced.modules)
    if traced_model:  # layers that were cut out of it are not the user's own modules
        guard.watch(traced.roots, (), copies=True)
        return guard
    roots = [root for root in traced.roots if any(id(part) in inside for part in root.modules())]
    running = {id(part) for index in held for part in traced.modules[index].modules()}
    guard.watch(
        [root for root in roots if id(root) not in running],
        [module for module in foreign.values() if id(module) not in running],
        copies=False,
    )
    return guard


def _has_values(module: nn.Module) -> bool:
    trained = any(parameter.requires_grad for parameter in module.parameters())
    return trained or next(iter(module.buffers()), None) is not None
