"""The state of a rank's stages, as of the end of a step, for the attempt after a failure.

When another rank is lost, the remaining ranks stop wherever they are: within a step, some stages
may have had their update and others not. So every rank counts the updates of its stages and knows
of each stage after which step its state is, or that it is of none. What a forward changes before the
update, the buffers, is copied at the end of every step.

The launcher compares what the ranks offer, and asks for every stage at one and the same step; see
`live_recovery`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch._C._distributed_c10d import Store

from penstock.checkpoint.checkpoint import CheckpointWriter, Progress
from penstock.checkpoint.checkpoint_files import write_in_memory
from penstock.checkpoint.checkpoint_fit import parameter_names
from penstock.checkpoint.checkpoint_index import Checkpoint, FileSum
from penstock.checkpoint.checkpoint_options import CheckpointOptions
from penstock.errors import FileError, PeerFailed, PenstockError, SettingError
from penstock.modules.state_names import full_name, prefix_of
from penstock.runtime.pipeline import Pipeline
from penstock.stage.stage import Stage
from penstock.stage.stage_state import owned_tensors, stage_tensors
from penstock.training.recovery.messages import (
    CONDITIONS,
    Conditions,
    Delivery,
    Offer,
    Request,
    delivery_key,
    of_text,
    offer_key,
    request_key,
    to_text,
)
from penstock.transport.unix_store import launch_store

#: Where a buffer is: in this dictionary of a module, under this key.
_Place = tuple[dict[str, Tensor | None], str]

#: Seconds for which a rank waits for the launcher's answer. The launcher waits for the offers of
#: all ranks, for at most `live_recovery.OFFERS_S`.
_ANSWER_S = 8.0


def _conditions() -> Conditions:
    """Return what the launcher has told this rank; ranks of torchrun offer nothing."""
    store = launch_store()
    if store is None or not store.check([CONDITIONS]):
        return Conditions(offers=False)
    return of_text(store.get(CONDITIONS).decode(), Conditions)


class LiveState:
    """The state of one rank's stages at the end of its last step.

    Args:
        pipe: the pipeline.

    Attributes:
        source: folder of the checkpoint in memory from which this attempt continues, if any.
    """

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe
        conditions = _conditions()
        self.source = None if conditions.source is None else Path(conditions.source)
        offers = conditions.offers and _can_offer(pipe)
        self._store: Store | None = launch_store() if offers else None
        self._rank = pipe._world.local_ranks[0]
        self._step: int | None = None
        self._scaler: dict[str, float] | None = None
        self._updates: dict[int, int] = {}
        self._places: dict[int, dict[str, _Place]] = {}
        self._buffers: dict[int, dict[str, Tensor]] = {}
        self._lines: tuple[int, list[str]] = (0, [])

    def note(self, step: int, values: dict[str, object]) -> None:
        """Note a line of the metrics, which rank 0 may not have written when it is lost."""
        if self._store is None:
            return
        line = json.dumps({"step": step, **values})
        noted_step, lines = self._lines
        self._lines = step, [*lines, line] if step == noted_step else [line]

    def commit(self, step: int) -> None:
        """Note that a step is complete on this rank, with its metrics and its evaluation.

        A step whose gradients wait for the next update is none from which a run could continue; a
        run at step 0 begins anew.
        """
        if self._store is None or self._pipe._accumulated or not step:
            return
        self._step = None  # an exception below leaves no step
        for stage in self._pipe._assembly.stages:
            self._updates[stage.index] = stage.update.steps
            self._copy_buffers(stage)
        self._scaler = self._pipe._global_step.state()
        self._step = step

    @contextlib.contextmanager
    def offering(self) -> Iterator[None]:
        """Offer the state to the launcher when a rank fails in the `with` block."""
        try:
            yield
        except PeerFailed:
            if self._store is not None and self._step is not None:
                # The launcher has ended, or does not answer: the failure itself is reported.
                with contextlib.suppress(RuntimeError, FileError):
                    self._hand_over(self._store, self._step)
            raise

    def _copy_buffers(self, stage: Stage) -> None:
        """Copy the persistent buffers of a stage."""
        places = self._places.get(stage.index)
        if places is None:
            places = self._places[stage.index] = _buffer_places(stage)
        copies = self._buffers.setdefault(stage.index, {})
        with torch.no_grad():
            for name, (holder, key) in places.items():
                buffer, copy = holder[key], copies.get(name)
                if buffer is None:
                    copies.pop(name, None)
                elif copy is None or copy.shape != buffer.shape or copy.dtype != buffer.dtype:
                    copies[name] = buffer.detach().clone()
                else:
                    copy.copy_(buffer)

    def _hand_over(self, store: Store, step: int) -> None:
        """Offer the stages to the launcher, and write those that it asks for."""
        stages = tuple(self._steps_of_stages(step).items())
        store.set(offer_key(self._rank), to_text(Offer(step, self._lines_of(step), stages)))
        key = request_key(self._rank)
        store.wait([key], timedelta(seconds=_ANSWER_S))
        request = of_text(store.get(key).decode(), Request)
        if not request.files:
            return
        try:
            delivery = Delivery(self._write(request, step))
        except (PenstockError, OSError, SafetensorError, RuntimeError, ValueError) as error:
            delivery = Delivery(None, f"rank {self._rank}: {error}")
        store.set(delivery_key(self._rank), to_text(delivery))

    def _lines_of(self, step: int) -> tuple[str, ...]:
        """Return the lines of the metrics of a step."""
        noted_step, lines = self._lines
        return tuple(lines) if noted_step == step else ()

    def _steps_of_stages(self, step: int) -> dict[int, int]:
        """Return, by stage of which this rank has a usable state, the step of that state.

        Args:
            step: the last complete step.
        """
        assembly = self._pipe._assembly
        # The optimizer of a weight that several stages use is on one rank.
        elsewhere = {shared.stages[0] for shared in assembly.shared if shared.home != self._rank}
        # With gradient accumulation or loss scaling more than the updates makes a step.
        ahead = self._pipe.accumulate == 1 and self._scaler is None
        steps: dict[int, int] = {}
        for stage in assembly.stages:
            updates = stage.update.steps - self._updates[stage.index]
            if stage.update.stepping or stage.index in elsewhere:
                continue
            if updates == 0 or (updates == 1 and ahead):
                steps[stage.index] = step + updates
        return steps

    def _write(self, request: Request, step: int) -> Checkpoint:
        """Write the stages of a request. Returns the index, with their checksums.

        Args:
            request: the request.
            step: the last complete step.
        """
        placed = self._pipe._assembly.placed
        writer = CheckpointWriter(
            Path(),
            placed,
            Progress(request.step, self._scaler),
            (),
            CheckpointOptions(),
            request.identity,
        )
        stages = {stage.index: stage for stage in placed.local}
        sums: dict[str, FileSum] = {}
        for index, path in request.files:
            stage = stages[index]
            model = owned_tensors(placed, stage, self._rank)
            if request.step == step:
                model = self._with_copied_buffers(stage, model)
            content = writer.content(stage, model)
            name = writer.name(index, 0)
            writer.check_values({name: content})
            sums[name] = write_in_memory(Path(path), content.tensors, writer.metadata(content))
        return writer.index(sums, {}, keeps=False)

    def _with_copied_buffers(self, stage: Stage, model: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors of a stage with the buffers as they were after the last complete step.

        Raises:
            SettingError: the stage has other buffers than then.
        """
        copies = self._buffers[stage.index]
        if copies.keys() != stage_tensors(stage).keys() - parameter_names(stage):
            raise SettingError(f"stage {stage.index} has had other buffers after the last step")
        return {name: copies.get(name, tensor) for name, tensor in model.items()}


def _buffer_places(stage: Stage) -> dict[str, _Place]:
    """Return where the persistent buffers of a stage are, by their names in the model."""
    places: dict[str, _Place] = {}
    for layer in stage.layers:
        root = prefix_of(layer.name, layer.module)
        for path, module in layer.module.named_modules(prefix=root, remove_duplicate=False):
            for key in module._buffers.keys() - module._non_persistent_buffers_set:
                places[full_name(path, key)] = module._buffers, key
    return places


def _can_offer(pipe: Pipeline) -> bool:
    """Whether the state of a pipeline is known after a failure.

    That of a stream is not, since batches are in flight; nor where the device receives messages by
    itself, since an update may have used what an aborted message has left. Schedulers and averages
    belong to programs with their own loop.
    """
    persistence = pipe._persistence
    return (
        pipe.setting.schedule.synchronous
        and len(pipe._world.local_ranks) < pipe._world.size
        and not pipe._world.receives_on_device
        and not persistence.schedulers
        and not persistence.averages
    )
