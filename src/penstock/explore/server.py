"""Serve the page on this machine until Ctrl-C."""

from __future__ import annotations

import ipaddress
import socket
import threading
import webbrowser
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from penstock.errors import MissingExtra, PenstockError, RunError, SettingError
from penstock.explore.app import LOOPBACK_HOSTS, make_app
from penstock.explore.evaluate import evaluate
from penstock.explore.state import State, parse_state


@dataclass(frozen=True)
class ServerSettings:
    """Where the page is served.

    Attributes:
        host: address to listen on.
        port: TCP port; 0 lets the system choose.
        browser: open the page in the browser.
        allow_remote: listen on addresses that other machines can reach.
    """

    host: str = "127.0.0.1"
    port: int = 0
    browser: bool = True
    allow_remote: bool = False


def serve(state: State, settings: ServerSettings, report: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C.

    Args:
        state: of the page that is opened.
        settings: where.
        report: called with the address of the page once connections are accepted.

    Raises:
        SettingError: the host is not of this machine alone, and `allow_remote` is not set.
        MissingExtra: Starlette, Uvicorn or Jinja2 is not installed.
        RunError: the address is in use or does not exist.
        KeyboardInterrupt: after Ctrl-C.
    """
    loopback = is_loopback(settings.host)
    if not loopback and not settings.allow_remote:
        raise SettingError(
            f"--host {settings.host} lets other machines open the page, which has no password: add "
            "--allow-remote if that is meant, or leave --host out"
        )
    app = make_app(LOOPBACK_HOSTS if loopback else None)
    try:
        import uvicorn
    except ImportError as error:
        raise MissingExtra("uvicorn", "explore", "penstock explore") from error
    listener = listen(settings.host, settings.port)
    with listener:
        address = f"http://{_host_in_address(listener)}/"
        if state != State():
            address += f"?{state.query}"
        # Compile the simulator's loops while the browser starts.
        threading.Thread(target=warm_up, daemon=True).start()
        report(address)
        if settings.browser:
            webbrowser.open(address)
        config = uvicorn.Config(
            app, log_level="error", access_log=False, lifespan="off", server_header=False
        )
        uvicorn.Server(config).run(sockets=[listener])


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that accepts connections.

    Raises:
        RunError: the address is in use or does not exist.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
        # So that the port of a page that was closed just now can be used again at once.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(64)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RunError(
            f"cannot listen on {host}, port {port}: {reason}. Without --port the system chooses a "
            "free one"
        ) from error
    return listener


def _host_in_address(listener: socket.socket) -> str:
    """Return host and port as an address has them."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def warm_up() -> None:
    """Evaluate small states, so that the loops that Numba compiles are ready."""
    for query in ("a=1f1b&b=pipedream", "a=zb-v&b=bpipe&links=shared&boundary_bytes=1&bandwidth=1"):
        with suppress(PenstockError):
            evaluate(parse_state(query))
