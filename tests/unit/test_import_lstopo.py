"""lstopo's XML: what real machines show, which CPU a tree hangs on, and what damage does."""

import time
from contextlib import suppress
from pathlib import Path

import pytest

from planner.topology.importers.dump import NodeDump, TopologyTextError
from planner.topology.importers.xml.lstopo import read_lstopo
from tests.unit.dumps import children, of_kind, part, remarks
from tests.unit.xml_mutations import mutated

SAMPLES = Path(__file__).parents[1] / "samples" / "topology" / "lstopo-xml"
TEXTS = {path.stem: path.read_text() for path in sorted(SAMPLES.glob("*.xml"))}


def read(name: str) -> NodeDump:
    return read_lstopo(TEXTS[name], name)


def topology(objects: str, rest: str = "", version: str = '"2.0"') -> str:
    return f'<topology version={version}><object type="Machine">{objects}</object>{rest}</topology>'


def package(objects: str, numa: int = 0) -> str:
    return (
        f'<object type="Package" os_index="{numa}" gp_index="{900 + numa}">'
        f'<object type="NUMANode" os_index="{numa}"/>{objects}</object>'
    )


def pci(bus: int, osdevs: str = "", kind: str = "0302 [10de:1db8]", speed: str = "15.75") -> str:
    return (
        f'<object type="PCIDev" gp_index="{bus}" pci_busid="0000:{bus:02x}:00.0" '
        f'pci_type="{kind} [10de:131d] a1" pci_link_speed="{speed}">{osdevs}</object>'
    )


def osdev(name: str, osdev_type: int, inner: str = "", subtype: str = "") -> str:
    return (
        f'<object type="OSDev" name="{name}" '
        f'subtype="{subtype}" osdev_type="{osdev_type}">{inner}</object>'
    )


IB = "0207 [15b3:101b]"
MLX = osdev("mlx5_0", 3, '<info name="Port1State" value="4"/>')


# Counted by eye in the files: CPUs, switches with several children, GPUs, NICs, NVSwitches, links.
COUNTS = {
    "corona-vega20-x4": (8, 0, 4, 1, 0, 0),
    "lassen-power9-v100x4": (2, 4, 4, 4, 0, 0),
    "nvidia-dgx2": (2, 12, 16, 0, 12, 96),
    "power8-gpu-distances": (2, 0, 4, 0, 0, 6),
    "tioga-mi250x-x4": (4, 0, 8, 4, 0, 28),
}


@pytest.mark.parametrize("name", TEXTS)
def test_parts_of_a_sample_are_those_seen_by_eye(name: str) -> None:
    dump = read(name)
    kinds = ("cpu", "pcie_switch", "gpu", "nic", "nvswitch")
    assert (*(len(of_kind(dump, kind)) for kind in kinds), len(dump.links)) == COUNTS[name]
    check_invariants(dump)


@pytest.mark.parametrize(
    ("name", "parent", "below"),
    [
        ("corona-vega20-x4", "cpu1", {"0000:13:00.0"}),
        ("corona-vega20-x4", "cpu3", {"mlx5_0"}),
        ("corona-vega20-x4", "cpu0", set()),
        ("lassen-power9-v100x4", "0004:01:00.0", {"0004:04:00.0", "0004:05:00.0"}),
        ("lassen-power9-v100x4", "0033:00:00.0", {"mlx5_2", "mlx5_3"}),
        ("lassen-power9-v100x4", "cpu8", {"0033:00:00.0", "0035:01:00.0"}),
        ("nvidia-dgx2", "0000:32:00.0", {"0000:34:00.0", "0000:36:00.0"}),
        ("nvidia-dgx2", "0000:2c:00.0", {"0000:32:00.0", "0000:37:00.0"}),
        ("nvidia-dgx2", "cpu1", {"0000:af:00.0", "0000:d8:00.0"}),
        ("power8-gpu-distances", "cpu1", {"000a:01:00.0", "000b:01:00.0"}),
        ("tioga-mi250x-x4", "cpu3", {"0000:c1:00.0", "0000:c6:00.0", "hsi0"}),
    ],
)
def test_what_hangs_where(name: str, parent: str, below: set[str]) -> None:
    assert children(read(name), parent) == below


def test_models_and_order_are_those_of_the_drivers() -> None:
    tioga = of_kind(read("tioga-mi250x-x4"), "gpu")
    assert tioga[0].name == "0000:c1:00.0"  # rsmi0
    assert {gpu.model for gpu in tioga} == {"AMD Instinct MI250X"}
    dgx2 = of_kind(read("nvidia-dgx2"), "gpu")
    assert (dgx2[0].name, dgx2[15].name) == ("0000:34:00.0", "0000:e7:00.0")  # nvml0, nvml15
    assert dgx2[0].model == "Tesla V100-SXM3-32GB-H"
    assert of_kind(read("corona-vega20-x4"), "gpu")[0].model == "Vega 20"


def test_one_gpu_of_three_backends_is_one_part() -> None:
    text = TEXTS["power8-gpu-distances"]
    assert text.count('name="cuda0"') == text.count('name="nvml0"') == 1
    assert text.count('name="opencl0d0"') == 1
    assert len(of_kind(read("power8-gpu-distances"), "gpu")) == 4


def test_nvlinks_of_a_power8_join_each_pair_and_its_cpu() -> None:
    links = {(link.a, link.b): link for link in read("power8-gpu-distances").links}
    assert links.keys() == {
        ("0002:01:00.0", "0003:01:00.0"),
        ("0002:01:00.0", "cpu0"),
        ("0003:01:00.0", "cpu0"),
        ("000a:01:00.0", "000b:01:00.0"),
        ("000a:01:00.0", "cpu1"),
        ("000b:01:00.0", "cpu1"),
    }
    # Two NVLinks of 20 GB/s each way to either end.
    assert {link.bytes_per_s for link in links.values()} == {40e9}


def test_each_gpu_of_a_dgx2_has_one_link_to_each_switch_of_its_board() -> None:
    dump = read("nvidia-dgx2")
    boards = set()
    for gpu in of_kind(dump, "gpu"):
        links = [link for link in dump.links if link.a == gpu.name]
        assert [link.bytes_per_s for link in links] == [25e9] * 6
        boards.add(frozenset(link.b for link in links))
    assert [len(board) for board in boards] == [6, 6]


def test_the_rate_that_hwloc_makes_up_for_xgmi_is_left_open() -> None:
    dump = read("tioga-mi250x-x4")
    assert {(link.kind, link.bytes_per_s, link.count) for link in dump.links} == {
        ("xgmi", None, None)
    }
    assert any("100 GB/s" in text for text in dump.assumptions)
    measured = read_lstopo(TEXTS["tioga-mi250x-x4"].replace(" 100000 ", " 50000 "), "x")
    assert 50e9 in {link.bytes_per_s for link in measured.links}


def test_pairs_of_several_hops_have_no_link() -> None:
    text = TEXTS["tioga-mi250x-x4"]
    start = text.index("XGMIHops")
    first = text[:start] + text[start:].replace(">0 1 1 1 1 1 1 1 1 0 ", ">0 2 1 1 1 1 1 1 2 0 ")
    links = {(link.a, link.b) for link in read_lstopo(first, "x").links}
    assert ("0000:c1:00.0", "0000:c6:00.0") not in links
    assert len(links) == 27


def test_slingshot_nics_are_nics_and_ethernet_beside_them_is_not() -> None:
    dump = read("tioga-mi250x-x4")
    assert {part.name for part in of_kind(dump, "nic")} == {"hsi0", "hsi1", "hsi2", "hsi3"}
    assert "1 Ethernet interfaces" in remarks(dump)


def test_a_slingshot_nic_is_one_part_under_the_name_of_its_device() -> None:
    both = osdev("hsn0", 16, subtype="Slingshot") + osdev("cxi0", 16, subtype="Slingshot")
    gpu = pci(1, osdev("nvml0", 12))
    text = topology(package(gpu + pci(2, both, "0200 [17db:0501]")), version='"3.0"')
    assert [part.name for part in of_kind(read_lstopo(text, "x"), "nic")] == ["cxi0"]


def test_kinds_of_os_devices_changed_with_version_3() -> None:
    gpu = pci(1, osdev("nvml0", 12))
    new = topology(package(gpu + pci(2, osdev("mlx5_0", 48), IB)), version='"3.0"')
    assert [part.name for part in of_kind(read_lstopo(new, "x"), "nic")] == ["mlx5_0"]
    old = topology(package(gpu + pci(2, osdev("mlx5_0", 3), IB)))
    assert [part.name for part in of_kind(read_lstopo(old, "x"), "nic")] == ["mlx5_0"]


@pytest.mark.parametrize(
    ("states", "names"),
    [((4,), ["mlx5_0"]), ((4, 4), ["mlx5_0:1", "mlx5_0:2"]), ((1, 4), ["mlx5_0"]), ((1, 1), [])],
)
def test_ports_that_are_up_are_nics(states: tuple[int, ...], names: list[str]) -> None:
    infos = "".join(
        f'<info name="Port{index + 1}State" value="{state}"/>' for index, state in enumerate(states)
    )
    text = topology(package(pci(1, osdev("nvml0", 1)) + pci(2, osdev("mlx5_0", 3, infos), IB)))
    dump = read_lstopo(text, "x")
    assert [part.name for part in of_kind(dump, "nic")] == names
    assert ("no port that is up" in remarks(dump)) == (not names)


def test_virtual_functions_beside_their_nic_are_left_out() -> None:
    function = pci(3, osdev("mlx5_9", 3), "0207 [15b3:101c]")
    gpu = pci(1, osdev("nvml0", 1))
    both = read_lstopo(topology(package(gpu + pci(2, MLX, IB) + function)), "x")
    assert [part.name for part in of_kind(both, "nic")] == ["mlx5_0"]
    assert "virtual functions" in remarks(both)
    alone = read_lstopo(topology(package(gpu + function)), "x")  # a virtual machine has no other
    assert [part.name for part in of_kind(alone, "nic")] == ["mlx5_9"]


def test_rates_of_links_that_fell_back_while_idle_are_left_open() -> None:
    dump = read("corona-vega20-x4")
    assert {gpu.link_bytes_per_s for gpu in of_kind(dump, "gpu")} == {None}
    assert "idle" in remarks(dump)
    narrow = part(read("lassen-power9-v100x4"), "0004:04:00.0")  # two lanes of PCIe 3: no fallback
    assert narrow.link_bytes_per_s == pytest.approx(1.969e9, rel=1e-3)


@pytest.mark.parametrize("chip", ["1a03:2000", "1002:515e"])
def test_without_gpu_backends_classes_must_do_and_that_is_said(chip: str) -> None:
    bmc = pci(9, kind=f"0300 [{chip}]")
    dump = read_lstopo(topology(package(pci(2) + pci(1) + bmc)), "x")
    assert [part.name for part in of_kind(dump, "gpu")] == ["0000:01:00.0", "0000:02:00.0"]
    assert {part.model for part in of_kind(dump, "gpu")} == {"NVIDIA Tesla V100 SXM3 32GB"}
    assert any("built without" in text for text in dump.assumptions)
    assert any("PCIe alone" in text for text in dump.assumptions)


def test_an_opencl_device_that_is_a_cpu_is_no_gpu() -> None:
    cpu = osdev("opencl1d0", 5, '<info name="OpenCLDeviceType" value="CPU"/>', "OpenCL")
    gpu = osdev("opencl0d0", 5, '<info name="OpenCLDeviceType" value="GPU"/>', "OpenCL")
    dump = read_lstopo(topology(package(pci(2, cpu, "1200 [1234:5678]") + pci(1, gpu))), "x")
    assert [part.name for part in of_kind(dump, "gpu")] == ["0000:01:00.0"]


def test_a_tree_above_all_numa_nodes_goes_to_the_first_and_that_is_said() -> None:
    gpu = pci(1, osdev("nvml0", 1))
    dump = read_lstopo(topology(package("", 0) + package("", 1) + gpu), "x")
    assert part(dump, "0000:01:00.0").parent == "cpu0"
    assert any("several NUMA nodes" in text for text in dump.assumptions)


def test_memory_without_cores_is_no_cpu() -> None:
    gpu_memory = (
        '<object type="NUMANode" os_index="9" subtype="GPUMemory">'
        '<info name="PCIBusID" value="0000:01:00.0"/></object>'
    )
    cxl = '<object type="NUMANode" os_index="8"/>'
    dump = read_lstopo(topology(package(gpu_memory + pci(1, osdev("nvml0", 1))) + cxl), "x")
    assert [part.name for part in of_kind(dump, "cpu")] == ["cpu0"]
    gpu = part(dump, "0000:01:00.0")  # memory of its own as a NUMA node: Grace Hopper
    assert (gpu.parent, gpu.is_coherent) == ("cpu0", True)


def test_gpu_memory_of_a_power9_makes_no_gpu_coherent_and_numbers_no_cpu() -> None:
    gpu_memory = (
        '<object type="NUMANode" os_index="0" subtype="GPUMemory">'
        '<info name="PCIBusID" value="0000:01:00.0"/></object>'
    )
    power = '<info name="CPUModel" value="POWER9, altivec supported"/>'
    inside = power + gpu_memory + pci(1, osdev("nvml0", 1))
    dump = read_lstopo(topology(package(inside, numa=8)), "x")
    assert [part.name for part in of_kind(dump, "cpu")] == ["cpu8"]
    gpu = part(dump, "0000:01:00.0")
    assert (gpu.is_coherent, gpu.link_bytes_per_s) == (False, 15.75e9)


def test_hwloc_1_put_cores_and_bridges_into_numa_nodes() -> None:
    node = '<object type="NUMANode" os_index="{}"><object type="Socket"/>{}</object>'
    text = topology(node.format(0, "") + node.format(1, pci(1, osdev("cuda0", 5))))
    dump = read_lstopo(text.replace(' version="2.0"', ""), "x")
    assert [part.name for part in of_kind(dump, "cpu")] == ["cpu0", "cpu1"]
    assert part(dump, "0000:01:00.0").parent == "cpu1"
    assert "hwloc 1" in remarks(dump)


def test_a_matrix_of_another_size_is_left_out() -> None:
    text = TEXTS["power8-gpu-distances"].replace('nbobjs="6" kind="25"', 'nbobjs="5" kind="25"')
    dump = read_lstopo(text, "x")
    assert dump.links == ()
    assert "6 objects and 36 values for nbobjs='5'" in remarks(dump)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<system version='1'/>", "is XML of <system>"),
        ("<topology version='9.0'/>", "version='9.0'"),
        ("<topology version='2.0'/>", "type Machine"),
        (topology(package("")), "shows no GPU"),
        (topology(package(pci(1) + pci(1))), "is also in line 1"),
        (topology(package(pci(1).replace("pci_busid", "x"))), "PCIDev has no pci_busid"),
        (topology(package(pci(1)))[:-5], "no well-formed XML"),
        (topology("<object>" * 120 + "</object>" * 120), "deeper than 100"),
        ("Machine (8GB total)\n  Package L#0", "no well-formed XML"),
        ('<!DOCTYPE t [<!ENTITY a "b">]><topology>&a;</topology>', "declarations of its own"),
        (topology(package("".join(
            pci(1).replace("0000:", f"{i:04x}:") for i in range(300)
        ))), "shows 300 GPUs"),
    ],
)  # fmt: skip
def test_what_is_refused_and_why(text: str, message: str) -> None:
    with pytest.raises(TopologyTextError, match=message):
        read_lstopo(text, "node.xml")


def test_the_document_type_of_real_files_is_no_reason_to_refuse_them() -> None:
    assert all("<!DOCTYPE topology SYSTEM" in text for text in TEXTS.values())


@pytest.mark.parametrize(
    "filler",
    ['<object type="PU"/>', '<info name="a" value="b"/>', "<!-- -->", pci(1), "<u64values/>", "y"],
)
def test_ten_megabytes_take_less_than_a_second_of_processor_time(filler: str) -> None:
    text = topology(package(pci(2) + filler * (10_000_000 // len(filler))))
    start = time.process_time()
    with suppress(TopologyTextError):
        read_lstopo(text, "x")
    assert time.process_time() - start < 1


def check_invariants(dump: NodeDump) -> None:
    """Check what ``NodeDump`` promises."""
    seen: dict[str, str] = {}
    for found in dump.parts:
        assert found.name not in seen
        assert (found.parent is None) == (found.kind in ("cpu", "nvswitch"))
        assert found.parent is None or seen[found.parent] in ("cpu", "pcie_switch")
        assert found.link_bytes_per_s is None or 0 < found.link_bytes_per_s <= 1e13
        seen[found.name] = found.kind
    assert "gpu" in seen.values()
    pairs = [(frozenset((link.a, link.b)), link.kind) for link in dump.links]
    assert len(set(pairs)) == len(pairs)
    for link in dump.links:
        assert link.a != link.b
        assert {link.a, link.b} <= seen.keys()
        assert link.bytes_per_s is None or 0 < link.bytes_per_s <= 1e14


def test_damaged_files_are_read_or_refused() -> None:
    small = [TEXTS["nvidia-dgx2"], TEXTS["power8-gpu-distances"]]
    num_read = 0
    for texts, count in ((small, 250), (list(TEXTS.values()), 60)):
        for what, text in mutated(texts, seed=2, count=count):
            with suppress(TopologyTextError):
                check_invariants(read_lstopo(text, what))
                num_read += 1
    assert 50 < num_read < 250  # neither all refused nor all unharmed


def test_a_gpu_that_is_called_a_switch_stays_one_part() -> None:
    text = TEXTS["nvidia-dgx2"]
    odd = text.replace(
        'type="PCIDev" gp_index="336"', 'type="PCIDev" subtype="NVSwitch" gp_index="336"'
    )
    assert odd != text
    check_invariants(read_lstopo(odd, "x"))


@pytest.mark.parametrize(
    "inner",
    [
        pci(2, pci(1, osdev("nvml0", 1))),  # a device in a device
        osdev("x", 1, pci(1, osdev("nvml0", 1))),  # a device in an OS device
        '<object type="Bridge"><object type="Group">' + pci(1) + "</object></object>",
    ],
)
def test_a_device_in_an_odd_place_is_found(inner: str) -> None:
    dump = read_lstopo(topology(package(inner)), "x")
    assert part(dump, "0000:01:00.0").parent == "cpu0"
