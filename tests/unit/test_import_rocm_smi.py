"""``rocm-smi --showtopo`` and ``amd-smi topology``: samples, what weights mean, damaged texts."""

import contextlib
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.topology.importers.dump import NodeDump, TopologyTextError
from planner.topology.importers.smi.amd_smi import read_amd_smi
from planner.topology.importers.smi.rocm_smi import read_rocm_smi
from tests.unit.fuzz_imports import damaged

SAMPLES = Path(__file__).parents[1] / "samples" / "topology"
ROCM = sorted((SAMPLES / "rocm-smi-showtopo").glob("*.txt"))
AMD = sorted((SAMPLES / "amd-smi-topology").glob("*.txt"))

Cells = Sequence[Sequence[str]]


def cpus(dump: NodeDump) -> list[list[str]]:
    """Return the GPUs of each CPU."""
    names = [part.name for part in dump.parts if part.kind == "cpu"]
    return [[part.name for part in dump.parts if part.parent == name] for name in names]


def gpus(*numbers: int) -> list[str]:
    return [f"GPU{number}" for number in numbers]


def table(title: str, names: Sequence[str], cells: Cells) -> str:
    rows = [
        f"{name:<13}" + "".join(f"{cell:<13}" for cell in row)
        for name, row in zip(names, cells, strict=True)
    ]
    return "\n".join([title, " " * 13 + "".join(f"{name:<13}" for name in names), *rows, ""])


def matrix(count: int, of: Callable[[int, int], object], own: object = 0) -> Cells:
    return [[str(own if a == b else of(a, b)) for b in range(count)] for a in range(count)]


def rocm(weights: Cells | None = None, types: Cells | None = None) -> str:
    count = len(weights or types or ())
    names = gpus(*range(count))
    text = "========= ROCm System Management Interface =========\n"
    if weights is not None:
        text += table("===== Weight between two GPUs =====", names, weights)
    if types is not None:
        text += table("===== Link Type between two GPUs =====", names, types)
    return text


# By eye: GPUs of each CPU, XGMI links, whether the CPUs were guessed.
SEEN = {
    "gfx906-x4-pcie-weight40.txt": ([gpus(0, 1, 2, 3)], 0, False),
    "mi250-x4-banner80.txt": ([gpus(0, 1, 2, 3)], 6, True),
    "mi300a-x4.txt": ([gpus(0, 1, 2, 3)], 6, True),
    "mi308x-x8.txt": ([gpus(0, 1, 2, 3), gpus(4, 5, 6, 7)], 28, False),
}


@pytest.mark.parametrize("path", ROCM, ids=lambda path: path.stem)
def test_a_rocm_sample_is_read_as_it_looks(path: Path) -> None:
    dump = read_rocm_smi(path.read_text(), path.name)
    expected, num_links, is_guessed = SEEN[path.name]
    assert cpus(dump) == expected
    assert len(dump.links) == num_links
    assert {link.kind for link in dump.links} <= {"xgmi"}
    assert any("does not say on which CPU" in said for said in dump.assumptions) == is_guessed
    assert dump.remarks == ()
    assert dump.format == "rocm-smi"


def test_the_amd_sample_is_read_by_bus_ids() -> None:
    dump = read_amd_smi(AMD[0].read_text(), "")
    buses = [f"0000:{bus}:00.0" for bus in ("0c", "22", "38", "5c", "9f", "af", "bf", "df")]
    assert cpus(dump) == [buses]
    assert len(dump.links) == 28
    assert "28 XGMI pairs without a weight" in dump.assumptions[0]


def test_a_weight_of_30_is_no_link() -> None:
    square = matrix(4, lambda a, b: 30 if (a - b) % 4 == 2 else 15)
    dump = read_rocm_smi(rocm(square, matrix(4, lambda a, b: "XGMI")), "")
    assert {(link.a, link.b) for link in dump.links} == {
        ("GPU0", "GPU1"),
        ("GPU0", "GPU3"),
        ("GPU1", "GPU2"),
        ("GPU2", "GPU3"),
    }
    assert "2 pairs of GPUs reach each other by XGMI over a third GPU" in str(dump.remarks[0])


def test_weights_alone_tell_xgmi_from_pcie() -> None:
    dump = read_rocm_smi(rocm(matrix(4, lambda a, b: 15 if a // 2 == b // 2 else 72)), "")
    assert [(link.a, link.b) for link in dump.links] == [("GPU0", "GPU1"), ("GPU2", "GPU3")]
    assert len(cpus(dump)) == 2


def test_a_pcie_weight_above_40_is_another_cpu() -> None:
    # MI100s on two sockets, as in ROCm/rccl issue 538.
    weights = matrix(4, lambda a, b: 40 if a % 2 == b % 2 else 72)
    dump = read_rocm_smi(rocm(weights, matrix(4, lambda a, b: "PCIE")), "")
    assert cpus(dump) == [gpus(0, 2), gpus(1, 3)]


@pytest.mark.parametrize(
    "printed",
    ["GPU[{}]\t\t: (Topology) Numa Node: {}", "GPU {}          : (Topology) Numa Node: {}"],
)
def test_numa_nodes_place_the_gpus(printed: str) -> None:
    numa = "\n".join(printed.format(gpu, gpu // 2 * 8) for gpu in range(4))
    text = rocm(matrix(4, lambda a, b: 15), matrix(4, lambda a, b: "XGMI"))
    dump = read_rocm_smi(f"{text}===== Numa Nodes =====\n{numa}\n=== End ===\n", "")
    assert cpus(dump) == [gpus(0, 1), gpus(2, 3)]


def test_an_mi300a_shares_its_package_with_the_cpu_if_the_text_says_so() -> None:
    text = (SAMPLES / "rocm-smi-showtopo" / "mi300a-x4.txt").read_text()
    assert not any(part.is_coherent for part in read_rocm_smi(text, "").parts)
    dump = read_rocm_smi("AMD Instinct MI300A\n" + text, "")
    assert [part.is_coherent for part in dump.parts if part.kind == "gpu"] == [True] * 4


def test_hops_alone_are_refused() -> None:
    hops = table("==== Hops between two GPUs ====", gpus(0, 1), matrix(2, lambda a, b: 1))
    with pytest.raises(TopologyTextError, match="says of 0 of 1 pairs"):
        read_rocm_smi(hops, "pasted")


def test_xxxx_everywhere_is_refused() -> None:
    with pytest.raises(TopologyTextError, match="says of 0 of 6 pairs"):
        read_rocm_smi(rocm(types=matrix(4, lambda a, b: "XXXX")), "pasted")


def test_one_gpu_needs_no_cells() -> None:
    assert cpus(read_rocm_smi(rocm([["0"]], [["0"]]), "")) == [["GPU0"]]


# --- amd-smi -----------------------------------------------------------------------------------

BUSES = tuple(f"0000:{bus}:00.0" for bus in ("0c", "22", "9f", "af"))


def is_far(a: int, b: int) -> bool:
    return a + b == 3


def rate(a: int, b: int, link: int = 64_000) -> str:
    """Two links between neighbours of a square, none across."""
    return f"{link}-{0 if is_far(a, b) else 2 * link}"


def amd_tables(link: int = 64_000) -> str:
    return "\n".join(
        [
            table("ACCESS TABLE:", BUSES, matrix(4, lambda a, b: "ENABLED", "ENABLED")),
            table("WEIGHT TABLE:", BUSES, matrix(4, lambda a, b: 30 if is_far(a, b) else 15)),
            table("LINK TYPE TABLE:", BUSES, matrix(4, lambda a, b: "XGMI", "SELF")),
            table("NUMA BW TABLE:", BUSES, matrix(4, lambda a, b: rate(a, b, link), "N/A")),
            table("CACHE COHERANCY TABLE:", BUSES, matrix(4, lambda a, b: "C", "SELF")),
        ]
    )


def amd_json() -> list[dict[str, object]]:
    return [
        {
            "gpu": a,
            "bdf": BUSES[a],
            "links": [
                {
                    "gpu": b,
                    "bdf": BUSES[b],
                    "weight": 0 if a == b else 30 if is_far(a, b) else 15,
                    "link_status": "ENABLED",
                    "link_type": "SELF" if a == b else "XGMI",
                    "num_hops": int(a != b),
                    "bandwidth": "N/A" if a == b else rate(a, b),
                }
                for b in range(4)
            ],
        }
        for a in range(4)
    ]


def amd_old_json() -> list[dict[str, object]]:
    def row(of: Callable[[int], object]) -> dict[str, object]:
        return {f"gpu_{b}": of(b) for b in range(4)}

    return [
        {
            "gpu": a,
            "weight": row(lambda b, a=a: 0 if a == b else 30 if is_far(a, b) else 15),  # type: ignore[misc]
            "link_type": row(lambda b, a=a: "SELF" if a == b else "XGMI"),  # type: ignore[misc]
            "numa_bandwidth": row(lambda b, a=a: "N/A" if a == b else rate(a, b)),  # type: ignore[misc]
        }
        for a in range(4)
    ]


def links_of(dump: NodeDump) -> list[tuple[int, int, int | None, float | None]]:
    names = [part.name for part in dump.parts if part.kind == "gpu"]
    return [
        (names.index(link.a), names.index(link.b), link.count, link.bytes_per_s)
        for link in dump.links
    ]


SQUARE = [(a, b, 2, 128e9) for a, b in ((0, 1), (0, 2), (1, 3), (2, 3))]


def test_tables_and_both_forms_of_json_say_the_same() -> None:
    texts = [amd_tables(), *(json.dumps(form(), indent=4) for form in (amd_json, amd_old_json))]
    assert [links_of(read_amd_smi(text, "")) for text in texts] == [SQUARE] * 3


def test_json_in_one_line_between_prompts_is_read() -> None:
    text = f"$ amd-smi topology --json\n{json.dumps(amd_json())}\n$ \n"
    assert links_of(read_amd_smi(text, "")) == SQUARE


def test_commas_before_brackets_are_repaired_as_the_manual_has_them() -> None:
    text = json.dumps(amd_json(), indent=4).replace("}\n", "},\n").replace("0\n", "0,\n")
    dump = read_amd_smi(text, "")
    assert links_of(dump) == SQUARE
    assert "commas" in str(dump.remarks[0])


def test_the_drivers_constant_counts_links_but_is_no_rate() -> None:
    dump = read_amd_smi(amd_tables(50_000), "")
    assert links_of(dump) == [(a, b, count, None) for a, b, count, _ in SQUARE]
    assert any("older drivers" in str(remark) for remark in dump.remarks)


def test_zero_bandwidth_and_zero_weight_say_nothing() -> None:
    # As MI355X nodes print both.
    text = "\n".join(
        [
            table("WEIGHT TABLE:", BUSES, matrix(4, lambda a, b: 0)),
            table("LINK TYPE TABLE:", BUSES, matrix(4, lambda a, b: "XGMI", "SELF")),
            table("NUMA BW TABLE:", BUSES, matrix(4, lambda a, b: "0-0", "N/A")),
        ]
    )
    dump = read_amd_smi(text, "")
    assert [(count, rate) for _, _, count, rate in links_of(dump)] == [(None, None)] * 6
    assert "6 XGMI pairs without a weight" in dump.assumptions[0]


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("hello", "no JSON", None),
        ('\n\n[{"gpu": 0, "links": [', "no whole JSON", 3),
        ('{"a": 1}', "without 'links'", 1),
        ("[1, 2]", "no list of GPUs", 1),
        ("[" * 100_000, "no JSON|no whole JSON", 1),
        ('[{"gpu": ' + "9" * 5000 + "}]", "number too long", 1),
        ('[{"gpu": 0, "links": []}, {"gpu": 0, "links": []}]', "one GPU twice", None),
    ],
)
def test_json_of_something_else_is_refused(text: str, message: str, line: int | None) -> None:
    with pytest.raises(TopologyTextError, match=message) as refused:
        read_amd_smi(text, "pasted")
    assert refused.value.line == line


# --- damaged texts -----------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 16))
def test_a_printed_node_is_read_back(seed: int, count: int) -> None:
    rng = random.Random(seed)
    numa = [rng.randrange(3) for _ in range(count)]
    is_linked = {(a, b): rng.random() < 0.5 for b in range(count) for a in range(b)}

    def linked(a: int, b: int) -> bool:
        return is_linked[min(a, b), max(a, b)]

    weights = matrix(count, lambda a, b: 15 if linked(a, b) else 40 if numa[a] == numa[b] else 72)
    types = matrix(count, lambda a, b: "XGMI" if linked(a, b) else "PCIE")
    text = rocm(weights, types) + "==== Numa Nodes ====\n"
    text += "".join(
        f"GPU[{gpu}]\t: (Topology) Numa Node: {node}\n" for gpu, node in enumerate(numa)
    )
    dump = read_rocm_smi(text, "node")
    assert sorted(cpus(dump)) == sorted(
        gpus(*(gpu for gpu in range(count) if numa[gpu] == node)) for node in set(numa)
    )
    assert {(a, b) for a, b, _, _ in links_of(dump)} == {
        p for p, is_on in is_linked.items() if is_on
    }
    assert dump.remarks == ()


def test_a_wrapped_table_and_its_prompts_make_no_difference() -> None:
    text = (SAMPLES / "rocm-smi-showtopo" / "mi308x-x8.txt").read_text()
    wrapped = "\n".join(
        line[start : start + 72].rstrip()
        for line in text.split("\n")
        for start in range(0, max(len(line), 1), 72)
    )
    assert len(read_rocm_smi(wrapped, "").links) == 28
    quoted = "".join(f"> {line}\r\n" for line in text.split("\n"))
    assert read_rocm_smi(quoted, "") == read_rocm_smi(text, "")


def test_the_first_of_two_listings_is_read() -> None:
    first, second = (
        rocm(matrix(n, lambda a, b: 15), matrix(n, lambda a, b: "XGMI")) for n in (2, 4)
    )
    dump = read_rocm_smi(first + second, "")
    assert cpus(dump) == [gpus(0, 1)]
    assert any("another listing" in str(remark) for remark in dump.remarks)


def test_different_cells_of_a_pair_are_taken_as_the_farther() -> None:
    text = rocm([["0", "15"], ["30", "0"]], matrix(2, lambda a, b: "XGMI"))
    dump = read_rocm_smi(text, "")
    assert dump.links == ()
    assert "GPU0 and GPU1 read 15 one way and 30 the other" in str(dump.remarks[0])


def test_more_gpus_than_a_node_has_are_refused() -> None:
    with pytest.raises(TopologyTextError, match="65 GPUs"):
        read_rocm_smi(rocm(matrix(65, lambda a, b: 15)), "pasted")


HOSTILE = {
    "titles": "Weight between two GPUs\nGPU0 GPU1\nGPU0 0 15\n" * 30_000,
    "numa": ("GPU[0] : " + " " * 5900 + "\n") * 600,
    "wide rows": "WEIGHT TABLE\n" + ("GPU0 " + "GPU1 " * 1000 + "\n") * 700,
    "many names": "WEIGHT TABLE\n" + "".join(f"GPU{i % 9999} 0 15\n" for i in range(90_000)),
    "brackets": '[{"gpu":' * 400_000,
    "commas": "[" + ", " * 1_900_000,
    "digits": '[{"gpu":' + "9" * 3_900_000 + "}]",
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("read", [read_rocm_smi, read_amd_smi])
def test_hostile_texts_take_no_time(read: Callable[[str, str], NodeDump], name: str) -> None:
    start = time.process_time()
    with contextlib.suppress(TopologyTextError):
        read(HOSTILE[name], "pasted")
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("read", "text"),
    [
        *((read_rocm_smi, path.read_text()) for path in ROCM),
        *((read_amd_smi, path.read_text()) for path in AMD),
        (read_amd_smi, amd_tables()),
        (read_amd_smi, json.dumps(amd_json(), indent=4)),
        (read_amd_smi, json.dumps(amd_old_json(), indent=4)),
    ],
)
def test_a_damaged_text_is_a_node_or_refused(
    read: Callable[[str, str], NodeDump], text: str
) -> None:
    rng = random.Random(len(text))
    for _ in range(60):
        try:
            dump = read(damaged(text, text, rng), "pasted")
        except TopologyTextError:
            continue
        names = [part.name for part in dump.parts]
        assert len(set(names)) == len(names)
        assert {part.parent for part in dump.parts} <= {None, *names}
        assert {end for link in dump.links for end in (link.a, link.b)} <= set(names)
