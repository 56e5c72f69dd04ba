"""What all ranks do together when a program has been played: tied weights, the norm of all
gradients, loss scaling.

A U is played by one stage, when its own gradients are there, and fills a bubble. What needs the
gradients of all stages cannot be done there: where it is asked for, a U only lets copies of its
stage meet, and all ranks step here, after the program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from penstock.optim.clipping import clip, norms_of, total_norm
from penstock.optim.scaling import LossScaler
from penstock.runtime.assembly import Assembly
from penstock.runtime.interpreter import Interpreter
from penstock.runtime.tied import Number
from penstock.transport.payload import Payload


@dataclass
class Together:
    """The steps of all ranks that live in this process.

    Attributes:
        made: the ranks.
        scaler: the loss scaler, if there is one.
        clip_grad_norm: how long the gradients of all stages may be together.
        norm_type: of that norm: 2.0, infinity, or any other that torch.nn.utils.clip_grad_norm_
        takes. trained: names of tied parameters that were frozen when the pipeline was made and
        have been thawed since. epoch: how often parameters have been frozen or thawed: messages of
        gradients then have other lengths. grad_norm: how long they were at the last step that was
        made here, before clipping.
    """

    made: Assembly
    scaler: LossScaler | None = None
    clip_grad_norm: float | None = None
    grad_norm: float | None = None
    norm_type: float = 2.0
    trained: set[str] = field(default_factory=set)
    epoch: int = 0
    _homes: Mapping[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        holders = self.made.setting.schedule.ranks_of_stage
        self._homes = {
            rank: [stage for stage, ranks in enumerate(holders) if ranks[0] == rank]
            for rank in range(self.made.world.size)
        }

    @property
    def needed(self) -> bool:
        """Whether a step needs all stages, so that a U cannot make it alone."""
        return self.talks or any(
            shared.trainable or shared.name in self.trained for shared in self.made.shared
        )

    @property
    def talks(self) -> bool:
        """Whether the ranks have to tell each other something about their gradients."""
        return self.scaler is not None or self.clip_grad_norm is not None

    def state(self) -> dict[str, float] | None:
        """What a checkpoint keeps of the scaler."""
        return None if self.scaler is None else self.scaler.state_dict()

    def restore(self, state: Mapping[str, float] | None) -> None:
        """Take that back, if there was a scaler then and there is one now."""
        if self.scaler is not None and state is not None:
            self.scaler.load_state_dict(state)

    def begin(self, factor: float) -> None:
        """Before a batch: gradients that were used are dropped, and those to come are multiplied by
        `factor` and the scale.
        """
        scale = factor * (1.0 if self.scaler is None else self.scaler.scale)
        for stage in self.made.stages:
            stage.update.begin()
            stage.loss_scale = scale

    def gather(self, rank: int) -> None:
        """After a program, on every rank: gradients of tied weights go to their homes."""
        if rank in self.made.tied:
            self.made.tied[rank].gather()
            self.made.interpreters[rank].finish()

    def hand_out(self, rank: int) -> None:
        """Tied weights go from their homes to the other holders."""
        if rank in self.made.tied:
            self.made.tied[rank].hand_out()
            self.made.interpreters[rank].finish()

    def step(self, rank: int) -> tuple[float, float]:
        """On every rank: step, unless a gradient anywhere is not finite and there is a scaler, and
        hand out tied weights.

        Returns:
            The norm of all gradients, 0 if nobody asks for it, and a number above 0 if the step was
            skipped.
        """
        norm, found = self._look(rank) if self.talks else (None, 0.0)
        interpreter = self.made.interpreters[rank]
        for stage in interpreter.stages.values():
            if found:
                stage.update.skip()
                continue
            if self.clip_grad_norm is not None and norm is not None:
                clip(stage.update.parameters, self.clip_grad_norm, norm.to(stage.device))
            stage.update.step()
        if not found:
            self.hand_out(rank)
        return 0.0 if norm is None else float(norm), found

    def stepped(self, told: Mapping[int, tuple[float, float]]) -> None:
        """Take note of what the ranks of this process have found in `step`: they have all found the
        same.
        """
        norm, found = next(iter(told.values()))
        if self.talks:
            self.grad_norm = norm
        if self.scaler is not None:
            self.scaler.update(found)

    def _look(self, rank: int) -> tuple[Tensor, float]:
        """Unscale, and learn from all ranks the norm of all gradients and whether any is not
        finite.
        """
        interpreter = self.made.interpreters[rank]
        device = self.made.world.device(rank)
        found = torch.zeros(1, device=device)
        if self.scaler is not None:
            for stage in interpreter.stages.values():
                found += self.scaler.unscale(stage.update.parameters, stage.device)
        # Copies of a stage have the same gradients, and count once: at home.
        rows = [
            norms_of(interpreter.stages[stage].update.parameters, device, self.norm_type)
            for stage in self._homes[rank]
        ]
        total, found = self._decided(interpreter, rows, found)
        return total, float(found)

    def _decided(
        self, interpreter: Interpreter, rows: list[Tensor], found: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rank 0 hears all norms, adds up in the order of the stages, and tells all the same
        number.
        """
        transport, told, verdict = interpreter.transport, Number.NORMS, Number.VERDICT
        signature = f"{told.name} {self.epoch}"
        if interpreter.rank:
            arrival = transport.post(0, verdict.message, verdict.name)
            own = Payload.row([found, *self._packed(interpreter, rows)])
            interpreter.guard(0, lambda: transport.send(0, told.message, own, signature))
            total, found = interpreter.guard(0, arrival.wait).tensors
        else:
            others = range(1, self.made.world.size)
            arrivals = {rank: transport.post(rank, told.message, signature) for rank in others}
            by_stage = dict(zip(self._homes[0], rows, strict=True))
            for rank, arrival in arrivals.items():
                theirs, lengths, packed = interpreter.guard(rank, arrival.wait).tensors
                found = found + theirs
                parts = torch.split(packed, lengths.tolist())
                by_stage.update(
                    zip(self._homes[rank], (part[~(part < 0)] for part in parts[1:]), strict=True)
                )
            norms = [by_stage[stage] for stage in sorted(by_stage)]
            total = total_norm(norms, self.norm_type).to(found.device)
            answer = Payload.row([total, found])
            for rank in others:
                interpreter.guard(
                    rank, partial(transport.send, rank, verdict.message, answer, verdict.name)
                )
        interpreter.finish()
        return total, found

    def _packed(self, interpreter: Interpreter, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Lengths and contents of some rows, after one of a single number, since a rank may have
        none. What parameters without a gradient lack is filled up with -1, so that every batch's
        message has one form.
        """
        lengths = [
            len(interpreter.stages[stage].update.parameters)
            for stage in self._homes[interpreter.rank]
        ]
        full = [
            pad(row, (0, length - len(row)), value=-1.0)
            for row, length in zip(rows, lengths, strict=True)
        ]
        device = self.made.world.device(interpreter.rank)
        return torch.tensor([1, *lengths], device=device), torch.cat(
            [torch.zeros(1, device=device), *full]
        )
