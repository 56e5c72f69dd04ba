"""Run a plan that the user has, instead of searching one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.errors import PlanError, SettingError
from penstock.files.text import quote_path
from penstock.plan.plan import Plan

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
    plan = Plan.load(path)
    if plan.fingerprint != fingerprint:
        raise PlanError(
            f"{path} is the plan of another model: its layers and shapes have fingerprint "
            f"{plan.fingerprint}, this model's have {fingerprint}. Make one for this model: "
            "penstock plan --model …"
        )
    return replace(plan, devices=())


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
