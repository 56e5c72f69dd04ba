"""Dynamic loss scaling for float16: as torch.amp.GradScaler does it, for gradients that lie on
several ranks.

The loss is multiplied by a scale, so that small gradients do not vanish in float16; before the step
the gradients are divided by it. If any of them, on any rank, is infinite or no number, no rank
steps, and the scale comes down. After enough steps without, it goes up.

Source: Micikevicius et al. 2018, Mixed precision training, section 3.2; torch/amp/grad_scaler.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import SettingError

_DEFAULTS: Mapping[str, float] = {
    "init_scale": 65536.0,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "growth_interval": 2000,
}


class LossScaler:
    """The scale and what becomes of it. Every process has one, and all come to the same."""

    def __init__(self, options: Mapping[str, float]) -> None:
        """Begin at `init_scale`.

        Args:
            options: any of `init_scale`, `growth_factor`, `backoff_factor`, `growth_interval`; the
            others as in torch's GradScaler.

        Raises:
            SettingError: an option is unknown or makes no sense.
        """
        for name in options:
            if name not in _DEFAULTS:
                raise SettingError(f"scaler has no option {name!r}; it has {', '.join(_DEFAULTS)}")
        found = {**_DEFAULTS, **options}
        if not (
            found["init_scale"] > 0
            and found["growth_factor"] > 1
            and 0 < found["backoff_factor"] < 1
        ):
            raise SettingError(
                f"scaler: init_scale is above 0, growth_factor above 1, backoff_factor between 0 and 1; these are "
                f"{found['init_scale']:g}, {found['growth_factor']:g}, {found['backoff_factor']:g}"
            )
        if found["growth_interval"] < 1 or found["growth_interval"] != int(
            found["growth_interval"]
        ):
            raise SettingError(
                f"scaler: growth_interval is a number of steps, 1 or more, not {found['growth_interval']:g}"
            )
        self._options = found
        self._scale = torch.tensor(found["init_scale"], dtype=torch.float32)
        self._steps = torch.tensor(0, dtype=torch.int32)
        self.skipped = 0

    @classmethod
    def of(cls, wish: object) -> LossScaler | None:
        """From what a user may say: True, options by name, a torch.amp.GradScaler to be like;
        nothing for None and False.

        Raises:
            SettingError: it is something else.
        """
        if wish is None or wish is False:
            return None
        if wish is True:
            return cls({})
        if isinstance(wish, torch.amp.GradScaler):
            if not wish.is_enabled():
                return None
            return cls(
                {
                    "init_scale": wish.get_scale(),
                    "growth_factor": wish.get_growth_factor(),
                    "backoff_factor": wish.get_backoff_factor(),
                    "growth_interval": wish.get_growth_interval(),
                }
            )
        if isinstance(wish, Mapping):
            return cls(wish)
        raise SettingError(
            f"scaler is True, options such as {{'init_scale': 1024.0}}, or a torch.amp.GradScaler, not {wish!r}"
        )

    @property
    def scale(self) -> float:
        """What the loss is multiplied by."""
        return float(self._scale)

    def unscale(self, parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
        """Divide the gradients by the scale; returns a number above 0, shape (1,), if one of them
        is not finite.

        Raises:
            SettingError: a gradient is itself of float16, in which the division would lose what the
            scale has saved.
        """
        found = torch.zeros(1, device=device)
        inverse = self._scale.double().reciprocal().float().to(device)
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            grad = parameter.grad
            if grad is None:
                continue
            if grad.dtype is torch.float16:
                raise SettingError(
                    "a scaler is for parameters of float32 under autocast; these are of float16, in which their "
                    "gradients would be divided by the scale and vanish: keep the parameters in float32"
                )
            if grad.is_sparse:
                grad = parameter.grad = grad.coalesce()
                grad = grad._values()
            by_dtype.setdefault(grad.dtype, []).append(grad)
        for grads in by_dtype.values():
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inverse)
        return found

    def update(self, found: float) -> None:
        """After a step: go up or come down.

        Args:
            found: above 0 if a gradient on any rank was not finite.
        """
        self.skipped += found > 0
        torch._amp_update_scale_(
            self._scale,
            self._steps,
            torch.tensor(float(found > 0)),
            self._options["growth_factor"],
            self._options["backoff_factor"],
            int(self._options["growth_interval"]),
        )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the scale, the steps since it changed, and the steps that were
        skipped.
        """
        return {"scale": self.scale, "steps": int(self._steps), "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` gave.

        Raises:
            SettingError: the scale is no number above 0.
        """
        scale = float(state["scale"])
        if not (scale > 0 and math.isfinite(scale)):
            raise SettingError(f"the scale of a saved scaler is above 0, not {scale}")
        self._scale.fill_(scale)
        self._steps.fill_(int(state["steps"]))
        self.skipped = int(state["skipped"])
