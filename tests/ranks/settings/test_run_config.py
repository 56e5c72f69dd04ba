"""The configuration of a run, from the arguments of `Pipeline` or from a plan."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from penstock.errors import PenstockError, PlanError, ScheduleError, SettingError
from penstock.ranks.settings.run_config import Overrides, RunConfig, check, make_run_config
from penstock.schedule.catalogue import schedule
from penstock.schedule.recompute import Recompute
from penstock.schedule.slicing import Slicing
from penstock.tracing.traced_chain import chain
from penstock.weights.catalogue import weight_rule


@pytest.fixture(scope="module")
def traced():
    """A model of five layers."""
    names = [nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)]
    return chain(nn.Sequential(*names))


def config(traced, **words):
    """The configuration of some arguments."""
    return make_run_config(traced, None, Overrides(**{"balance": [2, 3], **words}))


def test_a_plan_and_arguments_exclude_each_other_and_one_is_needed(traced):
    """The message has the arguments that were given, also those that are 0 or empty."""
    with pytest.raises(SettingError, match="the plan already says balance, micro_batches: give"):
        make_run_config(traced, SimpleNamespace(), Overrides(balance=[], micro_batches=0))
    with pytest.raises(SettingError, match="a Pipeline needs a plan"):
        make_run_config(traced, None, Overrides(schedule="gpipe"))


def test_schedule_and_weight_rule_follow_from_each_other(traced):
    """1F1B with a flush by default; one micro-batch unless a number is given."""
    plain = config(traced)
    assert plain.schedule == schedule("1f1b", 2, 1)
    assert (plain.rule.name, plain.lengths, plain.weights_options) == ("flush", (2, 3), {})
    assert config(traced, micro_batches=4).schedule == schedule("1f1b", 2, 4)
    assert config(traced, schedule="gpipe", micro_batches=3).schedule == schedule("gpipe", 2, 3)
    stream = config(traced, schedule="pipedream")
    assert (stream.rule.name, stream.schedule.name) == (stream.schedule.stream.weights, "pipedream")
    stash = config(traced, weights="stash")
    assert (stash.rule.name, stash.schedule.name) == ("stash", "pipedream")
    options = {"warm_up": 2.0}
    given = config(traced, weights="pipemare", weights_options=options)
    assert given.weights_options == options
    assert given.weights_options is not options


def test_a_schedule_of_the_caller_stays_and_micro_batches_must_be_its_own(traced):
    """Both numbers are in the message."""
    case_schedule = schedule("gpipe", 2, 4)
    assert config(traced, schedule=case_schedule).schedule is case_schedule
    assert config(traced, schedule=case_schedule, micro_batches=4).schedule is case_schedule
    text = "the schedule has 4 micro-batches, which differs from micro_batches=3"
    with pytest.raises(SettingError, match=text):
        config(traced, schedule=case_schedule, micro_batches=3)
    with pytest.raises(SettingError, match="which differs from micro_batches=0"):
        config(traced, schedule=case_schedule, micro_batches=0)
    with pytest.raises(PenstockError, match="micro"):
        config(traced, micro_batches=0)


def test_layers_to_recompute_are_names_or_numbers(traced):
    """Both together; a mode is none of them, and no layers means none of them."""
    names = [layer.name for layer in traced.layers]
    assert config(traced).recompute is Recompute.NEVER
    always = config(traced, recompute="always")
    assert (always.recompute, always.recomputed) == (Recompute.ALWAYS, frozenset())
    chosen = config(traced, recompute=[names[3], 0, 4])
    assert (chosen.recompute, chosen.recomputed) == (Recompute.SELECTIVE, {0, 3, 4})
    assert config(traced, recompute=[]).recomputed == frozenset()
    for wrong in ("nothing", 5, -1):
        with pytest.raises(SettingError) as raised:
            config(traced, recompute=[0, wrong])
        listed = ", ".join(map(repr, names[:4]))
        assert str(raised.value) == (
            f"recompute names layer {wrong!r}, which the model does not have: it has 5 layers, "
            f"numbered from 0, such as {listed}"
        )
    with pytest.raises(SettingError, match='recompute="selective" needs the layers'):
        config(traced, recompute="selective")


def plan_of(devices, ranks=3, cluster_ranks=5):
    """The parts of a plan that are read; program, time and memory of each rank differ."""
    case_schedule = schedule("1f1b", ranks, 4)
    return SimpleNamespace(
        check_fits=lambda *given: None,
        lengths=[1] * ranks,
        ranks=ranks,
        schedule=case_schedule,
        recompute=Recompute.SELECTIVE,
        rule=weight_rule("stash"),
        weights_options={"a": 1.0},
        recomputed=[2],
        segment_starts=[1],
        devices=devices,
        cluster_ranks=cluster_ranks,
        cluster_devices=(("h", "cpu"),) * cluster_ranks,
        cluster="two hosts",
        predicted=SimpleNamespace(
            peak_memory=tuple(10 * (rank + 1) for rank in range(ranks)),
            busy_s=tuple(float(rank) for rank in range(ranks)),
        ),
    )


@pytest.mark.parametrize("devices", list(itertools.permutations((0, 2, 4))))
def test_ranks_of_a_plan_are_in_ascending_order_of_devices(traced, devices):
    """Programs, times and memory go with the devices: a slow reference sorts all of them."""
    plan = plan_of(devices)
    setting = RunConfig.of_plan(plan, traced)
    order = [devices.index(device) for device in sorted(devices)]
    assert setting.devices == (0, 2, 4)
    assert setting.predicted_bytes == tuple(10 * (rank + 1) for rank in order)
    assert list(setting.schedule.programs) == [plan.schedule.programs[rank] for rank in order]
    busy_s = [setting.planned_busy_s[program] for program in setting.schedule.programs]
    assert busy_s == [float(rank) for rank in order]
    assert (setting.lengths, setting.cluster_ranks) == ((1, 1, 1), 5)
    assert (setting.recomputed, setting.segment_starts) == ({2}, {1})
    assert (setting.recompute, setting.rule) == (Recompute.SELECTIVE, plan.rule)
    assert setting.weights_options == {"a": 1.0}
    assert setting.cluster_devices == plan.cluster_devices


def test_a_plan_without_devices_is_that_of_the_first_ones(traced):
    """Its schedule is not renumbered. The model is compared with that of the plan."""
    plan, given = plan_of(()), []
    plan.check_fits = lambda *fields: given.append(fields)
    setting = RunConfig.of_plan(plan, traced)
    assert setting.schedule is plan.schedule
    assert (setting.devices, setting.predicted_bytes) == ((), (10, 20, 30))
    assert given == [(traced.fingerprint, 3, torch.__version__)]


@pytest.mark.parametrize("devices", [(0, 1), (0, 1, 1), (0, 1, 5), (-1, 0, 1), (0, 1, 2, 3)])
def test_devices_that_are_not_those_of_the_cluster_are_refused(traced, devices):
    """Too few, one twice, and numbers beyond the last."""
    with pytest.raises(PlanError) as raised:
        RunConfig.of_plan(plan_of(devices), traced)
    assert str(raised.value) == (
        f"the plan puts its 3 ranks on devices {list(devices)}; they must be 3 different ones of the "
        "5 of two hosts, numbered from 0: make the plan again"
    )


def test_what_cannot_run_is_refused_before_ranks_start(traced):
    """Each with what is wrong; a configuration of the defaults is not."""
    fine = config(traced, schedule="gpipe", micro_batches=2)
    check(fine)
    check(config(traced, schedule="pipedream"))
    text = r"the schedule has 2 stages, the balance \[2, 2, 1\] has 3"
    with pytest.raises(PlanError, match=text):
        check(replace(fine, lengths=(2, 2, 1)))
    endless = replace(config(traced, schedule="pipedream").schedule, stream=None)
    with pytest.raises(ScheduleError, match="does not say how it continues"):
        check(replace(fine, schedule=endless))
    with pytest.raises(PlanError, match="does not go with"):
        check(replace(fine, rule=config(traced, weights="stash").rule))
    program = fine.schedule.programs[0]
    cut = replace(fine.schedule, programs=(program[:-2], *fine.schedule.programs[1:]))
    with pytest.raises(ScheduleError):
        check(replace(fine, schedule=cut))


def test_single_layers_are_not_recomputed_where_sequences_are_cut(traced):
    """Slices pass state to each other; whole micro-batches can be."""
    sliced = schedule("terapipe", 2, 2)
    setting = replace(config(traced), schedule=sliced)
    check(setting)
    with pytest.raises(SettingError, match="cuts sequences, and single layers cannot be"):
        check(replace(setting, recomputed=frozenset({0})))


def test_slices_of_samples_recompute_single_layers_and_streams_have_no_slices(traced):
    """Slices of samples pass nothing to each other. Streams do not move activations either."""
    sliced = schedule("autopipe", 2, 2, sliced=1)
    check(replace(config(traced), schedule=sliced, recomputed=frozenset({0})))
    stream = config(traced, schedule="pipedream")
    text = "slices micro-batches or moves activations to other ranks, which streams do not"
    cut = replace(stream.schedule, slicing=Slicing.even("samples", stream.schedule.slices, 1))
    with pytest.raises(ScheduleError, match=text):
        check(replace(stream, schedule=cut))
    moving = replace(schedule("bpipe", 4, 6), synchronous=False, stream=stream.schedule.stream)
    with pytest.raises(ScheduleError, match=text):
        check(replace(stream, schedule=moving, lengths=(1, 1, 1, 2)))


def test_configurations_are_compared_without_the_times_that_a_plan_predicts(traced):
    """Ranks of unlike devices may have measured others."""
    one = config(traced)
    assert replace(one, planned_busy_s={one.schedule.programs[0]: 1.0}) == one
    assert replace(one, recomputed=frozenset({1})) != one
