"""Proposals of planners: their numbers, and the options of replicas."""

from __future__ import annotations

import pytest

from penstock.errors import PenstockError
from penstock.schedule.recompute import Recompute
from penstock.search.proposal import Proposal, replica_options


@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        (1, ()),
        ((1,), ()),
        ((1, 1), ()),
        (2, (("replicas", 2),)),
        ((2, 2), (("replicas", (2, 2)),)),
        ((1, 2), (("replicas", (1, 2)),)),
    ],
)
def test_replicas_are_an_option_only_where_there_are_several(replicas, options):
    """A schedule without the option is equal to one made without replicas, and so are its plans."""
    assert replica_options(replicas) == options
    proposal = Proposal((3, 2), "1f1b", 4, (("chunks", 2), *options))
    assert proposal.replicas == (replicas if options else 1)
    assert proposal.stages == 2


def test_by_default_as_little_is_recomputed_as_fits_on_rank_r_for_device_r():
    """A planner says only what its paper decides."""
    proposal = Proposal((1, 2), "gpipe", 8)
    assert (proposal.options, proposal.devices, proposal.weights) == ((), (), None)
    assert (proposal.recompute, proposal.objective, proposal.replicas) == ("auto", None, 1)


def test_recompute_is_one_of_the_policies_or_left_open():
    """Names are resolved when the proposal is made, not when it is simulated."""
    assert Proposal((1,), "gpipe", 1, recompute="always").recompute is Recompute.ALWAYS
    assert Proposal((1,), "gpipe", 1, recompute=Recompute.NEVER).recompute is Recompute.NEVER
    with pytest.raises(PenstockError, match="recompute is 'sometimes'"):
        Proposal((1,), "gpipe", 1, recompute="sometimes")
