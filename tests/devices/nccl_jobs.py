"""What ranks run over the stand-in for NCCL: everything of one number of ranks in one launch, since
each launch imports torch.
"""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812

import penstock as ps

#: Losses of this many batches are compared; the communicators are sealed and waits counted in the
#: last.
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
        "tied": {"balance": [3, 2], "schedule": "1f1b", "micro_batches": 3, "model": "tied"},
        "tied, clipping, recompute": {
            "balance": [3, 2],
            "schedule": "gpipe",
            "micro_batches": 6,
            "model": "tied",
            "clip_grad_norm": 0.5,
            "recompute": "always",
        },
        "chimera, clipping, recompute": {
            "balance": [3, 2],
            "schedule": "chimera",
            "micro_batches": 8,
            "clip_grad_norm": 0.5,
            "recompute": "except_last",
        },
        "recompute a layer": {
            "balance": [3, 2],
            "schedule": "zb-h1",
            "micro_batches": 4,
            "recompute": [1, 2],
        },
        "sum and count": {
            "balance": [3, 2],
            "schedule": "1f1b",
            "micro_batches": 4,
            "loss": "sum and count",
        },
        "pipedream, recompute": {
            "balance": [3, 2],
            "schedule": "pipedream",
            "micro_batches": 4,
            "recompute": "always",
        },
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
    """Passes on what it gets, with the place of the largest feature as int16, which NCCL does not
    have.
    """

    def forward(self, x):
        """Return the input and the places."""
        return x, x.detach().argmax(1).to(torch.int16)


class UseRow(nn.Module):
    """Adds the places to the features."""

    def forward(self, pair):
        """Return the sum."""
        x, place = pair
        return x + place.unsqueeze(1).to(x.dtype) * 0.1


def network(kind: str = "plain") -> nn.Sequential:
    """The model of a case, always with the same weights."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)]
    if kind == "int16":
        layers[1:1] = [AddRow(), UseRow()]
        del layers[-2]
    if kind == "tied":
        # Two layers with one weight, in different stages.
        layers[3] = nn.Linear(16, 16)
        layers[3].weight = layers[2].weight
    return nn.Sequential(*layers)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """One batch."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(24, 8, generator=generator), torch.randint(0, 4, (24,), generator=generator)


def sum_and_count(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the losses, and how many count."""
    return F.cross_entropy(output, target, reduction="sum"), (target >= 0).sum()


LOSSES = {"mean": F.cross_entropy, "sum and count": sum_and_count}


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
        loss=LOSSES[words.pop("loss", "mean")],
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


def install() -> None:
    """Let this process believe in NCCL."""
    from tests.devices import lookalike, nccl_like

    from penstock.values import structure

    # On a real device tensors are of torch's own class.
    structure._DENSE = frozenset({*structure._DENSE, lookalike.Lookalike})
    choose_transport("nccl")
    nccl_like.install()
    # autograd's thread for the device cannot be joined; the result has been written by then.
    atexit.register(os._exit, 0)


def choose_transport(name: str) -> None:
    """Let the rule of devices choose a transport, on the device that a pipeline asks for."""
    from penstock.ranks import rank_group
    from penstock.transport.devices.device_assignment import Assignment

    rank_group.assign_device = lambda device, _=None: Assignment(str(device), name, (), "")


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Train over the stand-in; what was seen of it in this rank."""
    from tests.devices import lookalike, nccl_like

    nccl_like.unseal()
    before = len(nccl_like.COMMUNICATORS)
    pipe = pipeline(case, "processes", lookalike.DEVICE)
    communicator_count = len(nccl_like.COMMUNICATORS) - before
    nccl_like.seal()
    losses = [pipe.train_batch(*data()) for _ in range(BATCHES - 1)]
    nccl_like.WAITS.clear()
    lookalike.clear()
    losses.append(pipe.train_batch(*data()))
    waits, copies = dict(nccl_like.WAITS), lookalike.LINES["h2d"].copy()
    log = dict(lookalike.LOG)
    nccl_like.unseal()
    peers = {
        peer
        for communicator in nccl_like.COMMUNICATORS[before:-1]  # the last one is of all ranks
        for peer in communicator.ranks
        if peer != communicator.rank
    }
    dist.barrier()
    buffers = pipe._world._wire.buffers
    timeline = pipe.timeline()
    pipe.close()
    return {
        "buffers": (buffers.now, buffers.peak),
        "memory": [dataclasses.astuple(row) for row in timeline.measured_memory],
        "rank": dist.get_rank(),
        "losses": [float(loss) for loss in losses],
        "forms": [(str(loss.device), str(loss.dtype), loss.dim()) for loss in losses],
        "waits": waits,
        "h2d": dict(copies),
        "log": log,
        "communicators": communicator_count,
        "peers": len(peers),
    }


def outcome(job: Any) -> Any:
    """What a job returns, or the class and the text of what it raises."""
    try:
        return job()
    except Exception as error:
        return type(error).__name__, str(error)


def train_all(ranks: int) -> dict[str, Any]:
    """Every case of a number of ranks, one after another; of one that fails, its error. For 2
    ranks, the other scenes as well.
    """
    install()
    seen = {}
    for name, case in CASES[ranks].items():
        seen[name] = outcome(lambda case=case: train(case))
    if ranks == 2:
        from tests.devices import nccl_like

        nccl_like.EAGER[0] = False
        seen["chimera, connected by transfers"] = outcome(lambda: train(CASES[2]["chimera"]))
        nccl_like.EAGER[0] = True
        seen["rules"] = rules()
        seen["copies through shared memory"] = outcome(train_near)
        for place in FAILURES:
            seen[place] = outcome(lambda place=place: fail(*place))
        seen["late"] = outcome(be_late)
    return seen


def train_near() -> dict[str, Any]:
    """Copies of a stage on the device whose ranks talk through shared memory, as those that share
    one GPU do.
    """
    choose_transport("host memory")
    try:
        return train(CASES[2]["copies x 2"])
    finally:
        choose_transport("nccl")


#: Where a rank raises: the rank, the kind of op, and its how manieth call.
FAILURES = [(0, "F", 1), (1, "F", 3), (0, "B", 2), (1, "B", 2)]


def disturb(pipe: Any, kind: str, call: int, action: Callable[[], object]) -> None:
    """Let the ops of a kind in this rank do something else first, at one call of them."""
    (stage,) = pipe._assembly.stages
    owner = stage.update if kind == "U" else stage
    name = {"F": "forward", "B": "backward", "U": "step"}[kind]
    run, calls = getattr(owner, name), itertools.count(1)

    def disturbed(*args: Any) -> Any:
        """Run the op, and the action before it."""
        if next(calls) == call:
            action()
        return run(*args)

    setattr(owner, name, disturbed)


def fail(rank: int, kind: str, call: int) -> list[float]:
    """Train one batch, then let an op of one rank raise in the next."""
    from tests.devices import lookalike

    pipe = pipeline(CASES[2]["1f1b"], "processes", lookalike.DEVICE)
    pipe.train_batch(*data())

    def refuse() -> None:
        """Raise."""
        raise ValueError(f"no luck in {kind} on rank {rank}")

    if dist.get_rank() == rank:
        disturb(pipe, kind, call, refuse)
    return [float(pipe.train_batch(*data()))]


#: Micro-batches of the run in which a rank is killed.
KILLED_MICRO_BATCHES = 2


def be_killed(rank: int, kind: str, call: int) -> None:
    """Train one batch, then let one rank be killed in an op of the next."""
    from tests.devices import lookalike

    install()
    case = {**CASES[2]["1f1b"], "micro_batches": KILLED_MICRO_BATCHES}
    pipe = pipeline(case, "processes", lookalike.DEVICE)
    pipe.train_batch(*data())
    if dist.get_rank() == rank:
        disturb(pipe, kind, call, lambda: os.kill(os.getpid(), signal.SIGKILL))
    pipe.train_batch(*data())


def be_late() -> list[float]:
    """Rank 0 computes until the run has failed; the deadline is short."""
    from tests.devices import lookalike

    pipe = pipeline(CASES[2]["1f1b"], "processes", lookalike.DEVICE)
    pipe.train_batch(*data())
    dist.barrier()
    pipe._world._wire.deadline_s = 1.0
    if dist.get_rank() == 0:
        disturb(pipe, "F", 1, lambda: pipe._world._board.failure(patience_s=60))
    return [float(pipe.train_batch(*data()))]


def rules() -> dict[str, Any]:
    """What the stand-in says to calls under which NCCL would fail or hang."""
    from tests.devices import lookalike, nccl_like

    rank = dist.get_rank()
    peer = 1 - rank
    device = torch.device(lookalike.DEVICE)

    def group(**options: Any) -> Any:
        """A communicator of both ranks."""
        return dist.new_group([0, 1], backend="nccl", **options)

    def ones(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A tensor on the device."""
        return torch.ones(count, dtype=dtype).to(device)

    def transfer(first: torch.Tensor, second: torch.Tensor) -> Any:
        """Rank 0 sends two tensors, rank 1 receives them in the other order."""
        order = [first, second] if rank == 0 else [second, first]
        call = dist.isend if rank == 0 else dist.irecv
        works = [call(tensor, peer, group=fresh) for tensor in order]
        if rank == 1:
            works[0].wait()
        return "passed"

    def cross(batched: bool) -> Any:
        """Both ranks send and then receive."""
        other = group(device_id=device)
        word, into = ones(1), ones(1) * 0
        if batched:
            ops = [
                dist.P2POp(dist.isend, word, peer, other),
                dist.P2POp(dist.irecv, into, peer, other),
            ]
            works = dist.batch_isend_irecv(ops)
        else:
            works = [dist.isend(word, peer, group=other), dist.irecv(into, peer, group=other)]
        works[1].wait()
        return into.tolist()

    def meet_lazily() -> Any:
        """Both ranks first send on a communicator of their own."""
        pair = [group(), group()]
        dist.isend(ones(1), peer, group=pair[rank])
        return "passed"

    def receive_after_abort() -> Any:
        """Wait for what never comes."""
        other = group(device_id=device)
        into = ones(2)
        work = dist.irecv(into, peer, group=other)
        other.abort()
        work.wait()
        return into.isnan().tolist(), outcome(lambda: dist.isend(into, peer, group=other))[0]

    fresh = group(device_id=device)
    seen = {
        "CPU tensor": outcome(lambda: dist.isend(torch.ones(1), peer, group=fresh)),
        "int16": outcome(lambda: dist.isend(ones(1, torch.int16), peer, group=fresh)),
        "stride": outcome(lambda: dist.isend(ones(4)[::2], peer, group=fresh)),
        "device tensor": outcome(lambda: dist.isend(ones(1), peer)),
        "other order": outcome(lambda: transfer(ones(1), ones(2))),
        "send, send": outcome(lambda: cross(batched=False)),
        "batch": outcome(lambda: cross(batched=True)),
        "abort": outcome(receive_after_abort),
    }
    patience, nccl_like.PATIENCE_S[0] = nccl_like.PATIENCE_S[0], 0.2
    seen["lazy"] = outcome(meet_lazily)
    nccl_like.PATIENCE_S[0] = patience
    nccl_like.seal()
    seen["sealed"] = outcome(group)
    nccl_like.unseal()
    dist.barrier()
    return seen
