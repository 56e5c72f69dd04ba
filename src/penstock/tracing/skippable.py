"""Long skips by hand: a layer stashes a tensor by name, a later one pops it, and the layers between
know nothing of it.

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

Inside plain `nn.Sequential` what is stashed waits, per thread, for its pop. In `ps.Pipe` it goes
straight to the device that pops it. In a chain it travels with what crosses from layer to layer:
see `carrying`.

The interface is that of torchgpipe (Kim et al. 2020, torchgpipe, section 3.2), as FairScale has it
too. Names of parameters are the user's own here; state_dicts of theirs, which have `.module.` in
them, load as well.
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
    """Keeps apart skips of the same name: see `Skippable.isolate`. Copies of a namespace, pickled
    or not, are equal to it.
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
    """A skip's full name."""

    namespace: Namespace | None
    name: str

    def __str__(self) -> str:
        return (
            f"'{self.name}'" if self.namespace is None else f"'{self.name}' of {self.namespace!r}"
        )


class stash:  # noqa: N801 - stands where a keyword would
    """`yield stash(name, tensor)` in a skippable layer's forward: hand the tensor, or None, to the
    layer that pops `name`.
    """

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, tensor: Tensor | None) -> None:
        self.name, self.tensor = name, tensor


class pop:  # noqa: N801 - stands where a keyword would
    """`tensor = yield pop(name)` in a skippable layer's forward: take what an earlier layer has
    stashed as `name`.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


#: What is stashed and not yet popped.
Waiting = dict[Skip, Tensor | None]


class _Current(threading.local):
    """The skips that layers run by this thread find and leave."""

    def __init__(self) -> None:
        self.waiting: Waiting = {}


_CURRENT = _Current()


@contextmanager
def waiting_skips(waiting: Waiting) -> Iterator[None]:
    """Let layers that this thread runs in here pop from `waiting`, and stash into it."""
    before = _CURRENT.waiting
    _CURRENT.waiting = waiting
    try:
        yield
    finally:
        _CURRENT.waiting = before


class Skippable(nn.Module):
    """What `skippable` makes of a module's class: that class, with a forward that handles what the
    user's own yields.
    """

    stashable_names: ClassVar[frozenset[str]] = frozenset()
    poppable_names: ClassVar[frozenset[str]] = frozenset()

    def isolate(self, namespace: Namespace, *, only: Iterable[str] | None = None) -> Self:
        """Give this layer's skips, or `only` those of these names, a namespace; the layer at the
        other end needs the same.

        Raises:
            ValueError: a name in `only` is none of the layer's.
        """
        declared = self.stashable_names | self.poppable_names
        names = declared if only is None else set(only)
        for name in sorted(names - declared):
            raise ValueError(
                f"{type(self).__name__} has no skip '{name}' to isolate; it has {_listed(declared)}"
            )
        self.__dict__["_namespaces"] = {
            **self._namespaces_of_skips(),
            **dict.fromkeys(names, namespace),
        }
        return self

    def stashable(self) -> list[Skip]:
        """The skips that it stashes."""
        return [self._skip(name) for name in sorted(self.stashable_names)]

    def poppable(self) -> list[Skip]:
        """The skips that it pops."""
        return [self._skip(name) for name in sorted(self.poppable_names)]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's own forward, and do what it yields.

        Raises:
            RuntimeError: it stashes or pops what was not declared, or does not do what was; or what
            it pops is not there.
        """
        waiting = _CURRENT.waiting
        for skip in self.poppable():
            if skip not in waiting:
                raise RuntimeError(
                    f"{skip} has not been stashed before {type(self).__name__} pops it"
                )
        popped = {skip.name: waiting.pop(skip) for skip in self.poppable()}
        stashed: dict[str, Tensor | None] = {}
        made = super().forward(*args, **kwargs)
        if isinstance(made, Generator):
            made = self._drive(made, popped, stashed)
        for what, left in (
            ("stashed", self.stashable_names - stashed.keys()),
            ("popped", set(popped)),
        ):
            if left:
                raise RuntimeError(
                    f"{_listed(left)} must be {what} by the forward of {type(self).__name__}, and was not"
                )
        waiting.update({self._skip(name): tensor for name, tensor in stashed.items()})
        return made

    def _drive(
        self,
        running: Generator[Any, Any, Any],
        popped: dict[str, Tensor | None],
        stashed: dict[str, Tensor | None],
    ) -> Any:
        answer: Tensor | None = None
        try:
            while True:
                asked = running.send(answer)
                answer = None
                if isinstance(asked, stash):
                    if asked.name not in self.stashable_names:
                        raise RuntimeError(
                            f"'{asked.name}' has not been declared as stashable: @skippable(stash=['{asked.name}', …])"
                        )
                    stashed[asked.name] = asked.tensor
                elif isinstance(asked, pop):
                    if asked.name not in popped:
                        why = (
                            "has been popped already"
                            if asked.name in self.poppable_names
                            else "has not been declared as poppable"
                        )
                        raise RuntimeError(f"'{asked.name}' {why} in {type(self).__name__}")
                    answer = popped.pop(asked.name)
                else:
                    raise TypeError(
                        f"the forward of {type(self).__name__} yielded {asked!r}: it may yield stash(…) and pop(…)"
                    )
        except StopIteration as stop:
            return stop.value

    def _skip(self, name: str) -> Skip:
        return Skip(self._namespaces_of_skips().get(name), name)

    def _namespaces_of_skips(self) -> dict[str, Namespace]:
        found: dict[str, Namespace] = self.__dict__.get("_namespaces", {})
        return found

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        theirs = f"{prefix}module."
        if (
            "module" not in self._modules
        ):  # torchgpipe and FairScale have the user's module one level down
            for key in [key for key in state_dict if key.startswith(theirs)]:
                state_dict[prefix + key.removeprefix(theirs)] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __repr__(self) -> str:
        return f"@skippable({super().__repr__()})"


def skippable(
    stash: Iterable[str] = (), pop: Iterable[str] = ()
) -> Callable[[type[nn.Module]], type[Skippable]]:
    """A decorator for a module's class whose forward stashes or pops tensors for, or from, layers
    far away.

    Args:
        stash: names that its forward stashes, all of them, each time.
        pop: names that it pops.

    Every skip has one layer that stashes it and, later, one that pops it: `verify_skippables`
    checks it.
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
        return type(kind.__name__, (Skippable, kind), body)

    return extend


def verify_skippables(module: nn.Module | Mapping[str, nn.Module]) -> None:
    """Check that the layers of an `nn.Sequential`, or named layers in order, stash and pop every
    skip exactly once, in this order.

    Raises:
        TypeError: they do not; every fault is listed.
    """
    stashed: dict[Skip, str] = {}
    popped: set[Skip] = set()
    faults: list[str] = []
    for layer, part in dict(
        module.named_children() if isinstance(module, nn.Module) else module
    ).items():
        if not isinstance(part, Skippable):
            continue
        both = part.stashable_names & part.poppable_names
        faults += [
            f"'{layer}' declared '{name}' both as stashable and as poppable"
            for name in sorted(both)
        ]
        for skip in part.stashable():
            if skip.name not in both and skip in stashed:
                faults.append(
                    f"'{layer}' redeclared '{skip.name}' as stashable but not isolated by namespace"
                )
            elif skip.name not in both:
                stashed[skip] = layer
        for skip in part.poppable():
            if skip.name not in both and skip in popped:
                faults.append(
                    f"'{layer}' redeclared '{skip.name}' as poppable but not isolated by namespace"
                )
            elif skip.name not in both and skip not in stashed:
                faults.append(
                    f"'{layer}' declared '{skip.name}' as poppable but it was not stashed"
                )
            elif skip.name not in both:
                popped.add(skip)
    faults += [
        f"no module declared '{skip.name}' as poppable but stashed"
        for skip in stashed
        if skip not in popped
    ]
    if faults:
        raise TypeError(
            "\n  * ".join(["one or more pairs of stash and pop do not match:", *faults])
        )


class _Carrying(nn.Module):
    """A layer under, or at an end of, a skip: takes `(value, skips)` where skips reach it, gives
    the same where any go on.

    Its tensors have the names that they have in the model: the layer stands in here under its full
    name.
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
        """Run the layer, with the skips that have come this far."""
        waiting: Waiting = {}
        if self.reaching:
            value, skips = value
            waiting = dict(zip(self.reaching, skips, strict=True))
        with waiting_skips(waiting):
            made = self.get_submodule(self.path)(value)
        return (made, tuple(waiting[skip] for skip in self.leaving)) if self.leaving else made


def carrying(named: Sequence[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Layers of a chain, by name and in order, as layers between which skips travel with what one
    returns and the next takes.

    Without skippable layers they come back as they are; so do layers that no skip begins at, ends
    at or passes. The others come back under `whole_names`, see `tracing.names.prefix_of`. A layer
    with skippable parts of its own further inside runs these by itself.

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
        raise ChainError("two layers have one name, so which skip is whose cannot be told")
    made: list[tuple[str, nn.Module]] = []
    live: list[Skip] = []
    for name, layer in named:
        stashes, pops = (
            (layer.stashable(), layer.poppable()) if isinstance(layer, Skippable) else ([], [])
        )
        leaving = [skip for skip in live if skip not in pops] + stashes
        made.append((name, _Carrying(name, layer, live, leaving) if live or leaving else layer))
        live = leaving
    return made


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in sorted(names)) or "none"
