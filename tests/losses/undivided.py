"""Models, batches and losses, and their plain training on the undivided batch."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional

import penstock as ps

CLASSES, TOKENS, SAMPLES = 7, 5, 7
WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5, 1.5, 0.1, 2.0])


def model(seed=1):
    """Seven numbers for each of five tokens; no token sees another."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Embedding(CLASSES, 12),
            nn.Linear(12, 12),
            nn.Tanh(),
            nn.Linear(12, 12),
            nn.Tanh(),
            nn.Linear(12, CLASSES),
        )


def batch(number=0):
    """Seven samples whose padding is unevenly spread: of three micro-batches, of 3, 2 and 2, the
    second is padding alone.
    """
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randint(0, CLASSES, (2, SAMPLES, TOKENS), generator=generator)
    y[0, :3] = y[3:5] = y[6, number % 3] = -100
    return x, y


def rows(output, target):
    """Tokens one by one."""
    return output.flatten(0, 1), target.flatten()


def cross_entropy(output, target, **options):
    """Of tokens."""
    return functional.cross_entropy(*rows(output, target), **options)


def masked_mean(output, target, least=None):
    """A mean over tokens that count, as written by hand."""
    mask = (target != -100).float()
    losses = cross_entropy(output, target.clamp(0), reduction="none").view_as(mask)
    count = mask.sum() if least is None else mask.sum().clamp(min=least)
    return (losses * mask).sum() / count


def chosen_mean(output, target):
    """The same by choosing."""
    return functional.cross_entropy(output[target != -100], target[target != -100])


def sum_and_count(output, target):
    """The same as a pair."""
    return cross_entropy(output, target, reduction="sum"), (target != -100).sum()


def contrastive(output, _):
    """Each sample against all others of the batch: InfoNCE."""
    one, other = (functional.normalize(part, dim=-1) for part in (output.mean(1), output[:, 0]))
    return functional.cross_entropy(one @ other.T / 0.1, torch.arange(len(one)))


class Transposed(nn.CrossEntropyLoss):
    """A loss module of the user's own."""

    def forward(self, output, target):
        """Classes come second."""
        return super().forward(output.transpose(1, 2), target)


LOSSES = {
    "ignored tokens": cross_entropy,
    "class weights": functools.partial(cross_entropy, weight=WEIGHTS),
    "label smoothing": functools.partial(cross_entropy, weight=WEIGHTS, label_smoothing=0.1),
    "module": Transposed(weight=WEIGHTS),
    "masked": masked_mean,
    "masked, at least 1": functools.partial(masked_mean, least=1),
    "chosen": chosen_mean,
    "sum and count": sum_and_count,
    "sum": functools.partial(cross_entropy, reduction="sum"),
    "sum over a number": lambda output, target: cross_entropy(output, target, reduction="sum") / 9,
    "sum over samples": lambda output, target: (
        cross_entropy(output, target, reduction="sum") / len(target)
    ),
    "mean": lambda output, target: (output - target.unsqueeze(-1)).square().mean(),
    "half a mean": lambda output, target: 0.5 * functional.mse_loss(output.sum(-1), target.float()),
    "sum over samples of means": lambda output, _: output.square().mean((1, 2)).sum(),
}


def plain(loss, x, y, net=None):
    """Loss and gradients of the undivided batch in plain PyTorch."""
    net = model() if net is None else net
    value = loss(net(x), y)
    if isinstance(value, tuple):
        value = value[0] / value[1]
    value.backward()
    return float(value.detach()), {name: p.grad for name, p in net.named_parameters()}


def pipeline(net, loss, schedule="1f1b", micro_batches=3, **options):
    """In this process, over as many stages as the schedule has."""
    if isinstance(schedule, str):
        stages = {"chimera": 4, "interleaved": 4}.get(schedule, 3)
        micro_batches = 4 if schedule in ("chimera", "interleaved") else micro_batches
        schedule = ps.schedule(schedule, stages, micro_batches)
    balance = {2: [3, 3], 3: [2, 2, 2], 4: [1, 1, 2, 2]}[schedule.stages]
    options.setdefault("executor", "threads")
    return ps.Pipeline(net, loss=loss, balance=balance, schedule=schedule, **options)


def train(pipe, batches):
    """On several, as a cause may not be in the first."""
    return [float(pipe.train_batch(*batch(number))) for number in range(batches)]


def check_gradients(net, expected, times=1):
    """Those of the undivided batch, but for rounding."""
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(
            parameter.grad, times * expected[name], rtol=2e-4, atol=2e-6 * times, msg=name
        )
