"""`penstock explore`: a local web page to play with a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def explore(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="A profile, a plan, or one of each, to start from."),
    ] = None,
    port: Annotated[int, typer.Option(help="TCP port; 0: the system chooses a free one.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in the browser.")] = True,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    allow_remote: Annotated[
        bool,
        typer.Option("--allow-remote", help="Allow a --host that other machines can reach."),
    ] = False,
) -> None:
    """Open a page to play with a pipeline: stages, micro-batches, costs, schedules side by side,
    links and memory. It runs on this machine until Ctrl-C.

    Example: penstock explore profile.json
    """
    from penstock.errors import SettingError
    from penstock.explore.answers import START
    from penstock.explore.server import ServerSettings, serve
    from penstock.explore.state import parse_state
    from penstock.explore.uploads import state_of_files
    from penstock.files.text import read_text

    if not 0 <= port < 2**16:
        raise SettingError(f"--port {port}: must be from 0 to 65535")
    paths = files or []
    if len(paths) > 2:
        raise SettingError(f"explore takes a profile and a plan, not {len(paths)} files")
    state = parse_state(START)
    if paths:
        contents = [(str(path), read_text(path, "profile or plan")) for path in paths]
        upload = state_of_files(state, contents)
        state = upload.state
        typer.echo(upload.message, err=True)
    serve(state, ServerSettings(host, port, browser, allow_remote), _report)


def _report(address: str) -> None:
    """Print the address of the page at once, also into a pipe."""
    print(address, flush=True)
    typer.echo("Ctrl-C ends the server", err=True)
