"""Slurm's blocks: NVLink domains in practice, and stages of consecutive blocks.

``BlockSizes`` says how many nodes a base block plans with, then those of the aggregates; each is
a power of two times the first, and aggregates are made of consecutive blocks in the order of the
file (topology.conf(5), section topology/block).
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from planner.topology.importers.dump import (
    FabricDump,
    FoundTier,
    Remarks,
    TopologyTextError,
)
from planner.topology.importers.fabric.nesting import switch_list
from planner.topology.importers.fabric.slurm_names import listed_names, note_entry, shown_names
from planner.topology.importers.hostlist import MAX_HOSTS, natural_key

__all__ = ["Block", "block_fabric"]

_ARE_SWITCHES: Final = (
    "the aggregated block sizes are taken as stages of switches; Slurm only plans with them"
)


class Block(NamedTuple):
    """One block as written; ``nodes`` is a host list, not yet expanded."""

    name: str
    line: int
    nodes: str


def block_fabric(
    blocks: Sequence[Block],
    sizes: Sequence[int],
    sizes_line: int | None,
    *,
    real_names: Mapping[str, str],
    format_: str,
    source: str,
    remarks: Remarks,
) -> FabricDump:
    """Return the blocks as domains, and the aggregates as tiers.

    Args:
        blocks: As written, in the order of the file, which decides what is joined.
        sizes: Nodes of a base block and of the aggregates; may be empty.
        sizes_line: Where the sizes stand.
        real_names: What comments call the blocks.
        format_: For the dump.
        source: What the text is called in messages.
        remarks: Is told what had to be repaired, and goes into the dump.

    Raises:
        TopologyTextError: Slurm would refuse the blocks.
    """
    members = _members(blocks, source, remarks)
    if not members:
        raise TopologyTextError("has blocks but no node", source=source)
    shown = list(shown_names(members, real_names).values())
    counts = [len(nodes) for nodes in members.values()]
    for block in blocks:
        if sizes and 0 < len(members.get(block.name, ())) < sizes[0]:
            remarks.add(
                f"block {block.name!r} has {len(members[block.name])} nodes, fewer than its "
                f"planning size {sizes[0]}",
                block.line,
            )
    tiers = []
    for joined in _blocks_joined(sizes, sizes_line, len(members), source, remarks):
        starts = range(0, len(counts), joined)
        tiers.append(
            FoundTier(
                name=f"blocks{joined}",
                units=tuple(sum(counts[start : start + joined]) for start in starts),
                unit_names=tuple(switch_list(shown[start : start + joined]) for start in starts),
            )
        )
    return FabricDump(
        format_,
        hosts=tuple(host for nodes in members.values() for host in nodes),
        tiers=tuple(tiers),
        domains=FoundTier("block", tuple(counts), tuple(shown)),
        remarks=remarks.all(),
        assumptions=(_ARE_SWITCHES,) if tiers else (),
    )


def _members(blocks: Sequence[Block], source: str, remarks: Remarks) -> dict[str, tuple[str, ...]]:
    """Return the nodes of each block that has any, sorted by name."""
    members: dict[str, tuple[str, ...]] = {}
    lines: dict[str, int] = {}
    block_of: dict[str, str] = {}
    for block in blocks:
        note_entry(lines, "block", block.name, block.line, source=source)
        if not block.nodes:
            remarks.add(f"block {block.name!r} has no nodes: left out", block.line)
            continue
        names = listed_names(
            block.nodes,
            f"block {block.name!r}",
            block.line,
            max_hosts=MAX_HOSTS - len(block_of),
            source=source,
            remarks=remarks,
        )
        for name in names:
            other = block_of.setdefault(name, block.name)
            if other != block.name:
                raise TopologyTextError(
                    f"node {name!r} is in block {block.name!r} and in {other!r} (line "
                    f"{lines[other]}); a node is in one block",
                    source=source,
                    line=block.line,
                )
        members[block.name] = tuple(sorted(names, key=natural_key))
    return members


def _blocks_joined(
    sizes: Sequence[int],
    line: int | None,
    num_blocks: int,
    source: str,
    remarks: Remarks,
) -> list[int]:
    """Return how many consecutive blocks each stage joins, smallest first.

    A stage that joins all is the last; larger sizes say nothing more.
    """
    stages: list[int] = []
    for before, size in pairwise(sizes):
        ratio, rest = divmod(size, sizes[0])
        if size <= before or rest or ratio.bit_count() != 1:
            raise TopologyTextError(
                f"block size {size} is no power of two times {sizes[0]}, or not larger than "
                f"{before}; Slurm wants sizes like 4,8,32",
                source=source,
                line=line,
            )
        if stages and stages[-1] >= num_blocks:
            remarks.add(
                f"block size {size} is larger than all {num_blocks} blocks together: no further "
                "stage",
                line,
            )
        else:
            stages.append(ratio)
    return stages
