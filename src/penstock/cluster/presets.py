"""Devices, links and the papers' clusters by name, from presets.yaml."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from penstock.cluster.device import Device, Link
from penstock.cluster.entries import DEVICE_KEYS, LINK_KEYS, device_of, link_of
from penstock.cluster.fields import Fields, parse_text
from penstock.errors import UnknownName


@dataclass(frozen=True)
class Presets:
    """The tables of presets.yaml; names are found whatever their case."""

    devices: dict[str, Device]
    links: dict[str, Link]
    clusters: dict[str, dict[str, Any]]
    nvlink_of: dict[str, str]
    network: frozenset[str]

    @classmethod
    def load(cls) -> Presets:
        """Read the tables."""
        file = resources.files("penstock.cluster") / "presets.yaml"
        # libyaml's loader, where there is one, takes an eighth of the time.
        tables = yaml.load(
            file.read_text(encoding="utf-8"),
            getattr(yaml, "CSafeLoader", yaml.SafeLoader),  # noqa: S506
        )
        devices, links, nvlink_of, network = {}, {}, {}, set()
        for name, row in tables["devices"].items():
            fields = Fields.of(row, f"presets: {name}", (*DEVICE_KEYS, "nvlink"))
            devices[name] = device_of(fields, name, None)
            nvlink_of[name] = fields.read("nvlink", parse_text, "")
        for name, row in tables["links"].items():
            fields = Fields.of(row, f"presets: {name}", (*LINK_KEYS, "reach"))
            links[name] = link_of(fields, None)
            if fields.read("reach", parse_text) == "network":
                network.add(name)
        return cls(devices, links, tables["clusters"], nvlink_of, frozenset(network))

    def device(self, name: str) -> Device:
        """The device called `name`.

        Raises:
            UnknownName: there is none.
        """
        return self.devices[spelled(name, self.devices, "device")]

    def link_name(self, name: str, device: str) -> str:
        """The table's name for a link that joins devices called `device`: `"NVLink"` is the
        generation that these have.

        Raises:
            UnknownName: there is none.
        """
        if name.lower() == "nvlink" and self.nvlink_of.get(device):
            return self.nvlink_of[device]
        return spelled(
            name, self.links, f"link for {device}" if name.lower() == "nvlink" else "link"
        )


def spelled(name: str, known: Iterable[str], kind: str) -> str:
    """The member of `known` that is `name` but for upper and lower case.

    Raises:
        UnknownName: there is none.
    """
    names = list(known)
    for candidate in names:
        if candidate.lower() == name.lower():
            return candidate
    raise UnknownName(kind, name, names)
