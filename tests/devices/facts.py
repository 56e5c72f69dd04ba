"""Facts of made-up ranks: what torchrun, Slurm and containers show a process."""

from __future__ import annotations

from dataclasses import replace

from penstock.transport.devices.device_assignment import Card, RankFacts


def card(index, uuid=None, *, host="a", mig=False):
    """A card; its UUID has the host and the index unless one is given."""
    name = "NVIDIA A100-SXM4-40GB MIG 1g.5gb" if mig else "NVIDIA H100 80GB HBM3"
    return Card(index, name, f"{host}-{index}" if uuid is None else uuid, mig)


def cards(count, *, host="a"):
    """All cards of a host, in the host's order."""
    return tuple(card(index, host=host) for index in range(count))


def facts(visible=(), *, host="a", requested=None, hostname=None, **environment):
    """A rank that sees CUDA cards; environment variables by name."""
    return RankFacts(
        hostname=hostname or host,
        host=f"boot id of {host}",
        environment=tuple((name, str(value)) for name, value in environment.items()),
        accelerator="cuda" if visible else "",
        cards=tuple(visible),
        requested=requested,
        nccl=True,
    )


def torchrun(hosts, per_host, visible, *, requested=None):
    """The ranks of torchrun on several hosts that each have so many visible cards."""
    size = len(hosts) * per_host
    return [
        facts(
            cards(visible, host=host),
            host=host,
            requested=requested,
            RANK=number * per_host + local,
            WORLD_SIZE=size,
            LOCAL_RANK=local,
            LOCAL_WORLD_SIZE=per_host,
        )
        for number, host in enumerate(hosts)
        for local in range(per_host)
    ]


def asking(ranks, *requested):
    """The same ranks, of which each asks for a device."""
    return [replace(rank, requested=device) for rank, device in zip(ranks, requested, strict=True)]
