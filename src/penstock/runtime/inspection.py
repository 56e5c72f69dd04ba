"""Methods of `Pipeline` that report on its steps, parameters and needs of data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.batches.batch import Batch
from penstock.batches.sample_order import sample_order
from penstock.errors import RunError, SettingError
from penstock.event import Timeline
from penstock.ranks.mesh.copy_batches import CopyBatches
from penstock.ranks.settings.run_config import RunConfig
from penstock.ranks.settings.settings_exchange import SettingsExchange
from penstock.ranks.world import World
from penstock.runtime.assembly import Assembly
from penstock.runtime.batch_needs import BatchNeeds, BatchReader, needs_of
from penstock.runtime.comparison.one_device_comparison import Comparison, compare
from penstock.runtime.measured_timeline import measured_timeline
from penstock.runtime.player import Mode, Player
from penstock.runtime.streaming import Streaming
from penstock.stage.stage_builder import Training


class Inspection:
    """Mixin of `Pipeline`: timeline, weight versions, parameters and needs of data."""

    setting: RunConfig
    _world: World
    _settings_exchange: SettingsExchange | None
    _assembly: Assembly
    _player: Player
    _stream: Streaming | None
    _training: Training
    _copies: CopyBatches | None

    def _drain(self) -> None:
        """End all batches in flight; see `Pipeline`."""
        raise NotImplementedError

    def _batch(self, x: Any, y: Any, *, training: bool, call: str) -> Batch:
        """Return a batch with targets; see `Pipeline`."""
        raise NotImplementedError

    def timeline(self) -> Timeline:
        """Return the measured timeline of the last step on every rank.

        It has the same type as the result of `simulate`, and has the messages between ranks with
        their bytes. `penstock.idle` tells what idle ranks waited for. All times are on the clock of
        rank 0: offsets between the clocks of hosts are measured, see `clock_offsets`.

        Raises:
            RunError: no batch has been trained or evaluated yet.
        """
        self._world.calls.enter("timeline")
        played = self._player.played
        rows = (
            self._player.rows()
            if played is not None or self._stream is None
            else self._stream.window()
        )
        if not any(rows.values()):
            raise RunError("there is no timeline yet: train a batch first")
        weights = {} if self._stream is None else self._stream.weights.by_rank
        timeline = measured_timeline(
            self._world, self.setting.schedule, self._assembly.interpreters, rows, weights
        )
        hosts = () if self._settings_exchange is None else tuple(self._settings_exchange.hosts)
        timeline = replace(timeline, hosts=hosts)
        if played is None:
            return timeline
        return replace(
            timeline, slicing=self.setting.schedule.first_micro_batches(played[0]).slicing
        )

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """By stage, the peak number of its weight versions on any rank so far."""
        if self._stream is None:
            return (1,) * len(self.setting.lengths)
        return self._stream.weights.peak_versions()

    @property
    def rank(self) -> int:
        """This process's rank in the schedule; 0 if all ranks are threads of this process."""
        return self._world.local_ranks[0]

    @property
    def is_main(self) -> bool:
        """Whether this process runs rank 0, which gathers results: the one to print and to save."""
        return 0 in self._world.local_ranks

    @property
    def is_first(self) -> bool:
        """Whether this process runs the first stage, which reads the inputs."""
        return any(stage.index == 0 for stage in self._assembly.stages)

    @property
    def is_last(self) -> bool:
        """Whether this process runs the last stage, which computes the loss."""
        last = len(self.setting.lengths) - 1
        return any(stage.index == last for stage in self._assembly.stages)

    @property
    def needs(self) -> BatchNeeds:
        """What this process needs of a batch; other samples need not be read here.

        `pipe.needs.inputs` and `pipe.needs.targets` are false where nothing is needed.
        `positions(samples)` of them returns the positions that are needed of a batch with that
        number of samples, and `read(function, indices)` reads these and returns what `train_batch`
        takes.
        """
        return needs_of(self._assembly)

    def reader(
        self,
        inputs: Any,
        targets: Any = None,
        *,
        batch: int,
        seed: int | None = 0,
        epoch: int = 0,
        drop_last: bool = False,
    ) -> BatchReader:
        """Return one epoch of batches for `train`, of which each process reads what it needs.

        The order depends on `seed` and `epoch` only. A process that needs no inputs or no targets
        reads those of one sample, for shapes and types; all samples must have the same.

        Args:
            inputs: of all samples: a tensor, or a sequence or data set with a length whose items
                can be stacked.
            targets: likewise; None if the items of `inputs` are pairs of an input and a target.
            batch: samples per batch; the last batch has the remainder.
            seed: of the order; None keeps the samples in their own order.
            epoch: number of the epoch; each has another order.
            drop_last: leave out a last batch that is smaller than the others.

        Raises:
            SettingError: inputs and targets differ in number, or there is not a single batch.
        """

        def order(samples: int) -> Tensor:
            """Return the order of the samples."""
            return torch.arange(samples) if seed is None else sample_order(samples, seed, epoch)

        return BatchReader(self.needs, inputs, targets, batch, order, drop_last=drop_last)

    def compare_with_one_device(self, x: Any, y: Any) -> Comparison:
        """Run one batch in the pipeline and on one device, and compare. Weights are not updated.

        Returns:
            On rank 0, a printable comparison with the largest error of each parameter's gradient,
            each buffer, the outputs and the loss; on other ranks an empty comparison.

        Raises:
            SettingError: the pipeline has copies in a mesh, or shared layers.
        """
        if self._copies is not None:
            raise SettingError(
                "compare_with_one_device needs the whole batch and the whole layers on every rank, "
                "and this pipeline has a mesh: compare a pipeline of one copy, without mesh="
            )
        self._drain()
        batch = self._batch(x, y, training=True, call="compare_with_one_device")
        batch.keeps_outputs = True

        def play() -> Tensor:
            self._player.play(batch, Mode.COMPARE)
            return self._player.mean_loss(batch)

        return compare(self._assembly, play, batch, self._training)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of the local stages with their names in the model.

        A parameter that several stages use is yielded only at its home stage.
        """
        for stage in self._assembly.stages:
            borrowed = set(map(id, stage.update.borrowed))
            for parameter, name in self._assembly.names(stage).items():
                if id(parameter) not in borrowed:
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the local stages, for an optimizer outside of the pipeline."""
        return (parameter for _, parameter in self.named_parameters())
