"""Dynamic loss scaling for float16, as torch.amp.GradScaler, for gradients distributed over ranks.

The loss is multiplied by a scale, so that small gradients do not underflow in float16; before the
step the gradients are divided by it. If a gradient on any rank is infinite or not a number, no rank
steps and the scale is reduced. After enough steps without such a gradient it is increased.

Source: Micikevicius et al. 2018, Mixed precision training, section 3.2; torch/amp/grad_scaler.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import SettingError
from penstock.values.sharded import local_part

_DEFAULTS: Mapping[str, float] = {
    "init_scale": 65536.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
}


class LossScaler:
    """The scale and its updates. Every process has one, and all have the same state."""

    def __init__(self, options: Mapping[str, float]) -> None:
        """Create a scaler with the scale `init_scale`.

        Args:
            options: any of `init_scale`, `growth_factor`, `backoff_factor`, `growth_interval`;
                defaults are those of torch's GradScaler.

        Raises:
            SettingError: an option is unknown or out of range.
        """
        for name in options:
            if name not in _DEFAULTS:
                raise SettingError(f"scaler has no option {name!r}; it has {', '.join(_DEFAULTS)}")
        self._options = {**_DEFAULTS, **options}
        scale = self._options["init_scale"]
        growth, backoff = self._options["growth_factor"], self._options["backoff_factor"]
        interval = self._options["growth_interval"]
        if not (_is_scale(scale) and 1 < growth < math.inf and 0 < backoff < 1):
            raise SettingError(
                "scaler: init_scale is above 0 and finite in float32, growth_factor above 1, "
                "backoff_factor between 0 and 1; these are "
                f"{scale:g}, {growth:g}, {backoff:g}"
            )
        if not 1 <= interval < math.inf or interval != int(interval):
            raise SettingError(
                f"scaler: growth_interval is a number of steps, 1 or more, not {interval:g}"
            )
        self._scale = torch.tensor(scale, dtype=torch.float32)
        self._steps = torch.tensor(0, dtype=torch.int32)
        self.skipped = 0

    @classmethod
    def of(cls, setting: object) -> LossScaler | None:
        """Create a scaler from the user's setting; None if scaling is off.

        Args:
            setting: True, options by name, or a torch.amp.GradScaler whose options are copied; None
                or False for no scaling.

        Raises:
            SettingError: the setting is something else.
        """
        if setting is None or setting is False:
            return None
        if setting is True:
            return cls({})
        if isinstance(setting, torch.amp.GradScaler):
            if not setting.is_enabled():
                return None
            return cls(
                {
                    "init_scale": setting.get_scale(),
                    "growth_factor": setting.get_growth_factor(),
                    "backoff_factor": setting.get_backoff_factor(),
                    "growth_interval": setting.get_growth_interval(),
                }
            )
        if isinstance(setting, Mapping):
            return cls(setting)
        raise SettingError(
            "scaler is True, options such as {'init_scale': 1024.0}, or a torch.amp.GradScaler, "
            f"not {setting!r}"
        )

    @property
    def scale(self) -> float:
        """The factor by which the loss is multiplied."""
        return float(self._scale)

    def unscale(self, parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
        """Divide the gradients by the scale.

        Returns:
            A tensor of shape (1,), above 0 if a gradient is not finite.

        Raises:
            SettingError: a gradient is of dtype float16, in which the division would underflow.
        """
        overflow = torch.zeros(1, device=device)
        # In float64, as GradScaler does: a reciprocal in float32 may be imprecise under some
        # compilers.
        inverse = self._scale.double().reciprocal().float().to(device)
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            grad = parameter.grad
            if grad is None:
                continue
            if grad.dtype is torch.float16:
                raise SettingError(
                    "a scaler is for parameters of float32 under autocast; these are of float16, "
                    "in which their gradients would be divided by the scale and vanish: keep the "
                    "parameters in float32"
                )
            if grad.is_sparse:
                grad = parameter.grad = grad.coalesce()
                grad = grad._values()
            by_dtype.setdefault(grad.dtype, []).append(local_part(grad))
        for grads in by_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(grads, overflow, inverse)
        return overflow

    def update(self, overflow: float) -> None:
        """Increase or reduce the scale after a step.

        Args:
            overflow: above 0 if a gradient on any rank was not finite.
        """
        self.skipped += overflow > 0
        torch._amp_update_scale_(
            self._scale,
            self._steps,
            torch.tensor(float(overflow > 0)),
            self._options["growth_factor"],
            self._options["backoff_factor"],
            int(self._options["growth_interval"]),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state: scale, steps since it changed, and number of skipped steps."""
        return {"scale": self.scale, "steps": int(self._steps), "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`.

        Raises:
            SettingError: the scale is not a positive finite number.
        """
        scale = float(state["scale"])
        if not _is_scale(scale):
            raise SettingError(
                f"the scale of a saved scaler is above 0 and finite in float32, not {scale}"
            )
        self._scale.fill_(scale)
        self._steps.fill_(int(state["steps"]))
        self.skipped = int(state["skipped"])


def _is_scale(value: float) -> bool:
    """Return whether a value is a positive finite number as a float32, in which scales are stored.

    An infinite scale is never reduced, so that every step would be skipped.
    """
    return 0 < float(torch.tensor(value, dtype=torch.float32)) < math.inf
