"""What a run computes on: a function of its settings and of the visible cards. No card is needed
here.
"""

from __future__ import annotations

import os

import pytest
import torch

from penstock.cluster.cluster import cluster
from penstock.errors import FileError, SettingError
from penstock.measure.card_choice import CardMemory
from penstock.plan.plan import Plan
from penstock.search.catalogue import plan
from penstock.tracing.traced_chain import chain
from penstock.training.config import TrainConfig
from penstock.training.devices import Devices, device_change, with_device
from penstock.training.job import _peaks_allocated, _rank_count
from penstock.training.loop.rank_result import RankResult
from penstock.training.measurement import measure_profile
from penstock.training.rank import profile_rank, take_device, train_on
from penstock.training.sources.user_settings import load_settings
from penstock.training.task import make_task
from penstock.transport.devices.device_assignment import Card

GIB = 2**30
CPU = Devices()
SMALL = {"model": "mlp", "image": 8, "channels": 1, "batch": 64, "profile_repeats": 1}


def card(index, name, free_bytes):
    """A card and its unused memory."""
    return CardMemory(Card(index, name), free_bytes)


def cards(count, name="H100"):
    """Cards of one model with 64 GiB free each."""
    return Devices(tuple(card(index, name, 64 * GIB) for index in range(count)))


def test_on_the_cpu_there_is_a_rank_per_core():
    """As it was before there was a choice."""
    cores = len(os.sched_getaffinity(0))
    assert (CPU.type, CPU.name) == ("cpu", "cpu")
    assert _rank_count(TrainConfig(), CPU) == cores
    assert CPU.executor(4) == "processes"
    assert CPU.processes(4) == 4
    assert CPU.of_process(3) == torch.device("cpu")
    assert CPU.cluster(2) == cluster("local:2")


def test_on_cards_there_is_a_rank_per_card_whatever_the_number_of_cores():
    """16 cores beside one card are no reason for 16 stages."""
    assert [_rank_count(TrainConfig(), cards(count)) for count in (1, 2, 8)] == [1, 2, 8]
    assert _rank_count(TrainConfig(stages=2), cards(8)) == 2
    assert _rank_count(TrainConfig(ranks=4, stages=2), cards(8)) == 4


def test_two_stages_per_rank_need_half_as_many_cards_as_stages():
    """An interleaved schedule of 4 stages runs on 2 cards."""
    config = TrainConfig(schedule="interleaved", stages=4, micro_batches=4)
    assert _rank_count(config, cards(2)) == 2


def test_every_process_has_a_card_of_its_own_with_its_free_memory():
    """Memory that other programs hold is not there to be planned."""
    devices = cards(3)
    assert devices.executor(3) == "processes"
    assert devices.processes(3) == 3
    assert [devices.of_process(number).index for number in range(3)] == [0, 1, 2]
    planned = devices.cluster(2)
    assert [(device.name, device.memory_bytes) for device in planned.devices] == [
        ("H100", 64 * GIB)
    ] * 2
    assert planned.inside.source.startswith("assumed")


def test_ranks_that_share_the_only_card_are_threads_with_equal_parts_of_its_memory():
    """NCCL refuses two processes on one card; and all of them together have one card's memory."""
    devices = cards(1)
    devices.check_ranks(4)
    assert devices.executor(4) == "threads"
    assert devices.processes(4) == 1
    assert [device.memory_bytes for device in devices.cluster(4).devices] == [16 * GIB] * 4
    assert "shared by 4 ranks" in devices.description(4)
    assert devices.executor(1) == "processes"
    assert devices.description(1) == "device: H100 (64.0 GiB free)"


def test_more_ranks_than_cards_are_refused_where_there_are_several():
    """Which of them share a card would be a guess."""
    with pytest.raises(SettingError, match=r"4 ranks need 4 CUDA cards, and 2 are visible"):
        cards(2).check_ranks(4)
    cards(2).check_ranks(2)
    CPU.check_ranks(64)


def test_cards_of_several_models_are_refused():
    """The profile of one card plans nothing for the other."""
    with pytest.raises(SettingError, match=r"several models \(A100, H100\).*CUDA_VISIBLE_DEVICES"):
        Devices((card(0, "H100", GIB), card(1, "A100", GIB)))


def test_the_folder_records_the_device_that_a_run_has():
    """`auto` would mean another device on another day."""
    assert with_device(TrainConfig(), CPU) == TrainConfig(device="cpu")
    assert with_device(TrainConfig(), cards(1)).device == "cuda"
    assert with_device(TrainConfig(stages="cores"), CPU).stages == "cores"
    assert with_device(TrainConfig(stages="cores"), cards(2)).stages == 2


def test_a_device_is_a_setting_of_three_words():
    """A misspelt one must not mean the default."""
    assert load_settings(None, {"device": "cpu"}).device == "cpu"
    with pytest.raises(SettingError, match=r"device: Input should be 'auto', 'cpu' or 'cuda', not"):
        load_settings(None, {"device": "gpu"})


def resumed(folder, device):
    """A run in a folder whose configuration names a device."""
    (folder / "config.yaml").write_text(f"model: mlp\ndevice: {device}\n")
    return TrainConfig(resume=True, out=str(folder))


def test_a_run_that_goes_on_on_another_device_is_reported(tmp_path):
    """Its numbers are not those that it would have had."""
    line = device_change(resumed(tmp_path, "cuda"), CPU)
    assert line is not None
    assert line.startswith("the run was on cuda and continues on cpu: weights and optimizer state")
    assert "continues on cuda" in (device_change(resumed(tmp_path, "cpu"), cards(1)) or "")


def test_a_run_that_stays_on_its_device_is_not_reported(tmp_path):
    """Nor one whose folder does not tell, since it is of an earlier version."""
    assert device_change(resumed(tmp_path, "cpu"), CPU) is None
    assert device_change(resumed(tmp_path, "auto"), CPU) is None
    assert device_change(TrainConfig(), CPU) is None


def test_a_profile_of_a_cpu_plans_nothing_for_cards(tmp_path):
    """Its seconds are those of another device, by a factor of a hundred."""
    path = tmp_path / "profile.json"
    config = load_settings(None, {**SMALL, "profile": str(path)})
    profile_rank(config, 1).save(path)
    traced = chain(make_task(config).model)
    with pytest.raises(FileError, match=r"was measured on a CPU, and this run is on H100"):
        measure_profile(config, traced, 1, cards(1), print)
    assert measure_profile(config, traced, 1, CPU, print).device == "cpu"


@pytest.fixture(scope="module")
def two_stages() -> Plan:
    """A plan of two stages."""
    config = load_settings(None, SMALL)
    return plan(
        profile_rank(config, 1),
        cluster("local:2"),
        64,
        schedules=["1f1b"],
        stages=2,
        micro_batches=2,
    )


def test_ranks_that_are_threads_train_and_bring_back_one_result(tmp_path, two_stages):
    """As on a card that they share: rank 0 writes, and the one process tells its memory."""
    config = load_settings(None, {**SMALL, "limit_steps": 2, "self_check": True})
    result = train_on(config, two_stages, tmp_path, True, take_device(CPU), "threads")
    assert result.steps == 2
    assert result.timeline is not None
    assert len(result.timeline.peak_memory or ()) == 2
    assert result.peak_allocated_bytes is None, "the allocator is asked on cards alone"
    assert (tmp_path / "weights.safetensors").stat().st_size > 1000
    assert _peaks_allocated([result]) is None


def test_peaks_of_the_allocator_are_listed_by_process():
    """What torch has given out on every card."""
    results = [RankResult(peak_allocated_bytes=count) for count in (5, 7)]
    assert _peaks_allocated(results) == (5, 7)
