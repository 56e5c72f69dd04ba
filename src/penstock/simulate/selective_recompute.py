"""Seconds and bytes of selective recompute: some layers run again before their backward.

Bytes that a stage saves for one micro-batch, by layer:

    not recomputed, after another such  its activation bytes
    not recomputed, the stage's first   its activation bytes, and its input where these exclude it
    or after a recomputed layer         (`entry_bytes_per_sample`)
    first of a recomputed segment       its input
    other layers of a segment           nothing

A segment's input is counted even though the layer before may have saved it as its output: a profile
does not tell what its bytes consist of. So the prediction is never too small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from penstock.plan.segments import Selection
from penstock.profile.profile import Profile
from penstock.schedule.op import Schedule
from penstock.simulate.costs import Costs
from penstock.simulate.stage_seconds import largest_part, parts_of
from penstock.simulate.uneven_costs import costs_by_size


@final
@dataclass(frozen=True)
class LayerBytes:
    """Bytes of every layer of a model for one sample.

    Attributes:
        saved: what it saves, each tensor counted at the first layer that saves it.
        entry: additional bytes if a stage or segment begins with it: its input, if that is counted
            at an earlier layer or at none.
        inputs: its input.
    """

    saved: tuple[float, ...]
    entry: tuple[float, ...]
    inputs: tuple[float, ...]

    @classmethod
    def of(cls, profile: Profile) -> LayerBytes:
        """Return those of a profile."""
        outputs = [layer.output_bytes_per_sample for layer in profile.layers]
        return cls(
            tuple(layer.activation_bytes_per_sample for layer in profile.layers),
            tuple(layer.entry_bytes_per_sample for layer in profile.layers),
            (profile.input_bytes_per_sample, *outputs[:-1]),
        )

    def whole(self, first: int, end: int) -> float:
        """Return the bytes that a stage or segment of these layers saves without recompute."""
        return self.entry[first] + sum(self.saved[first:end])

    def recomputed_bytes(self, first: int, end: int) -> float:
        """Return the bytes that a segment's recompute adds to its input during its backward."""
        return max(self.whole(first, end) - self.inputs[first], 0.0)

    def stage_bytes(self, first: int, end: int, selection: Selection) -> tuple[float, float]:
        """Return the bytes of a stage for one sample under selective recompute.

        Returns:
            What it saves from its forward to its backward, and the peak that is recomputed on top.
        """
        segments = selection.of_stage(first, end)
        recomputed: set[int] = set()
        for start, stop in segments:
            recomputed.update(range(start, stop))
        saved = sum(self.inputs[start] for start, _ in segments)
        for layer in range(first, end):
            if layer not in recomputed:
                # Elsewhere the input of a layer is the output of the saved layer before it, and
                # counted there.
                is_entry = layer == first or layer - 1 in recomputed
                saved += self.saved[layer] + (self.entry[layer] if is_entry else 0.0)
        peaks = [self.recomputed_bytes(start, stop) for start, stop in segments]
        return saved, max(peaks, default=0.0)


def with_selective_recompute(
    costs: Costs,
    schedule: Schedule,
    profiles: Sequence[Profile],
    lengths: Sequence[int],
    micro_batches: Sequence[float],
    selection: Selection,
) -> Costs:
    """Return `costs` with the seconds and bytes of selective recompute.

    Args:
        costs: of the schedule's stages, of these layers.
        schedule: defines the rank of every micro-batch of a stage, and how they are sliced.
        profiles: per rank; equal ranks share one object.
        lengths: layers in every stage.
        micro_batches: samples in every micro-batch, the largest first.
        selection: the layers that run again.
    """
    sizes, parts = LayerBytes.of(profiles[0]), parts_of(lengths)
    largest = largest_part(micro_batches[0], schedule.micro_batches)
    stage_bytes = [sizes.stage_bytes(part.start, part.stop, selection) for part in parts]

    def of_size(micro_batch: float) -> Costs:
        """Return the seconds if all micro-batches have this many samples."""
        return Costs(
            recompute=_recompute_seconds(schedule, profiles, parts, micro_batch, selection)
        )

    return replace(
        costs,
        recompute=costs_by_size(of_size, micro_batches).recompute,
        saved_bytes=[largest * saved for saved, _ in stage_bytes],
        recompute_peak_bytes=[largest * recomputed for _, recomputed in stage_bytes],
    )


def _recompute_seconds(
    schedule: Schedule,
    profiles: Sequence[Profile],
    parts: Sequence[slice],
    micro_batch: float,
    selection: Selection,
) -> list[float | list[float]]:
    """Return per stage the forward seconds of its recomputed layers.

    They are per micro-batch where devices or slices differ.
    """
    slicing = schedule.slicing

    def seconds(stage: int, number: int, count: int = 1) -> float:
        """Return the seconds of a stage for a micro-batch of `count` slices from `number` on."""
        profile = profiles[schedule.placement[stage, number]]
        row = profile.seconds("forward", micro_batch / count)  # cached by the profile
        layers = range(parts[stage].start, parts[stage].stop)
        return count * sum(row[layer] for layer in layers if layer in recomputed)

    recomputed = set(selection.recomputed)
    rows: list[float | list[float]] = []
    for stage, ranks in enumerate(schedule.ranks_of_stage):
        if slicing is not None:
            slices = zip(slicing.shares, slicing.first_of, strict=True)
            rows.append([seconds(stage, first, len(shares)) for shares, first in slices])
        elif len({id(profiles[rank]) for rank in ranks}) == 1:
            rows.append(seconds(stage, 0))
        else:
            rows.append([seconds(stage, number) for number in range(schedule.slices)])
    return rows
