"""Whether what a checkpoint holds fits a pipeline: every difference is found before anything is
changed, and named.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.optim.class_names import class_name, same_class
from penstock.optim.schedulers import Schedulers
from penstock.runtime import state
from penstock.runtime.checkpoint_files import Checkpoint, Header, RuleFacts
from penstock.runtime.own_state import Facts
from penstock.runtime.stage import Stage
from penstock.runtime.state import Placed
from penstock.tracing.names import prefix_of, state_of

#: Names that a message shows of each kind of difference.
_SHOWN = 5
#: What torch's own optimizers keep in the shape of the parameter.
_SHAPED = frozenset(
    (
        "momentum_buffer",
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "exp_inf",
        "sum",
        "ax",
    )
)
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}

ANOTHER_OPTIMIZER = (
    "To take weights, buffers and step, and begin the optimizer anew, say skip='optimizer'"
)
NAN = (
    "NaN values in {}: the run had diverged when this was saved. Go back to an earlier checkpoint; to have these values "
    "nevertheless, say allow_nonfinite=True"
)


@dataclass
class Findings:
    """What does not fit, by kind. A kind is a sentence with {} where the names of all that it is
    true of stand.
    """

    rows: dict[str, dict[str, None]] = field(default_factory=dict)

    def add(self, kind: str, name: str = "") -> None:
        """Note one more of a kind."""
        self.rows.setdefault(kind, {})[name] = None

    def text(self) -> str:
        """All of it; empty if everything fits."""
        return "; ".join(
            kind.replace("{}", join_names(list(rows))) for kind, rows in self.rows.items()
        )


def join_names(names: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def nan_names(named: Mapping[str, Tensor]) -> list[str]:
    """Those of some tensors that have a NaN. Infinities may be meant: masks and bounds have them."""
    return [name for name, tensor in named.items() if _has_nan(tensor)]


def _has_nan(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    try:
        return bool(torch.isnan(tensor).any())
    except (RuntimeError, NotImplementedError):  # dtypes of few bits, most of which have no NaN
        return False


# -- the model
# ----------------------------------------------------------------------------------------------------------------


def expected_tensors(placed: Placed) -> dict[str, Tensor]:
    """Parameters and buffers of the whole model, under the one name that a checkpoint has for each."""
    return {
        placed.traced.aliases.get(name, name): tensor
        for layer, module in zip(placed.traced.layers, placed.traced.modules, strict=True)
        for name, tensor in state_of(layer.name, module).items()
    }


def model_difference(headers: Iterable[Header], placed: Placed) -> str:
    """In what a checkpoint's model differs from this one: the first tensors that have another name,
    shape or dtype.
    """
    saved = _saved_forms(headers)
    rows = []
    for name, tensor in expected_tensors(placed).items():
        ours = _form(_dtype(tensor), tuple(tensor.shape))
        theirs = saved.pop(name, None)
        if theirs is None:
            rows.append(f"{name} is not in the checkpoint")
        elif theirs != ours:
            rows.append(f"{name} is {theirs} in the checkpoint and {ours} in the model")
    rows += [f"{name} is not in the model" for name in saved]
    return f": {join_names(rows)}" if rows else ""


def check_names(headers: Iterable[Header], placed: Placed, findings: Findings) -> None:
    """No file has a tensor of the model that the model has not."""
    for name in sorted(_saved_forms(headers).keys() - expected_tensors(placed).keys()):
        findings.add("the state has {}, which the model has not", repr(name))


def check_model(
    placed: Placed, tensors: Mapping[str, Tensor], findings: Findings, *, nonfinite: bool
) -> None:
    """The stages held here find all of their tensors, in the right shape and dtype, and no
    parameter has a NaN.
    """
    for stage in placed.local:
        parameters = parameter_names(stage)
        for name, target in state.own(stage).items():
            source = tensors.get(name, tensors.get(placed.traced.aliases.get(name, name)))
            if source is None:
                findings.add("the state has no {}", f"{name!r}, which stage {stage.index} needs")
            elif source.shape != target.shape:
                shapes = f"{tuple(source.shape)} in the state and {tuple(target.shape)}"
                findings.add("{}", f"{name} has shape {shapes} in the model")
            elif source.dtype != target.dtype:
                findings.add(
                    "{} (make the model in that dtype, or convert the weights by load_state_dict)",
                    f"{name} is {_dtype(source)} in the state and {_dtype(target)} in the model",
                )
            elif not nonfinite and name in parameters and _has_nan(source):
                findings.add(NAN, name)


def parameter_names(stage: Stage) -> set[str]:
    """All names of a stage's parameters, those of one that has several included."""
    return {
        name
        for layer in stage.layers
        for name, _ in layer.module.named_parameters(
            prefix_of(layer.name, layer.module), remove_duplicate=False
        )
    }


def _saved_forms(headers: Iterable[Header]) -> dict[str, str]:
    return {
        key.removeprefix("model/"): _form(_DTYPES.get(dtype, dtype), shape)
        for header in headers
        for key, (dtype, shape) in header.tensors.items()
        if key.startswith("model/")
    }


def _form(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype} {shape}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# -- optimizers
# ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OptimizerState:
    """The saved state of one stage's optimizer.

    Attributes:
        tensors: by `<parameter>/<key>`.
        facts: by parameter.
        files: by parameter, the file that it is in: of one file, groups have the same numbers.
    """

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Facts]
    files: Mapping[str, str]


def check_optimizer_state(
    optimizer: Optimizer, names: Mapping[Tensor, str], saved: OptimizerState, findings: Findings
) -> None:
    """The state is of an optimizer of the same class, with the same groups, and of the form that
    torch's classes need.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            facts = saved.facts.get(names[parameter])
            if facts is None:
                continue
            _check_class(optimizer, group, facts, findings)
    if not findings.rows:
        _check_groups(optimizer, names, saved, findings)
    if type(optimizer).__module__.startswith("torch.optim"):
        _check_forms(optimizer, names, saved.tensors, findings)


def _check_class(
    optimizer: Optimizer, group: Mapping[str, Any], facts: Facts, findings: Findings
) -> None:
    name = class_name(optimizer)
    if facts.kind is not None:
        if not same_class(facts.kind, name):
            findings.add(
                f"it holds the state of {facts.kind}, and the optimizer of this pipeline is {name}. {ANOTHER_OPTIMIZER}"
            )
        return
    # Schema 1 has no class. Versions of one class have more or fewer options than each other, and
    # not both.
    more, fewer = facts.options.keys() - group.keys(), group.keys() - facts.options.keys()
    fewer = {key for key in fewer if key != "params" and not callable(group[key])}
    if more and fewer:
        findings.add(
            f"it holds the state of another optimizer than {name}: one with {join_names(sorted(more))} and without "
            f"{join_names(sorted(fewer))}. {ANOTHER_OPTIMIZER}"
        )


def _check_groups(
    optimizer: Optimizer, names: Mapping[Tensor, str], saved: OptimizerState, findings: Findings
) -> None:
    """Parameters that were in one group are in one, and those that were in several are in several."""
    places: dict[
        tuple[str, int], tuple[int, str]
    ] = {}  # where a group of a file has gone, and by whom
    for number, group in enumerate(optimizer.param_groups):
        first: tuple[str, str, int | None, dict[str, Any]] | None = None
        for parameter in group["params"]:
            name = names[parameter]
            facts = saved.facts.get(name)
            if facts is None:
                continue
            file = saved.files.get(name, "")
            options = {key: facts.options[key] for key in facts.options.keys() & group.keys()}
            if first is None:
                first = name, file, facts.group, options
            differ = _differing(first[3], options)
            mixed = file == first[1] and facts.group != first[2]
            if differ or mixed:
                findings.add(_merged(first[0], name, differ))
                return
            if facts.group is not None:
                place, other = places.setdefault((file, facts.group), (number, name))
                if place != number:
                    findings.add(
                        f"{other} and {name} were in one parameter group when it was saved, and are in two here. Make the "
                        f"groups that there were. {ANOTHER_OPTIMIZER}"
                    )
                    return


def _differing(first: Mapping[str, Any], second: Mapping[str, Any]) -> str:
    for key in sorted(first.keys() & second.keys()):
        if json.dumps(first[key]) != json.dumps(second[key]):
            return f"{key} {first[key]} and {second[key]}"
    return ""


def _merged(first: str, second: str, differ: str) -> str:
    how = f" ({differ})" if differ else ""
    return (
        f"{first} and {second} were in two parameter groups{how} when it was saved, and are in one here. Make the groups that "
        f"there were. {ANOTHER_OPTIMIZER}"
    )


def _check_forms(
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    tensors: Mapping[str, Tensor],
    findings: Findings,
) -> None:
    shapes = {
        names[parameter]: parameter.shape
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for path, tensor in tensors.items():
        name, _, key = path.rpartition("/")
        if key not in _SHAPED or name not in shapes:
            continue
        is_number = tensor.is_floating_point() or tensor.is_complex()
        if tensor.shape != shapes[name] or not is_number:
            findings.add(
                "{}",
                f"{key} of {name} is {_form(_dtype(tensor), tuple(tensor.shape))} in the state, and the parameter is of shape "
                f"{tuple(shapes[name])}",
            )


# -- what goes on with a run
# ----------------------------------------------------------------------------------------------------


def check_schedulers(
    index: Checkpoint, schedulers: Sequence[Schedulers], findings: Findings
) -> None:
    """Of the learning-rate schedulers that are there already, each finds a state of its own class."""
    skip = "To begin schedulers anew, say skip='schedulers'"
    if len(schedulers) > len(index.schedulers):
        findings.add(
            f"it has the state of {len(index.schedulers)} learning-rate schedulers, and this pipeline has {len(schedulers)}. "
            f"{skip}"
        )
        return
    for number, text in enumerate(index.schedulers):
        saved = plain_json(text)
        if not isinstance(saved, dict):
            findings.add(f"the state of scheduler {number} is damaged. {skip}")
            continue
        kind = saved_kind(index.scheduler_kinds, number)
        if number < len(schedulers) and not schedulers[number].fits(kind, saved):
            kind_of_saved = kind or "another scheduler"
            findings.add(
                f"scheduler {number} is {schedulers[number].kind} here, and the checkpoint has the state of {kind_of_saved}. {skip}"
            )


def saved_kind(kinds: Sequence[str], number: int) -> str | None:
    """The class of a saved scheduler; None where the checkpoint is too old to say."""
    return kinds[number] if number < len(kinds) else None


def plain_json(text: str) -> Any:
    """What a text holds; None if it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def check_scaler(index: Checkpoint, scaler: bool, findings: Findings) -> None:
    """A loss scaler goes on from a loss scaler."""
    skip = "To leave that as it is here, say skip='scaler'"
    if scaler and index.scaler is None:
        findings.add(
            f"it was saved without a loss scaler, and this pipeline has one, which would begin anew. {skip}"
        )
    if not scaler and index.scaler is not None:
        findings.add(
            f"it has the state of a loss scaler (scale {index.scaler.get('scale', math.nan):g}), and this pipeline has none. "
            f"Give it one by scaler=. {skip}"
        )
    if index.scaler is not None:
        scale = index.scaler.get("scale", 0.0)
        if not scale > 0 or not {"steps", "skipped"} <= index.scaler.keys():
            findings.add(f"the state of its loss scaler is damaged: {index.scaler}")


def check_rule(index: Checkpoint, rule: RuleFacts | None, findings: Findings) -> None:
    """What a weight rule has kept is of no use to another one. With flushes nothing is needed of
    it.
    """
    saved = index.rule
    if rule is None or saved is None or not saved.keeps:
        return
    if (saved.name, saved.pipelines, saved.copies) != (rule.name, rule.pipelines, rule.copies):
        findings.add(
            f"it has what weight rule {_rule(saved)} keeps, and this pipeline has {_rule(rule)}. To begin the rule anew from the "
            "weights, say skip='weight_rule'"
        )


def _rule(rule: RuleFacts) -> str:
    more = f" with {rule.pipelines} pipelines" if rule.pipelines > 1 else ""
    copies = f" with {rule.copies} copies of a stage" if rule.copies > 1 else ""
    return f"{rule.name!r}{more}{copies}"
