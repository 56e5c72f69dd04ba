"""The batch as the last stage can see it before its first loss.

It has the output of one micro-batch, and the targets of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from penstock.batches.batch import Batch
from penstock.batches.splitting import join, sample_count, token_count
from penstock.losses.call import LossCall
from penstock.losses.probe import (
    Draws,
    Pair,
    Reading,
    clone_tensors,
    readings,
    repeat_samples,
)
from penstock.losses.symbolic import (
    Evaluation,
    evaluate,
    outputs_like,
    smooths_without_weight,
    without_stage_hooks,
)
from penstock.losses.terms import UnknownForm, detached, is_float
from penstock.modules.randomness import drawing, generator_states, has_drawn, seed_generators
from penstock.values.structure import map_tensors


@dataclass(frozen=True)
class View:
    """Evaluations of a loss that change no state.

    Attributes:
        call: the loss.
        batch: the batch, which has targets.
        number: the micro-batch, or slice, whose output is available.
        value: that output.
        partner: another micro-batch, which the numeric test joins with it.
        repeated: whether the second part of the pair is both micro-batches, so that targets of the
            first occur in both parts. A loss may depend on how often a class occurs.
    """

    call: LossCall
    batch: Batch
    number: int
    value: Any
    partner: int
    repeated: bool = False

    @classmethod
    def all(cls, call: LossCall, batch: Batch, number: int, value: Any, turn: int) -> list[View]:
        """Return the views of a batch.

        There is one with another micro-batch and, if sequences are cut, one with a neighbouring
        slice of the same sequences.

        Args:
            call: the loss.
            batch: the batch.
            number: the micro-batch whose output is available.
            value: that output.
            turn: number of the batch, which selects another partner for each batch.
        """
        rows = batch.rows()
        row = next(row for row in rows if number in row)
        place = row.index(number)
        views = []
        if len(row) > 1:
            partner = row[place + 1] if place + 1 < len(row) else row[place - 1]
            views.append(cls(call, batch, number, value, partner))
        others = [numbers[place] for numbers in rows if numbers is not row and place < len(numbers)]
        if others:
            # Another one in every turn, so that in the end the micro-batch is compared with all.
            views.append(cls(call, batch, number, value, others[turn % len(others)]))
        return views

    @property
    def along_tokens(self) -> bool:
        """Whether the pair are slices of the same sequences."""
        return any(self.number in row and self.partner in row for row in self.batch.rows())

    @property
    def may_broadcast(self) -> bool:
        """Whether a loss of torch may compare samples with each other.

        Outputs (n, 1) and targets (n,) are broadcast to (n, n), which torch only warns about.
        """
        output, target = self.value, self.target(self.number)
        if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)):
            return False
        has_classes = not target.is_floating_point() and output.shape[1:] != (1,)
        return output.shape != target.shape and not has_classes

    @property
    def pair(self) -> tuple[int, int]:
        """Both numbers, ascending."""
        return min(self.number, self.partner), max(self.number, self.partner)

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of samples of both, or of tokens per sample if they are slices."""
        axis = int(self.along_tokens)
        first, second = (self.extents(number)[axis] for number in self.pair)
        return (first, first + second) if self.repeated else (first, second)

    def with_repeated_targets(self) -> View:
        """Return the view of the same micro-batches in which both parts have targets in common."""
        return replace(self, repeated=True)

    def extents(self, number: int | None) -> tuple[int, int]:
        """Return the samples and tokens of a micro-batch or slice; of the batch if None.

        Tokens are 0 if sequences are not cut.
        """
        value = self.batch.whole[0] if number is None else self.batch.inputs[number]
        samples = sample_count(value, "the inputs")
        return samples, token_count(value, "the inputs") if self.batch.cuts_tokens else 0

    def evaluation(self, number: int | None) -> Evaluation:
        """Evaluate the loss on meta outputs for a micro-batch or slice; for the batch if None.

        Targets in host memory are used if the loss accepts them: to read a count on an accelerator
        would make the host wait for it.

        Raises:
            UnknownForm, Unpredictable: see `evaluate`.
        """
        host_target = self.call.host_target(self.batch, number)
        if host_target is not None:
            try:
                return self._evaluation(self.extents(number), host_target)
            except UnknownForm:
                self.call.reads_host_targets = False
        return self._evaluation(self.extents(number), self._device_target(number))

    def target(self, number: int) -> Any:
        """Return the targets of a micro-batch or slice as `evaluation` uses them."""
        host_target = self.call.host_target(self.batch, number)
        return self._device_target(number) if host_target is None else host_target

    def _device_target(self, number: int | None) -> Any:
        """Return the targets of a micro-batch or slice, or of the batch if None, on the device."""
        if number is None:
            return self.call.whole_target(self.batch)
        return self.call.target(self.batch, number)

    def pair_evaluations(self) -> tuple[Evaluation, Evaluation, Evaluation]:
        """Evaluate the loss on meta outputs for both parts of the pair, and for both joined.

        Raises:
            UnknownForm, Unpredictable: as `evaluation`; or the parts are slices of different
                lengths.
        """
        first, second = self.pair
        if not self.repeated:
            return (
                self.evaluation(first),
                self.evaluation(second),
                self._joined_evaluation(self.pair),
            )
        both = self._joined_evaluation(self.pair)
        return self.evaluation(first), both, self._joined_evaluation((first, first, second))

    def smooths_without_weight(self, number: int) -> bool:
        """Whether the loss of a micro-batch divides its label smoothing by a class weight of 0."""
        with suppress(UnknownForm):
            output = outputs_like(self.value, self.extents(self.number), self.extents(number))
            return smooths_without_weight(self.call.untouched(), output, self.target(number))
        return False

    def _joined_evaluation(self, numbers: Sequence[int]) -> Evaluation:
        """Evaluate the loss on meta outputs for several micro-batches in one."""
        extents = [self.extents(number) for number in numbers]
        samples, tokens = extents[0]
        target = self._joined_target(numbers)
        if self.along_tokens:
            return self._evaluation((samples, sum(length for _, length in extents)), target)
        if any(length != tokens for _, length in extents):
            raise UnknownForm("slices of different lengths")
        return self._evaluation((sum(count for count, _ in extents), tokens), target)

    def _joined_target(self, numbers: Sequence[int]) -> Any:
        """Return the targets of several micro-batches in one."""
        targets = [self.call.target(self.batch, number) for number in numbers]
        return join(targets, int(self.along_tokens))

    def _evaluation(self, extents: tuple[int, int], target: Any) -> Evaluation:
        """Evaluate the loss on meta outputs of some samples and tokens."""
        output = outputs_like(self.value, self.extents(self.number), extents)
        # The caller's random numbers must not depend on when a loss is evaluated for its form.
        with drawing(self.call.device):
            return evaluate(self.call.untouched(), output, target)

    def readings(self, *, brief: bool = False) -> list[Reading]:
        """Evaluate the loss on both parts of the pair and on both joined, in numbers.

        Args:
            brief: see `probe.readings`.

        Raises:
            Draws: the loss draws random numbers, which differ at every call.
            Exception: any exception of the loss on outputs that it was not written for.
        """
        axis = int(self.along_tokens)
        first, second = (self.call.target(self.batch, number) for number in self.pair)
        if self.repeated:
            second = self._joined_target(self.pair)
        count = self.extents(self.number)[axis]
        pair = Pair((first, second), self.sizes, self._output(), axis, count)
        loss = self.call.untouched()
        device = self.call.device
        with without_stage_hooks(), drawing(device):
            seed_generators(device, 0)
            before = generator_states(device)
            results = readings(loss, pair, brief=brief)
            # The readings of a loss that draws differ by chance, and say nothing about how it adds
            # up.
            if has_drawn(device, before):
                raise Draws
            return results

    def in_numbers(self, number: int) -> Any:
        """Return the loss for a micro-batch's targets, on the available output.

        The output is repeated or cut to as many samples and tokens.

        Raises:
            Exception: any exception of the loss on it.
        """
        (samples, tokens), (others, lengths) = self.extents(self.number), self.extents(number)
        output = repeat_samples(self._output(), 0, samples, others)
        if tokens != lengths:
            output = repeat_samples(output, 1, tokens, lengths)
        target = clone_tensors(self.call.target(self.batch, number))
        with torch.no_grad(), drawing(self.call.device):
            seed_generators(self.call.device, 0)
            return self.call.untouched()(clone_tensors(output), target)

    def has_graph(self) -> bool:
        """Whether the loss of the whole batch has a gradient with respect to the output.

        The available output is repeated for all samples. A loss that raises on it is not judged.
        """
        (samples, tokens), (all_samples, length) = self.extents(self.number), self.extents(None)
        with suppress(Exception), drawing(self.call.device), torch.enable_grad():
            output = repeat_samples(self._output(), 0, samples, all_samples)
            if tokens != length:
                output = repeat_samples(output, 1, tokens, length)
            leaves = map_tensors(lambda leaf: leaf.requires_grad_(is_float(leaf)), output)
            seed_generators(self.call.device, 0)
            target = clone_tensors(self.call.whole_target(self.batch))
            loss = self.call.untouched()(clone_tensors(leaves), target)
            return bool((loss[0] if type(loss) is tuple else loss).requires_grad)
        return True

    def _output(self) -> Any:
        """Return the available output without its graph."""
        return map_tensors(detached, self.value)
