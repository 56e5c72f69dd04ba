"""The largest GPT that trains on this card: predicted from two small ones, then run at a size that
fits and at one that does not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from kit.section import Section
from kit.systems import Make, System, pipeline, plain_accumulate
from kit.workloads import Cell, gpt2

#: Numbers of blocks that the prediction is made from.
SMALL = (2, 4)
#: Shares of the free memory that runs are predicted to take: one that fits, one that does not.
FITS, FITS_NOT = 0.90, 1.08


@dataclass(frozen=True)
class Way:
    """A way to train."""

    name: str
    micro_batches: int
    make: Make


def _recomputing(cell: Cell, device: torch.device) -> System:
    return pipeline(cell, device, recompute="always")


def _offloading(cell: Cell, device: torch.device) -> System:
    return pipeline(cell, device, offload=True)


WAYS = (
    Way("plain M=1", 1, plain_accumulate),
    Way("plain M=8", 8, plain_accumulate),
    Way("penstock 1f1b M=8", 8, pipeline),
    Way("penstock 1f1b M=8 recompute", 8, _recomputing),
    Way("penstock 1f1b M=8 offload", 8, _offloading),
)


def measure(section: Section) -> None:
    """Rows of what the largest model takes, by way to train."""
    for way in WAYS:
        if not section.on_gpu:
            section.row(way.name, "not on this machine")
            continue
        section.attempt(way.name, lambda way=way: _bisected(section, way), least_s=5)
        section.free()


def _cell(way: Way, blocks: int, *, smoke: bool) -> Cell:
    """Wide blocks, so that few of them fill the card."""
    cell = gpt2(smoke=smoke, micro_batches=way.micro_batches, layers=blocks)
    if smoke:
        return cell
    return replace(cell, make=lambda: wide_gpt(blocks))


def wide_gpt(blocks: int) -> torch.nn.Sequential:
    """Blocks of width 4096: 0.2 billion parameters each. Made on the GPU, where initial weights
    take no time.
    """
    from penstock.zoo.catalogue import model

    with torch.device("cuda"):
        return model("gpt", layers=blocks, width=4096, heads=32, tokens=1024, vocabulary=50257)


def _peak(section: Section, way: Way, blocks: int) -> float:
    """Bytes that two steps take at most."""
    section.free()
    torch.cuda.reset_peak_memory_stats(section.device)
    system = way.make(_cell(way, blocks, smoke=section.smoke), section.device)
    try:
        for _ in range(2):
            system.step()
        section.synchronize()
    finally:
        system.close()
    return float(torch.cuda.max_memory_allocated(section.device))


def _bisected(section: Section, way: Way) -> dict[str, object]:
    """A line through two small runs, and one run on either side of where it meets the card's
    memory.
    """
    small = [_peak(section, way, blocks) for blocks in SMALL]
    per_block = (small[1] - small[0]) / (SMALL[1] - SMALL[0])
    fixed = small[0] - per_block * SMALL[0]
    section.free()
    free, _ = torch.cuda.mem_get_info(section.device)

    def blocks_at(share: float) -> int:
        return max(1, int((free * share - fixed) / per_block))

    fits, fits_not = blocks_at(FITS), max(blocks_at(FITS) + 1, blocks_at(FITS_NOT))
    row: dict[str, object] = {
        "GiB_per_block": per_block / 2**30,
        "blocks_that_fit": fits,
        "predicted_GiB": (fixed + per_block * fits) / 2**30,
    }
    row["allocated_GiB"] = _outcome(section, way, fits)
    row["blocks_that_do_not_fit"] = fits_not
    row["beyond"] = _outcome(section, way, fits_not)
    good = row["allocated_GiB"] != "out of memory" and row["beyond"] == "out of memory"
    return row | {"as_predicted": good}


def _outcome(section: Section, way: Way, blocks: int) -> float | str:
    """GiB that a run takes, or that it does not fit."""
    if section.seconds_left() < 4:
        return "out of time"
    try:
        return _peak(section, way, blocks) / 2**30
    except Exception as error:
        if "out of memory" not in str(error).lower():
            raise
        return "out of memory"
