"""The whole model's state where only a part of it is trained: on every rank, in the user's own
model, and averaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from penstock.errors import SettingError
from penstock.runtime import state
from penstock.runtime.assembly import Assembly
from penstock.runtime.average import Average, Combine, average_of
from penstock.runtime.stale import Guard, guard_model, guards_of
from penstock.runtime.world import World
from penstock.tracing.chain import TracedChain
from penstock.tracing.names import state_of
from penstock.transport.payload import TensorForm


def guard_for(traced: TracedChain, made: Assembly) -> Guard | None:
    """A guard on the user's model, of which this process trains a part.

    Args:
        traced: the chain with the user's own modules.
        made: the ranks.

    Returns:
        None where all ranks are threads of this process, or all layers with weights are trained
        here.

    Raises:
        RunError: an earlier pipeline has trained some of the layers on other ranks, and this one
        would train them here.
    """
    if len(made.world.local_ranks) == made.world.size:
        for guard in guards_of(traced.roots):
            guard.check("training")
        return guard_model(traced, range(len(traced)), 0)
    held = {layer.index for stage in made.stages for layer in stage.layers}
    return guard_model(traced, held, made.world.local_ranks[0])


def whole_state(world: World, placed: state.Placed) -> dict[str, Tensor]:
    """Parameters and buffers of the whole model on every rank, on the CPU, under all of their
    names.
    """
    collected = state.collect(world, placed)
    if len(world.local_ranks) == world.size:
        return collected
    facts, aliases = placed.traced.description, placed.traced.aliases
    names = [
        name
        for layer, module in zip(placed.traced.layers, placed.traced.modules, strict=True)
        for name in state_of(layer.name, module)
    ]
    found: dict[str, Tensor] = {}
    for name in dict.fromkeys(aliases.get(name, name) for name in names):
        fact = facts.tensor(name)
        tensor = collected.get(name)
        if tensor is None:
            tensor = torch.empty(fact.shape, dtype=getattr(torch, fact.dtype))
        # As bytes: gloo's broadcast knows few of torch's types.
        content = tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else None
        if content is not None:
            form = TensorForm(tuple(content.shape), "uint8", wants_grad=False)
            content = world.broadcast(content, 0, form)
            tensor = content.view(tensor.dtype).reshape(tensor.shape)
        found[name] = tensor
    return {name: found[aliases.get(name, name)] for name in names}


def fill(model: nn.Module | Sequence[nn.Module], values: Mapping[str, Tensor]) -> None:
    """Copy values into a model.

    Raises:
        SettingError: it is on the meta device, or is another model.
    """
    target = model if isinstance(model, nn.Module) else nn.ModuleList(model)
    if any(parameter.is_meta for parameter in target.parameters()):
        raise SettingError(
            "load_into: the model is on the meta device, and has no memory for values. Give it memory "
            "(model.to_empty(device='cpu')), or another model of the same class"
        )
    expected = {
        name: tensor for name, tensor in target.state_dict().items() if isinstance(tensor, Tensor)
    }
    unlike = [
        name
        for name in {**expected, **values}
        if name not in expected or name not in values or expected[name].shape != values[name].shape
    ]
    if unlike:
        shown = ", ".join(map(repr, unlike[:4])) + (", …" if len(unlike) > 4 else "")
        raise SettingError(
            f"load_into: the model is not the pipeline's: {len(unlike)} of their tensors are only in one of them, or have other shapes "
            f"({shown}). Give a model of the same class and sizes, or of a list of modules the same list"
        )
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(values[name])


class ModelState:
    """A part of `Pipeline`."""

    _made: Assembly
    _world: World
    _guard: Guard | None

    def state_dict(self) -> dict[str, Tensor]:
        """See `Pipeline.state_dict`."""
        raise NotImplementedError

    def _enter(self, call: str) -> None:
        raise NotImplementedError

    def model_state(self) -> dict[str, Tensor]:
        """Parameters and buffers of the whole model, on every rank, on the CPU, under the model's
        own names. All ranks call it.

        `state_dict` has the same on rank 0 alone, which costs less.
        """
        self._enter("model_state")
        return whole_state(self._world, self._made.placed)

    def load_into(self, model: nn.Module | Sequence[nn.Module]) -> None:
        """Copy the whole model's state into a model of this process, such as the one that the
        pipeline was made from.

        With ranks in processes, that model has trained values only for the layers of this rank.
        After `load_into` it has all of them, until the next batch is trained; `model(x)` and
        `model.state_dict()` are then what they are on one device. All ranks call it.

        Args:
            model: a model with the same names and shapes, or a list of modules.

        Raises:
            SettingError: the model is on the meta device, or is another one.
        """
        self._enter("load_into")
        values = whole_state(self._world, self._made.placed)
        guards = guards_of([model] if isinstance(model, nn.Module) else model)
        before = [guard.stale for guard in guards]
        for guard in guards:
            guard.stale = False
        try:
            fill(model, values)
        except BaseException:
            for guard, stale in zip(guards, before, strict=True):
                guard.stale = stale
            raise

    def ema(
        self,
        decay: float | None = 0.999,
        *,
        avg_fn: Combine | None = None,
        use_buffers: bool = False,
    ) -> Average:
        """An average of the model's weights, in place of `torch.optim.swa_utils.AveragedModel`,
        with the same numbers.

        Every rank averages the weights of its own stages: call `update()` after each step, on all
        ranks.

        Args:
            decay: share of the average that stays at an update, from 0 to 1, as
            `get_ema_multi_avg_fn(decay)`; None for the
                plain mean of all updates (stochastic weight averaging).
            avg_fn: from the averaged tensor, the model's tensor and the number of updates so far to
            the new average, in place
                of `decay`.
            use_buffers: average floating-point buffers too; otherwise they are copied at each
            update.

        Raises:
            SettingError: `decay` is not between 0 and 1.
        """
        self._world.calls.enter("ema")
        return average_of(self, self._made, decay, avg_fn, use_buffers=use_buffers)

    def _mark_stale(self) -> None:
        if self._guard is not None:
            self._guard.mark()

    def _release_guard(self) -> None:
        """Take the guard off the user's model; but not while it has layers whose values are from
        before the training.
        """
        if self._guard is not None and not self._guard.stale:
            self._guard.release()
