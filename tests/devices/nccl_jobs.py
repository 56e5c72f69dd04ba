"""What ranks run over the stand-in for NCCL: everything of one number of ranks in one launch, since each launch imports torch."""

from __future__ import annotations

import atexit
import os
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps

#: Losses of this many batches are compared; the communicators are sealed and waits counted in the last.
BATCHES = 3

#: Case to arguments of the Pipeline, by the number of ranks.
CASES: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "1f1b": {"balance": [3, 2], "schedule": "1f1b", "micro_batches": 4},
        "interleaved": {"balance": [2, 1, 1, 1], "schedule": "interleaved", "micro_batches": 4},
        "zb-v": {"balance": [2, 1, 1, 1], "schedule": "zb-v", "micro_batches": 4},
        "chimera": {"balance": [3, 2], "schedule": "chimera", "micro_batches": 4},
        "copies x 2": {"balance": [5], "schedule": "gpipe", "micro_batches": 4, "replicas": 2},
        "clipping": {
            "balance": [3, 2],
            "schedule": "1f1b",
            "micro_batches": 4,
            "clip_grad_norm": 0.5,
        },
        "pipedream": {"balance": [3, 2], "schedule": "pipedream", "micro_batches": 4},
        "int16": {"balance": [2, 4], "schedule": "1f1b", "micro_batches": 4, "model": "int16"},
    },
    3: {
        "gpipe": {"balance": [2, 2, 1], "schedule": "gpipe", "micro_batches": 4},
        "copies x 3": {"balance": [5], "schedule": "gpipe", "micro_batches": 6, "replicas": 3},
        "clipping on 3": {
            "balance": [2, 2, 1],
            "schedule": "1f1b",
            "micro_batches": 4,
            "clip_grad_norm": 0.5,
        },
    },
    4: {
        "bpipe": {
            "balance": [1, 1, 1, 2],
            "schedule": "bpipe",
            "micro_batches": 4,
            "recompute": "always",
        },
    },
}


class AddRow(nn.Module):
    """Passes on what it gets, with the place of the largest feature as int16, which NCCL does not have."""

    def forward(self, x):
        """Return the input and the places."""
        return x, x.detach().argmax(1).to(torch.int16)


class UseRow(nn.Module):
    """Adds the places to the features."""

    def forward(self, pair):
        """Return the sum."""
        x, place = pair
        return x + place.unsqueeze(1).to(x.dtype) * 0.1


class Trouble(nn.Module):
    """A layer that does what it is told in its forwards: nothing, at first."""

    action: Any = None

    def forward(self, x):
        """Return the input."""
        if Trouble.action is not None and self.training:
            Trouble.action()
        return x


def network(kind: str = "plain") -> nn.Sequential:
    """The model of a case, always with the same weights."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)]
    if kind == "int16":
        layers[1:1] = [AddRow(), UseRow()]
        del layers[-2]
    if kind == "trouble":
        layers[1] = Trouble()
    return nn.Sequential(*layers)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """One batch."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(24, 8, generator=generator), torch.randint(
        0, 4, (24,), generator=generator
    )


def pipeline(case: dict[str, Any], executor: str, device: str, deadline_s: float = 60) -> Any:
    """The Pipeline of a case."""
    words = dict(case)
    model = network(words.pop("model", "plain"))
    if "replicas" in words:
        words["schedule"] = ps.schedule(
            words["schedule"],
            stages=len(words["balance"]),
            micro_batches=words.pop("micro_batches"),
            replicas=words.pop("replicas"),
        )
    return ps.Pipeline(
        model,
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=False),
        executor=executor,
        device=device,
        deadline_s=deadline_s,
        **words,
    )


def losses_on_cpu(case: dict[str, Any]) -> list[float]:
    """Losses of a case in this process."""
    pipe = pipeline(case, "threads", "cpu")
    return [float(pipe.train_batch(*data())) for _ in range(BATCHES)]


def install(*, eager: bool) -> None:
    """Let this process believe in NCCL."""
    from tests.devices import nccl_device, nccl_like

    from penstock.runtime.processes import DistributedWorld
    from penstock.values import structure

    # On a real device tensors are of torch's own class.
    structure._DENSE = frozenset({*structure._DENSE, nccl_device.Lookalike})
    DistributedWorld._nccl_everywhere = lambda self, shared: True
    nccl_like.install(eager=eager)
    # autograd's thread for the device cannot be joined; the result has been written by then.
    atexit.register(os._exit, 0)


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Train over the stand-in; what was seen of it in this rank."""
    from tests.devices import nccl_device, nccl_like

    nccl_like.unseal()
    before = len(nccl_like.COMMUNICATORS)
    pipe = pipeline(case, "processes", nccl_device.DEVICE)
    made = len(nccl_like.COMMUNICATORS) - before
    nccl_like.seal()
    losses = [pipe.train_batch(*data()) for _ in range(BATCHES - 1)]
    nccl_like.WAITS.clear()
    nccl_device.clear()
    losses.append(pipe.train_batch(*data()))
    waits, copies = dict(nccl_like.WAITS), nccl_device.LINES["h2d"].copy()
    nccl_like.unseal()
    peers = {
        peer for each in nccl_like.COMMUNICATORS[before:] for peer in each.ranks if peer != each.rank
    }
    pipe.close()
    return {
        "losses": [float(loss) for loss in losses],
        "forms": [(str(loss.device), str(loss.dtype), loss.dim()) for loss in losses],
        "waits": waits,
        "h2d": dict(copies),
        "communicators": made,
        "peers": len(peers),
    }


def train_all(names: list[str], ranks: int, eager: bool) -> dict[str, Any]:
    """Every case of a number of ranks, one after another; of one that fails, its error."""
    install(eager=eager)
    seen: dict[str, Any] = {}
    for name in names:
        try:
            seen[name] = train(CASES[ranks][name])
        except Exception as error:  # noqa: BLE001 - the test shows it
            seen[name] = {"error": f"{type(error).__name__}: {error}"}
    return seen
