"""Parameters that are frozen or thawed while a pipeline trains: noticed at the next batch, on every
copy of a parameter.

A parameter may stand in this process more than once: the model's own, and those of copies of a
stage or of tied weights on other ranks that are threads. `requires_grad_` on any of them is meant
for all. What trains, meets and clips gradients then learns of it.
"""

from __future__ import annotations

import weakref
from dataclasses import InitVar, dataclass, field

from torch import nn

from penstock.errors import SettingError
from penstock.runtime.assembly import Assembly
from penstock.runtime.batch import Batch
from penstock.runtime.together import Together
from penstock.tracing.chain import TracedChain
from penstock.tracing.names import parameters_of


@dataclass
class Trainability:
    """Whether the parameters of the model want gradients.

    Attributes:
        made: the ranks.
        together: what they do after a program.
        traced: the whole model, as the user has it in this process. Parameters of stages that other
        processes hold are
            watched as long as they live, so that all processes count the same changes.
        epoch: how often that has changed. Messages of batches carry it in their signatures, for
        their forms change with it.
    """

    made: Assembly
    together: Together
    traced: InitVar[TracedChain]
    epoch: int = 0
    _holders: dict[str, list[nn.Parameter]] = field(default_factory=dict)
    _elsewhere: dict[str, weakref.ref[nn.Parameter]] = field(default_factory=dict)

    def __post_init__(self, traced: TracedChain) -> None:
        for stage in self.made.stages:
            for parameter, name in self.made.names(stage).items():
                self._add(name, parameter)
        # The model's own parameters, by which users freeze: stages of models on the meta device
        # have others.
        for layer, module in zip(traced.layers, traced.modules, strict=True):
            for alias, parameter in parameters_of(layer.name, module):
                name = traced.aliases.get(alias, alias)
                if name in self._holders:
                    self._add(name, parameter)
                else:
                    self._elsewhere.setdefault(name, weakref.ref(parameter))
        self._watched = [each for holders in self._holders.values() for each in holders]
        self._flags = [each.requires_grad for each in self._watched]
        self._flags_elsewhere = self._seen_elsewhere()
        self._frozen_elsewhere = {
            name
            for name, wanted in zip(self._elsewhere, self._flags_elsewhere, strict=True)
            if wanted is False
        }

    def _seen_elsewhere(self) -> list[bool | None]:
        found = [reference() for reference in self._elsewhere.values()]
        return [None if each is None else each.requires_grad for each in found]

    def _add(self, name: str, parameter: nn.Parameter) -> None:
        holders = self._holders.setdefault(name, [])
        if all(parameter is not each for each in holders):
            holders.append(parameter)

    def checked(self, batch: Batch) -> Batch:
        """A batch that is about to be run, its signature that of the parameters that are trained
        now. Raises as `check`.
        """
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
        elsewhere = self._seen_elsewhere()
        if flags == self._flags and elsewhere == self._flags_elsewhere:
            return
        rows = zip(self._elsewhere, elsewhere, self._flags_elsewhere, strict=True)
        moved = [(name, now) for name, now, then in rows if now is not None and now != then]
        # All processes refuse together what one of them cannot do.
        self._check_stream([name for name, now in moved if now and name in self._frozen_elsewhere])
        self._flags_elsewhere = elsewhere
        if flags != self._flags:
            self._take_over()
        elif not moved:  # parameters that nothing refers to any more
            return
        self.epoch += 1
        self.together.epoch = self.epoch

    def _take_over(self) -> None:
        """Let all holders of a parameter that was changed have what one of them has."""
        before = dict(zip(map(id, self._watched), self._flags, strict=True))
        changed = {
            name: not before[id(holders[0])]
            for name, holders in self._holders.items()
            if any(each.requires_grad != before[id(each)] for each in holders)
        }
        self._check_stream(self._newly_trained([name for name, now in changed.items() if now]))
        for name, wanted in changed.items():
            for parameter in self._holders[name]:
                parameter.requires_grad_(wanted)
        self._flags = [each.requires_grad for each in self._watched]
        self._refresh({name for name, wanted in changed.items() if wanted})

    def _newly_trained(self, thawed: list[str]) -> list[str]:
        """Those of some parameters held here that the stages did not train when they were made."""
        known = {
            id(parameter) for stage in self.made.stages for parameter in stage.update.parameters
        }
        return [name for name in thawed if id(self._holders[name][0]) not in known]

    def _check_stream(self, new: list[str]) -> None:
        schedule = self.made.setting.schedule
        if not new or schedule.stream is None or not self.made.steps:
            return
        raise SettingError(
            f"{', '.join(new[:3])}{', ...' if len(new) > 3 else ''} had requires_grad=False when the pipeline was made, and now "
            f"True: {schedule.name} is asynchronous and keeps versions of the weights that it was made with. Make a new Pipeline "
            "after requires_grad_(True), or take a synchronous schedule"
        )

    def _refresh(self, thawed: set[str]) -> None:
        for stage in self.made.stages:
            stage.update.refresh()
        for rank, interpreter in self.made.interpreters.items():
            for copies in (*interpreter.copies.values(), *self.made.wave_replicas[rank].values()):
                copies.refresh()
            if rank in self.made.tied:
                self.made.tied[rank].refresh()
        self.together.trained |= thawed
