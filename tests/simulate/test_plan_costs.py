"""Costs from a profile, a cut and a cluster."""

from dataclasses import replace

import pytest
from tests.simulate.four_layers import FOUR, LINK, PROFILE, SLOW

from penstock.cluster.cluster import Cluster, Device, Link, cluster
from penstock.errors import PartitionError, PlanError
from penstock.plan.sharding import Sharding
from penstock.profile.profile import Timing
from penstock.schedule.catalogue import schedule
from penstock.schedule.op import Schedule
from penstock.schedule.slicing import Slicing
from penstock.simulate.gradient_sync import COLLISIONS, SUM_S_PER_BYTE, all_reduce_seconds
from penstock.simulate.plan_costs import (
    place_costs,
    schedule_costs,
    stage_costs,
    width_profile,
    with_plan_zero,
)
from penstock.simulate.rank_memory import StoredParameters
from penstock.simulate.simulate import peak_memory
from penstock.simulate.slice_costs import slice_costs
from penstock.weights.catalogue import weight_rule


def test_costs_are_sums_over_each_stage_s_layers():
    """Everything that is simulated rests on these sums."""
    costs = stage_costs(PROFILE, [1, 2, 1], 2, FOUR, micro_batches=4)
    assert costs.forward == (2, 10, 8)
    assert costs.backward == (4, 20, 16)
    assert costs.input_grad == (0, 5, 4), "data needs no gradient"
    assert costs.weight_grad == (4, 15, 12), "all of the first stage's backward"
    assert costs.update == (0, 0, 0), "this profile measured no update"
    assert costs.activation_bytes == (20, 100, 80)
    assert costs.input_bytes == (14, 2000, 6000)
    assert costs.weight_bytes == (300, 3 * 500 + 3, 1203)
    assert costs.boundary_bytes == (2000, 6000)
    part = stage_costs(PROFILE, [4], 2.5, FOUR, micro_batches=1)
    assert part.activation_bytes == (2.5 * 100,), "a batch of two and a half samples"


def test_a_stage_keeps_the_input_that_counts_at_a_layer_before_it():
    """Only where a stage begins: inside one, the other layer has counted it."""
    layers = tuple(replace(layer, entry_bytes_per_sample=1.0) for layer in PROFILE.layers)
    costs = stage_costs(replace(PROFILE, layers=layers), [1, 2, 1], 2, FOUR, micro_batches=4)
    assert costs.activation_bytes == (22, 102, 82)


def test_a_boundary_costs_the_link_that_it_crosses():
    """Stages 1 and 2 stand on different nodes here: that boundary has the slower link."""
    assert stage_costs(PROFILE, [1, 2, 1], 2, FOUR, micro_batches=4).transfer == (0.5 + 2, 2 + 60)


@pytest.mark.parametrize(("states", "expected"), [(0, 200 + 0), (1, 300), (2, 400)])
def test_weights_count_with_gradients_and_optimizer_state(states, expected):
    """SGD, momentum, Adam: one buffer more each, and gradients always."""
    costs = stage_costs(PROFILE, [1, 3], 1, FOUR, micro_batches=1, optimizer_states=states)
    assert costs.weight_bytes[0] == expected


def test_uneven_micro_batches_cost_the_mean_time_and_the_largest_memory():
    """10 samples in 4 parts are 3, 3, 2, 2: memory must hold the 3, while time adds up to 10."""
    costs = stage_costs(PROFILE, [4], 2.5, FOUR, micro_batches=4)
    assert costs.forward == (25,)
    assert costs.activation_bytes == (300,)
    assert costs.input_bytes == (21,)


def test_costs_refuse_what_cannot_be():
    """The cut may come from a user."""
    with pytest.raises(PartitionError, match="sums to 3, but the model has 4 layers"):
        stage_costs(PROFILE, [1, 2], 1, FOUR, micro_batches=1)
    with pytest.raises(PlanError, match="0 micro-batches of 1 samples: both must be above 0"):
        stage_costs(PROFILE, [4], 1, FOUR, micro_batches=0)
    with pytest.raises(PlanError, match="1 micro-batches of 0 samples"):
        stage_costs(PROFILE, [4], 0, FOUR, micro_batches=1)


def test_transfers_follow_the_placement_of_the_schedule():
    """Two stages on one rank send nothing; a schedule may stand on ranks in any order."""
    costs = stage_costs(PROFILE, [1, 1, 1, 1], 1, FOUR, micro_batches=1)
    folded = Schedule.parse(
        "rank 0 | 0F0 1F0 1B0 0B0 0U1 1U1\nrank 1 |\nrank 2 | 2F0 3F0 3B0 2B0 2U1 3U1"
    )
    assert place_costs(costs, folded, FOUR).transfer == (0, SLOW.transfer_seconds(2000), 0)
    without_bytes = replace(costs, boundary_bytes=None)
    assert place_costs(without_bytes, folded, FOUR).transfer == (0, SLOW.latency_s, 0)


def test_each_micro_batch_takes_the_link_between_its_own_copies():
    """The first stays on its node, the second goes to the other one; where all take the same way,
    one number says so.
    """
    costs = stage_costs(PROFILE, [2, 2], 1, FOUR, micro_batches=2)
    both_ways = Schedule.parse(
        "rank 0 | 0F0 1F1 0B0 1B1 0U1 1U1\nrank 1 | 1F0 1B0 1U1\nrank 2 | 0F1 0B1 0U1"
    )
    assert place_costs(costs, both_ways, FOUR).transfer == (
        (LINK.transfer_seconds(2000), SLOW.transfer_seconds(2000)),
    )
    alike = Schedule.parse(
        "rank 0 | 0F0 0B0 0U1\nrank 1 | 1F0 1B0 1U1\nrank 2 | 0F1 0B1 0U1\nrank 3 | 1F1 1B1 1U1"
    )
    assert place_costs(costs, alike, FOUR).transfer == (LINK.transfer_seconds(2000),)
    shared = replace(FOUR, inside=replace(LINK, shared=True))
    assert place_costs(costs, alike, shared).links == "duplex", "each node has a medium of its own"
    one_node = replace(shared, devices_per_node=4)
    assert place_costs(costs, alike, one_node).links == "shared"


def test_an_all_reduce_over_two_nodes_takes_the_link_between_them():
    """Of four ranks on two nodes: three rounds and three, a quarter of the gradients each, over the
    slower link.
    """
    assert all_reduce_seconds((0, 1), 4000, FOUR) == LINK.transfer_seconds(4000)
    assert all_reduce_seconds((0, 2), 4000, FOUR) == SLOW.transfer_seconds(4000)
    assert all_reduce_seconds(range(4), 4000, FOUR) == 6 * SLOW.transfer_seconds(1000)
    assert all_reduce_seconds((2,), 4000, FOUR) == 0


def test_replicas_on_one_node_share_its_link_to_others_if_that_is_shared():
    """Both ranks of a node send their pieces over it."""
    shared = replace(FOUR, between=replace(SLOW, shared=True))
    assert all_reduce_seconds(range(4), 4000, shared) == 6 * SLOW.transfer_seconds(2000)


def test_updates_of_replicas_include_their_all_reduce():
    """Two exchange all gradients; each of three receives two pieces of a third and sends two."""
    costs = stage_costs(PROFILE, [4], 1, FOUR, micro_batches=3)
    (alone,), (gradients,) = costs.spread("update", 1), costs.spread("gradient_bytes", 1)

    def update(copies):
        case_schedule = Schedule.parse(
            "\n".join(f"rank {rank} | 0F{rank} 0B{rank} 0U1" for rank in range(copies))
        )
        return place_costs(costs, case_schedule, FOUR).update[0] - alone

    assert update(1) == 0
    assert update(2) == pytest.approx(FOUR.transfer_seconds(gradients, 0, 1))
    assert update(3) == pytest.approx(
        4 * max(FOUR.transfer_seconds(gradients / 3, 0, other) for other in (1, 2))
    )


def test_an_all_reduce_on_cpus_takes_longer_than_its_messages():
    """The same cores send, receive and add: 1.4 times as long, and at least 0.7 ns a byte."""
    two = (Device("d", 10**9, "cpu"),) * 2
    assert all_reduce_seconds((0, 1), 1000.0, Cluster("slow", two, 2, LINK, LINK)) == 0.5 + 1.4
    fast = Link(0.0, 1e12)
    assert all_reduce_seconds((0, 1), 1e9, Cluster("fast", two, 2, fast, fast)) == pytest.approx(
        0.7
    )
    assert all_reduce_seconds((0, 1), 1000.0, FOUR) == 0.5 + 1.0


def test_an_all_reduce_of_hosts_takes_the_time_of_the_busiest_card():
    """Each host sends what the others need, both directions at once, and then adds."""
    four = (Device("d", 10**9, "cpu"),) * 4
    hosts = Cluster("hosts", four, 1, LINK, SLOW)
    add_s = 4000 * SUM_S_PER_BYTE
    assert all_reduce_seconds((0, 1), 4000, hosts) == SLOW.transfer_seconds(4000) + add_s
    # Twice three pieces of a quarter, which collide at the cards of four hosts.
    four_hosts_s = COLLISIONS * 2 * SLOW.transfer_seconds(3000) + add_s
    assert all_reduce_seconds(range(4), 4000, hosts) == pytest.approx(four_hosts_s)
    # Two ranks share a card, and each of them sends two pieces to the other host.
    pairs = Cluster("pairs", four, 2, LINK, SLOW)
    assert all_reduce_seconds(range(4), 4000, pairs) == 2 * SLOW.transfer_seconds(4000) + add_s
    one_medium = replace(hosts, between=replace(SLOW, shared=True))
    assert all_reduce_seconds((0, 1), 4000, one_medium) == SLOW.transfer_seconds(8000) + add_s


def test_an_all_reduce_once_in_a_wave_is_divided_among_its_updates():
    """HetPipe's virtual workers: 0 and 1 on one node, 2 and 3 on the other, so that copies meet
    over the slow link.
    """
    case_schedule = schedule("hetpipe", 2, 1)
    profile = replace(PROFILE, update_s_per_byte=0.25)
    costs = stage_costs(profile, [2, 2], 1, FOUR, micro_batches=1)
    placed = place_costs(costs, case_schedule, FOUR)
    length = case_schedule.stream.waves.length
    assert length > 1
    assert placed.update == tuple(
        0.25 * size + FOUR.transfer_seconds(size, 0, 2) / length for size in costs.gradient_bytes
    )
    assert placed.transfer == (FOUR.transfer_seconds(costs.boundary_bytes[0], 0, 1),)


def test_a_weight_rule_s_versions_are_of_what_is_trained():
    """Stage 0 has 300 bytes of weights and 1 of buffers; a version more is 300 bytes more."""
    case_schedule = schedule("pipedream", 2, 1)
    costs = stage_costs(PROFILE, [2, 2], 1, FOUR, micro_batches=1)
    for rule, more in (("stash", 1), ("none", 0), ("pipemare", 2)):
        placed = place_costs(costs, case_schedule, FOUR, weight_rule(rule))
        assert peak_memory(case_schedule, placed)[0] == pytest.approx(
            3 * 300 + 1 + 2 * 30 + more * 300
        )
    assert (
        place_costs(costs, schedule("1f1b", 2, 1), FOUR, weight_rule("flush")).weight_versions
        is None
    )


def test_activations_that_are_handed_over_take_the_links_time():
    """Without that, evicting schedules would be predicted too fast."""
    costs = stage_costs(PROFILE, [2, 2], 1, FOUR, micro_batches=3)
    case_schedule = Schedule.parse(
        "0F0 0F1 0E1 0F2 0B0 0L1 0B1 0B2 0U1\n1F0 0E1 1B0 1F1 0L1 1B1 1F2 1B2 1U1"
    )
    activation_bytes = costs.spread("activation_bytes", 2)
    assert place_costs(costs, case_schedule, FOUR).offload == (
        FOUR.transfer_seconds(activation_bytes[0], 0, 1),
        0,
    )


def test_a_slice_pays_the_fixed_cost_of_a_whole_call():
    """Two halves of a micro-batch cost what two micro-batches of half the size do."""
    profile = replace(
        PROFILE,
        layers=tuple(
            replace(layer, forward=Timing((1, 2), (1.0, 1.5))) for layer in PROFILE.layers
        ),
    )
    halves = schedule("autopipe", 2, 1, sliced=1)
    whole = stage_costs(profile, [2, 2], 2, FOUR, micro_batches=1)
    costs = slice_costs(place_costs(whole, halves, FOUR), halves, [profile] * 2, [2, 2], 2)
    assert costs.forward == (
        (4.0,),
        (4.0,),
    )  # two calls of two layers of 1 s each; the whole takes 3
    assert whole.spread("forward", 2) == (3.0, 3.0)
    assert costs.transfer == (
        (2 * FOUR.transfer_seconds(whole.spread("boundary_bytes", 1)[0] / 2, 0, 1),),
    )


@pytest.mark.parametrize("lengths", [[1, 1, 2], [1, 1, 1, 1]])
def test_a_schedule_of_more_ranks_than_the_cluster_is_refused(lengths):
    """Messages of the other ranks have no link."""
    ranks = len(lengths)
    costs = stage_costs(PROFILE, lengths, 1, cluster("local:2"), micro_batches=1)
    with pytest.raises(PlanError, match=f"gpipe runs on {ranks} ranks, but cluster local:2 has 2"):
        place_costs(costs, schedule("gpipe", ranks, 1), cluster("local:2"))


@pytest.mark.parametrize(
    ("kind", "devices", "copies"),
    [("cpu", (0, 1), 1), ("cpu", (0, 2), 1), ("cpu", (0, 1, 2), 2), ("gpu", (0, 1), 0)],
)
def test_memory_counts_the_copies_of_gradients_that_are_summed(kind, devices, copies):
    """One in shared memory or buckets; two with what is sent and received; on GPUs none."""
    nodes = Cluster("four", (Device("d", 10**9, kind=kind),) * 4, 2, LINK, SLOW)
    count = len(devices)
    programs = "\n".join(f"rank {r} | 0F{r} 0B{r} 0U1" for r in range(count))
    replicated = Schedule.parse(programs)
    rule = weight_rule("flush")
    local = nodes.on(devices)
    profiles = [PROFILE] * count
    costs = schedule_costs(replicated, profiles, [4], local, 2 * count, rule)
    alone = stage_costs(PROFILE, [4], 2, local, micro_batches=count)
    gradients = alone.gradient_bytes[0]
    assert costs.gradient_bytes == ((1 + copies) * gradients,)
    assert costs.weight_bytes == (alone.weight_bytes[0] + copies * gradients,)


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_levels_of_zero_divide_the_update_of_a_schedule_and_not_its_sums(kind, nodes):
    """Level 1 divides the step of the optimizer, and the sum is of the gradients alone; neither levels
    above it nor level 1 between hosts, which sums without buckets, need copies of them.
    """
    case_schedule, lengths, replicas = schedule("chimera", 2, 4), [1, 3], (0, 1)
    on = Cluster("c", (Device("d", 10**9, kind),) * 2, 2 // nodes, LINK, SLOW)
    profile = replace(PROFILE, update_s_per_byte=0.25, optimizer_states=2.0)
    costs = schedule_costs(case_schedule, [profile] * 2, lengths, on, 8, weight_rule("flush"))
    sizes = (100.0, 900.0)
    sums = [all_reduce_seconds(replicas, size, on) for size in sizes]
    steps = [0.25 * size for size in sizes]
    assert costs.update == pytest.approx([a + b for a, b in zip(steps, sums, strict=True)])
    assert costs.gradient_bytes == pytest.approx([(1 + (kind == "cpu")) * size for size in sizes])
    copies = 1 + (kind == "cpu" and nodes == 1)
    first = with_plan_zero(costs, case_schedule, profile, lengths, on, 1)
    assert first.gradient_bytes == pytest.approx([copies * size for size in sizes])
    shares = StoredParameters(profile, lengths, (replicas, replicas), 1).largest_shares()
    expected = [
        step * share + sum_s for step, share, sum_s in zip(steps, shares, sums, strict=True)
    ]
    assert first.update == pytest.approx(expected)
    # Nothing is tied: the parameters of a stage are one each, and rank 1 owns that of stage 1.
    weights_of_rank = 100.0 + 900.0
    for weights, gradients, _ in first.bytes_of_ranks:
        assert (weights, gradients) == (weights_of_rank + 6, copies * weights_of_rank)
    second = with_plan_zero(costs, case_schedule, profile, lengths, on, 2)
    assert second.gradient_bytes == pytest.approx(sizes), "up to two of one and three layers"
    assert second.optimizer_bytes == pytest.approx([100.0, 900.0])
    with pytest.raises(PlanError, match="zero is for synchronous schedules, and pipedream is"):
        with_plan_zero(costs, schedule("pipedream", 2, 2), profile, lengths, on, 1)


def test_the_slices_of_each_micro_batch_take_the_link_between_its_own_copies():
    """The first pipeline stays on its node, the second one does not; a micro-batch of one slice
    has the fixed seconds of a message once.
    """
    text = "0F0 0F1 0B1 0B0 0U1\n1F0 1F1 1B1 1B0 1U1\n0F2 0B2 0U1"
    apart = Schedule.parse(f"{text}\n1F2 1B2 1U1")
    sliced = replace(apart, slicing=Slicing("samples", ((0.5, 0.5), (1.0,))))
    costs = stage_costs(PROFILE, [2, 2], 1, FOUR, micro_batches=2)
    on = replace(FOUR, devices_per_node=1, node_of=(0, 0, 1, 2))
    near_s, far_s = 2 * LINK.transfer_seconds(1000), SLOW.transfer_seconds(2000)
    assert place_costs(costs, sliced, on).transfer == ((near_s, far_s),)
    spread = Schedule.parse("0F0 0F2 0B2 0B0 0U1\n1F0 1F1 1F2 1B2 1B1 1B0 1U1\n0F1 0B1 0U1")
    spread = replace(spread, slicing=Slicing("samples", ((0.5, 0.5), (1.0,))))
    both = place_costs(costs, spread, on).transfer
    assert both == ((2 * SLOW.transfer_seconds(1000), LINK.transfer_seconds(2000)),)


@pytest.mark.parametrize(
    ("inside_shared", "between_shared", "ranks", "links"),
    [
        (True, False, (0, 1), "shared"),
        (False, False, (0, 1), "duplex"),
        (False, True, (0, 2), "shared"),
        (True, False, (0, 2), "duplex"),
        # Two nodes have a medium each, and a third one is between them.
        (True, True, (0, 1, 2), "duplex"),
        (True, True, (0, 1, 3, 2), "duplex"),
        (False, True, (0, 2, 1, 3), "shared"),
    ],
)
def test_a_medium_is_shared_where_all_that_crosses_uses_it(
    inside_shared, between_shared, ranks, links
):
    """The simulator can only share one for all messages."""
    on = replace(
        FOUR,
        inside=replace(LINK, shared=inside_shared),
        between=replace(SLOW, shared=between_shared),
    ).on(ranks)
    stages = len(ranks)
    lengths = [1] * (stages - 1) + [5 - stages]
    costs = stage_costs(PROFILE, lengths, 1, on, micro_batches=2)
    assert place_costs(costs, schedule("gpipe", stages, 2), on).links == links


def test_equal_links_are_several_media_and_a_value_that_stays_on_its_rank_uses_none():
    """Each node has a medium of its own; a V has its middle on one rank."""
    link = replace(LINK, shared=True)
    on = replace(FOUR, inside=link, between=link).on((0, 1, 2))
    costs = stage_costs(PROFILE, [1, 1, 2], 1, on, micro_batches=2)
    assert place_costs(costs, schedule("gpipe", 3, 2), on).links == "duplex"
    apart = replace(FOUR, between=replace(SLOW, shared=True)).on((0, 2))
    costs = stage_costs(PROFILE, [1, 1, 1, 1], 1, apart, micro_batches=2)
    assert place_costs(costs, schedule("zb-v", 4, 2), apart).links == "shared"


def test_versions_are_of_stages_that_train_and_need_the_bytes_of_their_parts():
    """A stage without parameters and buffers has one version of nothing."""
    bare = [replace(layer, parameter_bytes=0, buffer_bytes=0) for layer in PROFILE.layers[:2]]
    profile = replace(PROFILE, layers=(*bare, *PROFILE.layers[2:]))
    stream, rule = schedule("pipedream", 2, 1), weight_rule("stash")
    costs = stage_costs(profile, [2, 2], 1, FOUR, micro_batches=1)
    assert place_costs(costs, stream, FOUR, rule).weight_versions == (1.0, 1.0)
    for name in ("gradient_bytes", "optimizer_bytes"):
        without = replace(costs, **{name: None})
        assert place_costs(without, stream, FOUR, rule).weight_versions is None


def test_the_rounding_of_copies_makes_no_update_of_less_than_nothing():
    """Three replicas on hosts sum in two further copies: a third of three sizes is rounded."""
    on = Cluster("c", (Device("c", 10**9, "cpu"),) * 3, 1, LINK, SLOW)
    case_schedule = schedule("gpipe", 1, 3, replicas=3)
    for size in range(1, 60):
        layer = replace(PROFILE.layers[0], parameter_bytes=size)
        model = replace(PROFILE, layers=(layer,))
        costs = schedule_costs(case_schedule, [model] * 3, [1], on, 3, weight_rule("flush"))
        shared = with_plan_zero(costs, case_schedule, model, [1], on, 1)
        assert shared.update == pytest.approx((all_reduce_seconds(range(3), size, on),))


def test_more_stages_than_ranks_are_assumed_to_loop():
    """Until they are placed: stages 0 and 3 on rank 0, and the last link back to it."""
    three = FOUR.on((0, 1, 2))
    costs = stage_costs(PROFILE, [1, 1, 1, 1], 1, three, micro_batches=1)
    assert costs.transfer == (
        LINK.transfer_seconds(1000),
        SLOW.transfer_seconds(2000),
        SLOW.transfer_seconds(3000),
    )
    sharded = replace(PROFILE, boundary_replicas=3)
    assert stage_costs(sharded, [1, 3], 1, FOUR, micro_batches=1).input_bytes == (7, 3000)
    assert stage_costs(sharded, [1, 3], 1, FOUR, micro_batches=1).boundary_bytes == (1000,)
    assert not costs.boundary_buffers


def test_a_width_that_was_not_profiled_is_refused_with_those_that_were():
    """One profile for all devices; of several layouts the exact one."""
    wide = replace(PROFILE, tensor_parallel=4)
    sequence = replace(PROFILE, tensor_parallel=2, sequence_parallel=True)
    model = replace(PROFILE, widths=(wide, sequence))
    assert width_profile(model, Sharding()) is model
    assert width_profile(model, Sharding(tensor_parallel=4)) is wide
    assert width_profile(model, Sharding(tensor_parallel=2, sequence_parallel=True)) is sequence
    with pytest.raises(PlanError, match="only for layers on 1, 2, 4 devices"):
        width_profile(model, Sharding(tensor_parallel=2))
    with pytest.raises(PlanError, match="planned for one kind of device: give one profile"):
        width_profile({"d": model}, Sharding(tensor_parallel=4))


@pytest.mark.parametrize(("owner", "partners"), [(0, (1, 2)), (3, (0, 2)), (3, (2, 0))])
def test_activations_take_the_longest_way_to_any_partner(owner, partners):
    """Whichever partner comes first: one is on the same node, the other is not."""
    costs = stage_costs(PROFILE, [4], 1, FOUR, micro_batches=2)
    programs = ["", "", "", ""]
    programs[owner] = "0F0 0E0 0F1 0E1 0L1 0B1 0L0 0B0 0U1"
    for number, rank in enumerate(partners):
        programs[rank] = f"0E{number} 0L{number}"
    rows = [f"rank {rank} | {program}" for rank, program in enumerate(programs)]
    moves = Schedule.parse("\n".join(rows))
    expected = FOUR.transfer_seconds(costs.activation_bytes[0], 0, 2)
    assert place_costs(costs, moves, FOUR).offload == (expected,)


def test_only_stages_that_sum_gradients_store_copies_of_them():
    """Stage 0 has two replicas on CPUs, stage 1 one."""
    on = Cluster("c", (Device("d", 10**9, "cpu"),) * 3, 3, LINK, SLOW)
    uneven = schedule("1f1b", 2, 2, replicas=(2, 1))
    costs = schedule_costs(uneven, [PROFILE] * 3, [2, 2], on, 2, weight_rule("flush"))
    assert costs.gradient_bytes == (2 * 300, 700)
    assert costs.weight_bytes == (3 * 300 + 1 + 300, 3 * 700 + 5)


def test_tied_parameters_of_a_stream_count_with_their_first_stage():
    """Versions are stored by stage, so that the bytes of its ranks are those of its stages."""
    layers = [replace(layer, tensor_bytes=(layer.parameter_bytes,)) for layer in PROFILE]
    layers[3] = replace(layers[3], tied_tensors=((0, 0),))
    tied = replace(PROFILE, layers=tuple(layers))
    for name, rule in (("pipedream", "stash"), ("1f1b", "flush")):
        case_schedule = schedule(name, 2, 2)
        costs = schedule_costs(case_schedule, [tied] * 2, [2, 2], FOUR, 2, weight_rule(rule))
        assert (costs.bytes_of_ranks is None) == (name == "pipedream")


@pytest.mark.parametrize("micro_batch", [float("inf"), float("nan"), -1.0])
def test_a_micro_batch_is_a_finite_number_of_samples(micro_batch):
    """Seconds and bytes would be infinite."""
    with pytest.raises(PlanError, match=f"2 micro-batches of {micro_batch} samples"):
        stage_costs(PROFILE, [4], micro_batch, FOUR, micro_batches=2)
