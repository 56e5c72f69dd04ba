"""What it costs to run some layers again before their backward, and what they keep then.

What a stage keeps of one micro-batch, by layer:

    kept, after a kept one              its activation bytes
    kept, the stage's first or after    its activation bytes, and its input, where that does not
                                        count there (`entry_bytes_per_sample`)
    one that runs again
    the first of a segment              its input; the others of a segment nothing

A segment's input is counted though the kept layer before may have saved it as its output: a profile
does not tell whether that is what its bytes are. So what is predicted is never too little.
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


@final
@dataclass(frozen=True)
class LayerBytes:
    """Bytes of every layer of a model for one sample.

    Attributes:
        kept: what it saves, each tensor counted at the first layer that saves it.
        entry: what it saves besides, or is given and saved nowhere, where it is the first that
        keeps anything. given: its input.
    """

    kept: tuple[float, ...]
    entry: tuple[float, ...]
    given: tuple[float, ...]

    @classmethod
    def of(cls, profile: Profile) -> LayerBytes:
        """Those of a profile."""
        outputs = [layer.output_bytes_per_sample for layer in profile.layers]
        return cls(
            tuple(layer.activation_bytes_per_sample for layer in profile.layers),
            tuple(layer.entry_bytes_per_sample for layer in profile.layers),
            (profile.input_bytes_per_sample, *outputs[:-1]),
        )

    def whole(self, first: int, end: int) -> float:
        """What a stage or a segment of these layers keeps if nothing runs again."""
        return self.entry[first] + sum(self.kept[first:end])

    def comes_back(self, first: int, end: int) -> float:
        """What is there again of a segment, besides its input, while its backward runs."""
        return max(self.whole(first, end) - self.given[first], 0.0)

    def held(self, first: int, end: int, selection: Selection) -> tuple[float, float]:
        """What a stage keeps of a sample from its forward to its backward, and the most that comes
        back of it at once.
        """
        found = selection.of_stage(first, end)
        again = {layer for a, b in found for layer in range(a, b)}
        total = sum(self.given[a] for a, _ in found)
        for layer in range(first, end):
            if layer not in again:
                alone = layer == first or layer - 1 in again
                total += self.kept[layer] + (self.entry[layer] if alone else 0.0)
        return total, max((self.comes_back(a, b) for a, b in found), default=0.0)


def with_selection(
    costs: Costs,
    schedule: Schedule,
    profiles: Sequence[Profile],
    lengths: Sequence[int],
    micro_batch: float,
    selection: Selection,
) -> Costs:
    """`costs` with what selective recompute takes and keeps.

    Args:
        costs: of the schedule's stages, of these layers.
        schedule: says which rank has which micro-batch of a stage, and how they are cut.
        profiles: per rank; ranks alike share one object.
        lengths: layers in every stage.
        micro_batch: samples in the mean micro-batch.
        selection: which layers run again.
    """
    sizes, parts = LayerBytes.of(profiles[0]), parts_of(lengths)
    largest = largest_part(micro_batch, schedule.micro_batches)
    held = [sizes.held(part.start, part.stop, selection) for part in parts]
    return replace(
        costs,
        again=_seconds(schedule, profiles, parts, micro_batch, selection),
        kept_bytes=[largest * kept for kept, _ in held],
        again_bytes=[largest * back for _, back in held],
    )


def _seconds(
    schedule: Schedule,
    profiles: Sequence[Profile],
    parts: Sequence[slice],
    micro_batch: float,
    selection: Selection,
) -> list[float | list[float]]:
    """Per stage, what its layers take that run again; by micro-batch where devices or slices
    differ.
    """
    own = [
        [layer for layer in selection.recomputed if part.start <= layer < part.stop]
        for part in parts
    ]
    unlike = {id(each): each for each in profiles}
    slicing = schedule.slicing
    counts = {1} if slicing is None else {len(row) for row in slicing.shares}
    rows = {
        (key, count): each.seconds("forward", micro_batch / count)
        for key, each in unlike.items()
        for count in counts
    }

    def on(rank: int, stage: int, count: int) -> float:
        row = rows[id(profiles[rank]), count]
        return count * sum(row[layer] for layer in own[stage])

    found: list[float | list[float]] = []
    for stage, ranks in enumerate(schedule.ranks_of_stage):
        if slicing is not None:
            cut = zip(slicing.shares, slicing.first_of, strict=True)
            found.append(
                [on(schedule.placement[stage, first], stage, len(row)) for row, first in cut]
            )
        elif len({id(profiles[rank]) for rank in ranks}) == 1:
            found.append(on(ranks[0], stage, 1))
        else:
            found.append(
                [
                    on(schedule.placement[stage, number], stage, 1)
                    for number in range(schedule.slices)
                ]
            )
    return found
