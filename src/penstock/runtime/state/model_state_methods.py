"""The whole model's state on ranks that train only a part of it.

It can be collected on every rank, copied into the user's model, and averaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from penstock.errors import SettingError
from penstock.ranks.world import World
from penstock.runtime.assembly import Assembly
from penstock.runtime.stale_guard import Guard, guard_model, guards_of
from penstock.runtime.state.persistence import Persistence
from penstock.runtime.state.weight_average import Average, Combine, create_average
from penstock.stage import stage_state as state
from penstock.tracing.traced_chain import TracedChain
from penstock.transport.payload import TensorForm


def guard_for(traced: TracedChain, assembly: Assembly) -> Guard | None:
    """Guard the user's model against reading layers that other processes train.

    Args:
        traced: the chain with the user's own modules.
        assembly: the ranks of this process.

    Returns:
        The guard; None if all ranks are threads of this process, or if this process trains all
        layers with weights.

    Raises:
        RunError: an earlier pipeline has trained some of the layers on other ranks, and this one
        would train them here.
    """
    if len(assembly.world.local_ranks) == assembly.world.size:
        for guard in guards_of(traced.roots):
            guard.check("training")
        return guard_model(traced, range(len(traced)), 0)
    local_layers = {layer.index for stage in assembly.stages for layer in stage.layers}
    return guard_model(traced, local_layers, assembly.world.local_ranks[0])


def whole_state(world: World, placed: state.Placed) -> dict[str, Tensor]:
    """Return the whole model's parameters and buffers on every rank.

    Returns:
        Tensors on the CPU by name; a tensor with several names is under each of them.
    """
    collected = state.collect(world, placed)
    if len(world.local_ranks) == world.size:
        return collected
    traced = placed.traced
    names = state.state_names(traced)
    tensors: dict[str, Tensor] = {}
    for name in dict.fromkeys(map(traced.first_name, names)):
        fact = traced.description.tensor(name)
        tensor = collected.get(name)
        if tensor is None:
            tensor = torch.empty(fact.shape, dtype=getattr(torch, fact.dtype))
        # As bytes: gloo's broadcast supports few of torch's dtypes. A tensor of one element is
        # contiguous with any stride, and such a view of it is not.
        flat = tensor.resolve_conj().resolve_neg().contiguous().as_strided((tensor.numel(),), (1,))
        content = flat.view(torch.uint8) if tensor.numel() else None
        if content is not None:
            form = TensorForm(tuple(content.shape), "uint8", wants_grad=False)
            content = world.broadcast(content, 0, form)
            tensor = content.view(tensor.dtype).reshape(tensor.shape)
        tensors[name] = tensor
    return {name: tensors[traced.first_name(name)] for name in names}


def fill(model: nn.Module | Sequence[nn.Module], values: Mapping[str, Tensor]) -> None:
    """Copy a state into a model.

    Args:
        model: a module, or a list of modules.
        values: tensors by the model's names.

    Raises:
        SettingError: the model is on the meta device, or its names or shapes differ.
    """
    target = model if isinstance(model, nn.Module) else nn.ModuleList(model)
    if any(parameter.is_meta for parameter in target.parameters()):
        raise SettingError(
            "load_into: the model is on the meta device, and has no memory for values. Allocate it "
            "(model.to_empty(device='cpu')), or pass another model of the same class"
        )
    expected = {
        name: tensor for name, tensor in target.state_dict().items() if isinstance(tensor, Tensor)
    }
    differing = _differing_names(expected, values)
    if differing:
        examples = ", ".join(map(repr, differing[:4])) + (", …" if len(differing) > 4 else "")
        raise SettingError(
            f"load_into: the model is not the pipeline's: {len(differing)} tensors are in only one "
            f"of the two, or have different shapes ({examples}). Pass a model of the same class "
            "and sizes, or the same list of modules"
        )
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(values[name])


def _differing_names(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[str]:
    """Return the names that are in only one of two states, or have different shapes."""
    names = []
    for name in {**first, **second}:
        in_both = name in first and name in second
        if not in_both or first[name].shape != second[name].shape:
            names.append(name)
    return names


class ModelState:
    """The methods of `Pipeline` that return or copy the whole model's state."""

    _assembly: Assembly
    _world: World
    _persistence: Persistence
    _guard: Guard | None

    def state_dict(self) -> dict[str, Tensor]:
        """See `Pipeline.state_dict`."""
        raise NotImplementedError

    def _enter(self, call: str) -> None:
        raise NotImplementedError

    def model_state(self) -> dict[str, Tensor]:
        """Return the whole model's parameters and buffers on every rank. Call it on all ranks.

        `state_dict` returns them on rank 0 only, which costs less.

        Returns:
            Tensors on the CPU by the model's own names.
        """
        self._enter("model_state")
        return whole_state(self._world, self._assembly.placed)

    def load_into(self, model: nn.Module | Sequence[nn.Module]) -> None:
        """Copy the whole model's state into a model of this process. Call it on all ranks.

        The model may be the one that the pipeline was constructed from. If ranks are processes,
        that model has trained weights only in the layers of this rank. After `load_into` it has all
        of them, and `model(x)` and `model.state_dict()` return what they would on one device, until
        the next batch is trained.

        Args:
            model: a model with the same names and shapes, or a list of modules.

        Raises:
            SettingError: the model is on the meta device, or its names or shapes differ.
        """
        self._enter("load_into")
        values = whole_state(self._world, self._assembly.placed)
        guards = guards_of([model] if isinstance(model, nn.Module) else model)
        were_stale = [guard.stale for guard in guards]
        # Before the copy: `fill` reads the model's state_dict, which a stale guard refuses.
        for guard in guards:
            guard.stale = False
        try:
            fill(model, values)
        # KeyboardInterrupt too: a model that was filled in part is as stale as before.
        except BaseException:
            for guard, stale in zip(guards, were_stale, strict=True):
                guard.stale = stale
            raise

    def ema(
        self,
        decay: float | None = 0.999,
        *,
        avg_fn: Combine | None = None,
        use_buffers: bool = False,
    ) -> Average:
        """Create a running average of the model's weights.

        It replaces `torch.optim.swa_utils.AveragedModel`, with the same values. Every rank averages
        the weights of its own stages: call `update()` after each step, on all ranks.

        Args:
            decay: the weight of the old average in an update, from 0 to 1, as for
                `get_ema_multi_avg_fn(decay)`; None for the plain mean of all updates (stochastic
                weight averaging).
            avg_fn: instead of `decay`, a function that computes the new average from the averaged
                tensor, the model's tensor and the number of updates so far.
            use_buffers: average floating-point buffers too; otherwise they are copied at each
                update.

        Raises:
            SettingError: `decay` is not between 0 and 1, or the loaded checkpoint has averages,
                which an average restores only if it exists before `load`.
        """
        self._assembly.check_unshared("ema", "average the weights of saved checkpoints")
        self._world.calls.enter("ema")
        self._persistence.check_averages()
        average = create_average(self, self._assembly, decay, avg_fn, use_buffers=use_buffers)
        self._persistence.averages.append(average)
        return average

    def _mark_stale(self) -> None:
        """Note that other ranks have trained their layers of the user's model."""
        if self._guard is not None:
            self._guard.mark()

    def _release_guard(self) -> None:
        """Remove the guard from the user's model, unless it has stale layers."""
        if self._guard is not None and not self._guard.stale:
            self._guard.release()
