"""Detect parameters that are frozen or thawed between batches, and apply the change to all holders.

A parameter may exist more than once in this process: in the user's model, in replicas of its stage
and, for tied weights, on other ranks that are threads. `requires_grad_` on any of them applies to
all. Optimizers, gradient synchronisation and clipping are then refreshed.
"""

from __future__ import annotations

import weakref
from dataclasses import InitVar, dataclass, field

from torch import nn

from penstock.batches.batch import Batch
from penstock.errors import SettingError
from penstock.runtime.assembly import Assembly
from penstock.runtime.global_step import GlobalStep
from penstock.tracing.traced_chain import TracedChain


@dataclass
class Trainability:
    """Which parameters of the model require gradients.

    Attributes:
        assembly: the ranks.
        global_step: the global step of all ranks.
        traced: the whole model, as the user has it in this process. Parameters of stages that other
            processes hold are watched as long as they exist, so that all processes count the same
            changes.
        epoch: number of changes so far. Batches carry it in their signatures, because the forms of
            their messages change with it.
    """

    assembly: Assembly
    global_step: GlobalStep
    traced: InitVar[TracedChain]
    epoch: int = 0
    _holders: dict[str, list[nn.Parameter]] = field(default_factory=dict)
    _remote_parameters: dict[str, weakref.ref[nn.Parameter]] = field(default_factory=dict)

    def __post_init__(self, traced: TracedChain) -> None:
        for stage in self.assembly.stages:
            for parameter, name in self.assembly.names(stage).items():
                self._add(name, parameter)
        # The model's own parameters, by which users freeze: stages of models on the meta device
        # have others.
        for name, parameter in traced.named_parameters():
            if name in self._holders:
                self._add(name, parameter)
            else:
                self._remote_parameters.setdefault(name, weakref.ref(parameter))
        self._watched = [parameter for holders in self._holders.values() for parameter in holders]
        self._flags = [parameter.requires_grad for parameter in self._watched]
        self._remote_flags = self._read_remote_flags()
        self._remote_frozen = {
            name
            for name, trains in zip(self._remote_parameters, self._remote_flags, strict=True)
            if trains is False
        }

    def _read_remote_flags(self) -> list[bool | None]:
        """Return the requires_grad flags of parameters of other processes' stages.

        The user's model has them too; None once such a parameter is gone.
        """
        flags: list[bool | None] = []
        for reference in self._remote_parameters.values():
            parameter = reference()
            flags.append(None if parameter is None else parameter.requires_grad)
        return flags

    def _add(self, name: str, parameter: nn.Parameter) -> None:
        holders = self._holders.setdefault(name, [])
        if all(parameter is not holder for holder in holders):
            holders.append(parameter)

    def checked(self, batch: Batch) -> Batch:
        """Return the batch with a signature that includes `epoch`. Raises as `check`."""
        if batch.training:
            self.check()
            if self.epoch:
                batch.signature = f"{batch.signature}+{self.epoch}"
        return batch

    def check(self) -> None:
        """Apply what was frozen or thawed since the last batch.

        Raises:
            SettingError: a parameter was thawed, and the schedule is asynchronous; or processes
                share the layers of a stage.
        """
        flags = [parameter.requires_grad for parameter in self._watched]
        remote_flags = self._read_remote_flags()
        if flags == self._flags and remote_flags == self._remote_flags:
            return
        rows = zip(self._remote_parameters, remote_flags, self._remote_flags, strict=True)
        changed = [
            (name, trains)
            for name, trains, trained in rows
            if trains is not None and trains != trained
        ]
        if changed or flags != self._flags:
            self.assembly.check_unshared(
                "to freeze or thaw parameters", "set requires_grad before constructing the Pipeline"
            )
        # All processes refuse together what one of them cannot do.
        self._check_stream(
            [name for name, trains in changed if trains and name in self._remote_frozen]
        )
        self._remote_flags = remote_flags
        if flags != self._flags:
            self._copy_flags()
        elif not changed:  # parameters that nothing refers to any more
            return
        self.epoch += 1
        self.global_step.epoch = self.epoch

    def _copy_flags(self) -> None:
        """Set the flag of a changed parameter on all its holders."""
        flags_before = dict(zip(map(id, self._watched), self._flags, strict=True))
        changed: dict[str, bool] = {}
        for name, holders in self._holders.items():
            if any(holder.requires_grad != flags_before[id(holder)] for holder in holders):
                # All holders had the same flag: `_copy_flags` leaves them equal.
                changed[name] = not flags_before[id(holders[0])]
        thawed = [name for name, trains in changed.items() if trains]
        self._check_stream(self._newly_trained(thawed))
        for name, trains in changed.items():
            for parameter in self._holders[name]:
                parameter.requires_grad_(trains)
        self._flags = [parameter.requires_grad for parameter in self._watched]
        self._refresh(set(thawed))

    def _newly_trained(self, thawed: list[str]) -> list[str]:
        """Return the names of thawed parameters that the stages have not trained so far."""
        trained = {
            id(parameter) for stage in self.assembly.stages for parameter in stage.update.parameters
        }
        return [name for name in thawed if id(self._holders[name][0]) not in trained]

    def _check_stream(self, new: list[str]) -> None:
        """Reject thawed parameters if the schedule keeps versions of the weights."""
        schedule = self.assembly.setting.schedule
        if not new or schedule.stream is None or not self.assembly.steps:
            return
        raise SettingError(
            f"{', '.join(new[:3])}{', ...' if len(new) > 3 else ''} had requires_grad=False when "
            f"the pipeline was made, and now True: {schedule.name} is asynchronous and keeps "
            "versions of the weights that it was made with. Make a new Pipeline after "
            "requires_grad_(True), or take a synchronous schedule"
        )

    def _refresh(self, thawed: set[str]) -> None:
        """Tell what keeps lists of trainable parameters that some were thawed."""
        for stage in self.assembly.stages:
            stage.update.refresh()
        for rank, interpreter in self.assembly.interpreters.items():
            wave_replicas = self.assembly.wave_replicas[rank]
            for replicas in (*interpreter.replicas.values(), *wave_replicas.values()):
                replicas.refresh()
            if rank in self.assembly.tied:
                self.assembly.tied[rank].refresh()
        self.global_step.trained |= thawed
