"""Steps captured as CUDA graphs: of plain PyTorch, and of a pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

import penstock as ps
from kit.one_rank import all_in_turn
from kit.systems import Gradients, System
from kit.workloads import STAGES, Cell, equal_cut

#: Eager runs before a capture: allocators and libraries have what they need then.
WARM = 3


class Captured(System):
    """A system that replays graphs. Gradients stay in the memory that the graphs write to.

    Attributes:
        capture_s: seconds that the graphs' making took.
    """

    capture_s = 0.0

    def gradients(self) -> Gradients:
        """See `System.gradients`; they are set to 0, not to None."""
        self.gather()
        gradients: Gradients = {}
        for name, parameter in self.parameters.items():
            assert parameter.grad is not None
            gradients[name] = parameter.grad.detach().to(torch.float32, copy=True)
            parameter.grad.zero_()
        return gradients


def micro_batch(cell: Cell, device: torch.device) -> System:
    """Forward and backward of one micro-batch, replayed for each of them; the optimizer runs
    eagerly.
    """
    model = cell.first_model().to(device)
    x, y = cell.first_batch(device)
    count = cell.micro_batches
    parts = list(zip(x.chunk(count), y.chunk(count), strict=True))
    inputs, targets = (value.clone() for value in parts[0])
    _make_gradients(model)
    optimizer = cell.make_optimizer(model.parameters())

    def run() -> None:
        # Casts of weights that autocast keeps would be those of the capture for ever.
        with cell.mixed(device, cache=False):
            loss = cell.loss(model(inputs), targets) / count
        loss.backward()

    graph, capture_s = capture(run, device)
    optimizer.zero_grad(set_to_none=False)

    def gather() -> None:
        for one, other in parts:
            inputs.copy_(one)
            targets.copy_(other)
            graph.replay()

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return _system(model, gather, update, capture_s)


def whole_step(cell: Cell, device: torch.device) -> System:
    """All micro-batches in one graph; the optimizer runs eagerly."""
    model = cell.first_model().to(device)
    x, y = cell.first_batch(device)
    count = cell.micro_batches
    parts = list(zip(x.chunk(count), y.chunk(count), strict=True))
    _make_gradients(model)
    optimizer = cell.make_optimizer(model.parameters())

    def run() -> None:
        for inputs, targets in parts:
            with cell.mixed(device, cache=False):
                loss = cell.loss(model(inputs), targets) / count
            loss.backward()

    graph, capture_s = capture(run, device)
    optimizer.zero_grad(set_to_none=False)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return _system(model, graph.replay, update, capture_s)


def penstock_step(cell: Cell, device: torch.device) -> System:
    """1F1B of four stages, all micro-batches in one graph; the optimizer runs eagerly.

    Penstock has no option for it: a schedule of one rank runs in the caller's thread, and does not
    look at the device in a steady step where it is told how much micro-batches count.
    """
    model = cell.first_model().to(device)
    x, y = cell.first_batch(device)
    schedule = ps.schedule("1f1b", stages=STAGES, micro_batches=cell.micro_batches)
    pipe = ps.Pipeline(
        model,
        loss=cell.loss,
        loss_weight=len,
        balance=equal_cut(len(model)),
        schedule=all_in_turn(schedule),
        autocast=cell.autocast,
        executor="threads",
        device=device,
    )
    _make_gradients(model)
    optimizer = cell.make_optimizer(model.parameters())
    graph, capture_s = capture(lambda: pipe.train_batch(x, y, update=False), device)
    optimizer.zero_grad(set_to_none=False)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    system = _system(model, graph.replay, update, capture_s)
    system.close = pipe.close
    return system


def _make_gradients(model: torch.nn.Module) -> None:
    """Gradients that a captured backward adds to: their memory has to be there before it is
    captured.
    """
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def capture(run: Callable[[], object], device: torch.device) -> tuple[torch.cuda.CUDAGraph, float]:
    """`run` as a graph, and the seconds that its making took."""
    started = time.perf_counter()
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(WARM):
            run()
    torch.cuda.current_stream(device).wait_stream(side)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    torch.cuda.synchronize(device)
    return graph, time.perf_counter() - started


def _system(
    model: torch.nn.Module,
    gather: Callable[[], object],
    update: Callable[[], object],
    capture_s: float,
) -> System:
    def step() -> None:
        gather()
        update()

    system = Captured(gather, update, dict(model.named_parameters()), step)
    system.capture_s = capture_s
    return system
