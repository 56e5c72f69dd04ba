"""The methods of `Pipeline` for its optimizers.

These are learning rates, parameter groups, loss scaling, and the optimizer state in plain PyTorch's
form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.errors import SettingError
from penstock.optim.param_groups import ParameterGroup, parameter_groups_of, set_learning_rates
from penstock.ranks.settings.run_config import RunConfig
from penstock.runtime.assembly import Assembly
from penstock.runtime.global_step import GlobalStep
from penstock.runtime.state import torch_optimizer_state as plain_state
from penstock.runtime.streaming import Streaming
from penstock.stage.training_options import check_accumulate


class Optimizing:
    """The methods of `Pipeline` that concern optimizers."""

    _assembly: Assembly
    _global_step: GlobalStep
    _stream: Streaming | None
    _accumulate: int
    _accumulated: int
    setting: RunConfig

    @property
    def accumulate(self) -> int:
        """Number of batches per step; may be set between steps."""
        return self._accumulate

    @accumulate.setter
    def accumulate(self, count: int) -> None:
        """Set the number of batches per step.

        Raises:
            SettingError: there are accumulated gradients, or the schedule is asynchronous.
        """
        check_accumulate(count, self.setting.schedule)
        if self._accumulated:
            raise SettingError(
                f"accumulate cannot change while the gradients of {self._accumulated} batches wait "
                "for their step: update() or zero_grad() first"
            )
        self._accumulate = count

    @property
    def grad_norm(self) -> float | None:
        """The global gradient norm at the last step, before clipping.

        None if neither clipping nor loss scaling is enabled, since it is not computed then.
        """
        return self._global_step.grad_norm

    @property
    def loss_scale(self) -> float:
        """The factor by which the loss is multiplied before the backward; 1 without a scaler."""
        return 1.0 if self._global_step.scaler is None else self._global_step.scaler.scale

    @property
    def skipped(self) -> int:
        """The number of steps that all ranks have skipped because a gradient was not finite.

        With a loss scaler, those before a loaded checkpoint count too.
        """
        return self._global_step.skipped

    @property
    def param_groups(self) -> list[ParameterGroup]:
        """The optimizer's parameter groups, as `torch.optim.Optimizer.param_groups`.

        Setting an option changes it for all stages of this process. Every rank must set the same:
        `for group in pipe.param_groups: group["lr"] *= 0.5`. Ranks without parameters have groups
        too, so that they know the learning rate. `group["params"]` has the parameters of this
        process, and cannot be set.

        Raises:
            SettingError: there is no optimizer, or the stages' optimizers have different numbers of
                groups.
        """
        return parameter_groups_of(self._assembly.optimizers())

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of every parameter group."""
        return [float(group["lr"]) for group in self.param_groups]

    def set_learning_rate(self, lr: float | Sequence[float]) -> None:
        """Set the learning rate, from the next update on. Every rank must set the same.

        Args:
            lr: one learning rate for all parameters, or one for each parameter group.

        Raises:
            SettingError: there is no optimizer, it has no `lr`, the number of groups differs, or a
                learning rate is negative.
        """
        set_learning_rates(self.param_groups, lr)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """Return on rank 0 the optimizer state in plain PyTorch's form. Call it on all ranks.

        Returns:
            The state that one `torch.optim` optimizer over `model.parameters()` would have, with
            tensors on the CPU; with `parameter_groups=` the one over these groups, in order of
            appearance. Empty on all other ranks.

        Raises:
            SettingError: there is no optimizer; the stages' optimizers have different groups; or a
                weight rule keeps several optimizers for a stage.
        """
        self._assembly.check_unshared("optimizer_state_dict", "use pipe.save")
        self._settle()
        self._check_single_optimizers("has no form in plain PyTorch")
        with self._assembly.whole_optimizer_state():
            return plain_state.collect(self._assembly)

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the optimizer state from plain PyTorch's form. Call it on all ranks.

        Args:
            state: the result of `optimizer_state_dict`, or the `state_dict` of a plain PyTorch
                optimizer; the same on every rank.

        Raises:
            SettingError: as for `optimizer_state_dict`; or the groups have other numbers of
                parameters, or tensors have other shapes. No rank has changed anything.
        """
        self._assembly.check_unshared("load_optimizer_state_dict", "use pipe.load")
        if self._stream is not None:
            self._stream.empty()
        self._check_single_optimizers("cannot be taken from plain PyTorch")
        plain_state.restore(self._assembly, state)
        self._assembly.drop_state_of_replicas()
        if self._stream is not None:
            self._stream.weights.restart()

    def _check_single_optimizers(self, problem: str) -> None:
        """Check that each stage has a single optimizer.

        Args:
            problem: the end of the sentence "the optimizer's state ...".

        Raises:
            SettingError: a weight rule keeps further ones.
        """
        has_more = self._stream is not None and self._stream.weights.has_more_optimizers()
        if has_more or self._assembly.optimizer_replicas > 1:
            raise SettingError(
                f"the optimizer's state {problem}: {self._assembly.setting.schedule.name} keeps "
                "several copies of the weights, each with an optimizer of its own. Use save() and "
                "load()"
            )

    def _settle(self) -> None:
        """Finish all batches in flight of an asynchronous schedule."""
        if self._stream is not None:
            self._stream.flush()
