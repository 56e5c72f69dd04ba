"""A run obeys the devices of its plan: rank r of the run is device r of the cluster, and plays what
the plan has for that device.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

import penstock as ps
from penstock.errors import PlanError, ScheduleError, SettingError
from penstock.profile.profile import LayerProfile, Profile, Timing
from penstock.search.best_plan import plan_proposal
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def data():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)


def plan_of(schedule="1f1b", lengths=(3, 2), ranks=2, **options):
    """A plan for the model on so many devices, of costs that nobody measured."""
    traced = ps.chain(model())

    def timing(seconds):
        return Timing((1, 8), (seconds, 8 * seconds))

    layers = tuple(
        LayerProfile(
            layer.name,
            layer.kind,
            timing(1e-3),
            timing(2e-3),
            timing(1e-3),
            timing(1e-3),
            weights.parameters,
            weights.parameter_bytes,
            0,
            16.0,
            16.0,
        )
        for layer, weights in zip(traced.layers, traced.description.weights, strict=True)
    )
    profile = Profile(layers, traced.fingerprint, 16.0, 8)
    request = PlanRequest(profile, ps.cluster(f"{ranks}xV100-NVLink"), 8)
    return plan_proposal(request, Proposal(lengths, schedule, 4, **options))


def pipeline(plan, **options):
    options = {"executor": "threads", **options}
    return ps.Pipeline(model(), plan, loss=functional.mse_loss, **options)


def gradients(pipe):
    return {name: parameter.grad.clone() for name, parameter in pipe.named_parameters()}


@pytest.mark.parametrize(
    ("schedule", "lengths", "devices"),
    [
        ("1f1b", (3, 2), (1, 0)),
        ("zb-h1", (2, 2, 1), (2, 0, 1)),
        ("chimera", (3, 2), (1, 0)),
        ("bpipe", (2, 1, 1, 1), (3, 1, 0, 2)),
        ("interleaved", (1, 2, 1, 1), (1, 0)),
    ],
)
def test_every_rank_plays_the_program_of_its_device(schedule, lengths, devices):
    """Losses, gradients, outputs and timeline are those of the plan with its ranks in order, each
    on another rank.
    """
    plain = plan_of(schedule, lengths, len(devices))
    moved = replace(plain, devices=devices)
    x, y = data()
    one, other = pipeline(plain), pipeline(moved)
    for rank, device in enumerate(devices):
        assert other.setting.schedule.programs[device] == one.setting.schedule.programs[rank]
    assert torch.equal(one.train_batch(x, y), other.train_batch(x, y))
    other_gradients = gradients(other)
    assert all(
        torch.allclose(other_gradients[name], grad, atol=1e-7)
        for name, grad in gradients(one).items()
    )
    assert torch.allclose(one.forward(x), other.forward(x), atol=1e-6)
    peaks = other.timeline().peak_memory
    assert [peaks[device] for device in devices] == list(one.timeline().peak_memory)


def test_devices_in_order_change_nothing():
    """The usual plan says nothing of devices, and one that spells them out is the same."""
    plain = plan_of()
    spelt = pipeline(replace(plain, devices=(0, 1)))
    assert spelt.setting.schedule == pipeline(plain).setting.schedule


def test_threads_of_one_process_run_a_plan_for_some_of_the_devices():
    """One process has one device, and the numbers do not depend on it."""
    x, y = data()
    plan = replace(plan_of(), cluster_ranks=4, devices=(3, 1))
    assert torch.equal(pipeline(plan).train_batch(x, y), pipeline(plan_of()).train_batch(x, y))


@pytest.mark.parametrize("devices", [(0, 0), (0, 2), (0,), (-1, 0)])
def test_devices_that_are_not_there_are_refused(devices):
    """A plan that was made or changed by hand may name any."""
    with pytest.raises(PlanError, match=r"must be 2 different ones of the 2 of 2xV100-NVLink"):
        pipeline(replace(plan_of(), devices=devices))


def test_a_plan_of_one_rank_for_another_device_than_the_first_is_refused():
    """This process would run it wherever it is; by device= the caller says where that is."""
    plan = replace(plan_of("1f1b", (5,), 1), cluster_ranks=2, devices=(1,))
    with pytest.raises(PlanError, match=r"for device 1 of its cluster.*cluster\.on\(\(1,\)\)"):
        pipeline(plan, executor=None)
    assert pipeline(plan, executor=None, device="cpu").train_batch(*data()) > 0


def test_a_schedule_moves_to_other_ranks_by_a_permutation_only():
    """Two programs cannot be on one rank."""
    schedule = ps.schedule("1f1b", 2, 2)
    assert schedule.on_ranks((1, 0)).programs == schedule.programs[::-1]
    with pytest.raises(
        ScheduleError, match=r"\[0, 0\] is not a permutation of the 2 ranks of 1f1b"
    ):
        schedule.on_ranks((0, 0))


def _stage_of_rank():
    import torch.distributed as dist

    pipe = pipeline(replace(plan_of(), devices=(1, 0)), executor="processes", deadline_s=60)
    loss = pipe.train_batch(*data())
    message = ""
    try:
        pipeline(replace(plan_of(), cluster_ranks=4, devices=(1, 3)), executor="processes")
    except PlanError as error:
        message = str(error)
    return dist.get_rank(), [stage.index for stage in pipe._assembly.stages], float(loss), message


def test_processes_obey_the_devices():
    """Process 1 is device 1, which the plan gives the first stage; and a plan for devices 1 and 3
    does not say which processes these are.
    """
    results = ps.launch(_stage_of_rank, ranks=2)
    assert [(rank, stages) for rank, stages, *_ in results] == [(0, [1]), (1, [0])]
    loss = float(pipeline(plan_of()).train_batch(*data()))
    assert all(result[2] == pytest.approx(loss) for result in results)
    assert all("the plan is for devices 1, 3 of its cluster" in result[3] for result in results)


def test_an_optimizer_that_needs_more_than_the_plan_s_memory_is_refused():
    """Adam keeps two numbers for each parameter, where the plan has one; a rank would not fit."""
    plan = plan_of()
    assert (plan.optimizer, plan.optimizer_states) == ("", 1.0)
    tight = replace(plan, memory_limits=tuple(peak + 10 for peak in plan.predicted.peak_memory))

    def adam(parameters):
        return torch.optim.Adam(parameters)

    def momentum(parameters):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    pipeline(plan, optimizer=adam)
    pipeline(tight, optimizer=momentum)
    with pytest.raises(
        PlanError, match=r"keeps 1 number for each parameter .* and Adam keeps 2:\n  rank 0 would"
    ) as caught:
        pipeline(tight, optimizer=adam)
    assert "ps.plan(…, optimizer='adam')" in str(caught.value)


def test_balance_beside_a_plan_is_refused_as_before():
    """The plan says it all."""
    with pytest.raises(SettingError, match="the plan already says balance"):
        pipeline(plan_of(), balance=[3, 2])
