"""``nvidia-smi topo -m``: samples read by eye, random node trees, and texts that were damaged."""

import contextlib
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.topology.importers.dump import NodeDump, TopologyTextError
from planner.topology.importers.smi.nvidia_smi import read_nvidia_smi
from tests.unit.fuzz_imports import damaged

SAMPLES = Path(__file__).parents[1] / "samples" / "topology" / "nvidia-smi-topo"


def sample(name: str) -> str:
    return (SAMPLES / name).read_bytes().decode()


def shape(dump: NodeDump, parent: str | None = None) -> str:
    """Draw the tree: a part and, in brackets, what hangs on it; * for a coherent GPU."""
    drawn = [
        part.name + "*" * part.is_coherent + shape(dump, part.name)
        for part in dump.parts
        if part.parent == parent
    ]
    return f"({' '.join(drawn)})" if drawn else ""


# Drawn from the matrices by eye: tree, number of NVLink pairs, counts, number of remarks.
SEEN = {
    "3090-x2-nv4-prompts": ("(cpu0(GPU0 GPU1))", 1, {4}, 0),
    "a100-x2-2nic-cross": ("(cpu0(GPU0 mlx5_0) cpu1(GPU1 mlx5_1))", 0, set(), 0),
    "a100-x4-polaris-shifted-header": (
        "(cpu0(GPU0) cpu1(GPU1 mlx5_1) cpu2(GPU2) cpu3(GPU3 mlx5_0))",
        6,
        {4},
        0,
    ),
    "a100-x8-2nic-rst-indented": (
        "(cpu0(switch0(GPU0 GPU1 mlx5_0) GPU2 GPU3) cpu1(switch1(GPU4 GPU5 mlx5_1) GPU6 GPU7))",
        28,
        {12},
        0,
    ),
    # Printed SYS between GPU0 and NIC2, which NUMA node 0 has both: one remark.
    "a100-x8-4nic-one-socket": (
        "(cpu0(switch0(GPU0 GPU1 NIC0 NIC1) switch1(switch2(NIC2 NIC3) GPU2 GPU3)) "
        "cpu1(GPU4 GPU5 GPU6 GPU7))",
        28,
        {12},
        1,
    ),
    "a100-x8-reformatted": (
        "(cpu0(GPU0 GPU1 GPU2 GPU3) cpu1(GPU4 GPU5 GPU6 GPU7))",
        28,
        {12},
        0,
    ),
    "a100pcie-x4-nv12-pairs-2numa": ("(cpu0(GPU0 GPU1) cpu1(GPU2 GPU3))", 2, {12}, 0),
    "a6000-x3-pair-plus-one": ("(cpu0(GPU0 GPU1 GPU2))", 1, {4}, 0),
    "dgx1v-v100-x8-4nic": (
        "(cpu0(switch0(GPU0 GPU1 mlx5_0) switch1(GPU2 GPU3 mlx5_1)) "
        "cpu1(switch2(GPU4 GPU5 mlx5_2) switch3(GPU6 GPU7 mlx5_3)))",
        16,
        {1, 2},
        0,
    ),
    "gb200-tray-x4-8nic": (
        "(cpu0(switch0(NIC2 NIC3) GPU0* GPU1* NIC0 NIC1) "
        "cpu1(switch1(NIC6 NIC7) GPU2* GPU3* NIC4 NIC5))",
        6,
        {18},
        0,
    ),
    "h100-x8-hgx": ("(cpu0(GPU0 GPU1 GPU2 GPU3) cpu1(GPU4 GPU5 GPU6 GPU7))", 28, {18}, 0),
    "h100pcie-x1-kvm-1nic": ("(cpu0(GPU0 mlx5_0))", 0, set(), 0),
    "h100-x8-12nic-glued-header": (
        "(cpu0(switch0(GPU0 NIC0) switch1(GPU1 NIC3) switch2(GPU2 NIC4) switch3(GPU3 NIC5) "
        "NIC1 NIC2) cpu1(switch4(GPU4 NIC6) switch5(GPU5 NIC9) switch6(GPU6 NIC10) switch7(GPU7 "
        "NIC11) NIC7 NIC8))",
        28,
        {18},
        1,
    ),
    "h20-x8-2nic": (
        "(cpu0(GPU0 GPU1 GPU2 GPU3) cpu1(switch0(NIC0 NIC1) GPU4 GPU5 GPU6 GPU7))",
        28,
        {18},
        0,
    ),
    "h200-x8-10nic-ansi": (
        "(cpu0(switch0(GPU0 mlx5_3) switch1(GPU1 mlx5_5) switch2(GPU2 mlx5_4) "
        "switch3(GPU3 mlx5_0 mlx5_1 mlx5_2)) cpu1(switch4(GPU4 mlx5_7) switch5(GPU5 mlx5_9) "
        "switch6(GPU6 mlx5_8) switch7(GPU7 mlx5_6)))",
        28,
        {18},
        0,
    ),
    "h200-x8-node-record": (
        "(cpu0(switch0(GPU0 NIC4) switch1(GPU1 NIC1) switch2(GPU2 NIC0) switch3(GPU3 NIC3)) "
        "cpu1(switch4(GPU4 NIC6) switch5(GPU5 NIC7) switch6(GPU6 NIC5) switch7(GPU7 NIC2)))",
        28,
        {18},
        1,
    ),
    "h200-x8-8nic": (
        "(cpu0(switch0(GPU0 mlx5_4) switch1(GPU1 mlx5_1) switch2(GPU2 mlx5_0) "
        "switch3(GPU3 mlx5_3)) cpu1(switch4(GPU4 mlx5_6) switch5(GPU5 mlx5_7) "
        "switch6(GPU6 mlx5_5) switch7(GPU7 mlx5_2)))",
        28,
        {18},
        0,
    ),
    "k80-x4-soc-legend": (
        "(cpu0(switch0(GPU0 GPU1) switch1(GPU2 GPU3) mlx4_0))",
        0,
        set(),
        0,
    ),
    "p3.8xlarge-v100-x4": ("(cpu0(GPU0 GPU1 GPU2 GPU3))", 6, {1, 2}, 0),
    "pcie-x8-all-sys-no-nic": (
        "(cpu0(GPU0 GPU1 GPU2 GPU3) cpu1(GPU4 GPU5 GPU6 GPU7))",
        0,
        set(),
        1,
    ),
    "pcie-x8-pix-phb-1nic": (
        "(cpu0(switch0(GPU0 GPU1) switch1(GPU2 GPU3) NIC0) "
        "cpu1(switch2(GPU4 GPU5) switch3(GPU6 GPU7)))",
        0,
        set(),
        1,
    ),
    "power9-traverse-v100-x4-4nic": (
        "(cpu0(switch0(mlx5_0 mlx5_1) GPU0 GPU1) cpu1(switch1(mlx5_2 mlx5_3) GPU2 GPU3))",
        2,
        {3},
        0,
    ),
    "rtx6000ada-x2-2nic": ("(cpu0(switch0(mlx5_0 mlx5_1) GPU0 GPU1))", 0, set(), 0),
    "rtx6000ada-x4-4nic": (
        "(cpu0(switch0(mlx5_0 mlx5_1) GPU0 GPU1) cpu1(switch1(mlx5_2 mlx5_3) GPU2 GPU3))",
        0,
        set(),
        0,
    ),
    "v100-x8-alicloud-no-nic-0-95": (
        "(cpu0(GPU0 GPU1 GPU2 GPU3) cpu1(GPU4 GPU5 GPU6 GPU7))",
        16,
        {1, 2},
        0,
    ),
    "v100sxm2-x8-1nic-recent-driver": (
        "(cpu0(GPU0 GPU1 GPU2 GPU3 NIC0) cpu1(GPU4 GPU5 GPU6 GPU7))",
        16,
        {1, 2},
        0,
    ),
}


def test_every_sample_has_been_looked_at() -> None:
    assert {path.stem for path in SAMPLES.glob("*.txt")} == set(SEEN)


@pytest.mark.parametrize("name", SEEN)
def test_a_sample_is_read_as_it_looks(name: str) -> None:
    tree, num_links, counts, num_remarks = SEEN[name]
    dump = read_nvidia_smi(sample(f"{name}.txt"), name)
    assert shape(dump) == tree
    assert len(dump.links) == num_links
    assert {link.count for link in dump.links} == counts
    assert len(dump.remarks) == num_remarks
    assert dump.format == "nvidia-smi"


def test_dgx1_has_the_nvlinks_of_the_cube_mesh() -> None:
    dump = read_nvidia_smi(sample("dgx1v-v100-x8-4nic.txt"), "")
    links_of = {
        gpu: sum(link.count or 0 for link in dump.links if gpu in (link.a, link.b))
        for gpu in (f"GPU{i}" for i in range(8))
    }
    assert set(links_of.values()) == {6}  # a V100 has six


def test_what_nvlink_hides_is_an_assumption() -> None:
    assert "switches" in read_nvidia_smi(sample("h100-x8-hgx.txt"), "").assumptions[0]
    assert read_nvidia_smi(sample("h200-x8-8nic.txt"), "").assumptions == ()
    grace = read_nvidia_smi(sample("gb200-tray-x4-8nic.txt"), "").assumptions
    assert "NVLink-C2C" in grace[0]
    assert "spread evenly" in grace[1]


# --- random node trees -------------------------------------------------------------------------


@dataclass
class Branch:
    """A switch or CPU of a random node: devices on it directly, and switches."""

    devices: list[str] = field(default_factory=list)
    switches: list["Branch"] = field(default_factory=list)

    def everything(self) -> set[str]:
        return set(self.devices).union(*(switch.everything() for switch in self.switches))


def random_node(rng: random.Random, names: Sequence[str]) -> list[Branch]:
    """Return CPUs with all devices; every switch holds at least two things, two stages at most."""
    cpus = [Branch() for _ in range(rng.randint(1, 4))]
    waiting = list(names)
    rng.shuffle(waiting)
    while waiting:
        cpu = rng.choice(cpus)
        count = rng.randint(1, 6)
        group, waiting = waiting[:count], waiting[count:]
        if len(group) < 2 or rng.random() < 0.3:
            cpu.devices += group
        elif len(group) < 3 or rng.random() < 0.4:
            cpu.switches.append(Branch(group))
        else:
            upper = Branch(group[2:], [Branch(group[:2])])
            cpu.switches.append(upper)
    return [cpu for cpu in cpus if cpu.everything()]


def code(rng: random.Random, cpus: list[Branch], a: str, b: str) -> str:
    cpu = next(cpu for cpu in cpus if a in cpu.everything())
    if b not in cpu.everything():
        return "SYS"
    switch = next((s for s in cpu.switches if {a, b} <= s.everything()), None)
    if switch is None:
        return rng.choice(["PHB", "NODE"])
    below = switch.switches or [switch]  # what hangs on an upper switch has a lower one to itself
    is_one = any({a, b} <= set(s.devices) for s in below)
    return "PIX" if is_one else "PXB"


def canonical(cpus: list[Branch]) -> list[object]:
    def of(branch: Branch) -> list[object]:
        return [sorted(branch.devices), sorted((of(s) for s in branch.switches), key=repr)]

    return sorted((of(cpu) for cpu in cpus), key=repr)


def canonical_dump(dump: NodeDump) -> list[object]:
    def of(name: str) -> list[object]:
        below = [part for part in dump.parts if part.parent == name]
        devices = sorted(part.name for part in below if part.kind != "pcie_switch")
        return [devices, sorted((of(p.name) for p in below if p.kind == "pcie_switch"), key=repr)]

    return sorted((of(part.name) for part in dump.parts if part.kind == "cpu"), key=repr)


def printed(
    rng: random.Random,
    cpus: list[Branch],
    gpus: Sequence[str],
    nics: Sequence[str],
    *,
    nvlink: int = 0,
) -> str:
    """Print a node as some driver would: tabs or blanks, affinity columns, escapes, prompts."""
    columns = [*gpus, *rng.sample(nics, len(nics))]
    affinity = rng.choice([[], ["CPU Affinity"], ["CPU Affinity", "NUMA Affinity"]])
    if nvlink:
        affinity = ["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]
    codes = {(a, b): code(rng, cpus, a, b) for i, a in enumerate(columns) for b in columns[i + 1 :]}
    if nvlink:
        codes |= {pair: f"NV{nvlink}" for pair in codes if set(pair) <= set(gpus)}

    def cell(a: str, b: str) -> str:
        return " X " if a == b else codes.get((a, b)) or codes[b, a]

    def tail(name: str) -> list[str]:
        numa = next(i for i, cpu in enumerate(cpus) if name in cpu.everything())
        return [f"{16 * numa}-{16 * numa + 15}", str(numa), "N/A"][: len(affinity)]

    def join(fields: list[str]) -> str:
        return "\t".join(fields) if is_tabbed else "".join(f"{f:<16}" for f in fields).rstrip()

    is_tabbed = rng.random() < 0.5
    header = join(["", *columns, *affinity])
    rows = [join([n, *(cell(n, m) for m in columns), *tail(n)]) for n in gpus]
    rows += [join([n, *(cell(n, m) for m in columns)]) + "\t\t" for n in columns[len(gpus) :]]
    if rng.random() < 0.5:
        header = f"\x1b[4m{header}\x1b[0m"
    around = rng.choice(["", "$ nvidia-smi topo -m\n", "```\n"])
    return around + "\n".join([header, *rows, "", "Legend:", "", "  X    = Self", around])


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), num_gpus=st.integers(1, 16), num_nics=st.integers(0, 12))
def test_a_printed_node_is_read_back(seed: int, num_gpus: int, num_nics: int) -> None:
    rng = random.Random(seed)
    gpus = [f"GPU{i}" for i in range(num_gpus)]
    nics = [f"{rng.choice(['mlx5_', 'NIC', 'bnxt_re'])}{i}" for i in range(num_nics)]
    cpus = random_node(rng, [*gpus, *nics])
    dump = read_nvidia_smi(printed(rng, cpus, gpus, nics), "node")
    assert canonical_dump(dump) == canonical(cpus)
    assert [p.name for p in dump.parts if p.kind == "gpu"] == gpus
    assert dump.remarks == ()
    assert dump.links == ()


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), num_gpus=st.integers(2, 16), count=st.integers(1, 18))
def test_gpus_that_nvlink_hides_are_found_by_their_nics_and_numa_nodes(
    seed: int, num_gpus: int, count: int
) -> None:
    rng = random.Random(seed)
    pairs = [(f"GPU{i}", f"mlx5_{i}") for i in range(num_gpus)]
    cpus = [Branch() for _ in range(rng.randint(1, 3))]
    for pair in pairs:
        rng.choice(cpus).switches.append(Branch(list(pair)))
    cpus = [cpu for cpu in cpus if cpu.switches]
    text = printed(rng, cpus, [g for g, _ in pairs], [n for _, n in pairs], nvlink=count)
    dump = read_nvidia_smi(text, "node")
    assert canonical_dump(dump) == canonical(cpus)
    assert {link.count for link in dump.links} == {count}
    assert len(dump.links) == num_gpus * (num_gpus - 1) // 2


# --- damaged texts -----------------------------------------------------------------------------

TWO_SOCKETS = sample("h200-x8-8nic.txt")
TREE = SEEN["h200-x8-8nic"][0]


def lines_of(text: str) -> list[str]:
    return text.split("\n")


def without_line(text: str, number: int) -> str:
    return "\n".join(line for n, line in enumerate(lines_of(text), 1) if n != number)


def said(dump: NodeDump) -> str:
    return "\n".join(map(str, dump.remarks))


def test_a_missing_row_is_completed_from_its_column() -> None:
    dump = read_nvidia_smi(without_line(TWO_SOCKETS, 5), "")  # GPU3
    assert shape(dump) == TREE
    assert "GPU3 has no row" in said(dump)
    assert len(dump.links) == 28


def test_a_missing_header_is_made_up_from_the_diagonal() -> None:
    dump = read_nvidia_smi(without_line(TWO_SOCKETS, 1), "")
    assert shape(dump) == TREE
    assert "header is missing" in said(dump)


def test_shuffled_lines_make_no_difference() -> None:
    lines = lines_of(TWO_SOCKETS)
    random.Random(3).shuffle(lines)
    assert shape(read_nvidia_smi("\n".join(lines), "")) == TREE


def test_a_row_cut_in_the_middle_is_completed() -> None:
    lines = lines_of(TWO_SOCKETS)
    lines[16] = lines[16][:30]
    dump = read_nvidia_smi("\n".join(lines[:17]), "")
    assert shape(dump).count("switch") == 8
    assert "line 17: the row of NIC7 has" in said(dump)


def test_a_text_cut_after_half_of_the_gpus_is_refused_with_its_line() -> None:
    with pytest.raises(TopologyTextError, match=r"cells for 13 of 28 pairs") as refused:
        read_nvidia_smi("\n".join(lines_of(sample("h100-x8-hgx.txt"))[:4]), "pasted")
    assert refused.value.line == 2


@pytest.mark.parametrize("width", [80, 100, 120])
def test_lines_that_a_terminal_wrapped_between_cells_are_joined(width: int) -> None:
    wrapped: list[str] = []
    for line in lines_of(TWO_SOCKETS):
        current = ""
        for cell in line.split("\t"):
            if len(current.expandtabs()) + 8 > width:
                wrapped.append(current)
                current = ""
            current += cell + "\t"
        wrapped.append(current)
    assert shape(read_nvidia_smi("\n".join(wrapped), "")) == TREE


def test_cells_without_a_blank_between_them_are_told_apart() -> None:
    text = TWO_SOCKETS.replace("NODE\tNODE\tSYS", "NODENODE\tSYS").replace("SYS\tSYS", "SYSSYS")
    assert shape(read_nvidia_smi(text, "")) == TREE


@pytest.mark.parametrize(
    "dressed",
    [
        TWO_SOCKETS.replace("\t", "   "),
        TWO_SOCKETS.replace("\n", "\r\n"),
        "".join(f"[1,0]<stdout>:{line}\n" for line in lines_of(TWO_SOCKETS)),
        "".join(f"> {line}\n" for line in lines_of(TWO_SOCKETS)),
        "```\n" + TWO_SOCKETS + "\n```\nthanks\n",
        TWO_SOCKETS.replace("\t", "&nbsp;\u00a0"),
        "".join("|" + "|".join(line.split("\t")) + "|\n" for line in lines_of(TWO_SOCKETS)),
    ],
    ids=["blanks", "crlf", "mpirun", "quoted", "fenced", "entities", "markdown table"],
)
def test_what_mails_and_launchers_add_makes_no_difference(dressed: str) -> None:
    dump = read_nvidia_smi(dressed, "")
    assert shape(dump) == TREE
    assert dump.remarks == ()


def test_the_first_of_two_nodes_is_read_even_if_it_is_the_smaller() -> None:
    first = sample("rtx6000ada-x2-2nic.txt")
    dump = read_nvidia_smi(first + TWO_SOCKETS, "")
    assert shape(dump) == SEEN["rtx6000ada-x2-2nic"][0]
    second = first.count("\n") + 1
    assert f"line {second}: left out: another matrix" in said(dump)


def test_the_whole_one_of_two_is_read_when_the_first_is_cut() -> None:
    cut = "\n".join(lines_of(TWO_SOCKETS)[:4]) + "\n"
    assert shape(read_nvidia_smi(cut + sample("h20-x8-2nic.txt"), "")) == SEEN["h20-x8-2nic"][0]


def test_a_row_printed_twice_counts_once() -> None:
    lines = lines_of(TWO_SOCKETS)
    dump = read_nvidia_smi("\n".join([*lines[:4], lines[2], *lines[4:]]), "")
    assert shape(dump) == TREE
    assert "line 5: left out: GPU1, printed before (line 3)" in said(dump)


def test_peer_to_peer_status_is_refused_by_name() -> None:
    status = (
        "\tGPU0\tGPU1\n GPU0\tX\tOK\n GPU1\tOK\tX\n\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n"
    )
    with pytest.raises(TopologyTextError, match=r"peer-to-peer status.*nvidia-smi topo -m") as no:
        read_nvidia_smi(status, "pasted")
    assert no.value.line == 2


def test_the_farther_of_two_different_cells_is_taken() -> None:
    lines = lines_of(TWO_SOCKETS)
    lines[1] = lines[1].replace("PIX", "SYS")  # GPU0 to NIC4, which says PIX
    dump = read_nvidia_smi("\n".join(lines), "")
    assert "line 2: GPU0 and NIC4 read SYS and PIX, one each way: taken as SYS" in said(dump)
    fewer = sample("h100-x8-hgx.txt").replace("NV18", "NV17", 1)
    assert [link.count for link in read_nvidia_smi(fewer, "").links[:2]] == [17, 18]


def test_a_cell_that_all_others_deny_is_outvoted() -> None:
    text = sample("pcie-x8-pix-phb-1nic.txt")
    lines = lines_of(text)
    rows = {n: lines[n].split() for n in (3, 9)}  # GPU0 and GPU6, on different sockets
    rows[3][7] = rows[9][1] = "PIX"
    for number, cells in rows.items():
        lines[number] = "\t".join(cells)
    dump = read_nvidia_smi("\n".join(lines), "")
    assert shape(dump) == SEEN["pcie-x8-pix-phb-1nic"][0]
    assert (
        "GPU0 and GPU6 is outvoted by their cells to the others: taken as not on one CPU"
        in said(dump)
    )


def test_a_matrix_of_noise_is_refused() -> None:
    rng = random.Random(0)
    names = [f"GPU{i}" for i in range(16)]
    noise = {frozenset((a, b)): rng.choice(["PIX", "SYS"]) for a in names for b in names}
    cells = [["X" if a == b else noise[frozenset((a, b))] for b in names] for a in names]
    rows = [" ".join([name, *row]) for name, row in zip(names, cells, strict=True)]
    with pytest.raises(TopologyTextError, match="contradict"):
        read_nvidia_smi("\n".join([" ".join(names), *rows]), "")


def test_legend_names_that_are_not_unique_are_not_used() -> None:
    text = TWO_SOCKETS.replace("NIC3: mlx5_3", "NIC3: mlx5_0")
    dump = read_nvidia_smi(text, "")
    assert "NIC3" in {part.name for part in dump.parts}
    assert "calls NIC3 mlx5_0" in said(dump)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello\nGPU0 is fast\n", "no matrix"),
        ("", "empty"),
        ("GPU0\0X", "binary"),
        ("x" * 5_000_000, "5,000,000 characters"),
        ("x\n" * 1_000_000, "1,000,001 lines"),
        ("GPU0 cpu0\nGPU0 X NODE\ncpu0 NODE X\n", "line 3: has a device called cpu0"),
    ],
)
def test_what_is_no_matrix_is_refused(text: str, message: str) -> None:
    with pytest.raises(TopologyTextError, match=message):
        read_nvidia_smi(text, "pasted")


def large(num_gpus: int, num_nics: int) -> str:
    names = [f"GPU{i}" for i in range(num_gpus)] + [f"NIC{i}" for i in range(num_nics)]
    rows = (
        "\t".join(
            [
                a,
                *(
                    "X" if a == b else "SYS" if i % 2 - j % 2 else "NODE"
                    for j, b in enumerate(names)
                ),
            ]
        )
        for i, a in enumerate(names)
    )
    return "\t".join(["", *names]) + "\n" + "\n".join(rows)


def test_the_largest_node_is_read_and_a_larger_one_refused() -> None:
    dump = read_nvidia_smi(large(64, 256), "")
    assert len(dump.parts) == 2 + 64 + 256
    with pytest.raises(TopologyTextError, match="65 GPUs and 2 NICs"):
        read_nvidia_smi(large(65, 2), "")


# What each of these once did to the reader: quadratic time, or two parts of one name.
HOSTILE = {
    "rows of thousands of devices": "".join(f"GPU{i % 9999} X SYS 0-3\n" for i in range(90_000)),
    "headers without end": "GPU0 GPU1\n" + ("GPU2 " + "GPU1 " * 900 + "\n") * 800,
    "one row many times": "GPU0 X\n" * 99_000,
    "escapes": "\x1b[" * 1_900_000,
    "one line": "GPU0 X " * 500_000,
    "glued cells": ("GPU0 " + "PIX" * 1500 + "!\n") * 800,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_take_no_time(name: str) -> None:
    start = time.process_time()
    with contextlib.suppress(TopologyTextError):
        read_nvidia_smi(HOSTILE[name], "pasted")
    # They took minutes; a second of CPU time leaves room for a slow machine.
    assert time.process_time() - start < 2


def check_dump(dump: NodeDump) -> None:
    """Names are unique, parents come first, every switch joins two things, every link two parts."""
    known: set[str] = set()
    for part in dump.parts:
        assert part.name not in known
        assert part.parent in known or (part.kind == "cpu" and part.parent is None)
        known.add(part.name)
    for switch in (part for part in dump.parts if part.kind == "pcie_switch"):
        assert sum(part.parent == switch.name for part in dump.parts) >= 2
    pairs = [frozenset((link.a, link.b)) for link in dump.links]
    assert len(set(pairs)) == len(pairs)
    assert set().union(*pairs) <= known


@pytest.mark.parametrize("name", sorted(SEEN))
def test_a_damaged_text_is_a_node_or_refused(name: str) -> None:
    rng, text = random.Random(name), sample(f"{name}.txt")
    for _ in range(40):
        try:
            dump = read_nvidia_smi(damaged(text, text, rng), "pasted")
        except TopologyTextError:
            continue
        check_dump(dump)
