"""Random models on random clusters, small enough to simulate by the hundred; and simple plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

from hypothesis import strategies as st

from penstock.cluster.cluster import Cluster, Device, Link
from penstock.plan.plan import Plan
from penstock.profile.profile import LayerProfile, Profile, Timing
from penstock.search.catalogue import plan as search

#: Peaks by which one profile is paced for two kinds of devices: the second takes as long and a
#: half.
FAST, SLOW = (("float32", 3e12),), (("float32", 2e12),)


def timing(fixed_s: float, per_sample_s: float) -> Timing:
    """A straight line of so much a call and so much a sample."""
    return Timing((1, 16), (fixed_s + per_sample_s, fixed_s + 16 * per_sample_s))


@st.composite
def profiles(draw: Callable, least: int = 2, most: int = 8, simple: bool = True) -> Profile:
    """Random layers; if not simple, backwards that do not go with forwards, so that splitting one
    may pay at one layer only.
    """
    seconds = st.floats(1e-5, 1e-2)
    fixed = draw(st.sampled_from([0.0, 1e-3]))

    def layer(i: int) -> LayerProfile:
        forward = draw(seconds)
        parts = (
            (2 * forward, forward, forward)
            if simple
            else (draw(seconds), draw(seconds), draw(seconds))
        )
        lines = [timing(fixed * part / forward, part) for part in (forward, *parts)]
        parameters = draw(st.sampled_from([0, 100, 10_000]))
        return LayerProfile(
            f"l{i}",
            "L",
            *lines,
            parameters,
            parameters,
            draw(st.sampled_from([0, 8])),
            draw(st.sampled_from([0.0, 100.0])),
            draw(st.sampled_from([1.0, 100.0, 10_000.0])),
        )

    layers = tuple(layer(i) for i in range(draw(st.integers(least, most))))
    return Profile(layers, "abc", 10.0, 16, update_s_per_byte=draw(st.sampled_from([0.0, 1e-7])))


@st.composite
def links(draw: Callable) -> Link:
    """From fast enough to forget to slower than the layers."""
    return Link(draw(st.sampled_from([0.0, 1e-5, 1e-3])), draw(st.sampled_from([1e5, 1e7, 1e12])))


@st.composite
def clusters(
    draw: Callable, most: int = 6, memory: tuple[int, ...] = (10**12, 10**12, 60_000)
) -> Cluster:
    """One or two kinds of devices on up to three nodes, in any order."""
    room = draw(st.sampled_from(memory))
    kind = draw(st.sampled_from(["gpu", "cpu"]))
    kinds = [Device("fast", room, kind, flops=FAST), Device("slow", room, kind, flops=SLOW)][
        : draw(st.integers(1, 2))
    ]
    devices = tuple(draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=most)))
    nodes = draw(st.lists(st.integers(0, 2), min_size=len(devices), max_size=len(devices)))
    known = sorted(set(nodes))
    return Cluster(
        "c",
        devices,
        1,
        draw(links()),
        draw(links()),
        node_of=tuple(known.index(node) for node in nodes),
    )


@st.composite
def unlike(draw: Callable, profile: Profile) -> dict[str, Profile]:
    """Profiles of both kinds of devices, neither the faster at all layers."""
    paces = draw(
        st.lists(st.sampled_from([0.1, 1.0, 10.0]), min_size=len(profile), max_size=len(profile))
    )

    def paced(line: Timing, pace: float) -> Timing:
        return replace(line, median_s=tuple(pace * value for value in line.median_s))

    layers = tuple(
        replace(
            layer,
            forward=paced(layer.forward, pace),
            backward=paced(layer.backward, pace),
            input_grad=paced(layer.input_grad, pace),
            weight_grad=paced(layer.weight_grad, pace),
        )
        for layer, pace in zip(profile, paces, strict=True)
    )
    return {"fast": profile, "slow": replace(profile, layers=layers)}


def cuts(layers: int, stages: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Random lengths of this number of stages."""
    inner = (
        st.lists(st.integers(1, layers - 1), min_size=stages - 1, max_size=stages - 1, unique=True)
        if layers > 1
        else st.just([])
    )
    ends = inner.map(lambda edges: [0, *sorted(edges), layers])
    return ends.map(lambda edges: tuple(b - a for a, b in pairwise(edges)))


def plan(profile: Profile, cluster: Cluster, batch: int, **options: object) -> Plan:
    """With one copy of every stage, unless a test is about copies."""
    return search(profile, cluster, batch, **{"max_replicas": 1, "budget_s": 1000.0, **options})


def cluster_of(
    ranks: int, latency_s: float = 0.0, bandwidth: float = 1e12, memory: int = 10**12
) -> Cluster:
    """Equal devices, one on each node."""
    link = Link(latency_s, bandwidth)
    return Cluster("c", (Device("d", memory),) * ranks, 1, link, link)
