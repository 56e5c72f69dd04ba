"""What a planner is asked, and what it makes of it."""

from dataclasses import replace

import pytest
from tests.search.random_requests import FAST, SLOW

from penstock.cluster.cluster import Cluster, Device, Link, cluster
from penstock.errors import PlanError, SettingError, UnknownName
from penstock.schedule.catalogue import FAMILIES
from penstock.search.request import MOST_IN_A_PIPELINE, PlanRequest
from penstock.weights.catalogue import weight_rule
from penstock.weights.compatibility import schedule_for

LINK = Link(0.0, 1e12)
MIXED = Cluster(
    "mixed",
    (
        Device("fast", 1000, flops=FAST),
        Device("slow", 500, flops=SLOW),
        Device("fast", 1000, flops=FAST),
    ),
    3,
    LINK,
    LINK,
)


def test_the_profile_is_the_first_device_s_and_every_rank_has_its_own(profile_of):
    """One object for all devices of a kind."""
    request = PlanRequest(replace(profile_of([1.0]), device="fast"), MIXED, 4)
    assert request.profile is request.profile_of(0) is request.profile_of(2)
    assert request.profile_of(1).step_seconds(1) == pytest.approx([4.5])


def test_part_of_the_cluster_is_the_same_question_about_those_devices(profile_of):
    """In the order given, each with its profile and memory."""
    request = PlanRequest(
        replace(profile_of([1.0, 1.0]), device="fast"), MIXED, 4, memory_limit=800, stages=2
    )
    part = request.on((1, 2))
    assert [device.name for device in part.cluster.devices] == ["slow", "fast"]
    assert part.profile is request.profile_of(1)
    assert part.profile_of(1) is request.profile_of(2)
    assert [part.memory_bytes(rank) for rank in (0, 1)] == [500, 800]
    assert (part.batch, part.stages, part.recompute) == (4, 2, "auto")


@pytest.mark.parametrize(
    ("batch", "pipelines", "expected"),
    [
        (1, 1, (1,)),
        (7, 1, (1, 2, 4, 7)),
        (8, 1, (1, 2, 4, 8)),
        (10, 1, (1, 2, 5, 10)),
        (97, 1, (1, 2, 4, 8, 16, 32, 64)),
        (1000, 1, (1, 2, 4, 5, 8, 10, 20, 25, 40, 50)),
        (1024, 4, (1, 2, 4, 8, 16, 32, 64, 128, 256)),
    ],
)
def test_numbers_of_micro_batches_divide_the_batch_or_are_powers_of_two(
    profile_of, batch, pipelines, expected
):
    """Up to what pays, which is 64 for each pipeline. A prime number has no other divisors."""
    assert MOST_IN_A_PIPELINE == 64
    assert PlanRequest(profile_of([1.0]), MIXED, batch).micro_batch_counts(pipelines) == expected
    assert PlanRequest(profile_of([1.0]), MIXED, batch, micro_batches=1).micro_batch_counts(
        pipelines
    ) == (1,)


@pytest.mark.parametrize(("most", "expected"), [(None, 3), (1, 1), (2, 2), (8, 3)])
def test_copies_are_as_many_as_allowed_and_as_there_are_devices(profile_of, most, expected):
    """None leaves it to the planner."""
    assert PlanRequest(profile_of([1.0]), MIXED, 4, max_replicas=most).copies_allowed == expected


def test_a_given_cut_gives_the_number_of_stages(profile_of):
    """And another number beside it is a contradiction."""
    assert PlanRequest(profile_of([1.0] * 3), MIXED, 4, by=(1, 2)).stages == 2
    with pytest.raises(PlanError, match=r"the cut \[1, 2\] has 2 stages, but 3 are requested"):
        PlanRequest(profile_of([1.0] * 3), MIXED, 4, by=(1, 2), stages=3)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"batch": 2**20 + 1}, "a batch of 1,048,577 samples is more than 1,048,576"),
        ({"batch": True}, "batch is True; it must be a whole number"),
        ({"max_replicas": 0}, "max_replicas is 0; it must be a whole number of 1 or more"),
        ({"max_replicas": 1.5}, "max_replicas is 1.5; it must be"),
        ({"micro_batches": 5}, "micro_batches is 5, but there are only 4 samples in the batch"),
        ({"budget_s": float("nan")}, "budget_s is nan; it must be 0 s or more"),
        ({"schedules": ()}, "schedules is empty"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(profile_of, numbers, message):
    """Before anything is searched."""
    with pytest.raises(PlanError, match=message):
        PlanRequest(profile_of([1.0] * 2), MIXED, **{"batch": 4, **numbers})


def test_profiles_that_do_not_go_with_the_cluster_are_refused_when_asked(profile_of):
    """Of two models, or not of every kind of device; an empty one has nothing to plan."""
    profile = profile_of([1.0])
    with pytest.raises(PlanError, match="there is no profile for slow of mixed, only for fast"):
        PlanRequest({"fast": profile}, MIXED, 4)
    with pytest.raises(PlanError, match="of different models"):
        PlanRequest({"fast": profile, "slow": replace(profile, fingerprint="other")}, MIXED, 4)
    with pytest.raises(PlanError, match="the profile has no layers"):
        PlanRequest(replace(profile, layers=()), cluster("local:1"), 4)


def test_schedules_are_named_once_each_by_their_own_names_or_are_all_synchronous_ones(profile_of):
    """Aliases too; and asynchronous ones where they are asked for."""
    profile = profile_of([1.0])
    named = PlanRequest(profile, MIXED, 4, schedules=("gpipe", "dapple", "1f1b")).families()
    assert [facts.name for facts in named] == ["gpipe", "1f1b"]
    assert all(
        facts.synchronous and not facts.causal
        for facts in PlanRequest(profile, MIXED, 4).families()
    )
    both = {
        facts.synchronous for facts in PlanRequest(profile, MIXED, 4, asynchronous=True).families()
    }
    assert both == {True, False}
    with pytest.raises(UnknownName, match="no schedule called '1f1'"):
        PlanRequest(profile, MIXED, 4, schedules=("1f1",))


def test_a_rule_goes_with_the_optimizer_or_is_refused(profile_of):
    """Before a plan that no run would take."""
    with pytest.raises(SettingError, match="weight rule 'xpipe' has no formula for SGD"):
        PlanRequest(profile_of([1.0]), MIXED, 4, weights="xpipe", optimizer="SGD")


def test_names_are_those_of_the_catalogues_behind_the_door(profile_of):
    """Planners compare them with names of their own, and aliases would differ."""
    alias = next(
        alias for entry in FAMILIES.entries().values() for alias in entry.facts.get("aliases", ())
    )
    request = PlanRequest(
        replace(profile_of([1.0]), device="fast"), MIXED, 4, schedules=(alias, alias)
    )
    assert request.schedules == (FAMILIES.find(alias).name,)
    assert request.rule is None
    named = replace(request, schedules=None, weights=weight_rule("stash"))
    assert (named.weights, named.rule) == ("stash", weight_rule("stash"))


def test_a_layer_that_must_not_be_replicated_allows_no_replicas(profile_of):
    """The reason is kept for the message."""
    profile = profile_of([1.0, 2.0])
    first, second = profile.layers
    marked = replace(second, single_copy_reason="it counts its calls")
    request = PlanRequest(replace(profile, layers=(first, marked)), MIXED, 4)
    assert request.unreplicable_layers == {1: "it counts its calls"}
    assert request.copies_allowed == 1
    assert PlanRequest(profile, MIXED, 4).unreplicable_layers == {}


def test_memory_is_the_least_of_the_device_and_the_limit(profile_of):
    """By the rank's device."""
    request = PlanRequest(profile_of([1.0]), MIXED, 4)
    assert [request.memory_bytes(rank) for rank in range(3)] == [1000, 500, 1000]
    limited = replace(request, memory_limit=700)
    assert [limited.memory_bytes(rank) for rank in range(3)] == [700, 500, 700]
    assert request.state_per_parameter_byte == 2 + request.profile.optimizer_states


def test_parts_of_a_cluster_are_made_once(profile_of):
    """A search asks for the same ones again and again."""
    request = PlanRequest(replace(profile_of([1.0, 1.0]), device="fast"), MIXED, 4)
    assert request.on((1, 2)) is request.on([1, 2])
    assert request.on((2, 1)) is not request.on((1, 2))
    assert request.busy_on((0, 1, 2)) is request
    assert request.busy_on((0, 2)) is request.on((0, 2))


def test_devices_that_share_cores_have_the_seconds_of_those_that_are_busy(profile_of):
    """Two ranks of a node with two cores each: all three busy take half as long again. Other busy
    ranks slow a rank down as well.
    """
    devices = (Device("d", 1000, together=3.0),) * 3
    shared = Cluster("c", devices, 3, LINK, LINK)
    request = PlanRequest(profile_of([1.0]), shared, 4)
    one = shared.slowdown(0, (0,))
    for chosen, busy in (
        ((0,), ()),
        ((0, 1), ()),
        ((0, 1, 2), ()),
        ((0,), (0, 1)),
        ((1,), (0, 1, 2)),
    ):
        local = request.busy_on(chosen, busy)
        assert local.cluster.ranks == len(chosen)
        for place, rank in enumerate(chosen):
            factor = shared.slowdown(rank, busy or chosen)
            (seconds,) = local.profile_of(place).step_seconds(1)
            assert seconds == pytest.approx(3.0 * factor)
    assert request.busy_on((0, 1)) is request.busy_on((0, 1))
    assert request.busy_on((0,), (0, 1)) is not request.busy_on((0,))
    assert shared.slowdown(0, (0, 1, 2)) > one


def test_a_weight_rule_decides_which_schedules_are_considered(profile_of):
    """An asynchronous rule selects the schedule that it is made for, or with `asynchronous` all that
    it goes with; "flush" the synchronous ones. None of them needs a causal model.
    """
    profile = profile_of([1.0])

    def families(**options):
        return PlanRequest(profile, MIXED, 4, **options).families()

    (only,) = families(weights="stash")
    assert only.name == schedule_for(weight_rule("stash"))
    streams = families(weights="stash", asynchronous=True)
    assert len(streams) > 1
    assert only.name in {facts.name for facts in streams}
    assert not any(facts.synchronous or facts.causal for facts in streams)
    assert families(weights="flush") == families()
    assert families(weights="flush", asynchronous=True) == families()


def test_an_optimizer_leaves_out_schedules_whose_rule_has_no_formula_for_it(profile_of):
    """Unless it is not known, or another rule is named."""
    profile = profile_of([1.0])
    names = {}
    for optimizer in (None, "Adam", "SGD"):
        request = PlanRequest(profile, MIXED, 4, asynchronous=True, optimizer=optimizer)
        names[optimizer] = {facts.name for facts in request.families()}
    assert "xpipe" in names[None] & names["Adam"]
    assert "xpipe" not in names["SGD"]
    assert {"1f1b", "pipedream"} <= names["SGD"]


def test_seconds_of_uneven_micro_batches_are_their_mean(profile_of):
    """Ten samples in four micro-batches: two of three and two of two."""
    request = PlanRequest(profile_of([1.0, 2.0], fixed=0.5), cluster("local:1"), 10)
    assert request.mean_seconds(0, "forward", 4) == pytest.approx([3.0, 5.5])
    assert request.mean_seconds(0, "backward", 5) == pytest.approx([4.5, 8.5])
    steps = replace(request.profile.layers[0].forward, sizes=(1, 2, 3), median_s=(1.0, 5.0, 6.0))
    uneven = replace(request.profile.layers[0], forward=steps)
    profile = replace(request.profile, layers=(uneven,))
    for batch, count, expected in ((7, 3, (5 + 5 + 6) / 3), (5, 3, (5 + 5 + 1) / 3), (6, 2, 6)):
        request = PlanRequest(profile, cluster("local:1"), batch)
        assert request.mean_seconds(0, "forward", count) == pytest.approx([expected])


@pytest.mark.parametrize(
    ("batch", "pipelines", "expected"),
    [
        # No more than 64 per pipeline, nor than the samples; a prime batch has powers of two.
        (128, 1, (1, 2, 4, 8, 16, 32, 64)),
        (128, 2, (1, 2, 4, 8, 16, 32, 64, 128)),
        (6, 1, (1, 2, 3, 6)),
        (12, 1, (1, 2, 3, 4, 6, 12)),
        (3, 4, (1, 2, 3)),
        (5, 1, (1, 2, 5)),
    ],
)
def test_numbers_of_micro_batches_of_small_batches_are_their_divisors(
    profile_of, batch, pipelines, expected
):
    """And powers of two that are near none of them."""
    request = PlanRequest(profile_of([1.0]), MIXED, batch)
    assert request.micro_batch_counts(pipelines) == expected


@pytest.mark.parametrize(
    ("name", "maximum"), [("stages", 2), ("micro_batches", 4), ("max_replicas", None)]
)
def test_counts_are_whole_numbers_within_their_range(profile_of, name, maximum):
    """The largest is allowed; a bool is no number."""
    profile = profile_of([1.0] * 2)
    assert getattr(PlanRequest(profile, MIXED, 4, **{name: maximum or 9}), name) == (maximum or 9)
    for value in (0, -1, 2.0, True, "2"):
        with pytest.raises(PlanError, match=f"{name} is {value!r}; it must be a whole number"):
            PlanRequest(profile, MIXED, 4, **{name: value})
    if maximum is not None:
        with pytest.raises(PlanError, match=f"{name} is {maximum + 1}, but there are only"):
            PlanRequest(profile, MIXED, 4, **{name: maximum + 1})


def test_states_of_an_optimizer_replace_those_of_the_profile(profile_of):
    """In the profiles of all ranks, which share one object by kind."""
    request = PlanRequest(
        replace(profile_of([1.0]), device="fast"), MIXED, 4, optimizer="Adam", optimizer_states=2.0
    )
    assert [request.profile_of(rank).optimizer_states for rank in range(3)] == [2.0] * 3
    assert request.profile_of(0) is request.profile_of(2)
    assert request.state_per_parameter_byte == 4
    zero = PlanRequest(profile_of([1.0]), cluster("local:1"), 4, optimizer_states=0.0)
    assert zero.state_per_parameter_byte == 2
