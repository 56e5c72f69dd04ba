"""The weight rules of the stages of a stream, on the ranks of this process."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from penstock.checkpoint.checkpoint import VersionedStage
from penstock.optim.catalogue import stage_weights
from penstock.optim.stage_weights import Site, StageWeights
from penstock.runtime.assembly import Assembly
from penstock.stage.replicas import ReplicaGroup, WaveReplicaExchange
from penstock.stage.stage import Stage
from penstock.transport.payload import TensorForm
from penstock.weights.weight_uses import uses


class StreamWeights:
    """The weight rule of every local stage of an asynchronous schedule.

    Args:
        assembly: the ranks of this process. Their weight versions start from the present
            parameters, which must have been broadcast to replicas.

    Attributes:
        by_rank: by rank and stage, the weight rule.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        setting = assembly.setting
        self._rule = setting.rule
        self._uses = uses(setting.schedule, self._rule)
        for stage in assembly.stages:
            stage.allow_weight_changes()
        self.by_rank: Mapping[int, Mapping[int, StageWeights]] = {}
        self.restart()

    def restart(self) -> None:
        """Start new weight versions from the present parameters, after these have been loaded."""
        by_rank: dict[int, dict[int, StageWeights]] = {}
        for rank, interpreter in self._assembly.interpreters.items():
            wave_replicas = self._assembly.wave_replicas[rank]
            by_rank[rank] = {
                index: self._stage_weights(stage, wave_replicas.get(index))
                for index, stage in interpreter.stages.items()
            }
        self.by_rank = by_rank

    def drain(self, rank: int) -> None:
        """Bring the stages of a rank to their newest version."""
        for weights in self.by_rank[rank].values():
            weights.drain()

    def versions(self) -> list[VersionedStage]:
        """Return the local stages with their weight rules, for a checkpoint."""
        holders = self._assembly.setting.schedule.ranks_of_stage
        versions: list[VersionedStage] = []
        for rank, rules in self.by_rank.items():
            stages = self._assembly.interpreters[rank].stages
            wave_replicas = self._assembly.wave_replicas[rank]
            for index, weights in rules.items():
                replica = holders[index].index(rank) if index in wave_replicas else 0
                versions.append(VersionedStage(rank, stages[index], weights, replica))
        return versions

    def peak_versions(self) -> tuple[int, ...]:
        """Return, by stage, the peak number of its weight versions on any rank.

        Every rank must call this.
        """
        stage_count, world = len(self._assembly.setting.lengths), self._assembly.world
        form = TensorForm((stage_count,), "int64", wants_grad=False)
        peaks: dict[int, list[Tensor]] = {}
        for rank, rules in self.by_rank.items():
            row = torch.zeros(stage_count, dtype=torch.int64)
            for index, weights in rules.items():
                row[index] = weights.peak_versions
            peaks[rank] = [row]
        gathered = world.gather(peaks, {rank: [form] for rank in range(world.size)})
        maximum = torch.stack([row for (row,) in gathered.values()]).amax(0) if gathered else None
        return tuple(int(count) for count in world.broadcast(maximum, 0, form))

    def has_more_optimizers(self) -> bool:
        """Whether a weight rule keeps further optimizers beside that of its stage."""
        for rules in self.by_rank.values():
            if any(weights.more_optimizers() for weights in rules.values()):
                return True
        return False

    def _stage_weights(self, stage: Stage, replicas: ReplicaGroup | None) -> StageWeights:
        """Return the weight rule of a stage.

        Args:
            stage: the stage.
            replicas: its replica group, if its replicas average weights after waves.
        """
        setting, version_uses = self._assembly.setting, self._uses
        stream = setting.schedule.stream
        assert stream is not None
        return stage_weights(
            Site(
                stage.update,
                # Forward, backward and update of a micro-batch ask for the same; after a miss it is
                # computed again.
                lru_cache(maxsize=256)(lambda number: version_uses.at(stage.index, number)),
                self._rule,
                self._rule.with_defaults(setting.weights_options),
                stage.index,
                version_uses.staleness(stage.index),
                stream.pipelines,
                stream.waves,
                None if replicas is None else WaveReplicaExchange(replicas),
                len(setting.lengths),
            )
        )
