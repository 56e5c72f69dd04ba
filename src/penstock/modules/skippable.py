"""Skip connections between distant layers: one layer stashes a tensor by name, a later one pops it.

The layers between them are not involved.

    @ps.skippable(stash=["early"])
    class Down(nn.Module):
        def forward(self, x):
            yield ps.stash("early", x)
            return self.conv(x)

    @ps.skippable(pop=["early"])
    class Up(nn.Module):
        def forward(self, x):
            early = yield ps.pop("early")
            return self.conv(x) + early

In a plain `nn.Sequential` a stashed tensor is stored, per thread, until it is popped. In `ps.Pipe`
it is sent directly to the device that pops it. In a chain it travels with the activations from
layer to layer: see `with_skip_carriers`.

The interface is that of torchgpipe (Kim et al. 2020, torchgpipe, section 3.2), which FairScale has
too. Names of parameters are the user's own here; state_dicts of these libraries, whose names
contain `.module.`, can be loaded as well.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, Self

from torch import Tensor, nn

from penstock.errors import ChainError


class Namespace:
    """Distinguishes skips of the same name: see `Skippable.isolate`.

    A copy of a namespace, pickled or not, is equal to it.

    Examples:
        ```python
        first, second = Namespace(), Namespace()
        model = nn.Sequential(Down().isolate(first), Down().isolate(second))
        ```
    """

    __slots__ = ("id",)

    def __init__(self) -> None:
        self.id = uuid.uuid4().hex

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<Namespace {self.id[:8]}>"


class Skip(NamedTuple):
    """Full name of a skip."""

    namespace: Namespace | None
    name: str

    def __str__(self) -> str:
        return (
            f"'{self.name}'" if self.namespace is None else f"'{self.name}' of {self.namespace!r}"
        )


class stash:  # noqa: N801 - stands where a keyword would
    """Stash a tensor: `yield stash(name, tensor)` in the forward of a skippable layer.

    The tensor, or None, is passed to the layer that pops `name`.

    Examples:
        ```python
        yield stash("skip", x)  # in the forward of a module with @skippable(stash=["skip"])
        ```
    """

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, tensor: Tensor | None) -> None:
        self.name, self.tensor = name, tensor


class pop:  # noqa: N801 - stands where a keyword would
    """Pop a tensor: `tensor = yield pop(name)` in the forward of a skippable layer.

    An earlier layer has stashed it as `name`.

    Examples:
        ```python
        skip = yield pop("skip")  # in the forward of a module with @skippable(pop=["skip"])
        ```
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


#: Tensors that are stashed and not yet popped.
Waiting = dict[Skip, Tensor | None]


class _Current(threading.local):
    """The stashed tensors of the layers that this thread runs."""

    def __init__(self) -> None:
        self.waiting: Waiting = {}


_CURRENT = _Current()


@contextmanager
def waiting_skips(waiting: Waiting) -> Iterator[None]:
    """Let layers that this thread runs in this context stash into, and pop from, `waiting`."""
    before = _CURRENT.waiting
    _CURRENT.waiting = waiting
    try:
        yield
    finally:
        _CURRENT.waiting = before


class Skippable(nn.Module):
    """Result of `skippable`: the user's class, with a forward that handles the yielded requests."""

    stashable_names: ClassVar[frozenset[str]] = frozenset()
    poppable_names: ClassVar[frozenset[str]] = frozenset()

    def isolate(self, namespace: Namespace, *, only: Iterable[str] | None = None) -> Self:
        """Assign a namespace to this layer's skips; the layer at the other end needs the same.

        Args:
            namespace: the namespace.
            only: names of the skips; by default all.

        Raises:
            ValueError: a name in `only` is not a skip of the layer.
        """
        declared = self.stashable_names | self.poppable_names
        names = declared if only is None else set(only)
        for name in sorted(names - declared):
            raise ValueError(
                f"{type(self).__name__} has no skip '{name}' to isolate; it has {_join_names(declared)}"
            )
        self.__dict__["_namespaces"] = {
            **self._namespaces_of_skips(),
            **dict.fromkeys(names, namespace),
        }
        return self

    def stashable(self) -> list[Skip]:
        """Return the skips that it stashes."""
        return [self._skip(name) for name in sorted(self.stashable_names)]

    def poppable(self) -> list[Skip]:
        """Return the skips that it pops."""
        return [self._skip(name) for name in sorted(self.poppable_names)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's forward, and handle the requests that it yields.

        Raises:
            RuntimeError: it stashes or pops a name that is not declared, or omits one that is; or
                the tensor to pop has not been stashed.
        """
        waiting = _CURRENT.waiting
        for skip in self.poppable():
            if skip not in waiting:
                raise RuntimeError(
                    f"{skip} has not been stashed before {type(self).__name__} pops it"
                )
        # Only when all of them are there: a failed layer leaves the waiting tensors as they were.
        popped = {skip.name: waiting.pop(skip) for skip in self.poppable()}
        stashed: dict[str, Tensor | None] = {}
        # The next class in the method resolution order is the user's: see `skippable`.
        output = super().forward(*args, **kwargs)
        if isinstance(output, Generator):
            output = self._drive(output, popped, stashed)
        omitted = (("stashed", self.stashable_names - stashed.keys()), ("popped", set(popped)))
        for action, names in omitted:
            if names:
                raise RuntimeError(
                    f"{_join_names(names)} must be {action} by the forward of {type(self).__name__}, "
                    "and was not"
                )
        waiting.update({self._skip(name): tensor for name, tensor in stashed.items()})
        return output

    def _drive(
        self,
        running: Generator[Any, Any, Any],
        popped: dict[str, Tensor | None],
        stashed: dict[str, Tensor | None],
    ) -> Any:
        """Run a generator to its end, and return its value.

        Args:
            running: the user's forward.
            popped: tensors that it may pop; those that it pops are removed.
            stashed: receives the tensors that it stashes.
        """
        answer: Tensor | None = None
        try:
            while True:
                request = running.send(answer)
                answer = None
                if isinstance(request, stash):
                    if request.name not in self.stashable_names:
                        raise RuntimeError(
                            f"'{request.name}' has not been declared as stashable: "
                            f"@skippable(stash=['{request.name}', …])"
                        )
                    stashed[request.name] = request.tensor
                elif isinstance(request, pop):
                    if request.name not in popped:
                        raise RuntimeError(
                            f"'{request.name}' {self._why_not_poppable(request.name)} in "
                            f"{type(self).__name__}"
                        )
                    answer = popped.pop(request.name)
                else:
                    raise TypeError(
                        f"the forward of {type(self).__name__} yielded {request!r}: it may yield "
                        "stash(…) and pop(…)"
                    )
        except StopIteration as stop:
            return stop.value

    def _why_not_poppable(self, name: str) -> str:
        if name in self.poppable_names:
            return "has been popped already"
        return "has not been declared as poppable"

    def _skip(self, name: str) -> Skip:
        return Skip(self._namespaces_of_skips().get(name), name)

    def _namespaces_of_skips(self) -> dict[str, Namespace]:
        namespaces: dict[str, Namespace] = self.__dict__.get("_namespaces", {})
        return namespaces

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Accept the names of a state that torchgpipe or FairScale has saved, too."""
        nested_prefix = f"{prefix}module."
        # torchgpipe and FairScale have the user's module one level down.
        if "module" not in self._modules:
            for key in [key for key in state_dict if key.startswith(nested_prefix)]:
                state_dict[prefix + key.removeprefix(nested_prefix)] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __repr__(self) -> str:
        return f"@skippable({super().__repr__()})"


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Return a decorator for the class of a module whose forward stashes or pops tensors.

    Every skip needs one layer that stashes it and, later, one that pops it: `verify_skippables`
    checks this.

    Args:
        stash: names that the forward stashes, all of them in each call.
        pop: names that it pops.

    Examples:
        ```python
        @skippable(stash=["skip"])
        class Down(nn.Module):
            def forward(self, x):
                yield stash("skip", x)
                return self.convolution(x)
        ```
    """
    stashes, pops = frozenset(stash), frozenset(pop)

    def extend(kind: type[nn.Module]) -> type[Skippable]:
        body = {
            "stashable_names": stashes,
            "poppable_names": pops,
            "__module__": kind.__module__,
            "__doc__": kind.__doc__,
            "__qualname__": kind.__qualname__,
        }
        # Skippable comes first, so that its forward runs and drives the user's.
        return type(kind.__name__, (Skippable, kind), body)

    return extend


def verify_skippables(module: nn.Module | Mapping[str, nn.Module]) -> None:
    """Check that layers stash every skip exactly once and pop it exactly once later.

    Args:
        module: an `nn.Sequential`, or named layers in order.

    Raises:
        TypeError: they do not; every fault is listed.

    Examples:
        ```python
        verify_skippables(nn.Sequential(Down(), Up()))  # raises if a skip is never popped
        ```
    """
    layers = dict(module.named_children() if isinstance(module, nn.Module) else module)
    # Dicts are used as ordered sets.
    stashed: dict[Skip, None] = {}
    popped: dict[Skip, None] = {}
    faults: list[str] = []
    for name, layer in layers.items():
        if isinstance(layer, Skippable):
            faults += _layer_faults(name, layer, stashed, popped)
    for skip in stashed:
        if skip not in popped:
            faults.append(f"no module declared '{skip.name}' as poppable but stashed")
    if faults:
        raise TypeError(
            "\n  * ".join(["one or more pairs of stash and pop do not match:", *faults])
        )


def _layer_faults(
    name: str, layer: Skippable, stashed: dict[Skip, None], popped: dict[Skip, None]
) -> list[str]:
    """Return the faults of one layer, and add its skips to those stashed and popped so far."""
    both = layer.stashable_names & layer.poppable_names
    faults = [
        f"'{name}' declared '{skip_name}' both as stashable and as poppable"
        for skip_name in sorted(both)
    ]
    for skip in (skip for skip in layer.stashable() if skip.name not in both):
        if skip in stashed:
            faults.append(
                f"'{name}' redeclared '{skip.name}' as stashable but not isolated by namespace"
            )
        stashed[skip] = None
    for skip in (skip for skip in layer.poppable() if skip.name not in both):
        if skip in popped:
            faults.append(
                f"'{name}' redeclared '{skip.name}' as poppable but not isolated by namespace"
            )
        elif skip not in stashed:
            faults.append(f"'{name}' declared '{skip.name}' as poppable but it was not stashed")
        else:
            popped[skip] = None
    return faults


class _SkipCarrier(nn.Module):
    """A layer that a skip begins at, ends at or passes.

    It takes `(value, skips)` if skips arrive, and returns the same if skips leave. Its tensors have
    their names in the model, since the layer is a submodule under its full name.
    """

    whole_names = True

    def __init__(
        self, name: str, layer: nn.Module, reaching: Sequence[Skip], leaving: Sequence[Skip]
    ) -> None:
        super().__init__()
        *folders, last = name.split(".")
        holder: nn.Module = self
        for folder in folders:
            inner = nn.Module()
            holder.add_module(folder, inner)
            holder = inner
        holder.add_module(last, layer)
        self.path = name
        self.reaching, self.leaving = tuple(reaching), tuple(leaving)

    def forward(self, value: Any) -> Any:
        """Run the layer with the skips that arrive."""
        waiting: Waiting = {}
        if self.reaching:
            value, skips = value
            waiting = dict(zip(self.reaching, skips, strict=True))
        with waiting_skips(waiting):
            output = self.get_submodule(self.path)(value)
        return (output, tuple(waiting[skip] for skip in self.leaving)) if self.leaving else output


def with_skip_carriers(named: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Return the layers of a chain, changed so that skips travel with the activations.

    Layers that no skip begins at, ends at or passes are returned unchanged. The others are wrapped,
    with `whole_names`, see `state_names.prefix_of`. Skippable modules inside a layer are handled
    by that layer alone.

    Args:
        named: the layers with their names, in order.

    Raises:
        ChainError: skips do not match.
    """
    if not any(isinstance(layer, Skippable) for _, layer in named):
        return list(named)
    try:
        verify_skippables(dict(named))
    except TypeError as error:
        raise ChainError(str(error)) from error
    if len(dict(named)) != len(named):
        raise ChainError("two layers have one name, so which skip belongs to which is not known")
    carriers: list[tuple[str, nn.Module]] = []
    # Stashed and not yet popped, in the order in which they travel.
    live: list[Skip] = []
    for name, layer in named:
        stashes: list[Skip] = []
        pops: list[Skip] = []
        if isinstance(layer, Skippable):
            stashes, pops = layer.stashable(), layer.poppable()
        leaving = [skip for skip in live if skip not in pops] + stashes
        carriers.append(
            (name, _SkipCarrier(name, layer, live, leaving) if live or leaving else layer)
        )
        live = leaving
    return carriers


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names)) or "none"
