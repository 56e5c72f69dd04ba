"""`penstock profile --cluster`: measure devices and links instead of a model."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from penstock.cli.flags.options import flag_of
from penstock.cli.progress_bar import measuring_bar, stderr_console
from penstock.cluster.local import available_cores
from penstock.errors import SettingError
from penstock.store import check_writable
from penstock.text_table import table
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.measure.cluster import ClusterMeasurement

#: Flags of `penstock profile` that a cluster's measurement uses; the others are about a model.
_CLUSTER_FLAGS = {"cluster", "threads", "repeats", "out", "bind", "json"}

#: Most processes on one host: a larger number is taken for a typing error.
_MOST_PROCESSES = 64

#: Sizes in bytes of the messages whose times are printed; --json has all.
_PRINTED_SIZES = (64, 2**16, 2**20, 2**24, 2**26)


def profile_cluster(
    context: typer.Context, spec: str, threads: int, repeats: int, out: Path | None, *, json: bool
) -> None:
    """Measure a cluster, print the result and write it to a file.

    Args:
        context: of the command, to see which flags were set.
        spec: `local:N` to start N processes on this host, or `here` for the ranks that torchrun
            started.
        threads: per rank.
        repeats: timed runs of each measurement.
        out: YAML file to write the cluster to.
        json: print JSON instead of tables.

    Raises:
        SettingError: `spec` is neither of the two, or a flag for a model's profile is set.
        FileError: the cluster's file cannot be written.
        RunError: the ranks cannot be started or cannot communicate.
    """
    _refuse_model_flags(context)
    ranks = _process_count(spec)
    if threads < 1 or repeats < 1:
        raise SettingError(f"threads {threads} and repeats {repeats} must be 1 or more")
    # Checked now, because measuring takes minutes.
    if out is not None:
        check_writable(out)
    if ranks is None:
        import torch.distributed as dist

        measurement = _measure(spec, repeats, threads)
        if dist.get_rank() != 0:
            return
    else:
        from penstock.ranks.processes.launch import launch

        if warning := _load_warning():
            typer.echo(warning, err=True)
        try:
            measurement = launch(_measure, ranks, spec, repeats, threads, threads=threads)[0]
        finally:
            # A rank that was terminated may have left the cursor hidden by its progress bar.
            stderr_console().show_cursor()
    if out is not None:
        measurement.cluster.save(out)
        typer.echo(
            f"wrote {out}; plan for it with: penstock plan PROFILE --cluster {out}", err=True
        )
    if json:
        from penstock.store import to_json

        print(to_json(measurement))
    else:
        _print_measurement(measurement)


def _refuse_model_flags(context: typer.Context) -> None:
    """Refuse flags for a model's profile, which would be ignored.

    Raises:
        SettingError: one of them is set on the command line.
    """
    model_flags = []
    for name in context.params:
        source = str(context.get_parameter_source(name))
        if source.endswith("COMMANDLINE") and name not in _CLUSTER_FLAGS:
            model_flags.append(flag_of(name))
    if model_flags:
        raise SettingError(
            f"{', '.join(model_flags)}: for a model's profile, while --cluster measures machines. "
            "Run `penstock profile` once for each"
        )


def _load_warning() -> str | None:
    """Return a warning if other programs use at least half of the host's cores, else None."""
    try:
        load, cores = os.getloadavg()[0], available_cores()
    except OSError:
        return None
    if load < cores / 2:
        return None
    return (
        f"this host is busy: {load:.1f} programs were running in the last minute, on {cores} cores. "
        "The measurement will include that load"
    )


def _process_count(spec: str) -> int | None:
    """Return how many processes to start; None if torchrun has started them.

    Raises:
        SettingError: `spec` is neither `local:N` nor `here`, N is not 1 to 64, or torchrun has not
            started this process.
    """
    if spec == "here":
        from penstock.ranks.process_world import started

        if not started():
            raise SettingError(
                "--cluster here measures the ranks that torchrun started, but torchrun did not "
                "start this process: use torchrun --nproc-per-node N -m penstock profile "
                "--cluster here, or measure local:N"
            )
        return None
    match = re.fullmatch(r"local:(\d{1,6})", spec)
    if match is None:
        raise SettingError(
            f"--cluster {spec}: must be local:N (N processes on this host) or `here` (the ranks "
            "that torchrun started). For a cluster that is not here, use `penstock plan --cluster` "
            "with a preset or a file; --on estimates a model's profile for its devices"
        )
    count = int(match[1])
    if not 1 <= count <= _MOST_PROCESSES:
        raise SettingError(f"--cluster {spec}: N must be 1 to {_MOST_PROCESSES}")
    return count


def _measure(spec: str, repeats: int, threads: int) -> ClusterMeasurement:
    """Measure the cluster together with the other ranks; every rank runs this."""
    import torch
    import torch.distributed as dist

    from penstock.measure.cluster import measure_cluster
    from penstock.ranks.process_world import join
    from penstock.transport.devices.device_discovery import assign_device

    join()
    torch.set_num_threads(threads)
    with measuring_bar(visible=dist.get_rank() == 0) as progress:
        device = torch.device(assign_device().device)
        return measure_cluster(
            spec.replace("here", "measured"), device, repeats=repeats, progress=progress
        )


def _print_measurement(measurement: ClusterMeasurement) -> None:
    """Print the cluster and the tables of its devices and links."""
    print(measurement.cluster)
    print(f"  {measurement.cluster.source}\n")
    print(_device_table(measurement))
    if measurement.pairs:
        print(f"\n{_link_table(measurement)}")
    if measurement.at_once > 1:
        print(f"several pairs at once take {measurement.at_once:.2f} times as long as one")
    for line in _shared_parts(measurement):
        print(line)


def _shared_parts(measurement: ClusterMeasurement) -> list[str]:
    """Return a line for every host with several ranks on what these share; none for one host."""
    ranks_of_host: dict[str, list[int]] = {}
    for rank in measurement.ranks:
        ranks_of_host.setdefault(rank.host, []).append(rank.rank)
    if len(ranks_of_host) == 1:
        return []
    lines = []
    for host, ranks in ranks_of_host.items():
        if len(ranks) > 1:
            names = f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
            lines.append(f"ranks {names} share the memory and the network card of {host}")
    return lines


def _device_table(measurement: ClusterMeasurement) -> str:
    """Write the devices' figures: spread over ranks, and slowdown while all ranks compute."""
    devices = [rank.device for rank in measurement.ranks]

    def slowdown(load: str) -> str:
        """Write the median over ranks of busy time / idle time for a kind of load."""
        return f"x {statistics.median(dict(rank.busy)[load] for rank in measurement.ranks):.2f}"

    def spread(values: Sequence[float], text: Callable[[float], str]) -> list[str]:
        """Write minimum, median and maximum of one value per rank."""
        return [text(min(values)), text(statistics.median(values)), text(max(values))]

    rows: list[tuple[str, ...]] = []
    for dtype, _ in devices[0].flops:
        name = f"matmul {dtype}"
        flops = [dict(device.flops)[dtype] for device in devices]
        rows.append((name, *spread(flops, lambda x: f"{x / 1e9:.4g} GFLOP/s"), slowdown(name)))
    rates = [device.memory_bytes_per_s or 0.0 for device in devices]
    rows.append(("memory", *spread(rates, lambda x: f"{x / 1e9:.3g} GB/s"), slowdown("memory")))
    launch_times = [device.launch_s for device in devices]
    rows.append(("an op, eager", *spread(launch_times, format_seconds), slowdown("ops")))
    rows.append(("convolution", "", "", "", slowdown("conv")))
    rows.append(
        ("memory to use", *spread([device.memory_bytes for device in devices], format_bytes), "")
    )
    distinct_devices = dict.fromkeys(measurement.cluster.devices)
    factors = ", ".join(f"{device.together:.3g}" for device in distinct_devices)
    measurements = table(("one rank", "min", "median", "max", "all ranks busy"), rows)
    return (
        f"{measurements}\nall ranks busy: time relative to one rank alone; "
        f"plans use {factors}, the mean of float32 and convolution"
    )


def _link_table(measurement: ClusterMeasurement) -> str:
    """Write message times and the fitted link of each pair of ranks."""
    measured_sizes = {size for pair in measurement.pairs for size in pair.times.sizes}
    columns = [size for size in _PRINTED_SIZES if size in measured_sizes]
    size_names = [format_bytes(size) for size in columns]
    head = ("ranks", *size_names, "latency", "GB/s", "fit error", "max error", "both ways")
    rows = []
    for pair in measurement.pairs:
        seconds_of_size = dict(zip(pair.times.sizes, pair.times.fresh_s, strict=True))
        message_times = []
        for size in columns:
            # Between hosts the longest sizes are left out where they would take long.
            seconds = seconds_of_size.get(size)
            message_times.append("" if seconds is None else format_seconds(seconds))
        rows.append(
            (
                f"{pair.a}-{pair.b}",
                *message_times,
                format_seconds(pair.fit.latency_s),
                f"{pair.fit.bandwidth_bytes_per_s / 1e9:.3g}",
                f"{pair.fit.mean_error:.0%}",
                f"{pair.fit.worst_error:.0%}",
                f"x {pair.times.both_ways:.2f}",
            )
        )
    reused_times = []
    for size in columns:
        used_s = [
            pair.times.used_s[pair.times.sizes.index(size)]
            for pair in measurement.pairs
            if size in pair.times.sizes
        ]
        reused_times.append(format_seconds(statistics.median(used_s)))
    rows.append(("reused", *reused_times, *[""] * 5))
    return (
        f"{table(head, rows)}\n"
        "one way, in newly allocated memory, as the runtime sends; "
        "reused: in memory used before, median of all pairs\n"
        "fit error: mean error of latency + bytes / bandwidth; "
        "both ways: time in both directions at once over time in one"
    )
