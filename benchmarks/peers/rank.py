"""The main program of a peer's processes: it loads what the peer needs, then forks a rank whenever
it is asked to, and sleeps.

    python rank.py '["torch", "deepspeed"]'

A line on standard input is the address of a socket: a rank is forked, which connects to it and does
what it is told. Forked ranks begin with what was loaded, so that starting them takes milliseconds
and no system's memory contains another's libraries.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def _end_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)


def main() -> None:
    """Say that it is ready, or what is missing; then fork until standard input ends."""
    _end_with_parent(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the benchmark hears Ctrl-C and ends all
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what peers print goes to the log
    try:
        # The last three are what every rank needs before its first step: an optimizer loads
        # torch._dynamo in every system.
        modules = [
            importlib.import_module(name)
            for name in [*json.loads(sys.argv[1]), "torch._dynamo", "job", "adapters.catalogue"]
        ]
        importlib.import_module("adapters.catalogue").systems()
    except ImportError as error:
        print(
            json.dumps(
                {"missing": error.name if isinstance(error, ModuleNotFoundError) else str(error)}
            ),
            file=answers,
            flush=True,
        )
        return
    versions = {
        module.__name__: str(module.__version__)
        for module in modules
        if hasattr(module, "__version__")
    }
    print(json.dumps({"versions": versions}), file=answers, flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ranks are not waited for: the system reaps them
    me = os.getpid()
    for line in sys.stdin:
        if os.fork() == 0:
            _end_with_parent(me)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            faulthandler.register(signal.SIGUSR1)  # says into the log where a rank hangs
            answers.close()
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)
            status = 1
            try:
                serve(Client(line.strip(), family="AF_UNIX"))
                status = 0
            except EOFError:
                pass
            finally:
                os._exit(status)


def serve(connection: Connection) -> None:
    """Do what the benchmark says until it says no more. Every message is a name and its arguments;
    every answer has `error` or a value.
    """
    served = Served()
    connection.send({"value": os.getpid()})
    while True:
        name, args = connection.recv()  # asleep until then
        try:
            answer = {"value": getattr(served, name)(*args)}
        except Exception as error:  # noqa: BLE001 - the benchmark reports it and goes on
            answer = {
                "error": f"{type(error).__name__}: {error}".splitlines()[0][:300],
                "traceback": traceback.format_exc(),
            }
        connection.send(answer)


class Served:
    """One rank of one system."""

    def __init__(self) -> None:
        from memory import Peak

        self.peak = Peak()
        self.step: Any = None
        self.used_s = 0.0
        self.idle_s = 0.0

    def make(self, spec: Any) -> None:
        """Build it."""
        import torch
        from adapters.catalogue import systems
        from job import Job

        torch.set_num_threads(spec.threads)
        os.environ["OMP_NUM_THREADS"] = str(spec.threads)
        self.job = Job(spec)
        self.step = systems()[spec.system].make(self.job)

    def check(self, realtime: bool) -> tuple[dict[str, float], float, float, int]:
        """Take the first step. Largest error of each parameter's gradient, the largest gradient,
        seconds, and the most bytes so far.

        In real time, now and later, nothing else on the host gets in the way.
        """
        for thread in Path("/proc/self/task").iterdir() if realtime else ():
            os.sched_setscheduler(
                int(thread.name), os.SCHED_RR, os.sched_param(1)
            )  # threads to come inherit it
        start = time.perf_counter()
        self.step()
        seconds = time.perf_counter() - start
        self.job.forget_names()
        gc.collect()
        self.used_s = _cpu_s()
        return self.job.errors, self.job.most, seconds, self.peak.read()

    def begin(self) -> None:
        """From here on memory counts, and what is used in between."""
        self.peak.begin()
        self.used_s, self.idle_s = _cpu_s(), 0.0

    def run(self, warm: int, steps: int) -> dict[str, Any]:
        """Steps that do not count, and steps that do: when each ended, on the host's clock, and
        when the first began.
        """
        self.idle_s += _cpu_s() - self.used_s
        gc.collect()
        step, now = self.step, time.perf_counter
        for _ in range(warm):
            step()
        times = [now()]
        for _ in range(steps):
            step()
            times.append(now())
        answer = {
            "times": times,
            "peak": self.peak.read(),
            "whole": self.peak.whole,
            "idle_s": self.idle_s,
            "parts": getattr(step, "parts", [])[-steps:],
        }
        self.used_s = _cpu_s()
        return answer


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def reference(weights: Path, gradients: Path, workload: str) -> set[str]:
    """Write the first weights, and what plain training makes of them: the gradients of the whole
    batch. Returns their names.
    """
    import torch
    from torch import nn
    from workloads import WORKLOADS, first_batch, first_weights, layers_of

    torch.set_num_threads(1)
    values = first_weights(workload)
    torch.save(values, weights)
    net = nn.Sequential(*layers_of(WORKLOADS[workload].make()))
    net.load_state_dict(values)
    x, y = first_batch(workload)
    WORKLOADS[workload].loss(net(x), y).backward()
    torch.save({name: parameter.grad for name, parameter in net.named_parameters()}, gradients)
    return {name for name, _ in net.named_parameters()}


if __name__ == "__main__":
    main()
