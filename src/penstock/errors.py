"""Exception classes of Penstock, all derived from `PenstockError`.

A message says what is wrong, where, with which numbers, and what to do. Every value that a message
quotes is also an attribute, so that tools need not parse the text.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

#: Characters of an unknown name that a message quotes.
_MAX_NAME = 80


class PenstockError(Exception):
    """Base class of all errors that Penstock raises on purpose.

    The command line prints the message without a traceback.
    """

    def __reduce__(self) -> tuple[object, ...]:
        """Support copying and pickling.

        `Exception.__reduce__` would call the subclass's constructor with the message as its only
        argument, which fails where the constructor takes other arguments.
        """
        return _rebuild_error, (type(self), self.args, self.__dict__)


def _rebuild_error(
    error_class: type[PenstockError], args: tuple[object, ...], state: dict[str, object]
) -> PenstockError:
    """Rebuild a copied or unpickled error without calling its constructor."""
    error = error_class.__new__(error_class, *args)
    error.__dict__.update(state)
    return error


class UnknownName(PenstockError, ValueError):
    """No entry of this kind has the requested name.

    Args:
        kind: what was looked up, e.g. "schedule".
        name: the requested name.
        valid_names: all names that exist; the message lists them and suggests the closest.
    """

    def __init__(self, kind: str, name: str, valid_names: Iterable[str]) -> None:
        self.kind, self.name, self.valid_names = kind, name, tuple(valid_names)
        # A foreign text of any length may stand where a name should.
        quoted = name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}…"
        hint = did_you_mean(quoted, self.valid_names)
        super().__init__(f"no {kind} called {quoted!r}.{hint} Known: {', '.join(self.valid_names)}")


def did_you_mean(name: str, valid_names: Iterable[str]) -> str:
    """Return the end of a message that suggests the closest of the valid names, after a space;
    empty if none is close.

    >>> did_you_mean("gipe", ["1f1b", "gpipe"])
    " Did you mean 'gpipe'?"
    """
    # Cut off: comparing takes time in proportion to the product of the lengths.
    close_matches = difflib.get_close_matches(name[:_MAX_NAME], list(valid_names), n=1)
    return f" Did you mean {close_matches[0]!r}?" if close_matches else ""


class ChainError(PenstockError, ValueError):
    """A model cannot be converted to a chain of layers, or a chain is used in an invalid way."""


class PartitionError(PenstockError, ValueError):
    """The chain cannot be partitioned into stages as requested."""


class ClusterError(PenstockError, ValueError):
    """A cluster description is invalid."""


class PlanError(PenstockError, ValueError):
    """No plan can be made, or a plan does not fit the model, cluster or settings of its use."""


class SettingError(PenstockError, ValueError):
    """A setting is invalid: a command-line flag, a field of a config file, or an argument."""


class FileError(PenstockError, ValueError):
    """A file is missing, truncated, in another format, or of another version."""


class CheckpointDamaged(FileError):
    """A file of a checkpoint is missing, incomplete, or not what was written."""


class MissingExtra(PenstockError, ImportError):
    """An optional dependency is not installed.

    Args:
        package: the missing package.
        extra: the extra of Penstock that installs it.
        purpose: the feature that needs it.
    """

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        self.package, self.extra, self.purpose = package, extra, purpose
        super().__init__(
            f"{purpose} needs {package}; install it with: pip install 'penstock[{extra}]'"
        )


def missing_torch(error: ModuleNotFoundError, purpose: str) -> MissingExtra | None:
    """Return the error to raise instead of a failed import of torch; None for other modules.

    Penstock installs without torch. The planning half never imports it, and everything else
    imports it at the top of its modules, so the two callers of this function translate all of
    these failures: the lazy front door and the command line.

    Args:
        error: the failed import.
        purpose: what the user asked for, as the start of the message.
    """
    if (error.name or "").partition(".")[0] != "torch":
        return None
    return MissingExtra("torch", "torch", purpose)


@dataclass(frozen=True)
class Finding:
    """One violated rule of a schedule.

    Attributes:
        rule: name of the rule.
        message: what is wrong.
        rank: the rank at fault, if one is.
        op: text of the op at fault (`2F0`), if one is.
    """

    rule: str
    message: str
    rank: int | None = None
    op: str | None = None


class ScheduleError(PenstockError, ValueError):
    """A schedule is unsound or cannot be generated.

    `findings` lists every violated rule, most severe first.
    """

    def __init__(self, message: str, findings: Iterable[Finding] = ()) -> None:
        self.findings = tuple(findings)
        super().__init__(message)


class RunError(PenstockError, RuntimeError):
    """A run could not start or could not continue."""


class RunStopped(RunError):
    """A run has saved and ended because a signal asked it to."""

    def __init__(self, folder: str, step: int, signal: str) -> None:
        self.folder, self.step, self.signal = folder, step, signal
        super().__init__(
            f"{signal} has ended the run after step {step}, whose checkpoint is complete. To "
            f"continue it: penstock train --resume {folder}"
        )


class LayerFailed(RunError):
    """A layer raised an exception while it was profiled by itself."""

    def __init__(self, layer: str, cause: str) -> None:
        self.layer, self.cause = layer, cause
        super().__init__(f"layer {layer} failed on the example: {cause}")


class StageFailed(RunError):
    """An op raised an exception on this rank; it is chained as the cause, and quoted."""

    def __init__(self, rank: int, stage: int, op: str, step: int, cause: str) -> None:
        self.rank, self.stage, self.op, self.step, self.cause = rank, stage, op, step, cause
        super().__init__(f"rank {rank} (stage {stage}) failed in {op} of step {step}: {cause}")


class NonFinite(StageFailed):
    """A loss or a gradient of this rank is NaN or infinite.

    `micro_batch` is its micro-batch, None if that is unknown.
    """

    def __init__(
        self, rank: int, stage: int, op: str, step: int, cause: str, micro_batch: int | None
    ) -> None:
        self.micro_batch = micro_batch
        super().__init__(rank, stage, op, step, cause)


class OutOfMemory(StageFailed):
    """There was not enough memory for an op of this rank.

    `held_bytes` is the most that the rank held in this step, `predicted_bytes` the peak that the
    plan predicted, None without a plan.
    """

    def __init__(
        self,
        *place: Any,
        held_bytes: int,
        predicted_bytes: int | None,
    ) -> None:
        self.held_bytes, self.predicted_bytes = held_bytes, predicted_bytes
        super().__init__(*place)


class PeerFailed(RunError):
    """This rank was stopped because another rank failed."""

    def __init__(self, rank: int, waited_for: str, reason: str) -> None:
        self.rank, self.waited_for, self.reason = rank, waited_for, reason
        super().__init__(f"{reason} (rank {rank} was stopped while it waited for {waited_for})")


class DeadlineExceeded(RunError):
    """An op waited longer than the deadline.

    Args:
        rank: the rank that waited.
        waited_for: the message or rank that did not arrive.
        seconds: how long it has waited.
        other_ranks: one line for each other rank, with what that rank was doing.
    """

    def __init__(
        self, rank: int, waited_for: str, seconds: float, other_ranks: Iterable[str]
    ) -> None:
        self.rank, self.waited_for, self.seconds = rank, waited_for, seconds
        self.other_ranks = tuple(other_ranks)
        summary = f"rank {rank} has waited {seconds:.0f} s for {waited_for}, past its deadline"
        super().__init__("\n  ".join([summary, *self.other_ranks]))


class RanksDiffer(RunError):
    """Ranks run different models, settings, batches or calls.

    `differences` has one line per difference.
    """

    def __init__(self, message: str, differences: Iterable[str] = ()) -> None:
        self.differences = tuple(differences)
        super().__init__(message)


class RankDied(RunError):
    """A rank's process ended without reporting an error.

    Typical causes: killed by a signal, out of memory, a crash in native code.

    Args:
        rank, pid: the rank and its process id.
        exit_reason: how the process ended, e.g. "was killed by signal 9".
        others: end of the message: what happened to the other ranks.
    """

    def __init__(self, rank: int, pid: int, exit_reason: str, others: str) -> None:
        self.rank, self.pid, self.exit_reason = rank, pid, exit_reason
        super().__init__(f"rank {rank} (pid {pid}) {exit_reason}{others}")
