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
COMBINED = [
    f"{schedule}, tied weights, clipping, recompute always"
    for schedule in SCHEDULES
    if schedule != "pipedream"
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

#: Schedules in which several ranks run the last stage.
WITH_COPIES = ("chimera", "copies")

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


@pytest.mark.parametrize("cell", [*TRAINED, *STEPPED, *COMBINED, *LOSSES, *OTHERS])
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
    named = {*TRAINED, *STEPPED, *COMBINED, *LOSSES, *OTHERS}
    assert {cell for cell in rows if not cell.startswith("comparison")} == named


def test_n13_hooks_and_recomputation_run_in_the_device_thread(rows):
    """Else the cells would not show that nothing depends on the thread."""
    for recompute in RECOMPUTE:
        threads = rows[f"1f1b, random, recompute {recompute}"]["threads"]
        assert [name for name in threads if name.startswith("Dummy")], threads


def waits_and_copies(row):
    """Copies and waits of a step. Those of losses are left out where a stage has copies: each copy
    learns how much micro-batches count in the first batches in which it is the first to ask, and
    that may be later than here.
    """
    if not any(name in row["cell"] for name in WITH_COPIES):
        return row["log"]
    counts = {}
    for what, lines in row["lines"].items():
        others = [count for line, count in lines.items() if not line.startswith("losses/")]
        if others:
            counts[what] = sum(others)
    return counts


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("model", ["", "random, "])
def test_n3_a_steady_step_copies_the_batch_once_and_waits_for_nothing(rows, schedule, model):
    """The host can run ahead of a GPU by whole steps, until somebody looks at a loss."""
    assert waits_and_copies(rows[f"{schedule}, {model}recompute never"]) == BATCH


@pytest.mark.parametrize("cell", STEPPED)
def test_n3_clipping_and_tied_weights_wait_for_nothing(rows, cell):
    """Norms, and the flags of gradients that are there, stay on the device, or are known."""
    assert waits_and_copies(rows[cell]) == BATCH


@pytest.mark.parametrize("cell", COMBINED)
def test_n3_with_everything_on_only_recomputation_waits(rows, cell):
    """Tied weights and clipping add nothing to its comparisons, of each second forward."""
    log = waits_and_copies(rows[cell])
    assert log.pop("wait equal") > 0
    assert log == BATCH


@pytest.mark.parametrize(("recompute", "stages"), [("except_last", 3), ("always", 4)])
def test_n3_recomputation_copies_nothing_again(rows, recompute, stages):
    """Targets too are copied once; second forwards are compared with the first, which waits."""
    row = rows[f"1f1b, recompute {recompute}"]
    assert row["log"] == {**BATCH, "wait equal": 4 * stages}
    assert files(row, "wait equal") == {"grad/fingerprint.py"}


def test_a_traced_model_copies_each_input_once(rows):
    """All stages may use the model's inputs: of two inputs and targets there are three copies."""
    assert rows["traced, recompute never"]["log"] == {"h2d": 3}


@pytest.mark.parametrize("cell", LOSSES)
def test_n3_losses_ask_for_no_more_waits_than_they_need(rows, cell):
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
