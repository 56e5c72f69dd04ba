"""Does a step take what the plan said it would, and as much memory? Predicted before the run, then
run for real, for many configurations.

For every model: its layers are profiled on two ranks together, every configuration is planned from
that, and only then all of them run, in two processes with one thread each, over gloo. Nothing of a
run goes into a prediction.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.cluster.cluster import Cluster
from penstock.cluster.device import Link
from penstock.event import Event, Timeline
from penstock.measure.link import measure_link
from penstock.measure.profiler import machine_facts
from penstock.plan.plan import Plan
from penstock.profile.profile import Profile
from penstock.ranks.process_world import join
from penstock.schedule.op import Kind
from penstock.search.best_plan import plan_proposal
from penstock.search.proposal import Proposal
from penstock.search.request import PlanRequest
from penstock.simulate.plan_costs import costs_of_plan
from penstock.simulate.stage_seconds import stage_seconds
from penstock.zoo.catalogue import model as zoo_model
from penstock.zoo.gpt import gpt_loss

RANKS = 2

#: The models of the zoo, what they are made with, and samples in a batch.
MODELS = {
    "vgg11_bn": ({"classes": 100, "image": 32}, 32),
    "resnet18": ({"classes": 100, "image": 32}, 16),
    "gpt": ({"layers": 6, "width": 192, "heads": 6, "tokens": 64, "vocabulary": 256}, 16),
    "mlp": ({"features": 512, "hidden": 768, "layers": 12, "classes": 100}, 256),
}


@dataclass(frozen=True)
class Case:
    """One configuration. With `copies`, each rank holds all stages and takes its share of the
    micro-batches.
    """

    schedule: str
    stages: int
    micro_batches: int
    recompute: str = "never"
    copies: int = 1

    def __str__(self) -> str:
        more = "" if self.recompute == "never" else f" recompute {self.recompute}"
        return f"{self.schedule} S={self.stages} M={self.micro_batches}{more}" + (
            f" x{self.copies}" if self.copies > 1 else ""
        )


CASES = (
    Case("1f1b", 2, 4),
    Case("gpipe", 2, 8),
    Case("1f1b", 2, 4, "always"),
    Case("interleaved", 4, 4),
    Case("zb-v", 4, 4),
    Case("zb-h1", 2, 4),
    Case("gpipe", 1, 2, copies=2),
    Case("1f1b", 2, 2, "except_last"),
)
QUICK = {"resnet18": CASES[:3], "gpt": CASES[:1] + CASES[3:5]}

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


#: How often every configuration is run.
ROUNDS = 2


def workload(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor, Loss]:
    """Model, a batch and its loss; the same on every rank."""
    torch.manual_seed(0)
    options, batch = MODELS[name]
    network = zoo_model(name, **options)
    if name == "gpt":
        shape = (batch, int(str(options["tokens"])))
        return network, torch.randint(0, 256, shape), torch.randint(0, 256, shape), gpt_loss
    shape = (batch, int(str(options["features"]))) if name == "mlp" else (batch, 3, 32, 32)
    return network, torch.randn(shape), torch.randint(0, 100, (batch,)), nn.functional.cross_entropy


def measured_profile(name: str) -> Profile:
    """On every rank, the profile of a model: a layer is measured while the other rank measures
    another one.
    """
    network, x, y, loss = workload(name)
    return ps.profile(network, x, threads=1, loss=loss, targets=y, together=True, repeats=9)


def planned(profile: Profile, on: Cluster, case: Case) -> Plan:
    """The plan of one configuration, cut by `bottleneck`."""
    lengths = ps.partition(
        profile, case.stages, by="bottleneck", micro_batch=profile.batch / case.micro_batches
    )
    request = PlanRequest(profile, on, profile.batch, recompute=case.recompute)  # type: ignore[arg-type]
    options = (("replicas", case.copies),) if case.copies > 1 else ()
    return plan_proposal(
        request,
        Proposal(tuple(lengths), case.schedule, case.micro_batches, options, case.recompute),
    )  # type: ignore[arg-type]


def run(name: str, plans: list[Plan], steps: int) -> list[tuple[list[float], list[Timeline]]]:
    """Seconds of steps under each plan, as a training loop sees them, and what happened in them.

    All plans run in turn, and then again: of each the calmer run counts. What others do on a shared
    machine only adds to it.
    """
    join()
    measurements: dict[int, tuple[list[float], list[Timeline]]] = {}
    for index, plan in [*enumerate(plans)] * ROUNDS:
        network, x, y, loss = workload(name)
        pipe = ps.Pipeline(
            network, plan, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9)
        )
        for _ in range(4):
            pipe.train_batch(x, y)
        seconds, timelines = [], []
        gc.collect()
        for _ in range(steps):
            dist.barrier()
            start = time.perf_counter()
            pipe.train_batch(x, y)
            seconds.append(time.perf_counter() - start)
            timelines.append(pipe.timeline())
        if index not in measurements or statistics.median(seconds) < statistics.median(
            measurements[index][0]
        ):
            measurements[index] = seconds, timelines
        pipe.close()
    return [measurements[index] for index in range(len(plans))]


def parts(timeline: Timeline) -> dict[str, float]:
    """Seconds of the rank in the mean: layers, updates, and the rest: messages and waits."""
    updates, ops = (sum(map(_seconds, kind)) / timeline.ranks for kind in _split(timeline.compute))
    return {
        "layers": ops,
        "update": updates,
        "messages and waits": timeline.makespan - ops - updates,
    }


def _split(events: tuple[Event, ...]) -> tuple[list[Event], list[Event]]:
    updates = [event for event in events if event.op.kind is Kind.U]
    return updates, [event for event in events if event.op.kind is not Kind.U]


def _seconds(event: Event) -> float:
    return event.end - event.start


def predicted_parts(plan: Plan, profile: Profile, on: Cluster) -> dict[str, float]:
    """The same of the simulation, which has the CPU's part of messages in the ops."""
    simulated = parts(ps.simulate(plan, profile, on))
    costs, layers = (
        costs_of_plan(plan, profile, on),
        stage_seconds(profile, plan.lengths, plan.batch / plan.micro_batches),
    )
    down, up = (
        [
            cost - measured_layer
            for cost, measured_layer in zip(
                costs.spread(phase, plan.stages) or (), layers[phase], strict=True
            )
        ]
        for phase in ("forward", "input_grad")
    )
    by_kind = {Kind.F: down, Kind.B: up, Kind.I: up}
    moved = (
        sum(
            by_kind[op.kind][op.stage]
            for row in plan.schedule.programs
            for op in row
            if op.kind in by_kind
        )
        / plan.ranks
    )
    return {
        **simulated,
        "layers": simulated["layers"] - moved,
        "messages and waits": simulated["messages and waits"] + moved,
    }


def record(
    plan: Plan, profile: Profile, on: Cluster, seconds: list[float], timelines: list[Timeline]
) -> dict[str, object]:
    """One row of the results."""
    step = statistics.median(seconds)
    quarters = statistics.quantiles(seconds, n=4)
    expected = predicted_parts(plan, profile, on)
    rows = [parts(timeline) for timeline in timelines]
    real = {}
    for name in expected:
        real[name] = statistics.median([row[name] for row in rows])
    outside = step - statistics.median(timeline.makespan for timeline in timelines)
    peaks = timelines[-1].peak_memory or ()
    errors = [a / b - 1 for a, b in zip(plan.predicted.peak_memory, peaks, strict=True)]
    off = {
        **{name: expected[name] - real[name] for name in expected},
        "outside the schedule": -outside,
    }
    return {
        "lengths": list(plan.lengths),
        "predicted_ms": round(plan.predicted.step_s * 1e3, 2),
        "measured_ms": round(step * 1e3, 2),
        "spread_ms": round((quarters[2] - quarters[0]) * 1e3, 2),
        "error": round(plan.predicted.step_s / step - 1, 4),
        "predicted_peak_bytes": list(plan.predicted.peak_memory),
        "measured_peak_bytes": list(peaks),
        "memory_error": round(max(errors, key=abs), 4),
        "parts_ms": {
            name: [round(expected[name] * 1e3, 2), round(real[name] * 1e3, 2)] for name in expected
        },
        "outside_ms": round(outside * 1e3, 2),
        "most_off": max(off, key=lambda name: abs(off[name])),
    }


def show(rows: dict[str, dict[str, object]]) -> None:
    """The table: predicted and measured, and of each part of the mean rank the same."""
    print(
        f"{'':44}{'predicted':>10}{'measured':>10}{'error':>8}{'memory':>8}  layers          update        messages, waits  outside"
    )
    for case, row in rows.items():
        milliseconds = row["parts_ms"]
        assert isinstance(milliseconds, dict)
        columns = "  ".join(
            f"{predicted:6.1f}/{real:6.1f} " for predicted, real in milliseconds.values()
        )
        cause = f"  <- {row['most_off']}" if abs(float(str(row["error"]))) > 0.1 else ""
        print(
            f"{case:44}{row['predicted_ms']:>10}{row['measured_ms']:>10}{row['error']:>+8.1%}{row['memory_error']:>+8.1%}  {columns}"
            f"  {row['outside_ms']:.1f}{cause}",
            flush=True,
        )


def summary(rows: dict[str, dict[str, object]]) -> dict[str, float]:
    """Median and worst errors."""
    errors = [abs(float(str(row["error"]))) for row in rows.values()]
    memory = [abs(float(str(row["memory_error"]))) for row in rows.values()]
    return {
        "configurations": len(rows),
        "median_step_error": round(statistics.median(errors), 4),
        "worst_step_error": round(max(errors), 4),
        "median_memory_error": round(statistics.median(memory), 4),
        "worst_memory_error": round(max(memory), 4),
    }


def main() -> None:
    """Print a table, write results.json."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--quick", action="store_true", help="6 configurations")
    words.add_argument(
        "--steps",
        type=int,
        default=12,
        help="timed steps of each configuration, in each of two rounds",
    )
    words.add_argument("--out", type=Path, default=None)
    arguments = words.parse_args()
    started, rows = time.perf_counter(), {}
    cases = QUICK if arguments.quick else dict.fromkeys(MODELS, CASES)

    def link() -> Link:
        join()
        return measure_link()

    on = ps.cluster(f"local:{RANKS}").with_links(inside=ps.launch(link, RANKS, threads=1)[0])
    print(on)
    for name, options in cases.items():
        profile = ps.launch(measured_profile, RANKS, name, threads=1)[0]
        plans = [planned(profile, on, case) for case in options]
        results = ps.launch(run, RANKS, name, plans, arguments.steps, threads=1)[0]
        records = {
            f"{name} {case}": record(plan, profile, on, *result)
            for case, plan, result in zip(options, plans, results, strict=True)
        }
        show(records)
        rows |= records
    report = {**summary(rows), "seconds": round(time.perf_counter() - started, 1)}
    print(json.dumps(report))
    machine = {
        **machine_facts(torch.device("cpu")),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "link": str(on.inside),
    }
    out = arguments.out or Path(__file__).with_name(
        "quick.json" if arguments.quick else "results.json"
    )
    out.write_text(
        json.dumps({"machine": machine, "summary": report, "results": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
