"""NCCL's topology XML: what real dumps show, what is left out and said, and what damage does."""

import random
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.topology.importers.dump import NodeDump, TopologyTextError
from planner.topology.importers.xml.nccl_xml import read_nccl_xml
from planner.topology.importers.xml.pci import bus_key
from tests.unit.dumps import children, of_kind, part, remarks
from tests.unit.xml_mutations import mutated

SAMPLES = Path(__file__).parents[1] / "samples" / "topology"
TEXTS = {path.stem: path.read_text() for path in sorted(SAMPLES.glob("nccl-topo-xml/*.xml"))}

GB_PER_S = 1e9
PCIE_3_X16 = 8e9 / 8 * 128 / 130 * 16


def read(name: str) -> NodeDump:
    return read_nccl_xml(TEXTS[name], name)


def node(inner: str, cpu: str = 'numaid="0"') -> str:
    return f'<system version="1"><cpu {cpu}>{inner}</cpu></system>'


def gpu(dev: int, inner: str = "", attributes: str = "") -> str:
    return (
        f'<pci busid="0000:{dev + 1:02x}:00.0" class="0x030200" link_speed="16 GT/s" '
        f'link_width="16" {attributes}><gpu dev="{dev}" rank="{dev}">{inner}</gpu></pci>'
    )


# Counted by eye and by grep in the files: CPUs, switches with several children, GPUs, NICs,
# NVSwitches, links.
COUNTS = {
    "4090-x2-small": (2, 0, 2, 2, 0, 0),
    "a6000-x4-docker-nets": (2, 0, 4, 2, 0, 0),
    "amd-topo_16p1h": (4, 12, 16, 8, 0, 28),
    "amd-topo_4p2h": (1, 2, 8, 1, 0, 8),
    "amd-topo_8p_942": (2, 8, 8, 8, 0, 28),
    "amd-topo_8p_950": (2, 8, 8, 8, 0, 28),
    "amd-topo_8p_pcie": (1, 2, 8, 1, 0, 0),
    "amd-topo_8p_rome": (2, 0, 8, 1, 0, 8),
    "amd-topo_collnet_n4": (4, 4, 8, 4, 0, 12),
    "aws-p4d": (2, 4, 8, 4, 0, 0),
    "azure-nca100v4": (4, 0, 4, 1, 0, 0),
    "azure-ndv2": (2, 0, 8, 1, 0, 0),
    "azure-ndv4": (4, 4, 8, 8, 0, 0),
    "azure-ndv5": (2, 8, 8, 8, 0, 0),
    "h800-x8": (2, 8, 8, 8, 4, 32),
    "oci-a100-flattened": (4, 4, 8, 8, 0, 0),
    "oci-h100": (2, 8, 8, 16, 4, 32),
}


@pytest.mark.parametrize("name", TEXTS)
def test_parts_of_a_sample_are_those_seen_by_eye(name: str) -> None:
    dump = read(name)
    kinds = ("cpu", "pcie_switch", "gpu", "nic", "nvswitch")
    assert (*(len(of_kind(dump, kind)) for kind in kinds), len(dump.links)) == COUNTS[name]
    check_invariants(dump)


@pytest.mark.parametrize(
    ("name", "switch", "below"),
    [
        ("h800-x8", "0000:0c:00.0", {"0000:0f:00.0", "mlx5_0"}),
        ("oci-h100", "0000:08:00.0", {"0000:0f:00.0", "mlx5_0", "mlx5_1"}),
        ("aws-p4d", "ffff:ff:01.0", {"0000:10:1b.0", "0000:10:1c.0", "0000:10:1d.0"}),
        ("amd-topo_8p_942", "0000:05:00.0", {"0000:0c:00.0", "mlx5_0"}),
        ("amd-topo_16p1h", "0000:49:00.0", {"0000:4e:00.0", "0000:51:00.0", "mlx5_0"}),
        ("amd-topo_16p1h", "0000:41:00.0", {"0000:49:00.0", "0000:52:00.0"}),
        ("amd-topo_8p_rome", "cpu1", {"0000:c3:00.0", "0000:c6:00.0", "0000:83:00.0",
                                      "0000:a3:00.0", "mlx5_1"}),
    ],
)  # fmt: skip
def test_who_shares_a_switch(name: str, switch: str, below: set[str]) -> None:
    assert children(read(name), switch) == below


@pytest.mark.parametrize(
    ("name", "links_of_one_gpu"), [("oci-h100", [5, 5, 4, 4]), ("h800-x8", [2, 2, 2, 2])]
)
def test_nvlinks_of_a_gpu_are_spread_over_four_switches(
    name: str, links_of_one_gpu: list[int]
) -> None:
    dump = read(name)
    switches = {part.name for part in of_kind(dump, "nvswitch")}
    for found in of_kind(dump, "gpu"):
        links = [link for link in dump.links if link.a == found.name]
        assert sorted((link.count or 0 for link in links), reverse=True) == links_of_one_gpu
        assert {link.b for link in links} == switches
        assert {link.kind for link in links} == {"nvlink"}


def test_xgmi_counts_are_per_pair() -> None:
    dump = read("amd-topo_16p1h")
    count = {frozenset((link.a, link.b)): link.count for link in dump.links}
    assert count[frozenset(("0000:4e:00.0", "0000:51:00.0"))] == 4  # two dies of one card
    assert count[frozenset(("0000:4e:00.0", "0000:0e:00.0"))] == 2
    assert count[frozenset(("0000:51:00.0", "0000:59:00.0"))] == 1
    assert Counter(count.values()) == {4: 8, 2: 4, 1: 16}
    assert {link.kind for link in dump.links} == {"xgmi"}


def test_rates_of_links_and_nics() -> None:
    h800 = read("h800-x8")
    assert part(h800, "mlx5_0").bytes_per_s == 50 * GB_PER_S
    assert part(h800, "0000:0f:00.0").link_bytes_per_s == pytest.approx(63.0e9, rel=1e-3)
    aws = read("aws-p4d")
    assert part(aws, "0000:10:1c.0").link_bytes_per_s == pytest.approx(15.75e9, rel=1e-3)
    assert part(read("4090-x2-small"), "0000:01:00.0").link_bytes_per_s == pytest.approx(
        31.5e9, 1e-3
    )
    assert part(aws, "0000:10:1b.0").bytes_per_s is None  # a file without <net> has no rates
    assert part(read("azure-nca100v4"), "0001:00:00.0").link_bytes_per_s is None  # width 0


def test_models_are_named_by_pci_ids_else_by_gcn_and_never_by_sm() -> None:
    def model(name: str) -> str | None:
        return of_kind(read(name), "gpu")[0].model

    assert model("oci-h100") == "NVIDIA H100 SXM5 80GB"
    assert model("h800-x8") == "NVIDIA H800"
    assert model("amd-topo_8p_942") == "AMD Instinct MI300X"
    assert model("amd-topo_16p1h") == "gfx90a"  # 1002:740c is MI250X or MI250; gcn="910"
    assert model("amd-topo_4p2h") == "gfx906"
    assert model("azure-ndv5") is None
    unknown = read_nccl_xml(node(gpu(0).replace('dev="0"', 'dev="0" sm="90"')), "x")
    assert unknown.parts[-1].model is None


def test_virtual_interfaces_are_left_out_and_counted() -> None:
    dump = read("a6000-x4-docker-nets")
    assert {part.name for part in of_kind(dump, "nic")} == {"eno1np0", "eno2np1"}
    assert "2 x bridge interface" in remarks(dump)
    assert "6 x veth interface" in remarks(dump)


@pytest.mark.parametrize(
    "name",
    ["docker0", "veth12ab", "br-35555a7b", "cali61f", "virbr0", "lo", "vxlan.calico", "tun0",
     "tap3", "tailscale0", "wlP9s9", "bond0.100", "flannel.1", "cilium_host"],
)  # fmt: skip
def test_names_of_virtual_interfaces(name: str) -> None:
    net = f'<nic><net name="{name}" dev="0" speed="25000" gdr="1"/></nic>'
    dump = read_nccl_xml(node(gpu(0) + net), "x")
    assert of_kind(dump, "nic") == []
    assert name in remarks(dump)


@pytest.mark.parametrize(
    "name",
    ["mlx5_0", "mlx5_bond_0", "bond0", "eth0", "ens1f0np0", "rdmap16s27", "bnxt_re0", "ibp5s0",
     "hsn0", "mlx5_0+mlx5_1"],
)  # fmt: skip
def test_names_of_cards(name: str) -> None:
    net = f'<nic><net name="{name}" dev="0" speed="25000" gdr="1"/></nic>'
    assert of_kind(read_nccl_xml(node(gpu(0) + net), "x"), "nic")[0].name == name


@pytest.mark.parametrize(
    ("speed", "gdr", "expected"),
    [
        ("200000", "1", 25e9),
        ("10000", "0", None),  # NCCL's default for a socket
        ("10000", "1", 1.25e9),
        ("-1", "1", None),
        ("1" + "0" * 30, "1", None),
        ("1e999", "1", None),
    ],
)
def test_a_rate_that_cannot_be_trusted_is_left_open(
    speed: str, gdr: str, expected: float | None
) -> None:
    net = f'<nic><net name="eth0" dev="0" speed="{speed}" gdr="{gdr}"/></nic>'
    dump = read_nccl_xml(node(gpu(0) + net), "x")
    assert of_kind(dump, "nic")[0].bytes_per_s == expected
    assert ("rate of a NIC" in remarks(dump)) == (expected is None)


def test_two_ports_are_two_nics_and_a_link_too_narrow_for_both_is_said() -> None:
    dump = read("4090-x2-small")
    ports = of_kind(dump, "nic")
    assert [(port.name, port.bytes_per_s, port.parent) for port in ports] == [
        ("mlx5_0", 12.5e9, "cpu3"),
        ("mlx5_1", 12.5e9, "cpu3"),
    ]
    assert ports[0].link_bytes_per_s == pytest.approx(PCIE_3_X16)
    assert "share one PCIe link of 15.8 GB/s" in remarks(dump)


def test_two_ports_of_one_name_get_names_of_their_own() -> None:
    ports = "".join(f'<net name="mlx5_0" port="{port}" speed="100000"/>' for port in (1, 2))
    dump = read_nccl_xml(node(gpu(0) + f"<nic>{ports}</nic>"), "x")
    assert [part.name for part in of_kind(dump, "nic")] == ["mlx5_0", "mlx5_0:2"]


def test_a_chain_of_bridges_carries_what_its_slowest_link_does() -> None:
    dump = read("amd-topo_8p_942")
    assert part(dump, "0000:0c:00.0").parent == "0000:05:00.0"  # past 08 and 0a
    slow = (
        '<pci busid="0000:80:00.0" class="0x060400" link_speed="8 GT/s" link_width="16">'
        + gpu(0)
        + "</pci>"
    )
    assert part(read_nccl_xml(node(slow), "x"), "0000:01:00.0").link_bytes_per_s == PCIE_3_X16


def test_a_link_printed_much_slower_than_what_hangs_on_it_is_said() -> None:
    dump = read("oci-h100")
    assert part(dump, "0000:08:00.0").link_bytes_per_s == 8e9  # 5 GT/s, 16 lanes
    assert "0000:08:00.0" in remarks(dump)


def test_a_file_for_nccl_says_what_it_lacks_and_orders_gpus_by_bus_id() -> None:
    dump = read("azure-ndv4")
    names = [part.name for part in of_kind(dump, "gpu")]
    assert names == sorted(names, key=bus_key)
    assert any("NCCL_TOPO_FILE" in text for text in dump.assumptions)
    assert any("numbered by their bus ids" in text for text in dump.assumptions)
    assert read("oci-h100").assumptions == ()


def test_nvlinks_that_name_their_own_gpu_are_not_guessed() -> None:
    dump = read("azure-nca100v4")
    assert dump.links == ()
    assert any("NVLinks of 4 GPUs" in text and "12 links" in text for text in dump.assumptions)


def test_the_search_result_of_nccl_is_refused_by_name() -> None:
    text = (SAMPLES / "nccl-graph-xml" / "azure-ncv4-graph.xml").read_text()
    with pytest.raises(TopologyTextError, match=r"is XML of <graphs>.*give .*NCCL_TOPO_DUMP_FILE"):
        read_nccl_xml(text, "graph.xml")


def test_links_to_the_cpu_are_summed_and_end_at_the_gpus_own_cpu() -> None:
    npus = "".join(f'<nvlink target="0006:00:0{i}.0" count="1" tclass="0x068001"/>' for i in (0, 1))
    dump = read_nccl_xml(node(gpu(0, npus), 'numaid="8" arch="ppc64"'), "x")
    assert [(link.a, link.b, link.count) for link in dump.links] == [("0000:01:00.0", "cpu8", 2)]


def test_c2c_hangs_a_gpu_on_its_cpu() -> None:
    # The element of a GH200 or GB10: MB/s of one link, number of links.
    bridge = '<pci busid="0009:00:00.0" class="0x060400">{}</pci>'
    dump = read_nccl_xml(node(bridge.format(gpu(0, '<c2c bw="43125" count="8"/>'))), "x")
    found = of_kind(dump, "gpu")[0]
    assert (found.parent, found.is_coherent, found.link_bytes_per_s) == ("cpu0", True, 345e9)
    assert of_kind(dump, "pcie_switch") == []


@pytest.mark.parametrize("target", ["fffffff:ffff:ff", "fffffff:ff:ff.0"])
def test_hidden_far_ends_are_one_nvswitch_and_that_is_said(target: str) -> None:
    link = f'<nvlink target="{target}" count="18" tclass="0x068000"/>'
    dump = read_nccl_xml(node(gpu(0, link) + gpu(1, link)), "x")
    assert [link.b for link in dump.links] == [target, target]
    assert [part.kind for part in dump.parts if part.name == target] == ["nvswitch"]
    assert any("hidden" in text for text in dump.assumptions)


def test_pairs_are_found_whatever_form_the_bus_id_has() -> None:
    ends = [
        gpu(0, '<nvlink target="00000000:02:00.0" count="4" tclass="0x030200"/>'),
        gpu(1, '<nvlink target="0000:01:00.0" count="4" tclass="0x030200"/>'),
    ]
    dump = read_nccl_xml(node("".join(ends)), "x")
    assert [(link.a, link.b, link.count) for link in dump.links] == [
        ("0000:01:00.0", "0000:02:00.0", 4)
    ]
    assert dump.remarks == ()


def test_ends_that_disagree_give_the_smaller_count_and_a_remark() -> None:
    ends = [
        gpu(0, '<nvlink target="0000:02:00.0" count="4" tclass="0x030200"/>'),
        gpu(1, '<nvlink target="0000:01:00.0" count="3" tclass="0x030200"/>'),
    ]
    dump = read_nccl_xml(node("".join(ends)), "x")
    assert dump.links[0].count == 3
    assert "differently" in remarks(dump)


def two_hosts(link: str) -> str:
    host = '<cpu host_hash="0x{}" numaid="{}">{}</cpu>'
    cpus = [host.format(name, numa, gpu(0, link)) for name in "ab" for numa in (0,)]
    return f'<system version="1">{"".join(cpus)}</system>'


def test_of_several_hosts_the_first_is_read_and_the_number_said() -> None:
    dump = read_nccl_xml(
        two_hosts('<nvlink target="fffffff:ffff:ff" count="18" tclass="0x068000"/>'), "x"
    )
    assert len(of_kind(dump, "gpu")) == 1
    assert any("2 hosts" in text and "one NVLink domain" in text for text in dump.assumptions)
    apart = read_nccl_xml(two_hosts(""), "x").assumptions
    assert any("2 hosts" in text and "one NVLink domain" not in text for text in apart)


def test_gpus_keep_the_order_of_their_numbers() -> None:
    dump = read_nccl_xml(node(gpu(2) + gpu(0) + gpu(1)), "x")
    assert [p.name for p in of_kind(dump, "gpu")] == [f"0000:0{bus}:00.0" for bus in (1, 2, 3)]


def test_a_display_chip_is_no_gpu_and_an_idle_gpu_is_one() -> None:
    ids = 'vendor="0x10de" device="0x2330"'
    idle = f'<pci busid="0000:90:00.0" class="0x030200" {ids}/>'
    vga = '<pci busid="0000:91:00.0" class="0x030000" vendor="0x1a03" device="0x2000"/>'
    dump = read_nccl_xml(node(gpu(0, attributes=ids) + idle + vga), "x")
    assert [part.name for part in of_kind(dump, "gpu")] == ["0000:01:00.0", "0000:90:00.0"]
    assert "did not use it" in remarks(dump)
    assert "0000:91:00.0" in remarks(dump)


def test_the_display_of_a_cpu_is_no_gpu_of_the_dump() -> None:
    intel = '<pci busid="0000:00:02.0" class="0x030000" vendor="0x8086" device="0x4c8a"/>'
    dump = read_nccl_xml(node(gpu(0, attributes='vendor="0x10de" device="0x2330"') + intel), "x")
    assert [part.name for part in of_kind(dump, "gpu")] == ["0000:01:00.0"]
    assert "display device without <gpu>" in remarks(dump)


def test_a_nic_without_a_port_in_a_dump_that_has_ports_is_left_out() -> None:
    unused = '<pci busid="0000:90:00.0" class="0x020700"/>'
    net = '<nic><net name="mlx5_0" dev="0" speed="25000" gdr="1"/></nic>'
    dump = read_nccl_xml(node(gpu(0) + unused + net), "x")
    assert [part.name for part in of_kind(dump, "nic")] == ["mlx5_0"]
    assert "0000:90:00.0" in remarks(dump)


def test_a_bridge_that_a_virtual_machine_emulates_says_nothing_of_its_link() -> None:
    bridge = '<pci busid="0000:a1:00.0" class="0x060400" {} link_speed="2.5 GT/s" link_width="1">'
    for ids, rate in (
        ('vendor="0x104c" device="0x8232"', None),  # QEMU's, as clouds pass GPUs through
        ('vendor="0x1000" device="0xc030"', 0.25e9),
    ):
        dump = read_nccl_xml(node(f"{bridge.format(ids)}{gpu(0)}{gpu(1)}</pci>"), "x")
        assert part(dump, "0000:a1:00.0").link_bytes_per_s == rate


def test_a_nic_without_a_net_in_a_file_without_nets_is_one() -> None:
    nic = '<pci busid="0000:0e:00.0" class="0x020700"><nic name="mlx5_0" speed="400"/></pci>'
    dump = read_nccl_xml(node(gpu(0) + nic), "x")
    assert [nic.name for nic in of_kind(dump, "nic")] == ["0000:0e:00.0"]


def test_a_bus_id_that_two_bridges_share_makes_two_switches() -> None:
    bridge = '<pci busid="0000:c5:00.0" class="0x060400">{}</pci>'
    text = node(bridge.format(gpu(0) + gpu(1)) + bridge.format(gpu(2) + gpu(3)))
    dump = read_nccl_xml(text, "x")
    assert [part.name for part in of_kind(dump, "pcie_switch")] == [
        "0000:c5:00.0",
        "0000:c5:00.0#2",
    ]
    assert "1 bridges or NICs have the busid of another part" in remarks(dump)


def test_devices_without_a_class_are_refused_with_the_reason() -> None:
    text = node('<pci busid="0000:00:16.0"/><pci busid="0000:00:17.0"/>')
    with pytest.raises(TopologyTextError, match="without class are for NCCL to look up"):
        read_nccl_xml(text, "x")


def test_ranks_that_share_a_gpu_are_one_gpu() -> None:
    parts = '<gpu dev="0" mlopart="0" rank="0"/><gpu dev="0" mlopart="1" rank="1"/>'
    dump = read_nccl_xml(node(f'<pci busid="0000:01:00.0" class="0x030200">{parts}</pci>'), "x")
    assert len(of_kind(dump, "gpu")) == 1
    assert "further <gpu>" in remarks(dump)


def test_nothing_unknown_is_passed_over_in_silence() -> None:
    extra = '<pci busid="0000:90:00.0" class="0x010802"/><fancy/>'
    dump = read_nccl_xml(node(gpu(0, '<ualink count="3"/>') + extra), "x")
    assert "<ualink> in <gpu>" in remarks(dump)
    assert "<fancy> in <cpu>" in remarks(dump)
    assert "class '0x010802'" in remarks(dump)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<system>\n<cpu>\n</system>", r"line 3: is no well-formed XML \(mismatched tag\)"),
        ('\n\n<?xml version="1.0"?>\n<system>\n<cpu</system>', "line 5"),
        ("<system/>", "has no <cpu>"),
        (node(""), "shows no GPU"),
        (node("<pci/>"), "busid"),
        (node(gpu(0) + gpu(0)), "is also in line 1"),
        ("<topology version='2.0'/>", "is XML of <topology>"),
        ("<html/>", "is XML of <html>"),
        ("GPU0 GPU1", "no well-formed XML"),
        ("<system>" * 200, "deeper than 100"),
        ("<system>" + "<cpu/>" * 30_000, "more than 20,000 elements"),
        (node("".join(gpu(0).replace("0000:01", f"{i:04x}:01") for i in range(300))), "300 GPUs"),
        ('<system a="' + "x" * 5000 + '"/>', "more than 4,096 letters"),
        ('<!DOCTYPE s [<!ENTITY a "b">]><system>&a;</system>', "declarations of its own"),
        ('<!DOCTYPE s SYSTEM "http://x/y.dtd" [<!ATTLIST cpu n CDATA "0">]><system/>', "declar"),
        ('<!DOCTYPE s SYSTEM "file:///etc/passwd"><system>&a;</system>', "no well-formed XML"),
        ("<system " + " ".join(f'a{i}="1"' for i in range(99)) + "/>", "more than 64 attributes"),
        ("<system>" + "x " * 600_000 + "</system>", "more than 1,000,000 letters"),
        ("", "is empty"),
        ("<system>\0</system>", "binary"),
        ("<system>\ud800</system>", "has no <cpu>"),
    ],
)
def test_what_is_refused_and_why(text: str, message: str) -> None:
    with pytest.raises(TopologyTextError, match=message):
        read_nccl_xml(text, "topo.xml")


def test_an_entity_bomb_is_refused_before_it_is_lit() -> None:
    entities = "".join(f'<!ENTITY e{i + 1} "{f"&e{i};" * 10}">' for i in range(9))
    bomb = f'<!DOCTYPE s [<!ENTITY e0 "{"x" * 10}">{entities}]><system>&e9;</system>'
    with pytest.raises(TopologyTextError, match="declarations"):
        read_nccl_xml(bomb, "x")


@pytest.mark.parametrize(
    "filler",
    ["<cpu/>", "<!-- -->", "x", '<net a="1"/>', "<a b='" + "c" * 4000 + "'/>", "<?a b?>"],
)
def test_ten_megabytes_take_less_than_a_second_of_processor_time(filler: str) -> None:
    text = node(gpu(0) + filler * (10_000_000 // len(filler)))
    start = time.process_time()
    with suppress(TopologyTextError):
        read_nccl_xml(text, "x")
    assert time.process_time() - start < 1


def check_invariants(dump: NodeDump) -> None:
    """Check what ``NodeDump`` promises."""
    seen: dict[str, str] = {}
    for found in dump.parts:
        assert found.name not in seen
        assert (found.parent is None) == (found.kind in ("cpu", "nvswitch"))
        assert found.parent is None or seen[found.parent] in ("cpu", "pcie_switch")
        for rate in (found.bytes_per_s, found.link_bytes_per_s):
            assert rate is None or 0 < rate < 1e14
        seen[found.name] = found.kind
    assert "gpu" in seen.values()
    pairs = [(frozenset((link.a, link.b)), link.kind) for link in dump.links]
    assert len(set(pairs)) == len(pairs)
    for link in dump.links:
        assert link.a != link.b
        assert {link.a, link.b} <= seen.keys()
        assert link.count is None or link.count > 0


def test_damaged_dumps_are_read_or_refused() -> None:
    num_read = 0
    for what, text in mutated(list(TEXTS.values()), seed=1, count=600):
        with suppress(TopologyTextError):
            check_invariants(read_nccl_xml(text, what))
            num_read += 1
    assert 100 < num_read < 500  # neither all refused nor all unharmed


@dataclass
class Tree:
    """A node of a PCIe tree to render: bridge, GPU (number) or NIC (number)."""

    kind: str
    number: int = 0
    children: list["Tree"] = field(default_factory=list)


@st.composite
def machines(draw: st.DrawFn) -> tuple[list[Tree], dict[tuple[int, int], int], list[int]]:
    """Return CPUs with their trees, links between GPUs, and links of each GPU to a switch."""
    numbers = Counter[str]()

    def tree(depth: int) -> Tree:
        kind = draw(
            st.sampled_from(["gpu", "nic", "bridge", "bridge"] if depth < 3 else ["gpu", "nic"])
        )
        if kind == "bridge":
            return Tree(kind, 0, [tree(depth + 1) for _ in range(draw(st.integers(0, 3)))])
        numbers[kind] += 1
        return Tree(kind, numbers[kind] - 1)

    cpus = [
        Tree("cpu", numa, [tree(0) for _ in range(draw(st.integers(0, 3)))])
        for numa in range(draw(st.integers(1, 3)))
    ]
    cpus[0].children.append(Tree("gpu", numbers["gpu"]))
    num_gpus = numbers["gpu"] + 1
    pairs = {
        (a, b): draw(st.integers(0, 4)) for a in range(num_gpus) for b in range(a + 1, num_gpus)
    }
    return cpus, pairs, [draw(st.integers(0, 4)) for _ in range(num_gpus)]


def rendered(
    machine: tuple[list[Tree], dict[tuple[int, int], int], list[int]], chance: random.Random
) -> str:
    """Return NCCL's XML of a machine, with bus ids, attributes and siblings in random order."""
    cpus, pairs, to_switch = machine
    free = [f"{n // 256:04x}:{n % 256:02x}:00.0" for n in range(1024)]
    chance.shuffle(free)
    gpu_ids = [free.pop() for _ in to_switch]
    switch_id = free.pop()

    def element(tag: str, attributes: dict[str, object], inner: list[str]) -> str:
        items = [f'{name}="{value}"' for name, value in attributes.items()]
        chance.shuffle(items)
        chance.shuffle(inner)
        return f"<{tag} {' '.join(items)}>\n{''.join(inner)}</{tag}>\n"

    def links(number: int) -> list[str]:
        found = [
            element("nvlink", {"target": gpu_ids[b if a == number else a], "count": count,
                               "tclass": "0x030200"}, [])
            for (a, b), count in pairs.items()
            if count and number in (a, b)
        ]  # fmt: skip
        if to_switch[number]:
            link = {"target": switch_id, "count": to_switch[number], "tclass": "0x068000"}
            found.append(element("nvlink", dict(link), []))
        return found

    def render(tree: Tree) -> str:
        pci: dict[str, object] = {"link_speed": "16.0 GT/s PCIe", "link_width": 16}
        match tree.kind:
            case "cpu":
                return element("cpu", {"numaid": tree.number}, [render(t) for t in tree.children])
            case "bridge":
                pci |= {"busid": free.pop(), "class": "0x060400"}
                return element("pci", pci, [render(t) for t in tree.children])
            case "gpu":
                pci |= {"busid": gpu_ids[tree.number], "class": "0x030200"}
                inner = element("gpu", {"dev": tree.number, "rank": 0}, links(tree.number))
                return element("pci", pci, [inner])
            case _:
                pci |= {"busid": free.pop(), "class": "0x020700"}
                net = {"name": f"mlx5_{tree.number}", "speed": 1000 * (tree.number + 1), "port": 1}
                return element("pci", pci, [element("nic", {}, [element("net", dict(net), [])])])

    return element("system", {"version": 1}, [render(cpu) for cpu in cpus])


def labelled(dump: NodeDump) -> "nx.Graph[str]":
    """Return a dump as a graph whose nodes are told apart by what stays: numbers and NIC names."""
    graph: nx.Graph[str] = nx.Graph()
    kept = {part.name: part.name for part in dump.parts if part.kind in ("cpu", "nic")}
    kept |= {part.name: f"gpu{index}" for index, part in enumerate(of_kind(dump, "gpu"))}
    for found in dump.parts:
        rates = (found.bytes_per_s, found.link_bytes_per_s)
        graph.add_node(found.name, label=(found.kind, kept.get(found.name), rates))
    for found in dump.parts:
        if found.parent:
            graph.add_edge(found.name, found.parent, label="pcie")
    for link in dump.links:
        graph.add_edge(link.a, link.b, label=(link.kind, link.count))
    return graph


@settings(max_examples=150, deadline=None)
@given(machines(), st.integers(0, 2**32))
def test_the_graph_does_not_depend_on_order_or_bus_ids(
    machine: tuple[list[Tree], dict[tuple[int, int], int], list[int]], seed: int
) -> None:
    first, second = (
        read_nccl_xml(rendered(machine, random.Random(seed + turn)), "x") for turn in (0, 1)
    )
    check_invariants(first)
    assert len(of_kind(first, "gpu")) == len(machine[2])
    assert sum(bool(count) for count in machine[1].values()) + sum(map(bool, machine[2])) == len(
        first.links
    )
    same = nx.is_isomorphic(
        labelled(first),
        labelled(second),
        node_match=lambda a, b: a["label"] == b["label"],
        edge_match=lambda a, b: a["label"] == b["label"],
    )
    assert same
