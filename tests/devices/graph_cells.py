"""Capture steps of pipelines on the stand-in for an accelerator, play them again with another batch,
and compare them with steps that are not captured.

Run by the fixture in conftest.py, in a process of its own, for the reasons that lookalike.py gives.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from tests.devices import lookalike
from tests.devices import lookalike_cells as cells
from tests.devices.lookalike_cells import SAMPLES, Cell
from tests.time_limits import HANG_S
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.ranks.clock import EventClock
from penstock.runtime import assembly
from penstock.values import deferred_checks

#: Batches before the capture, in which what is known from the first ones is learnt.
WARM = 2

#: Sizes that are captured without tied weights and clipping, too.
PLAIN = ("1f1b 4 x 5", "zb-v 4 x 4", "chimera 4 x 4", "3 copies 2 x 6", "interleaved 4 x 4")

#: The mean over samples of one number each: how much micro-batches count is known without a look at
#: the targets.
LOSS = functional.mse_loss


@dataclasses.dataclass
class Row:
    """What one cell came to.

    Attributes:
        cell: its name.
        ops: number of ops in the graph.
        differences: names of parameters that differ from those of a pipeline without a graph, after
            the step that was captured and one more; "loss", if that of the latter does.
        timeline: what `timeline()` says after the step that was captured.
        error: what the cell raised, in one line.
    """

    cell: str
    timeline: str = ""
    ops: int = 0
    differences: list[str] = dataclasses.field(default_factory=list)
    error: str = ""


class Event:
    """An event of a device whose time stands still. As on a GPU it cannot be queried while a graph
    is captured.
    """

    @classmethod
    def record(cls) -> Event:
        """Record an event."""
        cls.check()
        return cls()

    @staticmethod
    def check() -> None:
        """Refuse to be used in a capture.

        Raises:
            CaptureError: a graph is being captured.
        """
        if lookalike.CAPTURE:
            raise lookalike.CaptureError("an event is used while a graph is captured")

    def synchronize(self) -> None:
        """Wait for it."""
        self.check()

    def query(self) -> bool:
        """Return that it is over."""
        self.check()
        return True

    def elapsed_time(self, end: Event) -> float:
        """Return milliseconds."""
        del end
        self.check()
        return 0.0


def install_events() -> None:
    """Let pipelines time ops by events, and know when a graph is captured, as on a GPU."""

    def is_capturing(device: torch.device) -> bool:
        """Whether a graph is being captured."""
        del device
        return bool(lookalike.CAPTURE)

    deferred_checks.is_capturing = is_capturing
    assembly.clock_for = lambda device: EventClock(
        Event.record, captures=partial(is_capturing, device)
    )


@dataclasses.dataclass(frozen=True)
class GraphCell:
    """A cell, and what differs from the others.

    Attributes:
        cell: model, batch and options.
        optimizer: makes the optimizer.
        learning_rate: set before the last step, if any.
    """

    cell: cells.Cell
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    learning_rate: float | None = None


def sizes() -> dict[str, tuple[dict[str, Any], int]]:
    """Return by name the options that choose a schedule, and its number of stages."""
    chosen: dict[str, tuple[dict[str, Any], int]] = {}
    for name, stages, micro_batches in (
        ("1f1b", 2, 3),
        ("1f1b", 4, 5),
        ("gpipe", 3, 4),
        ("zb-h1", 3, 6),
        ("zb-v", 4, 4),
        ("chimera", 2, 4),
        ("chimera", 4, 4),
        ("bpipe", 4, 6),
    ):
        schedule = ps.schedule(name, stages=stages, micro_batches=micro_batches)
        chosen[f"{name} {stages} x {micro_batches}"] = {"schedule": schedule}, stages
    copies = ps.schedule("1f1b", stages=2, micro_batches=6, replicas=3)
    looped = ps.schedule("interleaved", stages=4, micro_batches=4, chunks=2)
    chosen["3 copies 2 x 6"] = {"schedule": copies}, 2
    chosen["interleaved 4 x 4"] = {"schedule": looped}, 4
    return chosen


def vectors() -> tuple[Tensor, Tensor]:
    """Return inputs of shape (SAMPLES, 8) and targets of shape (SAMPLES, 4)."""
    torch.manual_seed(1)
    return torch.randn(SAMPLES, 8), torch.randn(SAMPLES, 4)


def tokens() -> tuple[Tensor, Tensor]:
    """Return tokens of shape (SAMPLES,) and targets of shape (SAMPLES, 8)."""
    torch.manual_seed(1)
    return torch.randint(0, 8, (SAMPLES,)), torch.randn(SAMPLES, 8)


def normalised_model() -> nn.Module:
    """Return a chain with batch normalisation."""
    model = cells.random_model()
    for index in (3, 6):
        model[index] = nn.Identity()
    return model


def cut(stages: int) -> list[int]:
    """Return the numbers of layers of stages that have 8 together."""
    return [8 // stages] * (stages - 1) + [8 - 8 // stages * (stages - 1)]


def graph_cells() -> dict[str, GraphCell]:
    """Return all cells by name."""
    all_cells: dict[str, GraphCell] = {}
    for name, (options, stages) in sizes().items():
        base = {**options, "balance": cut(stages)}
        clipped = {**base, "clip_grad_norm": 0.05}
        if name in PLAIN:
            all_cells[name] = GraphCell(Cell(base, batch=vectors, loss=LOSS))
        tied = Cell(clipped, cells.tied_model, tokens, LOSS)
        all_cells[f"{name}, tied weights, clipping"] = GraphCell(tied)
    one = Cell({**sizes()["1f1b 2 x 3"][0], "balance": cut(2)}, batch=vectors, loss=LOSS)
    adam = partial(torch.optim.Adam, foreach=False)
    for recompute in ("except_last", "always"):
        options = {**one.options, "recompute": recompute}
        all_cells[f"recompute {recompute}"] = GraphCell(dataclasses.replace(one, options=options))
    all_cells["batch norm"] = GraphCell(dataclasses.replace(one, model=normalised_model))
    all_cells["dropout"] = GraphCell(dataclasses.replace(one, model=cells.random_model))
    all_cells["learning rate"] = GraphCell(one, learning_rate=0.5)
    all_cells["Adam"] = GraphCell(one, optimizer=adam)
    all_cells["Adam, capturable"] = GraphCell(one, optimizer=partial(adam, capturable=True))
    classes = dataclasses.replace(one, batch=cells.vectors, loss=functional.cross_entropy)
    all_cells["class indices on the device"] = GraphCell(classes)
    return all_cells


def batches(cell: cells.Cell) -> list[tuple[Tensor, Tensor]]:
    """Return the batches of a run, all different."""
    x, y = cell.batch()
    # Micro-batches of one sample have no variance for a batch norm.
    x, y = torch.cat([x, x.flip(0)]), torch.cat([y, y.roll(1, 0)])
    rolled = [(x.roll(number, 0), y.roll(2 * number, 0)) for number in range(WARM + 2)]
    return [(one.clone(), other.clone()) for one, other in rolled]


def pipeline(graph_cell: GraphCell) -> ps.Pipeline:
    """Return the cell's pipeline on the device, with ranks as threads."""
    cell = graph_cell.cell
    make = graph_cell.optimizer or (
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)
    )
    return ps.Pipeline(
        cell.model(),
        loss=cell.loss,
        optimizer=make,
        executor="threads",
        device=lookalike.DEVICE,
        deadline_s=HANG_S,
        **cell.options,
    )


def play(name: str, graph_cell: GraphCell) -> Row:
    """Train with and without a graph."""
    row = Row(name)
    *warm, captured, last = batches(graph_cell.cell)
    eager, pipe = pipeline(graph_cell), pipeline(graph_cell)
    x, y = (tensor.to(lookalike.DEVICE) for tensor in captured)
    for one, other in warm:
        eager.train_batch(one.to(lookalike.DEVICE), other.to(lookalike.DEVICE))
        pipe.train_batch(one.to(lookalike.DEVICE), other.to(lookalike.DEVICE))
    eager.train_batch(x, y)
    graph = lookalike.Graph()
    with graph:
        loss = pipe.train_batch(x, y)
    row.ops = len(graph)
    try:
        pipe.timeline()
    except ps.PenstockError as error:
        row.timeline = str(error)
    if graph_cell.learning_rate is not None:
        for trained in (eager, pipe):
            trained.set_learning_rate(graph_cell.learning_rate)
    x.copy_(last[0])
    y.copy_(last[1])
    expected_loss = eager.train_batch(x, y)
    graph.replay()
    if float(loss) != float(expected_loss):
        row.differences.append("loss")
    expected = dict(eager.named_parameters())
    for key, value in pipe.named_parameters():
        if not torch.equal(cells.on_host(value), cells.on_host(expected[key])):
            row.differences.append(key)
    for trained in (eager, pipe):
        trained.close()
    return row


def play_gradients(name: str) -> Row:
    """Capture the gradients of a batch, as the GPU benchmark does: all stages on one rank, in the
    caller's thread, and gradients that are there before the capture and are added to.

    The loss counts class indices, of which `loss_weight` tells how many there are.
    """
    row = Row(name)
    order = "0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1 0U1 1U1"
    pipe = ps.Pipeline(
        cells.plain_model(),
        loss=functional.cross_entropy,
        loss_weight=len,
        balance=[4, 4],
        schedule=ps.Schedule.parse(f"rank 0 | {order}"),
        device=lookalike.DEVICE,
        deadline_s=HANG_S,
    )
    parameters = dict(pipe.named_parameters())
    x, y = (tensor.to(lookalike.DEVICE) for tensor in cells.vectors())
    for parameter in parameters.values():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(WARM):
        pipe.train_batch(x, y, update=False)
    graph = lookalike.Graph()
    with graph:
        pipe.train_batch(x, y, update=False)
    row.ops = len(graph)
    gradients = []
    x.copy_(x.roll(1, 0) * 2)
    for run in (graph.replay, partial(pipe.train_batch, x, y, update=False)):
        for parameter in parameters.values():
            parameter.grad.zero_()
        run()
        gradients.append(
            {key: cells.on_host(value.grad).clone() for key, value in parameters.items()}
        )
    pipe.close()
    captured, eager = gradients
    row.differences = [key for key in eager if not torch.equal(captured[key], eager[key])]
    if not all(value.abs().max() > 0 for value in eager.values()):
        row.error = "no gradients"
    return row


def all_rows(words: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Run all cells, or those with one of these words in their names. Returns a dict of each row."""
    install_events()
    rows = []
    for name, graph_cell in graph_cells().items():
        if words and not any(word in name for word in words):
            continue
        try:
            row = play(name, graph_cell)
        except Exception as error:
            traceback.print_exc()
            row = Row(name, error=f"{type(error).__name__}: {str(error).splitlines()[0]}")
        rows.append(row)
    name = "gradients of one rank"
    if not words or any(word in name for word in words):
        rows.append(play_gradients(name))
    return [dataclasses.asdict(row) for row in rows]
