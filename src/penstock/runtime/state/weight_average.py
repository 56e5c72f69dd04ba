"""Running averages of a model's weights; every rank averages the weights of its own stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from penstock.errors import SettingError
from penstock.ranks.tied_weights import tensors_of
from penstock.runtime.assembly import Assembly
from penstock.stage.stage import Stage

#: Computes the new average from the averaged tensor, the model's tensor and the number of updates.
Combine = Callable[[Tensor, Tensor, Tensor | int], Tensor]

#: The prefix that `AveragedModel.state_dict` puts before the model's names.
_PREFIX = "module."
#: The key of the number of updates in `AveragedModel.state_dict`.
_COUNT = "n_averaged"


class PipelineState(Protocol):
    """The methods of `Pipeline` that `Average` calls."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the whole model's state on rank 0."""
        ...

    def model_state(self) -> dict[str, Tensor]:
        """Return the whole model's state on every rank."""
        ...

    def _enter(self, call: str) -> None: ...


class _StageTensors(nn.Module):
    """A stage's parameters and buffers without their layers, for `AveragedModel` to copy.

    Attributes are numbered: the model's names contain dots, which `register_parameter` refuses.
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
        """Return the tensor that the model calls `name`."""
        tensor: Tensor = getattr(self, self.names[name])
        return tensor


class Average:
    """A running average of the weights of a pipeline's model, created by `Pipeline.ema`.

    Each rank runs `torch.optim.swa_utils.AveragedModel` over its own stages, so that the values are
    those of `AveragedModel` over the whole model on one device. Call every method on all ranks.
    """

    def __init__(
        self,
        pipe: PipelineState,
        stages: Sequence[Stage],
        parts: list[tuple[_StageTensors, AveragedModel]],
    ) -> None:
        self._pipe, self._parts = pipe, parts
        # Counted here too: a rank without a stage has no parts.
        self._updates = 0
        self._part_of_stage = dict(zip(map(id, stages), parts, strict=True))

    @property
    def n_averaged(self) -> int:
        """The number of updates so far."""
        return self._updates

    def averaged(self, stage: Stage) -> dict[str, Tensor]:
        """Return the live averaged tensors of a local stage by the names of the model."""
        live, averaged = self._part_of_stage[id(stage)]
        # `type: ignore` here and below: torch types `AveragedModel.module` as any Module, of which
        # attributes are tensors or modules and cannot be called.
        return {name: averaged.module.tensor(name) for name in live.names}  # type: ignore[operator]

    def restart(self, count: int) -> None:
        """Set the number of updates so far; at 0 the next update copies the weights."""
        self._updates = count
        for _, averaged in self._parts:
            averaged.n_averaged.fill_(count)

    def update(self) -> None:
        """Add the current weights to the average; an asynchronous schedule is drained first."""
        self._pipe._enter("ema.update")
        for live, averaged in self._parts:
            averaged.update_parameters(live)
        self._updates += 1

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the pipeline's weights by the averaged ones within a `with` block.

        Meant for `eval_batch`, `forward`, `state_dict` and `save`. Do not train in the block: the
        weights from before are restored at its end.

        Raises:
            SettingError: `update` has not been called yet.
        """
        self._pipe._enter("ema.applied")
        self._check()
        tensors: list[Tensor] = []
        averages: list[Tensor] = []
        for live, averaged in self._parts:
            for name in live.names:
                tensors.append(live.tensor(name))
                averages.append(averaged.module.tensor(name))  # type: ignore[operator]
        weights = [tensor.detach().clone() for tensor in tensors]
        _copy_all(averages, tensors)
        try:
            yield
        finally:
            _copy_all(weights, tensors)

    def model_state(self) -> dict[str, Tensor]:
        """Return the averaged parameters and buffers on every rank.

        Returns:
            Tensors on the CPU by the model's own names.

        Raises:
            SettingError: `update` has not been called yet.
        """
        with self.applied():
            return self._pipe.model_state()

    def state_dict(self) -> dict[str, Tensor]:
        """Return on rank 0 the state that `AveragedModel.state_dict` has on one device.

        `load_state_dict` accepts it, and so does an `AveragedModel` of the whole model.

        Returns:
            `n_averaged`, and the averaged tensors by the model's names after `module.`; an empty
            dictionary on all other ranks.

        Raises:
            SettingError: `update` has not been called yet.
        """
        with self.applied():
            averages = self._pipe.state_dict()
        if not averages:
            return {}
        count = {_COUNT: torch.tensor(self.n_averaged)}
        return count | {f"{_PREFIX}{name}": tensor for name, tensor in averages.items()}

    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore a saved average, on every rank; the plan may be another one than at saving.

        Args:
            tensors: the whole model's average, as returned by `state_dict` or
                `AveragedModel.state_dict`. Buffers may be absent.

        Raises:
            SettingError: a tensor is missing or has another shape. No rank has changed anything.
        """
        self._pipe._enter("ema.load_state_dict")
        if _COUNT not in tensors:
            raise SettingError(
                f"the state has no {_COUNT!r}: load what Average.state_dict() returned"
            )
        # Copied only when every tensor has been checked: a refused state changes nothing.
        pairs = self._checked_pairs(tensors)
        with torch.no_grad():
            for target, source in pairs:
                target.copy_(source)
        self.restart(int(tensors[_COUNT]))

    def _checked_pairs(self, tensors: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Pair the tensors of the average with their saved values.

        Raises:
            SettingError: a tensor is missing or has another shape.
        """
        pairs = []
        for live, averaged in self._parts:
            for name in live.names:
                target: Tensor = averaged.module.tensor(name)  # type: ignore[operator]
                source = tensors.get(f"{_PREFIX}{name}")
                if source is None and name in self._buffer_names(live):
                    continue
                if source is None or source.shape != target.shape:
                    entry = "no" if source is None else f"shape {tuple(source.shape)} for"
                    raise SettingError(
                        f"the average's state has {entry} {_PREFIX}{name}, which has shape "
                        f"{tuple(target.shape)} in the model"
                    )
                pairs.append((target, source))
        return pairs

    @staticmethod
    def _buffer_names(live: _StageTensors) -> set[str]:
        """Return the names of a stage's buffers; non-persistent ones are in no state_dict."""
        return {name for name in live.names if not isinstance(live.tensor(name), nn.Parameter)}

    def _check(self) -> None:
        if not self.n_averaged:
            raise SettingError("there is no average yet: call update() after a training step")


def create_average(
    pipe: PipelineState,
    assembly: Assembly,
    decay: float | None,
    avg_fn: Combine | None,
    *,
    use_buffers: bool,
) -> Average:
    """Create an average over the stages of this process; the arguments are those of `Pipeline.ema`.

    Raises:
        SettingError: `decay` is not between 0 and 1.
    """
    multi_avg_fn = None
    if avg_fn is None and decay is not None:
        if not 0.0 <= decay <= 1.0:
            raise SettingError(f"decay is from 0 to 1, or None for a plain mean, not {decay!r}")
        multi_avg_fn = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
    parts = []
    for stage in assembly.stages:
        layers = ((layer.name, layer.module) for layer in stage.layers)
        live = _StageTensors(tensors_of(assembly.traced, layers))
        averaged = AveragedModel(
            live, avg_fn=avg_fn, multi_avg_fn=multi_avg_fn, use_buffers=use_buffers
        )
        parts.append((live, averaged))
    return Average(pipe, assembly.stages, parts)


def _copy_all(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy tensors into others of the same shapes, outside autograd."""
    with torch.no_grad():
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
