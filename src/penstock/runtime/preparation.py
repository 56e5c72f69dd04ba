"""What the ranks do before a batch of a traced model: see that its graphs are right for it, and
trace what is missing.

Every rank has the whole batch, so each traces for itself and all do so at the same time, before any
of them runs an op: in the middle of a step the others would wait, and their deadline would run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from penstock.runtime.assembly import Assembly
from penstock.runtime.batch import Batch
from penstock.tracing.capture import Form
from penstock.tracing.variants import Variants


class Preparation:
    """Of one `Pipeline`.

    Args:
        made: the ranks.
        autocast: the dtype of mixed precision.
        settle: lets everything under way finish.
    """

    def __init__(
        self, made: Assembly, autocast: torch.dtype | None, settle: Callable[[], None]
    ) -> None:
        self._made, self._autocast, self._settle = made, autocast, settle
        self._known: set[tuple[object, ...]] = set()

    def begin(self) -> None:
        """Trace the example's form, where no graph has come along from where the chain was made.

        Raises:
            ChainError: the model cannot be traced as it is.
        """
        variants = self._made.traced.variants
        if variants is None or variants.example is None:
            return
        self._refresh(variants, training=True)
        if not variants.is_known or self._autocast is not None:
            self._trace(variants, [variants.example], training=True)

    def prepare(self, batch: Batch) -> Batch:
        """Make ready for a batch. Costs some 0.1 ms where nothing has changed and the form is
        known.

        Raises:
            ChainError: the model is not the one that was traced, or cannot be traced for inputs of
            this form.
        """
        variants = self._made.traced.variants
        if variants is None:
            return batch
        self._refresh(variants, batch.training)
        state = variants.state(batch.training)
        key = (
            batch.signature,
            state,
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.get_default_dtype(),
        )
        if key not in self._known:
            forms = [Form.of(inputs) for inputs in batch.inputs]
            self._trace(variants, forms, training=batch.training)
            if len(self._known) > 4096:
                self._known.clear()
            self._known.add(key)
        if state:
            # Other graphs may send other tensors between stages.
            batch.signature = f"{batch.signature}/{state}"
        return batch

    def _refresh(self, variants: Variants, training: bool) -> None:
        if variants.is_current(training):
            return
        self._settle()  # micro-batches under way have come from the graphs before
        if variants.refresh(training):
            for stage in self._made.stages:
                stage.renew()

    def _trace(self, variants: Variants, forms: list[Form], *, training: bool) -> None:
        """Find or make the graphs for some forms; the others learn from the board that this takes
        its time.
        """
        world = self._made.world
        drawing = variants.drawing
        for form in forms:
            with self._mixed():
                if variants.has(form, training):
                    continue
                shapes = ", ".join(str(tuple(tensor.shape)) for tensor in form.tensors)
                for rank in world.local_ranks:
                    world.board(rank).doing(f"traces the model for inputs of {shapes}")
                variants.find(form, training)
        if variants.drawing != drawing:
            for stage in self._made.stages:
                stage.renew()

    def _mixed(self) -> AbstractContextManager[None]:
        device = self._made.world.device(self._made.world.local_ranks[0])
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(device.type, dtype=self._autocast)
