"""The same place in a later period of a stream."""

from __future__ import annotations

from dataclasses import asdict

from penstock.weights.rule_types import Place, Reads


def test_a_later_place_has_later_batches_and_versions_and_the_same_position():
    """The first stage may have made another number of updates."""
    place = Place(
        stage=1,
        stages=4,
        batch=5,
        micro_batch=2,
        micro_batches=3,
        at_forward=40,
        at_backward=50,
        batch_at_forward=60,
        batch_at_backward=70,
        at_first_stage=80,
    )
    assert asdict(place.later(100, 1000, 10000)) == {
        "stage": 1,
        "stages": 4,
        "batch": 105,
        "micro_batch": 2,
        "micro_batches": 3,
        "at_forward": 1040,
        "at_backward": 1050,
        "batch_at_forward": 1060,
        "batch_at_backward": 1070,
        "at_first_stage": 10080,
    }
    assert place.later(0, 0, 0) == place
    assert place.later(1, 2, 3).later(10, 20, 30) == place.later(11, 22, 33)


def test_versions_are_read_as_they_are_unless_a_rule_predicts():
    """Neither direction is ahead."""
    reads = Reads(3, 4)
    assert (reads.forward, reads.backward) == (3, 4)
    assert (reads.forward_ahead, reads.backward_ahead) == (0, 0)
