"""Export to Megatron-Core: `--pipeline-model-parallel-layout`, a letter per layer and a bar between
stages.
"""

from __future__ import annotations

import re
from itertools import groupby

from penstock.export.catalogue import Exported, register
from penstock.export.pipelines import (
    Pipelines,
    not_in_loop,
    require_pipelines,
    selective_layers,
    uneven_batch_reasons,
    unsupported_notes,
)
from penstock.plan.plan import Plan

#: Name of a layer in a list of blocks, `decoder.layers.3`, or of a part, `decoder.layers.3.mlp`.
_NUMBERED = re.compile(r"(?P<list>.+?)\.(?P<number>\d+)(\..+)?")

#: From this number of repetitions on, letters and stages are written once, with a factor.
_MIN_REPETITIONS = 3


@register(
    "megatron",
    source="Megatron-Core 0.16.1, transformer/pipeline_parallel_layer_layout.py",
    shards_stages=True,
)
def megatron(plan: Plan) -> Exported:
    """Export as a layout such as `Et*3|(t*4|)*6ttL`: E is the embedding, t a decoder layer, L the
    output layers (norm, output layer, loss).

    The decoder layers are the longest list of numbered layers, such as `blocks.0`, `blocks.1`, …;
    the layers before it are E, those after it L. Stage k is on pipeline rank k mod p. Megatron runs
    1F1B, or interleaved 1F1B if ranks have several stages.

    Raises:
        PlanError: there is no list of decoder layers; a stage ends within a decoder layer, or among
            the layers before or after them; the stages are on other ranks; single stages have
            replicas; micro-batches have several sizes; the plan is asynchronous; or Megatron's
            flags cannot recompute the same layers.
    """
    reasons = uneven_batch_reasons(plan)
    layout_reasons = _layout_reasons(plan)
    if plan.recomputed and not layout_reasons and _recompute_flags(plan) is None:
        reasons.append(
            f"layers {selective_layers(plan)} are recomputed, but Megatron recomputes all decoder "
            "layers in groups of one size (uniform), or the first n of every stage one by one "
            "(block)"
        )
    pipelines = require_pipelines(
        "megatron",
        plan,
        [*reasons, *layout_reasons],
        _placement_reasons,
    )
    stage_letters = _stage_letters(plan)
    layout = _compress(stage_letters)
    decoders = "".join(stage_letters).count("t")
    use = (
        f"--pipeline-model-parallel-size {len(pipelines.placement)} "
        f"--pipeline-model-parallel-layout '{layout}' --num-layers {decoders} "
        f"--micro-batch-size {plan.batch // plan.micro_batches} --global-batch-size {plan.batch}"
    )
    use += _sharding_flags(plan)
    return Exported(layout, use, tuple(_notes(plan, pipelines)))


def _placement_reasons(plan: Plan, pipelines: Pipelines) -> list[str]:
    """Return the reason why Megatron cannot place the stages on the ranks, if there is one."""
    return [] if pipelines.loop else [not_in_loop(plan, pipelines, "Megatron")]


#: Megatron-FSDP's names of the levels of ZeRO above 1.
_STRATEGIES = {2: "optim_grads", 3: "optim_grads_params"}


def _sharding_flags(plan: Plan) -> str:
    """Return the flags for how devices share stages, each after a space."""
    flags = ""
    if plan.tensor_parallel > 1:
        flags += f" --tensor-model-parallel-size {plan.tensor_parallel}"
    if plan.sequence_parallel:
        flags += " --sequence-parallel"
    if plan.zero:
        flags += " --use-distributed-optimizer"
    if plan.zero in _STRATEGIES:
        strategy = _STRATEGIES[plan.zero]
        flags += f" --use-megatron-fsdp --data-parallel-sharding-strategy {strategy}"
    return flags


def _layout_reasons(plan: Plan) -> list[str]:
    """Return the reasons why a layout cannot express the plan's stages."""
    blocks = _decoder_layers(plan)
    if not blocks:
        return [
            (
                "it has no numbered list of layers, such as blocks.0: "
                "the decoder layers cannot be identified"
            )
        ]
    first, last = blocks[0], blocks[-1]
    reasons = []
    if first == 0 or last == plan.layers - 1:
        side = "before" if first == 0 else "after"
        reasons.append(
            f"there is no layer {side} {plan.layer_names[first]} to {plan.layer_names[last]}, "
            "but a layout needs an embedding and an output layer"
        )
    for stage, (start, end) in enumerate(plan.bounds):
        end_name = plan.layer_names[end - 1]
        ends_in_blocks = first < end <= last
        if ends_in_blocks and _block_number(end_name) == _block_number(plan.layer_names[end]):
            reasons.append(
                f"stage {stage} ends within a decoder layer, after {end_name}, "
                "but t is a whole decoder layer"
            )
        if end < first or start > last + 1:
            side, letter = ("before", "E") if end < first else ("after", "L")
            reasons.append(
                f"stage {stage} splits the layers {side} the decoder layers, "
                f"but {letter} stands for all of them"
            )
    return reasons


def _stage_letters(plan: Plan) -> list[str]:
    """Return the letters of each stage's layers."""
    blocks = _decoder_layers(plan)
    words = []
    for stage, (start, end) in enumerate(plan.bounds):
        numbers = {
            _block_number(plan.layer_names[layer]) for layer in blocks if start <= layer < end
        }
        embedding = "E" if stage == 0 else ""
        output = "L" if stage == plan.stages - 1 else ""
        words.append(embedding + "t" * len(numbers) + output)
    return words


def _decoder_layers(plan: Plan) -> list[int]:
    """Return the consecutive layers that are decoder layers, or parts of them."""
    list_names = []
    for name in plan.layer_names:
        match = _NUMBERED.fullmatch(name)
        list_names.append(None if match is None else match["list"])
    longest: list[int] = []
    most_blocks = 0
    for list_name, run in groupby(range(plan.layers), key=list_names.__getitem__):
        if list_name is None:
            continue
        layers = list(run)
        blocks = len({_block_number(plan.layer_names[layer]) for layer in layers})
        if blocks > most_blocks:
            longest, most_blocks = layers, blocks
    return longest


def _recompute_flags(plan: Plan) -> str | None:
    """Return Megatron's flags for the recomputed layers; None if it cannot recompute the same."""
    blocks = _decoder_layers(plan)
    first, last = blocks[0], blocks[-1]
    numbers = [_block_number(plan.layer_names[layer]) for layer in range(first, last + 1)]
    if len(set(numbers)) < len(numbers):  # a decoder layer is several layers of the plan
        return None
    stage_segments = [plan.selection.of_stage(start, end) for start, end in plan.bounds]
    size = 0
    for segments in stage_segments:
        size = max([size, *(end - start for start, end in segments)])
    count = max(map(len, stage_segments))
    # The segments that Megatron would recompute by each method, to compare the plan's with.
    uniform = []
    block = []
    for stage_start, stage_end in plan.bounds:
        start, end = max(stage_start, first), min(stage_end, last + 1)
        uniform.append([(at, min(at + size, end)) for at in range(start, end, size)])
        block.append([(at, at + 1) for at in range(start, min(start + count, end))])
    if stage_segments == uniform:
        method = f"--recompute-method uniform --recompute-num-layers {size}"
    elif stage_segments == block:
        method = f"--recompute-method block --recompute-num-layers {count}"
    else:
        return None
    return f"--recompute-granularity full {method}"


def _block_number(name: str) -> int:
    """Return the number of the decoder layer in a layer's name."""
    match = _NUMBERED.fullmatch(name)
    assert match is not None
    return int(match["number"])


def _compress(words: list[str]) -> str:
    """Join the stages with bars, and shorten repetitions.

    >>> _compress(["Ett", "tttt", "tttt", "tttt", "tL"]), _compress(["E", "t", "t", "L"])
    ('Ett|(t*4|)*3tL', 'E|t|t|L')
    """
    stages = [_compress_letters(word) for word in words]
    parts = []
    for stage, run in groupby(stages[:-1]):
        count = len(list(run))
        parts.append(f"({stage}|)*{count}" if count >= _MIN_REPETITIONS else f"{stage}|" * count)
    return "".join(parts) + stages[-1]


def _compress_letters(word: str) -> str:
    """Shorten repetitions of a letter: `Etttt` to `Et*4`."""
    parts = []
    for letter, run in groupby(word):
        count = len(list(run))
        parts.append(f"{letter}*{count}" if count >= _MIN_REPETITIONS else letter * count)
    return "".join(parts)


def _notes(plan: Plan, pipelines: Pipelines) -> list[str]:
    """Return what Megatron runs otherwise than the plan says, a sentence each."""
    if pipelines.schedule.stages > len(pipelines.placement):
        notes = unsupported_notes(plan, "interleaved", "interleaved 1F1B")
    else:
        notes = unsupported_notes(plan, "1f1b", "1F1B")
    if pipelines.count > 1:
        notes.append(
            f"{pipelines.count} pipelines: start {plan.ranks * plan.tensor_parallel} ranks; "
            "Megatron numbers them stage by stage, the plan pipeline by pipeline"
        )
    if plan.recomputed:
        notes.append(f"recomputation (selective): {_recompute_flags(plan)}")
    elif plan.recompute.whole:
        notes.append(
            f"recomputation ({plan.recompute}): --recompute-granularity full --recompute-method "
            "uniform"
        )
    return notes
