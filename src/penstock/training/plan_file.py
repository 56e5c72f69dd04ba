"""Run a plan that the user has, instead of searching one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.cluster.cluster import Cluster
from penstock.errors import PlanError, SettingError
from penstock.files.text import quote_path
from penstock.plan.plan import Plan
from penstock.ranks.placement import ranks_of_devices
from penstock.ranks.settings.run_config import RunConfig
from penstock.search.build_plan import cluster_devices
from penstock.tracing.traced_chain import TracedChain

#: Settings that a plan contains.
_PLAN_SETTINGS = (
    "ranks",
    "stages",
    "schedule",
    "micro_batches",
    "partition",
    "recompute",
    "weights",
    "weights_options",
    "asynchronous",
    "memory_limit",
)


def load_plan(path: str, fingerprint: str) -> Plan:
    """Read the plan of a run, and check that it is for the run's model.

    The ranks of this machine are all alike: which devices of its cluster the plan uses is dropped.

    Raises:
        FileError: the file is missing or is no plan.
        PlanError: it is the plan of another model.
    """
    return replace(_read_plan(path, fingerprint), devices=())


def load_plan_for(path: str, traced: TracedChain, cluster: Cluster) -> Plan:
    """Read the plan of a run, with its devices numbered as in the cluster of the run.

    Args:
        path: of the plan.
        traced: the model.
        cluster: of the run. If it names no hosts, see `load_plan`. Otherwise the devices of a host
            are those of the host of that name, in order, however the launcher has numbered them.

    Returns:
        The plan, with the devices that it names if the cluster does not have them; then `Pipeline`
        refuses it.

    Raises:
        FileError, PlanError: see `load_plan`.
    """
    if not cluster.hosts:
        return load_plan(path, traced.fingerprint)
    plan = _read_plan(path, traced.fingerprint)
    places = cluster_devices(cluster)
    ranks = ranks_of_devices(RunConfig.of_plan(plan, traced), [host for host, _ in places])
    if ranks is None:
        return plan
    used = plan.devices or tuple(range(plan.ranks))
    rank_of = dict(zip(sorted(used), ranks, strict=True))
    return replace(
        plan,
        devices=tuple(rank_of[device] for device in used),
        cluster=cluster.name,
        cluster_ranks=cluster.ranks,
        cluster_devices=places,
    )


def _read_plan(path: str, fingerprint: str) -> Plan:
    """Read a plan, and check that it is for the model with this fingerprint."""
    plan = Plan.load(path)
    if plan.fingerprint != fingerprint:
        raise PlanError(
            f"{path} is the plan of another model: its layers and shapes have fingerprint "
            f"{plan.fingerprint}, this model's have {fingerprint}. Make one for this model: "
            "penstock plan --model …"
        )
    return plan


def settings_of_plan(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a new run that follow from its plan; empty if it has none.

    Args:
        values: the settings that the user has set, by name.

    Raises:
        FileError: the file is missing or is no plan.
        SettingError: settings contradict the plan.
    """
    path = values.get("plan")
    if not isinstance(path, str):
        return {}
    check_beside_plan(path, values)
    plan = Plan.load(path)
    batch = values.get("batch", plan.batch)
    if batch != plan.batch:
        raise SettingError(
            f"{quote_path(path)} is a plan for batches of {plan.batch} samples, and batch is {batch}: leave "
            "batch out, or plan anew"
        )
    return {"batch": plan.batch}


def check_beside_plan(path: str, values: Mapping[str, Any]) -> None:
    """Refuse settings that are parts of a plan, beside a plan.

    Args:
        path: of the plan.
        values: the settings that the user has set, by name.

    Raises:
        SettingError: there are some.
    """
    names = [name for name in _PLAN_SETTINGS if values.get(name) not in (None, {}, False)]
    if names:
        raise SettingError(
            f"{quote_path(path)} is run exactly as planned, and {', '.join(names)} would change it: leave that "
            "out, or leave out the plan"
        )
