"""Parameters that are frozen or thawed while a pipeline trains: noticed at the next batch, on every copy of a parameter.

A parameter may stand in this process more than once: the model's own, and those of copies of a stage or of tied weights on other
ranks that are threads. `requires_grad_` on any of them is meant for all. What trains, meets and clips gradients then learns of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from penstock.errors import SettingError
from penstock.runtime.assembly import Assembly
from penstock.runtime.batch import Batch
from penstock.runtime.together import Together
from penstock.tracing.names import parameters_of


@dataclass
class Trainability:
    """Whether the parameters that are held here want gradients.

    Attributes:
        made: the ranks.
        together: what they do after a program.
        epoch: how often that has changed. Messages of batches carry it in their signatures, for their forms change with it.
    """

    made: Assembly
    together: Together
    epoch: int = 0
    _holders: dict[str, list[nn.Parameter]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for stage in self.made.stages:
            for parameter, name in self.made.names(stage).items():
                self._add(name, parameter)
        # The model's own parameters, by which users freeze: stages of models on the meta device have others.
        traced = self.made.traced
        for layer, module in zip(traced.layers, traced.modules, strict=True):
            for alias, parameter in parameters_of(layer.name, module):
                name = traced.aliases.get(alias, alias)
                if name in self._holders:
                    self._add(name, parameter)
        self._watched = [each for holders in self._holders.values() for each in holders]
        self._flags = [each.requires_grad for each in self._watched]

    def _add(self, name: str, parameter: nn.Parameter) -> None:
        holders = self._holders.setdefault(name, [])
        if all(parameter is not each for each in holders):
            holders.append(parameter)

    def checked(self, batch: Batch) -> Batch:
        """A batch that is about to be run, its signature that of the parameters that are trained now. Raises as `check`."""
        if batch.training:
            self.check()
            if self.epoch:
                batch.signature = f"{batch.signature}+{self.epoch}"
        return batch

    def check(self) -> None:
        """Before a batch: take note of what was frozen or thawed since the one before.

        Raises:
            SettingError: a parameter was thawed, and the schedule is asynchronous.
        """
        flags = [each.requires_grad for each in self._watched]
        if flags == self._flags:
            return
        before = dict(zip(map(id, self._watched), self._flags, strict=True))
        changed = {
            name: not before[id(holders[0])]
            for name, holders in self._holders.items()
            if any(each.requires_grad != before[id(each)] for each in holders)
        }
        self._check_stream([name for name, thawed in changed.items() if thawed])
        for name, wanted in changed.items():
            for parameter in self._holders[name]:
                parameter.requires_grad_(wanted)
        self._flags = [each.requires_grad for each in self._watched]
        self.epoch += 1
        self._refresh({name for name, wanted in changed.items() if wanted})

    def _check_stream(self, thawed: list[str]) -> None:
        schedule = self.made.setting.schedule
        if schedule.stream is None or not self.made.steps:
            return
        known = {
            id(parameter) for stage in self.made.stages for parameter in stage.update.parameters
        }
        new = [name for name in thawed if id(self._holders[name][0]) not in known]
        if new:
            raise SettingError(
                f"{', '.join(new[:3])}{', ...' if len(new) > 3 else ''} had requires_grad=False when the pipeline was made, and "
                f"now True: {schedule.name} is asynchronous and keeps versions of the weights that it was made with. Make a new "
                "Pipeline after requires_grad_(True), or take a synchronous schedule"
            )

    def _refresh(self, thawed: set[str]) -> None:
        for stage in self.made.stages:
            stage.update.refresh()
        for rank, interpreter in self.made.interpreters.items():
            for copies in (*interpreter.copies.values(), *self.made.apart[rank].values()):
                copies.refresh()
            if rank in self.made.tied:
                self.made.tied[rank].refresh()
        self.together.trained |= thawed
        self.together.epoch = self.epoch
