"""`penstock verify --train`: train a batch on ranks and on one device, and compare."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.flags import options
from penstock.errors import SettingError

if TYPE_CHECKING:
    from penstock.schedule.op import Schedule


@dataclass(frozen=True)
class CheckOptions:
    """How to compare and report.

    Attributes:
        tolerance: largest relative difference that counts as equal.
        threads: run the ranks as threads of this process instead of processes.
        json: print the report as JSON.
    """

    tolerance: float
    threads: bool
    json: bool


def compare_with_one_device(
    schedule: Schedule | None,
    plan: Path | None,
    settings: Mapping[str, Any],
    pipeline_options: Mapping[str, Any],
    check: CheckOptions,
) -> bool:
    """Run one batch of a model on ranks and on one device, print the differences, and return
    whether they are within the tolerance.

    Args:
        schedule: what to run, unless there is a plan.
        plan: file of a plan to run.
        settings: fields of `TrainConfig`; by default a data set that suits the model.
        pipeline_options: keyword arguments of `Pipeline`; those that are None are left out.
        check: how to compare and report.

    Raises:
        PenstockError: a setting is wrong, or a run failed.
    """
    if not 0 < check.tolerance < math.inf:
        raise SettingError(f"--tolerance must be above 0 and finite, not {check.tolerance}")
    from penstock.plan.plan import Plan
    from penstock.training.self_check import SelfCheck
    from penstock.training.sources.user_settings import complete_settings

    config = complete_settings(settings)
    keywords = {name: value for name, value in pipeline_options.items() if value is not None}
    self_check = SelfCheck(config, schedule, None if plan is None else Plan.load(plan), keywords)
    differences = self_check.run(threads=check.threads)
    agrees = differences.relative <= check.tolerance
    if check.json:
        options.print_json(
            {
                "agrees": agrees,
                "relative": differences.relative,
                "tolerance": check.tolerance,
                "ranks": self_check.ranks,
                **asdict(differences),
            }
        )
        return agrees
    print(differences)
    conclusion = "as one device does" if agrees else "NOT as one device does"
    print(
        f"{config.model} on {self_check.ranks} ranks trains {conclusion}: "
        f"tolerance {check.tolerance:g}"
    )
    return agrees
