"""Libraries by name, and what all of them do."""

import json

import pytest

from penstock.errors import FileError, PlanError, SettingError, UnknownName
from penstock.export.catalogue import EXPORTERS, export, exported
from penstock.schedule.catalogue import schedule
from penstock.schedule.torch_csv.files import from_csv, to_csv

LINEAR = (4, 4, 4, 3)
PLAYS_BATCHES = ["torchgpipe", "deepspeed", "megatron", "torchtitan", "torch"]


def test_every_library_of_the_issue_is_there():
    """One file each, found by its name."""
    assert list(EXPORTERS.entries()) == [
        "csv",
        "deepspeed",
        "megatron",
        "pipedream",
        "torch",
        "torchgpipe",
        "torchtitan",
    ]
    assert EXPORTERS.find("fairscale").name == "torchgpipe"
    with pytest.raises(
        UnknownName, match=r"no library to export to called 'torchpipe'\. Did you mean 'torchgpipe'"
    ):
        export(schedule("1f1b", 2, 2), "torchpipe")


def test_a_schedule_exports_to_the_csv_of_torch_only():
    """A schedule has no layers, and the other forms are lists of layers."""
    example = schedule("zb-v", 4, 4)
    assert export(example, "csv") == to_csv(example)
    with pytest.raises(SettingError, match="torchgpipe needs a plan"):
        export(example, "torchgpipe")


def test_the_csv_of_a_plan_is_that_of_its_schedule(plan_of):
    """It is one program in both."""
    example = schedule("1f1b", 4, 8)
    assert export(plan_of(example, LINEAR), "csv") == to_csv(example)


def test_pipelines_side_by_side_have_one_csv(plan_of):
    """Each has its own process group, and numbers its micro-batches from 0."""
    text = export(plan_of(schedule("1f1b", 4, 8, replicas=2), LINEAR), "csv")
    assert from_csv(text).programs == schedule("1f1b", 4, 4).programs


@pytest.mark.parametrize("library", PLAYS_BATCHES)
@pytest.mark.parametrize(
    ("example", "message"),
    [
        (schedule("1f1b", 4, 4, replicas=(2, 1, 1, 1)), "its stages have 2, 1, 1, 1 ranks"),
        (
            schedule("chimera", 4, 4),
            "chimera has 2 replicas of every stage that are not identical pipelines",
        ),
        (
            schedule("pipedream", 4, 1),
            "pipedream is asynchronous, but the library has no weight versions",
        ),
        (
            schedule("1f1b", 4, 5, replicas=2),
            "1f1b has 2 replicas of every stage that are not identical pipelines",
        ),
    ],
    ids=["copies", "two ways", "asynchronous", "unequal pipelines"],
)
def test_a_plan_that_a_library_cannot_run_is_refused_with_the_reason(
    plan_of, library, example, message
):
    """A form that leaves this out in silence would train something else, or a quarter of it."""
    with pytest.raises(PlanError, match=rf"cannot run this plan\n.*{message}"):
        export(plan_of(example, LINEAR), library)


@pytest.mark.parametrize("library", [name for name in PLAYS_BATCHES if name != "torchgpipe"])
def test_all_reasons_come_in_one_message(plan_of, library):
    """Mended one by one, each would cost a round."""
    example = schedule("pipedream", 4, 3)
    with pytest.raises(
        PlanError,
        match=r"is asynchronous.*\n.*a batch of 10 in 3 micro-batches has some of 3 and some of 4",
    ):
        export(plan_of(example, LINEAR, batch=10), library)


def test_the_export_lists_what_the_format_cannot_express(plan_of):
    """A list of lengths has neither devices nor the schedule."""
    chosen_plan = plan_of(schedule("zb-h1", 4, 8), LINEAR, devices=(8, 9, 10, 3))
    for library in ("torchgpipe", "deepspeed", "megatron"):
        notes = "\n".join(exported(chosen_plan, library).left_out)
        assert "instead of this plan's zb-h1" in notes
        assert "rank r belongs on device [8, 9, 10, 3] of 4xA" in notes
    assert exported(plan_of(schedule("1f1b", 4, 8), LINEAR), "deepspeed").left_out == ()


@pytest.mark.parametrize("name", ["autopipe", "seq1f1b"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_slices_are_a_matter_of_the_schedule_and_left_out_with_it(plan_of, name, replicas):
    """The same gradients come of whole micro-batches; where the form is the schedule itself, they
    are refused.
    """
    chosen_plan = plan_of(schedule(name, 4, 8, replicas=replicas), LINEAR)
    for library in ("torchgpipe", "deepspeed", "megatron"):
        assert f"instead of this plan's {name}" in exported(chosen_plan, library).left_out[0]
    for library in ("torch", "torchtitan"):
        with pytest.raises(PlanError, match=rf"{name} cuts micro-batches along"):
            export(chosen_plan, library)


def test_a_form_of_two_files_is_written_to_a_folder_or_to_one_file(plan_of, tmp_path):
    """torch loads its CSV from a separate file; other tools read one JSON."""
    chosen_plan = plan_of(schedule("1f1b", 4, 8), LINEAR)
    text = export(chosen_plan, "torch", tmp_path / "plan")
    assert (tmp_path / "plan" / "schedule.csv").read_text() == to_csv(chosen_plan.schedule)
    facts = json.loads((tmp_path / "plan" / "stages.json").read_text())
    assert facts == {**json.loads(text), "schedule": "schedule.csv"}
    export(chosen_plan, "torch", tmp_path / "plan.json")
    assert (tmp_path / "plan.json").read_text() == text
    assert (
        export(chosen_plan, "torchgpipe", tmp_path / "balance.txt")
        == (tmp_path / "balance.txt").read_text()
        == "[4, 4, 4, 3]"
    )
    with pytest.raises(FileError, match=r"cannot write .*missing"):
        export(chosen_plan, "torchgpipe", tmp_path / "missing" / "balance.txt")
