"""Learning-rate schedulers: one of torch's for every optimizer that is held here, all moved as one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.errors import SettingError
from penstock.optim.class_names import class_name, same_class
from penstock.optim.factory import OptimizerFactory, make_optimizer
from penstock.optim.param_groups import separate_tensors

#: From an optimizer to a scheduler over it, such as `lambda optimizer: StepLR(optimizer, 10)`.
SchedulerFactory = Callable[[Optimizer], Any]


class Schedulers:
    """What `Pipeline.scheduler` returns. Every rank has one, and calls its methods with the same
    numbers.
    """

    def __init__(
        self,
        make: SchedulerFactory,
        optimizers: Sequence[Optimizer],
        saved: str | None = None,
        saved_kind: str | None = None,
    ) -> None:
        """Make a scheduler for each optimizer.

        Args:
            make: takes an optimizer; called once for each.
            optimizers: at least one (`stand_in` makes one where a rank has none).
            saved: what `as_json` gave, to go on from. The optimizers have been restored already.
            saved_kind: the `kind` of the scheduler that gave it, where that is known.

        Raises:
            SettingError: `make` is no function, or returned something that is no scheduler of the
            optimizer that it was given, or
                one of another class than that which was saved.
        """
        if not callable(make):
            raise SettingError(
                "scheduler() takes a function from an optimizer to a scheduler, such as lambda optimizer: "
                f"{type(make).__name__}(optimizer, ...), since every stage has an optimizer of its own; this is a "
                f"{type(make).__name__} itself"
            )
        self._optimizers = list(optimizers)
        separate_tensors(self._optimizers)
        # Making a scheduler sets learning rate and momentum to what they begin with.
        options = [
            [
                {key: value for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups
            ]
            for optimizer in self._optimizers
        ]
        self._each = [make(optimizer) for optimizer in self._optimizers]
        for each in self._each:
            if not callable(getattr(each, "step", None)) or not callable(
                getattr(each, "state_dict", None)
            ):
                raise SettingError(
                    "scheduler() takes a function from an optimizer to one of torch.optim.lr_scheduler, such as lambda "
                    f"optimizer: StepLR(optimizer, 10); this one returned {type(each).__name__}"
                )
        _check_own(self._each, self._optimizers)
        if saved is not None:
            for optimizer, groups in zip(self._optimizers, options, strict=True):
                for group, kept in zip(optimizer.param_groups, groups, strict=True):
                    group.update(kept)
            if not self.fits(saved_kind, json.loads(saved)):
                raise SettingError(
                    f"this scheduler is {self.kind}, and the checkpoint that was loaded has the state of "
                    f"{saved_kind or 'another one'} in its place. Make the schedulers that there were, in that order; to begin "
                    "them anew, load it with skip='schedulers'"
                )
            self.load_json(saved)

    @property
    def kind(self) -> str:
        """The name of its class, and of those that it is made of."""
        return class_name(self._each[0])

    def fits(self, kind: str | None, state: Mapping[str, Any]) -> bool:
        """Whether a saved state is of a scheduler of this class; where the class is not known,
        whether it has the same entries.
        """
        if kind is not None:
            return same_class(kind, self.kind)
        saved, own = (
            {key for key in held if not key.startswith("_")} for held in (state, self.state_dict())
        )
        return saved == own

    def step(self, *args: Any, **kwargs: Any) -> None:
        """As the scheduler's own: `step()`, `step(epoch)`, or `step(metric)` for ReduceLROnPlateau.
        The loss that `train_batch` and `eval_batch` return is the same on every rank, so all come
        to the same decision.
        """
        for each in self._each:
            each.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """The learning rates, by parameter group."""
        return [float(rate) for rate in self._each[0].get_last_lr()]

    def state_dict(self) -> dict[str, Any]:
        """The state of one of them. They differ in nothing, unless the optimizers' groups do."""
        return dict(self._each[0].state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, here or on another rank, and set the optimizers'
        learning rates accordingly.
        """
        for optimizer, each in zip(self._optimizers, self._each, strict=True):
            groups = len(optimizer.param_groups)
            own = each.state_dict()
            # Where a stage's optimizer has other groups than the one that was saved, what is by
            # group stays its own.
            fitting = {
                key: own[key]
                if isinstance(value, list)
                and isinstance(own.get(key), list)
                and len(own[key]) != len(value)
                else value
                for key, value in state.items()
            }
            each.load_state_dict(fitting)
            rates = fitting.get("_last_lr")
            if (
                rates is not None
                and len(rates) == groups
                and len(state.get("_last_lr", ())) == groups
            ):
                for group, rate in zip(optimizer.param_groups, rates, strict=True):
                    group["lr"] = (
                        torch.full_like(group["lr"], rate)
                        if isinstance(group["lr"], Tensor)
                        else rate
                    )

    def load_json(self, text: str) -> None:
        """Go on from what `as_json` gave."""
        self.load_state_dict(json.loads(text))

    def as_json(self) -> str:
        """`state_dict` as JSON, for a checkpoint.

        Raises:
            SettingError: it has something in it that is no plain number.
        """
        try:
            return json.dumps(_plain(self.state_dict()))
        except (TypeError, ValueError) as error:
            raise SettingError(
                f"the state of {type(self._each[0]).__name__} cannot go into a checkpoint: {error}"
            ) from error


def _check_own(schedulers: Sequence[Any], optimizers: Sequence[Optimizer]) -> None:
    for scheduler, optimizer in zip(schedulers, optimizers, strict=True):
        its = getattr(scheduler, "optimizer", optimizer)
        if isinstance(its, Optimizer) and its is not optimizer:
            raise SettingError(
                f"scheduler() called the function with a stage's optimizer and got a {type(scheduler).__name__} of another one: "
                f"it ignores its argument. Write lambda optimizer: {type(scheduler).__name__}(optimizer, ...)"
            )


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def stand_in(factory: OptimizerFactory) -> Optimizer:
    """An optimizer like the stages', over numbers that nothing uses: for a rank where nothing is
    trained, which is to know the learning rate all the same.

    Raises:
        SettingError: the factory refuses parameters of every number of dimensions from 1 to 4.
    """
    shapes = [(1,) * dims for dims in range(1, 5)]
    # All at once suits a factory that chooses by dimensions; one that refuses some takes others.
    for chosen in (shapes[:1], shapes, *([shape] for shape in shapes[1:])):
        try:
            optimizer = make_optimizer(
                factory, [nn.Parameter(torch.zeros(shape)) for shape in chosen], "a rank"
            )
        except ValueError as error:
            if isinstance(error, SettingError):
                raise
            continue
        if optimizer is not None:
            # torch's schedulers complain of optimizers that never step
            optimizer._opt_called = True  # type: ignore[attr-defined]
            return optimizer
    raise SettingError(
        "this rank has no parameters, and optimizer= makes no optimizer over a stand-in for them, a single number, by which "
        "it would know the learning rate: let the factory take any parameters, or cut the model so that every rank has some"
    )
