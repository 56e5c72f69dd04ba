"""Steps that are captured once and played again, as by a CUDA graph (see `lookalike.Graph`).

No GPU is used, and Penstock captures nothing yet: this is what a step of a pipeline has to be for
that, and what stands in the way.
"""

from __future__ import annotations

import pytest

SIZES = (
    "1f1b 2 x 3",
    "1f1b 4 x 5",
    "gpipe 3 x 4",
    "zb-h1 3 x 6",
    "zb-v 4 x 4",
    "chimera 2 x 4",
    "chimera 4 x 4",
    "bpipe 4 x 6",
    "3 copies 2 x 6",
    "interleaved 4 x 4",
)
#: One size of each kind also without tied weights and clipping: stages in a row, folded, in both
#: directions, copied and in loops.
PLAIN = ("1f1b 4 x 5", "zb-v 4 x 4", "chimera 4 x 4", "3 copies 2 x 6", "interleaved 4 x 4")
CAPTURED = [
    *PLAIN,
    *(f"{size}, tied weights, clipping" for size in SIZES),
    "recompute except_last",
    "recompute always",
    "batch norm",
    "Adam, capturable",
    "gradients of one rank",
]

#: What the host decides anew in every step: a graph repeats the old decision.
FROZEN = ("dropout", "learning rate", "Adam")

#: What waits for the device in the middle of a step, and where.
WAITS = {
    "class indices on the device": "wait _local_scalar_dense by losses/loss_weights.py",
}


@pytest.mark.parametrize("cell", CAPTURED)
def test_n14_a_captured_step_does_what_the_eager_one_does_with_another_batch(graph_rows, cell):
    """Whole steps of all stages, with their updates: losses and weights to the bit."""
    row = graph_rows[cell]
    assert not row["error"], row["error"]
    assert row["ops"] > 50
    assert row["differences"] == []


@pytest.mark.parametrize("cell", CAPTURED[:-1])
def test_no_event_is_recorded_or_queried_while_a_graph_is_captured(graph_rows, cell):
    """It would end the capture; the batch has no times, and its timeline says why."""
    assert "captured as a graph" in graph_rows[cell]["timeline"]


@pytest.mark.parametrize("cell", FROZEN)
def test_n14_the_stand_in_sees_what_a_graph_would_freeze(graph_rows, cell):
    """Seeds of dropout, the learning rate, Adam's count of steps on the host: each trains to other
    weights, without an error.
    """
    row = graph_rows[cell]
    assert not row["error"], row["error"]
    assert "0.weight" in row["differences"]


@pytest.mark.parametrize("cell", WAITS)
def test_n14_a_step_that_waits_for_the_device_cannot_be_captured(graph_rows, cell):
    """How many class indices count is read where they are on the device."""
    assert WAITS[cell] in graph_rows[cell]["error"]


def test_every_cell_is_tested(graph_rows):
    """A cell that no test names would show nothing."""
    assert set(graph_rows) == {*CAPTURED, *FROZEN, *WAITS}
