"""The update of one stage: its optimizer, and when gradients begin anew."""

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
    """One stage's parameters and what steps them. Without an optimizer, gradients are left to the
    user and add up.

    Attributes:
        parameters: those that are trained, in the order of the stage. `refresh` adds what is thawed
        later. optimizer: over `candidates`; None where there is no factory, or where it leaves out
        all of them. factory: makes the optimizer. borrowed: parameters whose gradients gather here,
        too, and which another stage steps: it holds the same weight. candidates: all parameters of
        the stage that could be trained, frozen ones too: what the factory is called with.
        borrowed_candidates: likewise, those that another stage steps. place: where, for messages.
        clip_value: the largest absolute value that a gradient may have at a step; None for any.
    """

    parameters: list[nn.Parameter]
    optimizer: Optimizer | None
    factory: OptimizerFactory | None = None
    borrowed: list[nn.Parameter] = field(default_factory=list)
    candidates: Sequence[nn.Parameter] = ()
    borrowed_candidates: Sequence[nn.Parameter] = ()
    place: str = "a stage"
    clip_value: float | None = None
    _spent: bool = False
    _optimizers: list[Optimizer] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Asked for at every step, and the same at each.
        self._all = [*self.parameters, *self.borrowed]
        self._own = tuple(self.parameters)

    @classmethod
    def make(
        cls,
        parameters: Sequence[nn.Parameter],
        factory: OptimizerFactory | None,
        borrowed: Iterable[nn.Parameter] = (),
        place: str = "a stage",
    ) -> Update:
        """Build the optimizer over a stage's parameters; a stage without any has none.

        The factory is called with frozen parameters too, as with `model.parameters()`: torch's
        optimizers pass over what has no gradient, and what is thawed later is then trained.

        Args:
            parameters: of the stage.
            factory: makes the optimizer.
            borrowed: those of them that another stage steps.
            place: where, for messages.

        Raises:
            SettingError: see `make_optimizer`.
        """
        elsewhere = {id(parameter) for parameter in borrowed}
        able = [each for each in parameters if each.is_floating_point() or each.is_complex()]
        own = [parameter for parameter in able if id(parameter) not in elsewhere]
        others = [parameter for parameter in able if id(parameter) in elsewhere]
        optimizer = make_optimizer(factory, own, place) if factory is not None and own else None
        made = cls([], optimizer, factory, [], own, others, place)
        if optimizer is not None:
            made._optimizers.append(optimizer)
        made.refresh()
        return made

    def refresh(self) -> None:
        """Take in parameters that have been thawed. What was trained before and is frozen now
        stays: it may have a gradient.
        """
        self.parameters[:] = _trained(self.candidates, self.parameters)
        self.borrowed[:] = _trained(self.borrowed_candidates, self.borrowed)
        self.__post_init__()

    @property
    def trains(self) -> bool:
        """Whether gradients of any parameter are wanted here."""
        return any(parameter.requires_grad for parameter in self._all)

    def another(self) -> Optimizer:
        """One more optimizer over the same parameters, with a state of its own.

        Raises:
            SettingError: see `make_optimizer`; or the factory returned an optimizer that it has
            returned before.
        """
        assert self.factory is not None
        optimizer = make_optimizer(self.factory, list(self.candidates), self.place)
        if optimizer is None or any(optimizer is each for each in self._optimizers):
            raise SettingError(
                "optimizer= returned the same optimizer twice: this weight rule keeps several copies of the weights, "
                "each with an optimizer of its own, so it must make a new one at every call"
            )
        self._optimizers.append(optimizer)
        return optimizer

    def begin(self) -> None:
        """Before a batch: gradients that the last update used are dropped. Until then they can be
        looked at.
        """
        if self._spent:
            self.zero()

    def zero(self) -> None:
        """Drop all gradients."""
        self._spent = False
        for parameter in self._all:
            parameter.grad = None

    def skip(self) -> None:
        """Leave the weights as they are; the gradients have been looked at, and the next batch
        drops them.
        """
        self._spent = self.factory is not None

    def step(self) -> None:
        """Make the next weight version."""
        if self.clip_value is not None:
            clip_values(self.parameters, self.clip_value)
        if self.optimizer is not None:
            self.optimizer.step()
        self._spent = self.factory is not None

    def advance(self, optimizer: Optimizer | None = None) -> None:
        """Make the next weight version in mid-stream, by the stage's own optimizer unless told, and
        drop the gradients.

        Autograd is not told that the weights have changed: whoever calls this has seen to it that
        graphs in flight find in them what they are meant to.
        """
        stepping = optimizer or self.optimizer
        if stepping is not None:
            with _unsafe_preserve_version_counter(self._own):
                stepping.step()
        if stepping is not None or self.factory is not None:
            self.zero()


def _trained(
    candidates: Sequence[nn.Parameter], before: Sequence[nn.Parameter]
) -> list[nn.Parameter]:
    """Those that want a gradient, or did before, in their order."""
    known = set(map(id, before))
    return [each for each in candidates if each.requires_grad or id(each) in known]
