"""`penstock profile`: measure the layers of a model, or a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.flags import options
from penstock.cli.flags.model_flags import ModelFlags, with_model_flags
from penstock.cli.flags.options import Json
from penstock.cli.progress_bar import measuring_bar
from penstock.errors import SettingError
from penstock.store import check_writable
from penstock.transport.addresses import use_address

if TYPE_CHECKING:
    from penstock.profile.profile import Profile
    from penstock.training.config import TrainConfig


@with_model_flags(omit=["loss"], default_model="vgg11_bn")
def profile(
    context: typer.Context,
    *,
    flags: ModelFlags,
    batch: Annotated[int, typer.Option(help="Samples per batch.")] = 64,
    sizes: Annotated[
        str | None,
        typer.Option(
            help="Micro-batch sizes to measure: 4,16,64; default: 1, batch / 16, batch / 4 and batch."
        ),
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads per rank.")] = 1,
    repeats: Annotated[int, typer.Option(help="Timed runs of each phase.")] = 5,
    device: options.Device = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Measure a cluster, not a model: local:N (N processes on this host), or `here` "
            "under torchrun."
        ),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            help="Estimate analytically for this device (such as V100) instead of measuring; "
            "for a cluster file, its first device."
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="With --on: data type: float32, tf32, bfloat16, float16, ...")
    ] = "float32",
    calibrate: Annotated[
        Path | None,
        typer.Option(
            help="With --on: a profile of the same model, measured on that device, to fit to."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the profile to this JSON file; a cluster to this YAML file."),
    ] = None,
    bind: options.Bind = None,
    json: Json = False,
) -> None:
    """Measure the time and memory of every layer of a model; or estimate them for another device;
    or measure a cluster.

    Example: penstock profile --model vgg11_bn --batch 64 --out profile.json

    Example: penstock profile --model vgg16 --image 224 --batch 1024 --on V100 --out profile.json

    Example: penstock profile --model my_model:make_model --data my_data:load --out profile.json

    Example: penstock profile --cluster local:2 --out cluster.yaml
    """
    if bind is not None:
        if cluster is None:
            raise SettingError("--bind is for --cluster: a model is measured by a single process")
        use_address(bind)
    if cluster is not None:
        from penstock.cli.profiles.profile_cluster import profile_cluster

        profile_cluster(context, cluster, threads, repeats, out, json=json)
        return
    from penstock.training.sources.user_settings import complete_settings

    if out is not None:
        check_writable(out)  # before the measurement
    sample_counts = None if sizes is None else _parse_sizes(sizes)
    config = complete_settings({**flags.settings(), "batch": batch})
    if on is not None:
        if device is not None:
            raise SettingError(
                "--device says where to measure, but --on does not measure: leave one of them out"
            )
        from penstock.cli.profiles.profile_on import EstimateRequest, estimate_profile

        request = EstimateRequest(config, flags.data, on, dtype, calibrate, sample_counts)
        result, how = estimate_profile(request), "estimated"
    elif dtype != "float32" or calibrate is not None:
        raise SettingError(
            "--dtype and --calibrate belong to an analytic estimate: name its device with --on"
        )
    else:
        result = _measure_profile(config, sample_counts, threads, repeats, device)
        how = f"{threads} thread(s)"
    if out is not None:
        result.save(out)
        typer.echo(f"wrote {out}", err=True)
    print_profile(
        result, f"{config.model} on {result.machine.get('device', '?')}, {how}", json=json
    )


def _parse_sizes(text: str) -> list[int]:
    """Parse micro-batch sizes: `4,16,64`.

    Raises:
        SettingError: one of them is no whole number.
    """
    try:
        return [int(size) for size in text.split(",")]
    except ValueError as error:
        raise SettingError(
            f"--sizes {text}: write whole numbers with commas, such as 4,16,64"
        ) from error


def _measure_profile(
    config: TrainConfig, sizes: list[int] | None, threads: int, repeats: int, device: str | None
) -> Profile:
    """Time the layers of a model, with a progress bar on a terminal."""
    from penstock.measure.card_choice import choose_device_type, count_cards
    from penstock.measure.profiler import profile as measure
    from penstock.training.task import make_task

    device_type = choose_device_type(device or "auto", count_cards())
    task = make_task(config)
    with measuring_bar() as show_progress:
        return measure(
            task.chain,
            task.example(),
            config.batch,
            sizes=sizes,
            repeats=repeats,
            threads=threads,
            device=device_type,
            progress=show_progress,
        )


def print_profile(profile: Profile, title: str, *, json: bool) -> None:
    """Print a profile as JSON, or as a table with a row per layer."""
    if json:
        from penstock.store import to_json

        print(to_json(profile))
        return
    print(f"{title}; {profile}")
