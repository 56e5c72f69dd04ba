"""BaPipe's headline: up to 3.2 times data parallelism, and models 4 times as large, on GPUs and FPGA boards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from common import TOKENS, analytic, data_parallel_s, form, planned
from side_by_side import Row, Section

import penstock as ps
from penstock.cluster.machines import Cluster
from penstock.cluster.presets import Presets
from penstock.measure.counts import count
from penstock.profile.counts import ModelCounts
from penstock.profile.fpga import Units, fits_on_chip, fpga
from penstock.profile.paced import Profiles
from penstock.simulate.plan_costs import meeting_seconds
from penstock.zoo.catalogue import model

GPUS = ("BaPipe-4xV100", "BaPipe-8xV100")
BOARDS = ("BaPipe-4xVCU118", "BaPipe-2xVCU129+2xVCU118", "BaPipe-4xVCU129")
#: Samples of data parallelism on each device.
SHARE = {"vgg16": 32, "resnet50": 32, "gnmt": 64}
#: The same on FPGA boards, which have 4 GB.
BOARD_SHARE = {"vgg16": 16, "resnet50": 16, "gnmt": 16}
MODELS = tuple(SHARE)


@cache
def counted(name: str) -> ModelCounts:
    """What a model does."""
    shape, dtype = ((1, 2, TOKENS), torch.int64) if name == "gnmt" else ((1, 3, 224, 224), torch.float32)
    return count(model(name, device="meta"), torch.zeros(shape, dtype=dtype, device="meta"), 128)


def gpu_rows(report: Callable[[str], None]) -> list[Row]:
    """Our best synchronous plan over data parallelism."""
    rows = []
    for cluster in map(ps.cluster, GPUS):
        for name in MODELS:
            report(f"{name} on {cluster.name}")
            own, batch = analytic(name, "V100", 128), SHARE[name] * cluster.ranks
            plain, bare = (data_parallel_s(own, cluster, SHARE[name], overlap=overlap) for overlap in (True, False))
            found = [each for each in (planned(own, cluster, batch, planner) for planner in ("bapipe", "auto")) if each is not None]
            best = min(found, key=lambda each: each.predicted.step_s)
            note = f"{best.planner}: {form(best)}; {bare / best.predicted.step_s:.2f} times DP without overlap"
            rows.append(Row(f"{name} on {cluster.name}", None, plain / best.predicted.step_s, note))
    return rows


def board_profiles(name: str, cluster: Cluster, batch: int, units: Units, *, on_chip: bool | None = None) -> dict[str, ps.Profile]:
    """One for every kind of board, in 16 bits."""
    presets = Presets.load()
    return {
        kind: fpga(counted(name), presets.device(kind), batch=batch, dtype="float16", on_chip=on_chip, units=units)
        for kind in cluster.kinds
    }


def board_plain_s(name: str, cluster: Cluster) -> float:
    """Data parallelism over boards: the slowest with an even share, weights in its DDR where they do not fit the chip."""
    share = BOARD_SHARE[name]
    profiles = board_profiles(name, cluster, share * cluster.ranks, "shared")
    slowest = max(sum(each.step_seconds(share)) for each in profiles.values())
    # Gradients of 16 bits: half of what the profiles count.
    return slowest + meeting_seconds(range(cluster.ranks), sum(each.parameter_bytes for each in counted(name)) / 2, cluster)


def stays_on_chip(name: str, plan: ps.Plan, cluster: Cluster) -> bool:
    """Whether every board of a plan holds its stages' weights and gradients on its chip."""
    held = [0.0] * plan.ranks
    for (start, stop), ranks in zip(plan.bounds, plan.schedule.ranks_of_stage, strict=True):
        for rank in ranks:
            held[rank] += sum(layer.parameter_bytes for layer in counted(name).layers[start:stop]) / 2
    devices = plan.devices or tuple(range(plan.ranks))
    return all(fits_on_chip(count, cluster.devices[device]) for count, device in zip(held, devices, strict=True))


def board_plan(name: str, cluster: Cluster) -> tuple[float, str]:
    """Seconds of a step of the best pipeline over boards, and what it is."""
    batch = BOARD_SHARE[name] * cluster.ranks
    found: list[tuple[float, str]] = []
    for units in ("shared", "separate"):
        for on_chip in (True, False):
            profiles: Profiles = board_profiles(name, cluster, batch, units, on_chip=on_chip)
            plan = planned(profiles, cluster, batch, "bapipe")
            if plan is None or (on_chip and not stays_on_chip(name, plan, cluster)):
                continue
            where = "weights on the chips" if on_chip else "weights in DDR"
            found.append((plan.predicted.step_s, f"bapipe: {form(plan)}, units {units}, {where}"))
    return min(found, default=(float("nan"), "nothing fits"))


def board_rows(report: Callable[[str], None]) -> list[Row]:
    """The same over FPGA boards."""
    rows = []
    for cluster in map(ps.cluster, BOARDS):
        for name in MODELS:
            report(f"{name} on {cluster.name}")
            seconds, note = board_plan(name, cluster)
            rows.append(Row(f"{name} on {cluster.name}", None, board_plain_s(name, cluster) / seconds, note))
    return rows


def deep_gnmt(layers: int, batch: int) -> ps.Profile:
    """GNMT with so many LSTM layers: GNMT-16's with the third of encoder and decoder repeated."""
    own = analytic("gnmt16", "V100", 128)
    names = [each.name.rpartition(".")[2] if "classifier" in each.name else each.name for each in own]
    third = {half: next(i for i, name in enumerate(names) if name == f"{half}.lstm3") for half in ("encoder", "decoder")}
    last = {half: next(i for i, name in enumerate(names) if name == f"{half}.lstm8") for half in ("encoder", "decoder")}
    made = []
    for index, each in enumerate(own):
        half = next((half for half in third if third[half] <= index < last[half]), None)
        if half is None:
            made.append(each)
        elif index == third[half]:
            made += [replace(each, name=f"{half}.lstm{3 + n}") for n in range(layers // 2 - 3)]
    return replace(own, layers=tuple(made), batch=batch, fingerprint=f"gnmt-{layers}")


def deepest(cluster: Cluster, planner: str, **options: object) -> int:
    """The most LSTM layers with which a batch fits, a multiple of 2."""
    batch, low, high = SHARE["gnmt"] * cluster.ranks, 6, 2048
    while high - low > 2:
        middle = (low + high) // 4 * 2
        fits = planned(deep_gnmt(middle, batch), cluster, batch, planner, recompute="never", **options) is not None
        low, high = (middle, high) if fits else (low, middle)
    return low


def memory_rows(report: Callable[[str], None]) -> list[Row]:
    """The deepest GNMT: a pipeline's over data parallelism's."""
    rows = []
    for cluster in map(ps.cluster, GPUS):
        report(f"deepest GNMT on {cluster.name}")
        plain = deepest(cluster, "data-parallel", micro_batches=cluster.ranks)
        ours = deepest(cluster, "bapipe")
        note = f"GNMT-{ours} against GNMT-{plain} ({_parameters(ours) / _parameters(plain):.1f} times the parameters)"
        rows.append(Row(f"layers of the largest GNMT on {cluster.name}, over DP's", 4.0, ours / plain, note))
    return rows


def _parameters(layers: int) -> int:
    return sum(each.parameters for each in deep_gnmt(layers, 128))


def sections(report: Callable[[str], None]) -> list[Section]:
    """GPUs, boards, memory."""
    gpus, boards, memory = gpu_rows(report), board_rows(report), memory_rows(report)
    top = [Row("largest on GPUs", 3.2, max(row.ours or 0 for row in gpus)), Row("largest on FPGA boards", 3.2, max(row.ours or 0 for row in boards))]
    published = ("up to 3.2 times and 4 times: the abstract; its tables are not public, and which models, batches and baselines they are for is "
                 "from memory",)  # fmt: skip
    return [
        Section("bapipe", "BaPipe: our best plan over data parallelism, times faster", "times", (*gpus, *boards, *top), published, (
            f"GPUs: V100 at float32 by roofline, PCIe 3 assumed (presets BaPipe-4xV100, -8xV100); data parallelism with {SHARE} samples on "
            "each device, gradients beside the backward in buckets of 25 MiB; ours the faster of `bapipe` and `auto`, both with a flush",
            f"FPGA: presets' DSPs, clock and DDR (clock, DDR and links assumed), 16 bits; {BOARD_SHARE} samples on each board; data parallelism "
            "waits for the slowest board; ours the fastest of `bapipe` with shared or separate units, weights on the chips where they fit",
        ), misses=(
            "Our data parallelism has perfect links and overlap, so that on V100 over PCIe there is less to gain than against the frameworks "
            "of 2020; its paper's baselines include PipeDream and GPipe with memory limits.",
        )),
        Section("bapipe-memory", "BaPipe: the deepest GNMT that fits, without recompute", "times", tuple(memory), published,
                (f"16 GB; {SHARE['gnmt']} samples per device, {TOKENS} tokens; SGD with momentum (12 bytes a parameter); layers like GNMT-16's "
                 "third repeated",)),
    ]  # fmt: skip
