"""The work of a rank's host: gradient accumulation and messages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.cluster.cluster import Cluster, Device, Link
from penstock.errors import SettingError
from penstock.profile.conditions import Conditions
from penstock.profile.profile import LayerProfile, Profile, Timing
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Schedule
from penstock.schedule.slicing import Slicing
from penstock.simulate.costs import Costs
from penstock.simulate.host_costs import (
    NETWORK_S_PER_BYTE,
    NETWORK_SEND_S,
    RECEIVE_S,
    SEND_S,
)
from penstock.simulate.network import Network
from penstock.simulate.plan_costs import schedule_costs
from penstock.simulate.simulate import simulate_schedule
from penstock.simulate.stage_seconds import stage_seconds, update_seconds
from penstock.weights.catalogue import weight_rule

LINK = Link(0.5, 1000.0)
MESSAGE_S = 0.5 + 2 * 100 / 1000  # 2 samples


def timing(seconds: float) -> Timing:
    """Return a timing with this many seconds per sample."""
    return Timing((1, 8), (seconds, 8 * seconds))


def a_profile(**more: float) -> Profile:
    """Four layers alike: 1 s forward, 3 s backward of which 1 for the input, 10 bytes of weights,
    100 bytes out.
    """
    layers = [
        LayerProfile(
            f"l{i}",
            "Linear",
            timing(1),
            timing(3),
            timing(1),
            timing(2),
            parameters=1,
            parameter_bytes=10,
            buffer_bytes=0,
            activation_bytes_per_sample=1,
            output_bytes_per_sample=100,
        )
        for i in range(4)
    ]
    return Profile(tuple(layers), "f", 7.0, 8, **more)  # type: ignore[arg-type]


def costs(
    profile: Profile,
    kind: str,
    name: str = "1f1b",
    stages: int = 2,
    micro_batches: int = 4,
    ranks_per_host: int | None = None,
    link: Link = LINK,
    **options: object,
):
    """Of a schedule on as many devices of a kind as it needs, on one host by default."""
    case_schedule = schedule(name, stages, micro_batches, **options)
    devices = (Device("d", 10**9, kind),) * case_schedule.ranks  # type: ignore[arg-type]
    on = Cluster("c", devices, ranks_per_host or case_schedule.ranks, link, link)
    lengths = [4 // stages] * stages
    return case_schedule, schedule_costs(
        case_schedule,
        [profile] * case_schedule.ranks,
        lengths,
        on,
        2 * micro_batches,
        weight_rule("flush"),
    )


def test_the_first_stage_leaves_all_of_its_backward_to_w():
    """Data needs no gradient. I took 0.3 ms where 33 were predicted, and W 63 where 36 were."""
    seconds = stage_seconds(a_profile(), [1, 3], 2)
    assert seconds["input_grad"] == [0, 6]
    assert seconds["weight_grad"] == [6, 12]
    assert seconds["backward"] == [6, 18]


def test_a_rank_of_a_cpu_hands_messages_over_itself():
    """gloo writes them from the thread that sends: the next op waits for that."""
    stage_costs, result = costs(a_profile(), "cpu")
    assert result.forward == pytest.approx((4 + SEND_S + MESSAGE_S, 4 + RECEIVE_S))
    assert result.backward == pytest.approx((12 + RECEIVE_S, 12 + SEND_S + MESSAGE_S))
    assert result.transfer == (0.5,), "then there is only the latency to wait for"
    assert simulate_schedule(stage_costs, result).makespan > 4 * 16


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_messages_of_a_stream_take_as_long_as_those_of_one_batch(micro_batches):
    """Every micro-batch of every batch sends one each way."""
    _, batch = costs(a_profile(), "cpu", "1f1b", micro_batches=micro_batches)
    _, stream = costs(a_profile(), "cpu", "pipedream", micro_batches=micro_batches, batches=5)
    for name in ("forward", "backward", "transfer"):
        assert getattr(stream, name) == pytest.approx(getattr(batch, name))


def test_between_hosts_a_message_moves_beside_the_ops():
    """The rank pays for its part of the work alone, and the card has the message."""
    _, stage_costs = costs(a_profile(), "cpu", ranks_per_host=1)
    send_s = SEND_S + NETWORK_SEND_S + 200 * NETWORK_S_PER_BYTE
    receive_s = RECEIVE_S + 200 * NETWORK_S_PER_BYTE
    assert stage_costs.forward == pytest.approx((4 + send_s, 4 + receive_s))
    assert stage_costs.backward == pytest.approx((12 + receive_s, 12 + send_s))
    assert stage_costs.transfer == (MESSAGE_S,)
    assert stage_costs.network == Network((0, 1), LINK.latency_s)


def test_measured_cpu_times_of_a_link_replace_the_constants():
    """Per byte on both ranks; per message on the sender, beside Penstock's own bookkeeping."""
    for per_message in (0.0, 0.5):
        link = replace(LINK, cpu_s_per_byte=1e-3, cpu_s_per_message=per_message)
        _, stage_costs = costs(a_profile(), "cpu", ranks_per_host=1, link=link)
        send_s = SEND_S + per_message + 200 * 1e-3
        receive_s = RECEIVE_S + 200 * 1e-3
        assert stage_costs.forward == pytest.approx((4 + send_s, 4 + receive_s))


@pytest.mark.parametrize(
    ("own_cores", "processes", "per_byte"),
    [(None, 1, 4e-3), (1.0, 1, 4e-3), (1.0, 2, 2e-3), (4.0, 2, 4e-3), (0.1, 1, 1e-3)],
    ids=["not known", "computes", "half the time", "several threads", "sleeps"],
)
def test_a_rank_that_computes_loses_more_to_messages_than_the_time_of_its_process(
    own_cores, processes, per_byte
):
    """The kernel's work is in no process's account; who sleeps meanwhile loses nothing to it."""
    conditions = Conditions(seconds=1.0, cores=2, processes=processes, own_cores=own_cores)
    profile = replace(a_profile(), conditions=conditions)
    link = replace(LINK, cpu_s_per_byte=1e-3, cpu_s_per_message=0.0, busy_s_per_byte=4e-3)
    _, stage_costs = costs(profile, "cpu", ranks_per_host=1, link=link)
    send_s, receive_s = SEND_S + 200 * per_byte, RECEIVE_S + 200 * per_byte
    assert stage_costs.forward == pytest.approx((4 + send_s, 4 + receive_s))
    assert stage_costs.backward == pytest.approx((12 + receive_s, 12 + send_s))


def test_sender_and_receiver_lose_by_their_own_devices():
    """One computes, the other sleeps."""
    computes = replace(
        a_profile(), conditions=Conditions(seconds=1.0, cores=2, processes=1, own_cores=1.0)
    )
    sleeps = replace(
        a_profile(), conditions=Conditions(seconds=1.0, cores=2, processes=1, own_cores=0.0)
    )
    link = replace(LINK, cpu_s_per_byte=0.0, cpu_s_per_message=0.0, busy_s_per_byte=4e-3)
    cluster = Cluster("c", (Device("d", 10**9, "cpu"),) * 2, 1, link, link)
    case_schedule = schedule("gpipe", 2, 4)
    result = schedule_costs(
        case_schedule, [computes, sleeps], [2, 2], cluster, 8, weight_rule("flush")
    )
    assert result.forward == pytest.approx((4 + SEND_S + 200 * 4e-3, 4 + RECEIVE_S))


def test_ranks_of_one_host_use_the_network_for_other_hosts_only():
    """Of four stages on two hosts, the middle boundary alone."""
    _, stage_costs = costs(a_profile(), "cpu", stages=4, ranks_per_host=2)
    assert stage_costs.transfer == (0.5, MESSAGE_S, 0.5)
    assert stage_costs.network == Network((0, 0, 1, 1), LINK.latency_s)
    assert stage_costs.forward[1] < stage_costs.forward[0], "stage 0 hands its output over itself"


def test_a_boundary_on_a_rank_inside_a_host_and_between_hosts_has_costs_by_micro_batch():
    """Stage 1 has a copy on the rank of stage 0, one on its host, and one on another host, whose
    link has figures of its own.
    """
    text = "0F0 1F0 0F1 0F2 1B0 0B0 0B1 0B2 0U1 1U1\n1F1 1B1 1U1\n1F2 1B2 1U1"
    between = Link(0.25, 400.0, cpu_s_per_byte=1e-3, cpu_s_per_message=0.125)
    on = Cluster("c", (Device("d", 10**9, "cpu"),) * 3, 2, LINK, between, node_of=(0, 0, 1))
    result = schedule_costs(
        Schedule.parse(text), [a_profile()] * 3, [2, 2], on, 6, weight_rule("flush")
    )
    assert result.transfer == ((0.0, 0.5, between.transfer_seconds(200)),)
    sends = (0.0, SEND_S + MESSAGE_S, SEND_S + 0.125 + 200 * 1e-3)
    receives = (0.0, RECEIVE_S, RECEIVE_S + 200 * 1e-3)
    assert result.forward[0] == pytest.approx([4 + second for second in sends])
    assert result.forward[1] == pytest.approx([4 + second for second in receives])
    assert result.backward[1] == pytest.approx([12 + second for second in sends])


def test_pipelines_on_one_host_have_one_number_for_a_boundary():
    """Their messages take equally long, whichever ranks they join."""
    _, stage_costs = costs(a_profile(), "cpu", "gpipe", replicas=2)
    assert stage_costs.transfer == (0.5,)


def test_one_gpu_among_the_ranks_leaves_messages_to_the_links():
    """Only where all ranks are CPUs do ops take longer by their messages."""
    devices = (Device("c", 10**9, "cpu"), Device("g", 10**9))
    on = Cluster("c", devices, 2, LINK, LINK)
    case_schedule = schedule("1f1b", 2, 4)
    result = schedule_costs(case_schedule, [a_profile()] * 2, [2, 2], on, 8, weight_rule("flush"))
    assert (result.forward, result.transfer) == ((4, 4), (MESSAGE_S,))


def test_a_card_carries_one_message_at_a_time_in_each_direction():
    """Three hosts, by hand. Host 1 sends 1F0 up and 0B0 back through one card."""
    case_schedule = schedule("1f1b", 3, 1)
    costs_by_hand = Costs(1, 1, transfer=2.5, network=Network((0, 1, 2), 0.5))
    line = simulate_schedule(case_schedule, costs_by_hand)
    assert line.makespan == 3 + 3 + 4 * 2.5
    both = schedule("1f1b", 2, 2)
    line = simulate_schedule(both, Costs(1, 1, transfer=2.5, network=Network((0, 1), 0.5)))
    moves = [(str(e.op), e.start, e.end) for e in line.events if e.to_rank is not None]
    # 0F1 ends at 2 and waits for the card until 3, while 0F0 is on its way until 3.5.
    assert ("0F0", 1, 3.5) in moves
    assert ("0F1", 3, 5.5) in moves


def test_a_card_receives_one_message_at_a_time():
    """Two replicas of stage 0 on two hosts send to one card at the same second."""
    case_schedule = Schedule.parse(
        "0F0 0B0 0U1\n0F1 0B1 0U1\n1F0 1F1 1B0 1B1 1U1",
    )
    for hosts, second_start in (((0, 1, 2), 3), ((0, 1, 0), 1), ((0, 0, 0), 1)):
        costs_by_hand = Costs(1, 1, transfer=2.5, network=Network(hosts, 0.5))
        line = simulate_schedule(case_schedule, costs_by_hand)
        moves = [(str(e.op), e.start, e.end) for e in line.events if e.to_rank is not None]
        assert ("0F0", 1, 3.5) in moves
        assert ("0F1", second_start, second_start + 2.5) in moves


def test_a_network_is_not_a_shared_medium():
    """Both would say what messages wait for."""
    with pytest.raises(SettingError, match="a network has links of its own"):
        Costs(links="shared", network=Network((0, 1)))


def test_a_network_of_other_ranks_is_refused():
    """It has a host for every rank of the schedule."""
    with pytest.raises(SettingError, match="3 hosts for the 2 ranks"):
        simulate_schedule(schedule("1f1b", 2, 2), Costs(network=Network((0, 1, 2))))


def test_a_gpu_sends_while_it_computes():
    """Its copies have engines of their own."""
    _, stage_costs = costs(a_profile(), "gpu")
    assert (stage_costs.forward, stage_costs.backward, stage_costs.transfer) == (
        (4, 4),
        (12, 12),
        (MESSAGE_S,),
    )


def test_stages_on_one_rank_send_each_other_nothing():
    """A V has its middle on one rank."""
    _, stage_costs = costs(a_profile(), "cpu", "zb-v", 4)
    assert stage_costs.forward == pytest.approx(
        (2 + SEND_S + MESSAGE_S, 2 + RECEIVE_S, 2 + SEND_S + MESSAGE_S, 2 + RECEIVE_S)
    )
    assert stage_costs.transfer == (0.5, 0.0, 0.5)


@pytest.mark.parametrize(("micro_batches", "share"), [(1, 0.0), (2, 0.5), (4, 0.75)])
def test_all_micro_batches_but_the_first_add_up_their_gradients(micro_batches, share):
    """A batch of one micro-batch has nothing to add to."""
    _, stage_costs = costs(a_profile(accumulate_s_per_byte=0.1), "gpu", micro_batches=micro_batches)
    assert stage_costs.backward == pytest.approx((12 + share * 20 * 0.1,) * 2)
    assert stage_costs.weight_grad == pytest.approx((12 + share * 20 * 0.1, 8 + share * 20 * 0.1))


def test_all_slices_but_the_first_add_up_their_gradients():
    """Two of each of four micro-batches: seven of eight add."""
    profile = a_profile(accumulate_s_per_byte=0.1)
    _, stage_costs = costs(profile, "gpu", "seq1f1b", slices=2)
    assert stage_costs.backward[0] == pytest.approx((12 + 7 / 4 * 20 * 0.1,) * 4)


def test_every_copy_has_a_first_micro_batch_of_its_own():
    """Two copies with two micro-batches each: half of them add."""
    _, stage_costs = costs(a_profile(accumulate_s_per_byte=0.1), "gpu", "gpipe", 1, 4, replicas=2)
    assert stage_costs.backward == pytest.approx((24 + 0.5 * 40 * 0.1,))


def test_of_unlike_replicas_the_slowest_adds_up_gradients():
    """A stage has one figure for all of its ranks."""
    case_schedule = schedule("gpipe", 1, 4, replicas=2)
    profiles = [a_profile(accumulate_s_per_byte=0.1), a_profile(accumulate_s_per_byte=0.3)]
    on = Cluster("c", (Device("d", 10**9, "gpu"),) * 2, 2, LINK, LINK)
    for order in (profiles, profiles[::-1]):
        result = schedule_costs(case_schedule, order, [4], on, 8, weight_rule("flush"))
        ((first, *_),) = result.backward
        assert first == pytest.approx(24 + 0.5 * 40 * 0.3)


def test_an_update_has_a_cost_of_its_own_where_there_is_something_to_update():
    """0.26 ms a step here, whatever the size."""
    profile = a_profile(update_fixed_s=5.0, update_s_per_byte=1.0)
    assert update_seconds(profile, [1, 3]) == [15, 35]
    bare = Profile(
        tuple(
            LayerProfile(
                layer.name,
                layer.kind,
                layer.forward,
                layer.backward,
                layer.input_grad,
                layer.weight_grad,
                0,
                0,
                0,
                1,
                100,
            )
            for layer in profile
        ),
        "f",
        7.0,
        8,
        update_fixed_s=5.0,
    )
    assert update_seconds(bare, [1, 3]) == [0, 0]


@pytest.mark.parametrize("ranks_per_host", [1, 2])
def test_each_slice_is_a_message_with_the_bytes_of_a_slice(ranks_per_host):
    """Fixed costs count per slice, bytes once: two of 100 bytes instead of one of 200."""
    _, host_costs = costs(a_profile(), "cpu", "seq1f1b", ranks_per_host=ranks_per_host, slices=2)
    flight_s = 0.5 + 100 / 1000 if ranks_per_host == 1 else 0.5
    assert host_costs.transfer == (2 * flight_s,)
    network_s = NETWORK_SEND_S + 100 * NETWORK_S_PER_BYTE
    message_s = network_s if ranks_per_host == 1 else 0.5 + 100 / 1000
    sent = [entry[0] if isinstance(entry, tuple) else entry for entry in host_costs.forward]
    assert sent[0] == pytest.approx(4 + 2 * (SEND_S + message_s))


def test_devices_that_the_schedule_does_not_use_do_not_count():
    """A GPU on a further rank leaves the others to hand over their messages themselves."""
    case_schedule = schedule("1f1b", 2, 4)
    devices = (*(Device("c", 10**9, "cpu"),) * 2, Device("g", 10**9, "gpu"))
    on = Cluster("c", devices, 3, LINK, LINK)
    stage_costs = schedule_costs(
        case_schedule, [a_profile()] * 2, [2, 2], on, 8, weight_rule("flush")
    )
    assert stage_costs.forward == pytest.approx((4 + SEND_S + MESSAGE_S, 4 + RECEIVE_S))
    apart = replace(on, devices_per_node=1)
    profiles = [a_profile()] * 2
    stage_costs = schedule_costs(case_schedule, profiles, [2, 2], apart, 8, weight_rule("flush"))
    assert stage_costs.network == Network((0, 1), LINK.latency_s)


def test_halves_of_a_backward_have_the_work_that_they_run_with():
    """I sends and receives; W adds up gradients, a whole backward does both."""
    _, stage_costs = costs(a_profile(accumulate_s_per_byte=0.1), "cpu", "zb-h1")
    sums_s = 0.75 * 20 * 0.1
    hand_over_s = SEND_S + MESSAGE_S
    assert stage_costs.input_grad == pytest.approx((RECEIVE_S, 4 + hand_over_s))
    assert stage_costs.weight_grad == pytest.approx((12 + sums_s, 8 + sums_s))
    assert stage_costs.backward == pytest.approx(
        (12 + sums_s + RECEIVE_S, 12 + sums_s + hand_over_s)
    )


@pytest.mark.parametrize("batches", [8, 12])
def test_every_batch_of_a_stream_has_a_first_micro_batch_on_every_replica(batches):
    """Of eight micro-batches in a batch, two replicas of stage 0 write two, one of stage 1 one."""
    case_schedule = schedule("pipedream", 2, 8, replicas=(2, 1), batches=batches)
    devices = (Device("g", 10**9, "gpu"),) * 3
    on = Cluster("c", devices, 3, LINK, LINK)
    profiles = [replace(a_profile(), accumulate_s_per_byte=seconds) for seconds in (0.1, 0.2, 0.4)]
    stage_costs = schedule_costs(case_schedule, profiles, [2, 2], on, 16, weight_rule("stash"))
    slower = max(
        0.1 if rank == 0 else 0.2 if rank == 1 else 0.4 for rank in case_schedule.ranks_of_stage[0]
    )
    other = max((0.1, 0.2, 0.4)[rank] for rank in case_schedule.ranks_of_stage[1])

    def mean(entry):
        """The mean over micro-batches, where replicas are on unlike devices."""
        return sum(entry) / len(entry) if isinstance(entry, (tuple, list)) else entry

    expected = (12 + 6 / 8 * 20 * slower, 12 + 7 / 8 * 20 * other)
    assert tuple(map(mean, stage_costs.backward)) == pytest.approx(expected)


def test_a_medium_that_all_share_is_no_network_of_cards():
    """Where the link between hosts is shared, messages wait for each other there."""
    link = Link(0.5, 1000.0, "", True)
    _, stage_costs = costs(a_profile(), "cpu", ranks_per_host=1, link=link)
    assert stage_costs.links == "shared"
    assert stage_costs.network is None


def test_slices_of_pipelines_inside_hosts_and_between_them_are_messages_of_their_own():
    """Two pipelines of two stages on three hosts, micro-batches in two slices."""
    case_schedule = schedule("seq1f1b", 2, 4, slices=2, replicas=2)
    on = Cluster("c", (Device("d", 10**9, "cpu"),) * 4, 2, LINK, LINK, node_of=(0, 0, 1, 2))
    stage_costs = schedule_costs(
        case_schedule, [a_profile()] * 4, [2, 2], on, 8, weight_rule("flush")
    )
    for number, first in enumerate(case_schedule.slicing.first_of):
        pair = [case_schedule.placement[stage, first] for stage in range(2)]
        is_inside = len({(0, 0, 1, 2)[rank] for rank in pair}) == 1
        network_s = NETWORK_SEND_S + 100 * NETWORK_S_PER_BYTE
        slice_s = 0.5 + 100 / 1000 if is_inside else network_s
        receive_s = 0.0 if is_inside else 100 * NETWORK_S_PER_BYTE
        forward = [entry[number] for entry in stage_costs.forward]
        assert forward[0] == pytest.approx(4 + 2 * (SEND_S + slice_s))
        assert forward[1] == pytest.approx(4 + 2 * (RECEIVE_S + receive_s))


def test_the_slices_of_a_micro_batch_wait_for_the_longest_of_their_ways():
    """One slice stays inside a host, the other goes to another host, whose cards have a latency of
    their own.
    """
    programs = "0F0 0F2 0B2 0B0 0U1\n1F0 1F1 1F2 1B2 1B1 1B0 1U1\n0F1 0B1 0U1"
    sliced = replace(Schedule.parse(programs), slicing=Slicing("samples", ((0.5, 0.5), (1.0,))))
    between = Link(0.25, 400.0)
    on = Cluster("c", (Device("d", 10**9, "cpu"),) * 3, 3, LINK, between, node_of=(0, 0, 1))
    result = schedule_costs(sliced, [a_profile()] * 3, [2, 2], on, 4, weight_rule("flush"))
    # Boundaries carry 200 bytes for 2 samples; of three slices in two micro-batches, 133 each.
    slices = sliced.slices_per_micro_batch
    away_s = slices * between.transfer_seconds(200 / slices)
    assert away_s > slices * LINK.latency_s
    assert result.transfer == (pytest.approx((away_s, slices * LINK.latency_s)),)
    assert result.network == Network((0, 0, 1), 0.25)


@pytest.mark.parametrize(("micro_batches", "share"), [(1, 0.0), (2, 0.5), (4, 0.75)])
def test_a_virtual_worker_adds_up_the_gradients_of_its_own_whole_batches(micro_batches, share):
    """Two of them take turns: of each batch one micro-batch writes, on either of them."""
    _, stage_costs = costs(
        a_profile(accumulate_s_per_byte=0.1), "gpu", "hetpipe", micro_batches=micro_batches
    )
    assert stage_costs.backward == pytest.approx((12 + share * 20 * 0.1,) * 2)


def test_a_rank_that_only_updates_a_stage_adds_up_nothing():
    """Of its one micro-batch the other rank writes the gradients."""
    case_schedule = Schedule.parse("0F0 0B0 0U1\n0U1")
    on = Cluster("c", (Device("g", 10**9, "gpu"),) * 2, 2, LINK, LINK)
    profiles = [a_profile(accumulate_s_per_byte=0.1)] * 2
    result = schedule_costs(case_schedule, profiles, [4], on, 2, weight_rule("flush"))
    assert result.backward == (24,)
