"""What `penstock draw` draws from files: plans, and the folders of training runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from penstock.errors import ClusterError, FileError, SettingError

if TYPE_CHECKING:
    from penstock.event import Timeline
    from penstock.plan.plan import Plan


def timelines_of_file(
    source: Path, profiles: list[Path], cluster_name: str | None
) -> list[Timeline]:
    """Return the timelines of a plan or of a run: of a run the predicted and the measured one.

    Without a profile, the ops of a plan have the lengths of a schedule that is drawn without costs;
    a line on standard error says so.

    Args:
        source: file of a plan, or folder of a run.
        profiles: of the plan's model, one for each kind of device; none: draw without times.
        cluster_name: that a plan is simulated on; None: the one that the plan names.

    Raises:
        FileError: the source is neither a plan nor a run, or a file is damaged.
        SettingError: the source is a run and there are profiles or a cluster, which it has itself,
            or there is a cluster without a profile.
        PlanError: the profiles are of another model than the plan.
    """
    if source.is_dir():
        if profiles or cluster_name:
            raise SettingError(
                f"{source} has the profile and the cluster of its run: leave out --profile and "
                "--cluster"
            )
        return _run_timelines(source)
    _check_is_plan(source)
    from penstock.plan.plan import Plan

    plan = Plan.load(source)
    if profiles:
        return [_predicted_timeline(plan, profiles, cluster_name)]
    if cluster_name:
        raise SettingError(f"--cluster {cluster_name} needs --profile: the times of the layers")
    return [_unit_timeline(plan, "the times that the plan predicts: add --profile profile.json")]


def refuse_to_replace_plan(output: Path) -> None:
    """Refuse an output file that is a plan, which the user may have meant to draw.

    Raises:
        SettingError: it is one.
    """
    from penstock.files.read import read_json

    if output.suffix != ".json" or not output.is_file():
        return
    try:
        keys = read_json(output, dict, kind="plan")
    except FileError:
        # A file that is not a JSON object is no plan that could be lost.
        return
    if "programs" in keys:
        raise SettingError(
            f"{output} is a plan, and would be replaced by a drawing. To draw the plan, name it "
            "first and leave out the flags of a schedule: "
            f"penstock draw {output} {output.with_suffix('.svg')}"
        )


def _check_is_plan(source: Path) -> None:
    """Check that a path is a file that may hold a plan.

    Raises:
        SettingError: it is a schedule's CSV file.
        FileError: there is no such file.
    """
    if source.suffix == ".csv":
        raise SettingError(f"{source} is drawn as a schedule: penstock draw --csv {source}")
    if source.exists():
        return
    raise FileError(
        f"{source} does not exist: name the file of a plan or the folder of a run to draw. "
        "To draw a schedule, add --schedule or --csv"
    )


def _run_timelines(folder: Path) -> list[Timeline]:
    """Return what a run predicted and measured, as far as the folder has it."""
    from penstock.report.run_folder import read_run

    run = read_run(folder)
    timelines = [timeline for timeline in (run.predicted, run.measured) if timeline is not None]
    # Version 0.1 stored neither the cluster nor the measured times.
    return timelines or [_unit_timeline(run.plan, "the times of the run, which it did not store")]


def _unit_timeline(plan: Plan, missing: str) -> Timeline:
    """Return the timeline of a plan's schedule without costs, and say so.

    Args:
        plan: to draw.
        missing: the times that the drawing does not have.
    """
    from penstock.draw.draw import unit_timeline

    typer.echo(f"drawn with F = 1, B = 2, I = W = 1, not with {missing}", err=True)
    return unit_timeline(plan.schedule)


def _predicted_timeline(plan: Plan, profiles: list[Path], cluster_name: str | None) -> Timeline:
    """Return the timeline that a plan predicts, by the profiles that it was made with."""
    from penstock.cli.profiles.plan_profiles import load_profiles
    from penstock.cluster.cluster import cluster
    from penstock.simulate.plan_costs import simulate_plan

    try:
        target = cluster(cluster_name or plan.cluster)
    except ClusterError as error:
        if cluster_name is not None:
            raise
        raise SettingError(
            f"the plan is for the cluster {plan.cluster!r}, whose description is needed: "
            "--cluster cluster.yaml"
        ) from error
    costs, _ = load_profiles(profiles, plan.batch)
    return simulate_plan(plan, costs, target)
