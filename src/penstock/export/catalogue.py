"""All libraries that a plan can be exported to, by name, and `export`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from penstock.errors import RunError, SettingError
from penstock.plan.plan import Plan
from penstock.registry import Registry
from penstock.schedule.op import Schedule


@final
@dataclass(frozen=True)
class Exported:
    """A plan as another library takes it.

    Attributes:
        text: its form there.
        use: what is done with it there, in a line.
        left_out: what the form does not say and the plan does: to be set there by hand, or decided
        there by itself. files: name and text of every file, where the form is a folder of several.
    """

    text: str
    use: str
    left_out: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()

    def write(self, path: str | Path) -> None:
        """Write it to a file, or what is several files, where `path` has no suffix, to a folder of
        that name.

        Raises:
            RunError: it cannot be written there.
        """
        target = Path(path)
        try:
            if self.files and not target.suffix:
                target.mkdir(parents=True, exist_ok=True)
                for name, text in self.files:
                    (target / name).write_text(text, encoding="utf-8")
            else:
                target.write_text(self.text, encoding="utf-8")
        except OSError as error:
            raise RunError(f"cannot write {target}: {error.strerror or error}") from error


EXPORTERS: Registry[Callable[[Plan], Exported]] = Registry(
    "library to export to", "penstock.export"
)
register = EXPORTERS.register


def export(made: Plan | Schedule, to: str, path: str | Path | None = None) -> str:
    """A plan in another library's form, or a schedule as torch's CSV.

    Args:
        made: what to export. Only "csv" takes a schedule: the others need the layers, which only a
        plan has. to: name of a library: "torchgpipe" (or "fairscale"), "deepspeed", "megatron",
        "torchtitan", "torch", "pipedream", or "csv". path: where to write it, too. "torch" writes a
        folder of two files to a path without suffix.

    Returns:
        The form as a text; `exported` has with it what to do with it there, and what it leaves out.

    Raises:
        UnknownName: no library has that name.
        PlanError: the library cannot run such a plan; the message has every reason.
        ScheduleError: the same, where a schedule alone is the reason.
        SettingError: a schedule is given to a library that needs a plan.
        RunError: it cannot be written.
    """
    found = exported(made, to)
    if path is not None:
        found.write(path)
    return found.text


def exported(made: Plan | Schedule, to: str) -> Exported:
    """As `export`, with how the text is used and what it leaves out.

    Raises:
        UnknownName, PlanError, ScheduleError, SettingError: see `export`.
    """
    entry = EXPORTERS.find(to)
    if isinstance(made, Plan):
        return entry.make(made)
    of_schedule = entry.facts.get("of_schedule")
    if not callable(of_schedule):
        raise SettingError(
            f"{entry.name} needs a plan, for its form names layers, and a schedule has none: give the plan, or export "
            "the schedule to 'csv'"
        )
    found = of_schedule(made)
    assert isinstance(found, Exported)
    return found
