"""Ranks in threads whose global steps are recorded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch
from tests.runtime.scripted import Recorder
from torch import nn

from penstock.ranks.peer_guard import PeerGuard
from penstock.ranks.status_board import SharedBoard
from penstock.runtime.global_step import GlobalStep
from penstock.stage.training_options import TrainingOptions
from penstock.transport.in_process import Exchange, MemoryTransport

CPU = torch.device("cpu")


def stage_of(index, gradients, log):
    """Return a stage with parameters of these gradients; None is no gradient."""
    parameters = []
    for gradient in gradients:
        parameter = nn.Parameter(torch.zeros(2))
        parameter.grad = None if gradient is None else torch.tensor(gradient)
        parameters.append(parameter)
    update = Recorder(log, f"update {index}", begin=None, step=None, skip=None)
    update.parameters = parameters
    return SimpleNamespace(index=index, update=update, device=CPU, loss_scale=1.0)


class Run:
    """Ranks in threads; `holders` has by stage the ranks that hold it, `gradients` its gradients."""

    def __init__(self, holders, gradients, *, policy="warn", scaler=None, **options):
        size = 1 + max(rank for ranks in holders for rank in ranks)
        self.logs = [[] for _ in range(size)]
        exchange, board = Exchange(), SharedBoard(size)
        interpreters = {}
        for rank, log in enumerate(self.logs):
            stages = {
                index: stage_of(index, gradients[index], log)
                for index, ranks in enumerate(holders)
                if rank in ranks
            }
            interpreters[rank] = SimpleNamespace(
                rank=rank,
                stages=stages,
                replicas={},
                parallel={},
                transport=MemoryTransport(rank, exchange, 30.0),
                guard=PeerGuard(rank, board.for_rank(rank)),
                finite=SimpleNamespace(
                    policy=policy, has_nonfinite=False, reset=lambda log=log: log.append(("reset",))
                ),
                finish=lambda log=log: log.append(("finish",)),
            )
        self.assembly = SimpleNamespace(
            setting=SimpleNamespace(schedule=SimpleNamespace(ranks_of_stage=holders)),
            world=SimpleNamespace(size=size, collectives=None, device=lambda rank: CPU),
            interpreters=interpreters,
            stages=[stage for rank in interpreters.values() for stage in rank.stages.values()],
            shared=[],
            tied={},
            zero=False,
        )
        self.step = GlobalStep(self.assembly, scaler, TrainingOptions(**options))

    def run(self):
        """Step on all ranks; return their results by rank."""
        with ThreadPoolExecutor(len(self.logs)) as pool:
            return list(pool.map(self.step.step, range(len(self.logs))))

    def stage(self, rank, index):
        """Return a stage."""
        return self.assembly.interpreters[rank].stages[index]


HOLDERS = [(0,), (1, 2), (2,), (2, 0)]


GRADIENTS = [[[3.0, 4.0], None], [[1.0, 2.0]], [None, [2.0, 2.0], [0.0, 1.0]], [[6.0, 0.0]]]


def global_norm(norm_type):
    """Return the norm of all gradients, each stage's once."""
    values = [torch.tensor(row) for stage in GRADIENTS for row in stage if row is not None]
    return torch.linalg.vector_norm(torch.cat(values), norm_type).item()
