"""Penstock, by its public interface: a process per stage, or one process for all (`ps.Pipe`)."""

from __future__ import annotations

from torch import Tensor, nn

from penstock.peers.catalogue import Step, register
from penstock.peers.job import Job, join
from penstock.peers.setup import Setup
from penstock.schedule.op import Schedule

#: Schedules with one stage per rank, with two, and the planner's choice.
_ONE_STAGE = ("1f1b", "gpipe", "eager-1f1b", "zb-h1", "zb-h2")
_TWO_STAGES = ("interleaved", "breadth-first", "zb-v", "v-half", "v-min", "dualpipe-v")
SCHEDULES = (*_ONE_STAGE, *_TWO_STAGES, "auto")


def _refuse(setup: Setup) -> str | None:
    """Return why Penstock cannot run a setup here."""
    if setup.schedule == "auto" and setup.plan is None:
        return "no plan was made"
    if setup.schedule in _TWO_STAGES and setup.halves is None:
        return f"the model has too few layers for {2 * setup.stages} stages"
    return None


@register(
    "penstock",
    about="ps.Pipeline, one process per rank; auto: schedule, cut and copies are the planner's",
    imports=("torch.distributed", "penstock.runtime.pipeline"),
    schedules=SCHEDULES,
    two_stages=_TWO_STAGES,
    refuses=_refuse,
)
def make(job: Job) -> Step:
    """Make a pipeline of a named schedule on the common cut, or of the plan."""
    from penstock.plan.plan import Plan
    from penstock.runtime.pipeline import Pipeline

    setup = job.setup
    if job.spec.ranks > 1 or setup.schedule != "auto":
        join(job)
    if setup.schedule == "auto":
        assert setup.plan is not None
        network = nn.Sequential(*job.layers())
        plan = Plan.load(setup.plan)
        pipe = Pipeline(network, plan, loss=job.loss, optimizer=job.optimizer)
    else:
        lengths = setup.halves if setup.schedule in _TWO_STAGES else setup.lengths
        assert lengths is not None
        pipe = Pipeline(
            nn.Sequential(*job.layers()),
            loss=job.loss,
            optimizer=job.optimizer,
            balance=lengths,
            schedule=_schedule(setup, len(lengths)),
            micro_batches=setup.micro_batches,
        )

    def step(inputs: Tensor, targets: Tensor) -> Tensor | None:
        """Train one batch."""
        return pipe.train_batch(inputs, targets)

    return step


def _schedule(setup: Setup, stages: int) -> Schedule:
    """Return the schedule of a run."""
    from penstock.search.schedules import schedule

    if setup.schedule in ("interleaved", "breadth-first"):
        return schedule(
            setup.schedule,
            stages=stages,
            micro_batches=setup.micro_batches,
            chunks=2,
        )
    return schedule(setup.schedule, stages=stages, micro_batches=setup.micro_batches)


@register(
    "penstock-pipe",
    about="ps.Pipe: all stages in one process, GPipe's schedule",
    imports=("penstock.pipe.pipe",),
    schedules=("gpipe",),
    options={"checkpoint": ("except_last", "never", "always")},
    processes="one",
)
def make_pipe(job: Job) -> Step:
    """Make a module that is called like the model."""
    from penstock.pipe.pipe import Pipe

    setup = job.setup
    pipe = Pipe(
        nn.Sequential(*job.layers()),
        balance=setup.lengths,
        chunks=setup.micro_batches,
        checkpoint=str(job.option("checkpoint", "except_last")),
    )
    return job.training_step(pipe)
