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
TRAINED = [
    f"{schedule}, {model}recompute {recompute}"
    for schedule in SCHEDULES
    for model in ("", "random, ")
    for recompute in RECOMPUTE
]
STEPPED = [
    f"{schedule}, {option}"
    for schedule in SCHEDULES
    if schedule != "pipedream"
    for option in ("clipping", "tied weights")
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
OTHERS = ("traced, recompute never", "traced, recompute always", "int8 boundary", "pipe")

#: Schedules whose steady step asks for no wait at all. Those with copies of the last stage, and
#: asynchronous ones, read the losses of all micro-batches when a batch is over.
WITHOUT_WAITS = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "bpipe")

#: Copies of a batch to the device: its inputs and its targets.
BATCH = {"h2d": 2}

#: Per step, what losses other than torch's own without class weights ask for besides.
WAITS_OF_LOSSES = {
    "ignored targets": {},
    "loss on batch": {},
    "custom loss": {},
    # The count of each micro-batch, before its first backward and when its loss is there.
    "sum and count": {"wait _local_scalar_dense": 8},
    # The divisor of the mean of each micro-batch, and that of the batch.
    "two terms": {"wait _local_scalar_dense": 5},
    # The weights of all micro-batches' classes at once.
    "loss module": {"wait tolist": 1},
    # What `loss_weight` returns for each micro-batch.
    "loss weight": {"wait _local_scalar_dense": 4},
}


def files(row, what):
    """The files of penstock that asked for copies or waits of one kind."""
    return {line.partition(":")[0] for line in row["lines"][what]}


@pytest.mark.parametrize("cell", [*TRAINED, *STEPPED, *LOSSES, *OTHERS])
def test_losses_gradients_and_state_equal_those_of_the_cpu_to_the_bit(rows, cell):
    """Nothing depends on the thread that runs a hook or a recomputation, nor on host memory."""
    row = rows[cell]
    assert not row["error"], row["error"]
    expected, losses = row["losses"]
    assert losses == expected
    assert row["facts"]["values"] > 0
    assert row["differences"] == []


def test_every_cell_is_tested(rows):
    """A cell that no test names would show nothing."""
    named = {*TRAINED, *STEPPED, *LOSSES, *OTHERS}
    assert {cell for cell in rows if not cell.startswith("comparison")} == named


def test_hooks_and_recomputation_run_in_the_device_thread(rows):
    """Else the cells would not show that nothing depends on the thread."""
    for recompute in RECOMPUTE:
        threads = rows[f"1f1b, random, recompute {recompute}"]["threads"]
        assert [name for name in threads if name.startswith("Dummy")], threads


@pytest.mark.parametrize("schedule", WITHOUT_WAITS)
@pytest.mark.parametrize("model", ["", "random, "])
def test_a_steady_step_copies_the_batch_once_and_waits_for_nothing(rows, schedule, model):
    """The host can run ahead of a GPU by whole steps, until somebody looks at a loss."""
    assert rows[f"{schedule}, {model}recompute never"]["log"] == BATCH


def test_a_steady_step_of_pipedream_reads_each_loss_once(rows):
    """Its losses are told as numbers, and their mean goes back to the device, where losses are."""
    row = rows["pipedream, recompute never"]
    assert row["log"] == {"h2d": BATCH["h2d"] + 1, "wait _local_scalar_dense": 4}
    assert files(row, "wait _local_scalar_dense") == {"ranks/results.py"}


@pytest.mark.parametrize(("recompute", "stages"), [("except_last", 3), ("always", 4)])
def test_recomputation_copies_nothing_again(rows, recompute, stages):
    """Targets too are copied once; second forwards are compared with the first, which waits."""
    row = rows[f"1f1b, recompute {recompute}"]
    assert row["log"] == {**BATCH, "wait equal": 4 * stages}
    assert files(row, "wait equal") == {"grad/fingerprint.py"}


def test_a_traced_model_copies_each_input_once(rows):
    """All stages may use the model's inputs: of two inputs and targets there are three copies."""
    assert rows["traced, recompute never"]["log"] == {"h2d": 3}


@pytest.mark.parametrize("cell", LOSSES)
def test_losses_ask_for_no_more_waits_than_they_need(rows, cell):
    """Their weights are known before the first backward, some of them only from values."""
    assert rows[cell]["log"] == {**BATCH, **WAITS_OF_LOSSES[cell]}


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_the_comparison_with_one_device_runs_on_the_device_of_the_stages(rows, recompute):
    """A reference on the CPU would draw other numbers for dropout, and round otherwise."""
    row = rows[f"comparison, recompute {recompute}"]
    assert not row["error"], row["error"]
    assert row["losses"][0] == row["losses"][1] == [(0.0).hex()]
    assert row["facts"]["reference"] == "lookalike:0"
    assert row["facts"]["loss devices"] == ["lookalike"]
    assert "the one device is lookalike:0" in row["facts"]["lookalike:0"]
    assert "the one device" not in row["facts"]["cpu"]
