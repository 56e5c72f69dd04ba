"""`penstock show`: what a plan, profile or cluster file holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.flags.options import Json
from penstock.errors import FileError


def show(
    file: Annotated[
        Path,
        typer.Argument(
            help="A plan or profile (JSON), a description of a cluster (YAML), or the folder of a "
            "run, for its plan."
        ),
    ],
    json: Json = False,
) -> None:
    """Print what a plan, a profile or a description of a cluster contains.

    Example: penstock show plan.json
    """
    from penstock.cli.profile import print_profile
    from penstock.cluster.cluster import cluster
    from penstock.files.read import read_json
    from penstock.plan.plan import Plan
    from penstock.profile.profile import Profile
    from penstock.report.run_folder import PLAN
    from penstock.store import to_json

    if file.is_dir():
        folder, file = file, file / PLAN
        if not file.exists():
            raise FileError(f"{folder} is not the folder of a run: it has no {PLAN}")
    if file.suffix in (".yaml", ".yml"):
        description = cluster(str(file))
        print(to_json(description) if json else description)
        return
    keys = read_json(file, dict, kind="plan or profile")
    if "programs" in keys:
        plan = Plan.load(file)
        print(to_json(plan) if json else plan)
    elif "layers" in keys:
        profile = Profile.load(file)
        print_profile(profile, str(file), json=json)
    else:
        raise FileError(f"{file} is neither a plan nor a profile: it has no key programs or layers")
