"""wpipe: half of the stages has gradients one update late, the other half none."""

from __future__ import annotations

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.verify.verify import verify
from penstock.weights.catalogue import weight_rule
from penstock.weights.rule_types import Place, Reads
from penstock.weights.weight_uses import readings


@pytest.mark.parametrize(
    ("ranks", "micro_batches"), [(1, 1), (2, 2), (2, 5), (3, 4), (4, 6), (4, 9)]
)
def test_group_0_is_one_update_late_with_two_versions_and_group_1_none_with_one(
    ranks, micro_batches
):
    """docs/literature/wpipe.md: fresher weights than 2BW's, for two versions of one half of the model."""
    wpipe = schedule("wpipe", 2 * ranks, micro_batches)
    report = verify(wpipe)
    assert report.weights == "wpipe"
    assert report.versions == (2,) * ranks + (1,) * ranks
    for stage, ages in enumerate(readings(wpipe, weight_rule("wpipe")).ages):
        late = 1 if stage < ranks else 0
        assert ages == (0,) * micro_batches + (late,) * (len(ages) - micro_batches)


def test_an_order_in_which_gradients_are_two_updates_late_is_refused():
    """Its two versions would not be enough."""
    with pytest.raises(
        ScheduleError,
        match=r"'wpipe' has no gradient more than 1 update old, and here one would be 2 old on stage 0",
    ):
        verify(schedule("pipedream", 4, 2), weights="wpipe")
    assert verify(schedule("pipedream", 4, 3), weights="wpipe").versions == (2, 2, 2, 1)


def test_a_backward_reads_the_version_of_its_forward_and_its_own_age_counts():
    """An update between the forwards of a batch does not make the gradient of a later one older."""
    place = Place(
        0,
        2,
        batch=5,
        micro_batch=1,
        micro_batches=2,
        at_forward=4,
        at_backward=5,
        batch_at_forward=3,
        batch_at_backward=5,
        at_first_stage=4,
    )
    assert weight_rule("wpipe").reads(place) == Reads(4, 4)
