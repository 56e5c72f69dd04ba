"""`penstock study NAME|FILE`: the words, the list, and what is refused before anything runs."""

from __future__ import annotations

import json
import signal

import pytest

from penstock.cli.studies import study_grid


def test_without_a_name_the_studies_are_listed(penstock):
    """Each with its question."""
    result = penstock("study")
    assert result.status == 0
    names = {line.split()[0] for line in result.out.splitlines()}
    assert {"convergence", "paper", "libraries", "smoke"} <= names
    assert set(json.loads(penstock("study", "--json").out)) == names


def test_the_cells_of_a_study_are_listed_without_running_any(penstock, tmp_path):
    """To choose `--only` by."""
    result = penstock("study", "paper", "--list", "--only", "deepspeed", "--repetitions", 1)
    assert result.status == 0
    assert len(result.out.splitlines()) == 8
    rows = json.loads(penstock("study", "paper", "--list", "--json", "--repetitions", 1).out)
    assert {"system", "stages", "balance"} <= set(rows[0])
    words = ("--tasks", "digits", "--rules", "stash", "--depths", 2, "--seeds", 1)
    result = penstock("study", "convergence", "--list", *words)
    assert [line.split()[1] for line in result.out.splitlines()] == ["flush", "stash"]


GRID = "system: torch\nschedule: 1f1b\nmodel: mlp\ndata: random\nbatch: 8\nsteps: 1\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("speed",), "no study called 'speed'"),
        (("converg",), "Did you mean 'convergence'?"),
        (("papr",), "Did you mean 'paper'?"),
        (("no-such.yaml",), "no-such.yaml"),
        (("paper", "--scale", "huge"), "--scale huge: must be small or full"),
        (("paper", "--repetitions", "0"), "--repetitions 0: must be at least 1"),
        (("paper", "--repetitions", "1001"), "--repetitions 1001: must be at most 1,000"),
        (("paper", "--limit-s", "0"), "--limit-s 0: must be above 0"),
        (("paper", "--limit-s", "nan"), "--limit-s nan: must be above 0"),
        (("paper", "--jobs", "0"), "--jobs 0: must be at least 1"),
        (("paper", "--only", "nothing"), "--only nothing: no cell contains it"),
        (("paper", "--rules", "stash"), "--rules is a flag of the study convergence only"),
        (("paper", "--quick"), "--quick is a flag of the study convergence only"),
        (("convergence", "--scale", "full"), "the study convergence has no --scale"),
        (("convergence", "--environment", "a=b"), "the study convergence has no --environment"),
        (("convergence", "--retry"), "the study convergence has no --retry"),
        (("convergence", "--realtime"), "the study convergence has no --realtime"),
        (("paper", "--realtime"), "the systems of paper do not take turns"),
        (("paper", "more"), "unexpected 'more'"),
        (("paper", "--environment", "deepspeed"), "write NAME=PATH"),
        (("paper", "--environment", "depspeed=/tmp"), "Did you mean 'deepspeed'?"),
        (("paper", "--environment", "deepspeed=/no/such"), "there is no folder"),
        (("install", "megatron"), "'megatron' cannot be installed; there are: deepspeed"),
    ],
)
def test_wrong_words_are_refused_before_anything_runs(penstock, tmp_path, words, message):
    """Exit status 2, one message, no folder."""
    result = penstock("study", *words, "--out", tmp_path / "new")
    assert result.status == 2
    assert message in result.err
    assert "Traceback" not in result.err
    assert not (tmp_path / "new").exists()


def test_a_wrong_grid_is_refused_before_anything_runs(penstock, tmp_path):
    """Its file and the place in it are named."""
    path = tmp_path / "grid.yaml"
    path.write_text(GRID.replace("steps", "stepz"))
    result = penstock("study", path, "--out", tmp_path / "new")
    assert result.status == 2
    assert "grid.yaml" in result.err
    assert "stepz" in result.err
    path.write_text(GRID)
    assert penstock("study", path, "--list").out.strip() == "torch 1f1b mlp S=1 M=1 bottleneck"
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_is_refused(penstock, tmp_path):
    """Before the first cell, not after it."""
    (tmp_path / "file").write_text("")
    result = penstock("study", "smoke", "--out", tmp_path / "file")
    assert result.status == 2
    assert "cannot store records in" in result.err


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_sigterm_is_ctrl_c_while_a_study_runs_and_no_longer(penstock, monkeypatch, error):
    """A program that calls the command line keeps its own handler, however the study ends."""
    handlers = []

    def run(name, flags, *, json):
        handlers.append(signal.getsignal(signal.SIGTERM))
        if error is not None:
            raise error

    monkeypatch.setattr(study_grid, "run", run)
    before = signal.getsignal(signal.SIGTERM)
    assert penstock("study", "paper").status == (0 if error is None else 130)
    assert handlers == [signal.default_int_handler]
    assert signal.getsignal(signal.SIGTERM) is before
