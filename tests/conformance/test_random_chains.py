"""Law 1 on random chains of many kinds of layers, under random schedules, cuts and recompute."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass

import pytest
import torch
from tests.conformance.catalogue import made_as
from tests.conformance.random_chains import random_batch, random_chain, random_lengths
from tests.conformance.reference import PlainTraining, differences, gradients, in_order_of
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.modules.side_loss import collecting_side_losses

SCHEDULES = [
    "gpipe",
    "1f1b",
    "eager-1f1b",
    "interleaved",
    "breadth-first",
    "hanayo",
    "zb-h1",
    "zb-v",
]
#: Schedules with two copies of each stage.
COPIES = ["chimera", "gems", "dualpipe"]
CHAINS = 80
SAMPLES = 10  # uneven in 3 and 4 micro-batches, and never a single sample (batch norm)


@dataclass(frozen=True)
class Case:
    """One random chain and how it is trained; everything follows from `seed`."""

    seed: int
    schedules: tuple[str, ...]

    def draw(self) -> tuple[nn.Sequential, ps.Schedule, list[int], object, list[str]]:
        """The model, schedule, cut, recompute and names of layers."""
        rng = random.Random(self.seed)
        model, names = random_chain(self.seed, rng.randint(6, 14))
        sizes = [(s, m) for s in (2, 3, 4) for m in (1, 2, 3, 4) if s <= len(model)]
        rng.shuffle(sizes)
        name = rng.choice(self.schedules)
        schedule = next(
            candidate for s, m in sizes if (candidate := made_as(name, s, m)) is not None
        )
        lengths = random_lengths(self.seed, len(model), schedule.stages)
        layers = sorted(rng.sample(range(len(model)), rng.randint(1, len(model))))
        recompute = rng.choice(["never", "except_last", "always", layers])
        return model, schedule, lengths, recompute, names


class PlainTrainingWithSideLosses(PlainTraining):
    """Plain training whose loss has the layers' side losses added."""

    def backward_in_parts(self, x, y, micro_batches):
        """As the parent, with `loss + sum(side losses)` of every micro-batch."""
        parts = min(micro_batches, len(x))
        rows = zip(torch.tensor_split(x, parts), torch.tensor_split(y, parts), strict=True)
        losses, rows_of_gradients = [], []
        for m, (inputs, targets) in enumerate(rows):
            self.model.zero_grad()
            with collecting_side_losses() as sides:
                loss = self.loss(self.forward(inputs, m), targets)
            share = len(inputs) / len(x)
            torch.autograd.backward(
                [loss, *(side for side in sides if side.requires_grad)],
                [torch.tensor(share)] * (1 + sum(side.requires_grad for side in sides)),
            )
            losses.append((loss + sum(sides)).detach() * share)
            rows_of_gradients.append(gradients(self.model))
        self.model.zero_grad()
        self.step += 1
        return torch.stack(losses).sum(), rows_of_gradients


def check(case: Case) -> None:
    """Two batches; losses, gradients and buffers equal the plain loop's to the bit."""
    model, schedule, lengths, recompute, names = case.draw()
    plain = PlainTrainingWithSideLosses(copy.deepcopy(model), functional.cross_entropy)
    pipe = ps.Pipeline(
        model,
        loss=functional.cross_entropy,
        balance=lengths,
        schedule=schedule,
        recompute=recompute,
        executor="threads",
        device="cpu",
    )
    where = f"{names} cut {lengths} under {schedule.name}, recompute {recompute}"
    single = all(len(ranks) == 1 for ranks in schedule.ranks_of_stage)
    for step in range(2):
        x, y = random_batch(case.seed + step, SAMPLES)
        loss, parts = plain.backward_in_parts(x, y, schedule.micro_batches)
        result = pipe.train_batch(x, y)
        expected = in_order_of(schedule, lengths, plain.model, parts)
        assert torch.allclose(result, loss, rtol=1e-6, atol=0), where
        assert differences(gradients(model), expected) == [], where
        if single:
            buffers = dict(model.named_buffers())
            assert differences(buffers, dict(plain.model.named_buffers())) == [], where
        pipe.zero_grad()
    pipe.close()


@pytest.mark.parametrize("seed", range(CHAINS))
def test_random_chains_equal_plain_training_to_the_bit(seed):
    """Whatever the layers do, the cut must not change what is learned."""
    check(Case(seed, tuple(SCHEDULES)))


@pytest.mark.parametrize("seed", range(1000, 1000 + CHAINS // 4))
def test_random_chains_with_copies_of_stages_equal_plain_training(seed):
    """Copies add up their gradients by rank, and nothing else differs."""
    check(Case(seed, tuple(COPIES)))
