"""Megatron-Core's `--pipeline-model-parallel-layout`: one letter for every layer, a bar after every
stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby

from penstock.export.catalogue import Exported, register
from penstock.export.pipelines import (
    Pipelines,
    pipelines_of,
    refuse,
    selective_layers,
    told,
    uneven_batch,
    why_not_pipelines,
)
from penstock.plan.plan import Plan

#: A layer of a list of blocks, `decoder.layers.3`, or a part of one, `decoder.layers.3.mlp`.
_NUMBERED = re.compile(r"(?P<list>.+?)\.(?P<number>\d+)(\..+)?")

#: Letters or stages that come at least so often in a row are written once, with a number.
_REPEATED = 3


@register("megatron", source="Megatron-Core 0.16.1, transformer/pipeline_parallel_layer_layout.py")
def megatron(plan: Plan) -> Exported:
    """A layout such as `Et*3|(t*4|)*6ttL`: E the embedding, t a decoder layer, L what comes after
    them (norm, output layer, loss).

    The decoder layers are the longest list of numbered layers, such as `blocks.0`, `blocks.1`, …;
    what comes before is E, what comes after is L. Stage k stands on pipeline rank k mod p. Megatron
    plays 1F1B, or its interleaved form where ranks have several stages.

    Raises:
        PlanError: there is no such list, a cut lies in a decoder layer, among the layers before or
        among those after; stages stand on
            other ranks; the plan has stages with copies of their own, or micro-batches of several
            sizes, is asynchronous, or runs other layers again than Megatron's flags can say.
    """
    found = pipelines_of(plan)
    reasons = [] if found is not None else [why_not_pipelines(plan)]
    if found is not None and not found.loop:
        reasons.append(
            f"{plan.schedule_name} has stages {', '.join(map(str, found.placement))} on its ranks: there stage k is on rank "
            f"k mod {len(found.placement)}"
        )
    if (uneven := uneven_batch(plan)) is not None:
        reasons.append(uneven)
    letters, wrong = _letters(plan)
    if plan.recomputed and not wrong and _recompute_flags(plan) is None:
        reasons.append(
            f"layers {selective_layers(plan)} run again: there it is all decoder layers in groups of one size (uniform), or the "
            "first n of every stage one by one (block), and nothing else"
        )
    refuse("megatron", [*reasons, *wrong])
    assert found is not None
    text = _written(letters)
    return Exported(
        text, _use(plan, found, text, "".join(letters).count("t")), tuple(_notes(plan, found))
    )


def _letters(plan: Plan) -> tuple[list[str], list[str]]:
    """One letter for every layer, all of a stage in one word; or what has no letter."""
    blocks = _blocks(plan)
    if not blocks:
        return [], [
            "none of its layers is one of a numbered list, such as blocks.0: which are decoder layers is not known"
        ]
    first, last = blocks[0], blocks[-1]
    wrong = []
    if first == 0 or last == plan.layers - 1:
        where = "before" if first == 0 else "after"
        wrong.append(
            f"no layer stands {where} {plan.layer_names[first]} to {plan.layer_names[last]}: a layout has an embedding and an "
            "output layer"
        )
    words = []
    for stage, (start, end) in enumerate(plan.bounds):
        own = [i for i in range(start, end) if first <= i <= last]
        cut = end - 1
        if (
            own
            and cut < last
            and own[-1] == cut
            and _number(plan.layer_names[cut]) == _number(plan.layer_names[cut + 1])
        ):
            wrong.append(
                f"stage {stage} ends within a decoder layer, after {plan.layer_names[cut]}: t is a whole one"
            )
        if end <= first or start > last + 1:
            side, letter = ("before", "E") if end <= first else ("after", "L")
            if end < first or start > last + 1:
                wrong.append(
                    f"stage {stage} parts the layers {side} the decoder layers: {letter} is one letter"
                )
        decoders = len({_number(plan.layer_names[i]) for i in own})
        words.append("E" * (stage == 0) + "t" * decoders + "L" * (stage == plan.stages - 1))
    return words, wrong


def _blocks(plan: Plan) -> list[int]:
    """The layers that are decoder layers, or parts of them."""
    lists = [
        None if (match := _NUMBERED.fullmatch(name)) is None else match["list"]
        for name in plan.layer_names
    ]
    runs = [
        list(run)
        for name, run in groupby(range(plan.layers), lambda layer: lists[layer])
        if name is not None
    ]
    return max(runs, key=lambda run: len({_number(plan.layer_names[i]) for i in run}), default=[])


def _recompute_flags(plan: Plan) -> str | None:
    """Megatron's flags for the layers that run again; None where it has none that do the same."""
    first, last = _blocks(plan)[0], _blocks(plan)[-1]
    numbers = [_number(plan.layer_names[layer]) for layer in range(first, last + 1)]
    if len(set(numbers)) < len(numbers):  # a layer there is several here
        return None
    decoders = [(max(a, first), min(b, last + 1)) for a, b in plan.bounds]
    found = [plan.selection.of_stage(*each) for each in plan.bounds]
    size = max(b - a for of_stage in found for a, b in of_stage)
    together = [[(at, min(at + size, b)) for at in range(a, b, size)] for a, b in decoders]
    if found == together:
        return (
            f"--recompute-granularity full --recompute-method uniform --recompute-num-layers {size}"
        )
    count = max(map(len, found))
    one_by_one = [[(at, at + 1) for at in range(a, min(a + count, b))] for a, b in decoders]
    if found == one_by_one:
        return (
            f"--recompute-granularity full --recompute-method block --recompute-num-layers {count}"
        )
    return None


def _number(name: str) -> int:
    match = _NUMBERED.fullmatch(name)
    assert match is not None
    return int(match["number"])


def _written(words: list[str]) -> str:
    """The stages with bars between them, repetitions shortened.

    >>> _written(["Ett", "tttt", "tttt", "tttt", "tL"]), _written(["E", "t", "t", "L"])
    ('Ett|(t*4|)*3tL', 'E|t|t|L')
    """
    short = [
        _with_numbers((letter, len(list(run))) for letter, run in groupby(word)) for word in words
    ]
    parts = []
    for word, run in groupby(short[:-1]):
        count = len(list(run))
        parts.append(f"({word}|)*{count}" if count >= _REPEATED else f"{word}|" * count)
    return "".join(parts) + short[-1]


def _with_numbers(runs: Iterable[tuple[str, int]]) -> str:
    return "".join(
        f"{letter}*{count}" if count >= _REPEATED else letter * count for letter, count in runs
    )


def _use(plan: Plan, found: Pipelines, text: str, decoders: int) -> str:
    return (
        f"--pipeline-model-parallel-size {len(found.placement)} --pipeline-model-parallel-layout '{text}' --num-layers {decoders} "
        f"--micro-batch-size {plan.batch // plan.micro_batches} --global-batch-size {plan.batch}"
    )


def _notes(plan: Plan, found: Pipelines) -> list[str]:
    several = found.schedule.stages > len(found.placement)
    notes = told(
        plan, "interleaved" if several else "1f1b", "interleaved 1F1B" if several else "1F1B"
    )
    if found.count > 1:
        notes.append(
            f"{found.count} pipelines: start {plan.ranks} ranks; Megatron numbers them stage by stage, the plan pipeline by "
            "pipeline"
        )
    if plan.recomputed:
        notes.append(f"recomputation (selective): {_recompute_flags(plan)}")
    elif plan.recompute in ("except_last", "always"):
        notes.append(
            f"recomputation ({plan.recompute}): --recompute-granularity full --recompute-method uniform"
        )
    return notes
