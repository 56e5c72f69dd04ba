"""`penstock resize`: let a run that is training go on with another number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from penstock.errors import SettingError


def resize(
    run: Annotated[Path, typer.Argument(help="Folder of a run that `penstock train` is training.")],
    ranks: Annotated[int, typer.Argument(help="Number of ranks to go on with.")],
) -> None:
    """Let a run go on with more or fewer ranks: it saves within a second, plans anew for that
    number, and continues from its checkpoint.

    Example: penstock resize runs/vgg11_bn-digits 3
    """
    if ranks < 1:
        raise SettingError(f"a run has 1 rank or more, not {ranks}")
    from penstock.training.run_checkpoints import request_ranks

    request_ranks(run, ranks)
    typer.echo(f"{run} goes on with {ranks} ranks after its next checkpoint")
