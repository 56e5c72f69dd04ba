"""Activations that wait in host memory: what a step takes, and how much of the copies hides behind
computing.
"""

from __future__ import annotations

import torch
from kit.section import Section
from kit.systems import System, pipeline
from kit.timing import columns, time_in_turns
from kit.workloads import Cell, gpt2

from penstock.grad.offload import SMALLEST

#: Shares of the saved bytes, in percent.
PERCENT = (0, 25, 50, 100)


def measure(section: Section) -> None:
    """Rows for nothing, parts and all of what a stage saves; and how much of the copies hides."""
    cell = gpt2(smoke=section.smoke)
    section.attempt("offload", lambda: _compared(section, cell))


def _compared(section: Section, cell: Cell) -> dict[str, object]:
    systems = {
        f"offload {percent} %": pipeline(cell, section.device, offload=percent / 100)
        for percent in PERCENT
    }
    series = time_in_turns(
        {name: system.step for name, system in systems.items()},
        section.device,
        smoke=section.smoke,
        seconds_left=section.seconds_left,
    )
    for name, system in systems.items():
        values = columns(series[name], series["offload 0 %"])
        section.row(name, **values, **_peak(section, system))
        system.close()
    compute_s, step_s = (series[name].median_s() for name in ("offload 0 %", "offload 100 %"))
    if compute_s is None or step_s is None:
        raise RuntimeError("; ".join(str(measured.error) for measured in series.values()))
    nbytes = saved_bytes(cell, section.device)
    row: dict[str, object] = {"saved_MiB": nbytes / 2**20, "added_ms": (step_s - compute_s) * 1e3}
    ceilings = [section.found("facts", f"pinned {way}").get("GB_per_s") for way in ("h2d", "d2h")]
    if section.on_gpu and all(ceilings):
        copy_s = sum(nbytes / 1e9 / ceiling for ceiling in ceilings)
        row["copies_alone_ms"] = copy_s * 1e3
        row["overlap"] = (compute_s + copy_s - step_s) / min(compute_s, copy_s)
        row["step_to_serial"] = step_s / (compute_s + copy_s)
    return row


def _peak(section: Section, system: System) -> dict[str, object]:
    if not section.on_gpu:
        return {}
    torch.cuda.reset_peak_memory_stats(section.device)
    before = torch.cuda.memory_allocated(section.device)
    system.step()
    section.synchronize()
    return {"step_peak_MiB": (torch.cuda.max_memory_allocated(section.device) - before) / 2**20}


def saved_bytes(cell: Cell, device: torch.device) -> int:
    """Bytes that a batch's backward keeps, weights and what is too small to move left out; shared
    memory counts once.
    """
    model = cell.first_model().to(device)
    x, y = cell.first_batch(device)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    total = 0
    for inputs, targets in zip(
        x.chunk(cell.micro_batches), y.chunk(cell.micro_batches), strict=True
    ):
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights and tensor.nbytes >= SMALLEST:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with hooks, cell.mixed(device):
            loss = cell.loss(model(inputs), targets)
        del loss
        total += sum(sizes.values())
    return total
