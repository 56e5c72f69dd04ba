"""One cell of a table: systems are made, checked, and timed in turn."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

import torch

from kit.graphs import Captured
from kit.section import Section, words_of
from kit.systems import Gradients, Make, System, error_of, plain
from kit.timing import columns, time_in_turns
from kit.workloads import Cell

#: The system whose gradients and times the others are held against.
REFERENCE = "plain"


def measure_cell(
    section: Section, cell: Cell, makers: Mapping[str, Make], prefix: str = ""
) -> None:
    """Write a row for each system of a cell, `prefix` in front of its name.

    A system that cannot be made, or whose gradients are not those of plain training, has a row that
    says so. The reference for gradients is plain training of the whole batch, in the same
    precision.
    """
    cell.allow_tf32()
    device = section.device
    rows: dict[str, dict[str, Any]] = {}
    systems: dict[str, System] = {}
    reference = plain(cell, device).gradients()
    section.free()
    for name, make in makers.items():
        rows[name] = {}
        if section.seconds_left() < 2:
            rows[name] = {"status": "skipped", "note": "out of time"}
            continue
        try:
            systems[name] = _made(section, cell, make, reference, rows[name])
        except ModuleNotFoundError as error:
            rows[name] = {"status": "skipped", "note": f"{error.name} is not on the path"}
        except Exception as error:  # noqa: BLE001 - one system is lost
            traceback.print_exc()
            rows[name] = {"status": "failed", "note": words_of(error)}
            section.free()
    series = time_in_turns(
        {name: system.step for name, system in systems.items()},
        device,
        smoke=section.smoke,
        seconds_left=section.seconds_left,
    )
    for name, system in systems.items():
        rows[name].update(columns(series[name], series.get(REFERENCE)))
        rows[name].update(_peak(section, system))
        if series[name].error is not None:
            rows[name].update(status="failed", note=series[name].error)
    for name, values in rows.items():
        section.row(f"{prefix}{cell.label} {name}", **values)
    for system in systems.values():
        system.close()


def _made(
    section: Section, cell: Cell, make: Make, reference: Gradients, values: dict[str, Any]
) -> System:
    """A system, its gradients checked."""
    before = _allocated(section)
    system = make(cell, section.device)
    if isinstance(system, Captured):
        values["capture_s"] = system.capture_s
    values["tf32"] = "on" if cell.tf32 else "off"
    values["error"] = error_of(system.gradients(), reference)
    if not values["error"] <= cell.tolerance:
        values["status"] = "wrong"
        values["note"] = "its gradients are not those of plain training"
    values["resident_MiB"] = (_allocated(section) - before) / 2**20
    return system


def _allocated(section: Section) -> int:
    return torch.cuda.memory_allocated(section.device) if section.on_gpu else 0


def _peak(section: Section, system: System) -> dict[str, Any]:
    """Memory that a step takes above what all systems hold between steps."""
    if not section.on_gpu:
        return {}
    torch.cuda.reset_peak_memory_stats(section.device)
    before = torch.cuda.memory_allocated(section.device)
    try:
        system.step()
    except Exception as error:  # noqa: BLE001 - times are there already
        return {"note": words_of(error)}
    section.synchronize()
    peak = torch.cuda.max_memory_allocated(section.device)
    reserved = torch.cuda.max_memory_reserved(section.device)
    return {"step_peak_MiB": (peak - before) / 2**20, "reserved_of_all_MiB": reserved / 2**20}
