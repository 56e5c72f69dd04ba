"""Bytes of weights, gradients and optimizer state of ranks that are not the sum of their stages.

Two rules of the runtime make the difference:

* A parameter that several stages use (tied) is stored, with its gradient, on every rank of these
  stages, once. The first rank of the first of them updates it, and alone stores its optimizer state.
* At level 1 of ZeRO the replicas of a stage own whole parameters.

The costs of a stage count a tied parameter in its first stage only, as any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from penstock.plan.parameter_owners import assign_owners
from penstock.profile.profile import Profile
from penstock.simulate.costs import Costs
from penstock.simulate.stage_seconds import parts_of


class TiedParameter(NamedTuple):
    """A parameter that several stages use.

    layer, position: where the profile counts it.
    size: its bytes.
    stages: those that use it, ascending. The first one counts it.
    """

    layer: int
    position: int
    size: int
    stages: tuple[int, ...]


@dataclass(frozen=True)
class StoredParameters:
    """Where the parameters of a model are stored.

    Attributes:
        profile: of the model and its optimizer.
        lengths: layers in every stage.
        holders: per stage the devices of its replicas, which are numbered from 0.
        zero: level of ZeRO.
    """

    profile: Profile
    lengths: Sequence[int]
    holders: Sequence[Sequence[int]]
    zero: int = 0

    @cached_property
    def parts(self) -> list[slice]:
        """The layers of every stage."""
        return parts_of(self.lengths)

    @cached_property
    def tied(self) -> tuple[TiedParameter, ...]:
        """The parameters that several stages use."""
        layers = self.profile.layers
        users: dict[tuple[int, int], set[int]] = {}
        for stage, part in enumerate(self.parts):
            for layer in layers[part]:
                for place in layer.tied_tensors:
                    users.setdefault(place, set()).add(stage)
        tied = []
        for (index, position), stages in users.items():
            home = next(stage for stage, part in enumerate(self.parts) if index < part.stop)
            size = layers[index].tensor_bytes[position]
            parameter = TiedParameter(index, position, size, tuple(sorted({home, *stages})))
            if len(parameter.stages) > 1:
                tied.append(parameter)
        return tuple(tied)

    def divides(self, stage: int) -> bool:
        """Whether the replicas of a stage divide its whole parameters."""
        return self.zero == 1 and len(self.holders[stage]) > 1

    def stage_bytes(self, stage: int) -> int:
        """Return the bytes of a stage's parameters."""
        return sum(layer.parameter_bytes for layer in self.profile.layers[self.parts[stage]])

    def owned_bytes(self, stage: int) -> list[float]:
        """Return for each replica of a stage the bytes of those parameters whose state it stores.

        Tied ones, which are not divided, are left out where the replicas divide the others. Layers
        without the sizes of their parameters, such as those of a formula, are divided evenly.
        """
        count = len(self.holders[stage])
        if not self.divides(stage):
            return [float(self.stage_bytes(stage))] * count
        undivided = {(parameter.layer, parameter.position) for parameter in self.tied}
        sizes: list[int] = []
        evenly = 0
        for index in range(self.parts[stage].start, self.parts[stage].stop):
            layer = self.profile.layers[index]
            if not layer.tensor_bytes:
                evenly += layer.parameter_bytes
            for position, size in enumerate(layer.tensor_bytes):
                if (index, position) not in undivided:
                    sizes.append(size)
        loads = [evenly / count] * count
        for size, owner in zip(sizes, assign_owners(sizes, count, stage), strict=True):
            loads[owner] += size
        return loads

    def largest_shares(self) -> list[float]:
        """Return per stage the part of its state on that replica which stores most of it."""
        shares = []
        for stage, ranks in enumerate(self.holders):
            share = 1 / len(ranks) if self.zero else 1.0
            owned = self.owned_bytes(stage)
            total: float = sum(owned)
            if self.divides(stage) and total > 0:
                share = max(owned) / total
            shares.append(share)
        return shares

    def add_to(self, costs: Costs, devices_per_rank: int = 1) -> Costs:
        """Return `costs` with the bytes of every rank, where they are not those of its stages.

        Args:
            costs: of a synchronous schedule, with its gradient sums, and with those of ZeRO.
            devices_per_rank: device d stands on rank d modulo the number of ranks, and a rank is
                given the bytes of that of its devices which stores most.
        """
        divided = any(self.divides(stage) for stage in range(len(self.holders)))
        # Above level 1 parameters are divided evenly, which is what the costs of stages say.
        if costs.weight_bytes is None or self.zero > 1 or not (self.tied or divided):
            return replace(costs, bytes_of_ranks=None) if costs.bytes_of_ranks else costs
        stages = len(self.parts)
        totals = costs.spread("weight_bytes", stages) or ()
        gradients = costs.spread_or_zeros("gradient_bytes", stages)
        states = costs.spread_or_zeros("optimizer_bytes", stages)
        devices = 1 + max(chain.from_iterable(self.holders))
        rows = [[0.0, 0.0, 0.0] for _ in range(devices)]
        for stage, holders in enumerate(self.holders):
            for device, owned in zip(holders, self.owned_bytes(stage), strict=True):
                rows[device][0] += totals[stage] - gradients[stage] - states[stage]
                rows[device][1] += gradients[stage]
                rows[device][2] += self.profile.optimizer_states * owned
        for parameter in self.tied:
            self._move(parameter, gradients[parameter.stages[0]], rows)
        ranks = devices // devices_per_rank
        of_ranks = [max(map(tuple, rows[rank::ranks]), key=sum) for rank in range(ranks)]
        return replace(costs, bytes_of_ranks=tuple(of_ranks))

    def _move(
        self, parameter: TiedParameter, home_gradients: float, rows: list[list[float]]
    ) -> None:
        """Count a tied parameter where it is stored, instead of with the stage that counts it.

        Args:
            parameter: the tied parameter.
            home_gradients: bytes of the gradients of its first stage, with those in which replicas
                sum them. Tied ones are summed without.
            rows: bytes of weights, gradients and states of every device.
        """
        home, size = parameter.stages[0], parameter.size
        state = self.profile.optimizer_states * size
        for device in self.holders[home]:
            rows[device][0] -= size
            rows[device][1] -= size * home_gradients / self.stage_bytes(home)
            # Where replicas divide their state, `owned_bytes` has left this parameter out.
            if not self.divides(home):
                rows[device][2] -= state
        for device in {device for stage in parameter.stages for device in self.holders[stage]}:
            rows[device][0] += size
            rows[device][1] += size
        rows[self.holders[home][0]][2] += state
