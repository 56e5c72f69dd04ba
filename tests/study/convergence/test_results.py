"""From records to sentences, targets and files."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from penstock.study.convergence.experiment import Group


def test_sentences_say_which_rules_lose_and_at_which_depths(results):
    """The study's whole point, in words made from the numbers."""
    sentences = list(results.sentences("digits"))
    assert sentences[0].startswith(
        "stash (sgd): at 2 stages as good as flush, within the spread over seeds"
    )
    assert (
        "at 4 stages worse than flush (\N{MINUS SIGN}6.0 points, 91.0 % against 97.0 %)."
        in sentences[0]
    )
    assert (
        "at 4 stages not every run trains (1 of 3 runs: seed 0 diverged, loss no number at batch 10)."
        in sentences[1]
    )
    assert (
        sentences[2] == "At 2 stages stash, none: as good as flush, within the spread over seeds."
    )
    assert sentences[3] == "At 4 stages stash: worse than flush; none: not every run trains."


def test_rules_are_held_against_flush_with_the_same_optimizer(results, runs):
    """Adam beside SGD would compare optimizers."""
    records = (
        *results.records,
        *runs("flush", (0.5, 0.51, 0.52), optimizer="adam"),
        *runs("xpipe", (0.5, 0.51, 0.52), optimizer="adam"),
    )
    both = replace(
        results,
        records=records,
        experiment=replace(results.experiment, rules=("stash", "none", "xpipe")),
    )
    verdict = both.conclusions[Group("digits", "adam", "xpipe", 2, 1)]
    assert verdict.standing.value == "holds"


def test_a_speed_up_counts_simulated_seconds_and_batches(results):
    """The same curve at half the seconds per batch arrives twice as soon."""
    group = Group("digits", "sgd", "stash", 2, 1)
    assert results.batches_to_target(group) == results.batches_to_target(group.baseline)
    assert results.speed_up(group) == pytest.approx(2.0)


def test_flush_is_timed_at_its_fastest(results):
    """With one micro-batch it would stand still most of the time, and everything would look fast
    beside it.
    """
    group = Group("digits", "sgd", "stash", 2, 1)
    fastest = results.fastest[group]
    assert fastest == Group("digits", "sgd", "flush", 2, 2)
    slower = {
        **results.throughputs,
        fastest: replace(results.throughputs[fastest], simulated_s=0.4),
    }
    assert replace(results, throughputs=slower).speed_up(group) == pytest.approx(4.0)


def test_a_rule_of_which_one_run_never_arrives_has_no_speed_up(results):
    """A mean over those that arrive would flatter it."""
    group = Group("digits", "sgd", "none", 4, 1)
    assert results.batches_to_target(group) is None
    assert results.speed_up(group) is None


def test_the_json_has_every_loss_or_means_where_it_is_to_be_small(results):
    """Raw records are what others will want to look at."""
    whole, thin = (json.loads(results.as_json(thin=small)) for small in (False, True))
    assert whole["records"][0]["losses"] == list(results.records[0].losses)
    assert len(whole["records"]) == len(results.records)
    assert whole["question"]["rules"] == ["stash", "none"]
    assert {verdict["standing"] for verdict in whole["verdicts"]} == {
        "holds",
        "loses",
        "does not train",
    }
    assert thin["records"][0]["losses_every"] == 1
    assert len(results.as_json().splitlines()) < 100


def test_the_odds_of_luck_are_said(results):
    """Twenty comparisons of three seeds have one that is luck."""
    assert "less than once in 20 comparisons each way; there are 4 here" in results.significance()
    alone = replace(results, experiment=replace(results.experiment, seeds=1))
    assert "no conclusions are drawn" in alone.significance()
