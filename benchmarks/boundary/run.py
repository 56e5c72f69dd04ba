"""What boundaries in fewer bits do to the loss, and to what travels: a small GPT on Python's
documentation, four stages.

Every way trains from the same weights on the same batches; only what crosses the boundaries
differs.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from pathlib import Path

import torch

import penstock as ps
from penstock.transport.compressed import CODES, compress
from penstock.transport.payload import Payload
from penstock.zoo.catalogue import model as zoo_model
from penstock.zoo.gpt import gpt_loss

WIDTH, TOKENS, BATCH, MICRO_BATCHES = 64, 64, 16, 4
STAGES = 4


def text() -> torch.Tensor:
    """The bytes of what Python says of itself."""
    import pydoc_data.topics

    return torch.frombuffer(
        bytearray("\n".join(pydoc_data.topics.topics.values()).encode()), dtype=torch.uint8
    ).long()


def losses(code: str | None, seed: int, steps: int) -> list[float]:
    """Of every step."""
    torch.manual_seed(seed)
    model = zoo_model(
        "gpt", layers=STAGES, width=WIDTH, heads=4, tokens=TOKENS, vocabulary=256, dropout=0.0
    )
    pipe = ps.Pipeline(
        model,
        balance=ps.partition(model_profile(model), stages=STAGES, by="uniform"),
        schedule="1f1b",
        micro_batches=MICRO_BATCHES,
        loss=gpt_loss,
        optimizer=lambda p: torch.optim.AdamW(p, lr=2e-3),
        boundary=code,
        executor="threads",
    )
    generator = torch.Generator().manual_seed(seed)
    data = text()
    values = []
    for _ in range(steps):
        starts = torch.randint(0, len(data) - TOKENS - 1, (BATCH,), generator=generator).tolist()
        rows = torch.stack([data[start : start + TOKENS + 1] for start in starts])
        values.append(float(pipe.train_batch(rows[:, :-1], rows[:, 1:])))
    pipe.close()
    return values


def model_profile(model: torch.nn.Module) -> ps.Profile:
    """Enough of one to cut by."""
    return ps.analytic(
        ps.chain(model), torch.zeros(1, TOKENS, dtype=torch.int64), "A100", batch=BATCH
    )


def sent(code: str | None) -> int:
    """Bytes of one boundary tensor of a micro-batch."""
    payload = Payload.of(torch.randn(BATCH // MICRO_BATCHES, TOKENS, WIDTH))
    return (payload if code is None else compress(payload, code)).nbytes


def main() -> None:
    """Print a table, write results.json."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--steps", type=int, default=300)
    words.add_argument("--seeds", type=int, default=3)
    words.add_argument("--out", type=Path, default=Path(__file__).with_name("results.json"))
    arguments = words.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, dict[str, object]] = {}
    for code in (None, *CODES):
        ends = [
            statistics.mean(losses(code, seed, arguments.steps)[-20:])
            for seed in range(arguments.seeds)
        ]
        rows[code or "as it is"] = {
            "bytes": sent(code),
            "final_loss": [round(end, 4) for end in ends],
        }
    base = rows["as it is"]["final_loss"]
    print(
        f"{'boundary':10} {'bytes':>8}  loss after {arguments.steps} steps (mean of the last 20), by seed; difference to as it is"
    )
    for name, row in rows.items():
        row["difference"] = [round(a - b, 4) for a, b in zip(row["final_loss"], base, strict=True)]  # type: ignore[call-overload]
        print(f"{name:10} {row['bytes']:>8}  {row['final_loss']}  {row['difference']}")
    machine = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    arguments.out.write_text(
        json.dumps({"machine": machine, "steps": arguments.steps, "results": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
