"""Comparison of a checkpoint with the pipeline that loads it, before anything is changed.

All mismatches are collected, so that one error message lists them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoint.checkpoint_files import Header
from penstock.checkpoint.checkpoint_index import Checkpoint, RuleFacts
from penstock.checkpoint.checkpoint_options import CheckpointOptions
from penstock.errors import FileError
from penstock.files.json_values import json_value
from penstock.files.text import join_names
from penstock.modules.state_names import prefix_of, state_of
from penstock.optim.schedulers import Schedulers
from penstock.stage import stage_state as state
from penstock.stage.stage import Stage
from penstock.stage.stage_state import Placed
from penstock.values.constants import dtype_name

#: torch's names of the dtypes of safetensors.
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

NAN = (
    "NaN values in {}: the run had diverged when this was saved. Resume from an earlier "
    "checkpoint; to load these values nevertheless, pass allow_nonfinite=True"
)


@dataclass
class Findings:
    """The mismatches between a checkpoint and a pipeline, grouped by kind.

    Attributes:
        rows: by kind, the names that it applies to (a dictionary, to keep their order). A kind is a
            sentence with {} in the place of the names.
    """

    rows: dict[str, dict[str, None]] = field(default_factory=dict)

    def add(self, kind: str, name: str = "") -> None:
        """Add a mismatch of a kind."""
        self.rows.setdefault(kind, {})[name] = None

    def text(self) -> str:
        """Return all mismatches as one text; empty if there are none."""
        sentences = [
            kind.replace("{}", join_names(list(names))) for kind, names in self.rows.items()
        ]
        return "; ".join(sentences)


def nan_names(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors that contain NaN.

    Infinities are allowed: masks and bounds contain them on purpose.
    """
    return [name for name, tensor in tensors.items() if _has_nan(tensor)]


def _has_nan(tensor: Tensor) -> bool:
    """Whether a tensor contains NaN."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    try:
        return bool(torch.isnan(tensor).any())
    except (RuntimeError, NotImplementedError):  # dtypes of few bits, most of which have no NaN
        return False


# -- the model -----------------------------------------------------------------------------------


def expected_tensors(placed: Placed) -> dict[str, Tensor]:
    """Return the whole model's parameters and buffers by their names in a checkpoint.

    A tensor with several names is saved under one of them.
    """
    return {
        placed.traced.first_name(name): tensor
        for layer, module in zip(placed.traced.layers, placed.traced.modules, strict=True)
        for name, tensor in state_of(layer.name, module).items()
    }


def model_difference(headers: Iterable[Header], placed: Placed) -> str:
    """Describe how a checkpoint's model differs from this one.

    Returns:
        The first tensors whose name, shape or dtype differs, after a colon; empty if all agree.
    """
    saved_forms = _saved_forms(headers)
    lines = []
    for name, tensor in expected_tensors(placed).items():
        form = describe_form(dtype_name(tensor.dtype), tuple(tensor.shape))
        saved_form = saved_forms.pop(name, None)
        if saved_form is None:
            lines.append(f"{name} is not in the checkpoint")
        elif saved_form != form:
            lines.append(f"{name} is {saved_form} in the checkpoint and {form} in the model")
    lines += [f"{name} is not in the model" for name in saved_forms]
    return f": {join_names(lines)}" if lines else ""


def check_names(headers: Iterable[Header], placed: Placed, findings: Findings) -> None:
    """Check that the model has every tensor that the files name."""
    for name in sorted(_saved_forms(headers).keys() - expected_tensors(placed).keys()):
        findings.add("the state has {}, which the model does not have", repr(name))


def check_model(
    placed: Placed, tensors: Mapping[str, Tensor], findings: Findings, *, nonfinite: bool
) -> None:
    """Check that the state has every tensor of this process's stages, in its shape and dtype.

    Args:
        placed: the placement of the stages.
        tensors: the saved model state by name.
        findings: where mismatches are added.
        nonfinite: whether parameters may contain NaN.
    """
    for stage in placed.local:
        parameters = parameter_names(stage)
        for name, target in state.stage_tensors(stage).items():
            source = tensors.get(name, tensors.get(placed.traced.first_name(name)))
            if source is None:
                findings.add("the state has no {}", f"{name!r}, which stage {stage.index} needs")
            elif source.shape != target.shape:
                shapes = f"{tuple(source.shape)} in the state and {tuple(target.shape)}"
                findings.add("{}", f"{name} has shape {shapes} in the model")
            elif source.dtype != target.dtype:
                dtypes = f"{dtype_name(source.dtype)} in the state and {dtype_name(target.dtype)}"
                findings.add(
                    "{} (build the model in that dtype, or convert the weights by load_state_dict)",
                    f"{name} is {dtypes} in the model",
                )
            elif not nonfinite and name in parameters and _has_nan(source):
                findings.add(NAN, name)


def parameter_names(stage: Stage) -> set[str]:
    """Return the names of a stage's parameters; a shared parameter has several."""
    return {
        name
        for layer in stage.layers
        for name, _ in layer.module.named_parameters(
            prefix_of(layer.name, layer.module), remove_duplicate=False
        )
    }


def _saved_forms(headers: Iterable[Header]) -> dict[str, str]:
    """Return dtype and shape, as text, of every model tensor in some files."""
    return {
        key.removeprefix("model/"): describe_form(_DTYPES.get(dtype, dtype), shape)
        for header in headers
        for key, (dtype, shape) in header.tensors.items()
        if key.startswith("model/")
    }


def describe_form(dtype: str, shape: tuple[int, ...]) -> str:
    """Return a dtype and a shape as text."""
    return f"{dtype} {shape}"


# -- schedulers, loss scaler, weight rule --------------------------------------------------------


def check_schedulers(
    index: Checkpoint, schedulers: Sequence[Schedulers], findings: Findings
) -> None:
    """Check that every existing learning-rate scheduler has a saved state of its own class."""
    advice = "To start with new schedulers, pass skip='schedulers'"
    if len(schedulers) > len(index.schedulers):
        findings.add(
            f"it has the state of {len(index.schedulers)} learning-rate schedulers, and this "
            f"pipeline has {len(schedulers)}. {advice}"
        )
        return
    for number, text in enumerate(index.schedulers):
        saved = plain_json(text)
        if not isinstance(saved, dict):
            findings.add(f"the state of scheduler {number} is damaged. {advice}")
            continue
        kind = saved_kind(index.scheduler_kinds, number)
        if number < len(schedulers) and not schedulers[number].fits(kind, saved):
            findings.add(
                f"scheduler {number} is {schedulers[number].kind} here, and the checkpoint has the "
                f"state of {kind or 'another scheduler'}. {advice}"
            )


def saved_kind(kinds: Sequence[str], number: int) -> str | None:
    """Return the class name of a saved scheduler; None if the checkpoint does not record it."""
    return kinds[number] if number < len(kinds) else None


def plain_json(text: str) -> Any:
    """Parse a JSON text; None if it is not valid JSON."""
    try:
        return json_value(text, "the state", finite=False)
    except FileError:
        return None


def check_scaler(index: Checkpoint, scaler: bool, findings: Findings) -> None:
    """Check that either both the checkpoint and the pipeline have a loss scaler, or neither."""
    advice = "To ignore this difference, pass skip='scaler'"
    if scaler and index.scaler is None:
        findings.add(
            "it was saved without a loss scaler, and this pipeline has one, which would start "
            f"with its initial scale. {advice}"
        )
    if not scaler and index.scaler is not None:
        scale = index.scaler.get("scale", math.nan)
        findings.add(
            f"it has the state of a loss scaler (scale {scale:g}), and this pipeline has none. "
            f"Construct it with scaler=. {advice}"
        )
    if index.scaler is not None:
        scale = index.scaler.get("scale", 0.0)
        if not scale > 0 or not {"steps", "skipped"} <= index.scaler.keys():
            findings.add("the state of its loss scaler is damaged: {}", str(index.scaler))


def average_tensors(placed: Placed, options: CheckpointOptions) -> dict[str, Tensor]:
    """Return the averaged weights of this process's stages, by their names in a checkpoint."""
    return {
        f"average/{number}/{name}": tensor
        for number, average in enumerate(options.averages)
        for stage in placed.local
        for name, tensor in average.averaged(stage).items()
    }


def check_averages(
    index: Checkpoint,
    tensors: Mapping[str, Tensor],
    placed: Placed,
    options: CheckpointOptions,
    findings: Findings,
) -> None:
    """Check that the pipeline's running averages of the weights are those that were saved.

    A pipeline without any ignores them: `Pipeline.ema` then refuses to begin one anew.
    """
    # Checkpoints of older schemas hold no averages: the caller restores them from files of their
    # own.
    if not options.averages or index.schema < 3:
        return
    if len(options.averages) != len(index.averages):
        findings.add(
            f"it has {len(index.averages)} running averages of the weights, and this pipeline has "
            f"{len(options.averages)}. Make the same ones by pipe.ema(...) before load; to begin "
            "them anew, pass skip='averages'"
        )
        return
    for name, target in average_tensors(placed, options).items():
        saved = tensors.get(name)
        if saved is None or saved.shape != target.shape:
            findings.add("it has no fitting {}: another kind of average was saved", repr(name))


def check_rule(index: Checkpoint, rule: RuleFacts | None, findings: Findings) -> None:
    """Check that saved state of a weight rule belongs to this pipeline's rule.

    A synchronous pipeline has no weight rule and ignores the saved state.
    """
    saved = index.rule
    if rule is None or saved is None or not saved.keeps:
        return
    if (saved.name, saved.pipelines, saved.copies) != (rule.name, rule.pipelines, rule.copies):
        findings.add(
            f"it has the state of weight rule {_describe_rule(saved)}, and this pipeline has "
            f"{_describe_rule(rule)}. To initialise the rule from the weights, pass "
            "skip='weight_rule'"
        )


def _describe_rule(rule: RuleFacts) -> str:
    """Describe a weight rule by its name and, where there are several, its numbers of copies."""
    pipelines = f" with {rule.pipelines} pipelines" if rule.pipelines > 1 else ""
    copies = f" with {rule.copies} copies of a stage" if rule.copies > 1 else ""
    return f"{rule.name!r}{pipelines}{copies}"
