"""A plan that the user has, with the settings of its run."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

import penstock as ps
from penstock.errors import FileError, PlanError, SettingError
from penstock.training.plan_file import load_plan, load_plan_for
from penstock.training.sources.user_settings import complete_settings, load_settings


@pytest.fixture
def plan(profile_file):
    """A plan for batches of 8 samples."""
    return ps.plan(ps.Profile.load(profile_file), ps.cluster("local:2"), 8, budget_s=0.1)


@pytest.fixture
def profile_file(tmp_path):
    """A profile of three layers."""
    from penstock.profile.profile import LayerProfile, Profile, Timing

    timing = Timing((1, 8), (0.01, 0.08))
    layers = tuple(
        LayerProfile(f"layer{i}", "Linear", timing, timing, timing, timing, 10, 40, 0, 9.0, 5.0)
        for i in range(3)
    )
    path = tmp_path / "profile.json"
    Profile(layers, "0123456789ab", 12.0, 8).save(path)
    return path


@pytest.fixture
def plan_file(plan, tmp_path):
    """The plan in a file."""
    path = tmp_path / "plan.json"
    plan.save(path)
    return str(path)


def test_a_plan_is_run_only_for_its_own_model(plan, plan_file):
    """A cut after the seventh layer means nothing for another model."""
    assert load_plan(plan_file, plan.fingerprint) == plan
    with pytest.raises(
        PlanError, match=r"is the plan of another model: .* 0123456789ab, .* fedcba"
    ):
        load_plan(plan_file, "fedcba")


def test_devices_of_the_plans_cluster_are_dropped(plan, tmp_path):
    """Rank 1 of the plan may be on the fifth device of a cluster; here there are two."""
    path = tmp_path / "other.json"
    replace(plan, devices=tuple(range(plan.ranks))[::-1]).save(path)
    assert load_plan(str(path), plan.fingerprint).devices == ()


@pytest.mark.parametrize(("hosts", "devices"), [(("a", "b"), (1, 0)), (("b", "a"), (0, 1))])
def test_devices_are_those_of_the_hosts_of_the_plan(plan, tmp_path, hosts, devices):
    """The launcher may number the hosts in another order than when they were measured."""
    two_stages = ps.plan(
        ps.Profile.load(tmp_path / "profile.json"), ps.cluster("local:2"), 8, stages=2
    )
    path = tmp_path / "hosts.json"
    kinds = {"a": "cpu-0", "b": "cpu-1"}
    replace(two_stages, devices=(1, 0), cluster_devices=tuple(kinds.items())).save(path)
    local = ps.cluster("local:2")
    cluster = replace(
        local,
        devices=tuple(
            replace(device, name=kinds[host])
            for device, host in zip(local.devices, hosts, strict=True)
        ),
        devices_per_node=1,
        node_of=(0, 1),
        hosts=hosts,
    )
    model = SimpleNamespace(fingerprint=plan.fingerprint)
    placed = load_plan_for(str(path), model, cluster)
    assert placed.devices == devices
    assert placed.cluster_devices == tuple((host, kinds[host]) for host in hosts)


def test_a_plan_for_other_hosts_keeps_its_devices(plan, tmp_path):
    """The pipeline refuses it with a message, see `make_world.world_of`."""
    path = tmp_path / "hosts.json"
    places = (("a", "cpu-0"), ("b", "cpu-1"))
    replace(plan, cluster_devices=places).save(path)
    cluster = replace(ps.cluster("local:2"), devices_per_node=1, node_of=(0, 1), hosts=("c", "d"))
    model = SimpleNamespace(fingerprint=plan.fingerprint)
    assert load_plan_for(str(path), model, cluster).cluster_devices == places


def test_the_batch_is_that_of_the_plan(plan_file):
    """Another one has other costs."""
    assert complete_settings({"plan": plan_file}).batch == 8
    assert complete_settings({"plan": plan_file, "batch": 8}).batch == 8
    with pytest.raises(SettingError, match="for batches of 8 samples, and batch is 16"):
        complete_settings({"plan": plan_file, "batch": 16})


@pytest.mark.parametrize(
    ("setting", "value"),
    [("stages", 2), ("schedule", "gpipe"), ("weights_options", {"decay": 0.2}), ("ranks", 2)],
)
def test_settings_that_are_parts_of_the_plan_are_refused(plan_file, setting, value):
    """One of the two would be ignored."""
    with pytest.raises(SettingError, match=f"and {setting} would change it"):
        complete_settings({"plan": plan_file, setting: value})


def test_a_name_that_clears_the_terminal_is_quoted():
    """The configuration of a stranger names the plan."""
    with pytest.raises(SettingError, match=r"^'\\x1b\[2J' is run exactly as planned"):
        complete_settings({"plan": "\x1b[2J", "partition": "bottleneck"})


def test_a_plan_that_is_not_there_is_refused(tmp_path):
    """Before anything is measured."""
    with pytest.raises(FileError, match="cannot read the plan"):
        complete_settings({"plan": str(tmp_path / "no.json")})


def test_the_data_follow_from_the_model(tmp_path):
    """In a file as well as by flags; what is set is left alone."""
    path = tmp_path / "run.yaml"
    path.write_text("model: gpt\n")
    assert load_settings(path, {}).data == "text"
    assert load_settings(path, {"model": "mlp"}).data == "digits"
    assert load_settings(path, {"data": "reversed"}).data == "reversed"
    assert load_settings(None, {}).model == "vgg11_bn"
    with pytest.raises(SettingError, match="the settings: batch: Input should be"):
        load_settings(None, {"batch": "8"})
