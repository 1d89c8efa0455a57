"""Slurm's ``topology.conf`` and ``topology.yaml``: a tree of switches, or blocks of nodes.

The grammar is that of the manual pages topology.conf(5) and topology.yaml(5) of Slurm 26.11:
keys in any case, ``#`` comments, host lists. NVIDIA topograph writes the switches' real names
into comments, ``# switch.1.1=leaf-1-1``; they are used. What Slurm itself refuses (a switch
defined twice, or with nodes and switches at once, a cycle) is refused here with its line; what
it only complains about is repaired with a remark.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn

from planner.topology.importers.dump import FabricDump, Remarks, TopologyTextError, checked_text
from planner.topology.importers.fabric.slurm_blocks import Block, block_fabric
from planner.topology.importers.fabric.slurm_paste import (
    is_prose,
    topologies_alone,
    without_printed,
)
from planner.topology.importers.fabric.slurm_tree import SlurmSwitch, tree_fabric
from planner.topology.importers.fabric.yaml_lines import YamlValue, read_yaml

__all__ = ["read_slurm_conf", "read_slurm_yaml"]

_PAIR = re.compile(r'\s*([A-Za-z_]\w*)\s*[-+]?=\s*("[^"]*"|[^\s"]+)')
_REAL_NAME = re.compile(r"#\s*(\S+?)=(\S.*)")
_MAX_LINE_CHARS: Final = 1_000_000
_OF_SLURM_CONF: Final = ("topologyplugin", "topologyparam")
_NO_MODEL: Final = {
    "ring": "rings of nodes",
    "torus3d": "a torus",
}


@dataclass(slots=True)
class _Found:
    """What the lines of one text, or one topology of it, hold."""

    source: str
    remarks: Remarks = field(default_factory=Remarks)
    switches: list[SlurmSwitch] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    block_sizes: list[int] = field(default_factory=list)
    sizes_line: int | None = None
    real_names: dict[str, str] = field(default_factory=dict)
    has_link_speed: bool = False
    printed_sizes: dict[str, int] = field(default_factory=dict)
    prose: list[tuple[int, str]] = field(default_factory=list)

    def refuse(self, message: str, line: int | None) -> NoReturn:
        """Raise for what stands in ``line``."""
        raise TopologyTextError(message, source=self.source, line=line)


def read_slurm_conf(text: str | bytes, source: str) -> FabricDump:
    """Return the switches or blocks of a ``topology.conf``.

    Raises:
        TopologyTextError: It is none, or Slurm would refuse it; with the line.
    """
    found = _Found(source)
    for line, entry, comment in _entries(checked_text(text, source=source), found):
        named = _REAL_NAME.fullmatch(comment)
        if named and not entry:
            found.real_names[named[1]] = named[2].strip()
        if entry and is_prose(entry):
            found.prose.append((line, entry))
        elif entry:
            _conf_entry(entry, line, found)
    for line, entry in found.prose[:1]:
        more = f" and {len(found.prose) - 1} other lines" if len(found.prose) > 1 else ""
        found.remarks.add(f"left out: {entry[:40]!r}{more}, no entries of topology.conf", line)
    if found.printed_sizes and not found.block_sizes:
        sizes = sorted(found.printed_sizes.items(), key=lambda item: (len(item[0]), item[0]))
        _set_block_sizes(sizes, sizes[0][1], found)
    return _fabric(found, "slurm-conf")


def read_slurm_yaml(text: str | bytes, source: str) -> FabricDump:
    """Return one topology of a ``topology.yaml``: the cluster's default, else the first.

    Raises:
        TopologyTextError: It is none, or of a kind that has no model here; with the line.
    """
    found = _Found(source)
    alone, is_cut = topologies_alone(checked_text(text, source=source))
    if is_cut:
        found.remarks.add("left out: what stands around the list of topologies")
    root = read_yaml(alone, source=source)
    topologies = [_keys(item, "a topology", found) for item in _items(root)]
    if not topologies or any("topology" not in topology for topology in topologies):
        found.refuse(
            "is no topology.yaml: expected a list of '- topology: NAME' with one of tree, block "
            "or flat",
            root.line,
        )
    chosen = _chosen(topologies, found)
    name = _text(chosen.pop("topology"), "topology", found)
    chosen.pop("cluster_default", None)
    if len(chosen) != 1:
        kinds = ", ".join(chosen) or "nothing"
        found.refuse(f"topology {name!r} has {kinds}; needs one of tree, block or flat", root.line)
    ((kind, value),) = chosen.items()
    if kind == "flat":
        return _flat(found)
    if kind == "tree":
        _yaml_tree(value, found)
    elif kind == "block":
        _yaml_blocks(value, found)
    else:
        what = _NO_MODEL.get(kind, "something unknown")
        found.refuse(
            f"topology {name!r} is {kind!r}, {what}: there is no model for it, only for tree, "
            "block and flat",
            value.line,
        )
    return _fabric(found, "slurm-yaml")


def _fabric(found: _Found, format_: str) -> FabricDump:
    """Return the tree or the blocks, whichever the text has."""
    if found.switches and found.blocks:
        found.refuse(
            "has switches and blocks; Slurm reads one kind, give one of them",
            found.blocks[0].line,
        )
    if found.switches:
        return tree_fabric(found.switches, found.real_names, format_, found.source, found.remarks)
    if found.blocks:
        if not found.block_sizes:
            found.remarks.add("no BlockSizes: the blocks are joined by no stage of this file")
        return block_fabric(
            found.blocks,
            found.block_sizes,
            found.sizes_line,
            real_names=found.real_names,
            format_=format_,
            source=found.source,
            remarks=found.remarks,
        )
    raise TopologyTextError(
        "has no switch and no block; expected SwitchName=... or BlockName=...",
        source=found.source,
    )


def _flat(found: _Found) -> FabricDump:
    found.remarks.add("the topology is flat: it names neither nodes nor switches")
    return FabricDump("slurm-yaml", hosts=(), tiers=(), remarks=found.remarks.all())


# topology.conf


def _entries(text: str, found: _Found) -> Iterator[tuple[int, str, str]]:
    """Yield (line, entry, comment), entries that go on after a backslash put together."""
    started: list[str] = []
    first_line = 1
    for number, raw in enumerate(text.splitlines(), 1):
        if len(raw) > _MAX_LINE_CHARS:
            found.refuse(f"is longer than {_MAX_LINE_CHARS:,} characters", number)
        entry, mark, comment = raw.partition("#")
        entry = entry.partition("\N{LEFTWARDS ARROW}")[0]  # how people comment what they paste
        entry = entry.strip()
        first_line = first_line if started else number
        if entry.endswith("\\"):
            started.append(entry[:-1])
            continue
        yield first_line, " ".join((*started, entry)).strip(), (mark + comment).strip()
        started = []
    if started:
        found.refuse("the line goes on (it ends in a backslash) but the file ends", first_line)


def _conf_entry(entry: str, line: int, found: _Found) -> None:
    """Add what one line of topology.conf says."""
    if entry.split()[0].lower() == "include":
        found.refuse(
            "includes another file, which cannot be opened from here; put its lines in place", line
        )
    pairs = _pairs(entry, line, found)
    first = next(iter(pairs))
    if size := without_printed(pairs):
        found.printed_sizes.setdefault(size, line)
    if first in _OF_SLURM_CONF:
        found.remarks.add(f"left out: {entry[:40]!r}, which belongs into slurm.conf", line)
        return
    if first == "aggregatedblock":
        return
    if first == "switchname":
        children, nodes = pairs.pop("switches", ""), pairs.pop("nodes", "")
        if pairs.pop("linkspeed", None) is not None and not found.has_link_speed:
            found.has_link_speed = True
            found.remarks.add("LinkSpeed is not used, as in Slurm; its unit is arbitrary", line)
        found.switches.append(SlurmSwitch(pairs.pop(first), line, children, nodes))
    elif first == "blockname":
        found.blocks.append(Block(pairs.pop(first), line, pairs.pop("nodes", "")))
    elif first == "blocksizes":
        sizes = pairs.pop(first).split(",")
        _set_block_sizes([(size, line) for size in sizes], line, found)
    elif first == "ringname":
        found.refuse("RingName: there is no model for rings of nodes", line)
    else:
        found.refuse(
            f"{first!r} begins no line of topology.conf; expected SwitchName, BlockName or "
            "BlockSizes",
            line,
        )
    for key in pairs:
        found.remarks.add(f"{key!r} is not known and not used", line)


def _pairs(entry: str, line: int, found: _Found) -> dict[str, str]:
    """Return the ``Key=value`` pairs of an entry, keys in lower case."""
    pairs: dict[str, str] = {}
    position = 0
    while position < len(entry):
        match = _PAIR.match(entry, position)
        if match is None:
            rest = entry[position : position + 40].strip()
            found.refuse(f"cannot read {rest!r}; expected Key=value pairs", line)
        key, value = match[1].lower(), match[2].strip('"')
        if key in pairs:
            found.refuse(f"gives {match[1]} twice", line)
        pairs[key] = value
        position = match.end()
    return pairs


def _set_block_sizes(sizes: Sequence[tuple[str, int]], line: int, found: _Found) -> None:
    if found.block_sizes:
        found.refuse(f"gives the block sizes again, first in line {found.sizes_line}", line)
    for size, size_line in sizes:
        if not (size.strip().isascii() and size.strip().isdigit() and 0 < len(size) <= 9):
            found.refuse(f"block size {size[:40]!r} is no number of nodes", size_line)
        found.block_sizes.append(int(size))
    found.sizes_line = line


# topology.yaml


def _chosen(topologies: Sequence[dict[str, YamlValue]], found: _Found) -> dict[str, YamlValue]:
    """Return the default topology, else the first, and say which were left."""
    defaults = [
        topology
        for topology in topologies
        if "cluster_default" in topology
        and _text(topology["cluster_default"], "cluster_default", found).lower()
        in ("true", "yes", "on")
    ]
    chosen = (defaults or topologies)[0]
    others = [
        _text(topology["topology"], "topology", found)
        for topology in topologies
        if topology is not chosen
    ]
    if others:
        why = "the cluster's default" if defaults else "the first"
        name = _text(chosen["topology"], "topology", found)
        found.remarks.add(
            f"read topology {name!r}, {why}; not {', '.join(others)[:200]}",
            chosen["topology"].line,
        )
    return dict(chosen)


def _yaml_tree(value: YamlValue, found: _Found) -> None:
    tree = _keys(value, "tree", found)
    switches = _entry(tree, "switches", value.line, found)
    _say_unused(tree, found)
    for item in _items(switches):
        keys = _keys(item, "an item of switches", found)
        name = _text(_entry(keys, "switch", item.line, found), "switch", found)
        children = _host_list(keys.pop("children", None), "children", found)
        nodes = _host_list(keys.pop("nodes", None), "nodes", found)
        _say_unused(keys, found)
        found.switches.append(SlurmSwitch(name, item.line, children, nodes))


def _yaml_blocks(value: YamlValue, found: _Found) -> None:
    block = _keys(value, "block", found)
    blocks = _entry(block, "blocks", value.line, found)
    sizes = block.pop("block_sizes", None)
    _say_unused(block, found)
    if sizes is not None:
        texts = [(_text(size, "block_sizes", found), size.line) for size in _items(sizes)]
        _set_block_sizes(texts, sizes.line, found)
    for item in _items(blocks):
        keys = _keys(item, "an item of blocks", found)
        name = _text(_entry(keys, "block", item.line, found), "block", found)
        nodes = _host_list(keys.pop("nodes", None), "nodes", found)
        _say_unused(keys, found)
        found.blocks.append(Block(name, item.line, nodes))


def _items(value: YamlValue) -> list[YamlValue]:
    """Return the items of a list; a single value is a list of one, as in Slurm."""
    return value.value if isinstance(value.value, list) else [value]


def _keys(value: YamlValue, what: str, found: _Found) -> dict[str, YamlValue]:
    if not isinstance(value.value, dict):
        found.refuse(f"{what} must be a mapping of keys, is {value.kind}", value.line)
    return dict(value.value)


def _text(value: YamlValue, what: str, found: _Found) -> str:
    if not isinstance(value.value, str):
        found.refuse(f"{what} must be text, is {value.kind}", value.line)
    return value.value.strip()


def _entry(keys: dict[str, YamlValue], name: str, line: int, found: _Found) -> YamlValue:
    if name not in keys:
        have = ", ".join(keys)[:80] or "nothing"
        found.refuse(f"needs the key {name!r}, has {have}", line)
    return keys.pop(name)


def _host_list(value: YamlValue | None, what: str, found: _Found) -> str:
    if value is None:
        return ""
    return ",".join(_text(item, what, found) for item in _items(value))


def _say_unused(keys: dict[str, YamlValue], found: _Found) -> None:
    for key, value in keys.items():
        found.remarks.add(f"the key {key!r} is not known and not used", value.line)
