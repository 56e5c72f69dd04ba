"""torchgpipe's ResNet-101 on P40."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise

import torch
from side_by_side import Row, Section

import penstock as ps
from penstock.cluster.device import Device
from penstock.simulate.plan_costs import place_costs, stage_costs
from penstock.zoo.blocks.resnet import Bottleneck, build_resnet

#: torchgpipe's chain has 4 layers before the first block, 11 in each of 33 blocks, and 3 behind
#: them; ours has a layer for each block.
BEFORE, IN_BLOCK, BLOCKS = 4, 11, 33
#: (batch, micro-batches, layers per partition, samples/s)
Published = tuple[int, int, tuple[int, ...], float]


def profile(device: Device) -> ps.Profile:
    """ResNet-101 as the zoo would make it, on the device's roofline at float32."""
    with torch.device("meta"):
        model = build_resnet(Bottleneck, (3, 4, 23, 3), 1000, 224, 3)
        example = torch.empty(1, 3, 224, 224)
    return ps.analytic(model, example, device, batch=128)


def cut(balance: tuple[int, ...], layers: int) -> list[int]:
    """torchgpipe's balance on our chain: its boundaries at the nearest block's."""
    places = [BEFORE + round((boundary - BEFORE) / IN_BLOCK) for boundary in accumulate(balance)][
        :-1
    ]
    return [b - a for a, b in pairwise([0, *places, layers])]


def resnet_table(published: Mapping[str, Published], device: Device) -> Section:
    """Samples per second, from a roofline."""
    profiled, rows = profile(device), []
    for case, (batch, micro_batches, balance, paper) in published.items():
        stages = len(balance)
        cluster = ps.cluster("torchgpipe").on(range(stages))
        schedule = ps.schedule(
            "gpipe", stages=stages, micro_batches=micro_batches, backward_order="reverse"
        )
        lengths = cut(balance, len(profiled))
        costs = place_costs(
            stage_costs(
                profiled, lengths, batch / micro_batches, cluster, micro_batches=micro_batches
            ),
            schedule,
            cluster,
        )
        recompute = "never" if case == "no pipeline" else "except_last"
        step = ps.simulate(schedule, costs, recompute=recompute).makespan
        name = case if case == "no pipeline" else f"{case} partition{'s' * (stages > 1)}"
        rows.append(
            Row(
                name,
                paper,
                batch / step,
                f"batch {batch:,} in {micro_batches:,}, cut {':'.join(map(str, lengths))}",
            )
        )
    base = rows[0]
    rows += [
        Row(
            f"{row.case}, times no pipeline",
            (row.paper or 0) / (base.paper or 1),
            (row.ours or 0) / (base.ours or 1),
        )
        for row in rows[1:]
    ]
    return Section(
        "torchgpipe-resnet101",
        "torchgpipe, ResNet-101 on P40",
        "samples/s; times",
        tuple(rows),
        (
            "samples/s, batches, micro-batches, balance of its 370 layers and checkpoint=except_last: its benchmark (benchmarks/resnet101-speed)",
        ),
        (
            (
                "costs: ResNet-101 on a P40's roofline at float32; efficiencies are those fitted to V100, none to a P40; PCIe 3 between the devices; its "
                "boundaries at the nearest residual block"
            ),
        ),
        misses=("U-Net, torchgpipe's third model, is not in the zoo.",),
    )
