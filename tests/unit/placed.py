"""Small clusters that placement is tested on, and the same clusters cut to some nodes by hand."""

import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

from planner.request import PlanRequest
from planner.resolving import build_problem, resolve
from planner.search.rank import rank
from planner.topology.document import TopologyDocument, parse_topology

SOURCE = "made up"
TRAINING = {"global_batch_size": 48, "seq_len": 1024}
# One pipeline stage: the search of a test takes milliseconds.
HELD = {"pp": 1, "recompute": "none"}

SLOW = {
    "name": "A40",
    "memory_bytes": 80e9,
    "memory_bytes_per_s": 1e12,
    "peak_flop_per_s": {"bf16": 1e14},
    "source": SOURCE,
}


def link(a: str, b: str, kind: str, bytes_per_s: float) -> dict[str, Any]:
    figures = {"bandwidth_bytes_per_s": bytes_per_s, "latency_s": 1e-6, "source": SOURCE}
    return {"between": [a, b], "kind": kind, **figures}


def board(nvlink_bytes_per_s: float = 100e9) -> dict[str, Any]:
    """Two GPUs joined by NVLink, each with a NIC behind the CPU."""
    parts = {"gpu": "gpu", "cpu": "cpu", "nic": "nic"}
    counts = {"gpu": 2, "cpu": 1, "nic": 2}
    components = [{"id": i, "kind": kind, "count": counts[i]} for i, kind in parts.items()]
    links = [
        {**link("gpu", "gpu", "nvlink", nvlink_bytes_per_s), "pattern": "all"},
        {**link("gpu", "cpu", "pcie", 32e9), "pattern": "all"},
        {**link("nic", "cpu", "pcie", 32e9), "pattern": "all"},
    ]
    return {"components": components, "links": links, "source": SOURCE}


def tier(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "latency_s": 1e-6, "source": SOURCE, **fields}


def cluster(
    num_nodes: int = 6,
    *,
    leaves: Sequence[int] | None = None,
    oversubscription: float = 4.0,
    **more: Any,
) -> TopologyDocument:
    """Return ``num_nodes`` boards, two to a leaf or as ``leaves`` says, below one spine."""
    leaf = {"num_nodes": 2} if leaves is None else {"units": list(leaves)}
    network = {
        "kind": "infiniband",
        "layout": "tree",
        "nic_bandwidth_bytes_per_s": 25e9,
        "nic_latency_s": 1e-6,
        "gpudirect": "phb",
        "source": SOURCE,
        "tiers": [
            tier("leaf", **leaf),
            tier("spine", num_nodes=None, oversubscription=oversubscription),
        ],
    }
    document = {
        "name": "small",
        "library": "nccl",
        "device": "a100-sxm-80gb",
        "max_nodes": num_nodes,
        "node": board(),
        "network": network,
        **more,
    }
    return parse_topology(document)


def impairments(*texts: str) -> list[dict[str, Any]]:
    """Return ``n1=0.5`` or ``n1/nic0:leaf0=0.5`` as a document has them."""
    found = []
    for text in texts:
        what, _, factor = text.partition("=")
        ends = what.split(":")
        named: dict[str, Any] = {"link": ends} if len(ends) == 2 else {"part": what}
        found.append({**named, "factor": 0 if factor == "down" else float(factor)})
    return found


def island(first_node: int, num_nodes: int, device: Any = None, **fields: Any) -> dict[str, Any]:
    return {
        "first_node": first_node,
        "num_nodes": num_nodes,
        "device": device or SLOW,
        "node": board(),
        **fields,
    }


def cut(document: TopologyDocument, nodes: Sequence[int]) -> TopologyDocument:
    """Return the cluster of those nodes alone, written anew: it has no other nodes to run on."""
    assert document.network is not None
    data = document.model_dump(mode="json")
    leaf_of = leaves_of(document)
    leaves = list(dict.fromkeys(leaf_of[node] for node in nodes))
    counts = Counter(leaf_of[node] for node in nodes)
    renamed = {document.host(node): f"n{new}" for new, node in enumerate(nodes)}
    renamed |= {f"leaf{old}": f"leaf{new}" for new, old in enumerate(leaves)}
    renamed["spine0"] = "spine0"
    data |= {"max_nodes": len(nodes), "default_nodes": 1, "hosts": []}
    data["network"]["tiers"][0] |= {"num_nodes": None, "units": [counts[one] for one in leaves]}
    data["islands"] = [
        {**one, "first_node": new, "num_nodes": 1}
        for new, node in enumerate(nodes)
        for one in data["islands"]
        if one["first_node"] <= node < one["first_node"] + one["num_nodes"]
    ]
    kept = []
    for wrong in data["impairments"]:
        names = wrong["link"] or [wrong["part"]]
        ends = [renamed.get(name.partition("/")[0]) for name in names]
        if all(ends):
            new_names = [
                "/".join([str(end), *name.split("/")[1:]])
                for end, name in zip(ends, names, strict=True)
            ]
            field = {"link": new_names} if wrong["link"] else {"part": new_names[0]}
            kept.append({**wrong, **field})
    data["impairments"] = kept if len(leaves) > 1 else [k for k in kept if not _is_trunk(k)]
    return parse_topology(data)


def _is_trunk(wrong: dict[str, Any]) -> bool:
    """A leaf alone has no way up that anybody uses."""
    return "spine0" in (wrong["link"] or ())


def leaves_of(document: TopologyDocument) -> list[int]:
    """Return the leaf of every node."""
    assert document.network is not None
    units = document.network.tiers[0].units or (2,) * -(-document.max_nodes // 2)
    return [leaf for leaf, size in enumerate(units) for _ in range(size)][: document.max_nodes]


def request(topology: Any, **changes: Any) -> PlanRequest:
    fields = {"topology": topology, "model": "example-gpt", "training": TRAINING}
    return PlanRequest.model_validate({**fields, "constraints": HELD, "top_k": 0, **changes})


def price_s(document: TopologyDocument, nodes: Sequence[int]) -> float:
    """Return the best step time on those nodes, whatever is wrong with them."""
    return _best_s(cut(document, nodes).model_dump_json(), len(nodes))


@cache
def _best_s(document: str, num_nodes: int) -> float:
    asked = request(json.loads(document), nodes=num_nodes)
    ranking = rank(build_problem(resolve(asked)), asked.constraints)
    return float(ranking.priced.step_time_s()[0])
