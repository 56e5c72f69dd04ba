"""`penstock export-weights`: write the weights of a run in the format of others."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.errors import FileError, SettingError


def export_weights(
    source: Annotated[
        Path,
        typer.Argument(
            help="Folder of a run, a checkpoint in it, or weights in one of the formats."
        ),
    ],
    to: Annotated[Path, typer.Argument(help="File to write; for huggingface and dcp a folder.")],
    *,
    format_name: Annotated[
        str,
        typer.Option(
            "--as",
            help="safetensors, state-dict (torch.save), huggingface (model.safetensors, several "
            "with an index above 5 GB), or dcp (torch.distributed.checkpoint).",
        ),
    ] = "safetensors",
    best: Annotated[
        bool,
        typer.Option(
            "--best", help="Of a run, the checkpoint with the lowest test loss, not the newest."
        ),
    ] = False,
) -> None:
    """Write the weights of a run, or of one of its checkpoints, in the format of others.

    Example: penstock export-weights runs/gpt-text model --as huggingface --best
    """
    from penstock.checkpoint.series import best_whole
    from penstock.checkpoint.weight_files import load_weights, save_weights
    from penstock.training.run_checkpoints import checkpoint_folders, newest_checkpoint

    folder, kind = source, ""
    if (source / "config.yaml").exists():
        saved = best_whole(checkpoint_folders(source)) if best else newest_checkpoint(source)
        if saved is None:
            raise FileError(f"{source} has no checkpoint whose test loss is known")
        folder, kind = saved.folder, f" of step {saved.step}"
    elif best:
        raise SettingError(f"--best is for the folder of a run, and {source} is none")
    files = save_weights(load_weights(folder), to, format_name)
    names = files[0] if len(files) == 1 else f"{to}, {len(files)} files"
    typer.echo(f"wrote the weights{kind} to {names}")
