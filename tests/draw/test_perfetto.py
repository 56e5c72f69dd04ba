"""The trace for ui.perfetto.dev."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from penstock.draw.perfetto import perfetto
from penstock.event import Timeline
from penstock.schedule.catalogue import schedule
from penstock.simulate.costs import Costs
from penstock.simulate.simulate import simulate_schedule

NEEDED = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
    "M": {"name", "pid", "args"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
    "C": {"name", "pid", "ts", "args"},
}


def timeline(**costs):
    return simulate_schedule(
        schedule("1f1b", stages=3, micro_batches=4), Costs(**{"forward": 0.002, **costs})
    )


def entries(*panels):
    return json.loads(perfetto(panels))["traceEvents"]


def of(trace_entries, phase):
    return [entry for entry in trace_entries if entry["ph"] == phase]


@pytest.mark.parametrize("transfer", [0.0, 0.0005])
def test_every_entry_has_the_fields_of_its_phase(transfer):
    """Perfetto drops what it does not understand, silently."""
    trace_entries = entries(timeline(transfer=transfer, boundary_bytes=64))
    assert {entry["ph"] for entry in trace_entries} == set(NEEDED) - {"C"}
    for entry in trace_entries:
        assert NEEDED[entry["ph"]] <= set(entry)
        assert entry["pid"] > 0  # 0 is the kernel's idle process there
        assert entry["tid"] > 0
        assert entry.get("ts", 0) >= 0
        assert entry.get("dur", 0) >= 0


def test_ops_are_slices_in_microseconds_on_the_process_of_their_rank():
    """The trace is read beside traces of other tools, so units and names must be the usual ones."""
    trace_entries = entries(timeline())
    ops = [entry for entry in of(trace_entries, "X") if entry["tid"] == 1]
    assert Counter(entry["cat"] for entry in ops) == {"F": 12, "B": 12, "U": 3}
    assert {
        "name": "2F0",
        "cat": "F",
        "ph": "X",
        "ts": 4000.0,
        "dur": 2000.0,
        "pid": 3,
        "tid": 1,
        "args": {"stage": 2, "micro_batch": 0},
    } in ops
    names = {
        entry["pid"]: entry["args"]["name"]
        for entry in of(trace_entries, "M")
        if entry["name"] == "process_name"
    }
    assert names == {1: "rank 0", 2: "rank 1", 3: "rank 2"}


def test_every_link_has_a_separate_named_thread():
    """Transfers run beside ops; on one thread slices that overlap are drawn wrongly."""
    trace_entries = entries(timeline(transfer=0.0005, boundary_bytes=64))
    sent = [entry for entry in of(trace_entries, "X") if entry["cat"] == "transfer"]
    assert len(sent) == 16
    assert all(entry["args"]["bytes"] == 64 for entry in sent)
    threads = {
        (entry["pid"], entry["tid"]): entry["args"]["name"]
        for entry in of(trace_entries, "M")
        if entry["name"] == "thread_name"
    }
    assert {threads[entry["pid"], entry["tid"]] for entry in sent} == {
        "to rank 0",
        "to rank 1",
        "to rank 2",
    }
    assert all(
        threads[entry["pid"], entry["tid"]] == f"to rank {entry['args']['to_rank']}"
        for entry in sent
    )


def test_arrows_pair_up_and_lie_within_the_slices_that_they_join():
    """A flow that is not inside a slice is dropped; one with half its pair is an error in the
    viewer.
    """
    trace_entries = entries(timeline(transfer=0.0005))
    starts, ends = ({entry["id"]: entry for entry in of(trace_entries, phase)} for phase in "sf")
    assert len(starts) == len(of(trace_entries, "s")) == 16
    assert set(starts) == set(ends)
    slices = of(trace_entries, "X")

    def slice_at(entry):
        (there,) = [
            s
            for s in slices
            if (s["pid"], s["tid"]) == (entry["pid"], entry["tid"])
            and s["ts"] < entry["ts"] < s["ts"] + s["dur"]
        ]
        return there["name"]

    joined = {(slice_at(starts[number]), slice_at(ends[number])) for number in starts}
    assert {("0F0", "1F0"), ("1F3", "2F3"), ("2B0", "1B0"), ("1B3", "0B3")} <= joined
    assert len(joined) == 16
    assert all(starts[number]["ts"] < ends[number]["ts"] for number in starts)


def test_an_arrow_to_an_op_that_is_missing_ends_at_the_arrival():
    """A measured timeline may be cut off; its transfers are still worth seeing."""
    whole = timeline(transfer=0.0005)
    cut = replace(
        whole, events=tuple(e for e in whole.events if e.to_rank is not None or e.rank == 0)
    )
    trace_entries = entries(cut)
    assert len(of(trace_entries, "s")) == len(of(trace_entries, "f")) == 16
    assert all(entry["ts"] > 0 for entry in of(trace_entries, "f"))


def test_two_timelines_have_separate_processes_and_arrows():
    """Merged processes would lay the measured ops over the predicted."""
    first = timeline()
    trace_entries = entries(first, replace(first, source="measured"))
    names = [
        entry["args"]["name"] for entry in of(trace_entries, "M") if entry["name"] == "process_name"
    ]
    assert names[0] == "rank 0, 1f1b, simulated"
    assert names[3] == "rank 0, 1f1b, measured"
    assert len({entry["pid"] for entry in of(trace_entries, "X")}) == 6
    assert set(Counter(entry["id"] for entry in of(trace_entries, "s")).values()) == {1}


def test_an_empty_timeline_is_a_trace_without_slices():
    """Before the first step there is nothing to show, and that is no error."""
    assert not of(entries(Timeline((), 2, 2, title='"<\x1b')), "X")


def test_memory_of_a_rank_is_a_counter_of_its_process():
    """Perfetto draws it under the rank's ops."""
    panel = timeline(activation_bytes=1024)
    counters = of(entries(panel), "C")
    assert all(NEEDED["C"] <= set(entry) for entry in counters)
    assert [(entry["ts"], entry["args"]["bytes"]) for entry in counters if entry["pid"] == 3][
        :3
    ] == [
        (0.0, 0),
        (4000.0, 1024),
        (10000.0, 1024),
    ]
    peaks = [
        max(entry["args"]["bytes"] for entry in counters if entry["pid"] == rank + 1)
        for rank in range(3)
    ]
    assert peaks == list(panel.peak_memory)
    assert not of(entries(timeline()), "C")


def test_slices_say_their_micro_batch_and_which_they_are():
    """`2F5` in a trace would be meaningless to a user with five micro-batches."""
    simulated = simulate_schedule(
        schedule("seq1f1b", stages=2, micro_batches=2, slices=2), Costs(transfer=0.1)
    )
    trace_entries = of(entries(simulated), "X")
    last = next(entry for entry in trace_entries if entry["name"] == "1F1.1")
    assert last["args"] == {"stage": 1, "micro_batch": 1, "slice": "1.1"}
    assert {"send 0F0.0", "0B1.0", "0U1"} <= {entry["name"] for entry in trace_entries}
