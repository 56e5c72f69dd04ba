"""What a `Pipeline` offers of its optimizers: schedulers, learning rates, parameter groups, and
their state in plain PyTorch's form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.optim.param_groups import ParameterGroup, parameter_groups_of, set_learning_rates
from penstock.runtime import plain_state
from penstock.runtime.assembly import Assembly
from penstock.runtime.streaming import Streaming
from penstock.runtime.together import Together


class Optimizing:
    """The part of `Pipeline` that is about optimizers."""

    _made: Assembly
    _together: Together
    _stream: Streaming | None

    @property
    def grad_norm(self) -> float | None:
        """The norm of all stages' gradients at the last step, before clipping; None where neither
        clipping nor scaling asks for it.
        """
        return self._together.grad_norm

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before the backward; 1 without a scaler."""
        return 1.0 if self._together.scaler is None else self._together.scaler.scale

    @property
    def skipped(self) -> int:
        """Steps that were skipped because a gradient was not finite, on all ranks."""
        return 0 if self._together.scaler is None else self._together.scaler.skipped

    @property
    def param_groups(self) -> list[ParameterGroup]:
        """The optimizer's parameter groups, as `torch.optim.Optimizer.param_groups`: what is
        written holds for all stages held here.

        Every rank must write the same: `for group in pipe.param_groups: group["lr"] *= 0.5`. Ranks
        without parameters have groups, too, so that they know the learning rate. `group["params"]`
        are those held here, and cannot be set.

        Raises:
            SettingError: there is no optimizer, or the stages' optimizers have different numbers of
            groups.
        """
        return parameter_groups_of(self._made.optimizers())

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of every parameter group."""
        return [float(group["lr"]) for group in self.param_groups]

    def set_learning_rate(self, lr: float | Sequence[float]) -> None:
        """Set the learning rate by hand, from the next update on. Every rank must set the same.

        Args:
            lr: of all parameters, or one for each parameter group.

        Raises:
            SettingError: there is no optimizer, it has no `lr`, there are other numbers of groups,
            or a learning rate is below 0.
        """
        set_learning_rates(self.param_groups, lr)

    def optimizer_state_dict(self) -> dict[str, Any]:
        """On rank 0: the state that one `torch.optim` optimizer over `model.parameters()` would
        have, tensors on the CPU; elsewhere empty. With `parameter_groups=` the one over these
        groups, in order of appearance. Every rank must ask.

        Raises:
            SettingError: there is no optimizer; the stages' optimizers have unlike groups; or a
            weight rule keeps several
                optimizers for a stage.
        """
        self._settle()
        return plain_state.collect(self._made)

    def load_optimizer_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `optimizer_state_dict`, or `state_dict` of an optimizer of plain PyTorch,
        gave. Every rank must give it.

        Raises:
            SettingError: see `optimizer_state_dict`; or the groups have other numbers of
            parameters, or the state is of
                parameters of other shapes. Nothing has changed then.
        """
        if self._stream is not None:
            self._stream.begin_anew()
        plain_state.restore(self._made, state)
        if self._stream is not None:
            self._made.let_read()

    def _settle(self) -> None:
        if self._stream is not None:
            self._stream.flush()
