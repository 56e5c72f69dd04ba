"""`penstock profile`: measure a model here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from penstock.cli import options
from penstock.cli.options import Json, ModelOption, named_values
from penstock.errors import SettingError
from penstock.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from penstock.profile.profile import Phase, Profile
    from penstock.training.config import TrainConfig

PHASES: Final[tuple[Phase, ...]] = ("forward", "backward", "input_grad", "weight_grad")


def profile(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="A model of the zoo.")] = "vgg11_bn",
    data: Annotated[
        str | None,
        typer.Option(help="Data whose shapes it gets: digits, text (GPT), reversed (GNMT)."),
    ] = None,
    image: Annotated[int, typer.Option(help="Pixels a side.")] = 32,
    channels: Annotated[int, typer.Option(help="Channels of an image.")] = 3,
    tokens: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 64,
    model_option: ModelOption = None,
    batch: Annotated[int, typer.Option(help="Samples in a batch.")] = 64,
    sizes: Annotated[
        str | None,
        typer.Option(help="Micro-batch sizes: 4,16,64. By default batch / 16, / 4 and / 1."),
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads that a rank will have.")] = 1,
    repeats: Annotated[int, typer.Option(help="Timed runs of each phase.")] = 5,
    device: options.Device = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            help="Measure machines, not a model: local:N processes here, or `here` under torchrun."
        ),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            help="Measure nothing: reckon for this device, such as V100, or the first of a cluster's file."
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="With --on: float32, tf32, bfloat16, float16, ...")
    ] = "float32",
    calibrate: Annotated[
        Path | None,
        typer.Option(help="With --on: a profile measured there, of the same model, to fit to."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Write the profile here, as JSON; the cluster, as YAML.")
    ] = None,
    json: Json = False,
) -> None:
    """Time every layer of a model and count its bytes; or reckon for a device that is not here; or
    time a cluster.

    Example: penstock profile --model vgg11_bn --batch 64 --out profile.json

    Example: penstock profile --model vgg16 --image 224 --batch 1024 --on V100 --out profile.json

    Example: penstock profile --cluster local:2 --out cluster.yaml
    """
    if cluster is not None:
        from penstock.cli.profile_cluster import profile_cluster

        profile_cluster(context, cluster, threads, repeats, out, json=json)
        return
    from penstock.training.config import TrainConfig
    from penstock.training.task import fitting_data

    try:
        wanted = None if sizes is None else [int(size) for size in sizes.split(",")]
    except ValueError as error:
        raise SettingError(
            f"--sizes {sizes}: write whole numbers with commas, such as 4,16,64"
        ) from error
    config = TrainConfig(
        model=model,
        model_options=named_values("model-option", model_option),
        data=data or fitting_data(model),
        image=image,
        channels=channels,
        tokens=tokens,
        batch=batch,
    )
    if on is not None:
        if device is not None:
            raise SettingError(
                "--device says where to measure, and --on measures nothing: leave one of them out"
            )
        from penstock.cli.profile_on import Wanted, profile_on

        found, how = profile_on(Wanted(config, data, on, dtype, calibrate, wanted)), "reckoned"
    elif dtype != "float32" or calibrate is not None:
        raise SettingError(
            "--dtype and --calibrate say how to reckon for a device that is not here: name it with --on"
        )
    else:
        found = _measured(config, wanted, threads, repeats, device)
        how = f"{threads} thread(s)"
    if out is not None:
        found.save(out)
        typer.echo(f"wrote {out}", err=True)
    _show(found, f"{model} on {found.machine.get('device', '?')}, {how}", json=json)


def _measured(
    config: TrainConfig, sizes: list[int] | None, threads: int, repeats: int, device: str | None
) -> Profile:
    """Time the layers, with a bar that says how far it is."""
    from rich.console import Console
    from rich.progress import Progress

    from penstock.measure.cards import choose_device_type, count_cards
    from penstock.measure.profile import profile as measure
    from penstock.tracing.chain import chain
    from penstock.training.task import make_task

    place = choose_device_type(device or "auto", count_cards())
    task = make_task(config)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        line = bar.add_task("measuring", total=None)

        def show(done: int, total: int, name: str) -> None:
            bar.update(line, completed=done, total=total, description=f"measuring {name}")

        return measure(
            chain(task.model),
            task.example(),
            config.batch,
            sizes=sizes,
            repeats=repeats,
            threads=threads,
            device=place,
            progress=show,
        )


def _show(found: Profile, title: str, *, json: bool) -> None:
    if json:
        from penstock.store import to_json

        print(to_json(found))
        return
    size = found.sizes[-1]
    rows = [
        (
            layer.name,
            layer.kind,
            *(format_seconds(layer.seconds(phase, size)) for phase in PHASES),
            format_seconds(layer.forward.fixed_s + layer.backward.fixed_s),
            format_bytes(layer.parameter_bytes),
            format_bytes(layer.activation_bytes_per_sample),
            format_bytes(layer.output_bytes_per_sample),
        )
        for layer in found
    ]
    print(f"{title}; times for {size} samples, bytes for one")
    print(
        options.table(
            ("layer", "kind", "F", "B", "I", "W", "fixed F + B", "weights", "kept", "output"), rows
        )
    )
    print(f"whole step: {format_seconds(sum(found.step_seconds(size)))}")
