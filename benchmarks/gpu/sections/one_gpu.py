"""A training step on one GPU: plain PyTorch, Penstock, torchgpipe, torch's own pipelining, at the
same work.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from kit.section import Section
from kit.systems import SYSTEMS, plain, plain_accumulate, plain_compile
from kit.table import measure_cell
from kit.workloads import Cell, gpt2, mlp, vgg19

#: Seconds that compiling the MLP may take.
COMPILE_S = 25
#: What one GPU cannot run, said in the table.
IMPOSSIBLE = {
    "torch pipelining, several ranks": "NCCL refuses two ranks on a GPU, gloo sends no CUDA tensors",
    "DeepSpeed pipeline": "needs NCCL between ranks on GPUs of their own",
    "DDP over NCCL": "likewise",
}


def cells(*, smoke: bool) -> list[Cell]:
    """By worth."""
    if smoke:
        return [mlp(smoke=True), vgg19(smoke=True), gpt2(smoke=True)]
    return [
        mlp(smoke=False),
        vgg19(smoke=False, micro_batches=16),
        gpt2(smoke=False, micro_batches=8),
        vgg19(smoke=False, micro_batches=1),
        gpt2(smoke=False, micro_batches=1),
        vgg19(smoke=False, micro_batches=8),
        gpt2(smoke=False, micro_batches=4),
        replace(vgg19(smoke=False, micro_batches=16), tf32=True),
    ]


def _compiled(section: Section) -> None:
    """Last: what torch.compile takes to compile is taken from nothing else then."""
    cell = mlp(smoke=section.smoke)
    if not section.needs_gpu(f"compiled: {cell.label}"):
        return
    if section.seconds_left() < COMPILE_S:
        section.row(f"compiled: {cell.label}", "skipped", note="out of time")
        return
    systems = {"plain": plain, "plain accumulate": plain_accumulate, "plain compile": plain_compile}
    measure_cell(section, cell, systems, prefix="compiled: ")


def measure(section: Section) -> None:
    """A row for each cell and system."""
    for cell in cells(smoke=section.smoke):
        if section.seconds_left() < 5:
            section.row(cell.label, "skipped", note="out of time")
            continue
        measure_cell(section, cell, SYSTEMS)
        section.free()
    _compiled(section)
    for name, reason in IMPOSSIBLE.items():
        section.row(name, "not on this machine", note=reason)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
