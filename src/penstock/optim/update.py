"""The update of one stage: its optimizer, and when gradients begin anew."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import Optimizer

from penstock.errors import SettingError

#: From a list of parameters, or of torch's parameter groups, to an optimizer.
OptimizerFactory = Callable[[Any], Optimizer]


@dataclass
class Update:
    """One stage's parameters and what steps them. Without an optimizer, gradients are left to the user and add up.

    `borrowed` are parameters whose gradients gather here, too, and which another stage steps: it holds the same weight.
    """

    parameters: list[nn.Parameter]
    optimizer: Optimizer | None
    factory: OptimizerFactory | None = None
    borrowed: list[nn.Parameter] = field(default_factory=list)
    _spent: bool = False

    def __post_init__(self) -> None:
        # Asked for at every step, and the same at each.
        self._all = [*self.parameters, *self.borrowed]
        self._own = tuple(self.parameters)

    @classmethod
    def make(cls, parameters: Sequence[nn.Parameter], factory: OptimizerFactory | None,
             borrowed: Iterable[nn.Parameter] = ()) -> Update:  # fmt: skip
        """Build the optimizer over the parameters that want gradients; a stage without any has none.

        Args:
            parameters: of the stage.
            factory: makes the optimizer.
            borrowed: those of them that another stage steps.

        Raises:
            SettingError: the factory returned something else than an optimizer.
        """
        elsewhere = {id(parameter) for parameter in borrowed}
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        own = [parameter for parameter in trainable if id(parameter) not in elsewhere]
        others = [parameter for parameter in trainable if id(parameter) in elsewhere]
        if factory is None or not own:
            return cls(own, None, borrowed=others)
        return cls(own, _made(factory, own), factory, others)

    @property
    def trains(self) -> bool:
        """Whether gradients of any parameter are wanted here."""
        return bool(self._all)

    def another(self) -> Optimizer:
        """One more optimizer over the same parameters, with a state of its own.

        Raises:
            SettingError: the factory returned something else than an optimizer.
        """
        assert self.factory is not None
        return _made(self.factory, list(self.parameters))

    def begin(self) -> None:
        """Before a batch: gradients that the last update used are dropped. Until then they can be looked at."""
        if self._spent:
            self.zero()

    def zero(self) -> None:
        """Drop all gradients."""
        self._spent = False
        for parameter in self._all:
            parameter.grad = None

    def skip(self) -> None:
        """Leave the weights as they are; the gradients have been looked at, and the next batch drops them."""
        self._spent = self.optimizer is not None

    def step(self) -> None:
        """Make the next weight version."""
        if self.optimizer is not None:
            self.optimizer.step()
            self._spent = True

    def advance(self, optimizer: Optimizer | None = None) -> None:
        """Make the next weight version in mid-stream, by the stage's own optimizer unless told, and drop the gradients.

        Autograd is not told that the weights have changed: whoever calls this has seen to it that graphs in flight find in them
        what they are meant to.
        """
        stepping = optimizer or self.optimizer
        if stepping is not None:
            with _unsafe_preserve_version_counter(self._own):
                stepping.step()
            self.zero()


def _made(factory: OptimizerFactory, parameters: list[nn.Parameter]) -> Optimizer:
    optimizer = factory(parameters)
    if not isinstance(optimizer, Optimizer):
        raise SettingError(f"optimizer= is a function from parameters to a torch.optim.Optimizer; this one returned "
                           f"{type(optimizer).__name__}")  # fmt: skip
    return optimizer
