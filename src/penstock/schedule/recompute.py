"""Recompute policies: which forwards run again before their backward."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from penstock.errors import PlanError, SettingError


class Recompute(StrEnum):
    """A recompute policy. It equals its name, which plans on disk and command lines hold.

    NEVER, EXCEPT_LAST and ALWAYS are torchgpipe's `checkpoint`: they apply to whole micro-batches.
    With SELECTIVE some layers of every micro-batch run again.
    """

    NEVER = "never"
    EXCEPT_LAST = "except_last"
    ALWAYS = "always"
    SELECTIVE = "selective"

    # A member equals its name, so that both must have the same hash.
    __hash__ = str.__hash__

    @classmethod
    def parse(cls, name: str) -> Recompute:
        """Return the policy of that name.

        Raises:
            SettingError: there is no such policy.
        """
        try:
            return cls(name)
        except ValueError as error:
            raise SettingError(f"recompute is one of {', '.join(cls)}, not {name!r}") from error

    @classmethod
    def parse_or_auto(cls, name: str) -> Recompute | Literal["auto"]:
        """Return the policy of that name, or "auto", which leaves the choice to a planner.

        Raises:
            PlanError: it is neither.
        """
        if name == "auto":
            return "auto"
        try:
            return cls(name)
        except ValueError as error:
            raise PlanError(
                f"recompute is {name!r}; it must be one of auto, {', '.join(cls)}"
            ) from error

    @property
    def whole(self) -> bool:
        """Whether forwards of whole micro-batches run again."""
        return self in (Recompute.EXCEPT_LAST, Recompute.ALWAYS)

    def repeats(self, micro_batch: int, micro_batches: int) -> bool:
        """Return whether this micro-batch's whole forward runs again before its backward.

        Args:
            micro_batch: its index in the batch.
            micro_batches: number of micro-batches of the batch.
        """
        return self is Recompute.ALWAYS or (
            self is Recompute.EXCEPT_LAST and micro_batch != micro_batches - 1
        )

    def __repr__(self) -> str:
        return repr(self.value)
