"""Optimizer state that the replicas of a stage divide among them: ZeRO, level 1.

Source: Rajbhandari et al. 2020, "ZeRO: memory optimizations toward training trillion parameter
models" (arXiv 1910.02054), section 5.1. As in torch's ZeroRedundancyOptimizer whole parameters are
divided, so that any optimizer that updates each parameter by itself gives the same bits as without.

Every replica updates the parameters that it owns, and sends them to the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.errors import SettingError
from penstock.optim.update import Update
from penstock.plan.parameter_owners import assign_owners
from penstock.ranks.buckets import flat, unflat
from penstock.stage.gradients.replica_messages import ReplicaMessages
from penstock.transport.update_messages import UpdateMessage

#: Key of a tensor's form in the description of state.
_TENSOR = "torch.Tensor"


class OptimizerShards:
    """One replica's share of the optimizer state of a stage.

    Args:
        update: the update of the stage.
        parameters: the parameters that are divided, alike on all replicas.
        messages: those among the replicas.

    Raises:
        SettingError: the optimizer is not one of torch, and might not update each parameter by
            itself.
    """

    def __init__(
        self, update: Update, parameters: Sequence[nn.Parameter], messages: ReplicaMessages
    ) -> None:
        self._update, self._parameters, self._messages = update, parameters, messages
        # Frozen parameters have no state yet.
        sizes = [parameter.nbytes if parameter.requires_grad else 0 for parameter in parameters]
        self._owners = assign_owners(sizes, len(messages.ranks), messages.stage)
        self._owner_of = dict(zip(map(id, parameters), self._owners, strict=True))
        if update.optimizer is not None:
            _check_optimizer(update.optimizer, messages.stage)
            update.leave_to_replicas(
                [parameter for parameter in parameters if not self.is_updated_here(parameter)]
            )

    def is_updated_here(self, parameter: nn.Parameter) -> bool:
        """Whether this replica updates a parameter."""
        return self._owner_of[id(parameter)] == self._messages.position

    def by_owner(self, parameters: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Return for each replica those of some divided parameters that it updates."""
        groups: list[list[nn.Parameter]] = [[] for _ in self._messages.ranks]
        for parameter in parameters:
            groups[self._owner_of[id(parameter)]].append(parameter)
        return groups

    def send_updates(self) -> None:
        """Send the parameters that this replica has updated, without waiting."""
        # Copies, since the next batch may change the parameters before they have been sent.
        parts = flat(self._trained_parameters()[self._messages.position]) or [torch.empty(0)]
        # A replica that owns no parameters sends an empty message: all wait for one from each.
        self._messages.send(UpdateMessage.UPDATED_WEIGHTS, parts, self._signature)

    def receive_updates(self) -> None:
        """Wait for the parameters that the other replicas have updated."""
        rows = self._messages.receive(UpdateMessage.UPDATED_WEIGHTS, self._signature)
        groups = self._trained_parameters()
        for rank, parts in rows.items():
            targets: list[Tensor] = [*groups[self._messages.ranks.index(rank)]]
            if targets:
                with torch.no_grad():
                    torch._foreach_copy_(targets, unflat(parts, targets))

    @property
    def _signature(self) -> str:
        """A name for the form of the parameters' message, which changes with every thaw."""
        count = len(self._update.parameters)
        return f"{UpdateMessage.UPDATED_WEIGHTS.name} {count}"

    def _trained_parameters(self) -> list[list[nn.Parameter]]:
        """Return for each replica the divided parameters that are trained and that it updates."""
        trained = [
            parameter for parameter in self._update.parameters if id(parameter) in self._owner_of
        ]
        return self.by_owner(trained)

    def gather_state(self) -> None:
        """Gather the whole state of the stage's optimizer on the first replica.

        All replicas call it. `Update.drop_state_of_replicas` frees what was gathered.
        """
        optimizer = self._update.optimizer
        if optimizer is None:
            return
        first = self._messages.ranks[0]
        if self._messages.position:
            self._send_state(first, optimizer)
        else:
            for rank in self._messages.others:
                self._receive_state(rank, optimizer)

    def _send_state(self, first: int, optimizer: Optimizer) -> None:
        """Send the state of this replica's parameters: first what it consists of, then tensors."""
        description: dict[int, dict[str, Any]] = {}
        tensors: list[Tensor] = []
        for index, parameter in enumerate(self._parameters):
            state = optimizer.state.get(parameter)
            if self._owners[index] != self._messages.position or not state:
                continue
            description[index] = {}
            for key, value in state.items():
                if isinstance(value, Tensor):
                    # The form is in the text, by which messages of other forms are told apart.
                    description[index][key] = {_TENSOR: [str(value.dtype), *value.shape]}
                    tensors.append(value.detach().to(parameter.device))
                else:
                    description[index][key] = value
        text = _to_json(description, optimizer)
        self._messages.send_text(first, UpdateMessage.OPTIMIZER_STATE, text)
        if tensors:
            self._messages.send_row(first, UpdateMessage.OPTIMIZER_STATE, tensors, text)

    def _receive_state(self, rank: int, optimizer: Optimizer) -> None:
        """Receive the state of another replica's parameters."""
        text = self._messages.receive_text(rank, UpdateMessage.OPTIMIZER_STATE)
        tensors: Iterator[Tensor] = iter(())
        if _TENSOR in text:
            tensors = iter(self._messages.receive_row(rank, UpdateMessage.OPTIMIZER_STATE, text))
        for index, entries in json.loads(text).items():
            state = {
                key: next(tensors) if isinstance(value, dict) else value
                for key, value in entries.items()
            }
            optimizer.state[self._parameters[int(index)]] = state


def _to_json(description: dict[int, dict[str, Any]], optimizer: Optimizer) -> str:
    """Return the description of state as JSON.

    Raises:
        SettingError: the state has values other than tensors and plain ones.
    """
    try:
        return json.dumps(description)
    except TypeError as error:
        raise SettingError(
            f"{type(optimizer).__name__} keeps state that is neither tensors nor plain values, "
            f"which copies of a stage cannot divide ({error}): use zero=0"
        ) from error


def _check_optimizer(optimizer: Optimizer, stage: int) -> None:
    """Reject optimizers that may update parameters together.

    Raises:
        SettingError: it is such an optimizer.
    """
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim"):
        raise SettingError(
            f"zero=1 divides the parameters of stage {stage} among its copies, and "
            f"{kind.__module__}.{kind.__name__} may compute an update from several of them "
            "together. Use an optimizer of torch.optim, or zero=0"
        )
