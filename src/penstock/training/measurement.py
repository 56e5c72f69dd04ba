"""Measure what a run is planned from: its devices, its model's layers and the links between ranks."""

from __future__ import annotations

from collections.abc import Callable

from penstock.cluster.cluster import Cluster
from penstock.cluster.local import available_cores
from penstock.errors import FileError
from penstock.measure.card_choice import CardMemory, choose_device_type, count_cards, list_cards
from penstock.profile.profile import Profile
from penstock.ranks.local_link import measure_local_link
from penstock.ranks.processes.launch import launch
from penstock.tracing.traced_chain import TracedChain
from penstock.training.config import TrainConfig
from penstock.training.devices import Devices
from penstock.training.rank import profile_rank
from penstock.units import format_count

#: Receives progress messages, of a line or several.
Say = Callable[[str], None]


def find_devices(request: str) -> Devices:
    """Return the devices of this host that a run uses.

    The cards are described by a separate process that ends at once: a process that queries a card's
    free memory occupies part of it until it ends.

    Args:
        request: "auto", "cpu" or "cuda".

    Raises:
        SettingError: CUDA is requested and no card is visible, or the cards are of several models.
    """
    count = 0 if request == "cpu" else count_cards()
    if choose_device_type(request, count) == "cpu":
        return Devices()
    cards: tuple[CardMemory, ...] = launch(list_cards, 1)[0]
    return Devices(cards)


def measure_cluster(ranks: int, devices: Devices, say: Say) -> Cluster:
    """Return the cluster to plan for; its link is measured if the ranks are processes on CPUs."""
    cluster = devices.cluster(ranks)
    if ranks == 1:
        return cluster
    if devices.cards:
        say(f"link between two ranks: {cluster.inside}")
        return cluster
    link = measure_local_link()
    say(f"link between two processes: {link}")
    return cluster.with_links(inside=link)


def measure_profile(
    config: TrainConfig, traced: TracedChain, ranks: int, devices: Devices, say: Say
) -> Profile:
    """Load the profile that is set, or measure one.

    On CPUs all ranks measure concurrently, so that each is slowed down by the others as in
    training; of more ranks than cores, one per core, since ops that share a core would be timed
    with or without the others by chance. Cards do not slow each other down: the first one measures
    alone.
    """
    cores = available_cores()
    threads, ranks = max(1, cores // ranks), min(ranks, cores)
    if config.profile is None and devices.cards:
        say(f"measuring {len(traced)} layers on {devices.name} …")
        return _launch_profile(config, 1, threads, devices)
    if config.profile is None:
        say(f"measuring {len(traced)} layers with {format_count(threads, 'thread')} …")
        if ranks == 1:
            return profile_rank(config, threads)
        return _launch_profile(config, ranks, threads, devices)
    profile = Profile.load(config.profile)
    if profile.fingerprint != traced.fingerprint:
        raise FileError(
            f"{config.profile} is the profile of another model: its layers and shapes have "
            f"fingerprint {profile.fingerprint}, this model's have {traced.fingerprint}"
        )
    if devices.cards and profile.device == "cpu":
        raise FileError(
            f"{config.profile} was measured on a CPU, and this run is on {devices.name}: leave the "
            "profile out, or measure one by penstock profile --device cuda"
        )
    return profile


def _launch_profile(config: TrainConfig, ranks: int, threads: int, devices: Devices) -> Profile:
    """Measure a profile in `ranks` concurrent processes."""
    concurrent, device = ranks > 1, devices.of_process(0)
    profiles: list[Profile] = launch(profile_rank, ranks, config, threads, concurrent, device)
    return profiles[0]
