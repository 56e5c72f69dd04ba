"""`penstock doctor`: report the installation and check that devices and processes work."""

from __future__ import annotations

import importlib.util
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

import penstock
from penstock.cli.flags import options
from penstock.cli.flags.options import Json
from penstock.cluster.local import available_cores
from penstock.errors import PenstockError
from penstock.text_table import aligned

if TYPE_CHECKING:
    from penstock.measure.card_check import CardsReport

#: A package of each extra but torch, with the extra that installs it (see pyproject.toml).
EXTRAS = {
    "sklearn": "data",
    "tensorboard": "metrics",
    "matplotlib": "draw",
    "ortools": "search",
    "starlette": "explore",
    "transformers": "models",
}


def doctor(json: Json = False) -> None:
    """Report versions, backends, devices and optional packages, and test each GPU and a message
    between two processes. The exit status is 1 if a test fails.

    Example: penstock doctor
    """
    if importlib.util.find_spec("torch") is None:
        _report_without_torch(json)
        return
    from penstock.measure.card_check import TorchDriver, check_cards
    from penstock.ranks.local_link import measure_local_link

    report = check_cards(TorchDriver())
    facts = machine_facts(report)
    sound = report.sound
    try:
        facts["two processes"] = f"talk: {measure_local_link()}"
    except PenstockError as error:
        facts["two processes"] = f"do not talk: {error}"
        sound = False
    if json:
        options.print_json({**facts, "sound": sound})
    else:
        print(table(facts, report))
    if not sound:
        raise typer.Exit(1)


def machine_facts(report: CardsReport) -> dict[str, object]:
    """Collect the facts that `penstock doctor` reports, by name.

    Args:
        report: result of the check of the GPUs.
    """
    import torch
    import torch.distributed as dist

    backends = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    return {
        **_version_facts(),
        "torch": torch.__version__,
        "cores": available_cores(),
        "torch threads": torch.get_num_threads(),
        "backends": [name for name, available in backends.items() if available],
        "gpus": [card.name or card.device for card in report.cards],
        "cards": [{**asdict(card), "sound": card.sound} for card in report.cards],
        "cards not listed": report.problem,
        "nccl": report.nccl,
        "optional parts missing": _missing_extras(),
    }


def _version_facts() -> dict[str, object]:
    """Return the versions of Penstock and Python."""
    return {
        "penstock": penstock.__version__,
        "python": f"{platform.python_version()} at {sys.executable}",
    }


def _missing_extras() -> list[str]:
    """Return the optional packages that are not installed, with the command that installs each."""
    return [
        f"{package} (pip install 'penstock[{extra}]')"
        for package, extra in EXTRAS.items()
        if importlib.util.find_spec(package) is None
    ]


def _report_without_torch(json: bool) -> None:
    """Report an installation of the planning half, which has no devices to test."""
    facts: dict[str, object] = {
        **_version_facts(),
        "torch": "not installed; training and measuring need it: pip install 'penstock[torch]'",
        "cores": available_cores(),
        "optional parts missing": _missing_extras(),
    }
    if json:
        options.print_json({**facts, "sound": True})
        return
    print(_lines([(name, _fact_text(value)) for name, value in facts.items()]))


def table(facts: Mapping[str, object], report: CardsReport) -> str:
    """Write the facts as text, one per line; each GPU has a line of its own."""
    rows: list[tuple[str, str]] = []
    for name, value in facts.items():
        if name in ("cards", "cards not listed"):
            continue  # the rows of "gpus" say it all
        if name == "gpus":
            rows += _card_rows(report)
        elif name != "nccl":
            rows.append((name, _fact_text(value)))
        elif report.cards:
            rows.append((name, str(value) or "none"))
    return _lines(rows)


def _lines(rows: Sequence[tuple[str, str]]) -> str:
    """Write names and values on one line each."""
    return "\n".join(line.rstrip() for line in aligned(rows))


def _card_rows(report: CardsReport) -> list[tuple[str, str]]:
    """Return name and state of each GPU."""
    if report.problem:
        return [("gpus", f"cannot be listed: {report.problem}")]
    if not report.cards:
        return [("gpus", "none")]
    return [(card.device, str(card)) for card in report.cards]


def _fact_text(value: object) -> str:
    """Write a fact as text."""
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)
