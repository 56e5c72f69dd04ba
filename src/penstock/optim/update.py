"""The update of one stage: its optimizer, and when gradients are dropped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import Optimizer

from penstock.errors import SettingError
from penstock.optim.clipping import clip_values
from penstock.optim.factory import OptimizerFactory, make_optimizer

__all__ = ["OptimizerFactory", "Update"]


@dataclass
class Update:
    """Parameters of one stage and the optimizer that steps them.

    Without an optimizer, gradients are left to the user and accumulate.

    Attributes:
        parameters: those that are trained, in the order of the stage. `refresh` adds parameters
            that have become trainable.
        optimizer: the optimizer over `candidates`; None without a factory, or if the factory omits
            all of them.
        factory: creates the optimizer.
        borrowed: tied parameters whose gradients accumulate here too, but which another stage
            steps.
        candidates: all parameters of the stage that could be trained, including frozen ones; the
            argument of the factory.
        borrowed_candidates: likewise for `borrowed`.
        place: location for messages.
        clip_value: largest absolute value of a gradient at a step; None for no limit.
        steps: number of steps that are complete, skipped ones included.
        stepping: whether a step has begun and is not complete: parameters and optimizer state may
            be of different steps.
    """

    parameters: list[nn.Parameter]
    optimizer: Optimizer | None
    factory: OptimizerFactory | None = None
    borrowed: list[nn.Parameter] = field(default_factory=list)
    candidates: Sequence[nn.Parameter] = ()
    borrowed_candidates: Sequence[nn.Parameter] = ()
    place: str = "a stage"
    clip_value: float | None = None
    steps: int = 0
    stepping: bool = False
    _left_to_replicas: Sequence[nn.Parameter] = ()
    _grads_used: bool = False
    _optimizers: list[Optimizer] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Computed once, since every step needs them.
        self._all = [*self.parameters, *self.borrowed]
        self._stepped = tuple(self.parameters)

    @classmethod
    def make(
        cls,
        parameters: Sequence[nn.Parameter],
        factory: OptimizerFactory | None,
        borrowed: Iterable[nn.Parameter] = (),
        place: str = "a stage",
        clip_value: float | None = None,
    ) -> Update:
        """Create the optimizer over a stage's parameters; a stage without parameters has none.

        The factory gets frozen parameters too, as it would with `model.parameters()`: torch's
        optimizers skip parameters without a gradient, and those that become trainable later are
        then trained.

        Args:
            parameters: parameters of the stage.
            factory: creates the optimizer.
            borrowed: parameters that another stage steps.
            place: location for messages.
            clip_value: largest absolute value of a gradient at a step; None for no limit.

        Raises:
            SettingError: see `make_optimizer`.
        """
        borrowed_ids = set(map(id, borrowed))
        candidates: list[nn.Parameter] = []
        borrowed_candidates: list[nn.Parameter] = []
        for parameter in parameters:
            if parameter.is_floating_point() or parameter.is_complex():
                is_borrowed = id(parameter) in borrowed_ids
                (borrowed_candidates if is_borrowed else candidates).append(parameter)
        optimizer = None
        if factory is not None and candidates:
            optimizer = make_optimizer(factory, candidates, place)
        update = cls([], optimizer, factory, [], candidates, borrowed_candidates, place, clip_value)
        if optimizer is not None:
            update._optimizers.append(optimizer)
        update.refresh()
        return update

    def refresh(self) -> None:
        """Add parameters that have become trainable.

        Parameters that were trained and are frozen now stay, since they may have a gradient.
        """
        self.parameters[:] = _trainable(self.candidates, self.parameters)
        self.borrowed[:] = _trainable(self.borrowed_candidates, self.borrowed)
        self.__post_init__()

    def leave_to_replicas(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let replicas of the stage update some parameters, and keep their state (ZeRO).

        Args:
            parameters: those that this replica does not update.
        """
        self._left_to_replicas = parameters
        self.drop_state_of_replicas()

    def drop_state_of_replicas(self) -> None:
        """Drop the optimizer state of parameters that other replicas update."""
        if self.optimizer is not None:
            for parameter in self._left_to_replicas:
                self.optimizer.state.pop(parameter, None)

    @property
    def trains(self) -> bool:
        """Whether any parameter requires a gradient here."""
        return any(parameter.requires_grad for parameter in self._all)

    def new_optimizer(self) -> Optimizer:
        """Create one more optimizer over the same parameters, with a state of its own.

        Raises:
            SettingError: see `make_optimizer`; or the factory returned an earlier optimizer again.
        """
        assert self.factory is not None
        optimizer = make_optimizer(self.factory, list(self.candidates), self.place)
        if optimizer is None or any(optimizer is earlier for earlier in self._optimizers):
            raise SettingError(
                "optimizer= returned the same optimizer twice: this weight rule keeps several "
                "copies of the weights, each with an optimizer of its own, so it must make a new "
                "one at every call"
            )
        self._optimizers.append(optimizer)
        return optimizer

    def begin(self) -> None:
        """Drop the gradients that the last update used. Until then they can be read.

        Called before a batch.
        """
        if self._grads_used:
            self.zero()

    def zero(self) -> None:
        """Drop all gradients."""
        self._grads_used = False
        for parameter in self._all:
            parameter.grad = None

    def skip(self) -> None:
        """Leave the weights unchanged, and let the next batch drop the gradients."""
        self._grads_used = self.factory is not None
        self.steps += 1

    def step(self) -> None:
        """Create the next weight version."""
        self.stepping = True
        # torch's optimizers skip parameters without a gradient.
        for parameter in self._left_to_replicas:
            parameter.grad = None
        if self.clip_value is not None:
            clip_values(self.parameters, self.clip_value)
        if self.optimizer is not None:
            self.optimizer.step()
        self._grads_used = self.factory is not None
        # Last: after an exception above, the stage does not count as one of either step.
        self.steps += 1
        self.stepping = False

    def advance(self, optimizer: Optimizer | None = None) -> None:
        """Create the next weight version while micro-batches are in flight, and drop the gradients.

        Autograd's version counters do not change: the caller ensures that graphs in flight read the
        values they need.

        Args:
            optimizer: steps instead of the stage's own optimizer.
        """
        stepping = optimizer or self.optimizer
        if stepping is not None:
            with _unsafe_preserve_version_counter(self._stepped):
                stepping.step()
        if stepping is not None or self.factory is not None:
            self.zero()


def _trainable(
    candidates: Sequence[nn.Parameter], trained_before: Sequence[nn.Parameter]
) -> list[nn.Parameter]:
    """Return the candidates that require a gradient or did so before, in their order."""
    trained_ids = set(map(id, trained_before))
    return [
        parameter
        for parameter in candidates
        if parameter.requires_grad or id(parameter) in trained_ids
    ]
