"""Ranks that Slurm's `srun` has started: its variables as those of torchrun."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from penstock.errors import RunError

#: Ports are derived from the number of the job, so that two jobs on one host do not meet. Below
#: 32768, where Linux begins to hand out ports by itself.
_FIRST_PORT, _PORTS = 20_000, 12_000

#: Variables with the hosts of a job step, in the order of preference.
_HOST_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")


def started_by_srun(environment: Mapping[str, str]) -> bool:
    """Whether srun has started several tasks, and nothing else has set the variables of torchrun.

    SLURM_STEP_NUM_TASKS is set by srun only; the other variables are there in batch scripts, too.
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "")
    return "RANK" not in environment and tasks.isdigit() and int(tasks) > 1


def rank_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of torchrun for a task of srun. MASTER_ADDR and MASTER_PORT stay if set.

    Raises:
        RunError: a variable of Slurm is missing or damaged.
    """
    try:
        hosts = next(environment[name] for name in _HOST_LISTS if name in environment)
        job, step = int(environment["SLURM_JOB_ID"]), int(environment.get("SLURM_STEP_ID", "0"))
        variables = {
            "RANK": environment["SLURM_PROCID"],
            "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
            "LOCAL_RANK": environment["SLURM_LOCALID"],
            "MASTER_ADDR": first_host(hosts),
            # 101 is prime, so that the steps of jobs with neighbouring numbers get other ports.
            "MASTER_PORT": str(_FIRST_PORT + (job + 101 * step) % _PORTS),
        }
    except (KeyError, ValueError, StopIteration) as error:
        raise RunError(
            f"srun has started this process, but a variable of Slurm is missing or damaged "
            f"({error}): set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or start "
            "torchrun by srun"
        ) from error
    return {name: environment.get(name, value) for name, value in variables.items()}


def first_host(hosts: str) -> str:
    """Return the first host of a list of Slurm.

    >>> first_host("gpu[07-09,12],login"), first_host("a,b"), first_host("r[1-2]n[03-04]-ib")
    ('gpu07', 'a', 'r1n03-ib')

    Raises:
        ValueError: there is none.
    """
    # The first comma outside of brackets ends the first name.
    match = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", hosts)
    if match is None:
        raise ValueError(f"no host in {hosts!r}")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0])


def adopt_srun() -> None:
    """Set the variables of torchrun in this process if srun has started it.

    Raises:
        RunError: see `rank_variables`.
    """
    if started_by_srun(os.environ):
        os.environ.update(rank_variables(os.environ))
