"""Where everybody cuts: found once, by the layers' measured times, on ranks that share this host as
the systems' ranks will.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from cells import Cell, Cuts
from torch import nn
from workloads import WORKLOADS, first_batch, layers_of

import penstock as ps
from penstock.cluster.device import Link
from penstock.measure.link import measure_link
from penstock.measure.profiler import machine_facts
from penstock.ranks.process_world import join

HERE = Path(__file__).parent
#: Kept from run to run while the machine and torch stay the same.
PROFILES = HERE / "profiles"
RANKS = 2


def _profile(workload: str) -> ps.Profile:
    join()
    torch.manual_seed(0)
    network, (x, y) = nn.Sequential(*layers_of(WORKLOADS[workload].make())), first_batch(workload)
    samples = WORKLOADS[workload].samples
    sizes = sorted({max(2, samples // parts) for parts in (2, 4, 16)})
    return ps.profile(
        network,
        x,
        sizes=sizes,
        repeats=3,
        threads=1,
        loss=WORKLOADS[workload].loss,
        targets=y,
        together=True,
    )


def _link() -> Link:
    join()
    return measure_link()


def machine() -> dict[str, object]:
    """What figures depend on."""
    return {**machine_facts(torch.device("cpu")), "torch": torch.__version__}


def profile_of(workload: str, anew: bool) -> ps.Profile:
    """Measured now, or kept from a run on this machine."""
    path, facts = PROFILES / f"{workload}.json", PROFILES / "machine.json"
    same = facts.exists() and json.loads(facts.read_text()) == json.loads(json.dumps(machine()))
    if path.exists() and same and not anew:
        return ps.Profile.load(path)
    if not same:
        for stale in PROFILES.glob("*.json"):
            stale.unlink()
    print(f"measuring the layers of {workload} …", flush=True)
    PROFILES.mkdir(exist_ok=True)
    profile = ps.launch(_profile, RANKS, workload, threads=1)[0]
    assert isinstance(profile, ps.Profile)
    profile.save(path)
    facts.write_text(json.dumps(machine(), indent=1) + "\n")
    return profile


def link(anew: bool) -> Link:
    """Between two ranks of this host. Measured before profiles, so that it stands with them."""
    path = PROFILES / "link.json"
    if path.exists() and not anew:
        return Link(**json.loads(path.read_text()))
    measured_link = ps.launch(_link, RANKS, threads=1)[0]
    assert isinstance(measured_link, Link)
    PROFILES.mkdir(exist_ok=True)
    path.write_text(
        json.dumps(
            {
                "latency_s": measured_link.latency_s,
                "bandwidth_bytes_per_s": measured_link.bandwidth_bytes_per_s,
                "source": "measured",
            }
        )
        + "\n"
    )
    return measured_link


def cuts_of(cell: Cell, profile: ps.Profile) -> Cuts:
    """By the slowest stage, at the cell's micro-batches."""
    samples, layers = (
        WORKLOADS[cell.workload].samples,
        len(layers_of(WORKLOADS[cell.workload].make())),
    )
    assert layers == len(profile)

    def cut(stages: int) -> tuple[int, ...]:
        lengths = tuple(
            ps.partition(profile, stages, by="bottleneck", micro_batch=samples / cell.micro_batches)
        )
        # A stage without weights has nothing to give an optimizer, which some peers refuse: then
        # all stages have as many layers.
        firsts = [sum(lengths[:stage]) for stage in range(stages)]
        for first, length in zip(firsts, lengths, strict=True):
            if not any(layer.parameters for layer in profile.layers[first : first + length]):
                return tuple(ps.partition(profile, stages, by="uniform"))
        return lengths

    return Cuts(cut(cell.stages), cut(2 * cell.stages) if layers >= 2 * cell.stages else None)


def with_plan(cuts: Cuts, cell: Cell, profile: ps.Profile, between: Link, folder: Path) -> Cuts:
    """Also with what the planner would do on as many ranks; the whole batch and the optimizer are
    given, all else is its own choice.
    """
    on = ps.cluster(f"local:{cell.stages}").with_links(inside=between)
    plan = ps.plan(profile, on, WORKLOADS[cell.workload].samples)
    path = folder / f"{cell.workload}-{cell.stages}.plan.json"
    plan.save(path)
    return replace(cuts, plan=str(path), plan_ranks=plan.ranks)


def found(cell: Cell, folder: Path, anew: bool, planned: bool) -> Cuts:
    """All of it for one cell."""
    profile = profile_of(cell.workload, anew)
    cuts = cuts_of(cell, profile)
    return with_plan(cuts, cell, profile, link(anew), folder) if planned else cuts
