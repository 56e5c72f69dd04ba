"""What ranks run in the tests, and what the same does in one process. Loaded by name in every rank:
nothing heavy here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from tests.conformance.models import CASES, made
from tests.runtime.failing import Trap
from tests.time_limits import HANG_S
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.schedule.op import Schedule


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """With momentum, so that there is state to keep."""
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


class Plain(torch.optim.Optimizer):
    """Momentum without torch's own constructor, which loads torch._dynamo: two seconds in every
    rank.
    """

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.param_groups = [{"params": params, "lr": 0.05}]
        self.state: dict[Any, Any] = {}

    def step(self) -> None:
        """Step."""
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                held = self.state.setdefault(parameter, {"momentum": torch.zeros_like(parameter)})
                held["momentum"].mul_(0.9).add_(parameter.grad)
                parameter.data.sub_(held["momentum"], alpha=self.param_groups[0]["lr"])


def everything(
    name: str, options: dict[str, Any], folder: Path | None, executor: str
) -> dict[str, Any]:
    """Train, evaluate, compare, save and look, in one go; the results are plain tensors."""
    options = {"optimizer": Plain, **options}
    case = CASES[name]
    model, x, y = made(case, 37)
    pipe = ps.Pipeline(model, loss=case.loss, executor=executor, seed=4, deadline_s=60, **options)
    results: dict[str, Any] = {}
    results["losses"] = [
        pipe.train_batch(x, y),
        pipe.train_batch(x[:16], y[:16]),
        pipe.train_batch(x[:2], y[:2]),
    ]
    results["streamed"] = list(pipe.train([(x[:8], y[:8]), (x[8:16], y[8:16])]))
    results["forward"] = pipe.forward(x)
    results["evaluated"] = pipe.eval_batch(x[:5], y[:5])
    comparison = pipe.compare_with_one_device(x, y)
    results["compared"] = (
        sorted(comparison.gradients),
        comparison.worst[1] if comparison.gradients else 0.0,
    )
    if folder is not None:
        pipe.save(folder / "ckpt")
    state = pipe.state_dict()
    results["loss before loading"] = pipe.train_batch(x, y)
    timeline = pipe.timeline()
    results["timeline"] = [
        tuple(str(e.op) for e in timeline.compute if e.rank == rank)
        for rank in range(timeline.ranks)
    ]
    if folder is not None:
        pipe.load(folder / "ckpt")
        results["loss after loading"] = pipe.train_batch(x, y)
    results["step"] = pipe.step
    pipe.close()
    return {**results, "state": state}


class Spread(nn.Module):
    """One tensor to several, of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        """Run the layer."""
        out = self.linear(x)
        return {
            "out": (out, [out.detach()]),
            "order": torch.arange(8).expand(len(x), 8),
            "mask": out > 0,
            "none": None,
            "two": 2,
        }


class Use(nn.Module):
    """Takes and gives the same nested value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, value: dict[str, Any]) -> dict[str, Any]:
        """Run the layer."""
        out, (still,) = value["out"]
        moved = torch.gather(self.linear(out), 1, value["order"]) * value["mask"] + still
        return {**value, "out": (moved, [still])}


class Gather(nn.Module):
    """The nested value back to one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 5)

    def forward(self, value: dict[str, Any]) -> torch.Tensor:
        """Run the layer."""
        return self.linear(value["out"][0] / value["two"])


def nested(programs: str, lengths: list[int], executor: str) -> dict[str, Any]:
    """A model with nested boundaries and a frozen beginning, under a schedule given as text;
    recomputed in part.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(16, 16),
            nn.ReLU(inplace=True),
            Spread(),
            Use(),
            nn.Identity(),
            Use(),
            Gather(),
        )
        x, y = torch.randn(12, 16), torch.randint(0, 5, (12,))
    model[0].requires_grad_(False)
    pipe = ps.Pipeline(
        model,
        loss=functional.cross_entropy,
        balance=lengths,
        schedule=Schedule.parse(programs),
        optimizer=Plain,
        recompute="except_last",
        executor=executor,
        deadline_s=60,
    )
    losses = [pipe.train_batch(x, y) for _ in range(3)]
    shorter = pipe.train_batch(x[:2], y[:2])
    state = pipe.state_dict()
    pipe.close()
    return {"losses": [*losses, shorter], "state": state}


def set_deadline(pipe: ps.Pipeline, deadline_s: float) -> None:
    """Let the ranks wait for each other's messages for some seconds from now on.

    Not from the start: on a busy machine a rank may start seconds after another one.
    """
    pipe._world._wire.deadline_s = pipe._world._near.deadline_s = deadline_s


def trapped(what: str, kind: str = "F", at: int = 1, deadline_s: float = HANG_S) -> Trap:
    """Two ranks train; the layer at the beginning of rank 1 does `what` in the second of its
    forwards or backwards, or in the one after `at` others. The deadline holds from step 1 on.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Trap(what, kind, at), nn.Linear(16, 4))
    pipe = ps.Pipeline(model, loss=functional.cross_entropy, balance=[1, 2], micro_batches=4)
    for step in range(3):
        if step == 1:
            set_deadline(pipe, deadline_s)
        pipe.train_batch(torch.randn(8, 16), torch.arange(8) % 4)
    return model[1]


def trapped_copy(what: str, deadline_s: float = HANG_S) -> None:
    """Two copies of one stage train; the one on rank 1 does `what` in the second backward of step
    1, when the other has come to their U. The deadline holds from step 1 on.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 16),
        Trap(what if os.environ["RANK"] == "1" else "pass", "B", 3),
        nn.Linear(16, 4),
    )
    pipe = ps.Pipeline(
        model,
        loss=functional.cross_entropy,
        balance=[3],
        schedule=Schedule.parse("rank 0 | 0F0 0B0 0U1\nrank 1 | 0F1 0B1 0F2 0B2 0U1"),
    )
    for step in range(3):
        if step == 1:
            set_deadline(pipe, deadline_s)
        pipe.train_batch(torch.randn(9, 16), torch.arange(9) % 4)


def tiny(optimizer: Any = None, executor: str = "processes") -> ps.Pipeline:
    """Return a pipeline of two stages that starts quickly."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    return ps.Pipeline(
        model,
        loss=functional.mse_loss,
        balance=[2, 1],
        schedule="1f1b",
        micro_batches=2,
        optimizer=optimizer or Plain,
        executor=executor,
        deadline_s=60,
    )


def tiny_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a batch for `tiny`; other numbers give other values."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)


def saved_by_two_ranks(folder: Path) -> None:
    """A checkpoint of two stages."""
    pipe = tiny(executor="threads")
    pipe.train_batch(*tiny_batch(0))
    pipe.save(folder)


def zero(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """torch's own: its state is not where others have theirs."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(params, optimizer_class=torch.optim.SGD, lr=0.1)


def checkpoint_verdicts(folder: Path) -> dict[str, Any]:
    """Save and load what must be refused, on two ranks; what they said, and whether they are what
    they were.
    """
    import torch.distributed as dist

    pipe = tiny()
    rank = dist.get_rank()
    verdicts: dict[str, Any] = {}

    def weights() -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in pipe.parameters()]

    def refused(action: Any) -> str:
        try:
            action()
        except ps.PenstockError as error:
            return str(error)
        return "taken"

    for step in (1, 2):
        pipe.train_batch(*tiny_batch(step))
        pipe.save(folder / f"step-{step}")
        pipe.save(folder / f"damaged-{step}")
    if rank == 1:
        file = next((folder / "damaged-1").glob("*stage-0001*"))
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    dist.barrier()
    before = weights()
    verdicts["damaged"] = refused(lambda: pipe.load(folder / "damaged-1"))
    same = [all(map(torch.equal, before, weights()))]
    verdicts["two steps"] = refused(lambda: pipe.load(folder / f"step-{2 - rank}"))
    same.append(all(map(torch.equal, before, weights())))
    other = tiny(zero)
    verdicts["zero"] = refused(lambda: other.save(folder / "zero"))
    same.append(all(map(torch.equal, before, weights())))
    verdicts["same before and after"] = same
    pipe.load(folder / "step-1")
    verdicts["loss after"] = float(pipe.train_batch(*tiny_batch(2)))
    alone = tiny(executor="threads") if rank == 0 else None
    if alone is not None:
        alone.load(folder / "step-1")
        verdicts["loss expected"] = float(alone.train_batch(*tiny_batch(2)))
    own_disk = folder / f"disk-{rank}"
    pipe.save(own_disk)
    verdicts["own files"] = sorted(file.name[14:24] for file in own_disk.glob("step-*"))
    before = weights()
    pipe.train_batch(*tiny_batch(3))
    pipe.load(own_disk)
    verdicts["same after fetching"] = all(map(torch.equal, before, weights()))
    verdicts["fetched"] = sorted(file.name[14:24] for file in own_disk.glob("step-*"))
    dist.barrier()
    next(own_disk.glob("*stage-0001*")).unlink()
    dist.barrier()
    verdicts["lost"] = refused(lambda: pipe.load(own_disk))
    dist.barrier()
    pipe.close()
    other.close()
    return verdicts
