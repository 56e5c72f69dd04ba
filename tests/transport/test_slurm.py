"""Tasks of srun are ranks, as those of torchrun are."""

from __future__ import annotations

import pytest

from penstock.errors import RunError
from penstock.transport import slurm
from penstock.transport.slurm import adopt_srun, first_host, rank_variables, started_by_srun

#: What srun sets for the last of four tasks on two hosts, in a job of 16 tasks on three.
TASK = {
    "SLURM_NTASKS": "16",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_JOB_NODELIST": "gpu[07-09]",
}


def test_the_variables_of_slurm_become_those_of_torchrun():
    """All tasks meet at the first host of the step."""
    assert started_by_srun(TASK)
    variables = rank_variables(TASK)
    assert (
        variables.pop("MASTER_PORT") == rank_variables({**TASK, "SLURM_PROCID": "0"})["MASTER_PORT"]
    )
    assert variables == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu07",
    }


def test_an_address_that_is_set_is_used():
    """Hosts may have several networks, of which the user names one."""
    variables = rank_variables({**TASK, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4242"})
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("10.0.0.7", "4242")


@pytest.mark.parametrize("job", [1, 11_999, 12_000, 987_654_321])
def test_ports_are_below_those_that_linux_hands_out(job):
    """A port that another connection happens to have would end the job."""
    port = int(rank_variables({**TASK, "SLURM_JOB_ID": str(job)})["MASTER_PORT"])
    assert 20_000 <= port < 32_768


@pytest.mark.parametrize(
    "change",
    [{"RANK": "0"}, {"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_STEP_NUM_TASKS": ""}],
)
def test_a_process_that_is_alone_or_under_torchrun_is_not_a_task(change):
    """Nor is a batch script, in which srun has not set the number of tasks of a step."""
    assert not started_by_srun({**TASK, **change})
    assert not started_by_srun({name: TASK[name] for name in TASK if "STEP" not in name})


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("gpu[07-09,12],login", "gpu07"),
        ("r[1-2]n[03-04]-ib,x", "r1n03-ib"),
    ],
)
def test_the_first_host_of_a_list(hosts, first):
    """As `scontrol show hostnames` prints it."""
    assert first_host(hosts) == first


@pytest.mark.parametrize("missing", ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID"])
def test_a_missing_variable_is_refused_with_what_to_do(missing):
    """Some sites remove variables of Slurm."""
    environment = {name: value for name, value in TASK.items() if name != missing}
    with pytest.raises(RunError, match=r"is missing or damaged.*set RANK, WORLD_SIZE"):
        rank_variables(environment)


def test_steps_of_jobs_with_neighbouring_numbers_have_other_ports():
    """Two jobs of ten steps each may share a host."""
    ports = {
        rank_variables({**TASK, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)})[
            "MASTER_PORT"
        ]
        for job in range(500, 510)
        for step in range(10)
    }
    assert len(ports) == 100


@pytest.mark.parametrize(
    ("names", "first"),
    [
        (["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"], "step"),
        (["SLURM_JOB_NODELIST", "SLURM_NODELIST"], "job"),
        (["SLURM_NODELIST"], "old"),
    ],
)
def test_the_hosts_of_the_step_come_before_those_of_the_job(names, first):
    """A step may run on some of the job's hosts, and all of its tasks must meet at one of them."""
    hosts = {"STEP_": "step,a", "JOB_": "job,a", "": "old,a"}
    environment = {name: value for name, value in TASK.items() if "NODELIST" not in name}
    environment |= {
        f"SLURM_{part}NODELIST": value
        for part, value in hosts.items()
        if f"SLURM_{part}NODELIST" in names
    }
    assert rank_variables(environment)["MASTER_ADDR"] == first


def test_without_any_hosts_or_with_an_empty_list_the_variables_are_refused():
    """There is nowhere to meet."""
    environment = {name: value for name, value in TASK.items() if "NODELIST" not in name}
    for change in ({}, {"SLURM_NODELIST": ""}, {"SLURM_NODELIST": ",a"}):
        with pytest.raises(RunError, match="is missing or damaged"):
            rank_variables({**environment, **change})
    with pytest.raises(ValueError, match="no host in ''"):
        first_host("")


def test_a_step_without_a_number_is_the_first():
    """Old versions do not set it."""
    environment = {name: value for name, value in TASK.items() if name != "SLURM_STEP_ID"}
    assert rank_variables(environment) == rank_variables(TASK)
    assert rank_variables(TASK)["MASTER_PORT"] == str(20_000 + 4711)
    later = rank_variables({**TASK, "SLURM_STEP_ID": "200"})["MASTER_PORT"]
    assert later == str(20_000 + (4711 + 101 * 200) % 12_000)


def test_variables_are_set_only_in_a_task_of_srun(monkeypatch):
    """torchrun's own must not be replaced."""
    environment = dict(TASK)
    monkeypatch.setattr(slurm.os, "environ", environment)
    adopt_srun()
    assert {name: environment[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
    }
    adopted = dict(environment)
    environment["SLURM_PROCID"] = "0"
    adopt_srun()
    assert environment == {**adopted, "SLURM_PROCID": "0"}
