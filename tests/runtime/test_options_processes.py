"""Training options over real processes: the same numbers as with threads, to the bit."""

from __future__ import annotations

import pytest
import torch
from tests.conformance.models import CASES, made
from tests.conformance.reference import differences
from tests.runtime.jobs import sgd
from torch.optim.lr_scheduler import StepLR

import penstock as ps
from penstock.ranks.processes.launch import launch


def job(folder, executor):
    """Scaling, clipping, accumulation, groups, a scheduler, a frozen stage, copies, and a
    checkpoint in the middle.
    """
    both_ways = "rank 0 | 0F0 1F1 1B1 0F2 1F3 1B3 0B0 0B2 0U1 1U1\nrank 1 | 0F1 1F0 1B0 0F3 1F2 1B2 0B1 0B3 0U1 1U1"
    results = {}
    for name, schedule in (
        ("plain", ps.schedule("1f1b", 2, 4)),
        ("copies", ps.Schedule.parse(both_ways)),
    ):
        model, x, y = made(CASES["mlp"], 12)
        model[0].requires_grad_(False)
        model[2].requires_grad_(False)

        def pipeline(model=model, schedule=schedule):
            return ps.Pipeline(
                model,
                loss=CASES["mlp"].loss,
                optimizer=sgd,
                balance=[3, 4],
                schedule=schedule,
                executor=executor,
                scaler={"init_scale": 2.0**24, "growth_interval": 2},
                clip_grad_norm=0.1,
                accumulate=2,
                deadline_s=60,
                autocast=torch.float16,
                parameter_groups=lambda name, p: {"weight_decay": 0.1 * (p.dim() > 1)},
            )

        pipe = pipeline()
        scheduler = pipe.scheduler(lambda optimizer: StepLR(optimizer, 2, gamma=0.5))
        rows = []
        for number in range(7):
            loss = pipe.train_batch(x.roll(number, 0), y.roll(number, 0))
            if number % 2:
                scheduler.step()
            rows.append(
                (
                    float(loss),
                    pipe.loss_scale,
                    pipe.skipped,
                    repr(pipe.grad_norm),
                    scheduler.get_last_lr(),
                )
            )
        pipe.update()
        pipe.save(folder / name)
        again = pipeline()
        again.load(folder / name)
        other = again.scheduler(lambda optimizer: StepLR(optimizer, 2, gamma=0.5))
        rows.append((again.loss_scale, again.skipped, other.get_last_lr(), again.step))
        again.train_batch(x, y, update=True)
        results[name] = rows, again.state_dict(), repr(again.grad_norm)
        pipe.close()
        again.close()
    return results


@pytest.mark.filterwarnings(
    "ignore:Detected call of"
)  # of a scheduler after a first step that was skipped, as with torch's own scaler
def test_processes_and_threads_scale_skip_clip_and_schedule_alike(tmp_path):
    """Every rank knows scale, norm and rate, a rank with nothing to train too."""
    (tmp_path / "threads").mkdir()
    by_rank = launch(job, 2, tmp_path, "processes", threads=1)
    expected = job(tmp_path / "threads", "threads")
    for name, (rows, state, norm) in expected.items():
        assert [results[name][0] for results in by_rank] == [rows, rows]
        assert [results[name][2] for results in by_rank] == [norm, norm]
        assert differences(by_rank[0][name][1], state) == []
        assert rows[-2][2] > 0
