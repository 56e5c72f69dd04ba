"""The fast path of a stage: forwards with one input tensor, one output tensor and nothing else.

Small stages spend most of their time in Python. The first forward of a form runs everything that
`GraphBuilder` checks and measures; later ones of the form skip it, where the first has shown that
nothing of it is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.batches.batch import Batch
from penstock.batches.device_batch import INPUTS, device_batch
from penstock.losses.stage_loss import total
from penstock.modules.side_loss import collect_side_losses
from penstock.stage.activation_meter import ActivationMeter
from penstock.stage.graph_builder import SIDE_LOSS, GraphBuilder
from penstock.stage.saved_forward import FastForward, SavedForward
from penstock.stage.slice_state import SliceState
from penstock.transport.payload import Payload

#: Number of forms whose input gradients' memory layout is remembered.
_MAX_FORMS = 4096

_NO_SLICE_STATE = SliceState(keeps=False)


class FastPath:
    """The fast path of one stage.

    Args:
        builder: runs the forwards of the stage.
        activation_meter: knows the bytes that graphs save.

    Attributes:
        bytes_by_form: the forms of micro-batches that take the fast path, and the bytes that the
            graph of each saves.
    """

    def __init__(self, builder: GraphBuilder, activation_meter: ActivationMeter) -> None:
        self._builder, self._activation_meter = builder, activation_meter
        self._on_host = builder.layers.device.type == "cpu"
        self._mixed = builder.mixed
        self.bytes_by_form: dict[str, int] = {}
        # Forms of micro-batches whose input gradients have the memory layout of the inputs.
        self._same_layouts: set[str] = set()

    def clear(self) -> None:
        """Forget all forms."""
        self.bytes_by_form.clear()
        self._same_layouts.clear()

    def note_same_layout(self, form: str) -> None:
        """Note that the input gradients of a form have the memory layout of the inputs."""
        if len(self._same_layouts) >= _MAX_FORMS:
            self._same_layouts.clear()
        self._same_layouts.add(form)

    def enable(
        self, batch: Batch, micro_batch: int, inputs: Payload, output: Payload | None
    ) -> None:
        """Let the next micro-batches of this form take the fast path, if it is sufficient.

        Args:
            batch: the batch.
            micro_batch: a micro-batch that has run without it.
            inputs: its inputs.
            output: its output; None on the last stage.
        """
        builder, meter = self._builder, self._activation_meter
        form, graph_form = batch.forms[micro_batch], builder.form(batch, micro_batch)
        one_input = inputs.structure == ""
        one_output = builder.loss is not None if output is None else output.structure == ""
        # The fast path takes the gradient of its input from `leaf.grad`, see `InputGrads`.
        same_layout = form in self._same_layouts or not any(inputs.wants_grad)
        if (
            one_input
            and one_output
            and same_layout
            and builder.in_place.excluded(training=True)
            and meter.settled(graph_form)
            and not batch.cuts_tokens
            and not batch.keeps_outputs
        ):
            self.bytes_by_form[form] = meter.size(graph_form)

    def forward(
        self, batch: Batch, micro_batch: int, arrived: Payload | None, size: int
    ) -> tuple[FastForward | SavedForward, Payload | None]:
        """Run a forward.

        Args:
            batch: the batch.
            micro_batch: number of the micro-batch, whose form is in `bytes_by_form`.
            arrived: the input from the stage before; None on the first stage.
            size: bytes that the graph saves.

        Returns:
            What the backward needs, and the output for the next stage.
        """
        builder = self._builder
        leaf = None
        if arrived is None:
            value = batch.inputs[micro_batch]
        else:
            value = arrived.leaves[0]
            if value.requires_grad:  # the sender's own tensor, in the same process
                value = value.detach()
        if not self._on_host:
            device = builder.layers.device
            if arrived is None:
                value = device_batch(batch, device).view(INPUTS, micro_batch, value)
            else:
                value = value.to(device)
        if arrived is not None and arrived.wants_grad[0]:
            leaf = value.requires_grad_(True)
        stage_input = value
        sides: list[Tensor] = []
        outer = collect_side_losses(sides)
        try:
            # Entering contexts that change nothing would take longer than this check.
            if self._mixed or not torch.is_grad_enabled():
                with torch.enable_grad(), builder.autocast():
                    value = self._run(batch, micro_batch, value, sides)
            else:
                value = self._run(batch, micro_batch, value, sides)
        finally:
            collect_side_losses(outer)
        root = value if value.requires_grad else None
        if sides:
            # The layers have begun to add side losses: later micro-batches of the form go the full
            # way.
            del self.bytes_by_form[batch.forms[micro_batch]]
            inputs = Payload("", (stage_input,), (leaf is not None,))
            return self._with_sides(inputs, value, sides, size)
        is_last = builder.loss is not None
        sent = None if is_last else Payload("", (value,), (root is not None,))
        return FastForward(leaf, root, size), sent

    def _run(self, batch: Batch, micro_batch: int, value: Tensor, sides: list[Tensor]) -> Tensor:
        """Run the layers and, on the last stage, the loss; return its value or the output."""
        builder = self._builder
        output: Tensor = builder.layers.run(batch, micro_batch, value, _NO_SLICE_STATE)
        if builder.loss is None:
            return output
        loss: Tensor = builder.loss.of(batch, micro_batch, output, sides)
        reach = builder.reach
        if reach is not None and reach.step != batch.step:
            # The walk over the graph takes a third of the time of a loss.
            if builder.loss.may_use_parameters:
                reach.check_loss(batch, loss, output)
            elif batch.training:
                reach.step = batch.step
        return loss

    def _with_sides(
        self, inputs: Payload, value: Tensor, sides: list[Tensor], size: int
    ) -> tuple[SavedForward, Payload | None]:
        """Return the results of a forward in which a layer had a side loss for the first time.

        Args:
            inputs: the leaf.
            value: the output or, on the last stage, the loss.
            sides: the side losses.
            size: bytes that the graph saves.
        """
        is_last = self._builder.loss is not None
        side_roots = [side for side in sides if side.requires_grad]
        roots = [value] if value.requires_grad else []
        output = None if is_last else Payload.of({SIDE_LOSS: total(sides), "value": value})
        loss_root_count = len(side_roots) + (len(roots) if is_last else 0)
        saved = SavedForward(
            inputs,
            {},
            [*roots, *side_roots],
            loss_root_count,
            first=None,
            size=size,
            loss=roots[0] if roots else None,
        )
        return saved, output
