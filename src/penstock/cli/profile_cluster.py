"""`penstock profile --cluster`: measure the machines instead of a model."""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from penstock.cli import options
from penstock.errors import SettingError
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.measure.cluster import ClusterFound, Progress

#: Flags of `penstock profile` that say something about a cluster; the others are about a model.
_OURS = {"cluster", "threads", "repeats", "out", "json"}

#: More processes than this on one host are a slip of the finger.
_MOST = 64

#: Bytes of the messages whose times are printed; --json has all.
_SHOWN = (64, 2**16, 2**20, 2**24, 2**26)


def profile_cluster(
    context: typer.Context, spec: str, threads: int, repeats: int, out: Path | None, *, json: bool
) -> None:
    """Measure `local:N` in processes started for it, or `here`, from within ranks that torchrun
    started; print and write it.

    Raises:
        SettingError: the words are neither, or flags of a model's profile stand with them.
        FileError: the description cannot be written.
        RunError: the ranks cannot be started, or cannot talk.
    """
    _of_a_model(context)
    ranks = _ranks(spec)
    if threads < 1 or repeats < 1:
        raise SettingError(f"threads {threads} and repeats {repeats} must be 1 or more")
    if out is not None and not out.parent.is_dir():
        raise SettingError(
            f"--out {out}: there is no folder {out.parent}"
        )  # known before minutes of measuring, not after
    if ranks is None:
        import torch.distributed as dist

        found = _measure(spec, repeats, threads)
        if dist.get_rank() != 0:
            return
    else:
        from penstock.runtime.launch import launch

        if warning := _busy():
            typer.echo(warning, err=True)
        try:
            found = launch(_measure, ranks, spec, repeats, threads, threads=threads)[0]
        finally:
            _terminal().show_cursor()  # a rank that was ended has left it hidden, behind its bar
    if out is not None:
        found.cluster.save(out)
        typer.echo(
            f"wrote {out}; plan for it with: penstock plan PROFILE --cluster {out}", err=True
        )
    if json:
        from penstock.store import to_json

        print(to_json(found))
    else:
        _show(found)


def _of_a_model(context: typer.Context) -> None:
    """Refuse flags that would be passed over."""
    given = [
        name
        for name in context.params
        if str(context.get_parameter_source(name)).endswith("COMMANDLINE")
    ]
    other = [f"--{name.replace('_', '-')}" for name in given if name not in _OURS]
    if other:
        raise SettingError(
            f"{', '.join(other)}: that is of a model's profile, and --cluster measures machines. Run `penstock profile` "
            "once with each"
        )


def _busy() -> str | None:
    """A word of warning where other programs keep the host's processors busy."""
    try:
        load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    except OSError:
        return None
    if load < cores / 2:
        return None
    return f"this host is busy: {load:.1f} programs were running in the last minute, on {cores} cores. What is measured now is of a host so busy"


def _ranks(spec: str) -> int | None:
    """How many processes to start here; None if they are there already.

    Raises:
        SettingError: the words are not understood, or there are no ranks.
    """
    if spec == "here":
        from penstock.runtime.processes import started

        if not started():
            raise SettingError(
                "--cluster here measures the ranks that torchrun started, and this process is alone: start it with "
                "torchrun --nproc-per-node N -m penstock profile --cluster here, or measure local:N"
            )
        return None
    match = re.fullmatch(r"local:(\d{1,6})", spec)
    if match is None:
        raise SettingError(
            f"--cluster {spec}: what can be measured is local:N, N processes on this host, or `here`, the ranks that "
            "torchrun started. A cluster that is not here is described, in a word or a file, for `penstock plan --cluster`; a "
            "model is profiled for its devices by --on"
        )
    if not 1 <= int(match[1]) <= _MOST:
        raise SettingError(f"--cluster {spec}: 1 to {_MOST} processes can be measured on a host")
    return int(match[1])


def _measure(spec: str, repeats: int, threads: int) -> ClusterFound:
    """What every rank runs."""
    import torch
    import torch.distributed as dist

    from penstock.measure.cluster import measure_cluster
    from penstock.runtime.processes import join
    from penstock.transport.card_facts import assign_device

    join()
    torch.set_num_threads(threads)
    with _bar(dist.get_rank() == 0) as progress:
        device = torch.device(assign_device().device)
        return measure_cluster(
            spec.replace("here", "measured"), device, repeats=repeats, progress=progress
        )


@contextmanager
def _bar(first: bool) -> Iterator[Progress]:
    """A progress bar on the terminal, if this is the rank that shows it."""
    from rich.progress import Progress as Bar

    console = _terminal()
    # Drawn at each step only: a thread that redraws it would be measured, too.
    with Bar(
        console=console,
        transient=True,
        disable=not (first and console.is_terminal),
        auto_refresh=False,
    ) as bar:
        line = bar.add_task("measuring", total=None)

        def show(done: int, total: int, what: str) -> None:
            bar.update(
                line, completed=done, total=total, description=f"measuring {what}", refresh=True
            )

        yield show


def _terminal() -> Console:
    from rich.console import Console

    return Console(stderr=True)


def _show(found: ClusterFound) -> None:
    """What was found, as tables."""
    print(found.cluster)
    print(f"  {found.cluster.source}\n")
    print(_devices(found))
    if found.pairs:
        print(f"\n{_links(found)}")
    if found.at_once > 1:
        print(f"several pairs at once take {found.at_once:.2f} times as long as one")


def _devices(found: ClusterFound) -> str:
    """One line for each thing that was measured of the devices."""

    def row(
        name: str, load: str, values: Sequence[float], text: Callable[[float], str]
    ) -> tuple[str, ...]:
        spread = (min(values), statistics.median(values), max(values))
        return (
            name,
            *map(text, spread),
            f"x {statistics.median(dict(one.busy)[load] for one in found.ranks):.2f}",
        )

    devices = [one.device for one in found.ranks]
    rows = [
        row(
            f"matmul {dtype}",
            f"matmul {dtype}",
            [dict(device.flops)[dtype] for device in devices],
            lambda x: f"{x / 1e9:.4g} GFLOP/s",
        )
        for dtype, _ in devices[0].flops
    ]
    rates = [device.memory_bytes_per_s or 0.0 for device in devices]
    rows.append(row("memory", "memory", rates, lambda x: f"{x / 1e9:.3g} GB/s"))
    rows.append(row("an op, eager", "ops", [device.launch_s for device in devices], format_seconds))
    convolution = statistics.median(dict(one.busy)["conv"] for one in found.ranks)
    rows.append(("convolution", "", "", "", f"x {convolution:.2f}"))
    free = [device.memory_bytes for device in devices]
    rows.append(
        ("memory to use", *map(format_bytes, (min(free), statistics.median(free), max(free))), "")
    )
    together = ", ".join(
        f"{device.together:.3g}" for device in dict.fromkeys(found.cluster.devices)
    )
    table = options.table(("one rank", "least", "median", "most", "all ranks busy"), rows)
    return f"{table}\nall ranks busy: seconds then over seconds alone; plans take {together}, the mean of float32 and convolution"


def _links(found: ClusterFound) -> str:
    """One line for each pair of ranks, and one for messages in used memory."""
    sizes = found.pairs[0].times.sizes
    shown = [i for i, size in enumerate(sizes) if size in _SHOWN]
    head = (
        "ranks",
        *(format_bytes(sizes[i]) for i in shown),
        "latency",
        "GB/s",
        "off by",
        "at most",
        "both ways",
    )
    rows = [
        (
            f"{pair.a}-{pair.b}",
            *(format_seconds(pair.times.fresh_s[i]) for i in shown),
            format_seconds(pair.fit.latency_s),
            f"{pair.fit.bandwidth_bytes_per_s / 1e9:.3g}",
            f"{pair.fit.mean_error:.0%}",
            f"{pair.fit.worst_error:.0%}",
            f"x {pair.times.both_ways:.2f}",
        )
        for pair in found.pairs
    ]
    used = [statistics.median(pair.times.used_s[i] for pair in found.pairs) for i in shown]
    rows.append(("used", *map(format_seconds, used), *[""] * 5))
    return (
        f"{options.table(head, rows)}\none way, in memory just allocated, as the runtime's messages are; used: in memory used before, "
        "the median\noff by: mean error of latency + bytes / bandwidth; both ways: seconds in both directions at once over one"
    )
