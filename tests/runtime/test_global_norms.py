"""The norm of the gradients of all ranks: exchange, order, padding and lost ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from tests.runtime.global_run import GRADIENTS, HOLDERS, Run, global_norm
from torch import nn

import penstock as ps
from penstock.errors import PeerFailed
from penstock.runtime import global_step
from penstock.runtime.global_step import _without_padding
from penstock.transport.transport import TransportLost


def test_unscaling_covers_all_stages_of_a_rank_and_reports_an_overflow():
    """Each stage's part is added up, on every rank."""
    overflow = {0: 0.0, 1: 0.0, 2: 1.0, 3: 0.0}
    run = Run(HOLDERS, GRADIENTS)
    index_of = {id(stage.update.parameters): stage.index for stage in run.assembly.stages}
    unscaled = []

    def unscale(parameters, device):
        unscaled.append(index_of[id(parameters)])
        return torch.tensor([overflow[index_of[id(parameters)]]])

    run.step.scaler = SimpleNamespace(unscale=unscale)
    results = run.run()
    assert [nonfinite for _, nonfinite in results] == [1.0] * 3
    assert sorted(unscaled) == [0, 1, 1, 2, 3, 3]
    overflow[2] = 0.0
    assert [nonfinite for _, nonfinite in run.run()] == [0.0] * 3


def test_processes_that_share_layers_agree_on_norms_and_overflows_once():
    """The same processes share all stages of a rank."""
    run = Run([(0,), (0,)], [[[3.0, 0.0]], [[0.0, 4.0]]], policy="skip")
    log = run.logs[0]

    def share(total):
        log.append(("shared", total.item()))
        return total * 2

    parallel = SimpleNamespace(
        sum_over_tensor_ranks=lambda nonfinite: log.append(("summed", nonfinite.item())),
        share_over_tensor_ranks=share,
    )
    run.assembly.interpreters[0].parallel = {0: parallel, 1: parallel}
    ((norm, nonfinite),) = run.run()
    assert (norm.item(), nonfinite) == (10.0, 0.0)
    assert [entry for entry in log if entry[0] in ("summed", "shared")] == [
        ("summed", 0.0),
        ("shared", 5.0),
    ]


def test_padding_is_told_from_norms_by_its_sign_and_nan_stays():
    """A norm of 0 and one that is not a number count."""
    norms = torch.tensor([0.0, 2.0, float("nan"), -1.0, -1.0])
    norms_left = _without_padding(norms, 2.0)
    assert norms_left[:2].tolist() == [0.0, 2.0]
    assert norms_left[2:].isnan().tolist() == [True]


def test_norms_are_added_in_the_order_of_the_stages_whatever_ranks_have_them(monkeypatch):
    """Sums round by their order: the norm would depend on the placement."""
    added = []

    def total_norm(norms, norm_type):
        added.append([len(row) for row in norms])
        return torch.cat(list(norms)).norm()

    monkeypatch.setattr(global_step, "total_norm", total_norm)
    # Every stage has another number of parameters; rank 0 has the first and the last one.
    pipe = ps.Pipeline(
        [nn.Linear(2, 2, bias=False) for _ in range(10)],
        balance=[1, 4, 2, 3],
        schedule=ps.Schedule.parse(
            "0F0 3F0 3B0 0B0 3U1 0U1\n1F0 1B0 1U1\n2F0 2B0 2U1",
        ),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        clip_grad_norm=1.0,
        executor="threads",
        device="cpu",
    )
    pipe.train_batch(torch.ones(2, 2), torch.ones(2, 2))
    assert added == [[1, 4, 2, 3]]


def test_norms_are_those_of_the_parameters_that_are_trained_now():
    """After a freeze or thaw the messages have other lengths, on all ranks at once."""
    run = Run(HOLDERS, GRADIENTS, clip_grad_norm=1e9)
    expected = [global_norm(2.0)]
    assert [norm.item() for norm, _ in run.run()] == pytest.approx(expected * 3)
    for epoch, change in enumerate((7.0, None, 9.0), 1):
        run.step.epoch = epoch
        for stage in run.assembly.stages:
            if stage.index != 1:
                continue
            if change is None:
                stage.update.parameters = stage.update.parameters[:1]
                continue
            parameter = nn.Parameter(torch.zeros(1))
            parameter.grad = torch.tensor([change])
            stage.update.parameters = [*stage.update.parameters[:1], parameter]
        square = global_norm(2.0) ** 2 + (change or 0.0) ** 2
        for _ in range(2):
            norms = [norm.item() for norm, _ in run.run()]
            assert norms == pytest.approx([square**0.5] * 3)


@pytest.mark.parametrize("parallel", [(), (1, 2, 3)])
def test_norms_of_a_stage_are_computed_once_and_by_all_processes_that_share_it(
    parallel, monkeypatch
):
    """Also on a rank that is not its home: a collective operation takes all of them."""
    run = Run(HOLDERS, GRADIENTS, clip_grad_norm=1.0)
    index_of = {id(stage.update.parameters): stage.index for stage in run.assembly.stages}
    stages = {rank: [] for rank in range(3)}
    norms_of = global_step.norms_of
    rank_of = {
        id(stage.update.parameters): rank
        for rank, interpreter in run.assembly.interpreters.items()
        for stage in interpreter.stages.values()
    }

    def recorded_norms_of(parameters, device, norm_type):
        stages[rank_of[id(parameters)]].append(index_of[id(parameters)])
        return norms_of(parameters, device, norm_type)

    monkeypatch.setattr(global_step, "norms_of", recorded_norms_of)
    group = SimpleNamespace(
        sum_over_tensor_ranks=lambda nonfinite: None, share_over_tensor_ranks=lambda total: total
    )
    for interpreter in run.assembly.interpreters.values():
        interpreter.parallel = {index: group for index in interpreter.stages if index in parallel}
    assert [norm.item() for norm, _ in run.run()] == pytest.approx([global_norm(2.0)] * 3)
    homes = {0: [0], 1: [1], 2: [2, 3]}
    shared = {0: [0, 3], 1: [1], 2: [1, 2, 3]}
    assert {rank: sorted(row) for rank, row in stages.items()} == (shared if parallel else homes)


class DeviceRow:
    """Norms on a device, whose values the host does not read."""

    device = SimpleNamespace(type="cuda")

    def __init__(self, name="norms"):
        self.name = name

    def __lt__(self, other):
        return DeviceRow(f"{self.name} < {other}")

    def __invert__(self):
        return DeviceRow(f"not {self.name}")

    def __getitem__(self, mask):
        return f"{self.name}[{mask.name}]"

    def masked_fill(self, mask, value):
        """Return what is filled."""
        return f"{self.name} with {value} where {mask.name}"


def test_padding_on_a_device_becomes_0_where_that_leaves_the_norm_as_it_is():
    """Exponents of 0 and below count entries: there the padding has to go."""
    assert _without_padding(DeviceRow(), 2.0) == "norms with 0.0 where norms < 0"
    for norm_type in (0.0, -1.0):
        assert _without_padding(DeviceRow(), norm_type) == "norms[not norms < 0]"


def test_ranks_that_check_nothing_take_part_in_the_norm():
    """Such as one whose stages have no parameters."""
    run = Run(HOLDERS, GRADIENTS, clip_grad_norm=1.0)
    for rank in (0, 1):
        run.assembly.interpreters[rank].finite = None
    assert [norm.item() for norm, _ in run.run()] == pytest.approx([global_norm(2.0)] * 3)


def test_norms_on_devices_are_those_of_the_option_and_of_the_epoch(monkeypatch):
    """No message is sent for them."""
    calls = []

    def device_norms(assembly, homes, norm_type):
        def total(interpreter, rows, nonfinite, epoch):
            calls.append((interpreter.rank, [row.tolist() for row in rows], epoch))
            return torch.tensor(7.0), nonfinite + 1

        calls.append((homes, norm_type))
        return SimpleNamespace(total=total)

    monkeypatch.setattr(global_step, "device_norms", device_norms)
    run = Run(HOLDERS, GRADIENTS, policy="skip", clip_grad_norm=1.0, clip_norm_type=1.0)
    assert calls.pop() == ({0: [0], 1: [1], 2: [2, 3]}, 1.0)
    run.step.epoch = 3
    norm, nonfinite = run.step.step(1)
    assert (norm.item(), nonfinite) == (7.0, 1.0)
    assert calls == [(1, [[3.0]], 3)]
    assert ("finish",) not in run.logs[1]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_rank_that_is_gone_is_named_by_those_that_wait_for_its_norms(rank):
    """Rank 0 waits for all others, these for rank 0."""
    run = Run(HOLDERS, GRADIENTS, clip_grad_norm=1.0)
    transport = run.assembly.interpreters[rank].transport
    transport.exchange.close("rank 9 ran away")
    with pytest.raises(PeerFailed) as e:
        run.step.step(rank)
    assert e.value.rank == rank
    assert e.value.waited_for == f"rank {0 if rank else 1}"


@pytest.mark.parametrize(("rank", "peer"), [(0, 2), (1, 0), (2, 0)])
def test_a_rank_to_which_nothing_can_be_sent_is_named(rank, peer):
    """Norms go to rank 0, and the answer to all others."""
    run = Run(HOLDERS, GRADIENTS, clip_grad_norm=1.0)
    transport = run.assembly.interpreters[rank].transport

    def send(to_rank, *args):
        if to_rank == peer:
            run.assembly.interpreters[rank].transport.exchange.close("gone")
            raise TransportLost("gone")
        return transport.send(to_rank, *args)

    run.assembly.interpreters[rank].transport = SimpleNamespace(
        post=transport.post, send=send, exchange=transport.exchange
    )
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(run.step.step, number) for number in range(3)]
    with pytest.raises(PeerFailed) as e:
        futures[rank].result()
    assert e.value.waited_for == f"rank {peer}"


@pytest.mark.parametrize(("norm_type", "expected"), [(float("-inf"), 3.0), (0.0, 2.0)])
def test_parameters_without_a_gradient_do_not_count_in_norms_of_small_exponents(
    norm_type, expected
):
    """The smallest absolute value, and the number of parameters with a gradient."""
    gradients = [[[3.0, 4.0]], [None, [5.0, 6.0]]]
    run = Run([(0,), (1,)], gradients, clip_grad_norm=1e9, clip_norm_type=norm_type)
    assert [norm.item() for norm, _ in run.run()] == [expected] * 2
