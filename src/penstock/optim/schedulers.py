"""Learning-rate schedulers: one scheduler of torch for every local optimizer, stepped together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.errors import SettingError
from penstock.files.json_values import json_value
from penstock.optim.class_names import class_name, same_class
from penstock.optim.factory import OptimizerFactory, make_optimizer
from penstock.optim.param_groups import ParameterGroup, separate_tensors

#: What messages call the text of a scheduler's state.
_STATE = "the state of a learning-rate scheduler"

#: Takes an optimizer and returns a scheduler: `lambda optimizer: StepLR(optimizer, 10)`.
SchedulerFactory = Callable[[Optimizer], Any]


class Schedulers:
    """Schedulers of all local optimizers; the result of `Pipeline.scheduler`.

    Every rank has one, and calls its methods with the same numbers.
    """

    def __init__(
        self,
        make: SchedulerFactory,
        optimizers: Sequence[Optimizer],
        saved: str | None = None,
        saved_kind: str | None = None,
    ) -> None:
        """Create a scheduler for each optimizer.

        Args:
            make: takes an optimizer; called once for each.
            optimizers: at least one (`stand_in` creates one where a rank has none).
            saved: result of `as_json`, to continue from. The optimizers have been restored already.
            saved_kind: the `kind` of the scheduler that was saved, if known.

        Raises:
            SettingError: `make` is not a function, or returned something that is not a scheduler of
                the optimizer passed to it, or one of another class than the saved one.
        """
        if not callable(make):
            raise SettingError(_instance_message(type(make).__name__))
        self._optimizers = list(optimizers)
        separate_tensors(self._optimizers)
        # A new scheduler sets learning rate and momentum to their initial values.
        options = [_group_options(optimizer) for optimizer in self._optimizers]
        self._schedulers = [make(optimizer) for optimizer in self._optimizers]
        _check_schedulers(self._schedulers, self._optimizers)
        if saved is not None:
            for optimizer, saved_options in zip(self._optimizers, options, strict=True):
                for group, group_options in zip(optimizer.param_groups, saved_options, strict=True):
                    group.update(group_options)
            self._resume(saved, saved_kind)

    def _resume(self, saved: str, saved_kind: str | None) -> None:
        if not self.fits(saved_kind, json_value(saved, _STATE, finite=False)):
            raise SettingError(
                f"this scheduler is {self.kind}, and the checkpoint that was loaded has the state "
                f"of {saved_kind or 'another one'} in its place. Make the same schedulers in the "
                "same order; to begin them anew, load it with skip='schedulers'"
            )
        self.load_json(saved)

    @property
    def kind(self) -> str:
        """The name of the scheduler's class, and of the schedulers it is composed of."""
        return class_name(self._schedulers[0])

    def fits(self, kind: str | None, state: Mapping[str, Any]) -> bool:
        """Return whether a saved state is of this class of scheduler.

        Args:
            kind: the saved `kind`. If None, the names of the entries are compared instead.
            state: the saved state.
        """
        if kind is not None:
            return same_class(kind, self.kind)
        return _public_keys(state) == _public_keys(self.state_dict())

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step as the scheduler does: `step()`, `step(epoch)`, or `step(metric)`.

        `step(metric)` is for ReduceLROnPlateau. The loss that `train_batch` and `eval_batch` return
        is the same on every rank, so that all ranks take the same decision.
        """
        for scheduler in self._schedulers:
            scheduler.step(*args, **kwargs)

    def get_last_lr(self) -> list[float]:
        """Return the learning rates by parameter group."""
        return [float(rate) for rate in self._schedulers[0].get_last_lr()]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the first scheduler.

        The others differ from it only if the optimizers' groups do.
        """
        return dict(self._schedulers[0].state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict` (of any rank), and set the learning rates."""
        for optimizer, scheduler in zip(self._optimizers, self._schedulers, strict=True):
            scheduler.load_state_dict(_fitting_state(state, scheduler.state_dict()))
            # torch's `load_state_dict` leaves the rates of the optimizer as they are. Groups that
            # do not correspond to the saved ones keep theirs.
            rates = state.get("_last_lr") or ()
            if len(rates) != len(optimizer.param_groups):
                continue
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                ParameterGroup([group])["lr"] = rate

    def load_json(self, text: str) -> None:
        """Restore the result of `as_json`."""
        self.load_state_dict(json_value(text, _STATE, finite=False))

    def as_json(self) -> str:
        """Return `state_dict` as JSON, for a checkpoint.

        Raises:
            SettingError: the state contains a value that JSON cannot represent.
        """
        try:
            return json.dumps(_plain(self.state_dict()))
        except (TypeError, ValueError) as error:
            raise SettingError(
                f"the state of {type(self._schedulers[0]).__name__} cannot go into a checkpoint: "
                f"{error}"
            ) from error


def _instance_message(kind: str) -> str:
    """Return the message for a scheduler given in place of a function."""
    return (
        "scheduler() takes a function from an optimizer to a scheduler, such as lambda "
        f"optimizer: {kind}(optimizer, ...), since every stage has an optimizer of its own; this "
        f"is a {kind} itself"
    )


def _group_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    options = []
    for group in optimizer.param_groups:
        options.append({key: value for key, value in group.items() if key != "params"})
    return options


def _public_keys(state: Mapping[str, Any]) -> set[str]:
    return {key for key in state if not key.startswith("_")}


def _fitting_state(state: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """Return `state` with entries of `present` in place of lists of another length.

    Such lists have one entry for each parameter group, and the stage's optimizer has other groups
    than the one that was saved.
    """
    fitting = dict(state)
    for key, value in state.items():
        present_value = present.get(key)
        if (
            isinstance(value, list)
            and isinstance(present_value, list)
            and len(present_value) != len(value)
        ):
            fitting[key] = present_value
    return fitting


def _check_schedulers(schedulers: Sequence[Any], optimizers: Sequence[Optimizer]) -> None:
    for scheduler in schedulers:
        methods = (getattr(scheduler, "step", None), getattr(scheduler, "state_dict", None))
        # A class, of a function that forgets the call, has these methods too.
        if isinstance(scheduler, type) or not all(map(callable, methods)):
            raise SettingError(
                "scheduler() takes a function from an optimizer to one of "
                "torch.optim.lr_scheduler, such as lambda optimizer: StepLR(optimizer, 10); this "
                f"one returned {type(scheduler).__name__}"
            )
    for scheduler, optimizer in zip(schedulers, optimizers, strict=True):
        attached = getattr(scheduler, "optimizer", optimizer)
        if isinstance(attached, Optimizer) and attached is not optimizer:
            kind = type(scheduler).__name__
            raise SettingError(
                f"scheduler() called the function with a stage's optimizer and got a {kind} of "
                f"another one: it ignores its argument. Write lambda optimizer: {kind}(optimizer, "
                "...)"
            )


def _plain(value: Any) -> Any:
    """Convert tensors to numbers and lists, within nested values."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def stand_in(factory: OptimizerFactory) -> Optimizer:
    """Return an optimizer over dummy parameters, for a rank without parameters to train.

    Schedulers step it, so that the rank knows the learning rate.

    Raises:
        SettingError: the factory rejects dummy parameters of 1 to 4 dimensions.
    """
    shapes = [(1,) * dims for dims in range(1, 5)]
    # All shapes at once suit a factory that selects by dimensions; a factory that rejects some
    # shapes gets them one by one.
    for attempt in (shapes[:1], shapes, *([shape] for shape in shapes[1:])):
        parameters = [nn.Parameter(torch.zeros(shape)) for shape in attempt]
        try:
            optimizer = make_optimizer(factory, parameters, "a rank")
        except ValueError as error:
            if isinstance(error, SettingError):
                raise
            continue
        if optimizer is not None:
            # torch's schedulers warn about optimizers that never step.
            optimizer._opt_called = True  # type: ignore[attr-defined]
            return optimizer
    raise SettingError(
        "this rank has no parameters, and optimizer= creates no optimizer over a stand-in for "
        "them, a single number, by which it would know the learning rate: let the factory take any "
        "parameters, or cut the model so that every rank has some"
    )
