"""Proposals placed out, weighed, and compared."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.search.random_requests import FAST, SLOW, clusters, cuts, links, profiles

from penstock.cluster.cluster import Cluster, Device, Link, cluster
from penstock.errors import PlanError, ScheduleError
from penstock.schedule.recompute import Recompute
from penstock.search.best_plan import plan_proposal
from penstock.search.catalogue import plan
from penstock.search.evaluate import evaluate, infeasible_error
from penstock.search.instantiate import (
    CLOSE,
    LEAN,
    best,
    by_memory,
    by_time,
    cached_schedule,
    first_of_kind,
    instantiate,
    representative_pipeline,
    with_request,
)
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest
from penstock.simulate.gradient_sync import all_reduce_seconds
from penstock.simulate.plan_costs import simulate_plan
from penstock.simulate.steady_state import steady

LINK = Link(0.0, 1e12)


def seconds(placed, recompute="never"):
    """Of a step, or a batch of a stream."""
    return steady(placed.schedule, placed.costs, recompute).seconds_per_batch


def one_node(*devices: Device) -> Cluster:
    """All joined by free links."""
    return Cluster("c", devices, len(devices), LINK, LINK)


NAMES = ("1f1b", "gpipe", "zb-h1", "naive", "interleaved")


@settings(max_examples=40, deadline=None)
@given(
    st.data(),
    profiles(4, 6),
    links(),
    st.sampled_from(NAMES),
    st.integers(1, 3),
    st.integers(2, 3),
    st.integers(1, 20),
)
def test_of_pipelines_alike_one_takes_as_long_as_all(
    data, profile, link, name, ranks, pipelines, batch
):
    """So that one of a hundred is simulated, not all. Memory too, where all micro-batches are
    alike.
    """
    micro_batches = data.draw(st.integers(1, batch))
    per_rank = 2 if name == "interleaved" else 1
    if ranks * per_rank > len(profile):
        return
    options = (("chunks", 2),) if name == "interleaved" else ()
    request = PlanRequest(profile, Cluster("c", (Device("d", 10**12),) * 6, 1, link, link), batch)
    lengths = data.draw(cuts(len(profile), ranks * per_rank))
    proposal = Proposal(lengths, name, micro_batches, (("replicas", pipelines), *options))
    try:
        whole = instantiate(request, proposal)
    except (PlanError, ScheduleError):
        return
    one = representative_pipeline(request, proposal)
    if micro_batches < pipelines:
        assert one is None
        return
    assert (one.pipelines, one.schedule.ranks * pipelines) == (pipelines, whole.schedule.ranks)
    for recompute in ("never", "always"):
        assert seconds(one, recompute) == pytest.approx(seconds(whole, recompute))
    assert seconds(one, "except_last") <= seconds(whole, "except_last") * (1 + 1e-9), (
        "the last of all is in one pipeline"
    )
    if batch % micro_batches == 0:
        assert evaluate(one)[-1].memory == evaluate(whole)[-1].memory[: one.schedule.ranks]


@settings(max_examples=60, deadline=None)
@given(
    st.data(),
    profiles(2, 5),
    clusters(6, memory=(10**12,)),
    st.sampled_from(NAMES[:4]),
    st.integers(2, 16),
)
def test_one_pipeline_never_takes_longer_than_all(data, profile, on, name, micro_batches):
    """Whatever the devices and links of the others: what is skipped because of it could not win."""
    pipelines = data.draw(st.integers(2, 3))
    ranks = data.draw(st.integers(1, min(3, len(profile))))
    devices = tuple(data.draw(st.permutations(range(on.ranks))))[: pipelines * ranks]
    proposal = Proposal(
        data.draw(cuts(len(profile), ranks)),
        name,
        micro_batches,
        (("replicas", pipelines),),
        devices=devices,
    )
    request = PlanRequest(profile, on, 16)
    try:
        whole = instantiate(request, proposal)
    except (PlanError, ScheduleError):
        return
    one = representative_pipeline(request, proposal)
    assert one is None or seconds(one) <= seconds(whole) * (1 + 1e-9)


def test_there_is_a_pilot_of_several_whole_pipelines_only(profile_of):
    """Of one, of ranks per stage and of streams there is nothing smaller that takes as long."""
    request = PlanRequest(profile_of([1.0] * 4), cluster("4xV100-10GbE"), 8)
    for options in ((), (("replicas", (2, 1)),), (("replicas", 1),)):
        assert representative_pipeline(request, Proposal((2, 2), "1f1b", 4, options)) is None
    assert (
        representative_pipeline(request, Proposal((2, 2), "chimera", 4, (("replicas", 2),))) is None
    )
    with pytest.raises(PlanError, match="1f1b needs 6 ranks, and there are 4"):
        representative_pipeline(request, Proposal((2, 1, 1), "1f1b", 4, (("replicas", 2),)))


def test_a_proposal_stands_on_the_devices_that_it_names(profile_of):
    """Stage 0 on the slow device, or on the quick one: the first case takes longer."""
    on = one_node(Device("fast", 10**9, flops=FAST), Device("slow", 10**9, flops=SLOW))
    request = PlanRequest(profile_of([2.0, 1.0]), on, 8)
    forward_s = {}
    for devices in ((), (0, 1), (1, 0)):
        placed = instantiate(request, Proposal((1, 1), "1f1b", 8, devices=devices))
        forward_s[devices] = placed.costs.forward
    assert forward_s == {(): (2, 1.5), (0, 1): (2, 1.5), (1, 0): (3, 1)}


@pytest.mark.parametrize(
    ("proposal", "message"),
    [
        (Proposal((2, 2), "1f1b", 9), "9 micro-batches are more than the 8 samples of the batch"),
        (Proposal((1, 1, 2), "1f1b", 4), "1f1b in 3 stages needs 3 ranks, 2xV100-10GbE has 2"),
        (
            Proposal((2, 2), "1f1b", 4, devices=(1,)),
            "1f1b needs 2 ranks, and 1 devices are proposed for it",
        ),
        (
            Proposal((2, 2), "interleaved", 4, (("chunks", 2),)),
            "interleaved puts all 2 stages on one rank, where one stage would do",
        ),
    ],
)
def test_what_cannot_stand_there_is_refused_with_the_numbers(profile_of, proposal, message):
    """A proposal of a planner is checked like one of a user."""
    with pytest.raises(PlanError, match=message):
        instantiate(PlanRequest(profile_of([1.0] * 4), cluster("2xV100-10GbE"), 8), proposal)


def test_the_same_way_on_another_cluster_is_the_same_schedule_with_other_costs(profile_of):
    """That is how remedies are worked out; its result is what laying it out anew gives."""
    request = PlanRequest(profile_of([1.0, 2.0], output=1e6), cluster("2xV100-1GbE"), 8)
    proposal = Proposal((1, 1), "1f1b", 4, devices=(1, 0))
    placed = instantiate(request, proposal)
    other = replace(request, cluster=cluster("2xV100-10GbE"))
    again = with_request(placed, other)
    assert again.schedule is placed.schedule
    assert again == instantiate(other, proposal)
    assert seconds(again) < seconds(placed)


def test_as_little_is_recomputed_as_fits_or_what_was_asked(profile_of):
    """The request's word counts before the proposal's."""
    profile = profile_of([1.0] * 4, parameters=100)
    proposal = Proposal((2, 2), "gpipe", 8)

    def tried(limit, recompute="auto", proposed="auto"):
        request = PlanRequest(
            profile,
            one_node(*(Device("d", 10**9),) * 2),
            16,
            memory_limit=limit,
            recompute=recompute,
        )
        variants = evaluate(instantiate(request, replace(proposal, recompute=proposed)))
        return [(variant.recompute, bool(variant.memory_shortfall)) for variant in variants]

    assert tried(10**6) == [("never", False)]
    assert tried(2000)[0] == ("never", True)
    assert tried(2000)[-1][1] is False
    assert sorted(tried(100)) == sorted((recompute, True) for recompute in tuple(Recompute))
    assert tried(10**6, proposed="always") == [("always", False)]
    assert tried(10**6, recompute="except_last", proposed="always") == [("except_last", False)]


def test_the_fullest_rank_is_the_one_with_the_least_room_for_what_it_holds(profile_of):
    """Not the one that holds most: memories differ."""
    on = one_node(Device("big", 10**6, flops=FAST), Device("small", 500, flops=FAST))
    (evaluated,) = evaluate(
        instantiate(
            PlanRequest(profile_of([1.0, 1.0], parameters=[1000, 100]), on, 1, recompute="never"),
            Proposal((1, 1), "gpipe", 1),
        )
    )
    assert evaluated.memory == (3100, 400)
    assert not evaluated.memory_shortfall
    row = evaluated.candidate
    assert (row.peak_bytes, row.why, row.step_s) == (3100, evaluated.bottleneck, evaluated.step_s)
    assert (row.lengths, row.micro_batches, row.weights) == ((1, 1), 1, "flush")
    on = replace(on, devices=(on.devices[0], Device("small", 300, flops=FAST)))
    (evaluated,) = evaluate(
        instantiate(
            PlanRequest(profile_of([1.0, 1.0], parameters=[1000, 100]), on, 1, recompute="never"),
            Proposal((1, 1), "gpipe", 1),
        )
    )
    assert evaluated.memory_shortfall == "needs 400 B, has 300 B on rank 1"
    assert evaluated.memory_ratio == 400 / 300
    assert evaluated.step_s == 0, "what does not fit is not simulated"
    assert (evaluated.candidate.why, evaluated.bottleneck) == (evaluated.memory_shortfall, "")


@pytest.fixture
def ways(profile_of):
    """Evaluated ways on free links, by name and micro-batches."""
    request = PlanRequest(profile_of([1.0] * 4), one_node(*(Device("d", 10**9),) * 4), 8)
    names = [("gpipe", 8), ("1f1b", 8), ("1f1b", 4), ("gpipe", 4)]
    return {
        (name, m): evaluate(instantiate(request, Proposal((1,) * 4, name, m)))[-1]
        for name, m in names
    }


def test_the_best_is_the_fastest_and_of_equals_the_leanest(ways):
    """1F1B and GPipe take the same; 1F1B holds less."""
    assert best(ways.values()) is ways["1f1b", 8]
    assert best([ways["gpipe", 8], ways["gpipe", 4]]) is ways["gpipe", 8]


def test_times_count_as_equal_only_within_a_thousandth(ways):
    """Memory is no reason to be slower than that."""
    lean, quick = ways["1f1b", 8], ways["gpipe", 8]
    for factor, chosen in ((1 + CLOSE / 2, lean), (1 + 2 * CLOSE, quick)):
        slower = replace(
            lean, steady_state=replace(lean.steady_state, seconds_per_batch=quick.step_s * factor)
        )
        assert (best([slower, quick]) is quick) == (chosen is quick)


def test_a_slower_candidate_is_preferred_only_up_to_the_given_seconds(ways):
    """A plan must not be slower than one that the caller has already; the fastest is always
    allowed.
    """
    quick = ways["gpipe", 8]
    steady_state = replace(
        ways["1f1b", 8].steady_state, seconds_per_batch=quick.step_s * (1 + CLOSE / 2)
    )
    lean = replace(ways["1f1b", 8], steady_state=steady_state)
    for most_s, chosen in (
        (float("inf"), lean),
        (lean.step_s, lean),
        (quick.step_s, quick),
        (0.0, quick),
    ):
        assert best([lean, quick], most_s) is chosen
    assert best([quick], 0.0) is quick


def test_of_equally_fast_candidates_the_rest_is_decided_in_a_fixed_order(ways):
    """Synchronous first, then memory to about 2 %, micro-batches, stages, seconds, names."""
    base = ways["1f1b", 8]
    assert base.preference[:4] == (False, round(math.log(max(base.memory)) / LEAN), 8, 4)
    assert base.preference[4:] == (base.step_s, "1f1b", "never")
    fuller = replace(base, memory=tuple(2 * size for size in base.memory))
    assert best([fuller, base]) is base
    similar = replace(base, memory=tuple(round(1.005 * size) for size in base.memory))
    slower = replace(base.steady_state, seconds_per_batch=base.step_s * (1 + CLOSE / 2))
    assert best([replace(base, steady_state=slower), similar]) is similar
    assert by_time(base) == (base.step_s, base.preference)
    assert by_memory(base) == (base.memory_ratio, base.preference)


def test_a_table_has_the_first_of_each_kind_and_copies_count_as_they_are(ways, profile_of):
    """Two pipelines and one pipeline of which each stage has two ranks are told apart from one of
    one.
    """
    assert first_of_kind(ways.values()) == [ways["gpipe", 8], ways["1f1b", 8]]
    request = PlanRequest(profile_of([1.0] * 4), one_node(*(Device("d", 10**9),) * 4), 8)
    for replicas, copies in ((2, 2), ((2, 1), (2, 1)), ((2, 2), 2), (1, 1)):
        proposal = Proposal((2, 2), "1f1b", 4, (("replicas", replicas),))
        assert evaluate(instantiate(request, proposal))[-1].candidate.replicas == copies
        assert proposal.replicas == replicas
    one = evaluate(
        representative_pipeline(request, Proposal((2, 2), "1f1b", 4, (("replicas", 2),)))
    )[-1]
    assert one.kind == ("1f1b", 2, 2)
    assert one.candidate.micro_batches == 4


def test_a_schedule_is_made_once_for_a_search_that_asks_several_times():
    """Long programs take longer to make than to simulate."""
    assert cached_schedule("1f1b", 4, 8, ()) is cached_schedule("1f1b", 4, 8, ())


def test_nothing_fits_names_the_nearest_and_what_was_refused_only_where_nothing_was_made(
    profile_of,
):
    """Both lists at once would hide the reason."""
    request = PlanRequest(profile_of([1.0] * 4), one_node(*(Device("d", 100),) * 2), 8)
    misfits = evaluate(instantiate(request, Proposal((2, 2), "gpipe", 8)))
    text = str(infeasible_error(request, misfits, ["never mind"]))
    assert "nothing fits the memory of c at batch 8" in text
    assert "never mind" not in text
    assert (
        str(infeasible_error(request, [], ["first", "second"]))
        == "no schedule can be made for these numbers\n  first\n  second"
    )


def test_ranks_that_share_cores_take_the_seconds_of_busy_ranks(profile_of):
    """4 ranks on 2 cores: four stages are no faster than two, and the plan is simulated likewise."""
    profile = profile_of([1.0] * 4)
    link = Link(0.0, 1e12)
    halves = Cluster("c", (Device("d", 10**12, together=2.0),) * 4, 4, link, link)
    request = PlanRequest(profile, halves, 8)
    four = instantiate(request, Proposal((1,) * 4, "1f1b", 8))
    two = instantiate(request, Proposal((2, 2), "1f1b", 8))
    assert four.costs.forward == (2.0,) * 4
    assert two.costs.forward == (2.0,) * 2
    of_two = representative_pipeline(request, Proposal((2, 2), "1f1b", 8, (("replicas", 2),)))
    assert of_two.costs.forward == (4.0,) * 2
    best = plan(profile, halves, 8, budget_s=19)
    assert best.predicted.step_s == simulate_plan(best, profile, halves).makespan
    assert best.predicted.step_s == pytest.approx(best.predicted.one_device_s / 2)


def test_a_profile_of_two_busy_ranks_is_corrected_once(profile_of):
    """Two of four ranks have a core each, as when they were measured: they take the seconds of the
    profile. The request for these two used to correct it again, and took half of them.
    """
    measured = replace(profile_of([1.0] * 4), busy_ranks=2)
    link = Link(0.0, 1e12)
    shared_cores = Cluster("c", (Device("d", 10**12, together=2.0),) * 4, 4, link, link)
    request = PlanRequest(measured, shared_cores, 8)
    assert instantiate(request, Proposal((2, 2), "1f1b", 8)).costs.forward == (2.0,) * 2
    best = plan(measured, shared_cores, 8, planner="gpipe", stages=2, micro_batches=8)
    assert best.predicted.step_s == simulate_plan(best, measured, shared_cores).makespan


def test_ranks_of_nodes_with_other_numbers_of_busy_ranks_have_seconds_of_their_own(profile_of):
    """Three ranks: two share a core, and one has its own. All used to have the seconds of the
    slowest, so that the plan predicted more than its simulation.
    """
    profile = profile_of([1.0] * 4)
    link = Link(0.0, 1e12)
    devices = (Device("d", 10**12, together=2.0),) * 4
    nodes = Cluster("c", devices, 2, link, link)
    request = PlanRequest(profile, nodes, 8)
    proposal = Proposal((1, 1, 2), "1f1b", 8)
    placed = instantiate(request, proposal)
    assert placed.costs.forward == (2.0, 2.0, 2.0)
    shown = plan_proposal(request, proposal)
    assert shown.predicted.step_s == simulate_plan(shown, profile, nodes).makespan


def test_one_pipeline_of_several_has_their_gradient_sync_and_its_own_micro_batches(profile_of):
    """Rank r of pipeline n is on device n x ranks + r, or on the devices that are named. The first
    pipeline has the micro-batches 0, 2, … of two.
    """
    link, far = Link(0.0, 1e6), Link(0.5, 1e3)
    devices = (Device("d", 10**12),) * 5
    nodes = Cluster("c", devices, 1, link, far, node_of=(0, 0, 1, 1, 2))
    request = PlanRequest(profile_of([1.0, 2.0], parameters=100), nodes, 5)
    for named, holders in (((), [(0, 2), (1, 3)]), ((4, 0, 1, 2), [(4, 1), (0, 2)])):
        proposal = Proposal((1, 1), "gpipe", 4, (("replicas", 2),), devices=named)
        one = representative_pipeline(request, proposal)
        assert one.schedule.micro_batches == 2
        # Of five samples in four micro-batches the first has two.
        assert one.sizes == [2, 1]
        layer_bytes = [layer.parameter_bytes for layer in request.profile]
        for stage, group in enumerate(holders):
            expected = all_reduce_seconds(group, layer_bytes[stage], nodes)
            assert one.costs.spread("update", 2)[stage] == pytest.approx(expected)
    short = Proposal((1, 1), "gpipe", 4, (("replicas", 2),), devices=(0, 1, 2))
    with pytest.raises(PlanError, match="gpipe needs 4 ranks, and there are 3"):
        representative_pipeline(request, short)
    assert representative_pipeline(request, replace(proposal, micro_batches=6)) is None
    assert representative_pipeline(request, replace(proposal, micro_batches=1)) is None


def test_a_layer_that_must_not_be_replicated_is_refused_with_its_reason(profile_of):
    """Only where its stage is on several ranks."""
    profile = profile_of([1.0, 1.0, 1.0])
    layers = list(profile.layers)
    layers[1] = replace(layers[1], single_copy_reason="it counts its calls")
    marked = replace(profile, layers=tuple(layers))
    request = PlanRequest(marked, cluster("4xV100-10GbE"), 8)
    for lengths, replicas, is_refused in (
        ((1, 2), (1, 2), True),
        ((1, 2), (2, 1), False),
        ((2, 1), (1, 2), False),
        ((2, 1), (2, 1), True),
    ):
        proposal = Proposal(lengths, "1f1b", 4, (("replicas", replicas),))
        if not is_refused:
            instantiate(request, proposal)
            continue
        with pytest.raises(
            PlanError, match=r"1f1b holds 2 copies .* layer l1, .*it counts its calls"
        ):
            instantiate(request, proposal)


def test_small_schedules_are_cached_apart_from_large_ones():
    """Of large ones only a few are kept; options are part of the key."""
    assert cached_schedule("1f1b", 2, 128, ()) is cached_schedule("1f1b", 2, 128, ())
    assert cached_schedule("1f1b", 2, 129, ()) is cached_schedule("1f1b", 2, 129, ())
    doubled = cached_schedule("1f1b", 2, 4, (("replicas", 2),))
    assert doubled.ranks == 4
    assert cached_schedule("1f1b", 2, 4, ()).ranks == 2
