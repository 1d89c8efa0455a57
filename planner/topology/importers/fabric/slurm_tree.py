"""Slurm's tree of switches as tiers; what is odd in it is repaired or refused by line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from planner.topology.importers.dump import FabricDump, Remarks, TopologyTextError
from planner.topology.importers.fabric.nesting import Nest, Switch, nest, switch_list
from planner.topology.importers.fabric.slurm_names import listed_names, note_entry, shown_names
from planner.topology.importers.hostlist import MAX_HOSTS

__all__ = ["SlurmSwitch", "tree_fabric"]

_MAX_STAGES: Final = 16


class SlurmSwitch(NamedTuple):
    """One switch as written: host lists of child switches or of nodes, not yet expanded."""

    name: str
    line: int
    children: str
    nodes: str


@dataclass(frozen=True, slots=True)
class _Tree:
    """Switches by name, in the order of the file."""

    source: str
    lines: Mapping[str, int]
    children: Mapping[str, tuple[str, ...]]
    nodes: Mapping[str, tuple[str, ...]]


def tree_fabric(
    switches: Sequence[SlurmSwitch],
    real_names: Mapping[str, str],
    format_: str,
    source: str,
    remarks: Remarks,
) -> FabricDump:
    """Return the hosts and tiers of a tree.

    Args:
        switches: As written, in the order of the file.
        real_names: What comments call the switches.
        format_: For the dump.
        source: What the text is called in messages.
        remarks: Is told what had to be repaired, and goes into the dump.

    Raises:
        TopologyTextError: Slurm would refuse the tree.
    """
    tree = _checked(switches, source, remarks)
    stage_of = _stages(tree)
    shown = shown_names(tree.lines, real_names)
    order = _depth_first(tree)
    leaves_of = _leaves_of(tree, [name for name in order if tree.nodes[name]])
    if not leaves_of:
        raise TopologyTextError(
            "has switches but no node; nodes that register when they start are not in the file",
            source=source,
        )
    stages: list[list[Switch]] = [[] for _ in range(max(stage_of.values()))]
    for name in order:
        if tree.children[name]:
            below = tree.children[name]
            stages[stage_of[name] - 1].append(Switch(name, shown[name], below))
    leaf_names = {name: shown[name] for name, nodes in tree.nodes.items() if nodes}
    nested = nest(leaves_of, leaf_names, stages, remarks)
    _say_what_is_odd(tree, stage_of, leaves_of, nested, remarks)
    return FabricDump(
        format_,
        hosts=nested.hosts,
        tiers=nested.tiers,
        remarks=remarks.all(),
    )


def _checked(switches: Sequence[SlurmSwitch], source: str, remarks: Remarks) -> _Tree:
    """Expand the lists; refuse what Slurm refuses, drop what leads nowhere."""
    lines: dict[str, int] = {}
    children: dict[str, tuple[str, ...]] = {}
    nodes: dict[str, tuple[str, ...]] = {}
    budget = MAX_HOSTS
    for switch in switches:
        note_entry(lines, "switch", switch.name, switch.line, source=source)
        if switch.children and switch.nodes:  # neither: its nodes register when they start
            raise TopologyTextError(
                f"switch {switch.name!r} has both nodes and switches below it; Slurm wants one of "
                "them",
                source=source,
                line=switch.line,
            )
        for text, found in ((switch.children, children), (switch.nodes, nodes)):
            found[switch.name] = listed_names(
                text,
                f"switch {switch.name!r}",
                switch.line,
                max_hosts=budget,
                source=source,
                remarks=remarks,
            )
            budget -= len(found[switch.name])
    for name, below in children.items():
        missing = [child for child in below if child not in lines]
        if missing:
            remarks.add(
                f"switch {name!r} joins {switch_list(missing)}, which the file does not define: "
                "left out",
                lines[name],
            )
            children[name] = tuple(child for child in below if child in lines)
    return _Tree(source, lines, children, nodes)


def _stages(tree: _Tree) -> dict[str, int]:
    """Return each switch's height: 0 for one without children, else one above the highest.

    Raises:
        TopologyTextError: A switch lies below itself, or there are too many stages.
    """
    parents: dict[str, list[str]] = {name: [] for name in tree.lines}
    for name, below in tree.children.items():
        for child in below:
            parents[child].append(name)
    waiting = {name: len(below) for name, below in tree.children.items()}
    height = {name: 0 for name, count in waiting.items() if count == 0}
    ready = list(height)
    for name in ready:
        for parent in parents[name]:
            waiting[parent] -= 1
            if waiting[parent] == 0:
                height[parent] = 1 + max(height[child] for child in tree.children[parent])
                ready.append(parent)
    for name, line in tree.lines.items():
        if name not in height:
            raise TopologyTextError(
                f"switch {name!r} lies below itself, or joins switches that do; a tree has no "
                "cycles",
                source=tree.source,
                line=line,
            )
        if height[name] >= _MAX_STAGES:
            raise TopologyTextError(
                f"switch {name!r} has {height[name]} stages below it; at most "
                f"{_MAX_STAGES - 1} are read",
                source=tree.source,
                line=line,
            )
    return height


def _depth_first(tree: _Tree) -> list[str]:
    """Return the switches from the roots down, children in the order they are listed."""
    below = {child for children in tree.children.values() for child in children}
    order: dict[str, None] = {}
    todo = [name for name in reversed(list(tree.lines)) if name not in below]
    while todo:
        name = todo.pop()
        if name not in order:
            order[name] = None
            todo.extend(reversed(tree.children[name]))
    return list(order)


def _leaves_of(tree: _Tree, leaves: Sequence[str]) -> dict[str, list[str]]:
    leaves_of: dict[str, list[str]] = {}
    for leaf in leaves:
        for node in tree.nodes[leaf]:
            leaves_of.setdefault(node, []).append(leaf)
    return leaves_of


def _say_what_is_odd(
    tree: _Tree,
    stage_of: Mapping[str, int],
    leaves_of: Mapping[str, Sequence[str]],
    nested: Nest,
    remarks: Remarks,
) -> None:
    """Remark on rails, parallel switches, switches without nodes and uneven heights."""
    shared = [node for node, leaves in leaves_of.items() if len(leaves) > 1]
    if shared:
        leaves = " and ".join(leaves_of[shared[0]][:2])
        remarks.add(
            f"{len(shared):,} node(s) hang on several leaf switches, as with rails (first "
            f"{shared[0]!r}, on {leaves}): switches with the same nodes are one unit",
            tree.lines[leaves_of[shared[0]][1]],
        )
    num_parents: dict[str, int] = {}
    for name, below in tree.children.items():
        several: list[str] = []
        for child in below:
            num_parents[child] = num_parents.get(child, 0) + 1
            if num_parents[child] == 2:
                several.append(child)
        _remark_children(
            several, "hang on several switches: those are one unit", tree.lines[name], remarks
        )
        high = [
            child
            for child in below
            if stage_of[child] < stage_of[name] - 1 and child in nested.unit_of_switch
        ]
        text = f"hang directly on {name!r}, stages above: each stands for itself between"
        _remark_children(high, text, tree.lines[name], remarks)
    for name, line in tree.lines.items():
        if name not in nested.unit_of_switch:
            remarks.add(f"switch {name!r} has no nodes below it: left out", line)


def _remark_children(names: Sequence[str], what: str, line: int, remarks: Remarks) -> None:
    """Say once what goes for several switches of one line."""
    if len(names) == 1:
        remarks.add(f"switch {names[0]!r} {what.replace('hang', 'hangs', 1)}", line)
    elif names:
        remarks.add(f"{len(names)} switches (first {names[0]!r}) {what}", line)
