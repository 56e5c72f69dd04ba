"""`penstock show`: files that other commands wrote."""

from __future__ import annotations

import json

import penstock as ps


def test_a_plan_is_printed_as_when_it_was_made(penstock, profile_file, tmp_path):
    """A plan on disk answers the same questions as the one that `penstock plan` printed."""
    path = tmp_path / "plan.json"
    plan = ps.plan(ps.Profile.load(profile_file), ps.cluster("local:2"), batch=8)
    plan.save(path)
    assert penstock("show", path).out == f"{plan}\n"
    assert json.loads(penstock("show", path, "--json").out) == json.loads(path.read_text())


def test_a_profile_is_printed_as_a_table_of_layers(penstock, profile_file):
    """One row per layer."""
    printed = penstock("show", profile_file)
    assert printed.status == 0
    assert [f"layer{i}" in printed.out for i in range(5)] == [True] * 5


def test_a_cluster_is_described(penstock, tmp_path):
    """Devices and links, as `print(cluster)` writes them."""
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "name: lab\nnodes: [{count: 2, devices: [V100, V100]}]\ninside: PCIe3\nbetween: 10GbE\n"
    )
    printed = penstock("show", path)
    assert printed.status == 0, printed.err
    assert "4 ranks on 2 nodes" in printed.out


def test_another_json_file_is_refused(penstock, tmp_path):
    """The message says what was expected."""
    path = tmp_path / "other.json"
    path.write_text('{"a": 1}')
    shown = penstock("show", path)
    assert shown.status == 2
    assert "neither a plan nor a profile" in shown.err


def test_a_run_is_shown_by_its_plan(penstock, profile_file, tmp_path):
    """`penstock draw` and `penstock report` take the folder as well."""
    plan = ps.plan(ps.Profile.load(profile_file), ps.cluster("local:2"), batch=8)
    plan.save(tmp_path / "plan.json")
    assert penstock("show", tmp_path).out == f"{plan}\n"
    (tmp_path / "plan.json").unlink()
    shown = penstock("show", tmp_path)
    assert shown == (2, "", f"error: {tmp_path} is not the folder of a run: it has no plan.json\n")


def test_a_plan_in_the_place_of_a_profile_is_called_a_plan(penstock, profile_file, tmp_path):
    """The two files are exchanged easily, and making one anew would not help."""
    plan = ps.plan(ps.Profile.load(profile_file), ps.cluster("local:2"), batch=8)
    plan.save(tmp_path / "plan.json")
    shown = penstock("plan", tmp_path / "plan.json")
    assert shown == (2, "", f"error: {tmp_path / 'plan.json'} is a plan, not a profile\n")
    words = ("train", "--model", "mlp", "--plan", profile_file)
    assert (
        penstock(*words).err.splitlines()[-1] == f"error: {profile_file} is a profile, not a plan"
    )
