"""Training that goes on by itself: after failures, with fewer or more ranks, and until a signal.

Each attempt is a launch of all ranks. Between two attempts the run continues from its newest whole
checkpoint, which knows no cut, so the next attempt may have another plan. Where stages have copies
on several ranks, the state of the ranks that are left takes the place of the checkpoint.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import FrameType

from penstock.checkpoint.series import newest_whole
from penstock.errors import FileError, PenstockError, RankDied, RunError, RunStopped
from penstock.ranks.processes.forked_ranks import RankProcess
from penstock.training.job import Prepared, replan, train_once, write_plan
from penstock.training.loop.rank_result import RankResult
from penstock.training.measurement import Say
from penstock.training.recovery.live_recovery import LiveRecovery
from penstock.training.resume import complete_metrics, drop_later_metrics
from penstock.training.run_checkpoints import checkpoint_folders, newest_checkpoint, take_request

#: File in the run's folder with a line for every restart.
LOG = "restarts.jsonl"


@dataclass
class _Signals:
    """Signals to the launcher, which it passes on to the ranks of the present attempt.

    Attributes:
        processes: the processes of the ranks.
        ended: whether SIGTERM has arrived.
    """

    processes: Sequence[RankProcess] = ()
    ended: bool = False

    def start(self, processes: Sequence[RankProcess]) -> None:
        """Take over the processes of a new attempt."""
        self.processes = processes
        # It has arrived between two attempts, when there was no rank to pass it on to.
        if self.ended:
            raise SystemExit(128 + signal.SIGTERM)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on; a second SIGTERM ends the launcher at once."""
        del frame
        if number == signal.SIGTERM:
            if self.ended:
                raise SystemExit(128 + signal.SIGTERM)
            self.ended = True
        for process in self.processes:
            process.send_signal(number)


@contextmanager
def _forward_signals() -> Iterator[_Signals]:
    """Pass SIGTERM and SIGUSR1 on to the ranks within a `with` block."""
    signals = _Signals()
    previous = {}
    # A ValueError tells that this is not the main thread: no other handles signals in Python.
    with suppress(ValueError):
        for number in (signal.SIGTERM, signal.SIGUSR1):
            previous[number] = signal.signal(number, signals.handle)
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@dataclass
class _Attempts:
    """The attempts of a run.

    Attributes:
        first: the run as it was planned first.
        present: the run as it is planned now.
        say: receives progress messages.
        count: restarts so far.
        failure: message of the last failure, with the step of the checkpoint it left.
        recovery: what the ranks of an attempt have left in memory.
    """

    first: Prepared
    present: Prepared
    say: Say
    count: int = 0
    failure: tuple[str, int] | None = field(default=None)
    recovery: LiveRecovery = field(default_factory=LiveRecovery)

    def attempt(self) -> Prepared:
        """Return the next attempt. Its ranks hand over their state if it may be restarted."""
        present, config = self.present, self.first.config
        # A part of the optimizer state has no copy if copies of a stage divide it.
        divided = present.plan.zero if config.zero is None else config.zero
        may_restart = self.count < config.max_restarts and not divided
        self.recovery.prepare(present.plan, present.devices, may_restart=may_restart)
        return replace(present, recovery=self.recovery)

    def restart(self, error: RunError) -> None:
        """Prepare the next attempt after a failure.

        Raises:
            RunError: the failure itself, if there may be no further attempt.
        """
        config = self.first.config
        if self.count >= config.max_restarts:
            self._say_where_to_continue()
            raise error
        reason = str(error)
        recovered = self._continue_from_memory()
        step = self._continue_from_checkpoint() if recovered is None else recovered
        # The same failure at the same step: the next attempt would fail likewise.
        if self.failure == (reason, step):
            error.add_note("the run failed in the same way twice, and was not restarted again")
            raise error
        self.failure = (reason, step)
        self.count += 1
        if isinstance(error, RankDied):
            self._remove_rank()
        source = "" if recovered is None else ", which the remaining ranks had in memory"
        self.say(
            f"{reason}\nrestart {self.count} of {config.max_restarts}: "
            f"{self.present.plan.ranks} ranks continue from step {step}{source}"
        )
        self._log(step, reason, "checkpoint" if recovered is None else "memory")

    def resize(self, ranks: int) -> None:
        """Prepare the next attempt with another number of ranks, which the user has asked for."""
        step = self._continue_from_checkpoint()
        if not self._with_ranks(ranks):
            self.say(f"{ranks} ranks cannot run this model: the number stays as it is")
        self.say(f"{self.present.plan.ranks} ranks continue from step {step}")
        self._log(step, f"resize to {ranks} ranks")

    def _remove_rank(self) -> None:
        """Plan for one rank fewer after the loss of a rank, if the user allows it."""
        # Counted with those that the plan leaves idle, which another plan may use.
        fewer, fewest = self.present.cluster.ranks - 1, self.first.config.min_ranks
        if fewest is not None and fewer >= fewest and not self._with_ranks(fewer):
            self.say(f"{fewer} ranks cannot run this model: the lost rank is replaced")

    def _say_where_to_continue(self) -> None:
        """Name the last whole checkpoint of a run that has failed, if there is one."""
        folder = self.present.folder
        try:
            step = newest_checkpoint(folder, self.say).step if checkpoint_folders(folder) else None
        except FileError as problem:
            self.say(str(problem))
            return
        if step is not None:
            self.say(
                f"the last whole checkpoint is of step {step}; to continue from it: penstock train "
                f"--resume {folder}"
            )

    def _continue_from_memory(self) -> int | None:
        """Let the next attempt begin with the state that the remaining ranks have handed over.

        Returns:
            Its step; None if there is no such state, or a checkpoint is as new.
        """
        recovery, folder = self.recovery, self.present.folder
        if recovery.problem:
            self.say(
                f"the state that the other ranks have in memory is not used: {recovery.problem}"
            )
        live = recovery.checkpoint
        if live is None or not live.whole:
            return None
        saved = newest_whole(checkpoint_folders(folder))
        if saved is not None and saved.step >= live.step:
            recovery.close()
            return None
        try:
            complete_metrics(folder, live.step, live.lines)
        except OSError as error:
            self.say(f"cannot write the metrics in {folder}: {error.strerror}")
            recovery.close()
            return None
        config = replace(self.present.config, resume=True, out=str(folder))
        self.present = replace(self.present, config=config)
        return live.step

    def _continue_from_checkpoint(self) -> int:
        """Let the next attempt begin at the newest whole checkpoint, or anew if there is none.

        Returns:
            The step of the checkpoint, or 0.

        Raises:
            FileError: there are checkpoints, and none of them is whole.
        """
        folder = self.present.folder
        if checkpoint_folders(folder):
            step = newest_checkpoint(folder, self.say).step
        else:
            step = 0
            drop_later_metrics(folder, 0)
        config = replace(self.present.config, resume=step > 0, out=str(folder))
        self.present = replace(self.present, config=config)
        return step

    def _with_ranks(self, ranks: int) -> bool:
        """Plan for another number of ranks. Returns False if that cannot be."""
        resume = self.present.config.resume
        try:
            if ranks < 1:
                return False
            first = self.first
            planned = first if ranks == first.cluster.ranks else replan(first, ranks)
            config = replace(planned.config, resume=resume, out=str(planned.folder))
            planned = replace(planned, config=config)
            write_plan(planned)
        except PenstockError as error:
            self.say(str(error))
            return False
        if planned.plan.ranks != ranks:
            self.say(f"the planner leaves {ranks - planned.plan.ranks} of {ranks} ranks idle")
        self.present = planned
        return True

    def _log(self, step: int, reason: str, source: str = "checkpoint") -> None:
        """Write a line about the next attempt. A full disk does not keep it from starting."""
        ranks = self.present.plan.ranks
        line = {"step": step, "source": source, "ranks": ranks, "reason": reason}
        path = self.present.folder / LOG
        try:
            with path.open("a") as log:
                log.write(json.dumps(line) + "\n")
        except OSError as error:
            self.say(f"cannot write {path}: {error.strerror}")


def train_with_restarts(
    prepared: Prepared, say: Say, quiet: bool = False
) -> tuple[Prepared, list[RankResult]]:
    """Train to the end of a run, with restarts as its configuration allows.

    SIGTERM to this process is passed on to the ranks, which save and end; a second one ends them
    without saving. SIGUSR1 is passed on as well: the ranks save and go on.

    Args:
        prepared: of `prepare`.
        say: receives progress messages.
        quiet: show no progress bar.

    Returns:
        The run as it was planned last, and the results of all processes.

    Raises:
        RunStopped: a signal has ended the run.
        RunError: a rank failed, and there are no restarts left.
    """
    attempts = _Attempts(prepared, prepared, say)
    with _forward_signals() as signals, closing(attempts.recovery):
        while True:
            try:
                results = train_once(attempts.attempt(), quiet, signals.start)
            except RunError as error:
                if signals.ended:
                    raise
                attempts.restart(error)
                continue
            first = results[0]
            if not first.stopped:
                return attempts.present, results
            ranks = _requested_ranks(prepared, say)
            if signals.ended or ranks is None:
                raise RunStopped(str(prepared.folder), first.steps, "SIGTERM")
            attempts.resize(ranks)


def _requested_ranks(prepared: Prepared, say: Say) -> int | None:
    """Return the number of ranks that the user has asked for; None if that was not asked."""
    try:
        return take_request(prepared.folder)
    except FileError as error:
        say(str(error))
        return prepared.plan.ranks
