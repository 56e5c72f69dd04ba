"""`penstock doctor`: what is here, and does it work?"""

from __future__ import annotations

import importlib.util
import os
import platform
import sys

import typer

from penstock.cli import options
from penstock.cli.options import Json
from penstock.errors import PenstockError


def doctor(json: Json = False) -> None:
    """Report Python, torch, backends, devices, optional parts, and whether two processes can talk (exit status 1 if not).

    Example: penstock doctor
    """
    import torch
    import torch.distributed as dist

    import penstock
    from penstock.runtime.link import link_here

    extras = {"sklearn": "data", "tensorboard": "metrics"}
    backends = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        if torch.cuda.is_available()
        else []
    )
    facts: dict[str, object] = {
        "penstock": penstock.__version__,
        "python": f"{platform.python_version()} at {sys.executable}",
        "torch": torch.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "torch threads": torch.get_num_threads(),
        "backends": [name for name, there in backends.items() if there],
        "gpus": gpus,
        "optional parts missing": [
            f"{package} (pip install 'penstock[{extra}]')"
            for package, extra in extras.items()
            if importlib.util.find_spec(package) is None
        ],
    }
    sound = True
    try:
        facts["two processes"] = f"talk: {link_here()}"
    except PenstockError as error:
        facts["two processes"] = f"do not talk: {error}"
        sound = False
    if json:
        options.print_json({**facts, "sound": sound})
    else:
        rows = [(name, (", ".join(map(str, value)) or "none") if isinstance(value, list) else str(value))
                for name, value in facts.items()]  # fmt: skip
        width = max(len(name) for name, _ in rows)
        for name, text in rows:
            print(f"{name.ljust(width)}  {text}")
    if not sound:
        raise typer.Exit(1)
