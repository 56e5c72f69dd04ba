"""What tracing a model costs: seconds of the trace, and the time of the traced layers beside the
model itself. Also which of the models `torch.fx` and `torch.export` trace as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import penstock as ps
from penstock.values.structure import flatten

PAIRS = 5


class UNet(nn.Module):
    """A U-Net of four levels with plain attribute access, as users write it."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64, 128)) -> None:
        super().__init__()
        inputs = (3, *widths)
        self.downs = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1) for a, b in zip(inputs, widths, strict=False)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths)
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.ups = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in pairs)
        self.joins = nn.ModuleList(nn.Conv2d(2 * b, b, 3, padding=1) for _, b in pairs)
        self.head = nn.Conv2d(widths[0], 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return a map of two classes."""
        skips = []
        for number, (down, norm) in enumerate(zip(self.downs, self.norms, strict=True)):
            x = functional.relu(norm(down(x if number == 0 else functional.max_pool2d(x, 2))))
            skips.append(x)
        skips.pop()
        for up, join in zip(self.ups, self.joins, strict=True):
            x = functional.relu(join(torch.cat([skips.pop(), up(x)], 1)))
        return self.head(x)


def language_model(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of transformers with random weights, and its inputs."""
    ids = torch.randint(0, 1000, (4, 64))
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=1000, n_layer=6, n_embd=128, n_head=4)
        return transformers.GPT2LMHeadModel(config), {"input_ids": ids}
    if kind == "llama":
        sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 12}
        config = transformers.LlamaConfig(vocab_size=1000, num_attention_heads=8, **sizes)
        return transformers.LlamaForCausalLM(config), {"input_ids": ids}
    config = transformers.T5Config(vocab_size=1000)  # the defaults are those of T5-small
    return transformers.T5ForConditionalGeneration(config), {
        "input_ids": ids,
        "decoder_input_ids": ids,
    }


def models() -> dict[str, tuple[nn.Module, Any]]:
    """The models of the table, each with an example of its inputs."""
    torch.manual_seed(0)
    resnet = transformers.ResNetForImageClassification(transformers.ResNetConfig())
    return {
        "GPT-2, 6 layers of 128": language_model("gpt2"),
        "Llama, 12 layers of 256": language_model("llama"),
        "T5-small": language_model("t5"),
        "ResNet-50 (transformers), 64 pixels": (
            resnet,
            {"pixel_values": torch.randn(8, 3, 64, 64)},
        ),
        "U-Net of 16 to 128 channels, 32 pixels": (UNet(), (torch.randn(8, 3, 32, 32),)),
    }


def forward_and_backward(output: Any) -> None:
    """Run the backward of the sum of all outputs."""
    leaves, _ = flatten(output)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    torch.stack([tensor.sum() for tensor in tensors]).sum().backward()


def cpu_seconds(action: Callable[[], object]) -> float:
    """CPU time of one call, which other work on the machine disturbs less than its duration."""
    start = time.process_time()
    action()
    return time.process_time() - start


def is_traced_by(tool: str, model: nn.Module, example: Any) -> bool:
    """Whether a tool of torch traces the model as it is."""
    positional, named = ((), example) if isinstance(example, dict) else (example, {})
    try:
        if tool == "fx":
            torch.fx.symbolic_trace(model)
        else:
            torch.export.export(model, positional, named, strict=False)
    except Exception:  # noqa: BLE001 - any failure counts
        return False
    return True


def measured(model: nn.Module, example: Any) -> dict[str, Any]:
    """The row of one model."""
    model.train()
    started = time.process_time()
    chain = ps.chain(model, example if isinstance(example, dict) else example[0])
    trace_s = time.process_time() - started

    def whole() -> None:
        output = model(**example) if isinstance(example, dict) else model(*example)
        forward_and_backward(output)

    def layers() -> None:
        value = example if isinstance(example, dict) else example[0]
        for module in chain.modules:
            value = module(value)
        forward_and_backward(value)

    whole()
    layers()
    ratios = []
    for number in range(PAIRS):
        order = (whole, layers) if number % 2 else (layers, whole)
        seconds = {action: cpu_seconds(action) for action in order}
        ratios.append(seconds[layers] / seconds[whole])
    return {
        "layers": len(chain.modules),
        "trace_s": round(trace_s, 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
        "torch.fx": is_traced_by("fx", model, example),
        "torch.export": is_traced_by("export", model, example),
    }


def main() -> None:
    """Measure all models, print the table of docs/models.md, and save results.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = {}
    print(
        "| model | layers | seconds to trace | forward and backward | `torch.fx` | `torch.export` |"
    )
    print("|---|---|---|---|---|---|")
    for name, (model, example) in models().items():
        row = rows[name] = measured(model, example)
        low, high = row["ratio_range"]
        tools = " | ".join("yes" if row[tool] else "no" for tool in ("torch.fx", "torch.export"))
        print(
            f"| {name} | {row['layers']} | {row['trace_s']} | {row['ratio']} ({low} to {high}) "
            f"| {tools} |",
            flush=True,
        )
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    content = {"machine": machine, "pairs": PAIRS, "rows": rows}
    arguments.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
