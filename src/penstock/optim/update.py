"""The update of one stage: its optimizer, and when gradients begin anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import Optimizer

from penstock.errors import SettingError

OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]


@dataclass
class Update:
    """One stage's parameters and what steps them. Without an optimizer, gradients are left to the user and add up."""

    parameters: list[nn.Parameter]
    optimizer: Optimizer | None
    factory: OptimizerFactory | None = None
    _spent: bool = False

    @classmethod
    def make(cls, parameters: Sequence[nn.Parameter], factory: OptimizerFactory | None) -> Update:
        """Build the optimizer over the parameters that want gradients; a stage without any has none.

        Raises:
            SettingError: the factory returned something else than an optimizer.
        """
        trainable = [parameter for parameter in parameters if parameter.requires_grad]
        if factory is None or not trainable:
            return cls(trainable, None)
        return cls(trainable, _made(factory, trainable), factory)

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
        for parameter in self.parameters:
            parameter.grad = None

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
            with _unsafe_preserve_version_counter(tuple(self.parameters)):
                stepping.step()
            self.zero()


def _made(factory: OptimizerFactory, parameters: list[nn.Parameter]) -> Optimizer:
    optimizer = factory(parameters)
    if not isinstance(optimizer, Optimizer):
        raise SettingError(f"optimizer= is a function from parameters to a torch.optim.Optimizer; this one returned "
                           f"{type(optimizer).__name__}")  # fmt: skip
    return optimizer
