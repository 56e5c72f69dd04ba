"""What a backward costs in two parts, I and then W, beside the whole of it, B: on the same graph, in turn."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from penstock.grad.split import input_grad, weight_grad
from penstock.zoo.catalogue import model as zoo_model


def stages() -> dict[str, tuple[nn.Sequential, Tensor]]:
    """Middle stages of three kinds, with what enters them."""
    torch.manual_seed(0)
    linear = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.ReLU())))
    blocks = nn.Sequential(*list(zoo_model("gpt", layers=4, width=256, heads=8, tokens=128, vocabulary=256, dropout=0.0))[1:-1])
    convolutions = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())))
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


def one_round(stage: nn.Sequential, entering: Tensor) -> tuple[float, float, float]:
    """B, I and W of one micro-batch, each on a fresh graph."""

    def graph() -> tuple[Tensor, Tensor, Tensor]:
        leaf = entering.detach().requires_grad_()
        out = stage(leaf)
        return leaf, out, torch.ones_like(out)

    leaf, out, grad = graph()
    whole = milliseconds(lambda: out.backward(grad))
    leaf, out, grad = graph()
    pending = []
    first = milliseconds(lambda: pending.append(input_grad([out], [grad], [leaf])[1]))
    return whole, first, milliseconds(lambda: weight_grad(pending[0]))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    results: dict[str, dict[str, float]] = {}
    for name, (stage, entering) in stages().items():
        found = [one_round(stage, entering) for _ in range(rounds)][rounds // 6 :]
        whole, first, second = (statistics.median(column) for column in zip(*found, strict=True))
        ratio = statistics.median((i + w) / b for b, i, w in found)
        results[name] = {"b_ms": round(whole, 3), "i_ms": round(first, 3), "w_ms": round(second, 3), "ratio": round(ratio, 3)}
        print(f"{name:44} B {whole:8.2f} ms   I {first:8.2f}   W {second:8.2f}   (I + W) / B {ratio:.3f}")
    machine = {"machine": platform.machine(), "torch": torch.__version__, "python": platform.python_version()}
    text = json.dumps({"machine": machine, "rounds": rounds, "results": results}, indent=1)
    (Path(__file__).parent / "results.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
