"""Megatron's layout string, read by a parser written from its documentation."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.export.catalogue import export, exported
from penstock.schedule.catalogue import schedule


def parsed(layout: str) -> list[str]:
    """The letters of every stage, by the documented grammar: `x*n` repeats a letter, `(…)*n` a
    group with its bars, no group stands in another, commas are ornament, and anything else is an
    error.
    """
    text, place = layout.replace(",", ""), 0

    def number() -> int:
        nonlocal place
        if place >= len(text) or text[place] != "*":
            return 1
        place += 1
        digits = ""
        while place < len(text) and text[place].isdigit():
            digits, place = digits + text[place], place + 1
        return int(digits)

    def sequence(closing: str) -> str:
        nonlocal place
        letters = ""
        while place < len(text) and text[place] != closing:
            letter, place = text[place], place + 1
            if letter == "(":
                assert not closing, f"a group in a group: {layout}"
                group = sequence(")")
                assert place < len(text), f"a group without an end: {layout}"
                place += 1
                letters += group * number()
            else:
                assert letter in "EtmL|", f"{letter!r} in {layout}"
                letters += letter * number()
        return letters

    return sequence("").split("|")


def check(stages: list[str], ranks: int, layers: int) -> None:
    """What Megatron's `validate_layer_layout` asks of a layout."""
    assert len(stages) % ranks == 0
    flat = "".join(stages)
    assert flat[0] == "E"
    assert flat[-1] == "L"
    assert (flat.count("E"), flat.count("t"), flat.count("L")) == (1, layers, 1)


def test_the_parser_reads_the_documented_examples():
    """The other tests rely on this parser; both strings are from the documentation."""
    assert parsed("Et*3|(tt|)*29,m|L") == ["Ettt", *["tt"] * 29, "m", "L"]
    assert parsed("Ett|tt|tt|tt|tt|tt|tt|tL") == ["Ett", *["tt"] * 6, "tL"]


@settings(max_examples=100, deadline=None)
@given(
    inner=st.lists(st.integers(1, 9), min_size=0, max_size=10),
    first=st.integers(0, 9),
    last=st.integers(0, 9),
)
def test_the_layout_has_the_lengths_of_the_plan(plan_of, inner, first, last):
    """The layout allows any cut between decoder layers; the outer stages may have none, as with a
    stage of the embedding only.
    """
    blocks = [first, *inner, last]
    if not sum(blocks):
        return
    names = ("embedding", *(f"decoder.layers.{i}" for i in range(sum(blocks))), "norm", "head")
    lengths = [first + 1, *inner, last + 2]
    stages = parsed(export(plan_of(schedule("1f1b", len(lengths), 4), lengths, names), "megatron"))
    check(stages, len(lengths), sum(blocks))
    assert [stage.count("t") for stage in stages] == blocks


def test_repetitions_are_written_once(plan_of):
    """A hundred layers in eight stages are one line that a person can check."""
    names = ("embedding", *(f"blocks.{i}" for i in range(100)), "norm", "head")
    chosen_plan = plan_of(schedule("1f1b", 8, 8), [12, 13, 13, 13, 13, 13, 13, 13], names)
    assert export(chosen_plan, "megatron") == "Et*11|(t*13|)*6t*11L"
    assert exported(chosen_plan, "megatron").use == (
        "--pipeline-model-parallel-size 8 --pipeline-model-parallel-layout 'Et*11|(t*13|)*6t*11L' --num-layers 100 "
        "--micro-batch-size 2 --global-batch-size 16"
    )


def test_several_stages_on_a_rank_stand_in_a_loop(plan_of):
    """Stage k is on rank k mod p, which is how interleaved 1F1B places them; a V is not."""
    lengths = (2, 2, 2, 2, 2, 2, 1, 2)
    chosen_plan = plan_of(schedule("interleaved", 8, 8), lengths)
    assert exported(chosen_plan, "megatron").use.startswith("--pipeline-model-parallel-size 4 ")
    check(parsed(export(chosen_plan, "megatron")), 4, 12)
    with pytest.raises(
        PlanError, match=r"zb-v has stages \(0, 7\), .* Megatron has stage k on rank k mod 4"
    ):
        export(plan_of(schedule("zb-v", 8, 8), lengths), "megatron")


def test_parts_of_blocks_count_as_their_block(plan_of):
    """A chain may have attention and MLP as separate layers; Megatron cannot cut between them."""
    names = (
        "embedding",
        *(f"blocks.{i}.{part}" for i in range(4) for part in ("attention", "mlp")),
        "head",
    )
    assert export(plan_of(schedule("1f1b", 2, 4), (5, 5), names), "megatron") == "Ett|ttL"
    with pytest.raises(
        PlanError, match=r"stage 0 ends within a decoder layer, after blocks\.1\.attention"
    ):
        export(plan_of(schedule("1f1b", 2, 4), (4, 6), names), "megatron")


@pytest.mark.parametrize(
    ("lengths", "names", "message"),
    [
        ((2, 2), ("a", "b", "c", "d"), "it has no numbered list of layers"),
        (
            (2, 2),
            ("layers.0", "layers.1", "layers.2", "head"),
            r"no layer before layers\.0 to layers\.2",
        ),
        (
            (2, 2),
            ("stem", "layers.0", "layers.1", "layers.2"),
            r"no layer after layers\.0 to layers\.2",
        ),
        (
            (1, 4),
            ("token", "position", "layers.0", "layers.1", "head"),
            "stage 0 splits the layers before the decoder layers",
        ),
        (
            (4, 1),
            ("token", "layers.0", "layers.1", "norm", "head"),
            "stage 1 splits the layers after the decoder layers",
        ),
    ],
)
def test_layers_that_have_no_letter_are_refused(plan_of, lengths, names, message):
    """Four letters are all there is."""
    with pytest.raises(PlanError, match=message):
        export(plan_of(schedule("1f1b", 2, 4), lengths, names), "megatron")


def test_the_embedding_and_the_head_may_be_separate_stages(plan_of):
    """As a heavy vocabulary asks for."""
    names = ("token", *(f"layers.{i}" for i in range(3)), "norm", "head")
    assert export(plan_of(schedule("1f1b", 4, 4), (1, 2, 1, 2), names), "megatron") == "E|tt|t|L"


@pytest.mark.parametrize(
    ("example", "lengths"),
    [
        (schedule("1f1b", 4, 8), (4, 4, 4, 3)),
        (schedule("interleaved", 8, 8), (2, 2, 2, 2, 2, 2, 1, 2)),
        (schedule("1f1b", 2, 4), (1, 14)),
    ],
    ids=["cut evenly", "interleaved", "embedding alone"],
)
def test_megatron_itself_builds_the_plans_layers_on_every_rank(plan_of, example, lengths):
    """Its parser, validator and offsets are used if it is installed."""
    theirs = pytest.importorskip(
        "megatron.core.transformer.pipeline_parallel_layer_layout", exc_type=ImportError
    )
    planned = plan_of(example, lengths)
    layout = theirs.PipelineParallelLayerLayout(export(planned, "megatron"), example.ranks)
    layout.validate_layer_layout(12, None)
    for rank, stages in enumerate(example.stages_of_rank):
        for virtual, stage in enumerate(stages):
            start, end = planned.bounds[stage]
            kinds = [kind.name for kind in layout.layout[rank][virtual]]
            blocks = [name for name in planned.layer_names[start:end] if name.startswith("blocks")]
            assert kinds.count("decoder") == len(blocks)
            assert ("embedding" in kinds, "loss" in kinds) == (
                stage == 0,
                stage == example.stages - 1,
            )
