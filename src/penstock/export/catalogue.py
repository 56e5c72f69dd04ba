"""Export a plan or a schedule to another library, chosen by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from penstock.deprecation import renamed_arguments
from penstock.errors import PlanError, SettingError
from penstock.plan.plan import Plan
from penstock.registry import Registry
from penstock.schedule.op import Schedule
from penstock.store import write_error, write_file


@final
@dataclass(frozen=True)
class Exported:
    """A plan in the format of another library.

    Attributes:
        text: the plan in that format.
        use: how to use it there, in one line.
        left_out: properties of the plan that the format cannot express, to be set by hand.
        files: name and text of each file, for a format of several files.
    """

    text: str
    use: str
    left_out: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()

    def write(self, path: str | Path) -> None:
        """Write the text to a file; or, for a format of several files and a path without suffix,
        the files to a folder.

        Raises:
            FileError: the file or folder cannot be written.
        """
        target = Path(path)
        if not self.files or target.suffix:
            write_file(target, self.text)
            return
        try:
            target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(target, error) from error
        for name, text in self.files:
            write_file(target / name, text)


EXPORTERS: Registry[Callable[[Plan], Exported]] = Registry(
    "library to export to", "penstock.export"
)
register = EXPORTERS.register


@renamed_arguments({"made": "source"})
def export(source: Plan | Schedule, to: str, path: str | Path | None = None) -> str:
    """Write a plan in the format of another library, or a schedule as torch's CSV.

    Args:
        source: plan or schedule to export. Only "csv" accepts a schedule; the other formats name
            layers, which a schedule does not have.
        to: name of the library: "torchgpipe" (or "fairscale"), "deepspeed", "megatron",
            "torchtitan", "torch", "pipedream", or "csv".
        path: file to write as well. For "torch", a path without suffix is a folder of two files.

    Returns:
        The text in that format; `exported` also returns how to use it and what it leaves out.

    Raises:
        UnknownName: no library has that name.
        PlanError: the library cannot run this plan; the message has all reasons.
        ScheduleError: the library cannot run this schedule.
        SettingError: the library needs a plan, not a schedule.
        FileError: the file cannot be written.

    Examples:
        >>> import penstock as ps
        >>> profile = ps.Profile.load("docs/funnel.profile.json")
        >>> plan = ps.plan(profile, ps.cluster("local:2"), batch=64, stages=2, planner="gpipe")
        >>> print(export(plan, "torchgpipe"))
        [4, 7]
    """
    result = exported(source, to)
    if path is not None:
        result.write(path)
    return result.text


def exported(source: Plan | Schedule, to: str) -> Exported:
    """Export as `export` does, and return also how to use the text and what it leaves out.

    Raises:
        UnknownName, PlanError, ScheduleError, SettingError: see `export`.
    """
    entry = EXPORTERS.find(to)
    if isinstance(source, Plan):
        if source.sharding.words and not entry.facts.get("shards_stages"):
            raise PlanError(
                f"{entry.name} cannot run this plan\n  its stages are shared "
                f"({source.sharding.words}), which this format cannot express: export it to "
                "torchtitan or megatron"
            )
        return entry.make(source)
    export_schedule = entry.facts.get("of_schedule")
    if not callable(export_schedule):
        raise SettingError(
            f"{entry.name} needs a plan, because its format names layers and a schedule has none: "
            "export the plan, or export the schedule to 'csv'"
        )
    result = export_schedule(source)
    assert isinstance(result, Exported)
    return result
