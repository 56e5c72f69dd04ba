"""Declare an option of training once: its type, default, help text and limits.

An option is a field of a dataclass. YAML keys, command-line flags, checks of limits and the
arguments of `Pipeline` are derived from the fields, so that a new option is a new field and the
code that uses it.
"""

from __future__ import annotations

import inspect
import math
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Literal

from penstock.errors import SettingError

#: Longest time that a rank may wait for another, in seconds: eleven days. The timeouts of sockets
#: and process groups are milliseconds in 32 bits.
MAX_DEADLINE_S = 1e6

#: Largest value of an option that is a whole number: a file of settings has no larger integers.
_MAX_INTEGER = 2**64 - 1

#: What is done about a loss or gradient that is not finite.
OnNonfinite = Literal["raise", "skip", "warn"]


@dataclass(frozen=True)
class Option:
    """Facts of an option besides its type and default.

    Attributes:
        help: what it does, for `--help` and for the documentation of `Pipeline`.
        minimum: smallest valid value, if any.
        above: a value that a valid one exceeds, if any.
        maximum: largest valid value, if any; `math.inf` where infinity is valid. All other numbers
            must be finite.
        fixed: whether a resumed run must keep the value, because model, data or the optimizer's
            state depend on it.
        synchronous: whether it needs the gradients of all stages at the same time, which no
            asynchronous schedule has; or the value that does.
        private: whether ranks may differ in it: it changes where data is stored, and no result.
    """

    help: str
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    fixed: bool = False
    synchronous: bool | str = False
    private: bool = False

    def needs_synchronous(self, value: object, default: object) -> bool:
        """Whether a value needs a synchronous schedule. Values equal to the default do not."""
        if isinstance(self.synchronous, str):
            return value == self.synchronous
        return self.synchronous and bool(value) and value != default


def option(default: Any, help: str, **facts: Any) -> Any:  # noqa: A002 - as typer calls it
    """Declare a field as an option.

    Args:
        default: its default; an empty dict is copied for every record.
        help: what it does.
        facts: further fields of `Option`.
    """
    metadata = {"option": Option(help, **facts)}
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def options_of(record: Any) -> Iterator[tuple[Field[Any], Option]]:
    """Yield the fields of a dataclass that are options: its own first, then inherited ones.

    Args:
        record: the dataclass or an instance of it.
    """
    kind = record if isinstance(record, type) else type(record)
    declared_here = vars(kind).get("__annotations__", {})
    for entry in sorted(fields(kind), key=lambda entry: entry.name not in declared_here):
        if "option" in entry.metadata:
            yield entry, entry.metadata["option"]


def default_of(entry: Field[Any]) -> Any:
    """Return the default value of a field."""
    if entry.default_factory is not MISSING:
        return entry.default_factory()
    return entry.default


def check_limits(record: Any) -> None:
    """Check every number among the options against its limits.

    Raises:
        SettingError: a number is out of range.
    """
    for entry, facts in options_of(record):
        value = getattr(record, entry.name)
        if not isinstance(value, int | float):
            continue
        if facts.minimum is not None and value < facts.minimum:
            raise SettingError(f"{entry.name} is {value}; it must be {facts.minimum} or more")
        if facts.above is not None and not value > facts.above:
            raise SettingError(f"{entry.name} is {value}; it must be above {facts.above}")
        maximum = facts.maximum
        if maximum is None:
            maximum = sys.float_info.max if isinstance(value, float) else _MAX_INTEGER
        # Not `value > maximum`: every comparison with nan is False.
        if not value <= maximum:
            is_finite = isinstance(value, int) or math.isfinite(value)
            reason = f"{maximum} or less" if is_finite else "finite"
            raise SettingError(f"{entry.name} is {value}; it must be {reason}")


def check_zero(level: int | None) -> None:
    """Refuse levels of ZeRO that copies of a stage do not have.

    Raises:
        SettingError: the level is neither None, 0 nor 1.
    """
    if level in (None, 0, 1):
        return
    if level in (2, 3):
        raise SettingError(
            f"zero={level}: copies of a stage divide optimizer state alone (zero=1). To divide "
            "gradients and weights as well, use fully_shard in parallelize=, see docs/mesh.md"
        )
    raise SettingError(f"zero is 0 or 1, not {level!r}")


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Options that `Pipeline`, the YAML file and `penstock train` share."""

    clip_grad_norm: float | None = option(
        None,
        "Maximum norm of the gradients of all stages together, as in "
        "torch.nn.utils.clip_grad_norm_.",
        above=0,
        maximum=math.inf,  # as torch has it: measure the norm, and clip nothing
        synchronous=True,
    )
    autocast: Literal["bfloat16", "float16"] | None = option(
        None,
        "Mixed precision in layers and loss: bfloat16 or float16; `penstock train` scales the loss "
        "for float16.",
        fixed=True,
    )
    accumulate: int = option(
        1,
        "Number of batches per step, which uses the mean of their gradients.",
        minimum=1,
        synchronous=True,
    )
    on_nonfinite: OnNonfinite = option(
        "raise",
        "What to do about a loss or gradient that is NaN or infinite: raise stops the run before "
        "it is applied, and names rank, stage and micro-batch; skip leaves out the update on all "
        "ranks; warn logs a line.",
        synchronous="skip",
    )
    zero: int | None = option(
        None,
        "Level of ZeRO among copies of a stage: 1 keeps the optimizer state of each parameter on one "
        "copy, which updates it for all. By default that of the plan, or else 0.",
        synchronous=True,
    )
    compile: bool | dict[str, Any] = option(
        False, "Compile every stage with torch.compile; in Python and YAML also its options."
    )


def signature_with_options(function: Callable[..., Any], record: type) -> inspect.Signature:
    """Return the signature of a function, with the options in place of its `**options`."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[:-1]
    for entry, _ in options_of(record):
        parameters.append(
            inspect.Parameter(
                entry.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=default_of(entry),
                annotation=entry.type,
            )
        )
    return signature.replace(parameters=parameters)


def describe_options(record: type) -> str:
    """Return the entries of the options of a dataclass in an indented list of a docstring."""
    indent = " " * 12
    lines: list[str] = []
    for entry, facts in options_of(record):
        text = f"{entry.name}: {facts.help[0].lower()}{facts.help[1:]}"
        lines += textwrap.wrap(text, 100, initial_indent=indent, subsequent_indent=indent + " " * 4)
    return "\n".join(lines).lstrip()


def common_values(record: CommonOptions) -> dict[str, Any]:
    """Return the values of the common options of a record, by name."""
    return {entry.name: getattr(record, entry.name) for entry in fields(CommonOptions)}
