"""Elastic averaging: replicas of the weights take turns and are pulled towards a common reference.

Batch t trains replica n = t mod N, with an optimizer of its own. With α = 1/N and the reference θ̃
at the start of the round of N batches:

    θₙ ← θₙ + Δₙ             the optimizer's step
    θₙ ← (1 - α) θₙ + α θ̃    the pull
    θ̃ ← θ̃ + (1/N) Σₙ Δₙ      at the end of the round

The reference is what is evaluated and saved. A drain ends a round early, with the Δₙ computed so
far.

Source: Chen et al. 2023, AvgPipe, section 3. The order within a round is ours: the paper updates
the reference through a queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.errors import RunError, SettingError
from penstock.optim.blocks import Block, Layout, copy, point, take
from penstock.optim.catalogue import register
from penstock.optim.optimizer_state import load_optimizer_state, optimizer_state
from penstock.optim.stage_weights import Site, StageWeights, State


@dataclass
class _Replica:
    """One replica of the weights.

    Attributes:
        optimizer: steps this replica.
        blocks, tensors: its values, by block and by parameter; empty before the first forward.
        grads: gradients of its batch, while another replica uses the parameters' `.grad`.
    """

    optimizer: Optimizer
    blocks: list[Block] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    grads: list[Tensor | None] | None = None

    @property
    def flat(self) -> list[Tensor]:
        """The values, one tensor per block."""
        return [block.flat for block in self.blocks]


@final
class Averaged(StageWeights):
    """N replicas and their reference.

    The reference has the parameters' own memory; between runs the parameters are the reference.
    """

    def __init__(self, site: Site) -> None:
        if site.pipelines < 2:
            raise SettingError(
                f"weight rule {site.rule.name!r} averages several copies of the weights, and this "
                f"schedule has {site.pipelines}: give it pipelines=2 or more"
            )
        self._stage, self._update, self._use = site.stage, site.update, site.use
        self._layout = Layout(site.update.parameters)
        self._reference = self._layout.current_blocks()
        self._reference_tensors = self._layout.tensors(self._reference)
        first_optimizer = site.update.optimizer
        assert first_optimizer is not None
        self._replicas = [
            _Replica(first_optimizer),
            *(_Replica(site.update.new_optimizer()) for _ in range(site.pipelines - 1)),
        ]
        self._round_changes: list[Tensor] = []
        self._in_round = 0
        # The replica whose values the parameters have; None: those of the reference.
        self._active: _Replica | None = None
        # The replica whose gradients are in `.grad`.
        self._grad_owner: _Replica | None = None
        # The replica that the next U steps: that of the last finished backward.
        self._next_update: _Replica | None = None

    def before_forward(self, number: int) -> None:
        """Activate the replica of the micro-batch's batch.

        Raises:
            RunError: forward and backward of the micro-batch read different versions of the
                replica.
        """
        reads = self._use(number).reads
        if reads.forward != reads.backward:
            raise RunError(
                f"stage {self._stage}: the forward of micro-batch {number} reads version "
                f"{reads.forward} of its copy of the weights and its backward version "
                f"{reads.backward}: elastic averaging requires the same version, so each of its "
                "pipelines must finish a batch before it starts the next one"
            )
        self._activate(self._replica_of(number))

    def before_backward(self, number: int) -> None:
        """Activate the replica of the micro-batch's batch, and let `.grad` be its gradients."""
        replica = self._replica_of(number)
        self._activate(replica)
        self._assign_grads(replica)

    def finished(self, number: int) -> None:
        """Note that the next update steps the replica of this micro-batch."""
        self._next_update = self._replica_of(number)

    def update(self, version: int) -> None:
        """Step the replica whose batch has ended, and pull it to the reference.

        If it was the last of the round, end the round.
        """
        del version
        replica = self._next_update
        assert replica is not None
        self._activate(replica)
        self._assign_grads(replica)
        point(self._update.parameters, replica.tensors)
        _copy_options(replica.optimizer, self._replicas[0].optimizer)
        # Accumulates Δ by subtracting the weights before the step and adding them after it, which
        # needs no copy of the weights; differences of numbers so close are exact either way.
        # `finally`: without the addition, a failing step would leave the negated weights in Δ.
        torch._foreach_sub_(self._round_changes, replica.flat)
        try:
            self._update.advance(replica.optimizer)
        finally:
            take(self._update.parameters, replica.tensors)
            torch._foreach_add_(self._round_changes, replica.flat)
        self._grad_owner = self._next_update = None
        torch._foreach_lerp_(
            replica.flat, [block.flat for block in self._reference], 1 / len(self._replicas)
        )
        self._in_round += 1
        if self._in_round == len(self._replicas):
            self._end_round()

    def drain(self) -> None:
        """End the round, and let the parameters be the reference."""
        for replica in self._replicas:
            replica.grads = None
        self._grad_owner = self._next_update = None
        if self._in_round:
            self._end_round()
        self._active = None
        point(self._update.parameters, self._reference_tensors)

    @property
    def versions(self) -> int:
        """Number of replicas; 1 until memory is allocated for them."""
        return len(self._replicas) if self._round_changes else 1

    def held_bytes(self) -> int:
        """Return the bytes of replicas, reference and the changes of the round."""
        tensors = [block.flat for block in self._reference]
        for replica in self._replicas:
            tensors += replica.flat
        return sum(tensor.nbytes for tensor in (*tensors, *self._round_changes))

    def more_optimizers(self) -> Sequence[Optimizer]:
        """Return the optimizers of all replicas but the first, whose optimizer is the stage's."""
        return [replica.optimizer for replica in self._replicas[1:]]

    def state(self) -> State:
        """Return the replicas, and the optimizer states of all but the first."""
        if not self._round_changes:
            return {}
        state: dict[str, list[Tensor | None]] = {}
        for n, replica in enumerate(self._replicas):
            state[f"copy{n}"] = list(replica.tensors)
        for n, replica in enumerate(self._replicas[1:], 1):
            tensors_by_key = optimizer_state(replica.optimizer, self._update.parameters)
            for key, tensors in tensors_by_key.items():
                state[f"optimizer{n}.{key}"] = tensors
        return state

    def load_state(self, state: State) -> None:
        """Restore replicas and optimizers from `state`.

        Without them all replicas begin at the reference, and their optimizers without state.
        """
        if "copy0" in state:
            self._allocate()
        elif self._round_changes:
            self._reset_replicas()
        for n, replica in enumerate(self._replicas):
            self._load_tensors(replica, state.get(f"copy{n}", ()))
            if n:
                prefix = f"optimizer{n}."
                optimizer_tensors = {
                    key.removeprefix(prefix): tensors
                    for key, tensors in state.items()
                    if key.startswith(prefix)
                }
                load_optimizer_state(replica.optimizer, self._update.parameters, optimizer_tensors)

    @staticmethod
    def _load_tensors(replica: _Replica, values: Sequence[Tensor | None]) -> None:
        """Copy saved values into a replica; None leaves a tensor as it is."""
        pairs = [
            (target, value)
            for target, value in zip(replica.tensors, values, strict=False)
            if value is not None
        ]
        copy([target for target, _ in pairs], [value.to(target.device) for target, value in pairs])

    def _replica_of(self, number: int) -> _Replica:
        return self._replicas[self._use(number).batch % len(self._replicas)]

    def _activate(self, replica: _Replica) -> None:
        """Point the parameters to the weights of a replica."""
        if self._active is not replica:
            self._allocate()
            for parameter, tensor in zip(self._update.parameters, replica.tensors, strict=True):
                parameter.data = tensor
            self._active = replica

    def _assign_grads(self, replica: _Replica) -> None:
        """Set `.grad` to the gradients of a replica, and put those of the current owner aside."""
        if self._grad_owner is replica:
            return
        parameters = self._update.parameters
        if self._grad_owner is not None:
            self._grad_owner.grads = [parameter.grad for parameter in parameters]
        if self._grad_owner is not None or replica.grads is not None:
            for parameter, grad in zip(
                parameters, replica.grads or [None] * len(parameters), strict=True
            ):
                parameter.grad = grad
        replica.grads = None
        self._grad_owner = replica

    def _allocate(self) -> None:
        """Allocate memory for the replicas, once, and fill it with the reference."""
        if self._round_changes:
            return
        self._round_changes = [torch.zeros_like(block.flat) for block in self._reference]
        for replica in self._replicas:
            replica.blocks = [self._layout.new_block(block.group) for block in self._reference]
            replica.tensors = self._layout.tensors(replica.blocks)
        self._reset_replicas()

    def _reset_replicas(self) -> None:
        for replica in self._replicas:
            copy(replica.flat, [block.flat for block in self._reference])

    def _end_round(self) -> None:
        """Move the reference by the mean change of all replicas in this round."""
        torch._foreach_add_(
            [block.flat for block in self._reference],
            self._round_changes,
            alpha=1 / len(self._replicas),
        )
        torch._foreach_zero_(self._round_changes)
        self._in_round = 0


def _copy_options(optimizer: Optimizer, first: Optimizer) -> None:
    """Copy the options of the first optimizer, which schedulers of learning rates change."""
    if optimizer is not first:
        for group, first_group in zip(optimizer.param_groups, first.param_groups, strict=True):
            group.update({key: value for key, value in first_group.items() if key != "params"})


@register("averaged")
def averaged(site: Site) -> Averaged:
    """Return the replicas and the reference of a stage.

    Raises:
        SettingError: the schedule does not interleave several pipelines.
    """
    return Averaged(site)
