"""Training with replicas, for processes and threads."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import penstock as ps

#: By name: data parallelism on two and three ranks, and two pipelines in opposite directions.
SCHEDULES = {
    "two": "\n".join(f"rank {r} | 0F{r} 0F{r + 2} 0B{r} 0B{r + 2} 0U1" for r in range(2)),
    "three": "\n".join(f"rank {r} | 0F{r} 0F{r + 3} 0B{r} 0B{r + 3} 0U1" for r in range(3)),
    "both ways": """rank 0 | 0F0 1F1 1B1 0F2 1F3 1B3 0B0 0B2 0U1 1U1
rank 1 | 0F1 1F0 1B0 0F3 1F2 1B2 0B1 0B3 0U1 1U1""",
}


class Rarely(nn.Module):
    """A layer with a parameter for micro-batches with a positive sum, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))
        self.unused = nn.Parameter(torch.ones(6))

    def forward(self, x):
        """Scale some micro-batches."""
        return x * self.scale if bool(x.sum() > 0) else x * 1.0


def model():
    """Return four layers."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Linear(6, 40), nn.Linear(40, 6), Rarely(), nn.Sequential(nn.Tanh(), nn.Linear(6, 3))
        )


def batch(number):
    """Return twelve samples."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(12, 6, generator=generator), torch.randn(12, 3, generator=generator)


def sgd(parameters):
    """Return an optimizer with state."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def trained(schedule, options, executor):
    """Train six batches, two for each step; freeze and thaw a layer meanwhile."""
    programs = ps.Schedule.parse(SCHEDULES[schedule])
    network = model()
    pipe = ps.Pipeline(
        network,
        loss=functional.mse_loss,
        balance=[5] if programs.stages == 1 else [2, 3],
        schedule=programs,
        executor=executor,
        **{"optimizer": sgd, "accumulate": 2, "deadline_s": 60, **options},
    )
    losses = []
    for number in range(6):
        if number in (2, 4):
            network[0].requires_grad_(number == 4)
        losses.append(float(pipe.train_batch(*batch(number))))
    weights = {name: value.clone() for name, value in pipe.model_state().items()}
    state = pipe.optimizer_state_dict()
    pipe.close()
    return {"losses": losses, "weights": weights, "state": state}
