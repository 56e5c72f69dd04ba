"""Replicas of a stage over links in memory, without a pipeline."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from tests.stage.parallel.scripted_groups import in_threads
from torch import nn

from penstock.optim.update import Update
from penstock.stage.replicas import ReplicaGroup
from penstock.transport.in_process import Exchange, MemoryTransport

RANKS = (1, 3, 5, 7)


class Link(MemoryTransport):
    """One rank's transport; without `shares`, what arrives is a copy, as between processes."""

    def send(self, peer, message, payload, signature):
        """Send, and note the message."""
        SENT.append((self.rank, peer, message, signature))
        if not self.shares:
            payload = payload.with_tensors([tensor.clone() for tensor in payload.tensors])
        return super().send(peer, message, payload, signature)


#: Sender, receiver, message and signature of what was sent.
SENT = []


def sgd(parameters):
    """Return plain gradient descent."""
    return torch.optim.SGD(parameters, lr=0.1)


def groups_of(modules, *, shares=True, optimizer=None, tied=None, **options):
    """Return one replica for each module; `tied` selects parameters of a module.

    Nothing has been sent then.
    """
    SENT.clear()
    ranks, exchange = RANKS[: len(modules)], Exchange()
    groups = []
    for rank, module in zip(ranks, modules, strict=True):
        stage = SimpleNamespace(
            index=3,
            update=Update.make(list(module.parameters()), optimizer),
            modules=module.modules,
        )
        groups.append(
            ReplicaGroup(
                stage,
                ranks,
                rank,
                Link(rank, exchange, 30.0, shares),
                lambda _, action: action(),
                [] if tied is None else tied(module),
                **options,
            )
        )
    return groups


def all_reduce(groups, **options):
    """Sum on all replicas."""
    in_threads(len(groups), lambda n: groups[n].all_reduce(**options))


class Weights(nn.Module):
    """Parameters of several forms and dtypes, and a buffer."""

    def __init__(self, number=0):
        super().__init__()
        shapes = [(3, 2), (), (5,), (4,)]
        dtypes = [torch.float32, torch.float32, torch.float64, torch.float32]
        self.weights = nn.ParameterList(
            torch.zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)
        )
        self.register_buffer("count", torch.tensor([number, 2 * number]))


class Table(nn.Module):
    """A table with sparse gradients and a bias."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 2, sparse=True)
        self.bias = nn.Parameter(torch.zeros(2))
