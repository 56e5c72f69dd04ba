"""Ways to take a training step of a cell on one device: plain PyTorch, Penstock, torchgpipe,
torch's own pipelining.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import penstock as ps
from kit.one_rank import all_in_turn
from kit.workloads import STAGES, Cell, equal_cut
from penstock.event import Timeline

Gradients = dict[str, Tensor]


@dataclass
class System:
    """A model under training.

    Attributes:
        gather: forward and backward of the batch; gradients add up in `.grad`.
        update: the optimizer's step; gradients are None or 0 afterwards.
        parameters: by their names in the plain model.
        step: both, as one call.
        close: ends its threads.
        timeline: of the last step, where it is a pipeline with one.
    """

    gather: Callable[[], object]
    update: Callable[[], object]
    parameters: Mapping[str, nn.Parameter]
    step: Callable[[], object]
    close: Callable[[], object] = lambda: None
    timeline: Callable[[], Timeline | None] = lambda: None

    def gradients(self) -> Gradients:
        """Gradients of one batch at the first weights, in float32. Nothing is updated.

        Raises:
            RuntimeError: a parameter has none.
        """
        self.gather()
        gradients: Gradients = {}
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                raise RuntimeError(f"{name} has no gradient")
            gradients[name] = parameter.grad.detach().to(torch.float32, copy=True)
            parameter.grad = None
        return gradients


Make = Callable[[Cell, torch.device], System]


def error_of(gradients: Gradients, reference: Gradients) -> float:
    """The largest error in terms of the largest gradient.

    Raises:
        RuntimeError: the parameters are others.
    """
    if gradients.keys() != reference.keys():
        raise RuntimeError(
            f"gradients of other parameters: {sorted(gradients.keys() ^ reference.keys())}"
        )
    largest = max(float(gradient.abs().max()) for gradient in reference.values())
    errors = [(gradients[name] - reference[name]).abs().max() for name in reference]
    worst = float(torch.stack(errors).max())
    return worst / largest


def _loop(cell: Cell, model: nn.Module, gather: Callable[[], object]) -> System:
    """A system with an optimizer of its own beside `gather`."""
    optimizer = cell.make_optimizer(model.parameters())

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def step() -> None:
        gather()
        update()

    return System(gather, update, dict(model.named_parameters()), step)


def plain(cell: Cell, device: torch.device) -> System:
    """The whole batch at once."""
    return _accumulating(cell.with_micro_batches(1), device, compiled=None)


def plain_accumulate(cell: Cell, device: torch.device) -> System:
    """One micro-batch after the other: what a pipeline of one device has to be compared with."""
    return _accumulating(cell, device, compiled=None)


def plain_compile(cell: Cell, device: torch.device) -> System:
    """Likewise, compiled."""
    return _accumulating(cell, device, compiled="default")


def compile_reduce_overhead(cell: Cell, device: torch.device) -> System:
    """Likewise, with the CUDA graphs of torch.compile."""
    return _accumulating(cell, device, compiled="reduce-overhead")


def _accumulating(cell: Cell, device: torch.device, compiled: str | None) -> System:
    model = cell.first_model().to(device)
    x, y = cell.first_batch(device)
    parts = list(zip(x.chunk(cell.micro_batches), y.chunk(cell.micro_batches), strict=True))

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        with cell.mixed(device):
            return cell.loss(model(inputs), targets) / len(parts)

    run = loss_of if compiled is None else torch.compile(loss_of, mode=compiled)

    def gather() -> None:
        for inputs, targets in parts:
            run(inputs, targets).backward()

    return _loop(cell, model, gather)


def pipeline(cell: Cell, device: torch.device, **words: object) -> System:
    """`ps.Pipeline`, ranks as threads."""
    model = cell.first_model()
    settings: dict[str, object] = {
        "balance": equal_cut(len(model)),
        "schedule": "1f1b",
        "micro_batches": cell.micro_batches,
        "executor": "threads",
        "autocast": cell.autocast,
        "optimizer": cell.make_optimizer,
    } | words
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    pipe = ps.Pipeline(model.to(device), loss=cell.loss, device=device, **settings)
    x, y = cell.first_batch(device)
    parameters = {names.get(id(value), name): value for name, value in pipe.named_parameters()}

    return System(
        lambda: pipe.train_batch(x, y, update=False),
        pipe.update,
        parameters,
        lambda: pipe.train_batch(x, y),
        pipe.close,
        pipe.timeline,
    )


def penstock_1f1b(cell: Cell, device: torch.device) -> System:
    """Threads, 1F1B."""
    return pipeline(cell, device)


def penstock_gpipe(cell: Cell, device: torch.device) -> System:
    """Threads, GPipe."""
    return pipeline(cell, device, schedule="gpipe")


def penstock_inline(cell: Cell, device: torch.device) -> System:
    """1F1B of four stages in the caller's thread: what a single GPU needs."""
    schedule = ps.schedule("1f1b", stages=STAGES, micro_batches=cell.micro_batches)
    return pipeline(cell, device, schedule=all_in_turn(schedule), micro_batches=None)


def penstock_pipe(cell: Cell, device: torch.device, checkpoint: str = "never") -> System:
    """`ps.Pipe` with all partitions on the device."""
    model = cell.first_model()
    names = list(dict(model.named_parameters()))
    pipe = ps.Pipe(
        model,
        equal_cut(len(model)),
        devices=[device] * STAGES,
        chunks=cell.micro_batches,
        checkpoint=checkpoint,
    )
    return _module(cell, device, pipe, names)


def penstock_pipe_except_last(cell: Cell, device: torch.device) -> System:
    """Likewise, all micro-batches but the last run again before their backward."""
    return penstock_pipe(cell, device, "except_last")


def torchgpipe(cell: Cell, device: torch.device, checkpoint: str = "never") -> System:
    """torchgpipe 0.0.7, the same cut.

    Raises:
        ImportError: it is not on the path.
    """
    from torchgpipe import GPipe

    model = cell.first_model()
    names = list(dict(model.named_parameters()))
    lengths = equal_cut(len(model))
    pipe = GPipe(
        model, lengths, devices=[device] * STAGES, chunks=cell.micro_batches, checkpoint=checkpoint
    )
    return _module(cell, device, pipe, names)


def torchgpipe_except_last(cell: Cell, device: torch.device) -> System:
    """Likewise, with its default."""
    return torchgpipe(cell, device, "except_last")


def _module(cell: Cell, device: torch.device, pipe: nn.Module, names: list[str]) -> System:
    """A pipeline that is a module; its parameters are in the order of the plain model's."""
    x, y = cell.first_batch(device)

    def gather() -> None:
        with cell.mixed(device):
            loss = cell.loss(pipe(x), y)
        loss.backward()

    system = _loop(cell, pipe, gather)
    system.parameters = dict(zip(names, pipe.parameters(), strict=True))
    return system


def torch_pipelining(cell: Cell, device: torch.device) -> System:
    """torch.distributed.pipelining, all stages in this process, breadth first.

    The first connection between neighbours is left out: a process that is its own neighbour cannot
    connect to itself.
    """
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, ScheduleLoopedBFS
    from torch.distributed.pipelining import stage as stages_of_torch

    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    stages_of_torch._PipelineStageBase._get_init_p2p_neighbors_ops = lambda _: []
    model = cell.first_model().to(device)
    x, y = cell.first_batch(device)
    example = x.chunk(cell.micro_batches)[0]
    lengths = equal_cut(len(model))
    stages, first = [], 0
    for index, length in enumerate(lengths):
        part = model[first : first + length]
        first += length
        with torch.no_grad(), cell.mixed(device):
            output = part(example)
        output.requires_grad_()
        stage_input = example.detach().clone()
        if index:
            stage_input.requires_grad_()
        stage = PipelineStage(
            part, index, len(lengths), device, input_args=(stage_input,), output_args=(output,)
        )
        stages.append(stage)
        example = output
    runner = ScheduleLoopedBFS(stages, cell.micro_batches, loss_fn=cell.loss)

    def gather() -> None:
        with cell.mixed(device):
            runner.step(x, target=y, return_outputs=False)

    return _loop(cell, model, gather)


#: Those of the table, in its order. The first is the reference.
SYSTEMS: dict[str, Make] = {
    "plain": plain,
    "plain accumulate": plain_accumulate,
    "penstock threads 1f1b": penstock_1f1b,
    "penstock threads gpipe": penstock_gpipe,
    "penstock inline": penstock_inline,
    "penstock Pipe never": penstock_pipe,
    "penstock Pipe except_last": penstock_pipe_except_last,
    "torchgpipe never": torchgpipe,
    "torchgpipe except_last": torchgpipe_except_last,
    "torch pipelining looped BFS": torch_pipelining,
}
