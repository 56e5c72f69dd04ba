"""Is `auto` ever slower than naming a schedule, or than trying everything?

Random chains of 3 to 6 layers on 2 to 4 equal ranks. For each: the plan of `auto`, the plan that
results from naming each schedule alone, and for some the best of every schedule with every cut and
number of micro-batches, evaluated one by one. Everything is simulated, so the results do not depend
on the machine; only the seconds do.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from penstock.cluster.cluster import Cluster, Device, Link
from penstock.errors import PenstockError
from penstock.plan.plan import Plan
from penstock.profile.profile import LayerProfile, Profile, Timing
from penstock.search.catalogue import plan
from penstock.search.evaluate import evaluate
from penstock.search.instantiate import instantiate
from penstock.search.proposal import Proposal, replica_options
from penstock.search.request import PlanRequest
from penstock.search.schedules import schedules
from penstock.search.search_space import layouts

#: A ratio above this counts as slower: what the rounding of sums explains.
TOLERANCE = 1e-9

#: Schedules that consist of two copies of every stage. Naming them exceeds max_replicas=1, so that
#: they are not comparable to a search that keeps to it.
WITH_COPIES = ("chimera", "dualpipe", "gems")


@dataclass(frozen=True)
class Case:
    """A random request.

    Attributes:
        seed: of the random numbers.
        profile: costs of the layers.
        cluster: equal ranks with equal links.
        batch: samples in a batch.
        max_replicas: most replicas of a stage; None for any number.
    """

    seed: int
    profile: Profile
    cluster: Cluster
    batch: int
    max_replicas: int | None


def random_case(seed: int, max_replicas: int | None) -> Case:
    """Return the case of a seed: layers whose times differ by up to 10 or up to 50 times."""
    rng = random.Random(seed)
    layers, ranks, batch = rng.randint(3, 6), rng.randint(2, 4), rng.choice([8, 16, 32])
    spread = rng.choice([10, 50])
    fixed_s = rng.choice([0.0, 2e-4, 1e-3])
    rows = tuple(random_layer(rng, number, spread, fixed_s) for number in range(layers))
    update_s_per_byte = rng.choice([0.0, 1e-9])
    profile = Profile(rows, f"random {seed}", 10.0, 16, update_s_per_byte=update_s_per_byte)
    link = Link(rng.choice([1e-6, 1e-5, 1e-4]), rng.choice([1e8, 1e9, 1e10]))
    devices = (Device("device", 10**13),) * ranks
    return Case(seed, profile, Cluster("random", devices, 1, link, link), batch, max_replicas)


def random_layer(rng: random.Random, number: int, spread: float, fixed_s: float) -> LayerProfile:
    """Return a layer whose seconds per sample are between 0.2 ms and `spread` times that; a split
    backward takes as long as a whole one, or up to 30 % longer.
    """
    forward_s = 2e-4 * spread ** rng.random()
    backward_s = forward_s * rng.uniform(1.6, 2.4)
    input_share, split_cost = rng.uniform(0.4, 0.6), rng.uniform(1.0, 1.3)
    split_s = backward_s * split_cost

    def timing(seconds: float) -> Timing:
        """Return a fixed cost per call and a cost per sample."""
        return Timing((1, 16), (fixed_s + seconds, fixed_s + 16 * seconds))

    parameters = int(10 ** rng.uniform(3, 7))
    activation_bytes, output_bytes = 10 ** rng.uniform(2, 5), 10 ** rng.uniform(2, 5.5)
    return LayerProfile(
        f"layer {number}",
        "random",
        timing(forward_s),
        timing(backward_s),
        timing(split_s * input_share),
        timing(split_s * (1 - input_share)),
        parameters,
        parameters,
        0,
        activation_bytes,
        output_bytes,
    )


def comparable_schedules(case: Case) -> list[str]:
    """Return the names of the schedules that `auto` considers for a case."""
    return [
        name
        for name, facts in schedules().items()
        if facts.synchronous
        and not facts.causal
        and not facts.needs_costs
        and not (case.max_replicas == 1 and name in WITH_COPIES)
    ]


def every_proposal(case: Case) -> Iterator[Proposal]:
    """Yield every schedule with every number of stages, of replicas and of micro-batches, and every
    cut.
    """
    request = PlanRequest(case.profile, case.cluster, case.batch)
    layers, most = len(case.profile), case.max_replicas or case.cluster.ranks
    for name in comparable_schedules(case):
        facts = schedules()[name]
        for pipelines in range(1, most + 1):
            for ranks in range(1, case.cluster.ranks // pipelines + 1):
                for stages, options in layouts(facts, ranks):
                    if stages > layers or (ranks == 1 and stages > 1):
                        continue
                    all_options = (*replica_options(pipelines), *options)
                    for inner in combinations(range(1, layers), stages - 1):
                        lengths = tuple(b - a for a, b in pairwise((0, *inner, layers)))
                        for count in request.micro_batch_counts(pipelines):
                            yield Proposal(lengths, name, count, all_options)


def best_of_all(case: Case) -> float:
    """Return the seconds per step of the fastest proposal of `every_proposal`."""
    request = PlanRequest(case.profile, case.cluster, case.batch)
    best_s = float("inf")
    for proposal in every_proposal(case):
        try:
            best_s = min(best_s, evaluate(instantiate(request, proposal))[-1].step_s)
        except PenstockError:
            continue
    return best_s


def timed_plan(case: Case, **options: Any) -> tuple[Plan | None, float]:
    """Return the plan of a case, None if there is none, and the seconds that it took."""
    start = time.perf_counter()
    try:
        found = plan(
            case.profile, case.cluster, case.batch, max_replicas=case.max_replicas, **options
        )
    except PenstockError:
        return None, time.perf_counter() - start
    return found, time.perf_counter() - start


def row_of(case: Case, exhaustive: bool) -> dict[str, Any]:
    """Return the result of one case."""
    auto, auto_seconds = timed_plan(case)
    assert auto is not None
    named: dict[str, float] = {}
    for name in comparable_schedules(case):
        alone, _ = timed_plan(case, schedules=[name])
        if alone is not None:
            named[name] = alone.predicted.step_s
    best_name = min(named, key=lambda name: named[name])
    row: dict[str, Any] = {
        "seed": case.seed,
        "layers": len(case.profile),
        "ranks": case.cluster.ranks,
        "batch": case.batch,
        "max_replicas": case.max_replicas,
        "auto": auto.schedule_name,
        "auto_s": auto.predicted.step_s,
        "planned_in_s": auto_seconds,
        "search_note": auto.search_note,
        "best_named": best_name,
        "to_best_named": auto.predicted.step_s / named[best_name],
    }
    if exhaustive:
        row["to_best_of_all"] = auto.predicted.step_s / best_of_all(case)
    return row


def main() -> int:
    """Compare all cases, print them, and write named.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=30, help="cases with and without replicas")
    parser.add_argument("--exhaustive", type=int, default=8, help="cases that try everything")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("named.json"))
    arguments = parser.parse_args()
    rows = []
    for seed in range(arguments.first, arguments.first + arguments.cases):
        for max_replicas in (1, None):
            exhaustive = seed - arguments.first < arguments.exhaustive
            row = row_of(random_case(seed, max_replicas), exhaustive)
            rows.append(row)
            print(json.dumps(row), flush=True)
    # On a busy machine the clock may end a search; the plan says so.
    complete = [row for row in rows if "by the clock" not in row["search_note"]]
    slower = [row for row in complete if row["to_best_named"] > 1 + TOLERANCE]
    ratios = [row["to_best_of_all"] for row in complete if "to_best_of_all" in row]
    beaten = [ratio for ratio in ratios if ratio > 1 + TOLERANCE]
    print(f"{len(rows) - len(complete)} of {len(rows)} searches cut short by the clock")
    print(f"{len(slower)} of the others slower than a named schedule")
    print(f"{len(beaten)} of {len(ratios)} slower than the best of all")
    arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if slower or beaten else 0


if __name__ == "__main__":
    raise SystemExit(main())
