"""Stages, replicas and rules that compute nothing and record what an interpreter asks of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch

import penstock as ps
from penstock.ranks.clock import HostClock
from penstock.ranks.status_board import SharedBoard
from penstock.runtime.interpreter import Interpreter
from penstock.schedule.lower import lower
from penstock.stage.activation_meter import ActivationMeter
from penstock.transport.in_process import Exchange, MemoryTransport
from penstock.transport.payload import Payload

#: Numbers of the kinds of values, in the tensors that stand for them.
KINDS = "FBE"

#: One stage on one rank, with two micro-batches.
ALONE = "0F0 0F1 0B0 0B1 0U1"

#: Two ranks with a stage each.
PAIR = "0F0 0B0 0U1\n1F0 1B0 1U1"


def value(kind, stage, micro_batch, step=0):
    """Return a payload that says which op has produced it."""
    return Payload.row([torch.tensor([KINDS.index(kind), stage, micro_batch, step])])


def contents(payload):
    """Return what `value` has written; None for no payload."""
    if payload is None:
        return None
    kind, stage, micro_batch, step = payload.tensors[0].tolist()
    return KINDS[kind], stage, micro_batch, step


class ScriptedStage:
    """A stage whose results say which op has produced them."""

    def __init__(self, index, stages, log, loss=None):
        self.index, self.log = index, log
        self.loss = loss if index == stages - 1 else None
        self.is_last = index == stages - 1
        self.device = torch.device("cpu")
        self.update = SimpleNamespace(
            step=lambda: log.append(("step", index)), parameters=[], borrowed=[], optimizer=None
        )

    def tensors(self):
        """Return no tensors."""
        return []

    def prepare(self, batch):
        """Record that a batch is prepared."""
        self.log.append(("prepare", self.index, batch.step))

    def forward(self, batch, number, arrived):
        """Record F and return an activation."""
        self.log.append(("F", self.index, number, contents(arrived)))
        return None if self.is_last else value("F", self.index, number, batch.step)

    def backward(self, batch, number, arrived):
        """Record B and return a gradient."""
        self.log.append(("B", self.index, number, contents(arrived)))
        return value("B", self.index, number, batch.step)

    def input_grad(self, batch, number, arrived):
        """Record I and return a gradient."""
        self.log.append(("I", self.index, number, contents(arrived)))
        return value("B", self.index, number, batch.step)

    def weight_grad(self, batch, number):
        """Record W."""
        self.log.append(("W", self.index, number, None))

    def evict(self, batch, number):
        """Record E and return activations."""
        self.log.append(("E", self.index, number, None))
        return value("E", self.index, number, batch.step)

    def load(self, batch, number, arrived):
        """Record L."""
        self.log.append(("L", self.index, number, contents(arrived)))

    def forget(self):
        """Record that unfinished batches are dropped."""
        self.log.append(("forget", self.index))


class Recorder:
    """An object whose methods of given names record their calls."""

    def __init__(self, log, owner, **results):
        self._log, self._owner = log, owner
        for name, result in results.items():
            setattr(self, name, self._method(name, result))

    def _method(self, name, result):
        def record(*args, **options):
            self._log.append((f"{self._owner}.{name}", *args, *options.items()))
            return result

        return record


def replica_group(log, stage, sum_bytes=0):
    """Return a recording group of replicas."""
    methods = "watch poll start send_updates receive_updates all_reduce forget"
    group = Recorder(log, f"replicas {stage}", **dict.fromkeys(methods.split()))
    group.sum_bytes = sum_bytes
    return group


def batch(micro_batches, step=0):
    """Return a batch of empty micro-batches."""
    return SimpleNamespace(
        step=step,
        training=True,
        inputs=[None] * micro_batches,
        forms=[f"form {number % 2}" for number in range(micro_batches)],
        pending_check=None,
    )


class Ranks:
    """The interpreters of all ranks of a schedule, with scripted stages.

    Attributes:
        interpreters: by rank.
        logs: by rank, the calls in order.
        programs: by rank.
        board: of all ranks.
    """

    def __init__(self, schedule, *, ahead=2, loss=None, deadline_s=30.0):
        if isinstance(schedule, str):
            schedule = ps.Schedule.parse(schedule)
        self.schedule = schedule
        self.programs = lower(schedule, ahead).programs
        self.exchange, self.board = Exchange(), SharedBoard(schedule.ranks)
        self.logs = [[] for _ in range(schedule.ranks)]
        self.interpreters = []
        for rank, log in enumerate(self.logs):
            held = sorted({op.stage for op in schedule.programs[rank]})
            stages = {
                index: ScriptedStage(index, schedule.stages, log, loss)
                for index in held
                if rank in schedule.ranks_of_stage[index]
            }
            self.interpreters.append(
                Interpreter(
                    rank,
                    stages,
                    schedule.stages,
                    MemoryTransport(rank, self.exchange, deadline_s),
                    self.board.for_rank(rank),
                    HostClock(),
                    replicas={},
                    activation_meter=ActivationMeter(),
                )
            )

    def play(self, batch, **options):
        """Play a batch on all ranks, each in a thread, and raise the first failure."""

        def play(rank):
            try:
                self.interpreters[rank].play(self.programs[rank], batch, **options)
            except BaseException as error:
                self.exchange.close(str(error))
                raise

        with ThreadPoolExecutor(len(self.interpreters)) as pool:
            futures = [pool.submit(play, rank) for rank in range(len(self.interpreters))]
        for future in futures:
            future.result()


class Fails(Exception):
    """A failure of a layer."""


def ignore(*args):
    """Return 0 bytes."""
    return 0


def failing(error):
    """Return a method that raises."""

    def fail(*args, **options):
        raise error

    return fail


def interpreter_of(text, **options):
    """Return the only interpreter of a schedule of one rank, its program and its log."""
    ranks = Ranks(text, **options)
    return ranks.interpreters[0], ranks.programs[0], ranks.logs[0]
