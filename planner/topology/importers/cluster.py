"""From the texts that tools print to a topology document.

One text is about a node, another, or a few options, about what joins the nodes. Whatever neither
says is guessed in one place each and said in the document's ``assumptions``.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from planner.errors import InvalidInputError
from planner.hardware.gpus import GpuModel
from planner.topology.checks import (
    MAX_ASSUMPTION_CHARS,
    MAX_ASSUMPTIONS,
    MAX_DESCRIPTION_CHARS,
    MAX_SOURCE_CHARS,
)
from planner.topology.compile import compile_fabric
from planner.topology.document import TopologyDocument, parse_topology
from planner.topology.importers.detect import detect
from planner.topology.importers.dump import FabricDump, NodeDump, TopologyTextError, checked_text
from planner.topology.importers.fabric.ibnetdiscover import read_ibnetdiscover
from planner.topology.importers.fabric.slurm import read_slurm_conf, read_slurm_yaml
from planner.topology.importers.network import Joined, join_nodes
from planner.topology.importers.node import BuiltNode, build_node, choose_model
from planner.topology.importers.options import ImportOptions
from planner.topology.importers.smi.amd_smi import read_amd_smi
from planner.topology.importers.smi.nvidia_smi import read_nvidia_smi
from planner.topology.importers.smi.rocm_smi import read_rocm_smi
from planner.topology.importers.xml.lstopo import read_lstopo
from planner.topology.importers.xml.nccl_xml import read_nccl_xml

__all__ = ["ImportOptions", "Imported", "import_topology"]

DumpT = TypeVar("DumpT", NodeDump, FabricDump)

_NODE_READERS: Final[dict[str, Callable[[str, str], NodeDump]]] = {
    "nvidia-smi": read_nvidia_smi,
    "rocm-smi": read_rocm_smi,
    "amd-smi": read_amd_smi,
    "nccl-xml": read_nccl_xml,
    "lstopo": read_lstopo,
}
_FABRIC_READERS: Final[dict[str, Callable[[str, str], FabricDump]]] = {
    "slurm-conf": read_slurm_conf,
    "slurm-yaml": read_slurm_yaml,
    "ibnetdiscover": read_ibnetdiscover,
}

_NO_NODE: Final = "describes a fabric; give it with --fabric, and a text about one node"
_NO_FABRIC: Final = "describes one node; give it with --node, and a text about the fabric"

_MAX_SOURCE_NAME: Final = 120


@dataclass(frozen=True, slots=True)
class Imported:
    """A topology read from texts.

    Attributes:
        document: Ready to plan with; what was guessed is in its assumptions.
        remarks: What the readers repaired or left out, each with its source and line.
    """

    document: TopologyDocument
    remarks: tuple[str, ...]


def import_topology(
    node_text: str | bytes,
    *,
    node_source: str,
    gpu: str | None = None,
    fabric_text: str | bytes | None = None,
    fabric_source: str = "fabric",
    options: ImportOptions | None = None,
) -> Imported:
    """Return the topology of a cluster of equal nodes.

    Args:
        node_text: What a tool printed on one node, in any of the formats of ``detect``.
        node_source: What to call it in messages: a file name.
        gpu: Name of the GPU; None where the text has it.
        fabric_text: Slurm's topology.conf or topology.yaml, or the output of ibnetdiscover.
        fabric_source: What to call that.
        options: What no text says.

    Raises:
        InvalidInputError: A text is of no use, with its line; or something is not said and must
            be; or what is said contradicts a text.
    """
    options = options or ImportOptions()
    node_source, fabric_source = node_source[-_MAX_SOURCE_NAME:], fabric_source[-_MAX_SOURCE_NAME:]
    dump = _dump(node_text, node_source, _NODE_READERS, _NO_NODE)
    fabric = (
        None
        if fabric_text is None
        else _dump(fabric_text, fabric_source, _FABRIC_READERS, _NO_FABRIC)
    )
    model, said = choose_model(dump, gpu, source=node_source)
    in_domain = options.domain_nodes is not None or (fabric is not None and bool(fabric.domains))
    node = build_node(
        dump,
        model,
        source=node_source,
        nics=options.nics,
        in_domain=in_domain and model.is_switched and model.is_coherent,
    )
    joined = join_nodes(node, model, fabric, options, source=fabric_source)
    assumptions = [
        *([said] if said else []),
        *dump.assumptions,
        *(fabric.assumptions if fabric else ()),
        *node.assumptions,
        *joined.assumptions,
    ]
    document = _document(options.name, dump, model, node, joined, node_source, assumptions)
    for nodes in sorted({1, document.max_nodes}):
        compile_fabric(document, nodes)  # what is handed back works
    remarks = [remark.of(node_source) for remark in dump.remarks]
    remarks += [remark.of(fabric_source) for remark in (fabric.remarks if fabric else ())]
    return Imported(document, tuple(remarks))


def _dump(
    text: str | bytes,
    source: str,
    readers: Mapping[str, Callable[[str, str], DumpT]],
    elsewhere: str,
) -> DumpT:
    """Return what the text says, if its format has one of ``readers``."""
    text = checked_text(text, source=source)
    name = detect(text, source)
    if name not in readers:
        raise TopologyTextError(
            f"is {name}, which {elsewhere} ({', '.join(readers)}) here", source=source
        )
    return readers[name](text, source)


def _document(
    name: str,
    dump: NodeDump,
    model: GpuModel,
    node: BuiltNode,
    joined: Joined,
    source: str,
    assumptions: Sequence[str],
) -> TopologyDocument:
    fields = {
        "name": name,
        "description": _description(dump, model, node, source),
        "library": model.library,
        "device": model.device or _device(model),
        "default_nodes": joined.default_nodes,
        "max_nodes": joined.max_nodes,
        "hosts": joined.hosts,
        "node": {
            "components": node.components,
            "links": node.links,
            "source": f"{source} ({dump.format}). {model.name}: {model.source}"[:MAX_SOURCE_CHARS],
        },
        "nvlink_domain": joined.domain,
        "network": joined.network,
        "assumptions": _bounded(assumptions),
    }
    if not node.links:
        raise InvalidInputError(f"{source}: shows nothing that joins a GPU", where="node")
    return parse_topology(fields)


def _device(model: GpuModel) -> dict[str, object]:
    """Return the figures of a GPU that is no bundled device."""
    return {
        "name": model.name,
        "memory_bytes": model.memory_bytes,
        "memory_bytes_per_s": model.memory_bytes_per_s,
        "peak_flop_per_s": model.peak_flop_per_s,
        "source": model.source,
    }


def _description(dump: NodeDump, model: GpuModel, node: BuiltNode, source: str) -> str:
    """Return what was imported, and which part is which."""
    num_gpus = sum(part.kind == "gpu" for part in dump.parts)
    text = f"{num_gpus} x {model.name} and {node.num_nics} NICs, from {source} ({dump.format})."
    names = [
        f"{name} = {found}" for name, found in node.named.items() if name.startswith(("gpu", "nic"))
    ]
    return _cut(f"{text} {', '.join(names)}", MAX_DESCRIPTION_CHARS)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _bounded(assumptions: Iterable[str]) -> tuple[str, ...]:
    """Return each assumption once, no more and no longer than a document holds."""
    once = [_cut(text, MAX_ASSUMPTION_CHARS) for text in dict.fromkeys(assumptions)]
    if len(once) <= MAX_ASSUMPTIONS:
        return tuple(once)
    kept = once[: MAX_ASSUMPTIONS - 1]
    return (*kept, f"and {len(once) - len(kept)} more assumptions of the same kinds")
