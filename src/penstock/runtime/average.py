"""Averages of a model's weights over training: every rank averages those of its own stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from penstock.errors import SettingError
from penstock.runtime.assembly import Assembly
from penstock.runtime.tied import tensors_of

#: From the averaged tensor, the model's tensor and the number of updates so far to the new average.
Combine = Callable[[Tensor, Tensor, Tensor | int], Tensor]

#: What `AveragedModel` puts before the model's names, and its count of updates.
_PREFIX, _COUNT = "module.", "n_averaged"


class Trained(Protocol):
    """What an average needs of its pipeline."""

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model's state on rank 0."""
        ...

    def model_state(self) -> dict[str, Tensor]:
        """The whole model's state on every rank."""
        ...

    def _enter(self, call: str) -> None: ...


class _Tensors(nn.Module):
    """Parameters and buffers without the modules that use them: what `AveragedModel` copies and
    walks through.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names: dict[str, str] = {}
        for number, (name, tensor) in enumerate(tensors.items()):
            key = f"t{number}"
            self.names[name] = key
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(key, tensor)
            else:
                self.register_buffer(key, tensor)

    def tensor(self, name: str) -> Tensor:
        """By the model's name for it."""
        found: Tensor = getattr(self, self.names[name])
        return found


class Average:
    """A running average of the weights of a pipeline's model; made by `Pipeline.ema`.

    The numbers are those of `torch.optim.swa_utils.AveragedModel` over the whole model on one
    device, which does the work for the stages of each rank. All methods are called on every rank.
    """

    def __init__(self, pipe: Trained, parts: list[tuple[_Tensors, AveragedModel]]) -> None:
        self._pipe, self._parts = pipe, parts

    @property
    def n_averaged(self) -> int:
        """Updates so far."""
        return int(self._parts[0][1].n_averaged)

    def update(self) -> None:
        """Take the weights as they are now into the average. An asynchronous schedule drains."""
        self._pipe._enter("ema.update")
        for live, averaged in self._parts:
            averaged.update_parameters(live)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """A context in which the pipeline has the averaged weights: for `eval_batch`, `forward`,
        `state_dict` and `save`.

        Do not train in it: the weights come back at its end as they were at its beginning.

        Raises:
            SettingError: there has been no update.
        """
        self._pipe._enter("ema.applied")
        self._check()
        pairs = [
            (live.tensor(name), averaged.module.tensor(name))  # type: ignore[operator]
            for live, averaged in self._parts
            for name in live.names
        ]
        before = [tensor.detach().clone() for tensor, _ in pairs]
        with torch.no_grad():
            for tensor, value in pairs:
                tensor.copy_(value)
        try:
            yield
        finally:
            with torch.no_grad():
                for (tensor, _), value in zip(pairs, before, strict=True):
                    tensor.copy_(value)

    def model_state(self) -> dict[str, Tensor]:
        """The averaged model's parameters and buffers on every rank, on the CPU, under the model's
        own names.

        Raises:
            SettingError: there has been no update.
        """
        with self.applied():
            return self._pipe.model_state()

    def state_dict(self) -> dict[str, Tensor]:
        """On rank 0 what `AveragedModel.state_dict` is on one device: `n_averaged`, and the model's
        names after `module.`.

        Elsewhere it is empty. `load_state_dict` takes it, as does an `AveragedModel` of the whole
        model.

        Raises:
            SettingError: there has been no update.
        """
        with self.applied():
            found = self._pipe.state_dict()
        if not found:
            return {}
        count = {_COUNT: torch.tensor(self.n_averaged)}
        return count | {f"{_PREFIX}{name}": tensor for name, tensor in found.items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` gave, on every rank, under this or any other plan.

        Args:
            tensors: the whole model's average, as `state_dict` or `AveragedModel.state_dict` gives
            it.

        Raises:
            SettingError: a tensor is missing, or has another shape. Nothing has changed then.
        """
        self._pipe._enter("ema.load_state_dict")
        if _COUNT not in tensors:
            raise SettingError(f"the state of an average has {_COUNT!r}, which this lacks")
        pairs = []
        for live, averaged in self._parts:
            for name in live.names:
                target: Tensor = averaged.module.tensor(name)  # type: ignore[operator]
                source = tensors.get(f"{_PREFIX}{name}")
                if source is None and name in self._volatile(live):
                    continue
                if source is None or source.shape != target.shape:
                    has = "no" if source is None else f"a tensor of shape {tuple(source.shape)} as"
                    raise SettingError(
                        f"the average's state has {has} {_PREFIX}{name!s}, which has shape {tuple(target.shape)} in the model"
                    )
                pairs.append((target, source))
        with torch.no_grad():
            for target, source in pairs:
                target.copy_(source)
            for _, averaged in self._parts:
                averaged.n_averaged.copy_(tensors[_COUNT])

    @staticmethod
    def _volatile(live: _Tensors) -> set[str]:
        """Names of buffers, which may be in no state."""
        return {name for name in live.names if not isinstance(live.tensor(name), nn.Parameter)}

    def _check(self) -> None:
        if not self.n_averaged:
            raise SettingError("there is no average yet: call update() after a step")


def average_of(
    pipe: Trained, made: Assembly, decay: float | None, avg_fn: Combine | None, *, use_buffers: bool
) -> Average:
    """See `Pipeline.ema`."""
    if avg_fn is None and decay is not None and not 0.0 <= decay <= 1.0:
        raise SettingError(f"decay is from 0 to 1, or None for a plain mean, not {decay!r}")
    several = None
    if avg_fn is None and decay is not None:
        several = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
    parts = []
    for stage in made.stages:
        layers = ((layer.name, layer.module) for layer in stage.layers)
        live = _Tensors(tensors_of(made.traced, layers))
        averaged = AveragedModel(live, avg_fn=avg_fn, multi_avg_fn=several, use_buffers=use_buffers)
        parts.append((live, averaged))
    return Average(pipe, parts)
