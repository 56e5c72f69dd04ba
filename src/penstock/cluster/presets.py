"""Devices, links and clusters of papers by name, from presets.yaml."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Any

from penstock.cluster.device import Device, Link
from penstock.cluster.entries import DEVICE_KEYS, LINK_KEYS, read_device, read_link
from penstock.cluster.fields import Fields, parse_text
from penstock.errors import UnknownName
from penstock.files.yaml_values import yaml_value


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
        file = resources.files("penstock.cluster") / "presets.yaml"
        tables = yaml_value(file.read_text(encoding="utf-8"), "presets.yaml")
        devices, links, nvlink_of, network = {}, {}, {}, set()
        for name, row in tables["devices"].items():
            fields = Fields.of(row, f"presets: {name}", (*DEVICE_KEYS, "nvlink"))
            devices[name] = read_device(fields, name, None)
            nvlink_of[name] = fields.read("nvlink", parse_text, "")
        for name, row in tables["links"].items():
            fields = Fields.of(row, f"presets: {name}", (*LINK_KEYS, "reach"))
            links[name] = read_link(fields, None)
            if fields.read("reach", parse_text) == "network":
                network.add(name)
        return cls(devices, links, tables["clusters"], nvlink_of, frozenset(network))

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
