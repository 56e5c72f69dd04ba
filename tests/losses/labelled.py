"""Models that compute losses themselves, from labels among their inputs."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.batches.batch import make_batch
from penstock.losses.traced_loss import ModelLoss

WORDS, SAMPLES, TOKENS = 5, 7, 4


class Labelled(nn.Module):
    """A model that computes losses itself, each as `compute(model, scores, labels)` says."""

    def __init__(self, *computes):
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head = nn.Embedding(WORDS, 3), nn.Linear(3, WORDS)
        self.register_buffer("rates", torch.tensor([0.5, 1.0, 2.0, 0.0, 4.0]))
        self.gains = nn.Parameter(torch.ones(WORDS))
        self.computes = computes

    def forward(self, ids, labels):
        """Run the model."""
        scores = self.head(torch.tanh(self.embed(ids)))
        return scores, [compute(self, scores, labels) for compute in self.computes]


def likelihood(scores, labels, **options):
    """Return a cross-entropy over all tokens."""
    return functional.cross_entropy(scores.reshape(-1, WORDS), labels.reshape(-1), **options)


def count(labels):
    """Return the number of tokens that are not padding."""
    return (labels != -100).sum()


def one_hot(labels):
    """Return probabilities in place of classes."""
    return functional.one_hot(labels.clamp(min=0), WORDS).float()


def summed(scores, labels):
    """Return the sum over tokens."""
    return likelihood(scores, labels, reduction="sum")


def batch():
    """Return inputs with padding unevenly spread; a micro-batch is padding alone."""
    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(0, WORDS, (2, SAMPLES, TOKENS), generator=generator)
    labels[0, 1:] = labels[3:5] = labels[6, 2] = -100
    return {"ids": ids, "labels": labels}


def model_loss(model, x):
    """Return what reads the losses of a traced model, which are behind its scores."""
    return ModelLoss.of(ps.chain(model, x).modules, torch.device("cpu"))


def micro_batches_of(x):
    """Return a batch of three micro-batches."""
    return make_batch(x, x["labels"], 3, step=0, training=True)
