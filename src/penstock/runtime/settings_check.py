"""Comparison of the settings of all rank processes, before anything is computed.

Each rank describes its model, its settings and its optimizers; every rank gets the same error if
any two descriptions differ.
"""

from __future__ import annotations

from dataclasses import asdict

from penstock.errors import SettingError
from penstock.ranks.make_world import Place, in_threads
from penstock.ranks.placement import place
from penstock.ranks.rank_group import RankGroup
from penstock.ranks.settings.run_config import RunConfig
from penstock.ranks.settings.settings_exchange import SettingsExchange
from penstock.runtime.assembly import Assembly
from penstock.runtime.run_description import describe_optimizers, describe_run
from penstock.stage.stage_builder import Training
from penstock.tracing.traced_chain import TracedChain
from penstock.transport.hosts import Host, host_names, this_host
from penstock.transport.process_group import join


def next_settings_exchange(
    setting: RunConfig, place: Place
) -> tuple[SettingsExchange | None, RankGroup | None]:
    """Return the object by which the ranks compare one pipeline's settings.

    Returns:
        None where all ranks are threads of this process, which have nothing to compare; and the
        ranks of the pipeline, None where it has all processes of the job.

    Raises:
        SettingError: the settings contradict each other, or the mesh has not all processes.
        RunError: this process is the only one of the run.
    """
    if in_threads(setting.schedule, place):
        if place.mesh is not None:
            raise SettingError(
                "mesh= is for ranks that are processes: leave out executor='threads', or mesh="
            )
        return None, None
    join(place.deadline_s)
    exchange = SettingsExchange.next(place.deadline_s)
    if place.mesh is None:
        return exchange, None
    group = RankGroup.of_pipeline(place.mesh.pipeline, exchange, place.device)
    local_exchange = group.settings_exchange(exchange.number, place.deadline_s)
    local_exchange.spans_job = place.mesh.width > 1
    return local_exchange, group


def place_on_hosts(exchange: SettingsExchange | None, setting: RunConfig) -> RunConfig:
    """Return the configuration with every program on the process of its device.

    Args:
        exchange: how ranks exchange their hosts; with None all ranks are threads of this process,
            and nothing is placed.
        setting: what is run.

    Raises:
        RunError: a rank failed to construct its pipeline, or did not answer in time.
    """
    if exchange is None:
        return setting
    hosts = [Host(**fields) for fields in exchange.exchange(asdict(this_host()))]
    exchange.hosts = host_names(hosts)
    return place(setting, exchange.hosts)


def compare_settings(
    exchange: SettingsExchange | None,
    traced: TracedChain,
    setting: RunConfig,
    training: Training,
    **further: object,
) -> None:
    """Compare this rank's model and settings with those of all other ranks.

    Args:
        exchange: how ranks exchange descriptions; with None nothing is compared.
        traced: the model.
        setting: the schedule, the cut and the placement.
        training: loss, optimizer and training options.
        further: other settings that all ranks must share, by name.

    Raises:
        RanksDiffer: ranks differ; the message is the same on every rank and lists the differences.
        RunError: a rank failed to construct its pipeline, or did not answer in time.
    """
    if exchange is not None:
        exchange.compare(describe_run(traced, setting, training, **further))


def compare_optimizers(exchange: SettingsExchange | None, assembly: Assembly) -> None:
    """Compare the constructed optimizers with those of all other ranks, and end the comparison.

    Args:
        exchange: as for `compare_settings`.
        assembly: the ranks of this process.

    Raises:
        RanksDiffer, RunError: as `compare_settings`.
    """
    if exchange is None:
        return
    if assembly.steps:
        exchange.compare(describe_optimizers(assembly))
    exchange.closed = True
