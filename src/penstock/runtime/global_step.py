"""Global step after a program: tied weights, clipping of the global gradient norm, loss scaling.

A U is run by one stage as soon as its own gradients are complete, and fills a bubble. What needs
the gradients of all stages cannot be done there. If it is enabled, a U only sums the gradients of
its stage's replicas, and all ranks step here, after the program.
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
from penstock.option import OnNonfinite
from penstock.runtime.assembly import Assembly
from penstock.runtime.device_norms import device_norms
from penstock.runtime.interpreter import Interpreter
from penstock.stage.training_options import TrainingOptions
from penstock.transport.payload import Payload
from penstock.transport.update_messages import UpdateMessage


@dataclass
class GlobalStep:
    """The global step of the ranks of this process.

    Attributes:
        assembly: the ranks.
        scaler: the loss scaler; None without loss scaling.
        options: options of training; those of clipping are used here.
        trained: names of tied parameters that were frozen when the pipeline was constructed and
            have been thawed since.
        epoch: how often parameters have been frozen or thawed; messages of gradients have other
            lengths afterwards.
    """

    assembly: Assembly
    scaler: LossScaler | None = None
    options: TrainingOptions = field(default_factory=TrainingOptions)
    trained: set[str] = field(default_factory=set)
    epoch: int = 0
    _homes: Mapping[int, list[int]] = field(default_factory=dict)
    _norm: Tensor | None = None
    _skipped: int = 0
    # By rank and epoch, the lengths of the rows of `_pack_norms`, which stay as they are in an epoch:
    # to read them from a device in every step would make the host wait.
    _lengths: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    _length_tensors: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        holders = self.assembly.setting.schedule.ranks_of_stage
        homes: dict[int, list[int]] = {rank: [] for rank in range(self.assembly.world.size)}
        for stage, ranks in enumerate(holders):
            homes[ranks[0]].append(stage)
        self._homes = homes
        self._device_norms = device_norms(self.assembly, homes, self.options.clip_norm_type)

    @property
    def needed(self) -> bool:
        """Whether a step needs the gradients of all stages, so that a U cannot step alone."""
        return self.exchanges_norms or any(
            shared.trainable or shared.name in self.trained for shared in self.assembly.shared
        )

    @property
    def exchanges_norms(self) -> bool:
        """Whether the ranks exchange norms and the finiteness of their gradients."""
        return self.may_skip or self.options.clip_grad_norm is not None

    @property
    def may_skip(self) -> bool:
        """Whether a step is skipped on all ranks if a gradient of any is not finite."""
        return self.scaler is not None or self.policy == "skip"

    @property
    def policy(self) -> OnNonfinite:
        """What is done about a loss or gradient that is not finite."""
        checks = [interpreter.finite for interpreter in self.assembly.interpreters.values()]
        return next((check.policy for check in checks if check is not None), "warn")

    @property
    def grad_norm(self) -> float | None:
        """The global gradient norm at the last step here, before clipping. Reading it waits for the
        device; steps do not.
        """
        return None if self._norm is None else float(self._norm)

    @property
    def skipped(self) -> int:
        """The number of skipped steps; with a loss scaler, also of those before a checkpoint."""
        return self._skipped if self.scaler is None else self.scaler.skipped

    def state(self) -> dict[str, float] | None:
        """Return the state of the loss scaler for a checkpoint; None without a scaler."""
        return None if self.scaler is None else self.scaler.state_dict()

    def restore(self, state: Mapping[str, float] | None) -> None:
        """Restore the state of the loss scaler, if there are both a scaler and a saved state."""
        if self.scaler is not None and state is not None:
            self.scaler.load_state_dict(state)

    def begin(self, factor: float) -> None:
        """Before a batch, drop used gradients and set the scale of the losses.

        Args:
            factor: multiplied by the loss scale.
        """
        scale = factor * (1.0 if self.scaler is None else self.scaler.scale)
        for stage in self.assembly.stages:
            stage.update.begin()
            stage.loss_scale = scale

    def gather(self, rank: int) -> None:
        """After a program, send the gradients of tied weights to their homes. On every rank."""
        if rank in self.assembly.tied:
            self.assembly.tied[rank].gather()
            self.assembly.interpreters[rank].finish()

    def send_tied_weights(self, rank: int) -> None:
        """Send tied weights from their homes to the other ranks that hold them."""
        if rank in self.assembly.tied:
            self.assembly.tied[rank].send_weights()
            self.assembly.interpreters[rank].finish()

    def step(self, rank: int) -> tuple[Tensor | None, float]:
        """Step all stages of a rank and send tied weights. On every rank.

        With a loss scaler or on_nonfinite="skip" the step is skipped if any rank has a gradient
        that is not finite.

        Returns:
            The global gradient norm, None if it is not computed; and a number above 0 if the step
            was skipped.
        """
        norm, nonfinite = self._unscale(rank) if self.exchanges_norms else (None, 0.0)
        interpreter = self.assembly.interpreters[rank]
        for stage in interpreter.stages.values():
            if nonfinite:
                stage.update.skip()
                continue
            if self.options.clip_grad_norm is not None and norm is not None:
                clip(stage.update.parameters, self.options.clip_grad_norm, norm.to(stage.device))
            stage.update.step()
        if interpreter.finite is not None:
            interpreter.finite.reset()
        if nonfinite:
            return norm, nonfinite
        if self.assembly.zero:
            # All are sent before any is waited for: ranks may hold several stages, in different
            # orders.
            for replicas in interpreter.replicas.values():
                replicas.send_updates()
            for replicas in interpreter.replicas.values():
                replicas.receive_updates()
            interpreter.finish()
        self.send_tied_weights(rank)
        return norm, nonfinite

    def record_step(self, results: Mapping[int, tuple[Tensor | None, float]]) -> None:
        """Store the norm of a step and update the loss scale.

        Args:
            results: by rank of this process, the result of `step`, which is the same on all.
        """
        norm, nonfinite = next(iter(results.values()))
        if self.exchanges_norms:
            self._norm = norm
        if self.scaler is not None:
            self.scaler.update(nonfinite)
        elif nonfinite:
            self._skipped += 1

    def _unscale(self, rank: int) -> tuple[Tensor, float]:
        """Unscale the gradients of a rank, and exchange norms with all ranks.

        Returns:
            The global gradient norm, and a number above 0 if any rank has a gradient that is not
            finite.
        """
        interpreter = self.assembly.interpreters[rank]
        device = self.assembly.world.device(rank)
        nonfinite = torch.zeros(1, device=device)
        if interpreter.finite is not None and interpreter.finite.has_nonfinite:
            nonfinite += 1.0
        if self.scaler is not None:
            for stage in interpreter.stages.values():
                nonfinite += self.scaler.unscale(stage.update.parameters, stage.device)
        # Any stage's will do: the same processes share all stages of a rank.
        parallel = next(iter(interpreter.parallel.values()), None)
        if parallel is not None:
            parallel.sum_over_tensor_ranks(nonfinite)

        def norms(index: int) -> Tensor:
            parameters = interpreter.stages[index].update.parameters
            return norms_of(parameters, device, self.options.clip_norm_type)

        for index in interpreter.parallel:
            if index not in self._homes[rank]:
                norms(index)  # which the processes that share a stage compute together
        # Replicas of a stage have the same gradients, and count once: on the stage's home rank.
        rows = [norms(index) for index in self._homes[rank]]
        total, nonfinite = self._global_norm(interpreter, rows, nonfinite)
        if parallel is not None:
            total = parallel.share_over_tensor_ranks(total.contiguous())
        # If nothing is ever skipped, to read the number would make the host wait for nothing.
        return total, float(nonfinite) if self.may_skip else 0.0

    def _global_norm(
        self, interpreter: Interpreter, rows: list[Tensor], nonfinite: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the global norm on rank 0 and send it to all, so that all have the same bits.

        Over NCCL this takes place on the devices (see `device_norms`); else in messages.

        Args:
            interpreter: that of a rank.
            rows: for each stage whose home is this rank, the norms of its gradients.
            nonfinite: above 0 if this rank has a gradient that is not finite.

        Returns:
            The global norm, and the sum of `nonfinite` over all ranks.
        """
        if self._device_norms is not None:
            return self._device_norms.total(interpreter, rows, nonfinite, self.epoch)
        if interpreter.rank:
            total, nonfinite = self._ask_rank_0(interpreter, rows, nonfinite)
        else:
            total, nonfinite = self._answer_ranks(interpreter, rows, nonfinite)
        interpreter.finish()
        return total, nonfinite

    def _ask_rank_0(
        self, interpreter: Interpreter, rows: list[Tensor], nonfinite: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Send a rank's norms to rank 0 and receive the result of `_global_norm`."""
        transport, verdict = interpreter.transport, UpdateMessage.VERDICT
        arrival = transport.post(0, verdict.of_run, verdict.name)
        payload = Payload.row([nonfinite, *self._pack_norms(interpreter, rows)])
        interpreter.guard(
            0,
            lambda: transport.send(0, UpdateMessage.NORMS.of_run, payload, self._norms_signature),
        )
        total, nonfinite = interpreter.guard(0, arrival.wait).tensors
        return total, nonfinite

    def _answer_ranks(
        self, interpreter: Interpreter, rows: list[Tensor], nonfinite: Tensor
    ) -> tuple[Tensor, Tensor]:
        """On rank 0, receive all norms, add them in the order of the stages and send the result."""
        transport, verdict = interpreter.transport, UpdateMessage.VERDICT
        others = range(1, self.assembly.world.size)
        arrivals = {
            rank: transport.post(rank, UpdateMessage.NORMS.of_run, self._norms_signature)
            for rank in others
        }
        # Added in the order of the stages, not of arrival: so the norm is the same in every run.
        by_stage = dict(zip(self._homes[0], rows, strict=True))
        for rank, arrival in arrivals.items():
            rank_nonfinite, lengths, packed = interpreter.guard(rank, arrival.wait).tensors
            nonfinite = nonfinite + rank_nonfinite
            row_lengths = self._lengths.get((rank, self.epoch))
            if row_lengths is None:
                row_lengths = self._lengths[rank, self.epoch] = lengths.tolist()
            parts = torch.split(packed, row_lengths)
            for stage, part in zip(self._homes[rank], parts[1:], strict=True):
                by_stage[stage] = _without_padding(part, self.options.clip_norm_type)
        norms = [by_stage[stage] for stage in sorted(by_stage)]
        total = total_norm(norms, self.options.clip_norm_type).to(nonfinite.device)
        answer = Payload.row([total, nonfinite])
        for rank in others:
            interpreter.guard(
                rank, partial(transport.send, rank, verdict.of_run, answer, verdict.name)
            )
        return total, nonfinite

    @property
    def _norms_signature(self) -> str:
        """A name for the form of the norms' message, which changes with every freeze and thaw."""
        return f"{UpdateMessage.NORMS.name} {self.epoch}"

    def _pack_norms(self, interpreter: Interpreter, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Pack the norms of a rank's stages into one tensor of a fixed form.

        Each row is padded with -1 to the number of the stage's parameters, since parameters without
        a gradient have no norm. A row of one number comes first, since a rank may have no stage.

        Returns:
            The lengths of the rows, and their concatenation.
        """
        lengths = [
            len(interpreter.stages[stage].update.parameters)
            for stage in self._homes[interpreter.rank]
        ]
        padded = [
            pad(row, (0, length - len(row)), value=-1.0)
            for row, length in zip(rows, lengths, strict=True)
        ]
        device = self.assembly.world.device(interpreter.rank)
        first_row = torch.zeros(1, device=device)
        key = (interpreter.rank, self.epoch)
        if key not in self._length_tensors:
            self._length_tensors[key] = torch.tensor([1, *lengths], device=device)
        return self._length_tensors[key], torch.cat([first_row, *padded])


def _without_padding(norms: Tensor, norm_type: float) -> Tensor:
    """Return norms without the padding of `GlobalStep._pack_norms`, which is below 0.

    On an accelerator padding becomes norms of 0, where these leave the norm of all as it is: the
    number of entries that are left would make the host wait for the device.
    """
    padding = norms < 0  # not `norms >= 0`, which would drop NaN
    if norms.device.type != "cpu" and norm_type > 0:
        return norms.masked_fill(padding, 0.0)
    return norms[~padding]
