"""Averaged: several copies of the weights take turns, and are drawn together by a reference that
moves by the mean of what they learn.

Batch t trains copy n = t mod N, with an optimizer of its own. With α = 1/N and θ̃ as it was when
the round of N batches began:

    θₙ ← θₙ + Δₙ             the optimizer's step
    θₙ ← (1 - α) θₙ + α θ̃    the pull
    θ̃ ← θ̃ + (1/N) Σₙ Δₙ      at the end of the round

What is evaluated and saved is the reference. A drain ends a round early, with the Δ that there are.

Source: Chen et al. 2023, AvgPipe, section 3. The order within a round is ours: the paper's
reference is updated through a queue.
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
class _Copy:
    """One of the copies; `grads` are those of its batch, while another's turn has come before they
    were used.
    """

    optimizer: Optimizer
    blocks: list[Block] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    grads: list[Tensor | None] | None = None

    @property
    def flat(self) -> list[Tensor]:
        return [block.flat for block in self.blocks]


@final
class Averaged(StageWeights):
    """N copies and their reference, which has the parameters' own memory and is what they are when
    nothing runs.
    """

    def __init__(self, site: Site) -> None:
        if site.pipelines < 2:
            raise SettingError(
                f"weight rule {site.rule.name!r} ties copies of the weights together, and this schedule has "
                f"{site.pipelines}: give it pipelines=2 or more"
            )
        self._stage, self._update, self._use = site.stage, site.update, site.use
        self._layout = Layout(site.update.parameters)
        self._reference = self._layout.present()
        self._reference_tensors = self._layout.tensors(self._reference)
        first = site.update.optimizer
        assert first is not None
        self._copies = [
            _Copy(first),
            *(_Copy(site.update.another()) for _ in range(site.pipelines - 1)),
        ]
        self._learnt: list[Tensor] = []
        self._in_round = 0
        self._shown: _Copy | None = None  # whose values the parameters have; None: the reference's
        self._gathers: _Copy | None = None  # whose gradients are in `.grad`
        self._due: _Copy | None = None  # to whom the next U belongs: that of the backward before it

    def before_forward(self, number: int) -> None:
        """The copy of its batch."""
        reads = self._use(number).reads
        if reads.forward != reads.backward:
            raise RunError(
                f"stage {self._stage}: the forward of micro-batch {number} reads version {reads.forward} of its copy of the "
                f"weights and its backward version {reads.backward}: elastic averaging takes them to be one, so each of its "
                "pipelines has to end a batch before it begins its next"
            )
        self._show(self._copy_of(number))

    def before_backward(self, number: int) -> None:
        """The copy of its batch; its gradients gather apart from those of the others."""
        chosen = self._copy_of(number)
        self._show(chosen)
        self._gather(chosen)

    def finished(self, number: int) -> None:
        """If it was its batch's last, the next U is that batch's."""
        self._due = self._copy_of(number)

    def update(self, version: int) -> None:
        """Step the copy whose batch has ended, pull it, and end the round if it was the round's
        last.
        """
        del version
        chosen = self._due
        assert chosen is not None
        self._show(chosen)
        self._gather(chosen)
        point(self._update.parameters, chosen.tensors)
        _follow(chosen.optimizer, self._copies[0].optimizer)
        # Subtracted before and added after, and not by way of a copy: one copy less to hold, and
        # differences of such near numbers
        # are exact in either way. Whatever happens to the step, what the round has learnt stays
        # small.
        torch._foreach_sub_(self._learnt, chosen.flat)
        try:
            self._update.advance(chosen.optimizer)
        finally:
            take(self._update.parameters, chosen.tensors)
            torch._foreach_add_(self._learnt, chosen.flat)
        self._gathers = self._due = None
        torch._foreach_lerp_(
            chosen.flat, [block.flat for block in self._reference], 1 / len(self._copies)
        )
        self._in_round += 1
        if self._in_round == len(self._copies):
            self._end_round()

    def drain(self) -> None:
        """End the round. The parameters are the reference."""
        for each in self._copies:
            each.grads = None
        self._gathers = self._due = None
        if self._in_round:
            self._end_round()
        self._shown = None
        point(self._update.parameters, self._reference_tensors)

    @property
    def versions(self) -> int:
        """The copies; before they part, one."""
        return len(self._copies) if self._learnt else 1

    def held_bytes(self) -> int:
        """Copies, reference, and what the round has learnt."""
        blocks = [
            block.flat
            for held in (self._reference, *(each.blocks for each in self._copies))
            for block in held
        ]
        return sum(tensor.nbytes for tensor in (*blocks, *self._learnt))

    def more_optimizers(self) -> Sequence[Optimizer]:
        """One for every other copy."""
        return [each.optimizer for each in self._copies[1:]]

    def state(self) -> State:
        """The copies, and the optimizers of all but the first."""
        if not self._learnt:
            return {}
        found: dict[str, list[Tensor | None]] = {
            f"copy{n}": list(each.tensors) for n, each in enumerate(self._copies)
        }
        for n, each in enumerate(self._copies[1:], 1):
            state = optimizer_state(each.optimizer, self._update.parameters)
            found |= {f"optimizer{n}.{key}": row for key, row in state.items()}
        return found

    def load_state(self, state: State) -> None:
        """Take copies and optimizers back; without them all copies begin at the reference, the
        others with new optimizers.
        """
        if "copy0" in state:
            self._part()
        elif self._learnt:
            self._bring_together()
        for n, each in enumerate(self._copies):
            pairs = [
                (at, value)
                for at, value in zip(each.tensors, state.get(f"copy{n}", ()), strict=False)
                if value is not None
            ]
            copy([at for at, _ in pairs], [value.to(at.device) for at, value in pairs])
            if n:
                prefix = f"optimizer{n}."
                own = {
                    key.removeprefix(prefix): row
                    for key, row in state.items()
                    if key.startswith(prefix)
                }
                load_optimizer_state(each.optimizer, self._update.parameters, own)

    def _copy_of(self, number: int) -> _Copy:
        return self._copies[self._use(number).batch % len(self._copies)]

    def _show(self, chosen: _Copy) -> None:
        if self._shown is not chosen:
            self._part()
            for parameter, tensor in zip(self._update.parameters, chosen.tensors, strict=True):
                parameter.data = tensor
            self._shown = chosen

    def _gather(self, chosen: _Copy) -> None:
        """Let `.grad` be this copy's."""
        if self._gathers is chosen:
            return
        parameters = self._update.parameters
        if self._gathers is not None:
            self._gathers.grads = [parameter.grad for parameter in parameters]
        if self._gathers is not None or chosen.grads is not None:
            for parameter, grad in zip(
                parameters, chosen.grads or [None] * len(parameters), strict=True
            ):
                parameter.grad = grad
        chosen.grads = None
        self._gathers = chosen

    def _part(self) -> None:
        """Give the copies memory of their own, once."""
        if self._learnt:
            return
        self._learnt = [torch.zeros_like(block.flat) for block in self._reference]
        for each in self._copies:
            each.blocks = [self._layout.room(block.group) for block in self._reference]
            each.tensors = self._layout.tensors(each.blocks)
        self._bring_together()

    def _bring_together(self) -> None:
        for each in self._copies:
            copy(each.flat, [block.flat for block in self._reference])

    def _end_round(self) -> None:
        torch._foreach_add_(
            [block.flat for block in self._reference], self._learnt, alpha=1 / len(self._copies)
        )
        torch._foreach_zero_(self._learnt)
        self._in_round = 0


def _follow(optimizer: Optimizer, first: Optimizer) -> None:
    """Let its options be those of the first, which schedulers of learning rates know."""
    if optimizer is not first:
        for group, of_first in zip(optimizer.param_groups, first.param_groups, strict=True):
            group.update({key: value for key, value in of_first.items() if key != "params"})


@register("averaged")
def averaged(site: Site) -> Averaged:
    """A storage for every copy, and the reference.

    Raises:
        SettingError: the schedule has no pipelines that take turns.
    """
    return Averaged(site)
