"""CUDA graphs of the cells of section one_gpu: of plain PyTorch, and of a pipeline's step."""

from __future__ import annotations

from kit.graphs import micro_batch, penstock_step, whole_step
from kit.section import Section
from kit.systems import Make, compile_reduce_overhead, plain, plain_accumulate
from kit.table import measure_cell
from kit.workloads import gpt2, mlp, vgg19

SYSTEMS: dict[str, Make] = {
    "plain": plain,
    "plain accumulate": plain_accumulate,
    "plain graph of a micro-batch": micro_batch,
    "plain graph of the step": whole_step,
    "penstock graph of the step": penstock_step,
}


def measure(section: Section) -> None:
    """Rows for three cells; "error" shows that replays do what the eager step does."""
    small = section.smoke
    cells = [mlp(smoke=small), vgg19(smoke=small), gpt2(smoke=small)]
    for cell in cells:
        names = [f"{cell.label} {name}" for name in SYSTEMS]
        if not section.needs_gpu(*names):
            continue
        if section.seconds_left() < 8:
            section.row(cell.label, "skipped", note="out of time")
            continue
        measure_cell(section, cell, SYSTEMS)
        section.free()
    # Last: torch.compile takes what is left, and with several micro-batches in flight it may
    # refuse.
    if section.on_gpu and section.seconds_left() > 15:
        reduced = {"plain": plain, "compile reduce-overhead": compile_reduce_overhead}
        measure_cell(section, cells[0], reduced, prefix="compiled: ")
