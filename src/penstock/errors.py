"""One family of exceptions: what was wrong, where, which numbers, what to do now.

Every value that a message quotes is also an attribute, so that tools need not parse text.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass


class PenstockError(Exception):
    """What Penstock raises on purpose; the command line prints its text and no traceback."""

    def __reduce__(self) -> tuple[object, ...]:
        """Copied as it is: Exception's own way would call the constructor with the message alone."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(
    kind: type[PenstockError], args: tuple[object, ...], state: dict[str, object]
) -> PenstockError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class UnknownName(PenstockError, ValueError):
    """A name that no registry of its kind holds."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        self.kind, self.name, self.known = kind, name, tuple(known)
        close = difflib.get_close_matches(name, self.known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        super().__init__(f"no {kind} called {name!r}.{hint} Known: {', '.join(self.known)}")


class ChainError(PenstockError, ValueError):
    """A model that cannot be made a chain of layers, or a chain used in a way it does not allow."""


class PartitionError(PenstockError, ValueError):
    """A cut that cannot be made."""


class ClusterError(PenstockError, ValueError):
    """A cluster description that cannot be read."""


class PlanError(PenstockError, ValueError):
    """A plan that cannot be made, or that does not fit what it is used with."""


class SettingError(PenstockError, ValueError):
    """A setting that makes no sense: a flag, a field of a config file, an argument."""


class FileError(PenstockError, ValueError):
    """A file that is missing, foreign, short or of another version."""


class MissingExtra(PenstockError, ImportError):
    """An optional dependency that the work at hand needs."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        self.package, self.extra, self.purpose = package, extra, purpose
        super().__init__(
            f"{purpose} needs {package}; install it with: pip install 'penstock[{extra}]'"
        )


@dataclass(frozen=True)
class Finding:
    """One broken rule of a schedule: the rule's name, the op's text (`2F0`) and rank if one is to
    blame.
    """

    rule: str
    message: str
    rank: int | None = None
    op: str | None = None


class ScheduleError(PenstockError, ValueError):
    """A schedule that is unsound or cannot be made; `findings` has every broken rule, worst first."""

    def __init__(self, message: str, findings: Iterable[Finding] = ()) -> None:
        self.findings = tuple(findings)
        super().__init__(message)


class RunError(PenstockError, RuntimeError):
    """A run that could not start or go on."""


class LayerFailed(RunError):
    """A layer raised while it was measured alone."""

    def __init__(self, layer: str, cause: str) -> None:
        self.layer, self.cause = layer, cause
        super().__init__(f"layer {layer} failed on the example: {cause}")


class StageFailed(RunError):
    """An op raised on this rank; the cause is chained and its text quoted."""

    def __init__(self, rank: int, stage: int, op: str, step: int, cause: str) -> None:
        self.rank, self.stage, self.op, self.step, self.cause = rank, stage, op, step, cause
        super().__init__(f"rank {rank} (stage {stage}) failed in {op} of step {step}: {cause}")


class PeerFailed(RunError):
    """This rank is sound, but another one failed and took the step with it."""

    def __init__(self, rank: int, waited_for: str, reason: str) -> None:
        self.rank, self.waited_for, self.reason = rank, waited_for, reason
        super().__init__(f"{reason} (rank {rank} was stopped while it waited for {waited_for})")


class DeadlineExceeded(RunError):
    """An op waited longer than the deadline; the text says who waits for what since when."""

    def __init__(
        self, rank: int, waited_for: str, seconds: float, elsewhere: Iterable[str]
    ) -> None:
        self.rank, self.waited_for, self.seconds = rank, waited_for, seconds
        self.elsewhere = tuple(elsewhere)
        lines = [
            f"rank {rank} waits for {waited_for} since {seconds:.0f} s, which is over its deadline"
        ]
        super().__init__("\n  ".join([*lines, *self.elsewhere]))


class RanksDiffer(RunError):
    """Ranks do not run the same model, settings, batches or calls; `differences` has a line for
    each difference.
    """

    def __init__(self, message: str, differences: Iterable[str] = ()) -> None:
        self.differences = tuple(differences)
        super().__init__(message)


class RankDied(RunError):
    """A rank's process ended without a word of its own: killed, out of memory, a crash in native
    code.
    """

    def __init__(self, rank: int, pid: int, how: str, others: str) -> None:
        self.rank, self.pid, self.how = rank, pid, how
        super().__init__(f"rank {rank} (pid {pid}) {how}{others}")
