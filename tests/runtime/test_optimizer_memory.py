"""A plan's memory limits under another optimizer, against a count in plain loops."""

from __future__ import annotations

import random
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from penstock.errors import PlanError
from penstock.runtime.optimizer_memory import check_optimizer_memory

#: Numbers per parameter that optimizers keep, by their options.
STATES = [
    (lambda parameters: torch.optim.SGD(parameters, lr=0.1), 0, "SGD", "sgd"),
    (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), 1, "SGD", "sgd"),
    (torch.optim.AdamW, 2, "AdamW", "adamw"),
    (lambda parameters: torch.optim.Adam(parameters, amsgrad=True), 3, "Adam", "adam"),
]


def plan_of(rng, *, states):
    """Return a plan with its memory, and the bytes of each rank's parameters."""
    sizes = [rng.randint(1, 900) for _ in range(6)]
    cuts = sorted(rng.sample(range(1, 6), 2))
    bounds = list(zip([0, *cuts], [*cuts, 6], strict=True))
    stages_of_rank = [[0, 2], [1], [2]]
    held = [sum(sum(sizes[slice(*bounds[s])]) for s in stages) for stages in stages_of_rank]
    peaks = [rng.randint(0, 2000) for _ in stages_of_rank]
    plan = SimpleNamespace(
        optimizer="adam",
        optimizer_states=states,
        memory_limits=(),
        bounds=bounds,
        predicted=SimpleNamespace(peak_memory=peaks),
        schedule=SimpleNamespace(stages_of_rank=stages_of_rank),
    )
    chain = SimpleNamespace(weights=[SimpleNamespace(parameter_bytes=size) for size in sizes])
    return plan, chain, held, peaks


@pytest.mark.parametrize("seed", range(60))
def test_the_ranks_that_would_exceed_their_limits_are_listed(seed):
    """With what each would hold and may hold; a limit that is met exactly is kept."""
    rng = random.Random(seed)
    make, states, class_name, name = STATES[seed % len(STATES)]
    plan, chain, held, peaks = plan_of(rng, states=float(rng.randint(0, 2)))
    more = states - plan.optimizer_states
    needed = [peak + max(0, more) * size for peak, size in zip(peaks, held, strict=True)]
    plan.memory_limits = tuple(int(need) + rng.choice([-1, 0, 0, 1]) for need in needed)
    plan.optimizer = rng.choice(["adam", ""])
    optimizer = make([nn.Parameter(torch.ones(1))])
    over = [rank for rank in range(3) if needed[rank] > plan.memory_limits[rank]]
    if more <= 0 or not over:
        check_optimizer_memory(plan, chain, optimizer)
        return
    with pytest.raises(PlanError) as error:
        check_optimizer_memory(plan, chain, optimizer)
    first, *lines, last = str(error.value).splitlines()
    planned, count = plan.optimizer_states, plan.optimizer_states
    assert first == (
        f"the plan is for an optimizer that keeps {planned:g} number{'s' * (count != 1)} for each "
        f"parameter ({plan.optimizer or 'SGD with momentum'}), and {class_name} keeps {states}:"
    )
    assert [
        int(re.match(r"  rank (\d) would hold .* and may hold", line)[1]) for line in lines
    ] == (over)
    assert last == f"Plan for this optimizer: ps.plan(…, optimizer={name!r})"


def test_figures_have_units():
    """Of memory."""
    plan, chain, held, _ = plan_of(random.Random(0), states=0.0)
    plan.predicted.peak_memory = [2 * 2**20 - held[0], 0, 0]
    plan.memory_limits = (2**20, 10**9, 10**9)
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], momentum=0.9)
    with pytest.raises(PlanError, match=r"\n  rank 0 would hold 2\.0 MiB and may hold 1\.0 MiB\n"):
        check_optimizer_memory(plan, chain, optimizer)


def test_plans_without_limits_and_optimizers_of_unknown_state_are_accepted():
    """There is nothing to compare."""
    plan, chain, _, _ = plan_of(random.Random(0), states=0.0)
    adam = torch.optim.Adam([nn.Parameter(torch.ones(1))])
    check_optimizer_memory(plan, chain, adam)

    class Unknown(torch.optim.Optimizer):
        """An optimizer whose state shows only after a step."""

        def __init__(self, parameters):
            super().__init__(parameters, {})

    plan.memory_limits = (0, 0, 0)
    check_optimizer_memory(plan, chain, Unknown([nn.Parameter(torch.ones(1))]))
    with pytest.raises(PlanError):
        check_optimizer_memory(plan, chain, adam)
