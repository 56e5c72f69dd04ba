"""Devices, links and clusters of papers by name, from presets.yaml."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Any

from penstock.cluster.device import Device, Link
from penstock.cluster.entries import build_device, build_link
from penstock.errors import UnknownName
from penstock.files.read import parse_yaml


@dataclass(frozen=True)
class Presets:
    """The tables of presets.yaml; names are matched regardless of case."""

    devices: dict[str, Device]
    links: dict[str, Link]
    clusters: dict[str, dict[str, Any]]
    nvlink_of: dict[str, str]
    network: frozenset[str]

    @classmethod
    def load(cls) -> Presets:
        """Read the tables."""
        from penstock.cluster.description import PresetTables  # imported late: loads pydantic

        file = resources.files("penstock.cluster") / "presets.yaml"
        tables = parse_yaml(file.read_text(encoding="utf-8"), PresetTables, "presets.yaml")
        devices = {
            name: build_device(row, name, None, f"presets: {name}")
            for name, row in tables.devices.items()
        }
        links = {
            name: build_link(row, None, f"presets: {name}") for name, row in tables.links.items()
        }
        nvlink_of = {name: row.nvlink for name, row in tables.devices.items()}
        network = frozenset(name for name, row in tables.links.items() if row.reach == "network")
        return cls(devices, links, tables.clusters, nvlink_of, network)

    def device(self, name: str) -> Device:
        """Return the device called `name`.

        Raises:
            UnknownName: there is none.
        """
        return self.devices[match_name(name, self.devices, "device")]

    def link_name(self, name: str, device: str) -> str:
        """Return the table's name of a link that joins devices called `device`: `"NVLink"` is the
        generation that these have.

        Raises:
            UnknownName: there is none.
        """
        if name.lower() == "nvlink" and self.nvlink_of.get(device):
            return self.nvlink_of[device]
        kind = f"link for {device}" if name.lower() == "nvlink" else "link"
        return match_name(name, self.links, kind)


def match_name(name: str, choices: Iterable[str], kind: str) -> str:
    """Return the choice that equals `name` regardless of case.

    Raises:
        UnknownName: there is none.
    """
    names = list(choices)
    for candidate in names:
        if candidate.lower() == name.lower():
            return candidate
    raise UnknownName(kind, name, names)
