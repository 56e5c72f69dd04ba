"""`penstock train` as one of the ranks that a launcher has started."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import penstock as ps
from penstock.checkpoint.checkpoint_index import INDEX
from penstock.errors import PenstockError, SettingError
from penstock.event import Event, Timeline
from penstock.schedule.op import Op
from penstock.store import write_json
from penstock.training.config import TrainConfig
from penstock.training.hosts import _job, _resume_config, timeline_of_ranks
from penstock.training.run_checkpoints import SINGLE_CHECKPOINT


def test_a_timeline_of_the_ranks_of_a_plan_has_no_idle_ranks():
    """It is compared with the prediction, which has the ranks of the plan."""
    rows = [Event(2, Op.parse("0F0"), 0.0, 1.0), Event(0, Op.parse("1F0"), 1.0, 2.0)]
    timeline = Timeline.of(rows, 3, 2, (10, 0, 30), "measured")
    timeline = replace(timeline, hosts=("a", "b", "c"))
    renumbered = timeline_of_ranks(timeline, (2, 0))
    assert [(event.rank, str(event.op)) for event in renumbered.events] == [(0, "0F0"), (1, "1F0")]
    assert renumbered.peak_memory == (30, 10)
    assert renumbered.hosts == ("c", "a")
    assert renumbered.bubble_ratio == pytest.approx(0.5)


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """The configuration of a run that a job of torchrun has begun, and that has no checkpoint."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    config = TrainConfig(out=str(tmp_path))
    (tmp_path / "config.yaml").write_text(config.as_yaml())
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    write_json(tmp_path / "job.json", _job())
    return config


def save_checkpoint(folder):
    """Write what counts as a checkpoint."""
    (folder / SINGLE_CHECKPOINT).mkdir()
    (folder / SINGLE_CHECKPOINT / INDEX).write_text("{}")


def test_a_job_of_torchrun_continues_its_run_after_every_change_of_its_hosts(
    begun, tmp_path, monkeypatch
):
    """torchrun counts no restart when a host has joined, which may have rank 0; another job is
    refused, also after it has been restarted.
    """
    save_checkpoint(tmp_path)
    assert _resume_config(begun).resume
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    assert _resume_config(begun) == begun
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert _resume_config(begun) == begun
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert _resume_config(begun).resume, "torchrun alone knows whether it is the same job"


def test_a_job_of_torchrun_begins_anew_if_it_was_restarted_before_the_first_checkpoint(
    begun, tmp_path, monkeypatch
):
    """The folder of another job stays as it is: a new run there is refused later."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    assert _resume_config(begun) == begun
    assert (tmp_path / "config.yaml").exists()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    assert _resume_config(begun) == begun
    assert not (tmp_path / "config.yaml").exists()
    assert not (tmp_path / "metrics.jsonl").read_text()


def test_a_job_of_torchrun_without_an_id_is_that_of_its_agent(begun, tmp_path, monkeypatch):
    """Which restarts the ranks of a single host, or of hosts that stay the same."""
    save_checkpoint(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert _resume_config(begun) == begun
    write_json(tmp_path / "job.json", _job())
    assert _resume_config(begun).resume


def _train(folder, changes):
    """Prepare and train as one rank; return what this rank has seen."""
    import torch.distributed as dist

    from penstock.training import hosts

    lines: list[str] = []
    torch.set_num_threads(7)  # as a launcher may leave it

    def load():
        """Load the settings on rank 0 alone, as only its disk has the file."""
        assert dist.get_rank() == 0
        return TrainConfig(**changes, out=str(folder))

    try:
        run = hosts.prepare_on_hosts(hosts.share_config(load), lines.append)
        results = hosts.train_on_hosts(run, quiet=True)
    except PenstockError as error:
        return type(error).__name__, str(error)
    timeline = results[0].timeline
    ranks = None if timeline is None else timeline.ranks
    return run.plan, results[0].loss, ranks, len(lines), torch.get_num_threads()


SETTINGS = {
    "model": "mlp",
    "data": "digits",
    "epochs": 1,
    "limit_steps": 2,
    "stages": 2,
    "baseline_steps": 0,
    "profile_repeats": 1,
    "self_check": False,
}


def test_all_ranks_run_the_plan_of_rank_0(tmp_path):
    """Only rank 0 reads the settings, prints and writes; the loss is the same on all ranks."""
    folder = tmp_path / "run"
    first, second = ps.launch(_train, 2, folder, SETTINGS, threads=1)
    assert first[0] == second[0]
    assert first[0].stages == 2
    assert first[1] == second[1]
    assert first[2] == second[2] == 2
    assert (first[3] > 0, second[3]) == (True, 0)
    profile_threads = int(ps.Profile.load(folder / "profile.json").machine["threads"])
    assert first[4] == second[4] == profile_threads != 7, "trained with the profile's threads"
    assert {"plan.json", "profile.json", "cluster.yaml", "config.yaml"} <= {
        path.name for path in Path(folder).iterdir()
    }
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps if "loss" in row] == [1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ranks": 3}, "ranks is 3, and the launcher has started 2 processes"),
        ({"max_restarts": 1}, "under a launcher, use its own, torchrun --max-restarts"),
    ],
)
def test_settings_that_a_launcher_decides_are_refused(tmp_path, changes, message):
    """Rank 0 says why, and the other ranks end with it."""
    results = ps.launch(_train, 2, tmp_path / "run", {**SETTINGS, **changes}, threads=1)
    assert [name for name, _ in results] == [SettingError.__name__, "FailedOnRank0"]
    assert all(message in text for _, text in results)
