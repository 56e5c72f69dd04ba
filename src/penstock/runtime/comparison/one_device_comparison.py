"""Self-check: run one batch through the pipeline and through plain training, and compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.batches.batch import Batch
from penstock.batches.batch_parts import is_missing
from penstock.errors import RunError, SettingError
from penstock.notebook import NotebookText
from penstock.ranks.results import by_micro_batch
from penstock.runtime.assembly import Assembly
from penstock.runtime.comparison.numeric_settings import numeric_settings
from penstock.runtime.comparison.one_device import OneDevice, output_leaves
from penstock.runtime.comparison.tensor_differences import (
    difference,
    differences,
    largest,
    loss_difference,
)
from penstock.runtime.comparison.undivided_batch import (
    DRAWS,
    NEXT_TO_NOTHING,
    SIDES,
    WholeBatch,
    causes_in,
    coarse,
    ratio,
)
from penstock.stage import stage_state as state
from penstock.stage.stage_builder import Training
from penstock.units import format_count

#: Lines of a printed comparison of each kind.
_ROWS = 8


@dataclass(frozen=True, repr=False)
class Comparison(NotebookText):
    """Largest absolute differences between a pipeline and one device with the same micro-batches.

    Attributes:
        gradients: differences by parameter name.
        buffers: differences by buffer name.
        loss: difference of the mean losses.
        scale: the largest absolute value on the one device, to which a difference is related: by
            parameter name, as `buffer NAME`, as `output PLACE`, and as `loss`.
        outputs: differences by place in the model's output.
        whole: the differences from one device that takes the batch undivided; it has its own
            `agrees` and `relative`, and is not part of those here.
        device: the one device, that of rank 0.
        settings: the settings of torch that decide whether equal work there gives equal bits.
    """

    gradients: Mapping[str, float] = field(default_factory=dict)
    buffers: Mapping[str, float] = field(default_factory=dict)
    loss: float = 0.0
    scale: Mapping[str, float] = field(default_factory=dict)
    outputs: Mapping[str, float] = field(default_factory=dict)
    whole: WholeBatch | None = None
    device: str = "cpu"
    settings: tuple[str, ...] = ()

    @property
    def worst(self) -> tuple[str, float]:
        """The name and size of the largest absolute difference."""
        errors = {**self.gradients, **self.buffers, **self.outputs, "loss": self.loss}
        name = max(errors, key=lambda key: errors[key])
        return name, errors[name]

    @property
    def relative(self) -> float:
        """The largest relative difference; infinite where only one of two values is NaN."""
        return max((row[3] for row in self.rows()), default=0.0)

    def rows(self) -> list[tuple[str, str, float, float]]:
        """Return kind, name, absolute and relative difference of each value, largest first."""
        rows = []
        for kind, errors in (
            ("gradient", self.gradients),
            ("buffer", self.buffers),
            ("output", self.outputs),
            ("loss", {"loss": self.loss}),
        ):
            prefix = "" if kind in ("gradient", "loss") else f"{kind} "
            sizes = {name: self.scale.get(f"{prefix}{name}", 0.0) for name in errors}
            # Values that are next to nothing beside others of their kind are not divided by.
            least = NEXT_TO_NOTHING * max(sizes.values(), default=0.0)
            for name, error in errors.items():
                rows.append((kind, name, error, ratio(error, max(sizes[name], least))))
        return sorted(rows, key=lambda row: -row[3])

    def __repr__(self) -> str:
        return (
            f"<Comparison with one device: {len(self.gradients)} gradients, largest relative "
            f"difference {self.relative:.2g}>"
        )

    def __str__(self) -> str:
        if not self.gradients and not self.outputs:
            return "nothing was compared here: rank 0 has the comparison"
        rows = self.rows()
        printed = _largest_of_each_kind(rows)
        width = max(len(name) for _, name, _, _ in printed)
        summary = f"{self._counts()} and the loss; largest relative difference {self.relative:.2g}"
        lines = [f"pipeline against one device: {summary}"]
        for kind, name, error, relative in printed:
            lines.append(
                f"  {kind:<8}  {name:<{width}}  differs by {error:.2e} (relative {relative:.1e})"
            )
        omitted = len(rows) - len(printed)
        if omitted:
            lines.append(
                f"  and {omitted} more, which differ no more than the last line of their kind"
            )
        if self.device != "cpu":
            device = "; ".join((self.device, *self.settings))
            lines.append(f"  the one device is {device}")
        if self.whole is not None:
            lines.append(str(self.whole))
        return "\n".join(lines)

    def _counts(self) -> str:
        """Return how many values of each kind were compared, as text."""
        counts = {
            "gradient": len(self.gradients),
            "buffer": len(self.buffers),
            "output": len(self.outputs),
        }
        return ", ".join(format_count(count, kind) for kind, count in counts.items())


def _largest_of_each_kind(
    rows: list[tuple[str, str, float, float]],
) -> list[tuple[str, str, float, float]]:
    """Return the first `_ROWS` rows of each kind, see `Comparison.rows`."""
    largest: list[tuple[str, str, float, float]] = []
    for kind in ("loss", "output", "gradient", "buffer"):
        largest += [row for row in rows if row[0] == kind][:_ROWS]
    return largest


def compare(
    assembly: Assembly, play: Callable[[], Tensor], batch: Batch, training: Training
) -> Comparison:
    """Run a batch without updates and compare the results with plain training on rank 0.

    Gradients and buffers of the stages are restored afterwards.

    Args:
        assembly: the ranks of this process.
        play: runs the batch's program without updates and returns its mean loss.
        batch: the batch, which keeps its outputs.
        training: how the model is trained.

    Returns:
        The differences on rank 0; an empty comparison on all other ranks.

    Raises:
        RunError: the device of rank 0 does not have enough memory for the whole model.
        SettingError: rank 0 has not the whole batch.
    """
    world, placed = assembly.world, assembly.placed
    if 0 in world.local_ranks and is_missing(batch.whole):
        error = SettingError(
            "compare_with_one_device runs the whole model on rank 0, which needs the whole batch: "
            "give every rank all inputs and targets"
        )
        # The other ranks are about to gather state, and would wait for this one.
        world.abandon(error)
        raise error
    initial_state = state.collect(world, placed)
    with _unchanged_stages(assembly):
        loss = play()
        grads, final_state = state.collect_grads(world, placed), state.collect(world, placed)
        outputs = by_micro_batch(world, assembly.setting.schedule, batch)
    if 0 not in world.local_ranks:
        return Comparison()
    reference = OneDevice(placed, batch, training, world.device(0))
    try:
        return _compare(reference, initial_state, _Results(loss, grads, final_state, outputs))
    except torch.OutOfMemoryError as error:
        raise RunError(
            "compare_with_one_device needs the whole model, its gradients and a batch on "
            f"{world.device(0)}, in addition to what the stages hold there, and there is not "
            f"enough memory: {error} Compare a smaller batch, or a smaller model of the same "
            "layers; penstock train leaves the comparison out by --no-self-check"
        ) from error


@contextmanager
def _unchanged_stages(assembly: Assembly) -> Iterator[None]:
    """Run a block with empty gradients and loss scale 1; then restore these and the buffers."""
    with _unchanged_buffers(assembly), _unchanged_gradients(assembly):
        yield


@contextmanager
def _unchanged_buffers(assembly: Assembly) -> Iterator[None]:
    """Run a block, and restore the buffers of all stages of this process."""
    buffers = [
        buffer
        for stage in assembly.placed.local
        for module in stage.modules()
        for buffer in module._buffers.values()
        if buffer is not None
    ]
    contents = [buffer.detach().clone() for buffer in buffers]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, content in zip(buffers, contents, strict=True):
                buffer.copy_(content)


@contextmanager
def _unchanged_gradients(assembly: Assembly) -> Iterator[None]:
    """Run a block with empty gradients and loss scale 1, and restore these."""
    parameters = [
        parameter
        for stage in assembly.stages
        for parameter in (*stage.update.parameters, *stage.update.borrowed)
    ]
    grads = [parameter.grad for parameter in parameters]
    scales = [stage.loss_scale for stage in assembly.stages]
    for parameter in parameters:
        parameter.grad = None
    for stage in assembly.stages:
        stage.loss_scale = 1.0
    try:
        yield
    finally:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        for stage, scale in zip(assembly.stages, scales, strict=True):
            stage.loss_scale = scale


class _Results(NamedTuple):
    """The results of a batch in the pipeline.

    Attributes:
        loss: the mean loss.
        grads: by parameter name.
        state: parameters and buffers after the batch, by name.
        outputs: by micro-batch.
    """

    loss: Tensor
    grads: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    outputs: Mapping[int, Any]


def _compare(reference: OneDevice, values: Mapping[str, Tensor], results: _Results) -> Comparison:
    """Train with micro-batches and with the undivided batch; compare the pipeline with both.

    Args:
        reference: plain training of the model.
        values: the model's state before the batch.
        results: the results of the pipeline.
    """
    sliced = reference.batch.cuts_tokens
    # Sequences that the schedule slices stay whole here, which checks the layers' `forward_slice`
    # against their `forward`. But layers that draw random numbers draw them by slice, so that only
    # slices can be compared.
    reference.train(values, whole=sliced)
    if reference.drew and sliced:
        reference.train(values, whole=False)
    comparison = _compare_accumulated(reference, results)
    reference.train_whole(values)
    return replace(
        comparison,
        whole=_compare_whole(reference, results),
        device=str(reference.device),
        settings=numeric_settings(reference.device),
    )


def _compare_accumulated(reference: OneDevice, results: _Results) -> Comparison:
    """Compare the pipeline's results with those of accumulated micro-batches."""
    reference_grads = reference.grads()
    reference_state = reference.state()
    buffers = _buffers(reference, results.state, reference_grads)
    outputs = output_leaves(reference.batch, results.outputs)
    expected = reference.output_leaves()
    scale = {name: largest(grad) for name, grad in reference_grads.items()}
    scale["loss"] = abs(reference.loss)
    scale |= {f"buffer {name}": largest(reference_state[name]) for name in buffers}
    scale |= {f"output {place}": max(map(largest, row)) for place, row in expected.items()}
    return Comparison(
        gradients=differences(results.grads, reference_grads),
        buffers=differences(buffers, reference_state),
        loss=loss_difference(float(results.loss), reference.loss),
        scale=scale,
        outputs={
            place: max(map(difference, outputs[place], row)) for place, row in expected.items()
        },
    )


def _buffers(
    reference: OneDevice, tensors: Mapping[str, Tensor], grads: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Select from the model's state the tensors that are not parameters.

    Args:
        reference: the model.
        tensors: the state by name.
        grads: the gradients by the first name of every parameter.
    """
    first_name = reference.placed.traced.first_name
    return {name: tensor for name, tensor in tensors.items() if first_name(name) not in grads}


def _compare_whole(reference: OneDevice, results: _Results) -> WholeBatch:
    """Compare the pipeline's results with those of the undivided batch."""
    reference_grads = reference.grads()
    causes = causes_in(reference.modules)
    if reference.drew:
        causes.append(DRAWS)
    if reference.sides:
        causes.append(SIDES)
    scale = {name: largest(grad) for name, grad in reference_grads.items()}
    scale["loss"] = abs(reference.loss)
    dtypes = (grad.dtype for grad in reference_grads.values())
    return WholeBatch(
        differences(results.grads, reference_grads),
        loss_difference(float(results.loss), reference.loss),
        scale,
        tuple(causes),
        coarse(dtypes, reference.training.options.autocast_dtype),
    )
