"""Profiles and steps that several papers need."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

import penstock as ps
from penstock.cluster.device import Link
from penstock.cluster.machines import Cluster
from penstock.errors import PenstockError
from penstock.profile.profile import LayerProfile, Timing
from penstock.search.best_plan import plan_proposal
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest
from penstock.simulate.plan_costs import all_reduce_seconds
from penstock.zoo.catalogue import model

DATA = Path(__file__).parent / "data"
GRAPHS = Path(__file__).parents[2] / "tests" / "search" / "planners" / "data"
#: Tokens of a sentence in GNMT, source and target alike: this number makes GNMT-16 take on our V100 what
#: DAPPLE measured (docs/literature/vgg-19-profile.md).
TOKENS = 40
#: PyTorch's DDP adds up gradients in buckets of this many bytes while the backward goes on.
BUCKET_BYTES = 25 * 2**20
#: Seconds that `auto` may take for one plan.
BUDGET_S = 2.0


@cache
def analytic(name: str, device: str, batch: int, **options: int) -> ps.Profile:
    """The zoo's model on a device's roofline, at float32."""
    shape = (1, 2, TOKENS) if name.startswith("gnmt") else (1, 3, 224, 224)
    dtype = torch.int64 if name.startswith("gnmt") else torch.float32
    example = torch.zeros(shape, dtype=dtype, device="meta")
    return ps.analytic(model(name, device="meta", **options), example, device, batch=batch)


def layer(
    name: str,
    forward_s: float,
    backward_s: float,
    output_bytes: float,
    parameter_bytes: int,
    samples: int,
) -> LayerProfile:
    """A layer that was measured at one size; what it keeps is what it puts out, and its backward is
    two equal halves.
    """
    times = [
        Timing((samples,), (seconds,))
        for seconds in (forward_s, backward_s, backward_s / 2, backward_s / 2)
    ]
    bytes_per_sample = output_bytes / samples
    return LayerProfile(
        name,
        "layer",
        *times,
        parameter_bytes // 4,
        parameter_bytes,
        0,
        bytes_per_sample,
        bytes_per_sample,
    )


def table_profile(name: str, samples: int) -> ps.Profile:
    """A chain that others measured on a V100 with `samples` samples: data/<name>.txt, milliseconds
    and bytes.

    Times at other sizes are taken in proportion.
    """
    rows = [
        line.split()
        for line in (DATA / f"{name}.txt").read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    ]
    layers = tuple(
        layer(word, float(f) / 1e3, float(b) / 1e3, float(out), int(weights), samples)
        for word, f, b, out, weights in rows
    )
    return ps.Profile(layers, name, layers[0].output_bytes_per_sample, samples, device="V100")


def graph_profile(name: str, samples: int) -> ps.Profile:
    """The same of a graph of PipeDream's profiler, which the planner's tests keep."""
    rows = json.loads((GRAPHS / f"{name}.json").read_text(encoding="utf-8"))["layers"]
    # The first node is the reading of images; Size and View compute nothing, and without them the
    # graph is a chain.
    inputs, *nodes = [row for row in rows if row[1] not in ("Size", "View")]
    layers = tuple(
        layer(f"{n}.{kind}", f / 1e3, b / 1e3, out, weights, samples)
        for n, kind, f, b, out, weights in nodes
    )
    return ps.Profile(layers, name, inputs[4] / samples, samples, device="V100")


def data_parallel_s(
    profile: ps.Profile, cluster: Cluster, samples: float, *, overlap: bool = True
) -> float:
    """A step of data parallelism, `samples` on each device.

    Gradients are added up over a ring, bucket by bucket as backwards fill them, last layer first;
    the network carries one bucket at a time, beside the backwards that are left. Without `overlap`
    all of them follow the last backward.
    """
    ranks = range(cluster.ranks)
    now = sum(profile.seconds("forward", samples))
    backward = profile.seconds("backward", samples)
    if not overlap:
        return (
            now
            + sum(backward)
            + all_reduce_seconds(
                ranks, sum(layer_costs.parameter_bytes for layer_costs in profile), cluster
            )
        )
    network = bucket = 0.0
    for index in reversed(range(len(profile))):
        now += backward[index]
        bucket += profile.layers[index].parameter_bytes
        if bucket >= BUCKET_BYTES or index == 0:
            network = max(network, now) + all_reduce_seconds(ranks, bucket, cluster)
            bucket = 0.0
    return max(now, network)


def scored_plan(
    profile: ps.Profile, cluster: Cluster, batch: int, proposal: Proposal, **options: object
) -> ps.Plan:
    """One way to run, simulated."""
    return plan_proposal(PlanRequest(profile, cluster, batch, **options), proposal)  # type: ignore[arg-type]


def planned(
    profile: ps.Profile, cluster: Cluster, batch: int, planner: str = "auto", **options: object
) -> ps.Plan | None:
    """A planner's plan, or None where it has none."""
    try:
        return ps.plan(profile, cluster, batch=batch, planner=planner, budget_s=BUDGET_S, **options)
    except PenstockError:
        return None


def with_network(cluster: Cluster, share: float) -> Cluster:
    """The same cluster with `share` of the bandwidth between its nodes."""
    link = cluster.between
    slower = Link(link.latency_s, link.bandwidth_bytes_per_s * share, "fitted")
    return replace(cluster, between=slower)


def form(plan: ps.Plan) -> str:
    """Its stages in a few words: copies of each, or how many stages, and the schedule."""
    copies = [len(ranks) for ranks in plan.schedule.ranks_of_stage]
    if len(copies) == 1:
        return f"DP over {copies[0]}" if copies[0] > 1 else "one device"
    if set(copies) == {1}:
        return f"straight, {len(copies)} stages ({plan.schedule_name}, M={plan.micro_batches})"
    return f"{':'.join(map(str, copies))}, cut {':'.join(map(str, plan.lengths))} ({plan.schedule_name}, M={plan.micro_batches})"


def cut_behind(profile: ps.Profile, word: str) -> tuple[int, int]:
    """Lengths of two stages: up to and with the last layer whose name has `word`, and the rest."""
    last = max(index for index, layer_costs in enumerate(profile) if word in layer_costs.name)
    return last + 1, len(profile) - last - 1


def fastest(values: Sequence[float | None]) -> float | None:
    """The least that there is."""
    return min((seconds for seconds in values if seconds is not None), default=None)
