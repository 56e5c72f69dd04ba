"""The interface that a `Pipe` has as an `nn.Module`: its modules, modes, names, state and devices."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from penstock.errors import SettingError
from penstock.pipe.pipe_stage import Partition
from penstock.pipe.pipe_traced import loss_type_of, model_names
from penstock.tracing.traced_chain import TracedChain

#: Settings of torch's checkpoint that change nothing in a Pipe.
_CHECKPOINT_SETTINGS = {"use_reentrant", "preserve_rng_state", "determinism_check", "debug"}
#: Attributes that are those of the model. NEFTune of Trainer adds noise by a hook on the embedding,
#: with which the model is traced again. The configuration of a model of transformers says which
#: outputs an evaluation ignores, and whether labels can be smoothed.
_MODEL_ATTRIBUTES = ("get_input_embeddings", "config")
#: What Trainer adds to the inputs of a model that computes its loss: the number of targets in all
#: accumulated batches.
_LOSS_COUNT = "num_items_in_batch"


class PipeModule(nn.Module):
    """The part of `Pipe` that other code expects of a module.

    Attributes:
        checkpoint: which micro-batches are recomputed, see `Pipe`.
        partitions: by device, its layers.
        devices: by partition.
        chunks: number of micro-batches.
    """

    partitions: nn.ModuleList
    devices: list[torch.device]
    checkpoint: str
    chunks: int
    _traced: TracedChain | None
    _checkpoint_before: str | None = None

    # -- the modules of a traced model, which are those that the user knows

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the children with their names: those of the model, if it is a traced one.

        Parameters then have the names and the order that they have in the model, and modules the
        types that libraries look for, such as the layer norms without weight decay. A dropout rate
        that is set is that of the model. The layers of the partitions have the same parameters.
        """
        yield from super().named_children() if self._model is None else self._model.named_children()

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield all modules with their names, see `named_children`."""
        if self._model is None:
            yield from super().named_modules(memo, prefix, remove_duplicate)
            return
        yield prefix, self
        for name, module in self._model.named_modules(memo, prefix, remove_duplicate):
            if module is not self._model:
                yield name, module

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the whole model."""
        if self._model is None:
            return super().train(mode)
        self._model.train(mode)
        self.training = mode
        self.partitions.train(mode)
        return self

    @property
    def _model(self) -> nn.Module | None:
        """The model that was traced; None for an nn.Sequential."""
        return None if self._traced is None else self._traced.roots[0]

    @property
    def loss_type(self) -> str | None:
        """The name of the model's loss, as models of transformers have it.

        By it, Trainer decides whether it counts the first label of every sequence.
        """
        return loss_type_of(self._model)

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Whether Trainer passes the number of targets to the model, and divides a loss by it."""
        model = self._model
        if model is None:
            return False
        if hasattr(model, "accepts_loss_kwargs"):
            return bool(model.accepts_loss_kwargs)
        parameters = inspect.signature(model.forward).parameters.values()
        return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)

    def _place_loss_count(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return inputs with the number of targets if the model divides by it, else without.

        A model that computes its loss from labels divides as without a Pipe. Otherwise the loss is
        computed from the outputs, by Trainer or by its `compute_loss_func=`.

        Raises:
            SettingError: the model computes a loss from labels for each of several micro-batches.
        """
        model = self._model
        if model is None or _LOSS_COUNT in inspect.signature(model.forward).parameters:
            return inputs
        others = {name: value for name, value in inputs.items() if name != _LOSS_COUNT}
        if _LOSS_COUNT not in inputs or inputs.get("labels") is None:
            return others
        if self.chunks > 1:
            raise SettingError(
                f"labels and num_items_in_batch for a Pipe with chunks={self.chunks}: a model that "
                "computes its loss returns one for each micro-batch. Compute the loss in "
                'compute_loss_func= of Trainer, with label_names=["labels"], or use chunks=1'
            )
        # A tensor: the graph holds for all its values, and for one value of a plain number.
        return {**others, _LOSS_COUNT: torch.as_tensor(inputs[_LOSS_COUNT])}

    def _get_name(self) -> str:
        """Return the name of the class of the traced model.

        By it, the label smoothing of Trainer decides whether labels are shifted.
        """
        return type(self if self._model is None else self._model).__name__

    def __repr__(self) -> str:
        """Return the layers by partition, under the name of this class."""
        return type(self).__name__ + super().__repr__().removeprefix(self._get_name())

    # -- the interface of the nn.Sequential that was partitioned

    def __len__(self) -> int:
        return sum(len(partition) for partition in self._sequentials())

    def __iter__(self) -> Iterator[nn.Module]:
        for partition in self._sequentials():
            yield from partition

    def __getitem__(self, index: int) -> nn.Module:
        return list(self)[index]

    def _sequentials(self) -> Sequence[Partition]:
        partitions: Sequence[Partition] = list(self.partitions)  # type: ignore[arg-type]
        return partitions

    @property
    def hf_device_map(self) -> dict[str, str]:
        """The device of each partition, by its name, as models of transformers have it.

        Trainer and Accelerate do not move a model that has it.
        """
        names = [f"partitions.{index}" for index in range(len(self.devices))]
        return dict(zip(names, map(str, self.devices), strict=True))

    def sequential_state_dict(self) -> dict[str, Tensor]:
        """Return the `state_dict` of the plain `nn.Sequential`, or of the model that was traced;
        `load_state_dict` accepts it.
        """
        if self._traced is not None:
            return dict(self.state_dict())
        return {key.split(".", 2)[2]: value for key, value in self.state_dict().items()}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Accept keys of this Pipe, of a Pipe with another balance, or of the plain model."""
        names = {} if self._traced is None else model_names(self.partitions)
        if names and args[0].get("assign_to_params_buffers", False):
            raise SettingError(
                "load_state_dict(assign=True) would give the partitions other parameters than the "
                "model that was traced: leave assign out, and the values are copied"
            )
        # A traced model has one value under a name of its own, and a layer may have it under several.
        for name, keys in names.items():
            if f"{prefix}{name}" in state_dict:
                value = state_dict.pop(f"{prefix}{name}")
                state_dict.update(dict.fromkeys([f"{prefix}{key}" for key in keys], value))
        self._rename_layers(state_dict, prefix)
        # Parameters of the model itself are also the Pipe's, see `take_names`: torch looks for them
        # here under their names in the model.
        for name in names.keys() & {*self._parameters, *self._buffers}:
            if f"{prefix}{names[name][0]}" in state_dict:
                state_dict[f"{prefix}{name}"] = state_dict[f"{prefix}{names[name][0]}"]
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _rename_layers(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Rename keys of layers to those of this Pipe, whatever their partition was before.

        Both `partitions.1.layer.weight` and the plain model's `layer.weight` are accepted.
        """
        prefix_of_layer = {
            layer_name: f"{prefix}partitions.{index}.{layer_name}."
            for index, partition in enumerate(self.partitions)
            for layer_name in partition._modules
        }
        for key in list(state_dict):
            path = key.removeprefix(prefix).split(".")
            if path[0] == "partitions" and len(path) > 2 and path[1].isdigit():
                path = path[2:]
            if path[0] in prefix_of_layer and len(path) > 1:
                renamed_key = prefix_of_layer[path[0]] + ".".join(path[1:])
                state_dict[renamed_key] = state_dict.pop(key)

    # -- what Trainer of transformers calls

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
        *,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Recompute all micro-batches, as `checkpoint="always"` does.

        Outputs and gradients stay the same. Recomputation here saves and restores the state of the
        random numbers, and has no reentrant variant: both choices of torch's checkpoint are met.

        Raises:
            SettingError: recompute of some layers only, offloading, or another setting.
        """
        other = sorted({*(activation_checkpointing_kwargs or {})} - _CHECKPOINT_SETTINGS)
        if other or every_n_layers != 1 or offload:
            names = other or (["every_n_layers"] if every_n_layers != 1 else ["offload"])
            raise SettingError(
                f"{', '.join(names)}: a Pipe recomputes whole partitions of whole micro-batches. "
                "Leave the setting out, or choose micro-batches by ps.Pipe(checkpoint=), or layers "
                "by ps.Pipeline with a plan (docs/pipe.md)"
            )
        if self.checkpoint != "always":
            self._checkpoint_before, self.checkpoint = self.checkpoint, "always"

    def activation_checkpointing_disable(self) -> None:
        """Return to the mode before `activation_checkpointing_enable`; "never" if there was none."""
        self.checkpoint = self._checkpoint_before or "never"
        self._checkpoint_before = None

    def gradient_checkpointing_enable(
        self,
        gradient_checkpointing_kwargs: dict[str, Any] | None = None,
        *,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Do what `activation_checkpointing_enable` does, by its name in transformers before 5."""
        self.activation_checkpointing_enable(
            gradient_checkpointing_kwargs, every_n_layers=every_n_layers, offload=offload
        )

    def gradient_checkpointing_disable(self) -> None:
        """Do what `activation_checkpointing_disable` does."""
        self.activation_checkpointing_disable()

    def __getattr__(self, name: str) -> Any:
        """Return a module, parameter or buffer, or what Trainer reads of the traced model.

        Raises:
            AttributeError: there is none.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            # From `__dict__`: a Pipe that is being copied or unpickled has no attributes yet.
            traced = self.__dict__.get("_traced")
            if name in _MODEL_ATTRIBUTES and traced is not None:
                return getattr(traced.roots[0], name)
            raise

    # -- moving between devices, which a Pipe does not support

    def cuda(self, device: Any = None) -> Self:
        """Raise: every partition stays on its device.

        Raises:
            TypeError: always.
        """
        raise _move_error(device)

    def cpu(self) -> Self:
        """Raise: every partition stays on its device.

        Raises:
            TypeError: always.
        """
        raise _move_error("cpu")

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Change the dtype of the parameters; the devices stay.

        Raises:
            TypeError: an argument is a device, or a tensor, which implies one.
        """
        if kwargs.keys() & {"device", "tensor", "other"} or (
            args and isinstance(args[0], (torch.device, str, int, Tensor))
        ):
            raise _move_error(kwargs.get("device", args[0] if args else None))
        return super().to(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Convert all tensors, unless a traced model would get another dtype than its graphs have.

        Raises:
            SettingError: the dtype of a parameter would change.
        """
        dtypes = set() if self._model is None else {weight.dtype for weight in self.parameters()}
        for dtype in dtypes:
            converted = fn(torch.empty(0, dtype=dtype)).dtype
            if converted != dtype:
                raise SettingError(
                    f"this Pipe was traced with parameters of {dtype}, and its graphs hold for that "
                    f"dtype: convert the model to {converted} before it becomes a Pipe, or leave "
                    "its parameters and use mixed precision (autocast)"
                )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def _move_error(target: Any) -> TypeError:
    return TypeError(
        f"denied to move parameters and buffers to {target!r}, because a Pipe keeps every "
        "partition on its own device: choose devices by the argument devices= of Pipe"
    )
