"""Gradient sums in buckets: which of their seconds run beside ops."""

import itertools
import random
from dataclasses import replace

import pytest

from penstock.cluster.cluster import Cluster, Device, Link
from penstock.profile.profile import LayerProfile, Profile, Timing
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Kind, Schedule
from penstock.schedule.slicing import Slicing
from penstock.simulate.costs import Costs
from penstock.simulate.gradient_sync import (
    SUM_S_PER_BYTE,
    all_reduce_seconds,
    least_sum_seconds,
    processor_seconds,
)
from penstock.simulate.overlapped_sums import (
    BUCKET_BYTES,
    hidden_sum_seconds,
    with_overlapped_sums,
    with_shorter_updates,
)
from penstock.simulate.plan_costs import schedule_costs
from penstock.simulate.simulate import simulate_schedule
from penstock.simulate.stage_seconds import parts_of, stage_seconds
from penstock.weights.catalogue import weight_rule

#: A second for 1 MB, and half a second on the way.
WIRE = Link(0.5, 1e6)
HOSTS = Cluster("hosts", (Device("d", 10**12, "cpu"),) * 4, 1, WIRE, WIRE)


def timing(seconds: float) -> Timing:
    """Return a timing with this many seconds per sample."""
    return Timing((1, 8), (seconds, 8 * seconds))


def profile(*megabytes: int) -> Profile:
    """Layers of these sizes, each with a backward of 2 s: 0.5 s for inputs, 1.5 s for weights."""
    layers = [
        LayerProfile(
            f"l{index}",
            "Linear",
            timing(1.0),
            timing(2.0),
            timing(0.5),
            timing(1.5),
            parameters=1,
            parameter_bytes=size * 10**6,
            buffer_bytes=0,
            activation_bytes_per_sample=1.0,
            output_bytes_per_sample=1.0,
        )
        for index, size in enumerate(megabytes)
    ]
    return Profile(tuple(layers), "f", input_bytes_per_sample=1.0, batch=8)


def replicated(program: str, count: int = 2) -> Schedule:
    """Ranks with the same ops, in which R stands for the micro-batch of the rank."""
    rows = [f"rank {rank} | {program.replace('R', str(rank))}" for rank in range(count)]
    return Schedule.parse("\n".join(rows))


def hidden(model: Profile, program: str, lengths: list[int], cluster: Cluster = HOSTS):
    """Return the hidden seconds of every stage on two ranks, with one sample per micro-batch."""
    schedule = replicated(program)
    ranks_of_stage = schedule.ranks_of_stage
    return hidden_sum_seconds(schedule, ranks_of_stage, [model] * 2, lengths, 1.0, cluster)


def test_buckets_leave_while_the_backward_goes_on():
    """Layers of 5 MB are ready after 2, 4 and 6 s and on the wire for 5 s each, from 2 s to 17 s: of
    their 15 s, 4 s are beside the backward.
    """
    assert hidden(profile(5, 5, 5), "0FR 0BR 0U1", [3]) == pytest.approx([4.0])


def test_a_bucket_waits_until_it_is_full():
    """Three layers of 1 MB are one bucket, which leaves at the end; of 3 MB, the last two are one, and
    it leaves 2 s before the end.
    """
    assert hidden(profile(1, 1, 1), "0FR 0BR 0U1", [3]) == [0.0]
    assert hidden(profile(3, 3, 3), "0FR 0BR 0U1", [3]) == pytest.approx([2.0])


def test_the_weight_gradients_of_a_split_backward_fill_the_buckets():
    """A stage that is not the first has a W of 1.5 s per layer, of which all but one are beside the
    wire. What follows the W of one stage is beside its sum too, and its buckets use the wire first.
    """
    model = profile(1, 5, 5)
    program = "0FR 1FR 1IR 1WR 0IR 0WR 1U1 0U1"
    # Stage 1: ready after 1.5 and 3 s, on the wire until 11.5 s, and 0.5 s on the way. The W of stage 0
    # ends after 5 s. Stage 0 sends 1 MB from 11.5 s to 12.5 s, which ends 1 s after the update of
    # stage 1 has begun.
    add_s = SUM_S_PER_BYTE * 10e6
    assert hidden(model, program, [1, 2]) == pytest.approx([0.5 + add_s, 10.5 - 7.0])


def test_sums_that_do_not_run_in_buckets_hide_nothing():
    """In shared memory, by messages of GPUs, and of stages without copies: they begin at the end."""
    model = profile(5, 5, 5)
    one_host = replace(HOSTS, devices_per_node=4)
    assert hidden(model, "0FR 0BR 0U1", [3], one_host) == [0.0]
    gpus = replace(HOSTS, devices=(Device("g", 10**12, "gpu"),) * 4)
    assert hidden(model, "0FR 0BR 0U1", [3], gpus) == [0.0]
    alone = replicated("0FR 0BR 0U1", 1)
    assert hidden_sum_seconds(alone, alone.ranks_of_stage, [model], [3], 1.0, HOSTS) == [0.0]


def test_the_processor_s_part_of_a_sum_is_not_hidden():
    """Sending and receiving 15 MB takes 30 s of the CPU, less than the 146 s of the wire that remain; or
    147 s, more than these.
    """
    wire = Link(0.0, 1e5, cpu_s_per_byte=1e-6)
    cluster = replace(HOSTS, between=wire)
    model, size = profile(5, 5, 5), 15e6
    (seconds,) = hidden(model, "0FR 0BR 0U1", [3], cluster)
    assert seconds == pytest.approx(4.0)
    busy = replace(HOSTS, between=replace(wire, cpu_s_per_byte=4.9e-6))
    (seconds,) = hidden(model, "0FR 0BR 0U1", [3], busy)
    whole_s = all_reduce_seconds((0, 1), size, busy)
    assert seconds == pytest.approx(150 - 147)
    assert whole_s - seconds == pytest.approx(least_sum_seconds((0, 1), size, busy))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_step_ends_that_much_earlier(count):
    """What plans predict for data parallelism: forward, backward, and what is exposed."""
    model, schedule = profile(5, 5, 5), replicated("0FR 0BR 0U1", count)
    profiles = [model] * count
    rule = weight_rule("flush")
    costs = schedule_costs(schedule, profiles, [3], HOSTS, count, rule)
    ranks_of_stage = schedule.ranks_of_stage
    seconds = hidden_sum_seconds(schedule, ranks_of_stage, profiles, [3], 1.0, HOSTS)
    whole_s = simulate_schedule(schedule, costs).makespan
    overlapped = with_overlapped_sums(costs, schedule, profiles, [3], 1.0, HOSTS)
    overlapped_s = simulate_schedule(schedule, overlapped).makespan
    assert whole_s - overlapped_s == pytest.approx(seconds[0])
    assert seconds[0] == pytest.approx(4.0)
    assert overlapped_s >= 3 + 6 + least_sum_seconds(range(count), 15e6, HOSTS)


def test_the_replica_that_hides_least_decides():
    """Replicas update together. The backward of the faster device hides 2 s of the sum, that of the
    slower one 4 s.
    """
    slow = profile(5, 5, 5)
    layers = tuple(replace(layer, backward=timing(1.0)) for layer in slow.layers)
    fast = replace(slow, layers=layers)
    program = replicated("0FR 0BR 0U1")
    for profiles in ([slow, fast], [fast, slow]):
        seconds = hidden_sum_seconds(program, program.ranks_of_stage, profiles, [3], 1.0, HOSTS)
        assert seconds == pytest.approx([2.0])


def test_a_rank_that_only_updates_a_stage_hides_nothing_of_its_sum():
    """Rank 1 has no gradients of stage 0; the backward of rank 0 decides what is hidden."""
    text = "0F0 1F0 0F1 1B0 0B0 0B1 0U1 1U1\n1F1 1B1 0U1 1U1"
    program, model = Schedule.parse(text), profile(5, 5, 5)
    seconds = hidden_sum_seconds(program, [(0, 1)] * 2, [model] * 2, [2, 1], 1.0, HOSTS)
    expected = slow_hidden(program.programs[0], model, [2, 1], 1.0, (0, 1), HOSTS)
    assert seconds[0] == pytest.approx(expected[0])
    assert seconds[0] > 0


def test_updates_get_shorter_by_what_is_hidden_and_never_less_than_nothing():
    """Costs without updates, or with nothing hidden, stay as they are."""
    plain = Costs(forward=1.0, update=None)
    assert with_shorter_updates(plain, [1.0, 2.0]) is plain
    costs = Costs(forward=1.0, update=(3.0, 1.0))
    assert with_shorter_updates(costs, [0.0, 0.0]) is costs
    assert with_shorter_updates(costs, [0.5, 0.0]).update == (2.5, 1.0)
    assert with_shorter_updates(costs, [0.5, 2.0]) == replace(costs, update=(2.5, 0.0))
    assert with_shorter_updates(Costs(update=3.0), [0.5, 1.0]).update == (2.5, 2.0)


def random_program(rng, stages):
    """Return the ops of one rank: forwards, then backwards of all stages in any order, among them
    an update after the last one of a stage; micro-batch R is that of the rank.
    """
    steps = {}
    for stage in range(stages):
        backward = [Kind.B] if rng.random() < 0.5 else [Kind.I, Kind.W]
        steps[stage] = [*backward, Kind.U]
    words = [f"{stage}FR" for stage in range(stages)]
    while steps:
        stage = rng.choice(sorted(steps))
        kind = steps[stage].pop(0)
        words.append(f"{stage}U1" if kind is Kind.U else f"{stage}{kind.value}R")
        if not steps[stage]:
            del steps[stage]
    return " ".join(words)


def random_profile(rng, sizes):
    """Return a profile whose layers have these bytes, and unlike seconds in every phase."""
    model = profile(*[0] * len(sizes))
    layers = [
        replace(
            layer,
            parameter_bytes=size,
            backward=timing(rng.uniform(0.5, 4)),
            input_grad=timing(rng.uniform(0.5, 4)),
            weight_grad=timing(rng.uniform(0.5, 4)),
            forward=timing(rng.uniform(0.5, 4)),
        )
        for layer, size in zip(model.layers, sizes, strict=True)
    ]
    return replace(model, layers=tuple(layers))


def slow_hidden(program, model, lengths, samples, ranks, cluster):
    """Walk through a program beside the network, bucket by bucket."""
    phase_of = {"F": "forward", "B": "backward", "I": "input_grad", "W": "weight_grad"}
    last = {op.stage: place for place, op in enumerate(program) if op.kind.value in "BW"}
    now_s = network_s = 0.0
    complete_s, hidden_s = {}, {}
    latency_s = all_reduce_seconds(ranks, 0.0, cluster)
    for place in range(min(last.values()), len(program)):
        kind, stage = program[place].kind.value, program[place].stage
        part = parts_of(lengths)[stage]
        if kind == "U":
            size = sum(layer.parameter_bytes for layer in model.layers[part])
            waits_s = max(complete_s[stage] - now_s, processor_seconds(ranks, size, cluster))
            waits_s += SUM_S_PER_BYTE * size
            hidden_s[stage] = max(0.0, all_reduce_seconds(ranks, size, cluster) - waits_s)
            now_s += waits_s
            continue
        if last[stage] == place:
            phase = "backward" if stage == 0 else phase_of[kind]
            ready_s, bucket = now_s, 0
            for index in reversed(range(part.start, part.stop)):
                ready_s += model.layers[index].seconds(phase, samples)
                bucket += model.layers[index].parameter_bytes
                if bucket >= BUCKET_BYTES or index == part.start:
                    wire_s = all_reduce_seconds(ranks, bucket, cluster) - latency_s
                    network_s = max(network_s, ready_s) + wire_s - SUM_S_PER_BYTE * bucket
                    bucket = 0
            complete_s[stage] = network_s + latency_s
        now_s += stage_seconds(model, lengths, samples)[phase_of[kind]][stage]
    return hidden_s


@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_what_is_hidden_is_that_of_a_walk_beside_the_network(count, sliced):
    """Unlike layers and devices, buckets that are just full, and updates in any order; of the
    replicas of a stage the one that hides least counts.
    """
    for stages, seed in itertools.product((1, 2, 3), range(8)):
        check_hidden(random.Random(seed), stages, count, sliced)


def check_hidden(rng, stages, count, sliced):
    """Compare what is hidden of random stages and programs with the walk."""
    lengths = [rng.randint(1, 3) for _ in range(stages)]
    sizes = [rng.choice([0, 1 << 20, (4 << 20) - 1, 4 << 20, 9 << 20]) for _ in range(sum(lengths))]
    kinds = [random_profile(rng, sizes) for _ in range(2)]
    profiles = [rng.choice(kinds) for _ in range(count)]
    wire = Link(rng.choice([0.0, 0.5]), 2e6, cpu_s_per_byte=rng.choice([1e-9, 3e-7]))
    cluster = replace(HOSTS, between=wire)
    program = replicated(random_program(rng, stages), count)
    samples = 1.0
    if sliced:
        program = replace(program, slicing=Slicing("samples", ((1 / count,) * count,)))
        samples = 1.0 * count
    ranks = range(count)
    expected = [
        slow_hidden(row, model, lengths, 1.0, ranks, cluster)
        for row, model in zip(program.programs, profiles, strict=True)
    ]
    seconds = hidden_sum_seconds(
        program, program.ranks_of_stage, profiles, lengths, samples, cluster
    )
    assert seconds == pytest.approx(
        [min(row[stage] for row in expected) for stage in range(stages)]
    )


def test_a_stream_hides_nothing():
    """Its next batch runs beside its sums in any case."""
    stream = schedule("pipedream", 1, 2, replicas=2)
    model = profile(5, 5, 5)
    hidden_s = hidden_sum_seconds(stream, stream.ranks_of_stage, [model] * 2, [3], 1.0, HOSTS)
    assert hidden_s == [0.0]
    costs = schedule_costs(stream, [model] * 2, [3], HOSTS, 2, weight_rule("stash"))
    assert with_overlapped_sums(costs, stream, [model] * 2, [3], 1.0, HOSTS) is costs
