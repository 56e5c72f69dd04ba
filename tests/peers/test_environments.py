"""Folders of libraries: where they are found, and how pip is called."""

from __future__ import annotations

import subprocess

import pytest

from penstock.errors import RunError, SettingError, UnknownName
from penstock.peers import environments


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder of installed libraries."""
    monkeypatch.setenv(environments.FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


def test_installed_libraries_are_found_and_assignments_take_precedence(folder):
    """One folder per library, by its name."""
    for name in ("torchgpipe", "elsewhere"):
        (folder / name).mkdir()
    assert environments.find_environments([]) == {"torchgpipe": folder / "torchgpipe"}
    folders = environments.find_environments([f"torchgpipe={folder / 'elsewhere'}"])
    assert folders == {"torchgpipe": folder / "elsewhere"}


@pytest.mark.parametrize("text", ["torchgpipe", "=x", "torchgpipe=", "torchgpipe=/no/such/folder"])
def test_an_assignment_without_a_folder_is_refused(folder, text):
    """Not at the first cell of that library, an hour later."""
    with pytest.raises(SettingError, match="--environment"):
        environments.find_environments([text])


def test_an_assignment_to_an_unknown_system_is_refused(folder):
    """A typing error would leave the library missing."""
    with pytest.raises(UnknownName, match="Did you mean 'fairscale'"):
        environments.find_environments([f"fairscal={folder}"])


def test_installing_calls_pip_once_per_library_without_dependencies(folder, monkeypatch):
    """torch is the one of this environment."""
    calls = []

    def run(command, **_):
        calls.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    folders = environments.install(["torchgpipe", "fairscale"])
    assert folders == {name: folder / name for name in ("torchgpipe", "fairscale")}
    assert [command[-1] for command in calls] == ["torchgpipe==0.0.7", "fairscale==0.4.13"]
    assert all("--no-deps" in command and "--target" in command for command in calls)
    calls.clear()
    assert set(environments.install([])) == {"torchgpipe", "fairscale", "deepspeed"}
    assert len(calls) == 3


def test_a_failure_of_pip_is_one_message(folder, monkeypatch):
    """Its last line says what happened."""

    def run(command, **_):
        return subprocess.CompletedProcess(
            command, 1, "", "noise\nERROR: No matching distribution\n"
        )

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(RunError, match=r"torchgpipe==0\.0\.7: ERROR: No matching distribution"):
        environments.install(["torchgpipe"])
    with pytest.raises(SettingError, match="'torch' cannot be installed"):
        environments.install(["torch"])
