"""A traced model as the layers of a `Pipe`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from penstock.errors import SettingError
from penstock.tracing.form import Form
from penstock.tracing.sequential import runs_otherwise
from penstock.tracing.traced_chain import TracedChain, chain
from penstock.tracing.variants import Variants
from penstock.transport.payload import Payload


def layers_to_divide(
    module: nn.Module | TracedChain, example: Any
) -> tuple[nn.Sequential, TracedChain | None]:
    """Return the layers of a model, and its chain if it is a traced one.

    Args:
        module: an nn.Sequential, a chain, or any other module.
        example: inputs to trace on; None if there are none.

    Raises:
        TypeError: the module is no nn.Sequential, and there is no example.
        ChainError: it cannot be traced.
    """
    traced = module if isinstance(module, TracedChain) else None
    is_layers = isinstance(module, nn.Sequential) and not runs_otherwise(module)
    if isinstance(module, nn.Module) and example is not None and not is_layers:
        traced = chain(module, example)
    if traced is not None:
        return _as_sequential(traced), None if traced.variants is None else traced
    if not isinstance(module, nn.Sequential):
        raise TypeError(
            f"module must be nn.Sequential to be partitioned, not {type(module).__name__}; any "
            "other nn.Module needs an example of its inputs: ps.Pipe(model, balance, example=x), "
            "or ps.Pipe(ps.chain(model, x), balance)"
        )
    return module, None


def _as_sequential(traced: TracedChain) -> nn.Sequential:
    """Return the layers of a chain, under their numbers unless the model has them as children."""
    root = traced.roots[0] if len(traced.roots) == 1 else None
    if isinstance(root, nn.Sequential) and list(root) == list(traced.modules):
        return root
    named = OrderedDict((str(index), module) for index, module in enumerate(traced.modules))
    layers = nn.Sequential(named)
    if root is not None:
        layers.training = root.training
        if traced.variants is not None:
            layers.train(root.training)
    return layers


def prepare_graphs(variants: Variants, micro_batches: Sequence[Payload], *, training: bool) -> bool:
    """Trace the graphs that some micro-batches need, before any partition runs.

    Args:
        variants: the model's graphs.
        micro_batches: the inputs.
        training: whether the layers are in training mode.

    Returns:
        Whether the model has changed since the last call, so that it has other graphs.

    Raises:
        ChainError: the model has changed in a way that its layers do not follow, or it cannot be
            traced for inputs of this form.
    """
    changed = not variants.is_current(training) and variants.refresh(training)
    drawing = variants.drawing
    for micro_batch in micro_batches:
        form = Form.of(micro_batch.value())
        if not variants.has(form, training):
            variants.find(form, training)
    return changed or variants.drawing != drawing


def check_traced_inputs(value: Payload) -> None:
    """Reject inputs that require gradients: layers of all partitions may read them.

    Raises:
        SettingError: an input requires a gradient.
    """
    if any(value.wants_grad):
        raise SettingError(
            "an input requires a gradient, and a Pipe of a traced model computes gradients of its "
            "parameters only: detach() the input, or make the Pipe of an nn.Sequential"
        )


def follow_modes(pipe: nn.Module, traced: TracedChain) -> None:
    """Give a `Pipe` and its partitions the mode of the model that was traced.

    `train` and `eval` of the model itself then do what they do with the plain model. If any part is
    in training mode, as a dropout that is used for sampling, all parts run in their own modes.
    """
    training = any(part.training for part in traced.roots[0].modules())
    partitions = pipe.get_submodule("partitions")
    if any(part.training != training for part in (pipe, *partitions.children())):
        pipe.training = training
        partitions.train(training)


def loss_type_of(model: nn.Module | None) -> str | None:
    """Return the name of the loss of a model of transformers, if it predicts the next token.

    An encoder-decoder has none here: its targets are not shifted.
    """
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        return None
    return getattr(model, "loss_type", None)


def take_names(pipe: nn.Module, model: nn.Module) -> None:
    """Let the states of a `Pipe` have the names of the model that was traced.

    Parameters and buffers of the model itself, which are in no submodule, become those of the Pipe.
    """
    attributes = vars(pipe)
    for name in ("_parameters", "_buffers", "_non_persistent_buffers_set"):
        attributes[name] = vars(model)[name]
    pipe._register_state_dict_hook(_rename)  # type: ignore[no-untyped-call]
    pipe.register_load_state_dict_post_hook(_rename_missing)  # type: ignore[no-untyped-call]


def _rename(pipe: nn.Module, state: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Replace the names of the partitions in a state by those of the model."""
    for name, keys in model_names(pipe.get_submodule("partitions")).items():
        values = [state.pop(f"{prefix}{key}") for key in keys]
        state[f"{prefix}{name}"] = values[0]


def _rename_missing(pipe: nn.Module, incompatible_keys: Any) -> None:
    """Report keys that a state lacks under the names that they have in the model.

    `safetensors.torch.load_model` compares them with the names of tied weights, of which a file has
    one.
    """
    names = {}
    for name, keys in model_names(pipe.get_submodule("partitions")).items():
        names.update(dict.fromkeys(keys, name))
    missing = []
    for key in incompatible_keys.missing_keys:
        # A Pipe may be a part of another module, whose names come first.
        start = max(key.rfind(".partitions.") + 1, 0)
        missing.append(key[:start] + names.get(key[start:], key[start:]))
    incompatible_keys.missing_keys[:] = dict.fromkeys(missing)


def model_names(partitions: nn.Module) -> dict[str, list[str]]:
    """Return, by the name of a tensor in a traced model, its names in the partitions of a `Pipe`.

    >>> layers = nn.ModuleDict({"head": nn.Linear(1, 1, bias=False)})
    >>> model_names(nn.ModuleList([nn.Sequential(layers)]))
    {'head.weight': ['partitions.0.0.head.weight']}
    """
    names: dict[str, list[str]] = {}
    for key in partitions.state_dict():
        names.setdefault(key.split(".", 2)[2], []).append(f"partitions.{key}")
    return names
