"""`penstock verify` on asynchronous schedules: staleness and versions by weight rule."""

from __future__ import annotations

import json

import pytest

PIPEDREAM = ("verify", "--schedule", "pipedream", "--stages", 4, "--micro-batches", 1)


def test_staleness_and_versions_per_stage_are_shown(penstock):
    """The costs of asynchrony must be known before training."""
    result = penstock(*PIPEDREAM)
    assert result.status == 0
    assert result.out.splitlines() == [
        "pipedream is sound: 4 stages on 4 ranks, 1 micro-batch per batch, 8 batches shown",
        "staleness per stage       max 3 2 1 0, mean 3 2 1 0, weight rule stash",
        "weight versions per stage 4 3 2 1",
        "peak in flight per stage  4 3 2 1, per rank 4 3 2 1",
        "channel depth             1 (messages a blocking channel must buffer)",
    ]


def test_another_rule_may_be_named(penstock):
    """The same programs, other weights."""
    facts = json.loads(penstock(*PIPEDREAM, "--weights", "vertical-sync", "--json").out)
    assert (facts["weights"], facts["staleness_max"], facts["versions"]) == (
        "vertical-sync",
        [3, 3, 3, 3],
        [4, 4, 4, 4],
    )
    assert facts["staleness_across"] == []


def test_what_other_copies_have_learned_and_a_batch_lacks_is_shown(penstock):
    """HetPipe's second bound."""
    words = ("verify", "--schedule", "hetpipe", "--stages", 3, "--option", "distance=1")
    assert "staleness to replicas     at most 7 6 5 batches" in penstock(*words).out
    assert json.loads(penstock(*words, "--json").out)["staleness_across"] == [7, 6, 5]


def test_a_rule_that_does_not_go_with_the_schedule_is_a_finding(penstock):
    """Exit status 1, as for everything unsound; an unknown rule is a usage error, 2."""
    result = penstock(*PIPEDREAM, "--weights", "double-buffer", "--json")
    assert result.status == 1
    (finding,) = json.loads(result.out)["findings"]
    assert finding["rule"] == "weights"
    assert "as many micro-batches in a batch as there are stages" in finding["message"]
    result = penstock(*PIPEDREAM, "--weights", "double-bufer")
    assert result.status == 2
    assert "Did you mean 'double-buffer'?" in result.err


@pytest.mark.parametrize(
    ("flag", "value"), [("--batch", 8), ("--tolerance", "nan"), ("--plan", "plan.json")]
)
def test_a_flag_of_train_without_train_is_refused(penstock, flag, value):
    """It would have no effect."""
    run = penstock("verify", "--schedule", "1f1b", "--stages", 2, flag, value)
    assert run == (2, "", f"error: {flag} belongs to --train, which is missing\n")
