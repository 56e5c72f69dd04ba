"""Losses that models compute themselves, from labels among their inputs, against plain PyTorch on
the undivided batch.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import StageFailed

SAMPLES, TOKENS, WORDS = 7, 6, 11


def its_own(output, _):
    """The loss is in the model's output."""
    return output["loss"]


class Labelled(nn.Module):
    """A model that computes its own loss, as `compute(model, scores, labels)` says."""

    def __init__(self, compute):
        super().__init__()
        self.embed, self.inner, self.head = (
            nn.Embedding(WORDS, 8),
            nn.Linear(8, 8),
            nn.Linear(8, WORDS),
        )
        self.compute = compute

    def forward(self, ids, labels):
        """Run the model."""
        scores = self.head(torch.tanh(self.inner(self.embed(ids))))
        return {"loss": self.compute(scores, labels), "scores": scores}


def tokens_that_count(scores, labels):
    """A masked language model's."""
    return functional.cross_entropy(scores.view(-1, WORDS), labels.view(-1))


def by_hand(scores, labels):
    """The same, divided by hand."""
    total = functional.cross_entropy(scores.view(-1, WORDS), labels.view(-1), reduction="sum")
    return total / (labels != -100).sum()


def at_least_one(scores, labels):
    """The same where no token counts; such numbers of micro-batches do not add up to the batch's."""
    expected = functional.cross_entropy(scores.view(-1, WORDS), labels.view(-1), reduction="sum")
    return expected / (labels != -100).sum().clamp(min=1)


def halves(scores, labels):
    """Two terms that count alike."""
    return (
        tokens_that_count(scores, labels) + 0.5 * tokens_that_count(scores.flip(-1), labels)
    ) / 2


def squares(scores, _):
    """A mean over elements."""
    return functional.mse_loss(scores, torch.ones_like(scores))


def total(scores, labels):
    """A sum."""
    return functional.cross_entropy(scores.view(-1, WORDS), labels.view(-1), reduction="sum") / 20


def contrastive(scores, _):
    """Samples against each other, as CLIP's."""
    one = scores.mean(1)
    return functional.cross_entropy(one @ one.t(), torch.arange(one.shape[0]))


def penalised(scores, labels):
    """Two terms that count otherwise."""
    return tokens_that_count(scores, labels) + scores.square().mean()


def batch():
    """Padding unevenly spread; the second of three micro-batches is padding alone."""
    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(0, WORDS, (2, SAMPLES, TOKENS), generator=generator)
    labels[0, 1:] = labels[3:5] = labels[6, 2] = -100
    return {"ids": ids, "labels": labels}


def make_model(compute):
    """The model, always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return Labelled(compute)


def check(model, plain, x, schedule, loss=its_own):
    """Two batches and an evaluation are those of the undivided batch."""
    expected = loss(plain(**x), None)
    expected.backward()
    expected = float(expected.detach())
    traced = ps.chain(model, x)
    count = len(traced)
    pipe = ps.Pipeline(
        traced,
        loss=loss,
        balance=[count // 2, count - count // 2],
        schedule=schedule,
        micro_batches=3,
        executor="threads",
    )
    labels = x["labels"]
    assert float(pipe.eval_batch(x, labels)) == pytest.approx(expected, rel=1e-5)
    for number in range(2):
        assert float(pipe.train_batch(x, labels)) == pytest.approx(expected, rel=1e-5)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            wanted = torch.zeros_like(other) if other.grad is None else other.grad
            torch.testing.assert_close(one.grad, (number + 1) * wanted, rtol=2e-4, atol=2e-6)
    return pipe


@pytest.mark.parametrize(
    ("compute", "schedule"),
    [
        (tokens_that_count, "gpipe"),
        (tokens_that_count, "1f1b"),
        (tokens_that_count, "zb-h1"),
        # What a graph shows of its divisor does not depend on the schedule.
        (by_hand, "gpipe"),
        (at_least_one, "gpipe"),
        (halves, "1f1b"),
        (squares, "zb-h1"),
        (total, "1f1b"),
    ],
)
def test_the_loss_inside_a_traced_model_is_that_of_the_undivided_batch(compute, schedule):
    """Its graph shows the divisor, and every rank has the labels."""
    check(make_model(compute), make_model(compute), batch(), schedule)


class ScoresFirst(nn.Module):
    """The same model with its loss behind the scores."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, labels):
        """Run the model."""
        output = self.model(ids, labels)
        return {"scores": output["scores"], "loss": output["loss"]}


def with_a_term(output, _):
    """The model's loss and a term of the caller over the same values."""
    return output["loss"] + 0.1 * output["scores"].mean()


@pytest.mark.parametrize(
    ("compute", "loss"), [(tokens_that_count, its_own), (squares, its_own), (squares, with_a_term)]
)
def test_the_loss_may_be_behind_other_outputs_and_have_terms_of_the_caller(compute, loss):
    """Its place among the outputs says nothing about its divisor."""
    model, plain = ScoresFirst(make_model(compute)), ScoresFirst(make_model(compute))
    check(model, plain, batch(), "1f1b", loss)


@pytest.mark.parametrize("compute", [contrastive, penalised])
def test_a_loss_inside_a_traced_model_that_cannot_be_divided_is_refused(compute):
    """Its samples depend on each other, or its terms have different divisors."""
    model, x = make_model(compute), batch()
    pipe = ps.Pipeline(
        ps.chain(model, x), loss=its_own, balance=[1, 2], micro_batches=3, executor="threads"
    )
    with pytest.raises(StageFailed, match=r"the model computes its loss itself, .* Ways out"):
        pipe.train_batch(x, x["labels"])


@pytest.mark.parametrize("more", [{}, {"num_items_in_batch": 20}])
def test_a_language_model_of_transformers_trains_as_on_one_device(more):
    """Labels of -100, uneven over the batch: version 0.1 was off by 192 % of the largest gradient."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1,
        n_embd=8,
        n_head=2,
        vocab_size=WORDS,
        n_positions=8,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config)
    known = batch()
    x = {"input_ids": known["ids"], "labels": known["labels"], **more}
    check(model, copy.deepcopy(model), x, "1f1b", lambda output, _: output.loss)


class Last(nn.Module):
    """The loss as the last of a list of layers, labels carried along."""

    def __init__(self, compute):
        super().__init__()
        self.head, self.compute = nn.Linear(8, WORDS), compute

    def forward(self, value):
        """Run the layer."""
        hidden, labels = value
        scores = self.head(hidden)
        return {"loss": self.compute(scores, labels), "scores": scores}


class First(nn.Module):
    """Embeds, and hands the labels on."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)

    def forward(self, value):
        """Run the layer."""
        return self.embed(value["ids"]), value["labels"]


def test_a_list_of_layers_that_computes_its_loss_must_weight_by_samples():
    """The last stage does not know the labels of later micro-batches, so the loss must be a mean
    over samples.
    """
    x = batch()
    whole = {"ids": x["ids"], "labels": x["labels"].clamp(0)}
    for compute in (tokens_that_count, squares, total):
        layers = [First(), Last(compute)]
        plain = copy.deepcopy(nn.Sequential(*layers))
        expected = plain(whole)["loss"]
        expected.backward()
        pipe = ps.Pipeline(
            layers, loss=its_own, balance=[1, 1], micro_batches=3, executor="threads"
        )
        loss = float(pipe.train_batch(whole, whole["labels"]))
        assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
        torch.testing.assert_close(layers[1].head.weight.grad, plain[1].head.weight.grad)
    pipe = ps.Pipeline(
        [First(), Last(tokens_that_count)],
        loss=its_own,
        balance=[1, 1],
        micro_batches=3,
        executor="threads",
    )
    with pytest.raises(StageFailed, match=r"is divided by .* was expected: .* Ways out"):
        pipe.train_batch(x, x["labels"])
    weighed = [First(), Last(tokens_that_count)]
    plain = copy.deepcopy(nn.Sequential(*weighed))
    plain(x)["loss"].backward()
    pipe = ps.Pipeline(
        weighed,
        loss=its_own,
        balance=[1, 1],
        micro_batches=3,
        executor="threads",
        loss_weight=lambda labels: (labels != -100).sum(),
    )
    pipe.train_batch(x, x["labels"])
    torch.testing.assert_close(weighed[1].head.weight.grad, plain[1].head.weight.grad)


def features(scores, _):
    """A sum over features of the mean over samples: of the parts of a batch it is no sum."""
    return scores.square().mean((0, 1)).sum()


def stacked(scores, labels):
    """A mean of two means."""
    return torch.stack([squares(scores, labels), tokens_that_count(scores, labels)]).mean()


def test_a_loss_of_a_list_of_layers_over_other_values_than_those_of_samples_is_refused():
    """Its sums over parts of the batch would be taken for sums over samples."""
    x = batch()
    whole = {"ids": x["ids"], "labels": x["labels"].clamp(0)}
    for compute in (features, stacked):
        layers = [First(), Last(compute)]
        plain = copy.deepcopy(nn.Sequential(*layers))
        pipe = ps.Pipeline(
            layers, loss=its_own, balance=[1, 1], micro_batches=3, executor="threads"
        )
        if compute is features:
            with pytest.raises(StageFailed, match=r"values that are not those of single samples"):
                pipe.train_batch(whole, whole["labels"])
            continue
        loss = float(pipe.train_batch(whole, whole["labels"]))
        assert loss == pytest.approx(float(plain(whole)["loss"].detach()), rel=1e-5)
