"""What a pipeline has done: when its ops ran, and how many versions of its weights there were."""

from __future__ import annotations

from dataclasses import replace

from penstock.errors import RunError
from penstock.event import Timeline
from penstock.runtime.assembly import Assembly
from penstock.runtime.player import Player
from penstock.runtime.setting import Setting
from penstock.runtime.streaming import Streaming
from penstock.runtime.timing import measured
from penstock.runtime.world import World


class Inspection:
    """A part of `Pipeline`."""

    setting: Setting
    _world: World
    _made: Assembly
    _player: Player
    _stream: Streaming | None

    def timeline(self) -> Timeline:
        """What really happened in the last step, on every rank; the same type as `simulate` gives.

        Times of ranks on one host share a clock. Ranks on several hosts are each counted from the
        host's own clock.

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
        timeline = measured(self._world, self.setting.schedule, self._made.interpreters, rows)
        if played is None:
            return timeline
        return replace(
            timeline, slicing=self.setting.schedule.first_micro_batches(played[0]).slicing
        )

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """Per stage, the most versions of its weights that a rank has kept at once so far."""
        return (
            (1,) * len(self.setting.lengths) if self._stream is None else self._made.versions_kept()
        )
