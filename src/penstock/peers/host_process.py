"""Main program of a host: load the modules of one library, then fork a process per request.

    python -P -m penstock.peers.host_process '{"imports": ["torch", "deepspeed"], "parent": 4711}'

A line on standard input is a request: the address of a socket and the path of a log. A process is
forked, which connects to the socket and runs the commands that arrive there. A forked process
starts with what was loaded, so that a fresh process takes milliseconds instead of seconds, and no
system's memory contains another's libraries.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from multiprocessing.connection import Client
from types import ModuleType
from typing import Any

from penstock.peers.commands import COMMANDS
from penstock.peers.messages import Channel

#: Option of prctl(2): the signal that this process gets when its parent ends.
_PR_SET_PDEATHSIG = 1
#: Characters of an error that the parent gets: its beginning names the cause, and some libraries
#: append pages.
_REASON_CHARACTERS = 500


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the line above
        os._exit(1)


def main() -> None:
    """Load the modules, report their versions or what is missing, then fork until standard input
    ends.
    """
    request = json.loads(sys.argv[1])
    end_with_parent(request["parent"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that runs the study handles Ctrl-C
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    try:
        modules = [importlib.import_module(name) for name in request["imports"]]
        _load_catalogues(request["imports"])
    except ImportError as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else str(error)
        print(json.dumps({"missing": missing}), file=answers, flush=True)
        return
    print(json.dumps({"versions": _versions(modules)}), file=answers, flush=True)
    # Forked processes are not waited for: the system reaps them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    host = os.getpid()
    for line in sys.stdin:
        if os.fork() == 0:
            answers.close()
            _run_forked(host, json.loads(line))


def _load_catalogues(imports: list[str]) -> None:
    """Import what every run looks up: systems, models, and the schedules where Penstock runs.

    A forked process would import them again each time, which takes longer than a short run.
    """
    if "penstock.peers.rank" not in imports:
        return
    from penstock.peers.catalogue import systems
    from penstock.peers.setup import RankSpec, Setup, spec_of, to_message
    from penstock.zoo.catalogue import models

    systems()
    models()
    # Builds pydantic's validator of the messages.
    spec_of(to_message(RankSpec("", Setup("", {}, "", 1, 1, 1), 0, 1, 1, 0, "")))
    if "penstock.runtime.pipeline" in imports:
        from penstock.search.schedules import schedules

        schedules()


def _versions(modules: list[ModuleType]) -> dict[str, str]:
    """Return the versions of modules, from the module itself or from its package's metadata."""
    from importlib import metadata

    versions = {}
    for module in modules:
        name = module.__name__
        if name.partition(".")[0] == "penstock" or "." in name or name.startswith("_"):
            continue
        version = getattr(module, "__version__", None)
        if version is None:
            with contextlib.suppress(metadata.PackageNotFoundError):
                version = metadata.version(name)
        if version is not None:
            versions[name] = str(version)
    return versions


def _run_forked(host: int, request: dict[str, str]) -> None:
    """Run a forked process to its end: a group of its own, its output in its log, its commands."""
    os.setsid()
    # Again, since a fork does not inherit it, see prctl(2).
    end_with_parent(host)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1)  # writes into the log where a process hangs
    status = 1
    try:
        serve(Channel(Client(request["address"], family="AF_UNIX")))
        status = 0
    except (EOFError, OSError):
        pass
    finally:
        sys.stdout.flush()
        os._exit(status)


def serve(channel: Channel) -> None:
    """Run commands until the other end closes. An answer has `value`, or `error` with its type."""
    state: dict[str, Any] = {}
    channel.send({"value": os.getpid()})
    while True:
        request = channel.receive()  # asleep until then
        try:
            answer = {"value": COMMANDS[request["name"]](state, request["arguments"])}
        except Exception as error:  # noqa: BLE001 - the study records it and continues
            traceback.print_exc()
            answer = {
                "error": " ".join(f"{type(error).__name__}: {error}".split())[:_REASON_CHARACTERS],
                "kinds": [kind.__name__ for kind in type(error).__mro__],
            }
        channel.send(answer)


if __name__ == "__main__":
    main()
