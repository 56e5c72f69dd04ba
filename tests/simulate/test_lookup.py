"""Lookup tables: the seconds and bytes of every op and message, one by one."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from tests.simulate.slow import rich_schedule

from penstock.schedule.catalogue import schedule
from penstock.schedule.dependencies import acyclic_dependencies_of
from penstock.schedule.op import Kind, Schedule
from penstock.schedule.recompute import Recompute
from penstock.simulate.cost_arrays import Amounts
from penstock.simulate.costs import Costs
from penstock.simulate.lookup import Tables
from penstock.simulate.simulate import tables_of

SECONDS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input_grad",
    Kind.W: "weight_grad",
    Kind.U: "update",
}


LINK_FIELDS = [("transfer",), ("latency", "bandwidth"), ("latency", "bandwidth", "transfer_back")]


def all_costs(rng, stages, micro_batches, links):
    """Every figure given, unlike for all stages, and for all micro-batches too in some fields.

    `links` is the fields that set the seconds of a message.
    """

    def row(count, by_micro_batch):
        if not by_micro_batch:
            return tuple(rng.uniform(0.5, 9.0) for _ in range(count))
        return tuple(row(micro_batches, by_micro_batch=False) for _ in range(count))

    detailed = rng.random() < 0.5
    fields = {
        name: row(stages, detailed and name != "update")
        for name in (*SECONDS.values(), "offload", "activation_bytes")
    }
    for name in ("recompute", "forward_backward"):
        fields[name] = row(stages, detailed) if rng.random() < 0.5 else None
    fields["boundary_bytes"] = row(stages - 1, detailed)
    for name in links:
        fields[name] = row(stages - 1, detailed and name not in ("latency", "bandwidth"))
    return Costs(**fields)


def value(field, place, micro_batch):
    """The entry of a stage or boundary, and of a micro-batch if it differs there."""
    entry = field[place]
    return entry[micro_batch] if isinstance(entry, tuple) else entry


def micro_batch_of(case, op):
    """The micro-batch of an op, counted over all batches, and the share of its slice in it."""
    if case.slicing is None or op.kind is Kind.U:
        return op.micro_batch, 1.0
    return case.slicing.micro_batch_of[op.micro_batch], case.slicing.share[op.micro_batch]


def alone_seconds(case, costs, op, policy):
    """What an op takes that is in no pair."""
    if op.kind in (Kind.E, Kind.L):
        return 0.0
    micro_batch, share = micro_batch_of(case, op)
    seconds = value(getattr(costs, SECONDS[op.kind]), op.stage, micro_batch)
    return share * (seconds + recompute_seconds(case, costs, op, policy))


def recompute_seconds(case, costs, op, policy):
    """What of the forward runs again before an op."""
    micro_batch, _ = micro_batch_of(case, op)
    is_last = micro_batch % case.micro_batches == case.micro_batches - 1
    if op.kind not in (Kind.B, Kind.I) or policy is Recompute.NEVER:
        return 0.0
    if policy is Recompute.EXCEPT_LAST and is_last:
        return 0.0
    selected = costs.recompute if policy is Recompute.SELECTIVE else None
    return value(costs.forward if selected is None else selected, op.stage, micro_batch)


def message(case, costs, op):
    """Seconds and bytes of what an op sends: None if nothing."""
    micro_batch, share = micro_batch_of(case, op)
    if op.kind in (Kind.E, Kind.L):
        offload = value(costs.offload, op.stage, micro_batch)
        return share * offload, share * value(costs.activation_bytes, op.stage, micro_batch)
    up = op.kind is Kind.F
    boundary = op.stage if up else op.stage - 1
    if op.kind not in (Kind.F, Kind.B, Kind.I) or not 0 <= boundary < case.stages - 1:
        return None
    sent = value(costs.boundary_bytes, boundary, micro_batch)
    if not up and costs.transfer_back is not None:
        return share * value(costs.transfer_back, boundary, micro_batch), share * sent
    if costs.transfer is not None:
        return share * value(costs.transfer, boundary, micro_batch), share * sent
    seconds = sent / value(costs.bandwidth, boundary, micro_batch)
    return share * seconds + value(costs.latency, boundary, micro_batch), share * sent


@pytest.mark.parametrize("cut", ["", "samples", "tokens", "stream", "waves"])
@pytest.mark.parametrize("links", LINK_FIELDS)
def test_every_op_and_message_has_its_own_figures(cut, links):
    """Slices take their share, but the latency of a whole message; pairs what was measured of them;
    the last micro-batch of every batch is the last that recompute leaves out.
    """
    for seed, policy in enumerate([*Recompute, *Recompute]):
        case = rich_schedule(seed, 4, cut)
        numbers = len(case.slicing.shares) if case.slicing is not None else case.slices
        costs = all_costs(random.Random(seed), case.stages, numbers, links)
        check_tables(case, costs, policy)


def check_tables(case, costs, policy):
    """Compare every entry with the sums written out here."""
    tables = tables_of(case, costs, policy)
    in_pair = {}
    for first, second in case.pairs:
        total = alone_seconds(case, costs, first, policy) + alone_seconds(
            case, costs, second, policy
        )
        forward, backward = sorted((first, second), key=lambda op: op.kind is not Kind.F)
        is_f_and_b = (forward.kind, backward.kind) == (Kind.F, Kind.B)
        if costs.forward_backward is not None and is_f_and_b:
            micro_batch, share = micro_batch_of(case, forward)
            _, backward_share = micro_batch_of(case, backward)
            recompute_s = backward_share * recompute_seconds(case, costs, backward, policy)
            total = share * value(costs.forward_backward, forward.stage, micro_batch) + recompute_s
        in_pair[first] = in_pair[second] = total
    for row, op in enumerate(case.ops):
        expected = in_pair.get(op, alone_seconds(case, costs, op, policy))
        assert tables.seconds[0, tables.op_entry[row]] == pytest.approx(expected)
        sent = message(case, costs, op)
        if sent is not None:
            entry = tables.message_entry[row]
            assert tables.seconds[0, entry] == pytest.approx(sent[0])
            assert tables.message_bytes[0, entry] == pytest.approx(sent[1])
        if op.kind in (Kind.B, Kind.I):
            runs_again = policy is Recompute.SELECTIVE or bool(
                recompute_seconds(case, costs, op, policy)
            )
            assert tables.recomputed[row] == runs_again
    rows = np.arange(len(case.ops))
    shares = [
        value(costs.activation_bytes, op.stage, micro_batch_of(case, op)[0])
        * micro_batch_of(case, op)[1]
        for op in case.ops
        if op.kind is not Kind.U
    ]
    batched = rows[[op.kind is not Kind.U for op in case.ops]]
    assert tables.of_ops("activation_bytes", batched) == pytest.approx(shares)


def test_entries_are_cached_by_policy_and_not_shared_with_another():
    """One schedule is simulated under many policies by a planner."""
    case = schedule("1f1b", 2, 2)
    costs = Costs(forward=1.0, backward=2.0)

    def backward_seconds(policy):
        tables = tables_of(case, costs, policy)
        return [
            float(tables.seconds[0, tables.op_entry[row]])
            for row, op in enumerate(case.ops)
            if op.kind is Kind.B
        ]

    for _ in range(2):
        assert backward_seconds(Recompute.NEVER) == [2.0] * 4
        assert backward_seconds(Recompute.ALWAYS) == [3.0] * 4
        assert sorted(backward_seconds(Recompute.EXCEPT_LAST)) == [2.0, 2.0, 3.0, 3.0]
    assert not tables_of(case, costs, Recompute.NEVER).detailed
    paired = replace(case, pairs={tuple(case.programs[1][1:3])})
    assert tables_of(paired, costs, Recompute.NEVER).detailed


@pytest.mark.parametrize(("pair", "seconds"), [("0F2&0B1", 5.0 + 1.0), ("0F1&0B2", 5.0)])
def test_a_measured_pair_runs_again_what_its_backward_recomputes(pair, seconds):
    """`except_last` leaves out the last micro-batch, whichever half of the pair is of it."""
    forward, backward = pair.split("&")
    others = [f"0F{number}" for number in range(3) if f"0F{number}" != forward]
    text = " ".join([*others, pair, *(f"0B{n}" for n in range(3) if f"0B{n}" != backward), "0U1"])
    case = Schedule.parse(text)
    costs = Costs(forward=1.0, backward=2.0, forward_backward=5.0)
    tables = tables_of(case, costs, Recompute.EXCEPT_LAST)
    row = [str(op) for op in case.ops].index(forward)
    for place in (row, row + 1):
        assert tables.seconds[0, tables.op_entry[place]] == seconds


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "forward",
        "backward",
        "update",
        "transfer",
        "boundary_bytes",
        "activation_bytes",
        "forward_backward",
    ],
)
def test_one_number_stands_for_all_vectors_beside_a_field_of_several(name, pairs):
    """Each row of the tables is that of its vector alone."""
    case = schedule("1f1b", 2, 3)
    if pairs:
        case = replace(case, pairs={tuple(case.programs[0][1:3])})
    fields = {"forward": 1.0, "backward": 2.0, "update": 3.0, "transfer": 4.0}
    fields |= {"boundary_bytes": 5.0, "activation_bytes": 6.0}
    dependencies = acyclic_dependencies_of(case)
    amounts = Amounts.batched(fields | {name: [7.0, 8.0]}, 2, range(3))
    tables = Tables(dependencies, amounts)
    for row, number in enumerate((7.0, 8.0)):
        alone = tables_of(case, Costs(**fields | {name: number}), Recompute.NEVER)
        for table in ("seconds", "message_bytes"):
            entries = getattr(tables, table)
            expected = getattr(alone, table)[0]
            assert entries[min(row, len(entries) - 1)].tolist() == expected.tolist()
