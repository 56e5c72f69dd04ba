"""What a `Pipeline` keeps from one process to the next: checkpoints, and the learning-rate
schedulers that go on from them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import SettingError
from penstock.optim.schedulers import SchedulerFactory, Schedulers
from penstock.runtime import checkpoint, checkpoint_load
from penstock.runtime.assembly import Assembly
from penstock.runtime.checkpoint import Progress, Terms, Versioned, parse_skip
from penstock.runtime.checkpoint_files import RuleFacts
from penstock.runtime.checkpoint_fit import saved_kind
from penstock.runtime.streaming import Streaming
from penstock.runtime.together import Together


@dataclass
class Persistence:
    """Checkpoints of one pipeline.

    Attributes:
        made: its ranks.
        together: its scaler.
        stream: of an asynchronous schedule.
        schedulers: its learning-rate schedulers, in the order in which they were made.
        progress: of the checkpoint that was loaded last.
    """

    made: Assembly
    together: Together
    stream: Streaming | None = None
    schedulers: list[Schedulers] = field(default_factory=list)
    progress: Progress = field(default_factory=lambda: Progress(0))

    def scheduler(self, make: SchedulerFactory) -> Schedulers:
        """See `Pipeline.scheduler`."""
        number = len(self.schedulers)
        saved = self.progress.schedulers[number] if number < len(self.progress.schedulers) else None
        kind = saved_kind(self.progress.scheduler_kinds, number)
        self.schedulers.append(Schedulers(make, self.made.optimizers(), saved, kind))
        return self.schedulers[-1]

    def check_schedulers(self) -> None:
        """Before training: every scheduler of the checkpoint that was loaded has been made again.

        Raises:
            SettingError: the learning rate would stay for ever what it was when the checkpoint was
            taken.
        """
        missing = self.progress.schedulers[len(self.schedulers) :]
        if missing and self.made.steps:
            kinds = self.progress.scheduler_kinds[len(self.schedulers) :]
            what = f" ({', '.join(kinds)})" if kinds else ""
            raise SettingError(
                f"the checkpoint of step {self.progress.step} has the state of {len(self.progress.schedulers)} learning-rate "
                f"schedulers, and {len(self.schedulers)} were made here: the learning rate would not move any more. Make the "
                f"missing one{what} by pipe.scheduler(...) before training, or load with skip='schedulers'"
            )

    def save(self, folder: str | Path, step: int, waiting: int, *, nonfinite: bool = False) -> None:
        """See `Pipeline.save`.

        Args:
            folder: where to.
            step: batches trained.
            waiting: batches whose gradients wait for their step.
            nonfinite: whether NaN values may be written.
        """
        if waiting and self.made.steps:
            raise SettingError(
                f"the gradients of {waiting} batches wait for their step, and a checkpoint does not hold gradients: training would "
                "go on from it without them. Save after the step, or call update() or zero_grad() before save()"
            )
        own = self.schedulers
        texts = self.made.broadcast_texts(
            [*(each.as_json() for each in own), *(each.kind for each in own)]
        )
        # Of schedulers that nobody has made again since the load, the state goes on as it is.
        later = slice(len(own), None)
        progress = Progress(
            step,
            self.together.state(),
            texts[: len(own)] + self.progress.schedulers[later],
            texts[len(own) :] + self.progress.scheduler_kinds[later],
        )
        terms = Terms(self._rule(), self.made.lives, nonfinite)
        made = self.made
        checkpoint.save(Path(folder), made.world, made.placed, progress, made.versioned(), terms)

    def load(
        self, folder: str | Path, *, skip: str | Collection[str] = (), nonfinite: bool = False
    ) -> int:
        """See `Pipeline.load`; returns the step."""
        parts = parse_skip(skip)
        terms = Terms(
            self._rule(),
            self.made.lives,
            nonfinite,
            parts,
            self.schedulers,
            self.together.scaler is not None,
        )
        content = checkpoint_load.load(
            Path(folder),
            self.made.world,
            self.made.placed,
            self.made.versioned(),
            terms,
            None if self.stream is None else self._begin_anew,
        )
        self.progress = content
        self.together.restore(content.scaler)
        for each, text in zip(self.schedulers, content.schedulers, strict=False):
            each.load_json(text)
        return content.step

    def _begin_anew(self) -> Sequence[Versioned]:
        assert self.stream is not None
        self.stream.begin_anew()
        return self.made.let_read()

    def _rule(self) -> RuleFacts | None:
        stream = self.made.setting.schedule.stream
        if stream is None:
            return None
        return RuleFacts(self.made.setting.weights, stream.pipelines, self.made.lives)
