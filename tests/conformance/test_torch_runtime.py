"""Interchange: torch's own pipeline runtime plays our exported schedules, in both forms, and finds
the gradients that we find.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
from tests.conformance.reference import gradients
from tests.conformance.torch_ranks import FORMATS, LAYERS, Case, batch, play_all, small_model
from tests.selection import selected_parameters
from torch.nn import functional
from torch.torch_version import TorchVersion

import penstock as ps
from penstock.errors import ScheduleError
from penstock.ranks.processes.launch import launch
from penstock.schedule.op import Schedule
from penstock.schedule.torch_csv.actions import unsupported_reason
from penstock.schedule.torch_csv.files import from_csv, to_csv

MICRO_BATCHES = 8
MOST_RANKS = 4


#: Those that need costs are made to measure: what they are made of is in the others.
NAMES = [name for name, facts in ps.schedules().items() if not facts.needs_costs]


def sayable() -> dict[str, Schedule]:
    """Every schedule of the catalogue that torch's actions can say, on two ranks and on four as far
    as it goes that small.
    """
    schedules: dict[str, Schedule] = {}
    for name in NAMES:
        for stages in (2, 4, 8):
            try:
                candidate = ps.schedule(name, stages, MICRO_BATCHES)
                to_csv(candidate)
            except ScheduleError:
                continue
            if candidate.ranks in (2, MOST_RANKS):
                schedules.setdefault(f"{name}-{candidate.ranks}", candidate)
    return schedules


def by_hand() -> dict[str, Schedule]:
    """What the catalogue may happen not to have: other placements, overlaps, gradients in another
    order, another batch size.
    """
    zb_v = ps.schedule("zb-v", 4, MICRO_BATCHES)
    files = {
        "uneven": "0F0,1F0,0F1,1F1,3F0,3I0,3F1,3I1,3W1,3W0,1B0,0B0,1B1,0B1\n2F0,2F1,2B0,2B1",
        "both ends": "0F0,0F1,3F0,3B0,3F1,3B1,0B1,0B0\n1F0,1F1,2F0,2F1,2B0,2B1,1B1,1B0",
        "overlaps": "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n1F0,1B0,1F1,(1F2;1I1)OVERLAP_F_B,1B2,1W1",
    }
    return {
        "ranks in another order": replace(zb_v, programs=(zb_v.programs[1], zb_v.programs[0])),
        **{key: from_csv(text, key) for key, text in files.items()},
    }


SCHEDULES = sayable() | by_hand()


def ours(schedule: Schedule) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of one batch by Penstock."""
    model, (x, y) = small_model(), batch(schedule.micro_batches)
    balance = [LAYERS // schedule.stages] * schedule.stages
    pipe = ps.Pipeline(
        model, loss=functional.cross_entropy, balance=balance, schedule=schedule, executor="threads"
    )
    try:
        return pipe.train_batch(x, y), gradients(model)
    finally:
        pipe.close()


#: Sound ops, and files that torch plays, with other gradients and no error: what our writer and
#: reader refuse. Torch before 2.13 stops at the first ("has gradients None and is expecting to send
#: gradients to stage 0").
FAULTS = {
    "last stage out of order": (
        "0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1",
        (
            "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD\n"
            "1RECV_F0,1RECV_F1,1F1,1F0,1B0,1SEND_B0,1B1,1SEND_B1,1REDUCE_GRAD"
        ),
    ),
    "receives out of order": (
        "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1",
        (
            "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD\n"
            "1RECV_F1,1RECV_F0,1F0,1F1,1B0,1SEND_B0,1B1,1SEND_B1,1REDUCE_GRAD"
        ),
    ),
}


TORCH_PLAYS_FAULTS = TorchVersion(torch.__version__) >= (2, 13)


@pytest.fixture(scope="module")
def theirs(request, tmp_path_factory):
    """Loss and gradients of one batch by torch, by schedule and form; all ranks' together."""
    folder = tmp_path_factory.mktemp("torch")
    keys = [key for (key,) in selected_parameters(request, "key")]
    texts = {
        key: (to_csv(SCHEDULES[key]), to_csv(SCHEDULES[key], communication=True)) for key in keys
    } | (FAULTS if TORCH_PLAYS_FAULTS else {})
    cases = []
    for key, forms in texts.items():
        schedule = SCHEDULES.get(key) or from_csv(forms[0])
        case = Case(key, folder, schedule.stages, schedule.micro_batches, schedule.stages_of_rank)
        for form, text in zip(FORMATS, forms, strict=True):
            case.file(form).write_text(text)
        cases.append(case)
    results: dict = {}
    for rank in launch(play_all, MOST_RANKS, cases, threads=1):
        for key, value in rank.items():
            loss, total = results.get(key, (None, {}))
            results[key] = (value["loss"] if loss is None else loss, total | value["gradients"])
    return results


def error(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of gradients, by the largest of its parameter's."""
    assert actual.keys() == expected.keys()
    return max(
        float((actual[name] - gradient).abs().max() / gradient.abs().max())
        for name, gradient in expected.items()
    )


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("key", SCHEDULES)
def test_torch_plays_our_schedule_and_finds_our_gradients(theirs, key, form):
    """The export is for its runtime: what loads there must also mean there what it means here."""
    loss, actual = theirs[key, form]
    our_loss, expected = ours(SCHEDULES[key])
    torch.testing.assert_close(loss.float(), our_loss, rtol=1e-6, atol=0)
    assert error(actual, expected) <= 1e-12


def test_every_schedule_of_the_catalogue_is_played_or_refused_by_name():
    """What torch cannot say must not be left out in silence."""
    played = {candidate.name for candidate in SCHEDULES.values()}
    for name in NAMES:
        reasons = []
        for stages in (2, 4, 8) if name not in played else ():
            with contextlib.suppress(ScheduleError):
                reasons.append(unsupported_reason(ps.schedule(name, stages, MICRO_BATCHES)))
        assert name in played or reasons, (
            f"{name} takes none of these sizes: give it one that four ranks can play"
        )
        assert all(reasons), f"{name} can be said and is not played"


@pytest.mark.skipif(not TORCH_PLAYS_FAULTS, reason="torch before 2.13 stops there by itself")
def test_what_we_refuse_torch_plays_with_other_gradients(theirs):
    """The reason for these two refusals: nothing fails there, training just goes wrong."""
    expected = ours(from_csv(FAULTS["receives out of order"][0]))[1]
    assert error(theirs["receives out of order", "compute_only"][1], expected) <= 1e-12
    for key, form in [
        ("last stage out of order", "compute_only"),
        ("last stage out of order", "compute_comms"),
        ("receives out of order", "compute_comms"),
    ]:
        assert error(theirs[key, form][1], expected) > 0.01
    with pytest.raises(ScheduleError, match="torch stores losses in the order of these forwards"):
        to_csv(from_csv(FAULTS["last stage out of order"][0]))
    with pytest.raises(ScheduleError, match=r"\[receive order\] message 1 from rank 0 to rank 1"):
        from_csv(FAULTS["receives out of order"][1])
