"""GPipe's scaling table, and torchgpipe's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from side_by_side import Row, Section

import penstock as ps
from penstock.cluster.presets import Presets

#: Micro-batches, then normalised throughput at 2, 4 and 8 accelerators: GPipe, table 2.
TABLE = {
    "AmoebaNet": {1: (1.0, 1.13, 1.38), 4: (1.07, 1.26, 1.72), 32: (1.21, 1.84, 3.48)},
    "Transformer-48": {1: (1.0, 1.07, 1.3), 4: (1.7, 3.2, 4.8), 32: (1.8, 3.4, 6.3)},
}
#: torchgpipe on Tesla P40: (partitions, micro-batches, batch, layers per partition) to samples/s.
AMOEBANET = {(2, 1, 96, (7, 17)): 26.733, (2, 4, 256, (9, 15)): 41.133, (2, 32, 1280, (9, 15)): 47.386,
             (4, 1, 160, (3, 4, 5, 12)): 26.827, (4, 4, 360, (3, 6, 7, 8)): 44.543, (4, 32, 1152, (3, 6, 7, 8)): 72.412,
             (8, 1, 196, (2, 2, 2, 2, 2, 3, 4, 7)): 24.918, (8, 4, 480, (2, 2, 2, 3, 3, 4, 4, 4)): 70.065,
             (8, 32, 1280, (2, 2, 2, 3, 3, 4, 4, 4)): 132.413}  # fmt: skip
RESNET101 = {"no pipeline": (118, 1, (370,), 95.862), "1": (220, 2, (370,), 81.796), "2": (25000, 1667, (135, 235), 135.539),
             "4": (5632, 256, (44, 92, 124, 110), 265.958), "8": (5400, 150, (26, 22, 33, 44, 44, 66, 66, 69), 411.662)}  # fmt: skip


def chain_step(stages: Sequence[float], micro_batches: int, recompute: str) -> float:
    """Seconds of a step whose stages take these forwards, and twice as long for backwards;
    transfers are free.
    """
    costs = ps.Costs(forward=list(stages), backward=[2 * seconds for seconds in stages])
    schedule = ps.schedule(
        "gpipe", stages=len(stages), micro_batches=micro_batches, backward_order="reverse"
    )
    return ps.simulate(schedule, costs, recompute=recompute).makespan


def gpipe_table() -> Section:
    """Equal stages, as the paper's transformer has them: what the schedule alone makes."""
    base = chain_step([1 / 2] * 2, 1, "always")
    rows = [
        Row(
            f"{model}, K={k}, M={m}",
            paper,
            base / chain_step([1 / k / m] * k, m, "always"),
            fitted=(k, m) == (2, 1),
        )
        for model, by_count in TABLE.items()
        for m, papers in by_count.items()
        for k, paper in zip((2, 4, 8), papers, strict=True)
    ]
    return Section(
        "gpipe",
        "GPipe, table 2: throughput on K accelerators with M micro-batches, K=2 and M=1 being 1",
        "times",
        tuple(rows),
        ("the table (docs/literature/gpipe.md)",),
        (
            (
                "a chain of equal stages, backward twice the forward, all recomputed, free transfers, time in proportion to samples: nothing of the "
                "models' own costs"
            ),
        ),
        misses=(
            (
                "AmoebaNet is not equal: its cells differ in cost several times over, and K of them cannot be balanced; these rows say how much of "
                "the scaling the balance takes."
            ),
            (
                "The paper's batch differs from cell to cell (as large as fits), so that its M=1 column grows with K, and M=4 of the transformer "
                "gains more than a schedule can at one batch size: K=8 and M=4 cannot exceed 8 x 4 / 11 / 1 = 2.9 on equal terms, and 4.8 is "
                "published."
            ),
        ),
    )


#: From 2 to 8 accelerators at M=32, in table 3 of the paper: P100 without NVLink.
TABLE_3 = {"AmoebaNet": 2.7, "Transformer-48": 3.3}


def shape_table() -> Section:
    """From 2 to 8 accelerators in one row of the table, where batches differ less."""
    rows = []
    for m in (1, 4, 32):
        ours = chain_step([1 / 2 / m] * 2, m, "always") / chain_step([1 / 8 / m] * 8, m, "always")
        rows += [
            Row(f"{model}, M={m}", by_count[m][2] / by_count[m][0], ours)
            for model, by_count in TABLE.items()
        ]
        rows += [
            Row(f"{model}, M={m}, on P100 (table 3)", paper, ours)
            for model, paper in TABLE_3.items()
            if m == 32
        ]
    return Section(
        "gpipe-shape",
        "GPipe: from 2 to 8 accelerators",
        "times",
        tuple(rows),
        ("tables 2 and 3 (docs/literature/gpipe.md)",),
        ("as above",),
        misses=(
            "AmoebaNet's cells are not equal; M=1 and M=4 have other batches at K=8 than at K=2.",
        ),
    )


def cell_seconds(counts: Sequence[int]) -> list[float]:
    """Seconds of partitions in which every layer costs the same."""
    return [count / sum(counts) for count in counts]


def amoebanet_table() -> Section:
    """torchgpipe's speed-ups of AmoebaNet-D (18, 256), from its balance alone."""
    rows = []
    first = next(iter(AMOEBANET))
    for (n, m, batch, balance), published in AMOEBANET.items():
        recompute = "always" if m == 1 else "except_last"
        # One device's time is that of M=1 on any number of devices: one after the other.
        speed, equal = (
            (3 + 1) / chain_step([seconds / m for seconds in cell_seconds(balance)], m, recompute),
            4 / chain_step([1 / n / m] * n, m, recompute),
        )
        note = f"{published:g} samples/s; batch {batch:,}, balance {':'.join(map(str, balance))}; {equal:.2f} if perfectly balanced"
        rows.append(
            Row(f"n={n}, M={m}", published / AMOEBANET[first], speed, note, fitted=(n, m) == (2, 1))
        )
    return Section(
        "torchgpipe-amoebanet",
        "torchgpipe, AmoebaNet-D (18, 256) on P40: speed-up over n=2, M=1",
        "times",
        tuple(rows),
        (
            "samples/s, batches, micro-batches, balance and checkpointing (always at M=1, else all but the last) of its benchmark",
        ),
        (
            (
                "every one of its 24 layers costs the same, backward twice the forward; time in proportion to samples, free transfers: AmoebaNet is "
                "not in the zoo"
            ),
        ),
        misses=(
            (
                "4 partitions in 4 micro-batches gain less than that; batches differ from cell to cell (96 to 1,280), and with them how full "
                "devices are."
            ),
        ),
    )


def sections(report: Callable[[str], None]) -> list[Section]:
    """All of GPipe's and torchgpipe's."""
    report("GPipe, table 2")
    tables = [gpipe_table(), shape_table(), amoebanet_table()]
    report("ResNet-101 on P40")
    from resnet101 import resnet_table

    return [*tables, resnet_table(RESNET101, Presets.load().device("P40"))]
