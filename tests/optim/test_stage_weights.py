"""What a weight rule has that defines nothing beyond the ops."""

from __future__ import annotations

import torch

from penstock.optim.stage_weights import Site, StageWeights


class Plain(StageWeights):
    """A rule with three versions and no state."""

    versions = 3


def test_a_rule_without_state_has_an_empty_one_and_ignores_an_empty_one():
    """Checkpoints save and restore every rule by the same calls."""
    rule = Plain()
    assert (rule.state(), rule.facts(), list(rule.more_optimizers())) == ({}, {}, [])
    rule.load_state({})
    rule.load_facts({})
    rule.load_state({"momentum": [torch.ones(1), None]})
    rule.load_facts({"steps": 3.0})
    assert (rule.state(), rule.facts()) == ({}, {})


def test_the_most_versions_so_far_are_those_held_now_unless_a_rule_counts():
    """A rule that never drops one need not count; one without copies holds a single version."""
    assert Plain().peak_versions == 3

    class Single(StageWeights):
        """A rule without copies."""

    assert (Single().versions, Single().peak_versions) == (1, 1)


def test_a_stage_alone_is_the_first_of_one_pipeline():
    """Without replicas, and without an age of its gradients."""
    site = Site(update=None, use=None, rule=None, options={})
    assert (site.stage, site.staleness, site.pipelines, site.stages) == (0, 0.0, 1, 0)
    assert (site.waves, site.exchange) == (None, None)
