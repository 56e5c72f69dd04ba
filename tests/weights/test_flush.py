"""flush: one version for a whole batch."""

from __future__ import annotations

import pytest

from penstock.errors import ScheduleError
from penstock.schedule.catalogue import schedule
from penstock.verify.verify import verify
from penstock.weights.catalogue import weight_rule
from penstock.weights.rule_types import Place, Reads
from penstock.weights.weight_uses import uses


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "chimera", "zb-v", "seq1f1b"])
def test_whatever_the_order_nothing_is_stale_and_one_version_is_kept(name):
    """The pipeline drains before each update: that is what a synchronous schedule saves."""
    family_schedule = schedule(name, 4, 4)
    report = verify(family_schedule)
    assert (report.weights, report.versions, report.staleness_max) == ("flush", (1,) * 4, (0,) * 4)
    assert report.staleness_across == ()


@pytest.mark.parametrize("name", ["gpipe", "chimera", "zb-v", "seq1f1b"])
def test_batch_after_batch_all_read_the_version_that_the_flush_before_has_made(name):
    """What one device would do."""
    family_schedule = schedule(name, 4, 4)
    weight_uses = uses(family_schedule, weight_rule("flush"))
    for stage in range(4):
        for number in range(3 * family_schedule.slices):
            reads = weight_uses.at(stage, number).reads
            assert reads.forward == reads.backward == number // family_schedule.slices


def test_without_a_flush_it_is_refused():
    """It would have no version to read that is the batch's."""
    with pytest.raises(
        ScheduleError,
        match=r"'flush' does not go with pipedream, which is asynchronous.*Those that do: .*stash",
    ):
        verify(schedule("pipedream", 3, 1), weights="flush")


def test_versions_are_counted_by_updates_and_not_by_batches():
    """A batch whose step was skipped makes no version."""
    assert weight_rule("flush").reads(Place(0, 2, 7, 0, 2, 5, 5, 5, 5, 5)) == Reads(5, 5)
