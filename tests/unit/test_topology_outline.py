"""The tree of a topology: equal things once with their count, and nothing lost on the way."""

import io
import json
import re
import sys
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from planner.cli import main
from planner.tables import show_fabric
from planner.topology.bundled import load_topology, topology_names
from planner.topology.compile import compile_fabric
from planner.topology.document import Impairment, Tier, TopologyDocument, parse_topology
from planner.topology.drawing.outline import Line, outline, runs


def lines(line: Line, depth: int = 0) -> list[str]:
    below = [text for child in line.below for text in lines(child, depth + 1)]
    return ["  " * depth + line.text, *below]


def count_of(line: Line, kind: str) -> int:
    """Return how many parts of a kind a line and those below stand for."""
    times, what = re.fullmatch(r"(?:([\d,]+) x )?(.*)", line.text).groups()  # type: ignore[union-attr]
    own = sum(int(n) for n in re.findall(rf"\b(\d+) {kind} at", what))
    own += what.startswith(kind)
    return int((times or "1").replace(",", "")) * (
        own + sum(count_of(child, kind) for child in line.below)
    )


def node_lines(line: Line) -> list[Line]:
    found = [child for below in line.below for child in node_lines(below)]
    return [line, *found] if re.match(r"[\d,]+ x node of ", line.text) else found


def test_a_dgx_h100_reads_as_one() -> None:
    assert lines(outline(load_topology("dgx-h100"))) == [
        "dgx-h100: 4,096 nodes, 32,768 GPUs",
        "  1 x core of 4,096 nodes, 1:1",
        "    16 x spine of 256 nodes, 1:1",
        "      128 x rail of 32 nodes: a switch for each of 8 rails, 1:1",
        "        4,096 x node of 8 x h100-sxm-80gb",
        "          2 x cpu",
        "            2 x pcie switch at 63.0 GB/s: 2 gpu at 63.0 GB/s, 2 nic at 63.0 GB/s",
        "          8 gpu on 4 nvswitch by nvlink, 450 GB/s each",
        "          2 cpu joined by smp, 22.0 GB/s a pair",
        "          8 nic on infiniband, 50.0 GB/s each",
    ]


@pytest.mark.parametrize("name", topology_names())
def test_no_part_is_lost_by_counting(name: str) -> None:
    document = load_topology(name)
    (node,) = node_lines(outline(document, 1))
    for kind in ("cpu", "pcie_switch", "process", "gpu"):
        inside = sum(
            count_of(line, kind.replace("_", " "))
            for line in node.below
            if not re.search(r" on \d| joined by | on (infiniband|ethernet)", line.text)
        )
        assert inside == document.node.count(kind)


def test_meshes_say_what_a_pair_and_what_a_gpu_has() -> None:
    texts = lines(outline(load_topology("mi300x-8x400-ib"), 1))
    mesh = "8 gpu joined by xgmi, 64.0 GB/s a pair, each with each: 448 GB/s each"
    assert mesh in [text.strip() for text in texts]


def test_a_nic_that_two_gpus_share_hangs_on_neither() -> None:
    texts = [text.strip() for text in lines(outline(load_topology("frontier"), 1))]
    assert "4 nic on 8 gpu by pcie, 63.0 GB/s each" in texts
    assert "cpu: 8 gpu at 36.0 GB/s" in texts


def test_a_domain_of_one_rack_has_no_tiers_and_many_racks_have() -> None:
    document = load_topology("gb200-nvl72")
    assert "  1 x nvlink domain of 18 nodes: 18 nvswitch, 900 GB/s each gpu" in lines(
        outline(document, 18)
    )
    assert "  1 x rail of 36 nodes: a switch for each of 4 rails, 1:1" in lines(
        outline(document, 36)
    )


def test_unequal_units_are_written_in_order() -> None:
    document = load_topology("frontier")
    assert document.network is not None
    first = Tier(name="leaf", units=(16, *[8] * 9), latency_s=0, source="x")
    tiers = (first.model_copy(update={"oversubscription": 2.0}), *document.network.tiers)
    network = document.network.model_copy(update={"tiers": tiers})
    uneven = document.model_copy(update={"network": network, "max_nodes": 88})
    texts = [text.strip() for text in lines(outline(uneven))]
    assert "10 x leaf of 16 + 9 x 8 nodes, 2:1 oversubscribed, 12.5 GB/s each nic" in texts
    assert runs(list(range(1, 10))) == "1 + 2 + 3 + 4 + ..."


def test_what_is_impaired_is_listed() -> None:
    wrong = tuple(Impairment(part=f"n{i}", factor=0) for i in range(30))
    document = load_topology("dgx-h100").model_copy(update={"impairments": wrong})
    texts = lines(outline(document))
    assert "    n0=down" in texts
    assert "    ... 10 more" in texts


def test_chains_of_switches_end_somewhere() -> None:
    line = {"kind": "pcie", "bandwidth_bytes_per_s": 1e9, "latency_s": 0, "source": "x"}
    chains = [["cpu", *(f"{end}{i}" for i in range(510)), f"gpu{end}"] for end in "ab"]
    links = [{"between": pair, **line} for chain in chains for pair in pairwise(chain)]
    components = [{"id": end, "kind": "pcie_switch", "count": 510} for end in "ab"]
    components += [{"id": f"gpu{end}", "kind": "gpu"} for end in "ab"]
    node = {"components": [*components, {"id": "cpu", "kind": "cpu"}], "links": links}
    document = parse_topology(
        {"name": "x", "library": "nccl", "device": "x", "node": {**node, "source": "x"}}
    )
    texts = [text.strip() for text in lines(outline(document))]
    assert texts[3] == "2 x pcie switch at 1.00 GB/s"
    assert texts[-1] == "..."


# ---------------------------------------------------------------------------- command line


def show(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["commplan", "topology", "show", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    return int(caught.value.code or 0)


def test_show_prints_the_tree_and_only_columns_that_say_something(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    headings = {"path", "oversubscribed", "multicast", "each for itself"}
    expected = {
        ("local-gloo",): set(),
        ("dgx-h100",): {"path", "multicast"},
        ("meta-24k-h100-roce", "-n", "3072"): {"path", "multicast", "oversubscribed"},
    }
    for arguments, shown in expected.items():
        assert show(monkeypatch, *arguments) == 0
        out = capsys.readouterr().out
        heading = next(line for line in out.splitlines() if line.startswith("level "))
        assert {words for words in headings if words in heading} == shown
        assert lines(outline(load_topology(arguments[0])))[-1].strip() in out


def test_sources_stand_below_a_narrow_table() -> None:
    document = load_topology("dgx-h100")
    fabric = compile_fabric(document, 4)
    for width, in_table in ((80, False), (140, True)):
        out = Console(width=width, file=io.StringIO(), highlight=False)
        show_fabric(out, document, fabric)
        assert isinstance(out.file, io.StringIO)
        text = out.file.getvalue()
        heading = next(line for line in text.splitlines() if line.startswith("level "))
        assert ("source" in heading) == in_table
        assert ("rail: infiniband; gpudirect; NVIDIA DGX SuperPOD" in text) == (not in_table)
        assert "450 GB/s" in text


def test_a_narrow_table_of_levels_loses_no_figure() -> None:
    document = load_topology("meta-24k-h100-roce")
    out = Console(width=80, file=io.StringIO(), highlight=False)
    show_fabric(out, document, compile_fabric(document, 3072))
    assert isinstance(out.file, io.StringIO)
    [row] = [line for line in out.file.getvalue().splitlines() if line.startswith("core  ")]
    assert row.split() == ["core", "24,576", "7.14", "GB/s", *row.split()[4:]]
    assert row.split()[-1] == "7:1"
    assert "\ncore: ethernet; gpudirect; " in out.file.getvalue()


def test_show_writes_the_drawing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert show(monkeypatch, "dgx-h100", "--svg", "-") == 0
    printed = capsys.readouterr().out
    assert ET.fromstring(printed).tag.endswith("svg")
    path = tmp_path / "drawing.svg"
    assert show(monkeypatch, "dgx-h100", "--svg", str(path)) == 0
    assert path.read_text() == printed
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--svg", "-", "--json"), "give one"),
        (("--svg", "-", "--nodes", "5000"), "nodes=5000"),
        (("--svg", "/nowhere/x.svg"), "cannot be written"),
    ],
)
def test_show_refuses_in_words(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    said: str,
) -> None:
    assert show(monkeypatch, "dgx-h100", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


def test_names_are_shown_as_they_are_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    document = TopologyDocument.model_dump(load_topology("local-gloo"), mode="json")
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**document, "name": "[red]mine[/red]"}))
    assert show(monkeypatch, str(path)) == 0
    assert capsys.readouterr().out.startswith("[red]mine[/red]: 1 node, 4 ranks\n")
