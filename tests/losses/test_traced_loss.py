"""Counts in graphs of models that compute their loss; tests/losses/test_model_losses.py trains them."""

from __future__ import annotations

import random

import pytest
import torch
from torch import fx, nn

from penstock.losses.traced_loss import ModelLoss, _argument, _column, _depends_on_contents

aten = torch.ops.aten


@pytest.mark.parametrize("seed", range(10))
def test_the_weight_of_a_micro_batch_is_its_part_of_all_counts(seed):
    """A sum counts 1; without any count the shares of samples are taken."""
    choose = random.Random(seed)
    counts = [choose.choice([0.0, 1.0, 2.5, 4.0]) for _ in range(4)]
    shares = [0.1, 0.2, 0.3, 0.4]
    total = sum(counts)
    expected = [count / total for count in counts] if total else shares
    assert _column(counts, shares) == pytest.approx(expected)
    assert _column([None] * 4, shares) == [1.0] * 4
    assert _column([0.0] * 4, shares) == shares
    assert _column([None, 2.0, 2.0, None], shares) == [0.0, 0.5, 0.5, 0.0]


def test_only_a_last_layer_that_is_traced_computes_a_loss_of_its_own():
    """A stage may have no layers."""
    assert ModelLoss.of([], torch.device("cpu")) is None
    assert ModelLoss.of([nn.Linear(1, 1)], torch.device("cpu")) is None


def test_arguments_are_found_by_name_in_the_schema():
    """By keyword, by position, or the default of the caller."""
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    plain = graph.call_function(aten.cross_entropy_loss.default, (x, y))
    full = graph.call_function(aten.cross_entropy_loss.default, (x, y, None, 2, -7))
    named = graph.call_function(aten.cross_entropy_loss.default, (x, y), {"ignore_index": 5})
    found = [_argument(node, "ignore_index", -100) for node in (plain, full, named)]
    assert found == [-100, -7, 5]
    assert [_argument(node, "reduction", 1) for node in (plain, full, named)] == [1, 2, 1]
    assert _argument(full, "no_such_argument", 9) == 9


def test_numbers_of_rows_do_not_depend_on_contents():
    """A contrastive loss takes each sample's own place as its class."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    size = graph.call_function(aten.sym_size.int, (x, 0))
    places = graph.call_function(aten.arange.default, (size,))
    zeros = graph.call_function(aten.zeros_like.default, (x,))
    doubled = graph.call_function(aten.mul.Tensor, (x, 2))
    both = graph.call_function(aten.add.Tensor, (places, doubled))
    neither = graph.call_function(aten.add.Tensor, (places, zeros))
    found = [
        _depends_on_contents(node) for node in (x, size, places, zeros, doubled, both, neither)
    ]
    assert found == [True, False, False, False, True, True, False]
