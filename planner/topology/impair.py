"""Weak and broken links and parts: which node each concerns, and how it changes a graph."""

from __future__ import annotations  # nx.Graph[str] is for the type checker only

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import networkx as nx

from planner.documents import validated
from planner.errors import InvalidInputError
from planner.topology.document import Impairment, TopologyDocument, parse_topology
from planner.topology.units import (
    Switch,
    domain_switches,
    first_switch,
    nodes_of_unit,
    switches,
    unit_of,
)

__all__ = ["NodeTrouble", "degraded", "impair", "parse_impairments", "trouble"]


@dataclass(frozen=True, slots=True)
class NodeTrouble:
    """What is wrong with one node.

    Attributes:
        links: Impairments of its links and parts, its NICs' cables and its NVLink domain, the
            node's own name left out: nodes of equal trouble are equal.
        compute_share: Speed of its slowest GPU over that of a healthy one; 0 = down.
    """

    links: tuple[Impairment, ...] = ()
    compute_share: float = 1.0


_HEALTHY: Final = NodeTrouble()


def parse_impairments(links: Iterable[str], nodes: Iterable[str]) -> list[Impairment]:
    """Return the impairments in texts as ``n7/nic0:rail0/rail0=0.5`` and ``n7=down``.

    Raises:
        InvalidInputError: One is not of that form, or its factor is not from 0 up to 1.
    """
    return [
        *(_parse_impairment(text, is_link=True) for text in links),
        *(_parse_impairment(text, is_link=False) for text in nodes),
    ]


def _parse_impairment(text: str, *, is_link: bool) -> Impairment:
    field = "link" if is_link else "node"
    what, equals, value = (part.strip() for part in text.rpartition("="))
    ends = tuple(end.strip() for end in what.split(":"))
    if not equals or not all(ends) or len(ends) != (2 if is_link else 1):
        raise InvalidInputError(
            f"{field} {text!r}: need {'A:B=FACTOR' if is_link else 'NAME=FACTOR'}, as "
            f"{'n7/nic0:rail0/rail0=0.5' if is_link else 'n7=down'}; factor 0 or down = broken"
            f"{'; a NIC, GPU or switch by itself is given as node' if is_link else ''}",
            where=field,
        )
    try:
        factor = 0.0 if value == "down" else float(value)
    except ValueError:
        factor = -1.0
    if not 0 <= factor < 1:
        raise InvalidInputError(
            f"{field} {text!r}: {value!r} must be down, or a number from 0 up to but not 1, the "
            "part of the healthy figure that is left",
            where=field,
        )
    named = {"link": ends} if is_link else {"part": ends[0]}
    try:
        return validated(Impairment, {**named, "factor": factor})
    except InvalidInputError as exc:
        raise InvalidInputError(f"{field} {text[:60]!r}: {exc}", where=field) from exc


def degraded(document: TopologyDocument, more: Sequence[Impairment]) -> TopologyDocument:
    """Return the topology with more weak or broken parts; of the same part the last counts.

    Raises:
        InvalidInputError: Nothing was named, or it names nothing of this topology.
    """
    if not more:
        raise InvalidInputError(
            f"topology {document.name!r}: name what is weak or broken: a link as "
            "n7/nic0:rail0/rail0=0.5, or a node as n7=down",
            where="impairments",
        )
    newest = {one.names(): one for one in (*document.impairments, *more)}
    impairments = [impairment.model_dump() for impairment in newest.values()]
    after = parse_topology({**document.model_dump(mode="json"), "impairments": impairments})
    down = [node for node, what in trouble(after)[0].items() if what.compute_share == 0]
    if len(down) == after.max_nodes:
        raise InvalidInputError(
            f"topology {document.name!r}: every node would be down; leave one of them up",
            where="impairments",
        )
    return after


def trouble(document: TopologyDocument) -> tuple[dict[int, NodeTrouble], tuple[Impairment, ...]]:
    """Return what is wrong with nodes, by their number, and with links between switches.

    Raises:
        InvalidInputError: An impairment of a node names no part of it.
    """
    if not document.impairments:
        return {}, ()
    numbers = {document.host(node): node for node in range(document.max_nodes)}
    known = switches(document)
    found: dict[int, NodeTrouble] = {}
    trunks: list[Impairment] = []
    # What is listed twice is as weak as what is listed once.
    for impairment in {one.names(): one for one in document.impairments}.values():
        if hosts := _hosts_of(numbers, impairment):
            for node in hosts:
                found[node] = _more(document, node, found.get(node, _HEALTHY), impairment)
        elif nodes := _nodes_below(document, known, impairment):
            _add_to_each(document, found, nodes, impairment, known.get(impairment.part or ""))
        else:
            trunks.append(impairment)
    return found, tuple(trunks)


def impair(graph: nx.Graph[str], impairments: Iterable[Impairment]) -> None:
    """Weaken the links that ``impairments`` name; a link with nothing left is taken out.

    Args:
        graph: Changed in place.
        impairments: Of links, or of parts all of whose links are meant.

    Raises:
        InvalidInputError: The graph has no such link or part.
    """
    touched: set[tuple[str, str]] = set()
    for impairment in impairments:
        for a, b in _edges(graph, impairment):
            graph[a][b]["bandwidth_bytes_per_s"] *= impairment.factor
            touched.add((a, b))
    # Only now: a part may be named twice, by itself and by its link.
    graph.remove_edges_from(
        [(a, b) for a, b in touched if graph[a][b]["bandwidth_bytes_per_s"] == 0]
    )


def _edges(graph: nx.Graph[str], impairment: Impairment) -> list[tuple[str, str]]:
    """Return the links that an impairment names.

    Raises:
        InvalidInputError: The graph has no such link or part.
    """
    if impairment.link is not None:
        edges = [impairment.link] if graph.has_edge(*impairment.link) else []
    else:
        part = str(impairment.part)
        edges = [(part, other) for other in graph[part]] if part in graph else []
    if not edges:
        raise _unknown(impairment, graph)
    return edges


def _hosts_of(numbers: dict[str, int], impairment: Impairment) -> list[int]:
    """Return the nodes whose hosts an impairment names."""
    names = impairment.link or (str(impairment.part),)
    return sorted({numbers[h] for name in names if (h := name.partition("/")[0]) in numbers})


def _nodes_below(
    document: TopologyDocument, known: dict[str, Switch], impairment: Impairment
) -> range:
    """Return the nodes on the switch that an impairment names; none where it joins switches."""
    switch = known.get(impairment.part or "")
    if document.network is not None and switch is not None and switch.tier == 0:
        return nodes_of_unit(document.network.tiers[0], switch.unit, document.max_nodes)
    domain = document.nvlink_domain
    name = (impairment.link or (str(impairment.part),))[0].partition("/")[0]
    if domain is None or not name.startswith("domain") or not name[6:].isdecimal():
        return range(0)
    return nodes_of_unit(domain, int(name[6:]), document.max_nodes)


def _add_to_each(
    document: TopologyDocument,
    found: dict[int, NodeTrouble],
    nodes: range,
    impairment: Impairment,
    leaf: Switch | None,
) -> None:
    """Add what is wrong with a switch to the trouble of every node on it.

    Nodes of one type that had the same trouble have the same afterwards: it is made once, or a
    thousand weak switches of a thousand nodes each would take minutes.

    Args:
        document: Which cluster.
        found: The trouble so far, changed in place.
        nodes: Those on the switch.
        impairment: Of the switch.
        leaf: The switch where NICs are on it: it is written out as their cables.
    """
    made: dict[tuple[int, int], tuple[NodeTrouble, NodeTrouble]] = {}
    for node in nodes:
        before = found.get(node, _HEALTHY)
        island = document.island_of(node) if document.islands else None
        key = (id(before), -1 if island is None else island.first_node)
        if key not in made:
            after = before
            for one in _cables(document, node, impairment, leaf) if leaf else (impairment,):
                after = _more(document, node, after, one)
            made[key] = (before, after)  # before too: its id is not given away
        found[node] = made[key][1]


def _cables(
    document: TopologyDocument, node: int, impairment: Impairment, leaf: Switch
) -> Iterator[Impairment]:
    """Yield a weak switch as the cables of a node's NICs to it."""
    nics = document.node_type(node).names("nic")
    by_rail = document.network is not None and document.network.layout == "rail"
    for nic in nics[leaf.rail :][:1] if by_rail else nics:
        link = (f"{document.host(node)}/{nic}", impairment.part)
        yield impairment.model_copy(update={"link": link, "part": None})


def _more(
    document: TopologyDocument, node: int, before: NodeTrouble, impairment: Impairment
) -> NodeTrouble:
    """Return the trouble of a node with one more impairment."""
    host = document.host(node)
    if impairment.part is not None:
        of_host, slash, part = impairment.part.partition("/")
        is_of_workers = not slash or part in document.node_type(node).workers()
        if of_host == host and is_of_workers:
            return NodeTrouble(before.links, min(before.compute_share, impairment.factor))
    _check_ends(document, node, impairment)
    own = impairment.model_copy(
        update={
            "link": impairment.link
            and tuple(end.removeprefix(f"{host}/") for end in impairment.link),
            "part": impairment.part and impairment.part.removeprefix(f"{host}/"),
        }
    )
    return NodeTrouble((*before.links, own), before.compute_share)


def _check_ends(document: TopologyDocument, node: int, impairment: Impairment) -> None:
    """An end is a part of the node, or a switch that it is on.

    Raises:
        InvalidInputError: One is neither.
    """
    kind, host = document.node_type(node), document.host(node)
    own = [name for component in kind.components for name in component.names()]
    allowed = {f"{host}/{name}" for name in own}
    if document.network is not None:
        nics = range(kind.count("nic"))
        allowed |= {first_switch(document.network, node, rail) for rail in nics}
    if (domain := document.nvlink_domain) is not None:
        allowed |= set(domain_switches(domain, int(unit_of(domain, [node])[0])))
    for end in impairment.link or (str(impairment.part),):
        if end not in allowed:
            switches_above = sorted(allowed - {f"{host}/{name}" for name in own})
            raise InvalidInputError(
                f"topology {document.name!r}: {host} has no {end!r} and is on none; its parts are "
                f"{_few(own)}, its switches {_few(switches_above) or 'none'}",
                where="impairments",
            )


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")


def _unknown(impairment: Impairment, graph: nx.Graph[str]) -> InvalidInputError:
    ends = impairment.link or (str(impairment.part),)
    known = next((end for end in ends if end in graph), None)
    if known is not None and impairment.link is not None:
        hint = f"{known} is joined to {', '.join(sorted(graph[known])[:8])}"
    else:
        hint = f"there are {', '.join(sorted(graph)[:12])}"
    return InvalidInputError(
        f"topology {graph.graph['topology']!r}: no {'link' if impairment.link else 'part'} "
        f"{':'.join(ends)}; {hint}",
        where="impairments",
    )
