"""Training on a device: the CPU's numbers, no copy but the batch's, no wait before a loss is read.

No GPU is used. The device is the stand-in of lookalike.py: it shows which copies and waits a step
asks for, and in which threads it runs, and nothing of a GPU's own numerics, streams or speed.
"""

from __future__ import annotations

import pytest

SCHEDULES = (
    "1f1b",
    "gpipe",
    "interleaved",
    "zb-h1",
    "zb-v",
    "chimera",
    "copies",
    "bpipe",
    "pipedream",
)
RECOMPUTE = ("never", "except_last", "always")
#: 1F1B in every way to recompute; of the others, every second one in each.
WAYS = {
    schedule: ("never", RECOMPUTE[2 - number % 2])
    for number, schedule in enumerate(SCHEDULES)
    if schedule != "1f1b"
}
WAYS["1f1b"] = RECOMPUTE
#: The model has batch normalisation and dropout; one without them shows no more, but once.
MODELS = {
    schedule: [("random, ", recompute) for recompute in ways] for schedule, ways in WAYS.items()
}
MODELS["1f1b"].insert(0, ("", "never"))
TRAINED = [
    f"{schedule}, {model}recompute {recompute}"
    for schedule, models in MODELS.items()
    for model, recompute in models
]
COMBINED_WAYS = {
    schedule: (("never", "always")[number % 2],) for number, schedule in enumerate(SCHEDULES)
}
COMBINED_WAYS["1f1b"] = ("never", "always")
del COMBINED_WAYS["pipedream"]
COMBINED = [
    f"{schedule}, tied weights, clipping, recompute {recompute}"
    for schedule, ways in COMBINED_WAYS.items()
    for recompute in ways
]
LOSSES = (
    "ignored targets",
    "sum and count",
    "loss on batch",
    "custom loss",
    "two terms",
    "loss module",
    "loss weight",
)
COMBINATIONS = (
    "tied weights, clipping, layers recomputed, accumulated",
    "5 stages",
    "3 copies",
    "layers recomputed",
    "layers recomputed, split backward",
    "mapping",
    "mapping, recomputed",
    "bfloat16 boundary",
    "norm of exponent 1",
    "joint loss, layers recomputed",
    "double-buffer",
    "vertical-sync",
    "wpipe",
    "pipemare",
)
OTHERS = (
    "traced, recompute never",
    "traced, recompute always",
    "int8 boundary",
    "pipe",
    "pipe on two devices",
    "traced pipe on cpu and lookalike:0",
    "traced pipe on lookalike:0 and cpu",
)

#: What is read late.
LATE = ("late: recomputed stage", "late: recomputed layer", "late: count")

#: Copies of a batch to the device: its inputs and its targets.
BATCH = {"h2d": 2}


@pytest.mark.parametrize("cell", [*TRAINED, *COMBINED, *LOSSES, *COMBINATIONS, *OTHERS])
def test_n13_losses_gradients_and_state_equal_those_of_the_cpu_to_the_bit(rows, cell):
    """Nothing depends on the thread that runs a hook or a recomputation, nor on host memory."""
    row = rows[cell]
    assert not row["error"], row["error"]
    expected, losses = row["losses"]
    assert losses == expected
    assert row["facts"]["values"] > 0
    assert row["differences"] == []


def test_every_cell_is_tested(rows):
    """A cell that no test names would show nothing."""
    named = {*TRAINED, *COMBINED, *LOSSES, *COMBINATIONS, *OTHERS, *LATE}
    assert {cell for cell in rows if not cell.startswith("comparison")} == named


def test_n13_hooks_and_recomputation_run_in_the_device_thread(rows):
    """Else the cells would not show that nothing depends on the thread."""
    for recompute in RECOMPUTE:
        threads = rows[f"1f1b, random, recompute {recompute}"]["threads"]
        assert [name for name in threads if name.startswith("Dummy")], threads


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_n3_a_steady_step_copies_the_batch_once_and_waits_for_nothing(rows, schedule):
    """The host can run ahead of a GPU by whole steps, until somebody looks at a loss. Second
    forwards are compared with the first on the device, and targets are copied once for both.
    """
    for model, recompute in MODELS[schedule]:
        assert rows[f"{schedule}, {model}recompute {recompute}"]["log"] == BATCH


@pytest.mark.parametrize("cell", [*COMBINED, *COMBINATIONS])
def test_n3_clipping_and_tied_weights_wait_for_nothing(rows, cell):
    """Norms, and the flags of gradients that are there, stay on the device, or are known; with
    recomputation as without.
    """
    assert rows[cell]["log"] == BATCH


def test_a_traced_model_copies_each_input_once(rows):
    """All stages may use the model's inputs: of two inputs and targets there are three copies."""
    assert rows["traced, recompute never"]["log"] == {"h2d": 3}


@pytest.mark.parametrize("cell", LOSSES)
def test_n3_losses_whose_weights_depend_on_values_wait_for_nothing(rows, cell):
    """The targets are in host memory, too, and are counted there before the first backward."""
    assert rows[cell]["log"] == BATCH


@pytest.mark.parametrize("cell", LATE)
def test_checks_that_are_read_later_end_the_run_before_its_weights_leave(rows, cell):
    """A second forward, or a count, that differs in a batch whose checks are not read at once: the
    run ends at the next batch that reads them, or before evaluation, save or state_dict.
    """
    row = rows[cell]
    assert not row["error"], row["error"]
    for text in row["facts"]["next batch"], row["facts"]["state_dict"], row["facts"]["close"]:
        assert row["facts"]["words"] in text
        assert "This was seen in the batch of step 2" in text
        assert "Continue from a checkpoint" in text
    assert row["facts"]["passed"] == 3


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_the_comparison_with_one_device_runs_on_the_device_of_the_stages(rows, recompute):
    """A reference on the CPU would draw other numbers for dropout, and round otherwise."""
    row = rows[f"comparison, recompute {recompute}"]
    assert not row["error"], row["error"]
    assert row["losses"][0] == row["losses"][1] == [(0.0).hex()]
    # The loss is returned in single precision, rounded by the pipeline and by the reference.
    assert row["facts"]["loss of cpu"] < 1e-6
    assert row["facts"]["loss of lookalike:0"] < 1e-6
    assert row["facts"]["reference"] == "lookalike:0"
    assert row["facts"]["loss devices"] == ["lookalike"]
    assert "the one device is lookalike:0" in row["facts"]["lookalike:0"]
    assert "the one device" not in row["facts"]["cpu"]
