"""Divisors that the graph of a loss shows, against the definition: how the loss adds up."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from penstock.losses.terms import (
    Term,
    UnknownForm,
    class_count,
    class_counts,
    detached,
    is_float,
    same,
    signed,
    terms_of,
)

WEIGHT = torch.tensor([0.2, 1.0, 3.0, 0.5])


def outputs(rows=6):
    """Four numbers for each row."""
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 4, generator=generator, dtype=torch.float64)


CLASSES = torch.tensor([0, 3, 2, 2, 1, 3])
LOSSES = {
    "mean": lambda x, y: x.square().mean(),
    "mean of a part": lambda x, y: x[:, 1].abs().mean(),
    "mean of means": lambda x, y: x.square().mean(dim=-1).mean(),
    "mean of sums": lambda x, y: x.square().sum(dim=1).mean(),
    "sum of means": lambda x, y: x.square().mean(1).sum(),
    "sum": lambda x, y: x.exp().sum(),
    "scaled sum": lambda x, y: -3 * x.square().sum() / 7,
    "sum by a count": lambda x, y: x.square().sum() / (y != 2).sum(),
    "count in front": lambda x, y: (1 / (y != 2).sum().double()) * x.square().sum(),
    "cross entropy": functional.cross_entropy,
    "ignoring": lambda x, y: functional.cross_entropy(x, y, ignore_index=2),
    "weighted": lambda x, y: functional.cross_entropy(x, y, WEIGHT.double(), ignore_index=3),
    "summed": lambda x, y: functional.cross_entropy(x, y, reduction="sum"),
    "squares": lambda x, y: functional.mse_loss(x, x.detach() + 1),
    "huber": lambda x, y: functional.smooth_l1_loss(x, torch.zeros_like(x), reduction="sum"),
    "logits": lambda x, y: functional.binary_cross_entropy_with_logits(x, torch.ones_like(x)),
    "binary": lambda x, y: functional.binary_cross_entropy(x.sigmoid(), x.detach().sigmoid()),
    "soft margins": lambda x, y: functional.soft_margin_loss(x, torch.ones_like(x)),
    "margins": lambda x, y: functional.multi_margin_loss(x, y[: len(x)]),
    "label margins": lambda x, y: functional.multilabel_margin_loss(x, torch.zeros_like(x).long()),
    "smooth": lambda x, y: functional.smooth_l1_loss(x, torch.zeros_like(x)),
    "mean of huber": lambda x, y: functional.huber_loss(x, torch.zeros_like(x)),
    "two dimensions": lambda x, y: functional.cross_entropy(
        x.reshape(-1, 2, 2, 1), y[: len(x), None, None].expand(-1, 2, 1) % 2
    ),
    "permuted": lambda x, y: x.square().mean(dim=(1, 0), keepdim=True).permute(1, 0).squeeze(),
    "negative dimension": lambda x, y: x.square().mean(dim=(-1, -2)),
    "divided twice": lambda x, y: (x.square().sum() / 3).div(torch.tensor(2.0)).double() * 0.5,
    "reshaped": lambda x, y: x.square().mean().reshape(1).squeeze().unsqueeze(0).clone().float(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_the_sum_of_its_parts_by_their_divisors(name):
    """Whatever the parts: each times its own divisor, divided by that of the whole."""
    loss = LOSSES[name]
    x = outputs().requires_grad_()
    for cut in (1, 2, 5):
        whole = loss(x, CLASSES)
        (term,) = terms_of(whole)
        total = 0.0
        for part, classes in ((x[:cut], CLASSES[:cut]), (x[cut:], CLASSES[cut:])):
            value = loss(part, classes)
            divisor = terms_of(value)[0].divisor
            if value.isfinite():
                total += value.item() * divisor
        assert total / term.divisor == pytest.approx(whole.item(), rel=1e-5)
        assert term.leaf is None
    assert term.summed is (
        name
        in (
            "sum",
            "scaled sum",
            "summed",
            "huber",
            "sum of means",
            "sum by a count",
            "count in front",
            "divided twice",
        )
    )


def test_terms_of_a_sum_or_difference_are_scaled_together():
    """Constants are no terms. A term that is multiplied by 0 counts nothing."""
    x = outputs().requires_grad_()
    loss = 2 * (x.square().mean() - x.sum() / 4 + 5.0) / 3
    assert [term.divisor for term in terms_of(loss)] == pytest.approx([36.0, 6.0])
    assert [term.summed for term in terms_of(loss)] == [False, True]
    assert terms_of(0 * x.sum() + x.mean()) == [Term(0.0), Term(24.0, elements=24)]
    assert terms_of(x.sum() / torch.tensor(0.0))[0].divisor == 0.0
    assert terms_of(x.sum() * float("inf"))[0].divisor == 0.0


@pytest.mark.parametrize("reduce", [torch.sum, torch.mean, lambda stack: stack.mean(0)])
def test_numbers_in_a_stack_are_terms_of_their_own(reduce):
    """As if they were added; constants are none, and a stack of rows is reduced as a whole."""
    x = outputs().requires_grad_()
    first, second = x.square().sum(), functional.cross_entropy(x, CLASSES)
    for numbers in ([first, second], [first, torch.tensor(1.0), second]):
        count = 1 if reduce is torch.sum else len(numbers)
        terms = terms_of(-reduce(torch.stack(numbers)) / 4)
        assert [abs(term.divisor) for term in terms] == pytest.approx([4 * count, 24 * count])
        assert [term.summed for term in terms] == [True, False]
    rows = terms_of(reduce(torch.stack([x[0], x[1]]).reshape(-1)))
    assert [term.elements for term in rows] == [8]
    whole = reduce(torch.stack([x[0], x[1]]))
    if whole.dim() == 0:
        assert [term.elements for term in terms_of(whole)] == [8]


@pytest.mark.parametrize(
    ("loss", "elements"),
    [
        (lambda x: x.sum(), 24),
        (lambda x: x.mean(), 24),
        (lambda x: x.mean(0).sum(), 4),
        (lambda x: x.sum(1).mean(0), 6),
        (lambda x: x.sum((0, 1)) / 3, 24),
        (lambda x: functional.mse_loss(x, x.detach() + 1), 24),
        (lambda x: functional.cross_entropy(x[:5], CLASSES[:5]), 20),
    ],
)
def test_a_term_has_the_number_of_elements_that_it_reduces(loss, elements):
    """Those of the last reduction, which are not divisible by the samples if it is over others."""
    (term,) = terms_of(loss(outputs().requires_grad_()))
    assert term.elements == elements


def test_a_bare_likelihood_has_its_node_and_a_scaled_one_has_not():
    """By the node the classes are counted, which a factor would change."""
    x = outputs().requires_grad_()
    loss = functional.cross_entropy(x, CLASSES)
    assert terms_of(loss)[0].node.name() == "NllLossBackward0"
    assert terms_of(2 * loss)[0].node is None
    assert terms_of(x.mean())[0].node is None


def test_a_leaf_is_the_loss_of_the_model_itself():
    """With the factor by which the caller multiplies it."""
    leaf = torch.tensor(2.0, requires_grad=True)
    assert terms_of(leaf) == [Term(1.0, leaf=leaf)]
    (term,) = terms_of(leaf * 4)
    assert (term.divisor, term.leaf is leaf) == (0.25, True)
    with pytest.raises(UnknownForm, match="no graph"):
        terms_of(torch.tensor(2.0))


def test_other_forms_are_unknown_by_the_name_of_their_node():
    """No guess is made."""
    x = outputs().requires_grad_()
    for loss, words in (
        (x.mean().sqrt(), "SqrtBackward"),
        (x.mean() * x.sum(), "MulBackward"),
        (1 / x.sum(), "ReciprocalBackward|division by what"),
        (x.max(), "MaxBackward"),
        (functional.cross_entropy(x[:1], CLASSES[:1], reduction="none").squeeze(), "NllLoss"),
        (functional.mse_loss(x[:1, 0], x[:1, 0].detach(), reduction="none").squeeze(), "MseLoss"),
        (torch.ones(()) / x.sum(), "a division by what depends on outputs"),
    ):
        with pytest.raises(UnknownForm, match=words):
            terms_of(loss)


@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize("ignored", [-100, 2, 0, 9])
def test_classes_are_counted_without_those_that_are_ignored(weight, ignored):
    """A slow reference: one target after the other."""
    targets = [
        torch.tensor([0, 3, 2, ignored, 1]),
        torch.tensor([[ignored, 2]]),
        torch.empty(0).long(),
    ]
    expected = [
        sum(
            1.0 if weight is None else float(weight[target])
            for target in row.flatten().tolist()
            if target != ignored
        )
        for row in targets
    ]
    assert class_counts(targets, weight, ignored) == pytest.approx(expected)
    for target, count in zip(targets, expected, strict=True):
        assert class_count(target, weight, ignored) == pytest.approx(count)
    with pytest.raises(UnknownForm, match="targets that depend on outputs"):
        class_count(targets[0].to("meta"), weight, ignored)
    with pytest.raises(UnknownForm, match="targets that depend on outputs"):
        class_count(targets[0], torch.empty(4, device="meta"), ignored)


def test_a_likelihood_of_targets_without_contents_is_unknown():
    """Their classes depend on outputs."""
    x = outputs().to("meta").requires_grad_()
    with pytest.raises(UnknownForm, match="targets that depend on outputs"):
        terms_of(functional.cross_entropy(x, CLASSES.to("meta")))


def test_numbers_of_nodes_are_signed_and_counts_equal_up_to_rounding():
    """Nodes store -100 as an unsigned number of 64 bits."""
    assert [signed(n) for n in (0, 5, 2**63 - 1, 2**63, 2**64 - 100)] == [
        0,
        5,
        2**63 - 1,
        -(2**63),
        -100,
    ]
    assert same(1.0, 1.0 + 9e-7)
    assert not same(1.0, 1.0 + 2e-6)
    assert same(1.0, 1.1, 0.2)
    assert same(0.0, 1e-13)
    assert not same(0.0, 1e-11)
    x = torch.ones(1, requires_grad=True)
    assert not detached(x).requires_grad
    assert detached("x") == "x"
    kinds = [1.0, x, x.long(), x.to(torch.complex64), x.bool()]
    assert [is_float(kind) for kind in kinds] == [False, True, False, True, False]
