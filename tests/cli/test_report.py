"""`penstock report`: right words and wrong ones."""

from __future__ import annotations

import pytest

from penstock.cluster.cluster import cluster
from penstock.profile.profile import Profile
from penstock.search.catalogue import plan


@pytest.fixture
def plan_file(profile_file, tmp_path):
    """A plan of two stages."""
    path = tmp_path / "plan.json"
    profile = Profile.load(profile_file)
    plan(profile, cluster("2xV100-NVLink"), 8, schedules=["1f1b"], micro_batches=4).save(path)
    return path


def test_a_plan_becomes_a_page_tables_and_markdown(penstock, plan_file, tmp_path):
    """Each where the words say."""
    result = penstock("report", plan_file, "--markdown", tmp_path / "md", "--csv", tmp_path / "csv")
    assert result.status == 0, result.err
    page = tmp_path / "plan-report.html"
    assert result.out.splitlines()[0] == f"wrote {page}"
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert "## Plan plan" in (tmp_path / "md" / "report.md").read_text()
    assert (tmp_path / "csv" / "candidates.csv").exists()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing", "does not exist"),
        (".", "holds no run"),
        ("profile.json", "is a profile, not a plan"),
    ],
)
def test_what_is_no_run_and_no_plan_is_one_message(
    penstock, profile_file, tmp_path, monkeypatch, source, message
):
    """Exit status 2, and no traceback."""
    monkeypatch.chdir(profile_file.parent)
    result = penstock("report", source)
    assert result.status == 2
    assert message in result.err
    assert result.err.count("\n") == 1


def test_a_page_that_cannot_be_written_is_one_message(penstock, plan_file, tmp_path):
    """The message names the folder that does not exist."""
    result = penstock("report", plan_file, "--out", tmp_path / "no" / "x.html")
    assert result.status == 2
    assert "does not exist" in result.err


@pytest.mark.parametrize("flag", ["--markdown", "--csv"])
def test_nothing_is_written_if_one_of_the_folders_cannot_be(penstock, plan_file, tmp_path, flag):
    """Else a page would stand there beside an error."""
    folder = tmp_path / "missing" / "folder"
    other = tmp_path / "other"
    other_flag = {"--markdown": "--csv", "--csv": "--markdown"}[flag]
    before = set(tmp_path.iterdir())
    refused = penstock("report", plan_file, flag, folder, other_flag, other)
    assert refused.status == 2
    assert f"cannot create the folder {folder}" in refused.err
    assert set(tmp_path.iterdir()) - before <= {other}


def test_the_folder_of_a_study_is_left_to_its_command(penstock, tmp_path):
    """A study has reports of its own."""
    (tmp_path / "records.jsonl").write_text("")
    result = penstock("report", tmp_path)
    assert result.status == 2
    assert "penstock study" in result.err
