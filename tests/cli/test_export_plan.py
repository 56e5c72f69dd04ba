"""`penstock export plan.json`: a plan for another library."""

from __future__ import annotations

import json

import pytest

from penstock.plan.plan import Plan
from penstock.plan.prediction import Prediction
from penstock.schedule.catalogue import schedule
from penstock.schedule.torch_csv.files import to_csv

MADE = schedule("1f1b", 2, 4)


@pytest.fixture
def plan_file(tmp_path):
    """A plan of an embedding, three blocks and a head on two ranks."""
    names = ("embedding", "blocks.0", "blocks.1", "blocks.2", "head")
    path = tmp_path / "plan.json"
    Plan(
        "abc",
        names,
        (2, 3),
        "1f1b",
        MADE.lines,
        4,
        16,
        "local:2",
        2,
        Prediction(0.5, 0.2, (1, 1), 32.0, 0.9),
        recompute="always",
    ).save(path)
    return path


@pytest.mark.parametrize(
    ("library", "text"),
    [
        ("torchgpipe", "[2, 3]"),
        ("fairscale", "[2, 3]"),
        ("deepspeed", "[0, 2, 5]"),
        ("megatron", "Et|ttL"),
        ("torchtitan", '[["embedding", "blocks.0"], ["blocks.1", "blocks.2", "head"]]'),
        ("csv", to_csv(MADE).rstrip("\n")),
    ],
)
def test_a_plan_is_printed_in_the_librarys_form_and_nothing_else(
    penstock, plan_file, library, text
):
    """Into a pipe; what to do with it goes to standard error."""
    result = penstock("export", plan_file, "--as", library)
    assert (result.status, result.out) == (0, text + "\n")
    assert result.err.startswith("use: ")


def test_what_is_left_out_is_told_once_it_is_written(penstock, plan_file, tmp_path):
    """The printed text must be enough without the documentation."""
    result = penstock("export", plan_file, "--as", "torchgpipe", "--to", tmp_path / "balance.txt")
    assert (result.status, result.out) == (0, "")
    lines = result.err.splitlines()
    assert lines[0] == f"wrote {tmp_path / 'balance.txt'}"
    assert (
        lines[1]
        == "use: GPipe(model, balance=[2, 3], devices=[0, 1], chunks=4, checkpoint='always')"
    )
    assert lines[2].startswith(
        "left out: the schedule: the library runs GPipe instead of this plan's 1f1b"
    )
    assert (tmp_path / "balance.txt").read_text() == "[2, 3]"


def test_torch_gets_a_folder(penstock, plan_file, tmp_path):
    """Its runtime loads the schedule from a file of its own."""
    assert penstock("export", plan_file, "--as", "torch", "--to", tmp_path / "out").status == 0
    assert (tmp_path / "out" / "schedule.csv").read_text() == to_csv(MADE)
    assert json.loads((tmp_path / "out" / "stages.json").read_text())["split_spec"] == {
        "blocks.1": "BEGINNING"
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "name the library: --as csv, --as deepspeed"),
        (("--as", "pipedream"), "pipedream cannot run this plan"),
        (("--as", "torchpipe"), "Did you mean 'torchgpipe'"),
        (
            ("--as", "csv", "--schedule", "1f1b"),
            "contains its schedule: leave out --communication",
        ),
    ],
)
def test_what_cannot_be_exported_is_said_in_a_sentence(penstock, plan_file, words, message):
    """Two is the status of words that are off."""
    result = penstock("export", plan_file, *words)
    assert (result.status, result.out) == (2, "")
    assert message in result.err


def test_a_schedule_alone_has_no_layers(penstock):
    """All forms but the CSV are of layers."""
    result = penstock("export", "--schedule", "1f1b", "--stages", 2, "--as", "torchgpipe")
    assert result.status == 2
    assert "--as torchgpipe needs a plan, because its format names layers" in result.err
