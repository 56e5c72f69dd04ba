"""Replicas in processes train to the same bits as replicas in threads, by whichever way sums go."""

from __future__ import annotations

import os

import pytest
import torch
from tests.stage.gradients.jobs import SCHEDULES, trained

import penstock as ps
from penstock.transport.same_host import SameHostTransport


def over_network(far: tuple[int, ...], schedule: str, options: dict[str, object]) -> object:
    """Train in a process; ranks in `far` are reached over the network alone."""
    rank = int(os.environ["RANK"])
    connect = SameHostTransport.connect
    SameHostTransport.connect = lambda self, store, size, *, willing: connect(
        self, store, size, willing=rank not in far
    )
    return trained(schedule, options, None)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shared_memory_sums_to_the_bits_of_threads(schedule):
    """With a parameter that is frozen and thawed, and gradients of two batches per step."""
    ranks = ps.Schedule.parse(SCHEDULES[schedule]).ranks
    reference = trained(schedule, {}, "threads")
    for result in ps.launch(over_network, ranks, (), schedule, {}, threads=1):
        assert result["losses"] == reference["losses"]
        for name, value in reference["weights"].items():
            assert torch.equal(result["weights"][name], value), name


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_buckets_between_hosts_sum_to_the_bits_of_threads(schedule):
    """Sent while the last backward runs, in the order of the ranks."""
    ranks = ps.Schedule.parse(SCHEDULES[schedule]).ranks
    reference = trained(schedule, {}, "threads")
    for result in ps.launch(over_network, ranks, (1,), schedule, {}, threads=1):
        assert result["losses"] == reference["losses"]
        for name, value in reference["weights"].items():
            assert torch.equal(result["weights"][name], value), name


@pytest.mark.parametrize(("hook", "tolerance"), [("fp16", 2e-3), ("bf16", 2e-2), ("powersgd", 0.3)])
def test_hooks_train_every_replica_alike_and_near_exact_sums(hook, tolerance):
    """All ranks end with the same bits, which differ from those of exact sums."""
    exact = trained("three", {}, "threads")["weights"]
    results = ps.launch(over_network, 3, (1,), "three", {"gradient_hook": hook}, threads=1)
    weights = [result["weights"] for result in results]
    differences = []
    for name, value in exact.items():
        assert torch.equal(weights[0][name], weights[1][name])
        assert torch.equal(weights[0][name], weights[2][name])
        differences.append(float((weights[0][name] - value).abs().max()))
    assert 0 < max(differences) < tolerance


@pytest.mark.parametrize("hook", ["fp16", "powersgd"])
def test_a_hook_without_effect_warns(hook):
    """Threads sum exactly; who sets a hook learns that it does nothing."""
    with pytest.warns(UserWarning, match=f"gradient_hook='{hook}' has no effect here"):
        result = trained("two", {"gradient_hook": hook}, "threads")
    exact = trained("two", {}, "threads")
    assert result["losses"] == exact["losses"]
