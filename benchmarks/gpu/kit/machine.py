"""What the run was made on. Each function here runs in a process of its own, since it may start
CUDA.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

#: Read only: nothing of the card is set.
CONDITIONS = "clocks.sm,clocks.mem,power.draw,temperature.gpu,memory.used"


def machine() -> dict[str, Any]:
    """The machine, with its GPU if there is one. The card's own id is hashed."""
    facts: dict[str, Any] = {
        "gpu": None,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "processor": platform.processor() or platform.machine(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        uuid = str(getattr(properties, "uuid", properties.name))
        facts["gpu"] = properties.name
        facts["gpus"] = torch.cuda.device_count()
        facts["gpu_memory"] = properties.total_memory
        facts["uuid_hash"] = hashlib.sha256(uuid.encode()).hexdigest()[:12]
        facts["driver"] = query("driver_version").get("driver_version")
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts["cudnn"] = torch.backends.cudnn.version()
    return facts


def query(fields: str) -> dict[str, str]:
    """What nvidia-smi says of the first card; empty where it is not there."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return dict(zip(fields.split(","), values, strict=False))


def answers() -> bool:
    """Whether a trivial kernel on the card comes back."""
    value = torch.ones(1, device="cuda").add_(1)
    return float(value) == 2.0


def commit() -> str:
    """The commit of this kit; "+" behind it where files have changed since."""
    folder = Path(__file__).parent
    try:
        name = _git(folder, "rev-parse", "--short=12", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return name + ("+" if changed else "")


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", *words], cwd=folder, capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()
