"""What surrounds Slurm's topology files where people copy them from, and what ``scontrol`` adds.

Issues have fences, Kubernetes has the file as a value in a ConfigMap, terminals have a prompt.
``scontrol show topology`` prints the entries of topology.conf with more keys (print functions of
src/plugins/topology/tree/topology_tree.c and block/topology_block.c, Slurm 26.11): a level and the
nodes of all switches below; an index and a size, and a line of its own for each aggregated block.
"""

import re
from typing import Final

__all__ = ["is_prose", "topologies_alone", "without_printed"]

_FIRST_TOPOLOGY: Final = re.compile(r"([ \t]{0,80})-[ \t]{1,9}[\"']?topology[\"']?[ \t]{0,9}:")
_NO_TEXT: Final = re.compile(r"[ \t]{0,80}(?:#.*|---.*)?")
_ENTRY: Final = re.compile(r"(?:Switch|Block|Ring)(?:Name|Sizes)|=", re.IGNORECASE)


def is_prose(entry: str) -> bool:
    """Tell whether a line is no entry, nor one that is damaged.

    >>> is_prose("```"), is_prose("$ scontrol show topology"), is_prose("SwitchName a Nodes=b")
    (True, True, False)
    """
    return _ENTRY.search(entry) is None and not entry.lower().startswith("include")


def without_printed(pairs: dict[str, str]) -> str:
    """Remove from an entry what only scontrol prints; return its block size, if it has one."""
    if pairs.pop("level", None) is not None:
        pairs.pop("linkspeed", None)
        if pairs.get("switches"):
            pairs.pop("nodes", None)  # those of the switches below
    pairs.pop("blockindex", None)
    return pairs.pop("blocksize", "")


def topologies_alone(text: str) -> tuple[str, bool]:
    """Return the list of topologies with blank lines in place of what surrounds it.

    Returns:
        The text, with as many lines before the list as there were, and whether something else
        than comments was left out.
    """
    lines = text.split("\n")
    starts = (n for n, line in enumerate(lines) if _FIRST_TOPOLOGY.match(line))
    first = next(starts, None)
    if first is None:
        return text, False
    indent = len(lines[first]) - len(lines[first].lstrip())
    last = first
    while last + 1 < len(lines) and _goes_on(lines[last + 1], indent):
        last += 1
    around = [*lines[:first], *lines[last + 1 :]]
    if all(_NO_TEXT.fullmatch(line.rstrip()) for line in around):
        return text, False
    return "\n".join([*[""] * first, *lines[first : last + 1]]), True


def _goes_on(line: str, indent: int) -> bool:
    """Tell whether a line belongs to a list whose items stand at ``indent``."""
    bare = line.lstrip()
    at = len(line) - len(bare)
    return not bare or at > indent or (at == indent and bare.startswith(("-", "#")))
