"""Tracing before a batch: check that a traced model's graphs fit it, and trace missing ones.

Every rank knows the shapes of the whole batch, so all ranks trace at the same time, before any of
them runs an op. If a rank traced in the middle of a step, the others would wait and could exceed
their deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from penstock.batches.batch import Batch
from penstock.runtime.assembly import Assembly
from penstock.runtime.batch_needs import check_needs
from penstock.tracing.form import Form
from penstock.tracing.sequential import ContainerWatch
from penstock.tracing.variants import Variants

#: Keys of prepared batches that are stored at most; then all are dropped, and looked up again.
_MAX_KEYS = 4096


class Preparation:
    """Checks and traces the graphs of one `Pipeline` before its batches.

    Args:
        assembly: the ranks of this process.
        autocast: the dtype of mixed precision; None without it.
        settle: finishes all batches in flight.
    """

    def __init__(
        self, assembly: Assembly, autocast: torch.dtype | None, settle: Callable[[], None]
    ) -> None:
        self._assembly, self._autocast, self._settle = assembly, autocast, settle
        self._prepared: set[tuple[object, ...]] = set()
        traced = assembly.traced
        self._containers = ContainerWatch(traced.roots if traced.variants is None else ())

    def begin(self) -> None:
        """Trace the form of the example inputs, unless its graph was traced with the chain.

        Raises:
            ChainError: the model cannot be traced.
        """
        variants = self._assembly.traced.variants
        if variants is None or variants.example is None:
            return
        self._refresh(variants, training=True)
        if not variants.is_known or self._autocast is not None:
            self._trace(variants, [variants.example], training=True)

    def prepare(self, batch: Batch) -> Batch:
        """Trace what a batch needs. Takes about 0.1 ms if nothing has changed.

        Returns:
            The batch; its signature includes the state of the model that the graphs depend on.

        Raises:
            ChainError: the model has changed since it was traced, or cannot be traced for inputs of
                this form.
            SettingError: the batch has not what the ranks of this process need of it.
        """
        check_needs(self._assembly, batch)
        self._containers.check()
        variants = self._assembly.traced.variants
        if variants is None:
            return batch
        self._refresh(variants, batch.training)
        state = variants.state(batch.training)
        # What decides which graph a batch needs.
        key = (
            batch.signature,
            state,
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.get_default_dtype(),
        )
        if key not in self._prepared:
            forms = [Form.of(inputs) for inputs in batch.inputs]
            self._trace(variants, forms, training=batch.training)
            if len(self._prepared) > _MAX_KEYS:
                self._prepared.clear()
            self._prepared.add(key)
        if state:
            # Different graphs may send different tensors between stages.
            batch.signature = f"{batch.signature}/{state}"
        return batch

    def _refresh(self, variants: Variants, training: bool) -> None:
        """Update the graphs if the model has changed since they were traced."""
        if variants.is_current(training):
            return
        self._settle()  # micro-batches in flight belong to the previous graphs
        if variants.refresh(training):
            for stage in self._assembly.stages:
                stage.renew()

    def _trace(self, variants: Variants, forms: list[Form], *, training: bool) -> None:
        """Look up or trace the graphs for some forms of inputs.

        The status board says that this rank is tracing, for messages of ranks that wait.
        """
        world = self._assembly.world
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
            for stage in self._assembly.stages:
                stage.renew()

    def _mixed(self) -> AbstractContextManager[None]:
        """Return the autocast context of the training."""
        if self._autocast is None:
            return nullcontext()
        world = self._assembly.world
        device = world.device(world.local_ranks[0])
        return torch.autocast(device.type, dtype=self._autocast)
