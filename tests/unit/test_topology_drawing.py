"""A drawing shows every part and link once, where it can be read, whatever the document says."""

import math
import re
import time
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass
from functools import cache
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import InvalidInputError
from planner.topology.bundled import load_topology, topology_names
from planner.topology.document import Impairment, TopologyDocument, parse_topology
from planner.topology.drawing.cluster import draw_svg
from planner.topology.drawing.node import OpenedNode
from planner.topology.drawing.placing import text_width
from planner.topology.drawing.svg import NUM_COLOURS, scale_of
from planner.topology.drawing.wires import Health, node_wires
from planner.topology.graph import build_graph
from planner.topology.impair import degraded

SVG = "{http://www.w3.org/2000/svg}"
TEXT = f"{SVG}text"
LINK = re.compile(r"^(\S+) - (\S+): (?:\d+ x )?([a-z0-9]+), ([\d.]+ .?B/s) per direction")
LINE = {"kind": "pcie", "bandwidth_bytes_per_s": 1e9, "latency_s": 1e-6, "source": "x"}


@dataclass(frozen=True)
class Rectangle:
    x: float
    y: float
    width: float
    height: float

    def overlaps(self, other: "Rectangle") -> bool:
        return (
            self.x < other.x + other.width
            and other.x < self.x + self.width
            and self.y < other.y + other.height
            and other.y < self.y + self.height
        )


class Drawing:
    """What a reader of the SVG finds."""

    def __init__(self, document: TopologyDocument, nodes: int | None = None) -> None:
        self.text = draw_svg(document, nodes)
        self.root = ET.fromstring(self.text)
        self.document = document
        self._words = {
            group.get("data-part", ""): ["".join(text.itertext()) for text in group.iter(TEXT)]
            for group in self.root.iter(f"{SVG}g")
        }

    def texts(self) -> list[str]:
        return ["".join(found.itertext()) for found in self.root.iter(f"{SVG}text")]

    def parts(self) -> list[tuple[str, Rectangle, str]]:
        """Return (name, place, classes) of everything that has a name."""
        found = []
        for group in self.root.iter(f"{SVG}g"):
            rect = group.find(f"{SVG}rect")
            if rect is not None and "data-part" in group.attrib:
                place = Rectangle(*(float(rect.get(k, "")) for k in ("x", "y", "width", "height")))
                found.append((group.attrib["data-part"], place, rect.get("class", "")))
        return found

    def words_in(self, part: str) -> list[str]:
        """Return the lines of text in the box of a part."""
        return self._words.get(part, [])

    def links(self) -> dict[frozenset[str], ET.Element]:
        """Return the line of every pair; fails where two lines join one pair."""
        found: dict[frozenset[str], ET.Element] = {}
        for path in self.root.iter(f"{SVG}path"):
            match = LINK.match(path.findtext(f"{SVG}title", ""))
            assert match is not None, ET.tostring(path)
            ends = frozenset(match.group(1, 2))
            assert ends not in found
            found[ends] = path
        return found


@cache
def drawn(name: str) -> Drawing:
    return Drawing(load_topology(name))


def impaired(name: str, *impairments: Impairment) -> TopologyDocument:
    return load_topology(name).model_copy(update={"impairments": impairments})


def node_parts(drawing: Drawing) -> list[tuple[str, Rectangle]]:
    names = {n for c in drawing.document.node.components for n in c.names()}
    return [(name, place) for name, place, _ in drawing.parts() if name in names]


def assert_readable(drawing: Drawing) -> None:
    """Every part once, none on another; all words inside the view and inside their box."""
    parts = node_parts(drawing)
    expected = [n for c in drawing.document.node.components for n in c.names()]
    assert Counter(name for name, _ in parts) == Counter(expected)
    for (one, first), (other, second) in combinations(parts, 2):
        assert not first.overlaps(second), (one, other)
    _, _, width, height = map(float, drawing.root.attrib["viewBox"].split())
    for element in drawing.root.iter(f"{SVG}text"):
        words = "".join(element.itertext())
        size = 16 if element.get("class") == "title" else 11
        wide, x, y = text_width(words, size), float(element.get("x", "")), element.get("y", "")
        left = x - wide / 2 if element.get("text-anchor") == "middle" else x
        assert left >= 0, words
        assert left + wide <= width, words
        assert size <= float(y) <= height, words
    for name, place, _ in drawing.parts():
        assert max(map(text_width, drawing.words_in(name)), default=0) <= place.width
        assert place.x >= 0
        assert place.x + place.width <= width
        assert place.y >= 0
        assert place.y + place.height <= height


# ------------------------------------------------------------------------ bundled topologies


@pytest.mark.parametrize("name", topology_names())
def test_every_part_is_drawn_once_and_apart_and_all_words_are_in_view(name: str) -> None:
    assert_readable(drawn(name))


@pytest.mark.parametrize("name", topology_names())
def test_every_link_of_the_node_is_drawn_once_and_coloured_by_its_bandwidth(name: str) -> None:
    drawing = drawn(name)
    links = drawing.links()
    found = []
    for link in drawing.document.node.single_links():
        path = links[frozenset((link.a, link.b))]
        colour, width = path.get("class", "")[1:], float(path.get("stroke-width", ""))
        found.append((link.bandwidth_bytes_per_s, int(colour), width))
    for (slow, dark, thin), (fast, bright, thick) in pairwise(sorted(found)):
        assert dark <= bright < NUM_COLOURS
        assert thin <= thick
        assert slow < fast or dark == bright


@pytest.mark.parametrize("name", topology_names())
def test_a_drawing_has_words_for_who_does_not_see_it_and_nothing_to_run_or_fetch(name: str) -> None:
    drawing = drawn(name)
    assert drawing.root.get("role") == "img"
    assert name in drawing.root.get("aria-label", "")
    kinds = {element.tag.removeprefix(SVG) for element in drawing.root.iter()}
    assert kinds <= {"svg", "style", "rect", "g", "title", "path", "text"}
    attributes = {key for element in drawing.root.iter() for key in element.attrib}
    assert not [key for key in attributes if key.startswith("on") or "href" in key]
    assert "url(" not in drawing.text
    assert "@import" not in drawing.text
    assert "prefers-color-scheme: dark" in drawing.text


def test_every_nic_has_a_cable_to_the_switch_of_its_rail() -> None:
    links = drawn("dgx-h100").links()
    for rail in range(8):
        assert frozenset((f"n0/nic{rail}", f"rail0/rail{rail}")) in links
        assert frozenset((f"rail0/rail{rail}", "spine0")) in links
    assert frozenset(("spine0", "core0")) in links


def test_every_gpu_of_a_tray_is_on_every_nvswitch_of_its_domain() -> None:
    links = drawn("gb200-nvl72").links()
    for gpu in range(4):
        for switch in range(18):
            assert frozenset((f"n0/gpu{gpu}", f"domain0/nvswitch{switch}")) in links


def test_tooltips_say_bandwidth_and_source() -> None:
    path = drawn("dgx-h100").links()[frozenset(("gpu0", "nvswitch-outer0"))]
    title = path.findtext(f"{SVG}title", "")
    assert title.startswith("gpu0 - nvswitch-outer0: 5 x nvlink, 125 GB/s per direction\nNVIDIA")


def test_tiers_say_how_many_they_join_and_how_narrow_they_are() -> None:
    texts = drawn("meta-24k-h100-roce").texts()
    assert "core0: 8 x pod, 3,072 nodes, 7:1 oversubscribed" in texts
    assert "pod0: 192 x rack, 384 nodes, 1:1" in texts


def test_links_above_an_oversubscribed_tier_have_less_for_each_nic() -> None:
    links = drawn("meta-24k-h100-roce").links()
    narrow, wide = (
        int(links[frozenset(ends)].get("class", "")[1:])
        for ends in (("pod0", "core0"), ("rack0", "pod0"))
    )
    assert narrow < wide


def test_further_nodes_are_counted_not_drawn() -> None:
    few, many = Drawing(load_topology("frontier"), 8), drawn("frontier")
    assert {"... 4", "more nodes", "of 8"} <= set(few.texts())
    assert {"... 9,852", "more nodes", "of 9,856"} <= set(many.texts())
    assert len(few.parts()) == len(many.parts())


def test_all_of_few_nodes_are_drawn() -> None:
    names = [name for name, _, _ in Drawing(load_topology("frontier"), 4).parts()]
    assert {"n0", "n1", "n2", "n3"} <= set(names)
    assert not [text for text in Drawing(load_topology("frontier"), 4).texts() if "more" in text]


def test_the_number_of_nodes_is_checked() -> None:
    with pytest.raises(InvalidInputError, match="nodes=9999"):
        draw_svg(load_topology("dgx-h100"), 9999)


def test_bundles_say_what_all_their_links_carry() -> None:
    links = drawn("dgx-h100").links()
    expected = {
        ("n1", "rail0"): "400 GB/s per direction",
        ("rail0/rail0", "spine0"): "1.60 TB/s per direction",
        ("rail1", "spine0"): "12.8 TB/s per direction",
        ("spine0", "core0"): "102 TB/s per direction",
    }
    for ends, said in expected.items():
        assert said in links[frozenset(ends)].findtext(f"{SVG}title", "")
    assert "3.60 TB/s" in drawn("gb200-nvl72").links()[frozenset(("n1", "domain0"))].findtext(
        f"{SVG}title", ""
    )


def test_nodes_of_another_type_say_so_and_have_their_own_nics() -> None:
    other = load_topology("aws-p5").node.model_dump(mode="json")
    document = load_topology("dgx-h100").model_dump(mode="json")
    island = {"first_node": 30, "num_nodes": 9, "device": "H200", "node": other}
    mixed = parse_topology({**document, "islands": [island]})
    drawing = Drawing(mixed)
    assert drawing.words_in("n30") == ["n30", "8 GPUs", "H200"]
    title = drawing.links()[frozenset(("n30", "rail0"))].findtext(f"{SVG}title", "")
    assert "32 x 50.0 GB/s" in title
    inside = draw_svg(mixed, [30, 31])
    assert "n30: 8 x H200" in inside
    assert "nic31" in inside


# ------------------------------------------------------------------------------- impairments


def test_the_node_with_something_wrong_is_the_one_in_full() -> None:
    weak = Impairment(link=("n7/gpu3", "n7/nvswitch-outer0"), factor=0.5)
    drawing = Drawing(impaired("dgx-h100", weak))
    assert "n7: 8 x h100-sxm-80gb" in drawing.texts()
    assert "x 0.5" in drawing.texts()
    links = drawing.links()
    ours, healthy = (
        int(links[frozenset((gpu, "nvswitch-outer0"))].get("class", "")[1:])
        for gpu in ("gpu3", "gpu4")
    )
    assert ours < healthy
    assert "impaired: n7/gpu3:n7/nvswitch-outer0=0.5" in drawing.texts()


@pytest.mark.parametrize(
    ("wrong", "ends"),
    [
        (Impairment(link=("n0/pcie1", "n0/cpu0"), factor=0), ("pcie1", "cpu0")),
        (Impairment(link=("n0/nic2", "rail0/rail2"), factor=0), ("n0/nic2", "rail0/rail2")),
        (Impairment(part="rail0/rail2", factor=0), ("n0/nic2", "rail0/rail2")),
        (Impairment(link=("rail0/rail4", "spine0"), factor=0), ("rail0/rail4", "spine0")),
        (Impairment(part="n0/nvswitch-inner1", factor=0), ("gpu5", "nvswitch-inner1")),
    ],
)
def test_broken_links_are_dashed(wrong: Impairment, ends: tuple[str, str]) -> None:
    links = Drawing(impaired("dgx-h100", wrong)).links()
    assert links[frozenset(ends)].get("class") == "down"
    assert "down" not in drawn("dgx-h100").links()[frozenset(ends)].get("class", "")


@pytest.mark.parametrize(
    ("part", "drawn_as"),
    [("n0/gpu5", "gpu5"), ("n0/nic1", "nic1"), ("rail0/rail6", "rail0/rail6"), ("n31", "n31")],
)
def test_weak_and_broken_parts_are_marked(part: str, drawn_as: str) -> None:
    for factor, mark in ((0.75, "weak"), (0, "down")):
        drawing = Drawing(impaired("dgx-h100", Impairment(part=part, factor=factor)))
        classes = {name: words for name, _, words in drawing.parts()}
        assert mark in classes[drawn_as].split()
        assert ("down" if factor == 0 else "x 0.75") in drawing.texts()


# ------------------------------------------------------------------- any document, any size


def cluster(components: list[dict[str, Any]], links: list[dict[str, Any]], **more: Any) -> Any:
    node = {"components": components, "links": links, "source": "x"}
    base = {"name": "x", "library": "nccl", "device": "h100-sxm-80gb", "node": node}
    return parse_topology({**base, **more})


@st.composite
def odd_nodes(draw: st.DrawFn) -> TopologyDocument:
    """Return a node whose parts hang anywhere."""
    num_cpus, num_switches = draw(st.integers(1, 3)), draw(st.integers(0, 6))
    counts = {"gpu": draw(st.integers(1, 8)), "nic": draw(st.integers(0, 9))}
    names = [f"cpu{i}" for i in range(num_cpus)] if num_cpus > 1 else ["cpu"]
    links = [{"between": pair, **LINE, "kind": "smp"} for pair in pairwise(names)]
    kinds = {"cpu": num_cpus, "pcie": num_switches, **counts}
    for kind in ("pcie", "gpu", "nic"):
        here = [kind] if kinds[kind] == 1 else [f"{kind}{i}" for i in range(kinds[kind])]
        for name in here:
            # One way up at least; sometimes a second one.
            ups = draw(st.lists(st.sampled_from(names), min_size=1, max_size=2, unique=True))
            links += [{"between": [name, up], **LINE} for up in ups]
            names = [*names, name] if kind == "pcie" else names
        if kind == "gpu":
            names = [*names, *here]
    components = [
        {"id": kind, "kind": "pcie_switch" if kind == "pcie" else kind, "count": count}
        for kind, count in kinds.items()
        if count
    ]
    document: TopologyDocument = cluster(components, links)
    return document


@settings(max_examples=200, deadline=None)
@given(document=odd_nodes())
def test_parts_that_hang_anywhere_are_readable(document: TopologyDocument) -> None:
    drawing = Drawing(document)
    assert_readable(drawing)
    assert len(drawing.links()) == len(document.node.single_links())


@pytest.mark.parametrize("name", ["dgx-h100", "frontier", "azure-nd-v2", "gb200-nvl72"])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_what_a_drawing_leaves_of_links_is_what_the_graph_leaves(
    name: str, data: st.DataObject
) -> None:
    document = load_topology(name)
    healthy = build_graph(document, 1)
    parts = sorted(n for n in healthy if healthy.nodes[n]["kind"] in ("nic", "pcie_switch"))
    wrong = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from([*parts, *map(tuple, map(sorted, healthy.edges))]),
                st.sampled_from([0.0, 0.25, 0.5]),
            ),
            min_size=1,
            max_size=4,
        )
    )
    after = degraded(
        document,
        [
            Impairment(part=what, factor=factor)
            if isinstance(what, str)
            else Impairment(link=(what[0], what[1]), factor=factor)
            for what, factor in wrong
        ],
    )
    graph, opened = build_graph(after, 1), OpenedNode.of(after, 0, Health.of(after))
    for wire in opened.wires:
        ends = (f"{opened.host}/{wire.a}", f"{opened.host}/{wire.b}")
        left = graph.get_edge_data(*ends, default={"bandwidth_bytes_per_s": 0.0})
        drawn = wire.bytes_per_s * opened.left_of(wire)
        assert math.isclose(drawn, left["bandwidth_bytes_per_s"]), ends


def test_no_name_breaks_out_of_its_place() -> None:
    hostile = "</text><script>alert(1)</script>\"'&\x00\x1b]]>"
    link = {"between": ["gpu", "cpu"], **LINE, "source": hostile}
    gpus: dict[str, Any] = {"id": "gpu", "kind": "gpu", "count": 2}
    components = [gpus, {"id": "cpu", "kind": "cpu"}]
    document = cluster(components, [link], name=hostile[:120], device=hostile[:120])
    drawing = Drawing(document)
    assert not list(drawing.root.iter(f"{SVG}script"))
    shown = hostile.replace("\x00", "\ufffd").replace("\x1b", "\ufffd")
    assert any(shown in text for text in drawing.texts())
    assert shown in drawing.root.get("aria-label", "")


def largest() -> TopologyDocument:
    """Return a document at every limit: parts, links, tiers, lengths of names and sources."""
    gpu, switch, nic, pcie, cpu = (letter * 40 for letter in "gvnpc")
    source = '<&"' * 333
    line = {"bandwidth_bytes_per_s": 1e9, "latency_s": 0, "source": source}
    counts = ((gpu, "gpu", 64), (switch, "nvswitch", 52), (nic, "nic", 512), (cpu, "cpu", 4))
    components = [{"id": name, "kind": kind, "count": count} for name, kind, count in counts]
    components.append({"id": pcie, "kind": "pcie_switch", "count": 1024 - 64 - 52 - 512 - 4})
    links = [
        {"between": [gpu, switch], "pattern": "all", "kind": "nvlink", "count": 1024, **line},
        *({"between": [name, cpu], "kind": "pcie", **line} for name in (gpu, nic)),
    ]
    tiers = [
        {
            "name": f"{'t' * 39}{i}",
            "num_nodes": 2 ** (i + 1) if i < 7 else None,
            "latency_s": 0,
            "source": source,
        }
        for i in range(8)
    ]
    network = {"kind": "ethernet", "layout": "rail", "nic_latency_s": 0, "source": source}
    network |= {"nic_bandwidth_bytes_per_s": 1e9, "tiers": tiers}
    hosts = [f"{'h' * 70}{i}" for i in range(16384)]
    wrong = [{"part": f"{host}/{nic}0", "factor": 0.5} for host in hosts[:4096]]
    more = {"hosts": hosts, "impairments": wrong, "max_nodes": 16384, "network": network}
    return cluster(components, links, name="\u6c34" * 120, **more)


def test_the_largest_document_is_drawn_within_2_megabytes_and_a_second() -> None:
    document = largest()
    assert len(draw_svg(document).encode()) < 2e6
    times = []
    for _ in range(3):
        started = time.process_time()
        draw_svg(document)
        times.append(time.process_time() - started)
    assert min(times) < 1.0


def test_the_largest_document_is_readable_and_says_no_scraps_of_sources() -> None:
    drawing = Drawing(largest())
    assert len(node_parts(drawing)) == 1024
    assert_readable(drawing)
    titles = [path.findtext(f"{SVG}title", "") for path in drawing.links().values()]
    assert not [title for title in titles if title.endswith("...")]


def test_a_long_chain_of_switches_is_drawn() -> None:
    components: list[dict[str, Any]] = [
        {"id": "gpu", "kind": "gpu"},
        {"id": "pcie", "kind": "pcie_switch", "count": 1022},
        {"id": "cpu", "kind": "cpu"},
    ]
    chain = ["cpu", *(f"pcie{i}" for i in range(1022)), "gpu"]
    document = cluster(components, [{"between": pair, **LINE} for pair in pairwise(chain)])
    assert len(Drawing(document).links()) == 1023


def test_many_parallel_links_are_one_wire_with_all_their_bandwidth() -> None:
    document = load_topology("dgx-h100")
    rates = {frozenset((w.a, w.b)): w for w in node_wires(document.node)}
    for link in document.node.single_links():
        wire = rates[frozenset((link.a, link.b))]
        assert math.isclose(wire.bytes_per_s, link.bandwidth_bytes_per_s)
    assert rates[frozenset(("gpu0", "nvswitch-inner0"))].num_links == 4


@given(st.lists(st.floats(1e3, 1e14), min_size=2, max_size=20))
def test_the_scale_is_monotone_and_covers_what_it_was_made_for(rates: list[float]) -> None:
    scale = scale_of(rates)
    for low, high in pairwise(sorted(rates)):
        assert 0 <= scale.colour(low) <= scale.colour(high) < NUM_COLOURS
        assert scale.width(low) <= scale.width(high)
    if scale.low * 1.01 < scale.high:
        assert (scale.colour(scale.low), scale.colour(scale.high)) == (0, NUM_COLOURS - 1)
        assert len(scale.borders()) == NUM_COLOURS + 1
