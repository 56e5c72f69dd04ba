"""What a backward costs in two parts, I and then W, beside the whole of it, B: on the same graph,
in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from penstock.grad.split import PendingWeights, input_grad, weight_grad
from penstock.zoo.catalogue import model as zoo_model

#: glibc gives freed memory back to the system and fetches it again, page by page; or it keeps it.
ALLOCATORS = {
    "as it comes": {},
    "memory kept": {
        "MALLOC_MMAP_THRESHOLD_": "4000000000",
        "MALLOC_TRIM_THRESHOLD_": "8000000000",
        "MALLOC_TOP_PAD_": "500000000",
    },
}


def stages() -> dict[str, tuple[nn.Sequential, Tensor]]:
    """Middle stages of three kinds, with what enters them."""
    torch.manual_seed(0)
    linear = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())))
    blocks = nn.Sequential(
        *list(
            zoo_model("gpt", layers=4, width=256, heads=8, tokens=128, vocabulary=256, dropout=0.0)
        )[1:-1]
    )
    convolutions = nn.Sequential(
        *(layer for _ in range(4) for layer in (nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()))
    )
    return {
        "6 x Linear 512, ReLU; 256 samples": (linear, torch.randn(256, 512)),
        "4 GPT blocks of width 256; 4 x 128 tokens": (blocks, torch.randn(4, 128, 256)),
        "4 x Conv 64, 3x3, ReLU; 8 x 32 x 32": (convolutions, torch.randn(8, 64, 32, 32)),
    }


def milliseconds(action: Callable[[], object]) -> float:
    """How long it takes, once."""
    start = time.perf_counter()
    action()
    return 1e3 * (time.perf_counter() - start)


def graph(stage: nn.Sequential, entering: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A fresh forward: what enters, what leaves, and a gradient for it."""
    leaf = entering.detach().requires_grad_()
    out = stage(leaf)
    return leaf, out, torch.ones_like(out)


def whole(stage: nn.Sequential, entering: Tensor) -> float:
    """B of one micro-batch."""
    _, out, grad = graph(stage, entering)
    return milliseconds(lambda: out.backward(grad))


def halves(stage: nn.Sequential, entering: Tensor) -> tuple[float, float]:
    """I and W of one micro-batch."""
    leaf, out, grad = graph(stage, entering)
    pending: list[PendingWeights] = []
    first = milliseconds(lambda: pending.append(input_grad([out], [grad], [leaf])[1]))
    return first, milliseconds(lambda: weight_grad(pending[0]))


def one_round(
    stage: nn.Sequential, entering: Tensor, halves_first: bool
) -> tuple[float, float, float]:
    """B, I and W; in turn, so that neither is always the one that finds warm caches."""
    if halves_first:
        first, second = halves(stage, entering)
        return whole(stage, entering), first, second
    return whole(stage, entering), *halves(stage, entering)


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Medians over the rounds, and of the ratios round by round."""
    torch.set_num_threads(1)
    results: dict[str, dict[str, float]] = {}
    for name, (stage, entering) in stages().items():
        times = [one_round(stage, entering, bool(n % 2)) for n in range(rounds)][rounds // 6 :]
        b, i, w = (statistics.median(column) for column in zip(*times, strict=True))
        ratio = statistics.median((one + two) / both for both, one, two in times)
        results[name] = {
            "b_ms": round(b, 3),
            "i_ms": round(i, 3),
            "w_ms": round(w, 3),
            "ratio": round(ratio, 3),
        }
    return results


def main() -> None:
    """Measure under both settings of glibc's allocator, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument(
        "--here", action="store_true", help="measure in this process and print JSON"
    )
    words = parser.parse_args()
    if words.here:
        print(json.dumps(measure(words.rounds)))
        return
    results = {}
    for setting, variables in ALLOCATORS.items():
        command = [sys.executable, __file__, "--here", "--rounds", str(words.rounds)]
        ran = subprocess.run(
            command, env={**os.environ, **variables}, check=True, capture_output=True, text=True
        )
        results[setting] = json.loads(ran.stdout.splitlines()[-1])
        for name, row in results[setting].items():
            print(
                f"{setting:14} {name:42} B {row['b_ms']:7.2f} ms  I {row['i_ms']:7.2f}  W {row['w_ms']:7.2f}  "
                f"(I + W) / B {row['ratio']:.3f}"
            )
    machine = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    text = json.dumps({"machine": machine, "rounds": words.rounds, "results": results}, indent=1)
    (Path(__file__).parent / "results.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
