"""The server: where it listens, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request

import pytest
from tests.time_limits import HANG_S

from penstock.cli.main import status
from penstock.errors import RunError, SettingError
from penstock.explore.server import ServerSettings, is_loopback, listen, serve
from penstock.explore.state import State

pytest.importorskip("uvicorn", reason="needs the extra explore")


def test_addresses_of_this_machine_alone_are_recognised():
    """All others need --allow-remote."""
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.com", "")))
    with pytest.raises(SettingError, match="--allow-remote"):
        serve(State(), ServerSettings(host="0.0.0.0"), print)


def test_a_port_in_use_is_a_message():
    """The port is the system's choice, so that this test needs none of its own."""
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(RunError, match=f"cannot listen on 127.0.0.1, port {port}"):
            listen("127.0.0.1", port)


def test_bad_flags_are_refused(capsys, tmp_path):
    """Before anything is started."""
    assert status(["explore", "--port", "70000"]) == 2
    assert status(["explore", "--host", "0.0.0.0", "--no-browser"]) == 2
    assert status(["explore", str(tmp_path / "none.json")]) == 2
    assert status(["explore", "a", "b", "c"]) == 2
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    assert printed.err.count("error:") == 4


def test_the_command_serves_until_ctrl_c():
    """It prints the address, answers there, and ends with status 130 and without a traceback."""
    command = [sys.executable, "-m", "penstock", "explore", "--no-browser"]
    server = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    try:
        address = server.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(address, timeout=HANG_S) as answer:
            assert b"<title>Explore a pipeline</title>" in answer.read()
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=HANG_S)
    finally:
        server.kill()
        server.wait()
    assert server.returncode == 130
    assert "Traceback" not in errors
    assert "stopped" in errors
