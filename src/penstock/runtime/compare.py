"""The self-check: one batch through the pipeline and through plain training, side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import RunError
from penstock.runtime import state
from penstock.runtime.assembly import Assembly
from penstock.runtime.batch import Batch
from penstock.runtime.device_batch import INPUTS, device_batch
from penstock.runtime.loss_view import generator_states
from penstock.runtime.numeric_settings import numeric_settings
from penstock.runtime.reference_model import reference_model
from penstock.runtime.results import by_micro_batch
from penstock.runtime.splitting import join
from penstock.runtime.stage_builder import Training
from penstock.runtime.stage_loss import LossOptions, StageLoss
from penstock.runtime.whole_batch import (
    DRAWS,
    NEXT_TO_NOTHING,
    SIDES,
    WholeBatch,
    causes_in,
    coarse,
    ratio,
)
from penstock.tracing.deferred_batch_norm import begin
from penstock.tracing.host_random import equal_states, host_state
from penstock.tracing.names import parameters_of, state_of
from penstock.tracing.randomness import drawing, may_draw, seed_generators, stream_seed
from penstock.tracing.side_loss import collecting_side_losses
from penstock.tracing.slices import has_past
from penstock.values.structure import labelled, map_tensors

#: Lines of a printed comparison of each kind.
_ROWS = 8


@dataclass(frozen=True)
class Comparison:
    """Largest absolute differences between the pipeline and one device that accumulates the same
    micro-batches.

    `gradients` and `buffers` by name, `outputs` by place in the model's output; `loss` is the
    difference of the mean losses. `scale` has the largest absolute value of each on the one device,
    to hold the difference against: buffers as `buffer NAME`, outputs as `output PLACE`. `whole` has
    the differences from one device that takes the batch undivided; `agrees` and `relative` of it
    are apart. `device` is the one device, that of rank 0, and `settings` what decides there whether
    equal work gives equal bits.
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
        """The name and size of the largest difference."""
        everything = {**self.gradients, **self.buffers, **self.outputs, "loss": self.loss}
        name = max(everything, key=lambda key: everything[key])
        return name, everything[name]

    @property
    def relative(self) -> float:
        """The largest difference in proportion to what it is of; infinite where the one is no
        number and the other is.
        """
        return max((row[3] for row in self.rows()), default=0.0)

    def rows(self) -> list[tuple[str, str, float, float]]:
        """Kind, name, largest difference, and that in proportion, worst first."""
        found = []
        for kind, errors in (
            ("gradient", self.gradients),
            ("buffer", self.buffers),
            ("output", self.outputs),
            ("loss", {"loss": self.loss}),
        ):
            prefix = "" if kind in ("gradient", "loss") else f"{kind} "
            sizes = {name: self.scale.get(f"{prefix}{name}", 0.0) for name in errors}
            least = NEXT_TO_NOTHING * max(sizes.values(), default=0.0)
            found += [
                (kind, name, error, ratio(error, max(sizes[name], least)))
                for name, error in errors.items()
            ]
        return sorted(found, key=lambda row: -row[3])

    def __str__(self) -> str:
        if not self.gradients and not self.outputs:
            return "nothing was compared here: rank 0 has the comparison"
        rows = self.rows()
        counts = ", ".join(
            f"{len(of)} {kind}{'s' * (len(of) != 1)}"
            for kind, of in (
                ("gradient", self.gradients),
                ("buffer", self.buffers),
                ("output", self.outputs),
            )
        )
        shown = [
            row
            for kind in ("loss", "output", "gradient", "buffer")
            for row in [each for each in rows if each[0] == kind][:_ROWS]
        ]
        width = max(len(name) for _, name, _, _ in shown)
        lines = [
            f"pipeline against one device: {counts} and the loss; largest difference {self.relative:.2g} of what it is of"
        ]
        lines += [
            f"  {kind:<8}  {name:<{width}}  differs by {error:.2e}, {ratio:.1e} of it"
            for kind, name, error, ratio in shown
        ]
        left = len(rows) - len(shown)
        if left:
            lines.append(f"  and {left} more, none of which differs more than the last of its kind")
        if self.device != "cpu":
            lines.append(f"  the one device is {'; '.join((self.device, *self.settings))}")
        if self.whole is not None:
            lines.append(str(self.whole))
        return "\n".join(lines)


def compare(
    made: Assembly, play: Callable[[], Tensor], batch: Batch, training: Training
) -> Comparison:
    """Play a batch without updates and hold gradients, buffers, outputs and loss against plain
    training on rank 0.

    Gradients and buffers of the stages are afterwards as they were before.

    Args:
        made: the ranks.
        play: runs the batch's program without updates and returns its mean loss.
        batch: the batch, which keeps its outputs.
        training: how the model is trained.
    """
    world, placed = made.world, made.placed
    before = state.collect(world, placed)
    trained = [
        parameter
        for stage in made.stages
        for parameter in (*stage.update.parameters, *stage.update.borrowed)
    ]
    grads = [(parameter, parameter.grad) for parameter in trained]
    buffers = [
        (buffer, buffer.detach().clone())
        for stage in placed.local
        for module in stage.modules()
        for buffer in module._buffers.values()
        if buffer is not None
    ]
    scales = [(stage, stage.loss_scale) for stage in made.stages]
    for parameter, _ in grads:
        parameter.grad = None
    for stage, _ in scales:
        stage.loss_scale = 1.0
    try:
        found_loss = play()
        found_grads, found_state = state.collect_grads(world, placed), state.collect(world, placed)
        found_outputs = by_micro_batch(world, made.setting.schedule, batch)
    finally:
        for parameter, grad in grads:
            parameter.grad = grad
        for stage, scale in scales:
            stage.loss_scale = scale
        with torch.no_grad():
            for buffer, content in buffers:
                buffer.copy_(content)
    if 0 not in world.local_ranks:
        return Comparison()
    plain = _OneDevice(placed, batch, training, world.device(0))
    try:
        return plain.compared(before, found_loss, found_grads, (found_state, found_outputs))
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"compare_with_one_device needs the whole model, its gradients and a batch on {world.device(0)}, beside what the stages hold "
            f"there, and there is not enough memory: {error} Compare a smaller batch, or a smaller model of the same layers; "
            "penstock train leaves the comparison out by --no-self-check"
        ) from error


@dataclass
class _OneDevice:
    """Plain training, in the process of rank 0 and on its device.

    Another device would draw other numbers for dropout from the same seed, and round otherwise.
    """

    placed: state.Placed
    batch: Batch
    training: Training
    device: torch.device
    loss: float = 0.0
    drew: bool = False
    whole: bool = False
    sides: bool = False
    modules: list[nn.Module] = field(default_factory=list)
    outputs: dict[int, Any] = field(default_factory=dict)

    def compared(
        self,
        values: Mapping[str, Tensor],
        loss: Tensor,
        grads: Mapping[str, Tensor],
        rest: tuple[Mapping[str, Tensor], Mapping[int, Any]],
    ) -> Comparison:
        """Train in both ways, and hold what the pipeline has come to against it.

        Args:
            values: the state before the batch.
            loss: of the pipeline.
            grads: of the pipeline, by name.
            rest: its state after the batch, by name, and its outputs, by micro-batch.
        """
        batch = self.batch
        # Sequences that the schedule cuts stay whole here, which checks the layers' `forward_slice`
        # against their `forward`; but where
        # layers draw random numbers, these go by slice.
        self.train(values, whole=batch.cuts_tokens)
        if self.drew and batch.cuts_tokens:
            self.train(values, whole=False)
        same = self.against(loss, grads, *rest)
        self.train_whole(values)
        return replace(
            same,
            whole=self.against_whole(loss, grads),
            device=str(self.device),
            settings=numeric_settings(self.device),
        )

    def train(self, values: Mapping[str, Tensor], *, whole: bool) -> None:
        """Forward and backward of all micro-batches in turn from these values, gradients
        accumulated, slices of one in one graph.
        """
        batch = self.batch.with_whole_sequences() if whole else self.batch
        batch = replace(
            batch, losses={}, outputs={}, loss_weights=None, loss_counts={}, keeps_outputs=False
        )
        self._begin(values, len(batch.inputs))
        self.whole = whole
        options = self.training.options.loss_division
        stage_loss = StageLoss(
            self.training.loss, self.device, options, self.training.seed, self.modules
        )
        assert batch.targets is not None
        waiting: list[Tensor] = []
        for row in batch.rows():
            pasts: dict[int, Any] = {}
            for n in row:
                with self._mixed(), collecting_side_losses() as sides:
                    value = self._forward(batch, n, pasts)
                    loss = stage_loss.of(batch, n, value, sides)
                assert batch.loss_weights is not None
                waiting.append(_weighed(loss, sides, batch.loss_weights[n], batch.shares[n]))
                self.sides = self.sides or bool(sides)
            if options.loss_on == "micro_batch":
                _backward(waiting)
        _backward(waiting)
        self.loss = sum(float(each) for each in batch.losses.values())

    def train_whole(self, values: Mapping[str, Tensor]) -> None:
        """Forward and backward of the undivided batch from these values."""
        x, y = self.batch.whole
        batch = Batch(self.batch.step, [x], [y], [1.0], self.batch.signature, True, whole=(x, y))
        self._begin(values, 1)
        stage_loss = StageLoss(
            self.training.loss, self.device, LossOptions(), self.training.seed, self.modules
        )
        with self._mixed(), collecting_side_losses() as sides:
            loss = stage_loss.of(batch, 0, self._forward(batch, 0, {}), sides)
        _backward([_weighed(loss, sides, 1.0, 1.0)])
        self.loss = float(batch.losses[0])

    def _begin(self, values: Mapping[str, Tensor], micro_batches: int) -> None:
        self.modules = reference_model(self.placed, values, self.training, self.device)
        self.loss, self.drew = 0.0, False
        self.outputs.clear()
        for module in self.modules:
            begin(module, micro_batches)

    def _forward(self, batch: Batch, n: int, pasts: dict[int, Any]) -> Any:
        value, drew = self._plain_forward(batch, n, pasts)
        # As the loss gets it: some losses work in place.
        self.outputs[n] = map_tensors(lambda leaf: leaf.detach().clone(), value)
        self.drew = self.drew or drew
        return value

    def _plain_forward(self, batch: Batch, n: int, pasts: dict[int, Any]) -> tuple[Any, bool]:
        """The output for one micro-batch or slice, and whether a layer has drawn; `pasts` moves on."""
        inputs = batch.inputs[n]
        if self.device.type != "cpu":
            inputs = device_batch(batch, self.device).part(INPUTS, n)
        value = map_tensors(Tensor.clone, inputs)  # for work in place
        seed, device = self.training.seed, self.device
        drew = False
        with drawing(device, host=True):
            for index, module in enumerate(self.modules):
                if may_draw(module):
                    seed_generators(device, stream_seed(seed, batch.step, index, n), host=True)
                state, of_host = generator_states(device), host_state()
                if batch.cuts_tokens and has_past(module):
                    value, pasts[index] = module.forward_slice(value, pasts.get(index))  # type: ignore[operator]
                else:
                    value = module(value)
                drew = drew or not torch.equal(state, generator_states(device))
                drew = drew or not equal_states(of_host, host_state())
        return value, drew

    def _mixed(self) -> AbstractContextManager[None]:
        mixed = self.training.options.autocast
        return nullcontext() if mixed is None else torch.autocast(self.device.type, dtype=mixed)

    def against(
        self,
        loss: Tensor,
        grads: Mapping[str, Tensor],
        found: Mapping[str, Tensor],
        outputs: Mapping[int, Any],
    ) -> Comparison:
        """What the pipeline has found, held against it."""
        aliases = self.placed.traced.aliases
        plain_grads = self._grads()
        plain_state: dict[str, Tensor] = {}
        for layer, module in zip(self.placed.traced.layers, self.modules, strict=True):
            values = state_of(layer.name, module)
            plain_state.update({name: tensor.cpu() for name, tensor in values.items()})
        parameters = {
            name for layer in self.placed.traced.layers for name in layer.parameters
        } | set(plain_grads)
        moved = {
            name: tensor
            for name, tensor in found.items()
            if aliases.get(name, name) not in parameters
        }
        made, expected = (
            _leaves(self.batch, outputs),
            _leaves(self.batch.with_whole_sequences() if self.whole else self.batch, self.outputs),
        )
        scale = {name: _largest(grad) for name, grad in plain_grads.items()} | {
            "loss": abs(self.loss)
        }
        scale |= {f"buffer {name}": _largest(plain_state[name]) for name in moved}
        scale |= {f"output {place}": max(map(_largest, row)) for place, row in expected.items()}
        return Comparison(
            {name: _difference(grad, plain_grads[name]) for name, grad in grads.items()},
            {name: _difference(tensor, plain_state[name]) for name, tensor in moved.items()},
            _loss_difference(float(loss), self.loss),
            scale,
            {place: max(map(_difference, made[place], row)) for place, row in expected.items()},
        )

    def against_whole(self, loss: Tensor, grads: Mapping[str, Tensor]) -> WholeBatch:
        """What the pipeline has found, held against the undivided batch."""
        plain = self._grads()
        causes = causes_in(self.modules)
        causes += [DRAWS] * self.drew + [SIDES] * self.sides
        return WholeBatch(
            {name: _difference(grad, plain[name]) for name, grad in grads.items()},
            _loss_difference(float(loss), self.loss),
            {name: _largest(grad) for name, grad in plain.items()} | {"loss": abs(self.loss)},
            tuple(causes),
            coarse((grad.dtype for grad in plain.values()), self.training.options.autocast),
        )

    def _grads(self) -> dict[str, Tensor]:
        """The gradients of the model's parameters by name."""
        aliases = self.placed.traced.aliases
        found: dict[str, Tensor] = {}
        for layer, module in zip(self.placed.traced.layers, self.modules, strict=True):
            for name, parameter in parameters_of(layer.name, module):
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dense = grad.to_dense() if grad.is_sparse else grad
                found.setdefault(aliases.get(name, name), dense.cpu())
        return found


def _weighed(loss: Tensor, sides: Sequence[Tensor], weight: float, share: float) -> Tensor:
    """A micro-batch's part of the loss of the batch."""
    if weight == share:
        return sum(sides, loss) * share
    return sum((side * share for side in sides), loss * weight)


def _backward(waiting: list[Tensor]) -> None:
    """The gradients of some losses, which are done with then."""
    live = [loss for loss in waiting if loss.requires_grad]
    if live:
        torch.autograd.backward(live)
    waiting.clear()


def _loss_difference(one: float, other: float) -> float:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    return math.inf if math.isnan(one) or math.isnan(other) else abs(one - other)


def _leaves(batch: Batch, outputs: Mapping[int, Any]) -> dict[str, list[Tensor]]:
    """The tensors of some outputs, in the order of the micro-batches, by their place in one output;
    slices of one joined.
    """
    rows: dict[str, list[Tensor]] = {}
    for row in batch.rows():
        value = outputs[row[0]] if len(row) == 1 else join([outputs[n] for n in row], dim=1)
        for path, leaf in labelled(value):
            if isinstance(leaf, Tensor):
                rows.setdefault(f"output{path}", []).append(leaf.detach().cpu())
    return rows


def _largest(tensor: Tensor) -> float:
    return (
        float(tensor.abs().max())
        if tensor.numel() and not tensor.dtype.is_complex
        else float(tensor.abs().sum())
    )


def _difference(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape:
        return math.inf
    if one.dtype.is_complex or not one.numel():
        return float((one - other).abs().max()) if one.numel() else 0.0
    difference = (one.double() - other.double()).abs()
    # Infinities of one sign and numbers that are none are equal in both, and that is no difference.
    difference[(one == other) | (one.isnan() & other.isnan())] = 0.0
    return math.inf if bool(difference.isnan().any()) else float(difference.max())
