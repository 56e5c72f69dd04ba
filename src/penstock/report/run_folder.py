"""Read the folder of a training run: settings, plan, measurements, metrics and outcome."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.cluster.machines import Cluster
from penstock.cluster.read import read_cluster
from penstock.errors import ClusterError, FileError, PenstockError
from penstock.event import Timeline
from penstock.files.read import read_yaml
from penstock.plan.plan import Plan
from penstock.profile.device_profiles import Profiles
from penstock.profile.profile import Profile
from penstock.report.metrics_file import RunMetrics, read_metrics
from penstock.report.outcome import Outcome, read_outcome
from penstock.report.timeline_file import load_timeline
from penstock.simulate.plan_costs import simulate_plan

#: Files that a training run writes, in addition to those of checkpoints and drawings.
CONFIG, PLAN, PROFILE, METRICS = "config.yaml", "plan.json", "profile.json", "metrics.jsonl"
OUTCOME, CLUSTER, TIMELINE = "outcome.json", "cluster.yaml", "measured-timeline.json"


def profile_of_kind(number: int) -> str:
    """Return the name of the file with the profile of a kind of device, if there are several kinds.

    Args:
        number: of the kind, in the order of the cluster.
    """
    return f"profile-{number}.json"


@dataclass(frozen=True)
class RunFolder:
    """Content of a run's folder. What a run writes at its end is None while it has not ended.

    Attributes:
        path: of the folder.
        settings: of `config.yaml`.
        plan, profile: of the run.
        metrics: by step.
        outcome: of the run.
        cluster: that the plan was made for, with its measured link; None in folders of version
            0.1.
        predicted: simulated timeline of the plan; None without a cluster.
        measured: timeline of the median step.
    """

    path: Path
    settings: dict[str, Any]
    plan: Plan
    profile: Profile
    metrics: RunMetrics
    outcome: Outcome | None
    cluster: Cluster | None
    predicted: Timeline | None
    measured: Timeline | None


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a training run."""
    return (folder / CONFIG).is_file()


def read_run(folder: Path) -> RunFolder:
    """Read a run that has ended, still trains, or was interrupted.

    Raises:
        FileError: the folder holds no run, or a file is damaged; the message names it.
    """
    if not is_run(folder):
        raise FileError(
            f"{folder} holds no run: there is no {CONFIG}. Name the folder of a run that "
            "penstock train has written, such as runs/NAME"
        )
    settings = read_yaml(folder / CONFIG, dict[str, Any], kind="configuration")
    plan = Plan.load(folder / PLAN)
    profile = Profile.load(folder / PROFILE)
    metrics = RunMetrics({}, {})
    if (folder / METRICS).exists():
        metrics = read_metrics(folder / METRICS)
    outcome = read_outcome(folder / OUTCOME) if (folder / OUTCOME).exists() else None
    measured = load_timeline(folder / TIMELINE) if (folder / TIMELINE).exists() else None
    cluster = _read_cluster(folder) if (folder / CLUSTER).exists() else None
    predicted = None if cluster is None else _predicted(plan, profile, cluster, folder)
    return RunFolder(
        folder, settings, plan, profile, metrics, outcome, cluster, predicted, measured
    )


def _read_cluster(folder: Path) -> Cluster:
    """Return the cluster of a run.

    Raises:
        FileError: its file is damaged.
    """
    try:
        return read_cluster(folder / CLUSTER)
    except ClusterError as error:
        raise FileError(str(error)) from error


def _predicted(plan: Plan, profile: Profile, cluster: Cluster, folder: Path) -> Timeline:
    """Return the timeline that the plan predicts, as it was drawn before the run.

    Raises:
        FileError: the files are of different runs.
    """
    profiles: Profiles = profile
    if len(cluster.kinds) > 1 and (folder / profile_of_kind(0)).exists():
        profiles = {
            kind: Profile.load(folder / profile_of_kind(number))
            for number, kind in enumerate(cluster.kinds)
        }
    try:
        return simulate_plan(plan, profiles, cluster)
    except (PenstockError, ValueError, IndexError) as error:
        raise FileError(
            f"{folder}: {PLAN}, {PROFILE} and {CLUSTER} do not belong together: {error}"
        ) from error
