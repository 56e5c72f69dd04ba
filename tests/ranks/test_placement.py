"""The programs of a plan are placed on the processes that are on its devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.ranks.placement import (
    announce_idle_ranks,
    idle_ranks,
    place,
    ranks_of_devices,
    spread,
)
from penstock.ranks.settings.run_config import RunConfig
from penstock.schedule.recompute import Recompute
from penstock.weights.catalogue import weight_rule


def config(ranks=2, devices=(), cluster_ranks=2, cluster_devices=()):
    """Return the configuration of a plan with one layer per stage."""
    return RunConfig(
        (1,) * ranks,
        ps.schedule("1f1b", ranks, 4),
        Recompute.NEVER,
        weight_rule("flush"),
        devices=devices,
        cluster_ranks=cluster_ranks,
        cluster_devices=cluster_devices,
    )


@pytest.mark.parametrize(
    ("devices", "cluster_ranks", "processes", "ranks"),
    [
        ((), 2, 2, (0, 1)),
        ((), 4, 2, (0, 1)),
        ((), 4, 4, (0, 1)),
        ((1, 3), 4, 4, (1, 3)),
        ((1, 3), 4, 2, None),
        ((), 4, 3, None),
    ],
)
def test_without_host_names_a_process_is_the_device_of_its_number(
    devices, cluster_ranks, processes, ranks
):
    """A run on all devices of the cluster has a process for each; another has the first ones."""
    setting = config(devices=devices, cluster_ranks=cluster_ranks)
    assert ranks_of_devices(setting, ["host"] * processes) == ranks


KINDS = (("a", "fast"), ("a", "fast"), ("b", "slow"), ("b", "slow"))
ONE_KIND = tuple((host, "cpu") for host, _ in KINDS)


@pytest.mark.parametrize(
    ("devices", "cluster_devices", "hosts", "ranks"),
    [
        ((0, 2), KINDS, "aabb", (0, 2)),
        ((0, 2), KINDS, "bbaa", (2, 0)),
        ((1, 3), KINDS, "abab", (2, 3)),
        ((1, 3), KINDS, "ba", (1, 0)),
        ((1, 3), KINDS, "bcac", (2, 0)),
        ((0, 1), KINDS, "ab", None),
        ((1, 3), KINDS, "aaabb", (0, 4)),
        ((0, 1, 3), KINDS, "aaab", (0, 1, 3)),
        ((0, 2), KINDS, "ccdd", None),
        ((0, 3), ONE_KIND, "ccdd", (0, 3)),
        ((0, 3), ONE_KIND, "cdcd", (0, 3)),
        ((0, 3), ONE_KIND, "cddd", None),
        ((0, 3), ONE_KIND, "ccddee", None),
        ((0, 3), ONE_KIND, "cccc", None),
    ],
)
def test_with_host_names_the_processes_of_a_host_are_its_devices(
    devices, cluster_devices, hosts, ranks
):
    """In whatever order the hosts have joined; other hosts do only if all devices are alike."""
    setting = config(
        len(devices), devices=devices, cluster_ranks=4, cluster_devices=cluster_devices
    )
    assert ranks_of_devices(setting, list(hosts)) == ranks


def test_processes_without_a_device_have_empty_programs():
    """They take part in the calls of the pipeline and compute nothing."""
    setting = config(devices=(0, 2), cluster_ranks=4)
    placed = place(setting, ["host"] * 4).schedule
    assert [bool(program) for program in placed.programs] == [True, False, True, False]
    assert idle_ranks(placed) == [1, 3]
    assert placed.programs[2] == setting.schedule.programs[1]
    assert placed.ranks_of_stage == ((0,), (2,))


def test_a_schedule_without_a_plan_stays_as_it_is():
    """More processes than it has ranks are an error of the caller, not idle ranks."""
    setting = config(cluster_ranks=0)
    assert place(setting, ["host"] * 4) is setting
    assert spread(setting.schedule, (1, 0), 2) == setting.schedule.on_ranks((1, 0))


def _layers():
    """Return a model of six equal layers and a batch."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)]
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)
    return nn.Sequential(*layers), x, y


def _unlike_plan():
    """Return a plan for a slow device, one that is useless, and a fast one, each with a profile."""
    from penstock.cluster.device import Device, Link
    from penstock.cluster.machines import Cluster
    from penstock.profile.device_profiles import scale_profile
    from penstock.profile.profile import LayerProfile, Profile, Timing

    model, _, _ = _layers()
    traced = ps.chain(model)
    once = Timing((1, 8), (1e-3, 8e-3))
    layers = tuple(
        LayerProfile(layer.name, layer.kind, once, once, once, once, 72, 288, 0, 32.0, 32.0)
        for layer in traced.layers
    )
    profile = Profile(layers, traced.fingerprint, 32.0, 8)
    devices = tuple(Device(name, 2**30, "cpu") for name in ("slow", "useless", "fast"))
    link = Link(1e-6, 1e12)
    cluster = Cluster("lab", devices, 3, link, link)
    slowdowns = {"slow": 2.0, "useless": 1000.0, "fast": 1.0}
    profiles = {name: scale_profile(profile, factor) for name, factor in slowdowns.items()}
    plan = ps.plan(profiles, cluster, 8, schedules=["1f1b"], stages=2, micro_batches=4)
    layers_of_device = dict(zip(plan.devices, plan.lengths, strict=True))
    assert set(layers_of_device) == {0, 2}
    assert layers_of_device[2] >= 2 * layers_of_device[0]
    # The order in which the devices hold the stages is turned round, to see that it is obeyed.
    turned = replace(plan, devices=plan.devices[::-1])
    return plan, turned


def _train(plan, directory):
    """Train, evaluate, save, load and inspect on this rank; return what can be compared."""
    import torch.distributed as dist

    model, x, y = _layers()
    pipe = ps.Pipeline(
        model,
        plan,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        deadline_s=60,
    )
    losses = [float(pipe.train_batch(x, y)) for _ in range(2)]
    timeline = pipe.timeline()
    evaluated = float(pipe.eval_batch(x, y))
    pipe.save(directory)
    pipe.train_batch(x, y)
    pipe.load(directory)
    gradients_agree = True
    if dist.get_rank() == 0:
        gradients_agree = pipe.compare_with_one_device(x, y).relative < 1e-6
    else:
        pipe.compare_with_one_device(x, y)
    layers = [len(stage.layers) for stage in pipe._assembly.stages]
    again = float(pipe.eval_batch(x, y))
    pipe.close()
    return layers, losses, evaluated, again, timeline.busy, gradients_agree


def _train_both(plans, directory):
    """Train under both plans, one after the other, in the same processes."""
    return [_train(plan, f"{directory}/{number}") for number, plan in enumerate(plans)]


def test_unlike_devices_have_the_stages_of_the_plan(tmp_path):
    """The fast device has more layers than the slow one and the useless device none, whatever
    the order; losses are those of plain training, and an idle rank takes part in every call.
    """
    plans = _unlike_plan()
    results = ps.launch(_train_both, 3, plans, str(tmp_path), threads=1)
    model, x, y = _layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for _ in range(2):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    for number, plan in enumerate(plans):
        layers_of_device = dict(zip(plan.devices, plan.lengths, strict=True))
        for rank, ranks_results in enumerate(results):
            layers, losses, evaluated, again, busy, agree = ranks_results[number]
            assert layers == ([layers_of_device[rank]] if rank in layers_of_device else [])
            assert losses == pytest.approx(expected, rel=1e-5)
            assert evaluated == again
            assert busy[1] == 0
            assert busy[0] > 0
            assert agree


def _refused(plan):
    """Return the message with which this rank refuses a plan."""
    model, _, _ = _layers()
    try:
        ps.Pipeline(model, plan, loss=nn.functional.mse_loss, executor="processes", deadline_s=60)
    except ps.PenstockError as error:
        return str(error)
    return ""


def _refuse_both(plans):
    """Return the messages for plans that cannot run here, and for plans that differ by rank."""
    import torch.distributed as dist

    messages = [_refused(plan) for plan in plans]
    return [*messages, _refused(_unlike_plan()[dist.get_rank()])]


def test_what_cannot_be_obeyed_is_refused_with_what_to_do():
    """Too few processes, other hosts of several kinds, and different plans on two ranks."""
    plan, _ = _unlike_plan()
    elsewhere = (("a", "slow"), ("b", "useless"), ("c", "fast"))
    plans = [plan, replace(plan, cluster_devices=elsewhere, devices=(0, 1))]
    for few, other, different in ps.launch(_refuse_both, 2, plans, threads=1):
        assert "start 3 processes there, and those that the plan leaves out are idle" in few
        assert "the plan is for other hosts than those of this run (hosts a, b, c)" in other
        assert "the ranks do not run the same thing" in different
        assert "plan on one rank, and load that plan on all of them" in different


def test_predicted_bytes_go_with_their_programs():
    """A rank that the plan leaves idle needs none; the placed configuration names no devices."""
    setting = replace(config(devices=(1, 3), cluster_ranks=4), predicted_bytes=(10, 20))
    placed = place(setting, ["host"] * 4)
    assert placed.predicted_bytes == (0, 10, 0, 20)
    assert (placed.devices, placed.cluster_devices) == ((), ())
    assert place(config(devices=(1, 3), cluster_ranks=4), ["host"] * 4).predicted_bytes == ()
    cluster = tuple((host, "cpu") for host in "aabb")
    setting = config(devices=(0, 2), cluster_ranks=4, cluster_devices=cluster)
    setting = replace(setting, predicted_bytes=(10, 20))
    placed = place(setting, list("bbaa"))
    assert placed.predicted_bytes == (20, 0, 10, 0)
    assert placed.schedule.programs[2] == setting.schedule.programs[0]


def test_a_plan_whose_devices_are_not_here_stays_for_others_to_refuse():
    """Its message names them."""
    setting = config(devices=(1, 3), cluster_ranks=4)
    assert place(setting, ["host"] * 2) is setting


@pytest.mark.parametrize(("rank", "announces"), [(0, False), (1, True), (3, False)])
def test_idle_ranks_are_announced_once(caplog, rank, announces):
    """By the first of them."""
    placed = place(config(devices=(0, 2), cluster_ranks=4), ["host"] * 4).schedule
    with caplog.at_level("WARNING", "penstock"):
        announce_idle_ranks(placed, rank)
    text = (
        "ranks 1, 3 have no stage: the plan uses 2 of 4 ranks, and the others only take part in "
        "calls"
    )
    assert caplog.messages == [text] * announces


def test_a_single_idle_rank_and_none_are_announced_as_such(caplog):
    """Grammar shows whether the text was meant."""
    placed = place(config(devices=(1, 2), cluster_ranks=3), ["host"] * 3).schedule
    with caplog.at_level("WARNING", "penstock"):
        announce_idle_ranks(placed, 0)
        announce_idle_ranks(config().schedule, 0)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("rank 0 has no stage: the plan uses 2 of 3 ranks")
