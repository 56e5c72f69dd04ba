"""Cluster: devices by rank, their nodes, and the links that join them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import final

from penstock.cluster.device import Device, Link
from penstock.errors import ClusterError
from penstock.notebook import NotebookText
from penstock.store import write_file
from penstock.units import format_count

#: Lines that are printed for different nodes at most.
_MAX_NODE_LINES = 12


@final
@dataclass(frozen=True, repr=False)
class Cluster(NotebookText):
    """Devices by rank, their nodes, and the links that join them.

    Attributes:
        name: for display.
        devices: by rank.
        devices_per_node: ranks fill node after node with this many; if `node_of` is set, the most
            on one node.
        inside: joins two ranks of one node, unless `insides` has another link for that node.
        between: joins two ranks of different nodes.
        node_of: the node of every rank; () if ranks fill node after node.
        insides: (node, its inside link), for the nodes whose link differs from `inside`.
        source: where the description is from.
        hosts: the name of every node's host, if it was measured; () if that is not known.

    Raises:
        ClusterError: there is no device, or less than one per node; or the nodes do not match the
            ranks.

    Examples:
        >>> import penstock as ps
        >>> cluster = ps.cluster("2x4xV100-NVLink-25GbE")
        >>> cluster.ranks, cluster.node(5)
        (8, 1)
    """

    name: str
    devices: tuple[Device, ...]
    devices_per_node: int
    inside: Link
    between: Link
    node_of: tuple[int, ...] = ()
    insides: tuple[tuple[int, Link], ...] = ()
    source: str = ""
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._check_nodes()
        self._check_insides()
        self._normalise()

    def _check_nodes(self) -> None:
        """Refuse nodes that do not match the ranks."""
        if not self.devices:
            raise ClusterError(f"cluster {self.name} has no devices; it needs at least one")
        if self.devices_per_node < 1:
            raise ClusterError(
                f"cluster {self.name} has {self.devices_per_node} devices per node; it needs at "
                "least one"
            )
        if self.node_of and len(self.node_of) != self.ranks:
            raise ClusterError(
                f"cluster {self.name} has {self.ranks} ranks, and node_of has "
                f"{len(self.node_of)}: one for each"
            )
        nodes = set(self.node_of or range(self.nodes))
        if nodes != set(range(len(nodes))):
            raise ClusterError(
                f"cluster {self.name} has ranks on nodes {sorted(nodes)}; nodes are numbered from "
                "0, none left out"
            )
        if self.hosts and not len(self.hosts) == len(set(self.hosts)) == self.nodes:
            raise ClusterError(
                f"cluster {self.name} has {self.nodes} nodes, and its hosts are "
                f"{list(self.hosts)}: a different one for each"
            )

    def _check_insides(self) -> None:
        """Refuse inside links of unknown nodes, and two links for one node."""
        for node, _ in self.insides:
            if not 0 <= node < self.nodes:
                raise ClusterError(
                    f"cluster {self.name} has an inside link for node {node}, and nodes 0 to "
                    f"{self.nodes - 1}"
                )
        if len(dict(self.insides)) < len(self.insides):
            nodes_with_link = [node for node, _ in self.insides]
            raise ClusterError(
                f"cluster {self.name} has two inside links for one node: {nodes_with_link}"
            )

    def _normalise(self) -> None:
        """Bring equal descriptions into one form, so that clusters compare equal."""
        different = [(node, link) for node, link in self.insides if link != self.inside]
        object.__setattr__(self, "insides", tuple(sorted(different, key=lambda pair: pair[0])))
        if self.node_of or different:
            sizes = Counter(self.node(rank) for rank in range(self.ranks))
            object.__setattr__(self, "devices_per_node", max(sizes.values()))
        if self.node_of == tuple(rank // self.devices_per_node for rank in range(self.ranks)):
            object.__setattr__(self, "node_of", ())

    def __repr__(self) -> str:
        return f"<Cluster {self._summary()}>"

    def _summary(self) -> str:
        """Return the number of ranks and nodes, and the kinds of devices."""
        nodes = format_count(self.nodes, "node")
        return f"{self.name}: {self.ranks} ranks on {nodes} ({', '.join(self.kinds)})"

    def __str__(self) -> str:
        lines = [self._summary()]
        if self.node_of or self.insides or len(self.kinds) > 1:
            lines += self._node_lines()
        if self.devices_per_node > 1 and not self.insides:
            lines.append(f"  inside a node   {self.inside}")
        if self.nodes > 1:
            lines.append(f"  between nodes   {self.between}")
        return "\n".join(lines)

    def _node_lines(self) -> list[str]:
        """Return a line on every node's devices; consecutive equal nodes share a line."""
        groups: list[tuple[list[int], str]] = []
        for node in range(self.nodes):
            text = self._node_text(node)
            if groups and groups[-1][1] == text:
                groups[-1][0].append(node)
            else:
                groups.append(([node], text))
        rows = []
        for nodes, text in groups:
            first, last = nodes[0], nodes[-1]
            label = f"{first}" if first == last else f"{first}-{last}"
            rows.append((f"  node {label}", text))
        if len(rows) > _MAX_NODE_LINES:
            hidden = len(rows) - _MAX_NODE_LINES + 1
            rows[_MAX_NODE_LINES - 2 : -1] = [("  …", f"{hidden} more")]
        return [f"{head.ljust(17)} {text}" for head, text in rows]

    def _node_text(self, node: int) -> str:
        """Return a node's devices, and its inside link if nodes differ in it."""
        ranks = self.ranks_of_node(node)
        counts = Counter(self.devices[rank].name for rank in ranks)
        text = " + ".join(f"{count} x {name}" for name, count in counts.items())
        if self.insides and len(ranks) > 1:
            # The link of a rank to itself is the inside link of its node.
            text += f", {self.link(ranks[0], ranks[0])}"
        return text

    @property
    def ranks(self) -> int:
        """Number of devices."""
        return len(self.devices)

    @cached_property
    def nodes(self) -> int:
        """Number of nodes; they may hold different numbers of devices."""
        return len(set(self.node_of)) if self.node_of else -(-self.ranks // self.devices_per_node)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the devices, each once, in the order of ranks."""
        return tuple(dict.fromkeys(device.name for device in self.devices))

    @cached_property
    def _inside_of(self) -> dict[int, Link]:
        """Inside links by node, for the nodes whose link differs from `inside`."""
        return dict(self.insides)

    def node(self, rank: int) -> int:
        """Return the node of a rank, from 0.

        Raises:
            ClusterError: it is not a rank of this cluster.
        """
        if not 0 <= rank < self.ranks:
            raise ClusterError(
                f"cluster {self.name} has ranks 0 to {self.ranks - 1}, and no rank {rank}"
            )
        return self.node_of[rank] if self.node_of else rank // self.devices_per_node

    def ranks_of_node(self, node: int) -> tuple[int, ...]:
        """Return the ranks of a node, in order; none if there is no such node."""
        return self._ranks_of_node.get(node, ())

    @cached_property
    def _ranks_of_node(self) -> dict[int, tuple[int, ...]]:
        """Ranks by node."""
        groups = self.by_node(range(self.ranks))
        return {self.node(ranks[0]): tuple(ranks) for ranks in groups}

    def by_node(self, ranks: Sequence[int]) -> list[list[int]]:
        """Return ranks grouped by their node; nodes are in the order of their first ranks."""
        nodes: dict[int, list[int]] = {}
        for rank in ranks:
            nodes.setdefault(self.node(rank), []).append(rank)
        return list(nodes.values())

    def link(self, a: int, b: int) -> Link:
        """Return the link from rank `a` to rank `b`.

        Raises:
            ClusterError: one of them is not a rank of this cluster.
        """
        node = self.node(a)
        if node != self.node(b):
            return self.between
        return self._inside_of.get(node, self.inside)

    def on(self, ranks: Sequence[int]) -> Cluster:
        """Return the cluster of some ranks alone: its rank i is `ranks[i]`, with the same device,
        node and links.

        Nodes are renumbered in the order of their first rank.

        Raises:
            ClusterError: one of them is not a rank of this cluster, or is listed twice.
        """
        chosen = tuple(ranks)
        if len(set(chosen)) < len(chosen):
            raise ClusterError(
                f"cluster {self.name} has every rank once, and {list(chosen)} lists one twice"
            )
        if chosen == tuple(range(self.ranks)):
            return self
        nodes = [self.node(rank) for rank in chosen]
        new_number = {node: i for i, node in enumerate(dict.fromkeys(nodes))}
        return Cluster(
            self.name,
            tuple(self.devices[rank] for rank in chosen),
            max(Counter(nodes).values(), default=1),
            self.inside,
            self.between,
            tuple(new_number[node] for node in nodes),
            tuple((new_number[node], link) for node, link in self.insides if node in new_number),
            self.source,
            tuple(self.hosts[node] for node in new_number) if self.hosts else (),
        )

    def slowdown(self, rank: int, busy: Collection[int]) -> float:
        """Return how many times as long rank `rank` computes while the ranks `busy` do, over its
        seconds alone.

        `Device.together` says this for all ranks of the node. It is taken for a limit that they
        share, such as cores or the bandwidth of memory: fewer ranks slow each other down in
        proportion, and not at all below the limit. 4 ranks on 2 cores take twice as long, 3 ranks
        1.5 times, and 2 as long as one. A rank that computes alone takes its seconds alone.

        Raises:
            ClusterError: it is not a rank of this cluster.
        """
        together = self.devices[rank].together
        if together == 1:
            return 1.0
        node_ranks = self.ranks_of_node(self.node(rank))
        busy_ranks = len(set(busy) & set(node_ranks))
        if busy_ranks <= 1:
            return 1.0
        return max(1.0, together * busy_ranks / len(node_ranks))

    def transfer_seconds(self, count: float, a: int, b: int) -> float:
        """Return the seconds of a message of `count` bytes from rank `a` to rank `b`; 0 if they are
        the same.

        Raises:
            ClusterError: one of them is not a rank of this cluster.
        """
        link = self.link(a, b)
        return 0.0 if a == b else link.transfer_seconds(count)

    def with_links(self, inside: Link | None = None, between: Link | None = None) -> Cluster:
        """Return the cluster with other links, for instance measured ones; a new `inside` link
        applies to every node.
        """
        insides = self.insides if inside is None else ()
        return replace(
            self, inside=inside or self.inside, between=between or self.between, insides=insides
        )

    def to_yaml(self) -> str:
        """Return a description that `cluster` reads back as an equal cluster."""
        from penstock.cluster.write import yaml_of

        return yaml_of(self)

    def save(self, path: str | Path) -> None:
        """Write the description to a file, atomically.

        Raises:
            FileError: the file cannot be written.
        """
        write_file(path, self.to_yaml())
