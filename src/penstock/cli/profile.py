"""`penstock profile`: measure a model here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import options
from penstock.cli.options import Json, ModelOption, named_values
from penstock.errors import SettingError
from penstock.units import format_bytes, format_seconds


def profile(
    model: Annotated[str, typer.Option(help="A model of the zoo.")] = "vgg11_bn",
    data: Annotated[str | None, typer.Option(help="Data whose shapes it gets; digits, or text for a GPT.")] = None,
    image: Annotated[int, typer.Option(help="Pixels a side.")] = 32,
    channels: Annotated[int, typer.Option(help="Channels of an image.")] = 3,
    tokens: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 64,
    model_option: ModelOption = None,
    batch: Annotated[int, typer.Option(help="Samples in a batch.")] = 64,
    sizes: Annotated[str | None, typer.Option(help="Micro-batch sizes: 4,16,64. By default batch / 16, / 4 and / 1.")] = None,
    threads: Annotated[int, typer.Option(help="Threads that a rank will have.")] = 1,
    repeats: Annotated[int, typer.Option(help="Timed runs of each phase.")] = 5,
    out: Annotated[Path | None, typer.Option(help="Write the profile here, as JSON.")] = None,
    json: Json = False,
) -> None:
    """Time every layer of a model and count its bytes.

    Example: penstock profile --model vgg11_bn --batch 64 --out profile.json
    """
    from rich.console import Console
    from rich.progress import Progress

    from penstock.measure.profile import profile as measure
    from penstock.store import to_json
    from penstock.tracing.chain import chain
    from penstock.training.config import TrainConfig
    from penstock.training.task import make_task
    from penstock.zoo.catalogue import models

    try:
        wanted = None if sizes is None else [int(size) for size in sizes.split(",")]
    except ValueError as error:
        raise SettingError(f"--sizes {sizes}: write whole numbers with commas, such as 4,16,64") from error
    known = models()
    fitting = "text" if model in known and "vocabulary" in known[model].options else "digits"
    config = TrainConfig(model=model, model_options=named_values("model-option", model_option), data=data or fitting, image=image,
                         channels=channels, tokens=tokens, batch=batch)  # fmt: skip
    task = make_task(config)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        line = bar.add_task("measuring", total=None)

        def show(done: int, total: int, name: str) -> None:
            bar.update(line, completed=done, total=total, description=f"measuring {name}")

        found = measure(chain(task.model), task.example(), batch, sizes=wanted, repeats=repeats, threads=threads, progress=show)
    if out is not None:
        found.save(out)
        typer.echo(f"wrote {out}", err=True)
    if json:
        print(to_json(found))
        return
    size = found.sizes[-1]
    rows = [
        (
            layer.name, layer.kind,
            *(format_seconds(layer.seconds(phase, size)) for phase in ("forward", "backward", "input_grad", "weight_grad")),
            format_seconds(layer.forward.fixed_s + layer.backward.fixed_s),
            format_bytes(layer.parameter_bytes), format_bytes(layer.activation_bytes_per_sample),
            format_bytes(layer.output_bytes_per_sample),
        )
        for layer in found
    ]  # fmt: skip
    print(f"{model} on {found.machine.get('device', '?')}, {threads} thread(s); times for {size} samples, bytes for one")
    print(options.table(("layer", "kind", "F", "B", "I", "W", "fixed F + B", "weights", "kept", "output"), rows))
    print(f"whole step: {format_seconds(sum(found.step_seconds(size)))}")
