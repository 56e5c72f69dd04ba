"""Benchmarks of a device."""

import pytest
import torch

from penstock.measure.device_benchmarks import Load, benchmark_loads, time_load

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["matmul float32", "matmul bfloat16", "conv", "memory", "ops"])
def test_every_load_runs_and_takes_time(name):
    """Each stands for something that plans are made of."""
    load = benchmark_loads(CPU)[name]
    assert load.amount > 0
    seconds = time_load(load, CPU, 1e-3)
    assert 0 < seconds.undisturbed_s <= seconds.mean_s * 1.0001 < 60


def test_a_load_is_run_a_few_times_however_long_it_takes():
    """One time alone may be anything."""
    runs: list[int] = []
    time_load(Load("x", 1.0, lambda: runs.append(1)), CPU, 0.0)
    assert len(runs) >= 5


def test_measuring_tf32_leaves_the_setting_as_it_was():
    """A measurement before training must not change the precision of the training."""
    from penstock.measure.device_benchmarks import _matmul

    before = torch.get_float32_matmul_precision()
    _matmul("tf32", 4, CPU).run()
    assert torch.get_float32_matmul_precision() == before
