"""What `penstock verify --train` does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli import options
from penstock.errors import SettingError

if TYPE_CHECKING:
    from penstock.schedule.op import Schedule


@dataclass(frozen=True)
class Wanted:
    """How near is near enough, where the ranks live, and how the answer is printed."""

    tolerance: float
    threads: bool
    json: bool


def held_against_one_device(
    made: Schedule | None,
    plan: Path | None,
    settings: Mapping[str, Any],
    words: Mapping[str, Any],
    wanted: Wanted,
) -> bool:
    """Run a batch of a model on ranks and on one device, print how they differ, and say whether
    they agree.

    Args:
        made: the schedule, unless there is a plan.
        plan: a plan's file.
        settings: of `TrainConfig`, without data, which follows the model.
        words: keywords of `Pipeline`; None is left out.
        wanted: what for.

    Raises:
        PenstockError: it cannot be done.
    """
    if not wanted.tolerance > 0:
        raise SettingError(f"--tolerance is above 0, not {wanted.tolerance}")
    from penstock.plan.plan import Plan
    from penstock.training.config import load
    from penstock.training.self_check import SelfCheck
    from penstock.training.task import fitting_data

    config = load(None, {**settings, "data": fitting_data(settings["model"])})
    said = {name: value for name, value in words.items() if value is not None}
    asked = SelfCheck(config, made, None if plan is None else Plan.load(plan), said)
    found = asked.run(threads=wanted.threads)
    agrees = found.relative <= wanted.tolerance
    if wanted.json:
        options.print_json(
            {
                "agrees": agrees,
                "relative": found.relative,
                "tolerance": wanted.tolerance,
                "ranks": asked.ranks,
                **asdict(found),
            }
        )
        return agrees
    print(found)
    verdict = "as one device does" if agrees else "NOT as one device does"
    print(f"{config.model} on {asked.ranks} ranks trains {verdict}: tolerance {wanted.tolerance:g}")
    return agrees
