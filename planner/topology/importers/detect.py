"""Which tool wrote a text: decided by what the text holds, never by the name of a file.

What is close but of no use here is refused by name, with the command that prints what is needed.
"""

import re
from typing import Final, Literal, NoReturn

from planner.topology.importers.dump import TopologyTextError, checked_text
from planner.topology.importers.smi.nvidia_smi_listing import DISTANCES, PEER_STATUS

__all__ = ["TextFormat", "detect"]

TextFormat = Literal[
    "nvidia-smi",
    "rocm-smi",
    "amd-smi",
    "nccl-xml",
    "lstopo",
    "slurm-conf",
    "slurm-yaml",
    "ibnetdiscover",
]

_NEEDED: Final = (
    "for a node give nvidia-smi topo -m, rocm-smi --showtopo, amd-smi topology, the file of "
    "NCCL_TOPO_DUMP_FILE or lstopo --of xml; for a fabric Slurm's topology.conf or topology.yaml, "
    "or ibnetdiscover"
)

# Everything is searched for in whole lines, with bounded runs of blanks: a text may be hostile.
_CODE: Final = rf"(?:NV\d{{1,2}}|{'|'.join(DISTANCES)})"
_GAP: Final = r"[^\nA-Za-z0-9]{1,80}"
# The start of a row of a GPU, behind what a launcher or a quotation puts before it.
_ROW: Final = (
    r"^[^\nA-Za-z0-9]{0,80}(?:[A-Za-z0-9][\w.\-\[\],<>:]{0,80}(?:[ \t]{1,40}|(?<=:)))?GPU\d{1,3}"
    + _GAP
)


def _lines(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.MULTILINE | re.IGNORECASE)


# In this order: what tells most comes first.
_KNOWN: Final[tuple[tuple[re.Pattern[str], TextFormat], ...]] = (
    (
        _lines(r"(?:Weight|Hops|Link Type|Link accessibility) between two GPUs"),
        "rocm-smi",
    ),
    (_lines(r"^.{0,200}\b(?:ACCESS|WEIGHT|HOPS|LINK TYPE|NUMA BW) TABLE\b"), "amd-smi"),
    (_lines(r'^[ \t]{0,80}(?:Switch|Ca|Rt)[ \t]{1,9}\d{1,5}[ \t]{1,9}"[SHR]-'), "ibnetdiscover"),
    (
        _lines(r"^[ \t]{0,80}(?:SwitchName|BlockName|BlockSizes)[ \t]{0,9}[-+]?="),
        "slurm-conf",
    ),
    (_lines(r"^[ \t]{0,80}(?:-[ \t]{1,9})?[\"']?topology[\"']?[ \t]{0,9}:"), "slurm-yaml"),
)
_MATRIX: Final = re.compile(rf"{_ROW}(?:X{_GAP})?{_CODE}(?!\w)", re.MULTILINE)
_PEER_STATUS: Final = re.compile(
    rf"{_ROW}(?:X{_GAP})?(?:{'|'.join(PEER_STATUS)})(?!\w)", re.MULTILINE
)
_LONE_GPU: Final = re.compile(rf"{_ROW}X(?!\w)", re.MULTILINE)

# Texts that people have at hand, and what is needed in their place.
_OTHERS: Final = (
    (_lines(r"\bout-of-place\b|# nThread|nccl-tests version"), "a log of nccl-tests"),
    (
        _lines(
            r"^[ \t]{0,80}(?:ClusterName|SlurmctldHost|ControlMachine|PartitionName|NodeName)"
            r"[ \t]{0,9}="
        ),
        "slurm.conf; the switches are in topology.conf beside it",
    ),
    (_lines(r"^[ \t]{0,80}CA '[\w.\-]{1,80}'"), "ibstat, which shows one host's adapters"),
    (_lines(r"^[ \t]{0,80}(?:Switch|CA): (?:0x[0-9a-f]|\S{1,200} \S{1,80}:)"), "iblinkinfo"),
    (_lines(r"^.{0,40}NVIDIA-SMI[ \t]{1,9}\d"), "nvidia-smi without 'topo -m'"),
    (_lines(r"NCCL INFO"), "a log of NCCL; NCCL_TOPO_DUMP_FILE=topo.xml makes it write its XML"),
    (_lines(r"^[ \t]{0,80}(?:switches|capacity_blocks)[ \t]{0,9}:"), "a cluster model in YAML"),
)
_ROOTS: Final = {
    "graphs": "NCCL's graph file (NCCL_GRAPH_FILE), which holds the rings it chose",
    "algo": "an MSCCL algorithm",
    "nvidia_smi_log": "nvidia-smi -q -x, which says nothing of links",
    "html": "a web page; save the text alone",
    "svg": "a drawing of lstopo; save it with --of xml",
}


def detect(text: str | bytes, source: str) -> TextFormat:
    """Return the format of ``text``.

    Args:
        text: Output of a tool, with whatever stands around it.
        source: What to call the text in messages.

    Raises:
        TopologyTextError: It is of none of the formats; with what it looks like, if known.
    """
    text = checked_text(text, source=source)
    start = text.lstrip()[:1]
    if start == "<" and (found_xml := _xml(text, source)):
        return found_xml
    if start in ("{", "["):
        found = _json(text)
        if found == "amd-smi":
            return "amd-smi"
        if found:
            raise TopologyTextError(found, source=source)
    for pattern, name in _KNOWN[:2]:
        if pattern.search(text):
            return name
    if _MATRIX.search(text):
        return "nvidia-smi"
    if _PEER_STATUS.search(text):
        _refuse("nvidia-smi topo -p2p, which says who may reach whom but not how", source)
    if _LONE_GPU.search(text):
        return "nvidia-smi"
    for pattern, name in _KNOWN[2:]:
        if pattern.search(text):
            return name
    if '"bdf"' in text and '"links"' in text:  # a prompt or a warning before the JSON
        return "amd-smi"
    if inside := re.search(r"^[ \t]{0,80}<(system|topology)[ >]", text, re.MULTILINE):
        return _ROOT_FORMATS[inside[1]]
    for pattern, what in _OTHERS:
        if pattern.search(text):
            _refuse(what, source)
    if start == "<" and (root := re.search(r"<([A-Za-z_][\w.\-]{0,80})", text)):
        raise TopologyTextError(f"is XML of <{root[1].lower()}>; {_NEEDED}", source=source)
    raise TopologyTextError(f"is of no known format: {_NEEDED}", source=source)


_ROOT_FORMATS: Final[dict[str, TextFormat]] = {"system": "nccl-xml", "topology": "lstopo"}


def _refuse(what: str, source: str) -> NoReturn:
    raise TopologyTextError(f"looks like {what}; {_NEEDED}", source=source)


def _xml(text: str, source: str) -> TextFormat | None:
    """Return the format that the first element says; None for markup that may hold a listing."""
    root = re.search(r"<([A-Za-z_][\w.\-]{0,80})", text)
    name = root[1].lower() if root else ""
    if name in _ROOT_FORMATS:
        return _ROOT_FORMATS[name]
    if name in _ROOTS and not _MATRIX.search(text):
        _refuse(_ROOTS[name], source)
    return None


def _json(text: str) -> str:
    """Return "amd-smi", or the message for JSON of another kind; empty if it tells nothing.

    The keys are looked for, not the values read: a cut text is still known for what it is.
    """
    keys = set(re.findall(r'"(\w{1,60})"[ \t\n\r]{0,20}:', text[:1_000_000]))
    if keys & {"bdf", "gpu"} and keys & {"links", "link_type", "weight", "hops", "num_hops"}:
        return "amd-smi"
    if {"components", "links", "library"} <= keys:
        return (
            "is already a topology document; use it as it is: --topology FILE, or the field "
            "topology of a request"
        )
    if keys & {"hidden_size", "n_embd", "d_model", "model_type", "architectures"}:
        return f"looks like the config.json of a model; that is --model. As topology, {_NEEDED}"
    if "zero_optimization" in keys:
        return f"looks like a DeepSpeed config; {_NEEDED}"
    if {"collective", "protocol", "gpus"} <= keys:
        return f"looks like an MSCCL++ plan; {_NEEDED}"
    if {"schema_version", "layout", "prediction"} <= keys:
        return f"looks like a plan of commplan; {_NEEDED}"
    return ""
