"""Settings of torch that decide whether equal work on a GPU gives bitwise equal results."""

from __future__ import annotations

import torch


def numeric_settings(device: torch.device) -> tuple[str, ...]:
    """Describe the settings that apply to a CUDA device; empty for other devices.

    Two runs of the same ops on the same values may differ in the last bits on a GPU: some kernels
    add in the order in which threads arrive, and TF32 rounds the factors of products to 10 bits.
    """
    if device.type != "cuda":
        return ()
    backends = torch.backends
    convolutions = getattr(backends.cudnn, "conv", None)
    deterministic = torch.are_deterministic_algorithms_enabled()
    words = [
        f"TF32 in matrix products {_tf32(backends.cuda.matmul, backends)}",
        f"TF32 in convolutions {_tf32(convolutions, backends.cudnn, backends)}",
        f"deterministic algorithms {'on' if deterministic else 'off'}",
    ]
    if not deterministic:
        words.append(
            "for equal bits call torch.use_deterministic_algorithms(True) and set "
            "CUBLAS_WORKSPACE_CONFIG=:4096:8"
        )
    return tuple(words)


def _tf32(*backends: object) -> str:
    """Return "on" or "off" from the first backend that has an explicit precision setting."""
    settings = [getattr(backend, "fp32_precision", "none") for backend in backends]
    chosen = next((setting for setting in settings if setting != "none"), "none")
    return "on" if chosen == "tf32" else "off"
