"""BaPipe's headline: up to 3.2 times data parallelism, and models 4 times as large, on GPUs and
FPGA boards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import accumulate, combinations

import torch
from common import TOKENS, analytic, data_parallel_s, form, planned
from side_by_side import Row, Section

import penstock as ps
from penstock.cluster.device import Link
from penstock.cluster.machines import Cluster
from penstock.cluster.presets import Presets
from penstock.measure.work.work_counter import count
from penstock.profile.counts import ModelCounts
from penstock.profile.fpga import fits_on_chip, fpga
from penstock.simulate.plan_costs import all_reduce_seconds
from penstock.zoo.catalogue import model

GPUS = ("BaPipe-4xV100", "BaPipe-8xV100")
BOARDS = ("BaPipe-4xVCU118", "BaPipe-2xVCU129+2xVCU118", "BaPipe-4xVCU129")
#: Bandwidths between GPUs that are tried, in bytes/s: PCI Express 3 at its peak, what it carries
#: through a busy host, 10 Gb/s.
LINKS = {"PCIe 3 at its peak": 15.75e9, "4 GB/s": 4e9, "10 Gb/s": 1.25e9}
#: Samples of data parallelism on each GPU.
SHARE = {"vgg16": 32, "resnet50": 32, "gnmt": 64}
#: The same on each FPGA board, and how many it takes at a time.
BOARD_SHARES = ((16, 16), (16, 1))
MODELS = tuple(SHARE)


@cache
def counted(name: str) -> ModelCounts:
    """What a model does."""
    shape, dtype = (
        ((1, 2, TOKENS), torch.int64) if name == "gnmt" else ((1, 3, 224, 224), torch.float32)
    )
    return count(model(name, device="meta"), torch.zeros(shape, dtype=dtype, device="meta"), 128)


def gpu_rows(report: Callable[[str], None]) -> list[Row]:
    """Our plan over data parallelism, at several speeds of the links."""
    rows = []
    for whole in map(ps.cluster, GPUS):
        for name in MODELS:
            report(f"{name} on {whole.name}")
            for words, bandwidth in LINKS.items():
                cluster = replace(whole, inside=Link(whole.inside.latency_s, bandwidth))
                rows.append(_gpu_row(name, cluster, f"{name} on {whole.ranks} V100, {words}"))
    return rows


def _gpu_row(name: str, cluster: Cluster, case: str) -> Row:
    layers, batch = analytic(name, "V100", 128), SHARE[name] * cluster.ranks
    plain, bare = (
        data_parallel_s(layers, cluster, SHARE[name], overlap=overlap) for overlap in (True, False)
    )
    candidates = [
        planned(layers, cluster, batch, planner) for planner in ("bapipe", "dapple", "auto")
    ]
    plans = [candidate for candidate in candidates if candidate is not None]
    best = min(plans, key=lambda plan: plan.predicted.step_s)
    note = (
        f"{best.planner}: {form(best)}; {bare / best.predicted.step_s:.2f} over DP without overlap"
    )
    return Row(case, None, plain / best.predicted.step_s, note)


@cache
def board_profile(name: str, board: str, samples: int, *, on_chip: bool) -> ps.Profile:
    """A model on one board in 16 bits, its weights on the chip or in the DDR."""
    counts = replace(counted(name), batch=samples)
    return fpga(counts, Presets.load().device(board), dtype="float16", on_chip=on_chip)


def board_plain_s(name: str, cluster: Cluster, share: int, at_once: int) -> float:
    """Data parallelism over boards, each with an even share, so that the slowest counts; weights
    are in the DDR.
    """
    parts = share // at_once
    slowest = max(
        parts * sum(board_profile(name, kind, at_once, on_chip=False).step_seconds(at_once))
        for kind in cluster.kinds
    )
    return slowest + all_reduce_seconds(
        range(cluster.ranks), _weight_bytes(name, 0, len(counted(name))), cluster
    )


def _weight_bytes(name: str, start: int, stop: int) -> float:
    """Of layers start .. stop - 1, in 16 bits: half of what was counted."""
    return sum(layer.parameter_bytes for layer in counted(name).layers[start:stop]) / 2


Stage = tuple[float, float, float]


def board_stages(name: str, cluster: Cluster, samples: int) -> list[dict[tuple[int, int], Stage]]:
    """Per board and range of layers: forward and backward of a micro-batch, and the update; off the
    chip what does not fit there.
    """
    layers = len(counted(name))
    before = [0.0, *accumulate(_weight_bytes(name, i, i + 1) for i in range(layers))]
    stages = []
    for board in cluster.devices:
        sums = {}
        for on_chip in (True, False):
            profile = board_profile(name, board.name, samples, on_chip=on_chip)
            sums[on_chip] = (
                [
                    [0.0, *accumulate(profile.seconds(phase, samples))]
                    for phase in ("forward", "backward")
                ],
                profile.update_s_per_byte,
            )
        ranges = {}
        for start, stop in combinations(range(layers + 1), 2):
            weights = before[stop] - before[start]
            (forward, backward), update = sums[fits_on_chip(weights, board)]
            ranges[start, stop] = (
                forward[stop] - forward[start],
                backward[stop] - backward[start],
                2 * weights * update,
            )
        stages.append(ranges)
    return stages


def best_cut(stages: list[dict[tuple[int, int], Stage]], layers: int) -> list[tuple[int, int]]:
    """The ranges of layers whose slowest forward and backward are least, board by board in their
    order.
    """
    best: dict[int, tuple[float, list[tuple[int, int]]]] = {0: (0.0, [])}
    for number, layer_costs in enumerate(stages):
        last = number == len(stages) - 1
        after: dict[int, tuple[float, list[tuple[int, int]]]] = {}
        for stop in [layers] if last else range(1, layers):
            tried = [
                (max(slowest, sum(layer_costs[start, stop][:2])), [*cuts, (start, stop)])
                for start, (slowest, cuts) in best.items()
                if start < stop
            ]
            if tried:
                after[stop] = min(tried)
        best = after
    return best[layers][1]


def board_pipeline(name: str, cluster: Cluster, batch: int) -> tuple[float, str]:
    """Seconds of a step of BaPipe's pipeline over boards, and what it is: the best number of
    micro-batches.
    """
    candidates = []
    sizes = [2**power for power in range(batch.bit_length()) if batch % 2**power == 0]
    for samples in sizes:
        stages = board_stages(name, cluster, samples)
        cut = best_cut(stages, len(counted(name)))
        rows = [layer_costs[part] for layer_costs, part in zip(stages, cut, strict=True)]
        out = [
            samples * counted(name).layers[stop - 1].output_bytes_per_sample / 2
            for _, stop in cut[:-1]
        ]
        rate = cluster.between.bandwidth_bytes_per_s
        whole = [cluster.between.latency_s + count / rate for count in out]
        # A stage sends its output while it computes: only a link that is slower adds time.
        streamed = [
            cluster.between.latency_s + max(count / rate - row[0], 0.0)
            for count, row in zip(out, rows, strict=False)
        ]
        step, still = (
            _board_step(rows, transfer, batch // samples) for transfer in (streamed, whole)
        )
        chips = sum(
            fits_on_chip(_weight_bytes(name, *part), board)
            for part, board in zip(cut, cluster.devices, strict=True)
        )
        words = f"cut {':'.join(str(b - a) for a, b in cut)}, M={batch // samples}, weights of {chips} boards on their chips; not streamed {still / step:.2f} times as long"
        candidates.append((step, words))
    return min(candidates)


def _board_step(rows: list[Stage], transfer: list[float], micro_batches: int) -> float:
    forward, backward, update = map(list, zip(*rows, strict=True))
    costs = ps.Costs(forward=forward, backward=backward, update=update, transfer=transfer)
    return ps.simulate(
        ps.schedule("1f1b", stages=len(rows), micro_batches=micro_batches), costs
    ).makespan


def board_rows(report: Callable[[str], None]) -> list[Row]:
    """The same over FPGA boards."""
    rows = []
    for cluster in map(ps.cluster, BOARDS):
        report(cluster.name)
        for name in MODELS:
            for share, at_once in BOARD_SHARES:
                seconds, note = board_pipeline(name, cluster, share * cluster.ranks)
                case = f"{name} on {cluster.name.removeprefix('BaPipe-')}, {share} samples a board, {'all at once' if at_once == share else 'one at a time'}"
                rows.append(
                    Row(case, None, board_plain_s(name, cluster, share, at_once) / seconds, note)
                )
    return rows


def deep_gnmt(layers: int, batch: int) -> ps.Profile:
    """GNMT with `layers` LSTM layers: GNMT-16's with the third of encoder and decoder repeated."""
    profiled = analytic("gnmt16", "V100", 128)
    names = [
        layer.name.rpartition(".")[2] if "classifier" in layer.name else layer.name
        for layer in profiled
    ]
    halves = ("encoder", "decoder")
    third = {half: names.index(f"{half}.lstm3") for half in halves}
    last = {half: names.index(f"{half}.lstm8") for half in halves}
    deep_layers = []
    for index, layer in enumerate(profiled):
        # Between the third and the last layer of a half, the third takes all places.
        half = next((half for half in halves if third[half] <= index < last[half]), None)
        if half is None:
            deep_layers.append(layer)
        elif index == third[half]:
            for number in range(3, layers // 2):
                deep_layers.append(replace(layer, name=f"{half}.lstm{number}"))
    return replace(profiled, layers=tuple(deep_layers), batch=batch, fingerprint=f"gnmt-{layers}")


def deepest(cluster: Cluster, planner: str, **options: object) -> int:
    """The most LSTM layers with which a batch fits, a multiple of 2."""
    batch, low, high = SHARE["gnmt"] * cluster.ranks, 6, 2048
    while high - low > 2:
        middle = (low + high) // 4 * 2
        fits = (
            planned(deep_gnmt(middle, batch), cluster, batch, planner, recompute="never", **options)
            is not None
        )
        low, high = (middle, high) if fits else (low, middle)
    return low


def memory_rows(report: Callable[[str], None]) -> list[Row]:
    """The deepest GNMT: a pipeline's over data parallelism's."""
    rows = []
    for cluster in map(ps.cluster, GPUS):
        report(f"deepest GNMT on {cluster.name}")
        plain = deepest(cluster, "data-parallel", micro_batches=cluster.ranks)
        for words, options in (
            ("micro-batches as large", {"micro_batches": cluster.ranks}),
            ("smaller micro-batches", {}),
        ):
            ours = deepest(cluster, "bapipe", **options)
            note = f"GNMT-{ours} against GNMT-{plain} ({_parameters(ours) / _parameters(plain):.1f} times the parameters)"
            rows.append(Row(f"{cluster.ranks} V100, {words}", 4.0, ours / plain, note))
    return rows


def _parameters(layers: int) -> int:
    return sum(layer.parameters for layer in deep_gnmt(layers, 128))


def sections(report: Callable[[str], None]) -> list[Section]:
    """GPUs, boards, memory."""
    gpus, boards, memory = gpu_rows(report), board_rows(report), memory_rows(report)
    published = (
        (
            "up to 3.2 times and 4 times: the abstract. Its tables are not public; which models, clusters and baselines they are for is "
            "from memory, and no link's speed or batch is known"
        ),
    )
    ours = ("ours: seconds of data parallelism over those of our plan",)
    return [
        Section(
            "bapipe-gpu",
            "BaPipe on GPUs: our best plan over data parallelism",
            "times",
            (*gpus, _largest(gpus)),
            published,
            (
                *ours,
                (
                    f"V100 at float32 by roofline; {_words(SHARE)} samples on each device, GNMT with {TOKENS} tokens; data parallelism adds up gradients "
                    "beside the backward in buckets of 25 MiB; ours is the fastest of `bapipe`, `dapple` and `auto`, with a flush after every batch"
                ),
            ),
            misses=(
                (
                    "Where links carry PCI Express' peak, data parallelism with its gradients beside the backward is as good as anything, and better "
                    "than ours: our simulator adds up gradients after the last backward. 3.2 times is in the range that slower links give; which of "
                    "them the paper had is not known, and the largest over links that we chose says no more than that."
                ),
            ),
        ),
        Section(
            "bapipe-fpga",
            "BaPipe on FPGA boards: a pipeline over data parallelism",
            "times",
            (*boards, _largest(boards)),
            published,
            (
                *ours,
                "boards: presets' DSPs and chips' memory (from the chips' data), clock, DDR and links assumed; 16 bits; 80 % of the DSPs' peak",
                (
                    "the pipeline: 1F1B-AS, features stream to the next board while they are computed; layers cut so that the slowest board is least, "
                    "weights on the chip of every board whose weights and gradients fit there; the best number of micro-batches. Data parallelism: "
                    "each board has the whole model, so its weights are in the DDR, and waits for the slowest board; gradients are added up afterwards"
                ),
            ),
            misses=(
                (
                    "On equal boards a pipeline gains only where data parallelism takes few samples at a time, so that its weights pass through the "
                    "DDR for each; then it is bound by the DDR and ours by the DSPs. On mixed boards it gains besides, because even shares wait for the slowest. "
                    "It is GNMT that gains most, whose weights are largest for what it computes. The paper's batch is not public; the largest over ways that we chose says no more than that 3.2 is in reach."
                ),
            ),
        ),
        Section(
            "bapipe-memory",
            "BaPipe: the deepest GNMT that fits over data parallelism's, without recompute",
            "times",
            tuple(memory),
            published,
            (
                (
                    f"16 GB; a batch of {SHARE['gnmt']} samples per device, {TOKENS} tokens; SGD with momentum (12 bytes a parameter); layers like "
                    "GNMT-16's third repeated; `bapipe`'s cut"
                ),
            ),
            misses=(
                (
                    "4 devices hold 4 times the weights, but no more than as many layers: of activations 1F1B's first rank holds as many "
                    "micro-batches as there are devices. Smaller micro-batches give more than 4."
                ),
            ),
        ),
    ]


def _largest(rows: list[Row]) -> Row:
    best = max(rows, key=lambda row: row.ours or 0)
    return Row("largest", 3.2, best.ours, best.case)


def _words(shares: dict[str, int]) -> str:
    return ", ".join(f"{count} ({name})" for name, count in shares.items())
