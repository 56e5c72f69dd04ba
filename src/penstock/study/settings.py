"""Settings of a study, from the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.errors import SettingError

Scale = Literal["small", "full"]

#: Maximum number of repetitions of a cell. All cells are listed before the first one runs.
MOST_REPETITIONS = 1_000


@dataclass(frozen=True)
class Settings:
    """What a user chooses of a study; the study's own cells follow from it.

    Attributes:
        scale: "small": minutes on a laptop; "full": the sizes of the paper that the study repeats.
        data: name of a data set; empty: the study's own.
        repetitions: of every cell; None: the study's own number at this scale.

    Raises:
        SettingError: the scale is unknown, or the number of repetitions is out of range.
    """

    scale: Scale = "small"
    data: str = ""
    repetitions: int | None = None

    def __post_init__(self) -> None:
        if self.scale not in ("small", "full"):
            raise SettingError(f"--scale {self.scale}: must be small or full")
        if self.repetitions is not None and self.repetitions < 1:
            raise SettingError(f"--repetitions {self.repetitions}: must be at least 1")
        if self.repetitions is not None and self.repetitions > MOST_REPETITIONS:
            raise SettingError(
                f"--repetitions {self.repetitions}: must be at most {MOST_REPETITIONS:,}"
            )

    def repeat(self, small: int, full: int) -> int:
        """Return the number of repetitions, given the study's own at both scales."""
        if self.repetitions is not None:
            return self.repetitions
        return small if self.scale == "small" else full
