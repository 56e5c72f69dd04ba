"""States that show one thing each, to start from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Preset:
    """A state to start from.

    Attributes:
        title: text of the link.
        about: what to look at.
        query: the state.
    """

    title: str
    about: str
    query: str


#: Costs in milliseconds and megabytes, roughly those of a transformer of 1.3 billion parameters on
#: 8 ranks.
_SIZES = "forward=10ms&activation_bytes=300MiB&weight_bytes=2.5GiB&boundary_bytes=8MiB"

PRESETS = (
    Preset(
        "GPipe's bubble",
        "Ranks idle for (p - 1) / (m + p - 1) of the time: move the slider of micro-batches m.",
        "ranks=4&micro_batches=8&a=gpipe&b=naive",
    ),
    Preset(
        "1F1B's memory",
        "The same bubble as GPipe, but at most p micro-batches in flight. GPipe exceeds the limit.",
        f"ranks=8&micro_batches=16&a=1f1b&b=gpipe&{_SIZES}&memory_limit=6GiB&bandwidth=50GB",
    ),
    Preset(
        "Zero bubble",
        "Weight gradients fill the time in which ranks wait for input gradients.",
        "ranks=4&micro_batches=8&a=zb-h2&b=1f1b&forward=1&backward=2",
    ),
    Preset(
        "Chimera",
        "Two pipelines in opposite directions, each rank holds two stages.",
        "ranks=4&micro_batches=8&a=chimera&b=dualpipe",
    ),
    Preset(
        "Interleaved",
        "More stages per rank: a shorter bubble, more messages.",
        "ranks=4&micro_batches=8&a=interleaved&a.chunks=2&b=1f1b",
    ),
    Preset(
        "Slow links",
        "1 Gbit/s between ranks: forwards ahead hide messages, in more memory.",
        f"ranks=4&micro_batches=16&a=eager-1f1b&b=1f1b&{_SIZES}&bandwidth=125MB&latency=100us",
    ),
    Preset(
        "A slow rank",
        "The third rank takes twice as long, and all others wait for it.",
        "ranks=4&micro_batches=8&a=1f1b&b=zb-auto&forward=1,1,2,1",
    ),
    Preset(
        "No flush",
        "PipeDream does not drain between batches, at the price of older weights.",
        "ranks=4&micro_batches=4&a=pipedream&b=1f1b&weight_bytes=1GiB&activation_bytes=200MiB",
    ),
)
