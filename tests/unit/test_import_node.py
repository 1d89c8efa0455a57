"""From what a reader found to the parts of a node: links, switches, order, NICs, guesses."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import InvalidInputError
from planner.hardware.gpus import gpu_model
from planner.topology.bundled import load_topology, topology_names
from planner.topology.compile import compile_fabric
from planner.topology.document import Component, NodeType, TopologyDocument
from planner.topology.expand import merged_links
from planner.topology.importers.cluster import Imported, import_topology
from planner.topology.importers.dump import FoundPart, NodeDump, PeerLink, TopologyTextError
from planner.topology.importers.edges import Edge, shortest
from planner.topology.importers.figures import coherent_link, cpu_link
from planner.topology.importers.node import BuiltNode, build_node, choose_model
from tests.unit.imported_samples import SAMPLES

COUNTS = list[tuple[int, int, int]]


def dump(
    num_gpus: int,
    counts: Iterable[tuple[int, int, int | None]] = (),
    *,
    kind: str = "nvlink",
    per_cpu: int = 64,
    nics: Sequence[FoundPart] = (),
    text_format: str = "nvidia-smi",
) -> NodeDump:
    """Return GPUs on CPUs in a row, with links as (GPU, GPU, count)."""
    cpus = [FoundPart(f"cpu{i}", "cpu") for i in range(-(-num_gpus // per_cpu))]
    gpus = [FoundPart(f"GPU{i}", "gpu", f"cpu{i // per_cpu}", 2 + i) for i in range(num_gpus)]
    links = [
        PeerLink(f"GPU{a}", f"GPU{b}", "xgmi" if kind == "xgmi" else "nvlink", count, line=2 + a)
        for a, b, count in counts
    ]
    return NodeDump(text_format, (*cpus, *gpus, *nics), tuple(links))


def full(num_gpus: int, count: int | None) -> list[tuple[int, int, int | None]]:
    return [(a, b, count) for a, b in combinations(range(num_gpus), 2)]


def build(found: NodeDump, gpu: str, *, in_domain: bool = False) -> BuiltNode:
    return build_node(found, gpu_model(gpu), source="text", in_domain=in_domain)


def document(found: NodeDump, gpu: str) -> TopologyDocument:
    built = build(found, gpu)
    node = NodeType(components=built.components, links=built.links, source="test")
    return TopologyDocument(
        name="t", library=gpu_model(gpu).library, device="h100-sxm-80gb", node=node
    )


def inside(found: NodeDump, gpu: str) -> list[tuple[str, int, float]]:
    return [
        (level.name, level.unit_size, level.bytes_per_s / 1e9)
        for level in compile_fabric(document(found, gpu)).levels
    ]


def has_switch(built: BuiltNode) -> bool:
    return any(component.kind == "nvswitch" for component in built.components)


# ------------------------------------------------------------------- what counts between GPUs mean


@pytest.mark.parametrize(
    ("num_gpus", "count", "gpu", "switched"),
    [
        (4, 4, "A100", False),  # 3 x 4 = 12: boards of four are a mesh
        (8, 12, "A100", True),
        (2, 12, "A100 PCIe", False),
        (8, 18, "H100", True),
        (8, 8, "H800", True),
        (2, 18, "H100", False),
        (4, 2, "V100", False),
        (16, 6, "V100 SXM3", True),
        (4, 6, "GH200", False),
        (4, 18, "GB200", True),
    ],
)
def test_switches_stand_where_counts_exceed_the_links_of_a_gpu(
    num_gpus: int, count: int, gpu: str, switched: bool
) -> None:
    found = dump(num_gpus, full(num_gpus, count))
    built = build(found, gpu)
    assert has_switch(built) == switched
    model = gpu_model(gpu)
    out_of_gpu = count * (1 if switched else num_gpus - 1) * model.link_bytes_per_s / 1e9
    name, size, rate = inside(found, gpu)[0]
    assert (name, size) == ("nvlink", num_gpus)
    assert rate == pytest.approx(out_of_gpu)
    assert built.on_switches == (count if switched else None)


def test_multicast_is_that_of_the_models_switches() -> None:
    for gpu, count, multicast in (("H100", 18, True), ("A100", 12, False)):
        built = build(dump(8, full(8, count)), gpu)
        (switch,) = (part for part in built.components if part.kind == "nvswitch")
        assert switch.multicast == multicast


def test_islands_of_switches_stay_apart() -> None:
    islands: list[tuple[int, int, int | None]] = [
        (a, b, 12) for base in (0, 4) for a, b in combinations(range(base, base + 4), 2)
    ]
    found = dump(8, islands)
    assert [c.count for c in build(found, "A100").components if c.kind == "nvswitch"] == [2]
    assert inside(found, "A100")[0] == ("nvlink", 4, 300)


def test_a_gpu_with_links_down_has_those_that_are_up() -> None:
    counts = [(a, b, 10 if 3 in (a, b) else 12) for a, b in combinations(range(8), 2)]
    found = dump(8, counts)
    assert "GPU3 has 10 NVLinks that are up, the others 12" in build(found, "A100").assumptions
    assert inside(found, "A100")[0] == ("nvlink", 8, 250)


@pytest.mark.parametrize(
    ("found", "gpu", "line", "told"),
    [
        (dump(2, [(0, 1, 4)]), "RTX 4090", 2, "no links of its own"),
        (dump(2, [(0, 1, 18)]), "A100", 2, "18 links at GPU0 and GPU1, but A100 SXM 80GB has 12"),
        (dump(2, [(0, 1, 1)], kind="xgmi"), "H100", 2, "by xgmi, but H100 SXM has nvlink"),
        (dump(4, full(4, 12)[:-1]), "A100", 2, "not every pair of its group"),
        (dump(3, [(0, 1, 12), (0, 2, 12), (1, 2, 6)]), "A100", 2, "24 links to its peers"),
        (dump(4, full(4, 1), kind="xgmi"), "MI50", 2, "3 links to its peers"),
    ],
)
def test_links_that_a_gpu_cannot_have_are_refused_with_their_line(
    found: NodeDump, gpu: str, line: int, told: str
) -> None:
    with pytest.raises(TopologyTextError) as caught:
        build(found, gpu)
    assert caught.value.line == line
    assert told in str(caught.value)
    assert "--gpu" in str(caught.value)


@pytest.mark.parametrize("ends", [("GPU0", "mlx5_0"), ("cpu0", "cpu1")])
def test_links_between_parts_that_have_none_are_refused(ends: tuple[str, str]) -> None:
    found = dump(2, per_cpu=1, nics=(nic("mlx5_0"),))
    with pytest.raises(TopologyTextError, match=f"joins {ends[0]} and {ends[1]} by nvlink"):
        build(replace(found, links=(PeerLink(*ends, "nvlink", 1),)), "A100")


def test_more_gpus_than_a_node_holds_are_refused_before_anything_is_counted() -> None:
    with pytest.raises(TopologyTextError, match="shows 65 GPUs"):
        build(dump(65), "H100")


def test_links_to_switches_of_the_text_are_added_up() -> None:
    switches = tuple(FoundPart(f"sw{i}", "nvswitch") for i in range(2))
    links = tuple(
        PeerLink(f"GPU{g}", f"sw{s}", "nvlink", 9, line=g) for g in range(8) for s in range(2)
    )
    found = dump(8)
    found = replace(found, parts=(*found.parts, *switches), links=links)
    assert inside(found, "H100")[0] == ("nvlink", 8, 450)
    over = replace(found, links=tuple(replace(link, count=10) for link in links))
    with pytest.raises(TopologyTextError, match="20 links at GPU0"):
        build(over, "H100")


def test_a_rate_in_the_text_wins_and_is_said() -> None:
    found = dump(2, [(0, 1, 4)])
    slow = replace(found, links=(replace(found.links[0], bytes_per_s=50e9),))
    assert inside(found, "A100")[0][2] == 100
    assert inside(slow, "A100")[0][2] == 50
    said = build(slow, "A100").assumptions
    assert any("50.0 GB/s" in text and "100 GB/s" in text for text in said)


@pytest.mark.parametrize(
    ("gpu", "num_gpus", "bytes_per_s"), [("MI300X", 8, 448e9), ("MI300A", 4, 384e9)]
)
def test_xgmi_that_is_not_counted_has_the_links_of_the_board(
    gpu: str, num_gpus: int, bytes_per_s: float
) -> None:
    found = dump(num_gpus, full(num_gpus, None), kind="xgmi", text_format="rocm-smi")
    assert inside(found, gpu)[0] == ("xgmi", num_gpus, bytes_per_s / 1e9)
    assert any("does not count the links" in text for text in build(found, gpu).assumptions)


def test_nvlink_that_the_text_hides_is_assumed_only_on_boards_that_always_have_it() -> None:
    shown = [
        inside(dump(num, text_format=text), gpu)[0][0]
        for num, text, gpu in (
            (8, "nccl-xml", "H100"),
            (8, "nvidia-smi", "H100"),  # that text would show them
            (4, "nccl-xml", "H100"),
            (8, "nccl-xml", "V100"),
        )
    ]
    assert shown == ["nvlink", "cpu", "cpu", "cpu"]


def test_nvlink_to_a_cpu_replaces_pcie() -> None:
    found = dump(4, [(0, 1, 3), (2, 3, 3)], per_cpu=2)
    to_cpu = tuple(PeerLink(f"GPU{i}", f"cpu{i // 2}", "nvlink", 3) for i in range(4))
    built = build(replace(found, links=(*found.links, *to_cpu)), "V100")
    kinds = {(link.between, link.kind) for link in built.links}
    assert (("gpu", "cpu"), "c2c") in kinds
    assert not any(kind == "pcie" for _, kind in kinds)
    (smp,) = (link for link in built.links if link.kind == "smp")
    assert "POWER9" in smp.source


# --------------------------------------------------------------------------------- towards the CPU


def test_coherent_gpus_hang_on_their_cpu_by_c2c() -> None:
    for gpu, bytes_per_s in (("GH200", 450e9), ("GB200", 225e9)):
        found = dump(1)
        coherent = tuple(replace(p, is_coherent=p.kind == "gpu") for p in found.parts)
        (link,) = build(replace(found, parts=coherent), gpu).links
        assert (link.kind, link.bandwidth_bytes_per_s) == ("c2c", bytes_per_s)


# Named in sources of bundled topologies; as NCCL's and hwloc's XML name them.
CPUS = {
    "POWER9": "ppc64le",
    "Emerald Rapids": "x86_64 GenuineIntel 6 207",
    "Sapphire Rapids": "x86_64 GenuineIntel 6 143",
    "Skylake": "x86_64 GenuineIntel 6 85",
    "Broadwell": "x86_64 GenuineIntel 6 79",
    "AMD": "x86_64 AuthenticAMD 143 49",
}


def test_imported_and_bundled_machines_with_one_cpu_have_one_rate_between_cpus() -> None:
    seen = set()
    for name in topology_names():
        for link in load_topology(name).node.links:
            found = [cpu for cpu in CPUS if f"{cpu} " in link.source and link.kind == "smp"]
            seen |= set(found)
            for cpu in found:
                assert cpu_link(CPUS[cpu])[0] == link.bandwidth_bytes_per_s, name
    assert seen == set(CPUS)


def test_imported_and_bundled_machines_with_one_gpu_have_one_rate_to_its_cpu() -> None:
    seen = set()
    for name in topology_names():
        document = load_topology(name)
        links = [link for link in document.node.links if link.kind == "c2c"]
        if document.library in ("nccl", "rccl") and links:
            known = coherent_link(gpu_model(document.device_name))
            if known is not None:
                seen.add(document.device_name)
                assert {link.bandwidth_bytes_per_s for link in links} == {known[0]}, name
    assert len(seen) >= 4


def test_cpus_that_a_text_does_not_name_are_known_by_what_joins_them_to_gpus() -> None:
    for gpu, cpu in (("GB200", "Grace"), ("MI300A", "AMD")):
        found = dump(2, per_cpu=1)
        coherent = tuple(replace(p, is_coherent=p.kind == "gpu") for p in found.parts)
        links = build(replace(found, parts=coherent), gpu).links
        (smp,) = (link for link in links if link.kind == "smp")
        assert cpu in smp.source
    (smp,) = (link for link in build(dump(2, per_cpu=1), "A100").links if link.kind == "smp")
    assert smp.source.startswith("assumed as Sapphire Rapids")


def test_pcie_rates_of_the_text_are_used_and_others_are_said_to_be_assumed() -> None:
    unknown = build(dump(1), "H100")
    assert unknown.links[0].bandwidth_bytes_per_s == 63e9
    assert any("taken as the slot of H100 SXM" in text for text in unknown.assumptions)
    found = dump(1)
    known = tuple(
        replace(p, link_bytes_per_s=8e9 if p.kind == "gpu" else None) for p in found.parts
    )
    built = build(replace(found, parts=known), "H100")
    assert built.links[0].bandwidth_bytes_per_s == 8e9
    assert not any("slot" in text for text in built.assumptions)


def test_cpus_and_switches_with_nothing_below_are_left_out() -> None:
    found = dump(2, per_cpu=2)
    more = (FoundPart("cpu9", "cpu"), FoundPart("switch9", "pcie_switch", "cpu9"))
    assert {
        c.id for c in build(replace(found, parts=(*found.parts, *more)), "L40S").components
    } == {
        "gpu",
        "cpu",
    }


def test_a_node_with_a_domain_has_no_switches_of_its_own() -> None:
    built = build(dump(4, full(4, 18)), "GB200", in_domain=True)
    assert not has_switch(built)
    assert {link.kind for link in built.links} == {"pcie"}
    assert built.on_switches == 18


# ------------------------------------------------------------------------------------ order of GPUs


def test_gpus_that_share_something_are_listed_in_a_row_and_the_ranks_line_is_given() -> None:
    pairs: COUNTS = [(0, 2, 12), (1, 3, 12)]
    built = build(dump(4, pairs), "A100 PCIe")
    assert [built.named[f"gpu{i}"] for i in range(4)] == ["GPU0", "GPU2", "GPU1", "GPU3"]
    assert any("CUDA_VISIBLE_DEVICES=0,2,1,3" in text for text in built.assumptions)
    assert inside(dump(4, pairs), "A100 PCIe")[0] == ("nvlink", 2, 300)


def test_gpus_behind_one_pcie_switch_are_listed_in_a_row() -> None:
    parts = [
        FoundPart("cpu0", "cpu"),
        *(FoundPart(f"switch{i}", "pcie_switch", "cpu0") for i in range(2)),
        *(FoundPart(f"GPU{i}", "gpu", f"switch{i % 2}") for i in range(4)),
    ]
    found = NodeDump("nccl-xml", tuple(parts), ())
    built = build(found, "L40S")
    assert [built.named[f"gpu{i}"] for i in range(4)] == ["GPU0", "GPU2", "GPU1", "GPU3"]
    assert [(name, size) for name, size, _ in inside(found, "L40S")] == [("pcie", 2), ("cpu", 4)]
    assert not any("can have" in text for text in built.assumptions)


def test_the_machines_own_order_stays_where_it_does() -> None:
    built = build(dump(4, [(0, 1, 12), (2, 3, 12)]), "A100 PCIe")
    assert [built.named[f"gpu{i}"] for i in range(4)] == [f"GPU{i}" for i in range(4)]
    assert not any("VISIBLE_DEVICES" in text for text in built.assumptions)


@settings(max_examples=40, deadline=None)
@given(order=st.permutations(range(6)), islands=st.sampled_from([(2, 2, 2), (3, 3), (4, 2), (6,)]))
def test_however_a_machine_numbers_its_gpus_the_levels_are_the_same(
    order: list[int], islands: tuple[int, ...]
) -> None:
    """GPUs of an island are joined by one NVLink each; two GPUs share a CPU."""
    ends = [sum(islands[:i]) for i in range(len(islands))]
    groups = [range(start, start + size) for start, size in zip(ends, islands, strict=True)]
    counts = [(a, b, 1) for group in groups for a, b in combinations(group, 2)]
    number = {gpu: position for position, gpu in enumerate(order)}
    plain = dump(6, counts, per_cpu=6)
    mixed = dump(6, [(number[a], number[b], n) for a, b, n in counts], per_cpu=6)
    assert inside(mixed, "A100") == inside(plain, "A100")


# ------------------------------------------------------------------------------------------- NICs


def nic(name: str, bytes_per_s: float | None = None) -> FoundPart:
    return FoundPart(name, "nic", "cpu0", bytes_per_s=bytes_per_s)


def test_the_fastest_nics_are_kept_and_each_other_is_named() -> None:
    nics = [nic("eno1", 1.25e8), nic("ib0", 5e10), nic("ib1", 5e10), nic("eno2")]
    built = build(dump(2, nics=nics), "L40S")
    assert (built.num_nics, built.nic_bytes_per_s) == (2, 5e10)
    assert [built.named[name] for name in ("nic0", "nic1")] == ["ib0", "ib1"]
    left = [text for text in built.assumptions if "is left out" in text]
    assert [text.split(", others")[0] for text in left] == [
        "NIC eno1 is left out: 125 MB/s",
        "NIC eno2 is left out: of unknown rate",
    ]


def test_nics_of_unknown_rate_are_all_kept_and_too_many_are_remarked_on() -> None:
    built = build(dump(1, nics=[nic("a"), nic("b")]), "L40S")
    assert (built.num_nics, built.nic_bytes_per_s) == (2, None)
    assert any("all 2 NICs" in text for text in built.assumptions)


def test_named_nics_are_the_only_ones() -> None:
    found = dump(1, nics=[nic("a", 1e9), nic("b", 5e10)])
    built = build_node(found, gpu_model("L40S"), source="text", nics=("a",))
    assert (built.num_nics, built.nic_bytes_per_s) == (1, 1e9)
    assert "NIC b is left out: not named" in built.assumptions
    with pytest.raises(InvalidInputError, match="has no NIC 'c'; there are a, b"):
        build_node(found, gpu_model("L40S"), source="text", nics=("c",))


# ---------------------------------------------------------------------------------- which GPU it is


def test_the_user_names_the_gpu_where_the_text_does_not() -> None:
    found = dump(2)
    with pytest.raises(InvalidInputError, match="--gpu H100: text does not say") as caught:
        choose_model(found, None, source="text")
    assert caught.value.where == "gpu"
    assert choose_model(found, "h100", source="text")[0].name == "H100 SXM"


def test_the_text_names_the_gpu_where_it_can() -> None:
    found = dump(2)
    h100 = tuple(replace(p, model="NVIDIA H100 80GB HBM3") for p in found.parts)
    assert choose_model(replace(found, parts=h100), None, source="t")[0].name == "H100 SXM"
    odd = tuple(replace(p, model="gfx942") for p in found.parts)
    with pytest.raises(InvalidInputError, match="'gfx942', which is not known"):
        choose_model(replace(found, parts=odd), None, source="t")
    mixed = (*h100[:-1], replace(h100[-1], model="NVIDIA L40S"))
    with pytest.raises(InvalidInputError, match="several models"):
        choose_model(replace(found, parts=mixed), None, source="t")


# ------------------------------------------------------------------------------------ short writing


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_links_written_short_are_the_links_that_were_found(data: st.DataObject) -> None:
    counts = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 4)))
    parts = (
        Component(id="gpu", kind="gpu", count=counts[0]),
        Component(id="cpu", kind="cpu", count=counts[1]),
    )
    names = [name for part in parts for name in part.names()]
    pairs = list(combinations(names, 2))
    chosen = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    rates = data.draw(st.lists(st.sampled_from([1e9, 2e9]), min_size=10, max_size=10))
    edges = [
        Edge(a, b, "pcie", rates[i % len(rates)], 1e-6, "test", count=1 + i % 2)
        for i, (a, b) in enumerate(chosen)
    ]
    links = shortest(edges, parts)
    node = NodeType.model_construct(components=parts, links=links, source="test")
    assert {pair: link.bandwidth_bytes_per_s for pair, link in merged_links(node).items()} == {
        frozenset((edge.a, edge.b)): edge.bytes_per_s * edge.count for edge in edges
    }


def test_a_full_mesh_and_equal_shares_are_one_link_each() -> None:
    built = build(dump(8, full(8, 1), kind="xgmi", per_cpu=4), "MI300X")
    assert [(link.between, link.pattern) for link in built.links] == [
        (("gpu", "gpu"), "all"),
        (("gpu", "cpu"), "blocks"),
        (("cpu", "cpu"), "all"),
    ]


# ---------------------------------------------------------------------- the matrix, written anew


def matrix(sample: str) -> tuple[list[str], dict[tuple[str, str], str], dict[str, str]]:
    """Return devices, cells and what follows the cells of a GPU's row."""
    rows = [
        line.split("\t")
        for line in (SAMPLES / "nvidia-smi-topo" / sample).read_text().splitlines()
        if line.startswith(("GPU", "mlx5", "NIC"))
    ]
    rows = [[cell.strip() for cell in row] for row in rows if len(row) > 4]
    names = [row[0] for row in rows]
    cells = {
        (row[0], name): cell for row in rows for name, cell in zip(names, row[1:], strict=False)
    }
    tails = {row[0]: "\t".join(row[1 + len(names) :]) for row in rows}
    return names, cells, tails


def written(names: Sequence[str], cells: dict[tuple[str, str], str], tails: dict[str, str]) -> str:
    lines = ["\t" + "\t".join([*names, "CPU Affinity", "NUMA Affinity"])]
    lines += ["\t".join([a, *(cells[a, b] for b in names), tails[a]]) for a in names]
    return "\n".join(lines) + "\n"


def read_dgx1(text: str) -> Imported:
    return import_topology(text, node_source="t", gpu="V100")


def figures(found: Imported) -> list[tuple[object, ...]]:
    return [
        (level.name, level.unit_size, level.bytes_per_s, level.alpha_s, level.mesh)
        for level in compile_fabric(found.document).levels
    ]


@pytest.mark.parametrize("nics", list(permutations(range(4)))[::5])
def test_renaming_and_reordering_nics_changes_no_level(nics: tuple[int, ...]) -> None:
    names, cells, tails = matrix("dgx1v-v100-x8-4nic.txt")
    gpus, cards = [n for n in names if n.startswith("GPU")], [n for n in names if n[0] == "m"]
    assert (len(gpus), len(cards)) == (8, 4)
    plain = read_dgx1(written(names, cells, tails))
    order = [*gpus, *(cards[i] for i in nics)]
    new = {card: f"mlx5_{nics[i] + 10}" for i, card in enumerate(cards)}
    renamed = {(new.get(a, a), new.get(b, b)): cell for (a, b), cell in cells.items()}
    tail = {new.get(name, name): text for name, text in tails.items()}
    moved = read_dgx1(written([new.get(name, name) for name in order], renamed, tail))
    assert figures(plain) == figures(moved)
    assert moved.document.node.count("nic") == 4
