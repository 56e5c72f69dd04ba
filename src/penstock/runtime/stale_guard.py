"""Guard against reading stale layers of the user's model.

On a rank, layers that other ranks train have the weights from before the training. Without the
guard, `model.state_dict()`, `model(x)` and pickling the model would silently give wrong values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from penstock.errors import RunError
from penstock.tracing.traced_chain import TracedChain

#: The attribute of a module that torch calls instead of its forward and hooks; copies of a module
#: do not have it.
_CALL = "_compiled_call_impl"


@dataclass
class Guard:
    """Refuses to read the layers of a model that other ranks have trained.

    Attributes:
        rank: the rank of this process.
        layers: the number of layers of the model.
        remote_layers: the names of the layers that other ranks train, by index.
        stale: whether these have been trained since their weights here were right.
        successor: the guard of a later pipeline over the same model, which replaces this one.
    """

    rank: int
    layers: int
    remote_layers: dict[int, str]
    stale: bool = False
    successor: Guard | None = None
    _handles: list[RemovableHandle] = field(default_factory=list)
    _calls: list[_Call] = field(default_factory=list)

    def watch(
        self, roots: Sequence[nn.Module], layers: Iterable[nn.Module], *, copies: bool
    ) -> None:
        """Install the guard on the modules that a user may read or run.

        Args:
            roots: the model, or the modules of a list that contain layers of other ranks.
            layers: these layers, if they are the user's own modules.
            copies: whether copying the model is allowed, since the pipeline itself copies it.
        """
        for root in roots:
            hook = Hook(self, copies=copies)
            handle = root.register_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
            self._handles.append(handle)
        for module in dict.fromkeys([*roots, *layers]):
            self._calls.append(_Call(self, module))

    def check(self, call: str) -> None:
        """Check that the model may be read.

        Args:
            call: how it is read, such as "state_dict()", for the message.

        Raises:
            RunError: it has stale layers.
        """
        if not self.stale:
            return
        names = list(dict.fromkeys(self.remote_layers.values()))
        examples = ", ".join(map(repr, names[:3])) + (", …" if len(names) > 3 else "")
        raise RunError(
            f"{call} of the model on rank {self.rank} would give wrong values: {len(names)} of its "
            f"{self.layers} layers ({examples}) are trained on other ranks, and their values here "
            "are from before the training. Use pipe.model_state() (the whole state on every rank), "
            "pipe.state_dict() (on rank 0) or pipe.forward(x); or call pipe.load_into(model) on "
            "every rank first. For averages of the weights use pipe.ema()"
        )

    def mark(self) -> None:
        """Note that other ranks have trained their layers."""
        # The pipeline of this guard may train on after a later one has guarded the model.
        guard: Guard | None = self
        while guard is not None:
            guard.stale = True
            guard = guard.successor

    def release(self) -> None:
        """Remove the guard from the model. Hooks in copies of its modules have no effect then."""
        self.stale = False
        for handle in self._handles:
            handle.remove()
        for call in self._calls:
            call.remove()
        self._handles.clear()
        self._calls.clear()


class _Call:
    """A check before each call of a module.

    It is not a forward hook, because `ps.chain` and the detection of changes in traced models
    would take a module with another hook for another module.
    """

    def __init__(self, guard: Guard, module: nn.Module) -> None:
        # Weak, since the module holds this object: a cycle would delay the release of its memory.
        self._guard, self._module = guard, weakref.ref(module)
        self._before = vars(module).get(_CALL)
        vars(module)[_CALL] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module if it is not stale."""
        self._guard.check("running")
        module = self._module()
        assert module is not None
        run = self._before or module._call_impl
        return run(*args, **kwargs)

    def remove(self) -> None:
        """Restore the module's own call."""
        module = self._module()
        if module is None or vars(module).get(_CALL) is not self:
            return
        if self._before is None:
            del vars(module)[_CALL]
        else:
            vars(module)[_CALL] = self._before


class Hook:
    """A `state_dict` pre-hook that refuses to read, copy or pickle a module with stale layers."""

    def __init__(self, guard: Guard, *, copies: bool) -> None:
        self.guard, self._copies = guard, copies

    def __call__(self, module: nn.Module, *args: Any) -> None:
        """Check the guard before `state_dict`; the arguments are those of torch's hooks."""
        del module, args
        self.guard.check("state_dict()")

    def __deepcopy__(self, memo: dict[int, object]) -> Callable[..., None]:
        if not self.guard.stale:
            return _no_check  # the copy has the right values, and later training leaves it alone
        if not self._copies:
            self.guard.check("copying")
        return self

    def __reduce__(self) -> tuple[Callable[[], Any], tuple[()]]:
        self.guard.check("pickling")
        return _no_hook, ()


def _no_check(*args: Any) -> None:
    """Replace the hook in copies of a module and in other processes, where nothing is checked."""


def _no_hook() -> Callable[..., None]:
    """Return the hook of an unpickled module."""
    return _no_check


def guards_of(roots: Iterable[nn.Module]) -> list[Guard]:
    """Return the guards that earlier pipelines have installed on a model."""
    guards: dict[int, Guard] = {}
    for root in roots:
        for hook in _hooks(root):
            guards[id(hook.guard)] = hook.guard
    return list(guards.values())


def _hooks(module: nn.Module) -> Iterator[Hook]:
    """Yield the guards' hooks on a module and its submodules."""
    for part in module.modules():
        yield from (hook for hook in part._state_dict_pre_hooks.values() if isinstance(hook, Hook))


def stale_layers(traced: TracedChain) -> frozenset[int]:
    """Return the indices of the layers that an earlier pipeline has trained on other ranks."""
    names: set[str] = set()
    for guard in guards_of(traced.roots):
        if guard.stale:
            names.update(guard.remote_layers.values())
    return frozenset(index for index, layer in enumerate(traced.layers) if layer.name in names)


def guard_model(traced: TracedChain, held: Collection[int], rank: int) -> Guard | None:
    """Install a guard on a model, in place of those of earlier pipelines.

    Args:
        traced: the chain with the user's own modules.
        held: the layers that this process trains.
        rank: the rank of this process.

    Returns:
        The guard; None if this process trains every layer with weights or buffers.
    """
    earlier_guards = guards_of(traced.roots)
    # Read before `release`, which resets it.
    stale = any(earlier.stale for earlier in earlier_guards)
    for earlier in earlier_guards:
        earlier.release()
    foreign = _foreign_layers(traced, held)
    if not foreign:
        return None
    remote_layers = {index: traced.layers[index].name for index in foreign}
    guard = Guard(rank, len(traced), remote_layers, stale)
    for earlier in earlier_guards:
        earlier.successor = guard
    if any(getattr(module, "whole_names", False) for module in traced.modules):
        # The layers of a traced model are cut out of it, and are not the user's own modules.
        guard.watch(traced.roots, (), copies=True)
    else:
        _watch_modules(guard, traced, held, foreign.values())
    return guard


def _foreign_layers(traced: TracedChain, held: Collection[int]) -> dict[int, nn.Module]:
    """Return the layers with weights or buffers that are not in `held`, by index."""
    return {
        index: module
        for index, module in enumerate(traced.modules)
        if index not in held and _has_values(module)
    }


def _watch_modules(
    guard: Guard, traced: TracedChain, held: Collection[int], foreign: Collection[nn.Module]
) -> None:
    """Install a guard on foreign layers, and on the roots that contain some.

    Modules that this process runs itself must stay callable, and are left out.
    """
    local_parts = _parts([traced.modules[index] for index in held])
    foreign_parts = _parts(foreign)
    others = [root for root in traced.roots if id(root) not in local_parts]
    roots = [root for root in others if _parts([root]) & foreign_parts]
    layers = [module for module in foreign if id(module) not in local_parts]
    guard.watch(roots, layers, copies=False)


def _parts(modules: Iterable[nn.Module]) -> set[int]:
    """Return the `id` of some modules and all of their submodules."""
    return {id(part) for module in modules for part in module.modules()}


def _has_values(module: nn.Module) -> bool:
    """Whether a module has trainable parameters or buffers."""
    trained = any(parameter.requires_grad for parameter in module.parameters())
    return trained or next(iter(module.buffers()), None) is not None
