"""Comparison of saved optimizer state with the optimizer that loads it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from penstock.checkpoint.checkpoint_fit import Findings, describe_form
from penstock.checkpoint.optimizer_checkpoint import Facts
from penstock.files.text import join_names
from penstock.optim.class_names import class_name, same_class
from penstock.optim.optimizer_state import PARAMETER_SHAPED
from penstock.values.constants import dtype_name

ANOTHER_OPTIMIZER = (
    "To load weights, buffers and step, and start with a new optimizer, pass skip='optimizer'"
)


@dataclass(frozen=True)
class OptimizerState:
    """The saved state of one stage's optimizer.

    Attributes:
        tensors: by `<parameter>/<key>`.
        facts: by parameter, the state that is not tensors.
        files: by parameter, the name of its file. Group numbers are comparable within a file only.
    """

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Facts]
    files: Mapping[str, str]


class _SavedGroup(NamedTuple):
    """The saved parameter group of one parameter, with the options that the optimizer knows."""

    parameter: str
    file: str
    number: int | None
    options: dict[str, Any]


def check_optimizer_state(
    optimizer: Optimizer, names: Mapping[Tensor, str], saved: OptimizerState, findings: Findings
) -> None:
    """Check that the saved state fits an optimizer: its class, its groups and its tensors.

    Args:
        optimizer: the optimizer of a stage.
        names: the names of its parameters.
        saved: the saved state.
        findings: where mismatches are added.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            facts = saved.facts.get(names[parameter])
            if facts is not None:
                _check_class(optimizer, group, facts, findings)
    # The groups of another optimizer differ anyway, and would only lengthen the message.
    if not findings.rows:
        problem = next(_group_problems(optimizer, names, saved), None)
        if problem is not None:
            findings.add(problem)
    if type(optimizer).__module__.startswith("torch.optim"):
        _check_shapes(optimizer, names, saved.tensors, findings)


def _check_class(
    optimizer: Optimizer, group: Mapping[str, Any], facts: Facts, findings: Findings
) -> None:
    """Check that a parameter's state was saved from an optimizer of the same class."""
    name = class_name(optimizer)
    if facts.kind is not None:
        if not same_class(facts.kind, name):
            findings.add(
                f"it holds the state of {facts.kind}, and the optimizer of this pipeline is "
                f"{name}. {ANOTHER_OPTIMIZER}"
            )
        return
    # Schema 1 does not record the class. Two versions of one class may differ by added or by
    # removed options, but not by both.
    unknown = facts.options.keys() - group.keys()
    missing = {
        key
        for key in group.keys() - facts.options.keys()
        if key != "params" and not callable(group[key])
    }
    if unknown and missing:
        findings.add(
            f"it holds the state of an optimizer other than {name}: one with "
            f"{join_names(sorted(unknown))} and without {join_names(sorted(missing))}. "
            f"{ANOTHER_OPTIMIZER}"
        )


def _group_problems(
    optimizer: Optimizer, names: Mapping[Tensor, str], saved: OptimizerState
) -> Iterator[str]:
    """Describe where the parameters are not divided into groups as they were when saved."""
    # For each saved group, by file and number: its group here, and the parameter that shows it.
    assigned: dict[tuple[str, int], tuple[int, str]] = {}
    for number, group in enumerate(optimizer.param_groups):
        saved_groups = _saved_groups(group, names, saved)
        for current in saved_groups:
            merged = _merged_groups(saved_groups[0], current)
            if merged:
                yield merged
            if current.number is None:
                continue
            assigned_number, assigned_parameter = assigned.setdefault(
                (current.file, current.number), (number, current.parameter)
            )
            if assigned_number != number:
                yield (
                    f"{assigned_parameter} and {current.parameter} were in one parameter group "
                    "when it was saved, and are in two here. Construct the optimizer with the "
                    f"groups that were saved. {ANOTHER_OPTIMIZER}"
                )


def _saved_groups(
    group: Mapping[str, Any], names: Mapping[Tensor, str], saved: OptimizerState
) -> list[_SavedGroup]:
    """Return the saved groups of the parameters of a group, of those that have saved state."""
    saved_groups = []
    for name in (names[parameter] for parameter in group["params"]):
        facts = saved.facts.get(name)
        if facts is not None:
            options = {key: facts.options[key] for key in facts.options.keys() & group.keys()}
            file = saved.files.get(name, "")
            saved_groups.append(_SavedGroup(name, file, facts.group, options))
    return saved_groups


def _merged_groups(first: _SavedGroup, second: _SavedGroup) -> str:
    """Describe that two parameters of one group were saved in two; empty if they were not.

    Groups of different files cannot be compared by number, but by their options.
    """
    difference = _option_difference(first.options, second.options)
    numbers_differ = second.file == first.file and second.number != first.number
    if not difference and not numbers_differ:
        return ""
    detail = f" ({difference})" if difference else ""
    return (
        f"{first.parameter} and {second.parameter} were in two parameter groups{detail} when it "
        "was saved, and are in one here. Construct the optimizer with the groups that were saved. "
        f"{ANOTHER_OPTIMIZER}"
    )


def _option_difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    """Return the first option that differs, with both values; empty if none does."""
    for key in sorted(first.keys() & second.keys()):
        if json.dumps(first[key]) != json.dumps(second[key]):
            return f"{key} {first[key]} and {second[key]}"
    return ""


def _check_shapes(
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    tensors: Mapping[str, Tensor],
    findings: Findings,
) -> None:
    """Check that the tensors of torch's own optimizers have the shapes of their parameters."""
    shapes = {
        names[parameter]: parameter.shape
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for path, tensor in tensors.items():
        name, _, key = path.rpartition("/")
        if key not in PARAMETER_SHAPED or name not in shapes:
            continue
        is_number = tensor.is_floating_point() or tensor.is_complex()
        if tensor.shape != shapes[name] or not is_number:
            form = describe_form(dtype_name(tensor.dtype), tuple(tensor.shape))
            findings.add(
                "{}",
                f"{key} of {name} is {form} in the state, and the parameter is of shape "
                f"{tuple(shapes[name])}",
            )
