"""Methods of `Pipeline` that report on its steps and parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from penstock.errors import RunError
from penstock.event import Timeline
from penstock.ranks.run_config import RunConfig
from penstock.ranks.world import World
from penstock.runtime.assembly import Assembly
from penstock.runtime.measured_timeline import measured
from penstock.runtime.player import Player
from penstock.runtime.streaming import Streaming


class Inspection:
    """Mixin of `Pipeline`: timeline, weight versions and parameters."""

    setting: RunConfig
    _world: World
    _assembly: Assembly
    _player: Player
    _stream: Streaming | None

    def timeline(self) -> Timeline:
        """Return the measured timeline of the last step on every rank.

        It has the same type as the result of `simulate`. Ranks on one host share a clock; the
        times of each host are relative to its own clock.

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
        timeline = measured(
            self._world, self.setting.schedule, self._assembly.interpreters, rows, weights
        )
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
