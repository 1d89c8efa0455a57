"""Logs of nccl-tests in all their forms become the curves that they print, and nothing is lost.

``tests/samples/nccl-tests/expected.csv`` has, by file, what must be given beside the log, what it
measured (read off its own header and last row) and where it was published.
"""

import contextlib
import csv
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from planner.calibrate.measured import (
    Given,
    broken_laws,
    check_groups,
    check_machine,
    curves_of,
    with_curves,
)
from planner.calibrate.nccl_tests import read_log
from planner.errors import InvalidInputError
from planner.plan import Calibration, Collective, MeasuredCurve, Plan, document_hash
from planner.topology.bundled import load_topology
from tests.timed import made_up_run
from tests.unit.conftest import Run

SAMPLES = Path(__file__).parent.parent / "samples" / "nccl-tests"
EXPECTED = list(csv.DictReader((SAMPLES / "expected.csv").read_text("utf-8").splitlines()))
PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
GH200 = "gh200-x8-2node-allreduce.log"
A3_MEGA = ["--nccl-tests", str(SAMPLES / "a3mega-x16-allgather.log"), "-t", "gcp-a3-mega"]


def sample(name: str) -> bytes:
    return (SAMPLES / name).read_bytes()


def curves(text: bytes | str, **given: Any) -> tuple[MeasuredCurve, ...]:
    data = text.encode() if isinstance(text, str) else text
    return curves_of([read_log(data, source="a.log")], [Given(**given)])


def busbw_factor(op: str, ranks: int) -> float:
    """Return busbw over algbw (nccl-tests, doc/PERFORMANCE.md)."""
    return PASSES[op] * (ranks - 1) / ranks if op in PASSES else 1.0


def busbw(curve: MeasuredCurve, at: int) -> float:
    factor = busbw_factor(curve.op, curve.group_size)
    return curve.sizes_bytes[at] / curve.seconds[at] * factor


def table(
    rows: list[tuple[int, float]],
    *,
    op: str = "all_reduce",
    ranks: int = 8,
    hosts: int = 1,
    columns: str = "redop root",
    redop: str = "sum",
    in_place: bool = True,
    error: str = "0",
    extra: str = "",
    timestamp: str = "",
) -> str:
    """Return a log as nccl-tests prints it: (S, microseconds) are the rows."""
    factor = busbw_factor(op, ranks)
    shared = ranks if factor < 1 else 1
    lines = [f"# Collective test starting: {op.replace('all_to_all', 'alltoall')}_perf"]
    lines += ["# Using devices"]
    lines += [
        f"#  Rank {rank:2} Group  0 Pid   7 on    node{rank * hosts // ranks} device  0 [0x1] GPU"
        for rank in range(ranks)
    ]
    per_iter = " i_min i_max i_p99 i_cv%" if extra else ""
    group = f"time algbw busbw #wrong{per_iter}"
    lines += [f"# size count type {columns} {group} {group}", "# (B) (elements) (us) (GB/s)"]
    cells = {"redop": f"  {redop:>6}", "root": "      -1"}
    for size, us in rows:
        left = "".join(cells[name] for name in columns.split())
        algbw = size / us / 1e3
        figures = f"  {us:7.2f}  {algbw:6.2f}  {algbw * factor:6.2f}  {error:>6}{extra}"
        body = figures * 2 if in_place else figures
        lines.append(f"{size:12}  {size // shared // 4:12}     float{left}{body}{timestamp}")
    lines += ["# Out of bounds values : 0 OK", f"# Collective test concluded: {op}_perf"]
    return "\n".join(lines) + "\n"


ROWS = [(1024, 20.0), (4096, 21.0), (65536, 30.0), (1 << 20, 50.0), (1 << 30, 5000.0)]
SIZES, SECONDS = (tuple(column) for column in zip(*ROWS, strict=True))


def is_as_printed(curve: MeasuredCurve) -> bool:
    return curve.sizes_bytes == SIZES and curve.seconds == pytest.approx(
        [us * 1e-6 for us in SECONDS], rel=1e-12
    )


# ---------------------------------------------------------------------------------- samples


@pytest.mark.parametrize("row", EXPECTED, ids=[row["file"] for row in EXPECTED])
def test_samples_become_the_curves_that_they_print(row: dict[str, str]) -> None:
    log = read_log(sample(row["file"]), source=row["file"])
    given: dict[str, Any] = dict(pair.split("=") for pair in row["given"].split())
    given |= {name: int(value) for name, value in given.items() if value.isdigit()}
    (curve,) = curves_of([log], [Given(**given)])
    shape = (curve.op, curve.group_size, curve.num_nodes, len(curve.sizes_bytes))
    assert shape == (row["op"], *(int(row[k]) for k in ("group_size", "num_nodes", "num_sizes")))
    assert (curve.sizes_bytes[0], curve.sizes_bytes[-1]) == (
        int(row["first_size"]),
        int(row["last_size"]),
    )
    # Times are printed with four digits, busbw with two decimals.
    printed = float(row["last_busbw_gb_per_s"]) * 1e9
    assert busbw(curve, -1) == pytest.approx(printed, rel=2e-4, abs=5e6)
    assert [line for line, _ in log.bad_lines] == [int(n) for n in row["bad_lines"].split()]
    assert (curve.algorithm, curve.path, curve.source) == (None, "library", row["file"])


def test_every_sample_has_its_line_and_its_source() -> None:
    assert {row["file"] for row in EXPECTED} == {path.name for path in SAMPLES.glob("*.log")}
    assert all(row["source"] for row in EXPECTED)


# ------------------------------------------------------------------------------------ forms


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"in_place": False},
        {"columns": "redop", "error": "N/A"},
        {"error": "2e-07"},
        {"timestamp": "  2026-01-31 12:00:00"},
        {"extra": "  1.00  2.00  2.00  0.10"},
        {"extra": "  1.00  2.00  2.00  0.10", "in_place": False, "columns": "redop"},
        {"op": "all_gather", "columns": ""},
        {"op": "reduce_scatter"},
        {"op": "all_to_all", "redop": ""},
        {"op": "all_to_all", "redop": "none", "hosts": 2},
    ],
    ids=str,
)
def test_every_form_of_the_table_gives_the_same_seconds(form: dict[str, Any]) -> None:
    (curve,) = curves(table(ROWS, **form))
    assert is_as_printed(curve)
    assert (curve.op, curve.group_size) == (form.get("op", "all_reduce"), 8)
    assert curve.num_nodes == form.get("hosts", 1)


@pytest.mark.parametrize(
    "prefix", ["0: ", " 12: ", "[1,0]<stdout>:", "node1: ", "[pod/a] ", "2026-01-31T12:00:00.1Z "]
)
def test_prefixes_of_launchers_do_no_harm(prefix: str) -> None:
    text = "".join(prefix + line for line in table(ROWS).splitlines(keepends=True))
    (curve,) = curves(text)
    assert is_as_printed(curve)


def halves(text: str, said: Callable[[int], str]) -> str:
    """Return the log as it is with NCCL's lines on the same stream, ``said(S)`` among them."""
    info = "node0:31:42 [0] NCCL INFO "
    lines = []
    for line in text.splitlines():
        if line.startswith("#") or not line.strip():
            lines.append(line)
            continue
        size, left = int(line.split()[0]), line.index("-1") + 2
        middle = left + (len(line) - left) // 2
        lines += [f"{line[:left]}{info}{said(size)}", info + "Channel 00/0 : 0[0] -> 1[1]"]
        lines += [line[left:middle] + info + said(size), line[middle:]]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("op", "form", "part"),
    [
        ("all_reduce", "AllReduce: {} Bytes -> Algo {} proto SIMPLE channel{{Lo..Hi}}={{0..7}}", 1),
        ("all_gather", "AllGather: {} Bytes -> Algo {} proto LL channel{{Lo..Hi}}={{0..7}}", 8),
        ("all_gather", "AllGather: {} Bytes -> Algo {:d} proto 2 time 35.100000", 1),
        ("all_reduce", "{} Bytes -> Algo {:d} proto 0 time 7.200057", 1),
    ],
)
def test_the_librarys_lines_in_the_middle_of_rows_name_the_algorithm(
    op: str, form: str, part: int
) -> None:
    def said(size: int) -> str:
        number, name = (1, "Ring") if size >= 65536 else (0, "TREE")
        return form.format(size // part, number if ":d" in form else name)

    low, high = curves(halves(table(ROWS, op=op), said))
    assert (low.algorithm, high.algorithm) == ("tree", "ring")
    assert (low.sizes_bytes, high.sizes_bytes) == (SIZES[:2], SIZES[2:])
    assert (*low.seconds, *high.seconds) == pytest.approx([us * 1e-6 for us in SECONDS])


@pytest.mark.parametrize(
    ("op", "line", "method"),
    [
        ("all_gather", "AllGather [Copy Engine]: {} Bytes -> cudaMemcpy", "copy_engine"),
        ("all_reduce", "AllReduce [Symmetric]: {} Bytes -> Kernel AllReduce_AGxLL_R n", "one_shot"),
        ("all_reduce", "AllReduce [Symmetric]: {} Bytes -> Kernel AllReduce_Unheard_Of n", None),
        ("all_reduce", "AllReduce: {} Bytes -> Algo NVLS_TREE proto LL channel{{}}", "nvls_tree"),
        ("all_reduce", "AllGather: {} Bytes -> Algo RING proto LL channel{{}}", None),
    ],
)
def test_special_kernels_are_named_where_they_have_a_name(
    op: str, line: str, method: str | None
) -> None:
    part = 8 if op == "all_gather" else 1
    (curve,) = curves(halves(table(ROWS, op=op), lambda size: line.format(size // part)))
    assert is_as_printed(curve)
    assert curve.algorithm == method
    assert curve.path == ("nccl_zero_cta" if method == "copy_engine" else "library")


def test_a_size_that_ran_by_two_methods_has_none() -> None:
    text = table(ROWS) + "".join(
        f"AllReduce: {size} Bytes -> Algo {name} proto LL channel{{Lo..Hi}}={{0..1}}\n"
        for size in SIZES
        for name in ("TREE", "RING")
    )
    assert curves(text)[0].algorithm is None


def as_json(rows: list[tuple[int, float]], **changed: Any) -> bytes:
    """Return what ``--output_file`` writes for 8 ranks, 4 to a process (src/util.cu)."""
    devices = [
        {"rank": 4 * process, "group": 0, "hostname": f"node{process}"} for process in range(2)
    ]
    results = []
    for size, us in rows:
        body = {"time": us, "alg_bw": round(size / us / 1e3, 6), "nwrong": 0.0}
        body["bus_bw"] = round(body["alg_bw"] * 1.75, 6)
        row = {"size": size, "count": size // 4, "type": "float", "redop": "sum", "root": "    -1"}
        results.append({**row, "out_of_place": body, "in_place": body})
    config = {"nthreads": 1, "ngpus": 4, "devices": devices}
    document = {"version": 3, "args": ["./build/all_reduce_perf", "-g", "4"], "config": config}
    return json.dumps({**document, "results": results, **changed}).encode()


def test_json_is_read_like_its_table() -> None:
    (curve,) = curves(as_json(ROWS))
    assert is_as_printed(curve)
    assert (curve.op, curve.group_size, curve.num_nodes) == ("all_reduce", 8, 2)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"size": 1024.7}, "size 1024.7: need a whole number"),
        ({"size": True}, "size True: need a whole number"),
        ({"size": "1024"}, "size 1024: need a whole number"),
        ({"count": -4}, "count -4: need a whole number"),
        ({"type": "bogus"}, "type 'bogus': need one of int8, "),
        ({"root": "1.5"}, "its root is '1.5'"),
        (
            {"out_of_place": {"time": "2_0", "alg_bw": 0.05, "bus_bw": 0.09, "nwrong": 0}},
            "time '2_",
        ),
    ],
    ids=str,
)
def test_a_result_of_json_that_cannot_be_is_said_and_the_others_kept(
    changed: dict[str, Any], reason: str
) -> None:
    results = json.loads(as_json(ROWS))["results"]
    results[0] |= changed
    log = read_log(as_json(ROWS, results=results), source="a.json")
    ((number, why),) = log.bad_lines
    assert (number, why.startswith(reason)) == (1, True), why
    assert curves_of([log])[0].sizes_bytes == SIZES[1:]


@pytest.mark.parametrize("device", [{"rank": 4.5}, {"group": "0"}, {"rank": -4}])
def test_a_rank_of_json_that_is_no_whole_number_is_refused(device: dict[str, Any]) -> None:
    config = json.loads(as_json(ROWS))["config"]
    config["devices"][1] |= device
    with pytest.raises(
        InvalidInputError, match=rf"a\.log: no JSON .* {next(iter(device))} .*whole number"
    ):
        curves(as_json(ROWS, config=config))


def test_json_of_something_else_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"a\.log: no JSON of nccl-tests: KeyError 'args'"):
        curves(b'{"levels": []}')


def test_sizes_measured_several_times_have_the_median_of_all_files() -> None:
    logs = [
        read_log(table([(1024, us), (2048, 30.0)]).encode(), source=f"{us:g}.log")
        for us in (20.0, 90.0, 22.0)
    ]
    (curve,) = curves_of(logs)
    assert curve.seconds == pytest.approx([22e-6, 30e-6])
    assert curve.source == "20.log, 90.log, 22.log"
    assert curves("".join(table([(1024, us)]) for us in (20.0, 90.0, 22.0)))[0].seconds == (22e-6,)


def test_runs_of_other_operations_and_groups_are_curves_of_their_own() -> None:
    text = table(ROWS) + table(ROWS, op="all_gather") + table(ROWS, ranks=4)
    found = {(curve.op, curve.group_size) for curve in curves(text) if is_as_printed(curve)}
    assert found == {("all_reduce", 8), ("all_gather", 8), ("all_reduce", 4)}


# ---------------------------------------------------------------------------- what is wrong


def complaints(text: str) -> tuple[str, ...]:
    return read_log(text.encode(), source="a.log").complaints()


def test_rows_with_wrong_results_are_left_out_by_number() -> None:
    lines = table(ROWS).splitlines()
    number = next(n for n, line in enumerate(lines, 1) if line.split()[0] == "4096")
    lines[number - 1] = lines[number - 1].replace("       0", "      17")
    log = read_log("\n".join(lines).encode(), source="a.log")
    ((line, reason),) = log.bad_lines
    assert (line, reason.startswith("17 wrong elements")) == (number, True)
    assert curves_of([log])[0].sizes_bytes == (1024, 65536, 1 << 20, 1 << 30)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("  20.00", "  90.00", "1024 bytes in 90 us are 0.01138 GB/s, but its algbw is 0.05"),
        ("  20.00", "", "the row is cut off, or lacks a figure: after the type stands '-1 0.05"),
        ("  20.00", "  20.00 7 7", "after the type stands '-1 20.00 7 7 0.05"),
        ("  20.00", "  2o.00", "after the type stands 'sum      -1    2o.00"),
        ("  20.00", "    nan", "took nan us"),
        ("        1024 ", "        abcd ", "no row of the table: 'abcd"),
        ("           256  ", " ", "no row of the table: '1024    float"),
        ("        1024  ", "           0  ", "size 0: nothing was moved"),
    ],
)
def test_bad_rows_are_said_and_the_others_kept(old: str, new: str, reason: str) -> None:
    text = table(ROWS)
    assert old in text
    log = read_log(text.replace(old, new, 1).encode(), source="a.log")
    ((_, why),) = log.bad_lines
    assert reason in why
    assert curves_of([log])[0].sizes_bytes == SIZES[1:]


def test_times_of_the_cpu_are_no_times_of_the_call() -> None:
    with pytest.raises(InvalidInputError, match="its time is the CPU's"):
        curves(table(ROWS).replace(" time algbw", " cputime algbw"))


def test_many_complaints_are_counted() -> None:
    junk = "".join(f"what is this {n}\n" for n in range(50))
    text = table(ROWS).replace("# Out of bounds", f"{junk}{junk}# Out of bounds")
    said = complaints(text)
    assert len(said) == 21
    assert "'what is this 0'" in said[0]
    assert "lines " in said[0]
    assert said[-1] == "a.log: left out 60 more, for other reasons"


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("a3mega-x16-allgather.log", {"num_nodes": 2}, r"from line 9: which operation .* --op"),
        ("a3mega-x16-allgather.log", {"op": "all_gather"}, "16 ranks ran, is not in it; .*--num-"),
        (
            "a3mega-x16-allgather.log",
            {"op": "all_reduce", "num_nodes": 2},
            r"no all_reduce of any number of ranks: busbw over algbw is 0.937, .* check --op",
        ),
        (
            "a3mega-x16-allgather.log",
            {"op": "all_gather", "num_ranks": 8, "num_nodes": 2},
            r"given are 8 ranks, but as all_gather .* of 16: counts are S/16, .* --ranks",
        ),
        ("roce-x16-allreduce-jitter.log", {"op": "all_gather"}, "it says all_reduce itself, where"),
        (GH200, {"num_ranks": 16}, "it says 8 itself, where --ranks 16"),
        ("roce-x16-allreduce-jitter.log", {}, "--num-nodes"),
        ("roce-x16-allreduce-jitter.log", {"num_nodes": 3}, "16 ranks on 3 nodes; need"),
        ("p4d-kubectl-rank-prefix.log", {"num_nodes": 2}, "how many ranks .* --ranks"),
        ("p4d-kubectl-rank-prefix.log", {"num_nodes": 2, "num_ranks": 64}, "check .*--ranks"),
    ],
)
def test_what_a_log_lacks_is_asked_for_and_never_guessed(
    name: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        curves(sample(name), **given)


@pytest.mark.parametrize(
    ("changed", "op", "message"),
    [
        (
            {"op": "all_gather", "ranks": 4},
            "all_gather",
            r"lists 4 ranks, .* of 8: counts are S/8,",
        ),
        ({"op": "all_gather"}, "all_reduce", "over algbw is 0.875, where .* check the log"),
        ({"op": "all_reduce"}, "all_gather", "counts are S, where n ranks have S/n; check the log"),
    ],
)
def test_a_list_of_ranks_or_a_name_that_the_figures_contradict_is_refused(
    changed: dict[str, Any], op: str, message: str
) -> None:
    """As where parts of several logs are in one file."""
    head = table(ROWS, op=op, ranks=changed.pop("ranks", 8)).partition("# size")[0]
    body = "".join(table(ROWS, **changed).partition("# size")[1:])
    with pytest.raises(InvalidInputError, match=message):
        curves(head + body)


@pytest.mark.parametrize("order", ["ab", "ba", "aa"])
def test_a_rank_that_is_listed_twice_is_refused_with_both_lines(order: str) -> None:
    """As of nccl-tests without MPI on each node; none of the lists is the right one."""
    lines = table(ROWS).splitlines()
    lists = [line.replace("node0", host) for host in order for line in lines[2:10]]
    message = rf"rank 0 .* twice, on {order[0]} \(line 3\) and on {order[1]} \(line 11\)"
    with pytest.raises(InvalidInputError, match=rf"a\.log, from line .*: {message}"):
        curves("\n".join([*lines[:2], *lists, *lines[10:]]))


def test_a_rank_that_json_lists_twice_is_refused() -> None:
    config = json.loads(as_json(ROWS))["config"]
    config["devices"][1]["rank"] = 0
    with pytest.raises(InvalidInputError, match=r"on node0 \(device 1\) and on node1 \(device 2\)"):
        curves(as_json(ROWS, config=config))


@pytest.mark.parametrize("columns", ["redop root", "redop", ""])
def test_a_row_cut_off_behind_any_figure_is_said_to_be(columns: str) -> None:
    text = table(ROWS, columns=columns).partition("# Out of bounds")[0].rstrip()
    for cut in (1, 2, 3, 5, 6, 7):  # without 4 the half out of place is whole
        log = read_log(text.rsplit(maxsplit=cut)[0].encode(), source="a.log")
        ((_, why),) = log.bad_lines
        assert why.startswith("the row is cut off"), (cut, why)
        assert curves_of([log])[0].sizes_bytes == SIZES[:-1]


def test_a_busbw_of_more_than_twice_algbw_is_refused() -> None:
    line = "        1024           256     float     sum      -1    20.00    0.05    0.25       0\n"
    with pytest.raises(InvalidInputError, match="no all_reduce of any number of ranks: busbw over"):
        curves(table([]).replace("# Out of", line + "# Out of"))


# ----------------------------------------------------------------------------- whose machine


@pytest.mark.parametrize(
    ("name", "topology", "message"),
    [
        ("rccl-mi355x-x8-allreduce.log", "dgx-h100", "'AMD Instinct MI355X', .* as mi355x-8x400-"),
        ("4090-x2-allgather-concat.log", "dgx-h100", "'NVIDIA GeForce RTX 4090', .* rtx-4090-x2"),
        ("a100-x8-allreduce-validation0.log", "dgx-h100", "'A100-SXM4-40GB', .* h100-sxm-80gb of"),
        ("a100-x8-allreduce-validation0.log", "dgx-a100", "'A100-SXM4-40GB', .* dgx-a100-40gb"),
        ("h100nvl-x4-2node-step100k-bad.log", "dgx-h100", "'NVIDIA H100 NVL'.* measured, or leave"),
        (GH200, "dgx-h100", "'NVIDIA GH200 120GB'.* as gh200-x4-slingshot"),
        ("h100-x16-2node-allreduce.log", "local-gloo", "of NCCL, where local-gloo runs GLOO"),
    ],
)
def test_a_log_of_other_gpus_than_the_topology_has_is_refused(
    name: str, topology: str, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=f"{name}: .*{message}") as caught:
        check_machine(read_log(sample(name), source=name), load_topology(topology))
    assert caught.value.where == "topology"


@pytest.mark.parametrize(
    ("said", "topology"),
    [
        ("RCCL version : 2.22.3-HEAD:9b28eef", "dgx-h100"),
        ("rccl-tests: Version HEAD:e1b8a3a", "dgx-h100"),
        ("NCCL version 2.18.3+hip6.0", "dgx-h100"),
        ("NCCL version 2.27.3+cuda12.8", "mi300x-8x400-ib"),
    ],
)
def test_a_log_of_another_library_is_refused_where_no_gpu_says_so(said: str, topology: str) -> None:
    log = read_log(f"{said}\n{table(ROWS)}".encode(), source="a.log")
    with pytest.raises(InvalidInputError, match=r"a\.log: is of .?CCL, where"):
        check_machine(log, load_topology(topology))


@pytest.mark.parametrize(
    ("name", "topology", "remark"),
    [
        ("h100-x16-2node-allreduce.log", "dgx-h100", ""),
        (GH200, "gh200-x4-slingshot", ""),
        ("rccl-mi355x-x8-allreduce.log", "mi355x-8x400-roce", ""),
        ("a3mega-x16-allgather.log", "gcp-a3-mega", "lists no GPUs; taken for the h100-sxm-80gb"),
    ],
)
def test_a_log_of_the_same_gpus_is_taken_and_one_without_any_is_said(
    name: str, topology: str, remark: str
) -> None:
    said = check_machine(read_log(sample(name), source=name), load_topology(topology))
    assert said.startswith(f"{name}: {remark}" if remark else "")
    assert bool(said) == bool(remark)


def test_gpus_that_nobody_knows_are_said() -> None:
    text = table(ROWS).replace("[0x1] GPU", "[0x1] ACME Turbo 9")
    said = check_machine(read_log(text.encode(), source="a.log"), load_topology("dgx-h100"))
    assert said.startswith("a.log: lists ACME Turbo 9, no known GPU; taken for the h100-sxm-80gb")


def test_json_lists_its_gpus_too() -> None:
    devices = [
        {"rank": 4 * n, "group": 0, "hostname": f"n{n}", "device_info": "NVIDIA GH200 120GB"}
        for n in range(2)
    ]
    text = as_json(ROWS, config={"nthreads": 1, "ngpus": 4, "devices": devices})
    with pytest.raises(InvalidInputError, match="lists 'NVIDIA GH200 120GB'"):
        check_machine(read_log(text, source="a.json"), load_topology("dgx-h100"))


@pytest.mark.parametrize(
    ("ranks", "nodes", "fits"),
    [
        (16, 2, True),
        (8, 1, True),
        (4, 1, True),
        (2, 2, True),
        (8, 2, True),
        (16, 1, False),  # more than a node has
        (3, 1, False),  # nor do three of eight: another of these groups reaches the next node
        (6, 2, False),
        (65536, 8192, False),
    ],
)
def test_curves_of_groups_that_a_topology_cannot_have_are_refused_alone_and_said_beside_others(
    ranks: int, nodes: int, fits: bool
) -> None:
    document = load_topology("dgx-h100")
    curve = MeasuredCurve(
        op="all_reduce",
        group_size=ranks,
        num_nodes=nodes,
        sizes_bytes=(1024,),
        seconds=(1.0,),
        source="made up",
    )
    good = curve.model_copy(update={"group_size": 16, "num_nodes": 2})
    check_groups([curve, good], document)
    assert bool(broken_laws(curve, document)) == (not fits)
    if fits:
        check_groups([curve], document)
    else:
        with pytest.raises(
            InvalidInputError, match=r"nothing would use these .* no group there is"
        ):
            check_groups([curve], document)


def test_ranks_that_lie_unevenly_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"unevenly: groups have \[\(8, 2, 3, 3\)\]"):
        curves(table(ROWS, hosts=3))


def test_operations_that_are_not_planned_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="hypercube_perf: no operation of this planner"):
        curves(table(ROWS).replace("all_reduce", "hypercube"))


def test_a_text_without_rows_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"a\.log: no row .* all_reduce_perf"):
        read_log(b"hello\n\xff\xfe", source="a.log")


def test_mutilated_logs_end_in_curves_or_one_error() -> None:
    text, chance = sample(GH200) + as_json(ROWS), random.Random(3)
    for _ in range(150):
        data = bytearray(text)
        for _ in range(chance.randrange(1, 30)):
            at = chance.randrange(len(data))
            data[at : at + chance.randrange(9)] = bytes(chance.choices(b"0 -.\n#N/Ae:", k=3))
        with contextlib.suppress(InvalidInputError):
            curves(bytes(data[chance.randrange(2) * chance.randrange(len(data)) :]))


# ------------------------------------------------------------------------------------- laws


def flags(name: str, topology: str, **given: Any) -> tuple[str, ...]:
    (curve,) = curves(sample(name), **given)
    return broken_laws(curve, load_topology(topology))


def test_time_that_falls_as_the_size_grows_is_said_and_kept() -> None:
    (curve,) = curves(sample("h100nvl-x4-2node-step100k-bad.log"))
    at = curve.sizes_bytes.index(1_000_000)
    assert curve.seconds[at : at + 2] == pytest.approx([343.55e-6, 152.97e-6])
    (said,) = broken_laws(curve, load_topology("dgx-h100"))
    assert "falls as the size grows, 1 time, most from 344 us at 1.00 MB to 153 us at 1.10" in said


def test_noise_is_no_broken_law() -> None:
    (curve,) = curves(sample("a3mega-x16-allgather.log"), op="all_gather", num_nodes=2)
    assert min(b / a for a, b in zip(curve.seconds, curve.seconds[1:], strict=False)) < 1
    assert broken_laws(curve, load_topology("gcp-a3-mega")) == ()


def test_more_than_the_links_carry_is_said() -> None:
    assert flags("h100-x16-2node-allreduce.log", "dgx-h100") == ()
    (said,) = flags("h100-x16-2node-allreduce.log", "dgx-a100")
    assert "faster than the links of dgx-a100 at 5 sizes" in said
    assert "check the topology" in said


def test_a_group_that_the_topology_has_no_place_for_is_said() -> None:
    (said,) = flags("h100-x16-2node-allreduce.log", "l40s-x8")
    assert "l40s-x8 has 1 node of 8: no group there is like it" in said


# ------------------------------------------------------------------------------ command line


def calibrate(run: Run, tmp_path: Path, *arguments: str) -> tuple[Calibration, str]:
    file = tmp_path / "calibration.json"
    status, out, err = run("calibrate", *arguments, "--output", str(file))
    assert (status, out) == (0, ""), err
    return Calibration.model_validate_json(file.read_text()), err


def test_logs_alone_are_a_calibration_of_curves_alone(run: Run, tmp_path: Path) -> None:
    names = [f"a100-x8-{op}-validation0.log" for op in ("allgather", "allreduce")]
    options = [word for name in names for word in ("--nccl-tests", str(SAMPLES / name))]
    found, err = calibrate(run, tmp_path, *options, "--topology", "dgx-a100-40gb")
    assert [(curve.op, curve.group_size) for curve in found.curves] == [
        ("all_gather", 8),
        ("all_reduce", 8),
    ]
    assert (found.levels, found.calls, found.run_hashes) == ((), (), ())
    assert (found.compute_scale, found.optimizer_scale, found.host_overhead_s) == (1.0, 1.0, 0.0)
    assert found.id == document_hash(found.model_dump(mode="json", exclude={"id", "calls"}))
    assert f"{names[1]}: left out lines 17, 18: size 0" in err
    assert "from 2 logs (2 curves)" in err
    request = [
        "plan",
        "-t",
        "dgx-a100-40gb",
        "-n",
        "2",
        "-m",
        "llama3-8b",
        "-b",
        "64",
        "-s",
        "4096",
    ]
    file = str(tmp_path / "calibration.json")
    status, out, err = run(*request, "-c", "tp=8", "--calibration", file, "--json")
    assert status == 0, err
    provenance = Plan.model_validate_json(out).provenance
    assert provenance.calibration_id == found.id
    assert provenance.calibration == (
        "priors and 2 measured curves (all_gather, all_reduce), whose times calls marked measured "
        "have; no run of a plan was timed here"
    )


def test_runs_and_logs_together_are_one_calibration(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fit itself takes a second and is tested elsewhere."""
    plan_file, run_file, log = (tmp_path / name for name in ("plan", "run", "log"))
    request = ["plan", "-t", "local-gloo", "-m", "example-gpt", "-b", "16", "-s", "128"]
    request += ["--precision", "fp32", "--framework", "executor", "-c", "tp=1", "-c", "pp=1"]
    run(*request, "--output", str(plan_file))
    plan = Plan.model_validate_json(plan_file.read_text())
    run_file.write_text(made_up_run(plan).model_dump_json())
    log.write_text(table([(1024, 50.0)], ranks=4))
    fitted = with_curves(None, "local-gloo", ()).model_copy(
        update={"compute_scale": 1.5, "run_hashes": ("a",)}
    )
    monkeypatch.setattr("planner.calibrate.fit.fit_calibration", lambda measured: fitted)
    sources = ["--plan", str(plan_file), str(run_file), "--nccl-tests", str(log)]
    both, err = calibrate(run, tmp_path, *sources)
    assert "from 1 run and 1 log (1 curve)" in err
    assert [curve.seconds for curve in both.curves] == [pytest.approx((50e-6,))]
    assert both.model_copy(update={"curves": (), "id": fitted.id}) == fitted
    assert both.id != fitted.id


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to calibrate on"),
        (["run.json"], "add --plan FILE"),
        (["--plan", "plan.json"], "--plan without a timed run"),
        (["--nccl-tests", str(SAMPLES / GH200)], "add --topology NAME"),
        (["--nccl-tests", str(SAMPLES / GH200), "-t", "dgx-h100", "--op", "sum"], "--op 'sum'"),
        (["--nccl-tests", str(SAMPLES / GH200), "-t", "dgx-h100"], "lists 'NVIDIA GH200 120GB'"),
        ([*A3_MEGA, "--op", "all_gather", "--num-nodes", "1"], "16 ranks on 1 node: topology gcp"),
        ([*A3_MEGA, "--op", "all_gather", "--op", "all_reduce"], "--op is given 2 times for 1 log"),
        ([*A3_MEGA, "--ranks", "16", "--ranks", "8"], "--ranks is given 2 times for 1 log"),
    ],
)
def test_what_a_calibration_lacks_is_said(run: Run, arguments: list[str], message: str) -> None:
    status, out, err = run("calibrate", *arguments)
    assert (status, out) == (2, "")
    assert message in err


def test_each_log_has_its_own_operation_and_nodes_or_all_have_one(run: Run, tmp_path: Path) -> None:
    logs = [*A3_MEGA, "--nccl-tests", str(SAMPLES / "roce-x16-allreduce-jitter.log")]
    each = ["--op", "all_gather", "--op", "all_reduce", "--num-nodes", "2"]
    found, err = calibrate(run, tmp_path, *logs, *each)
    assert [(curve.op, curve.num_nodes) for curve in found.curves] == [
        ("all_gather", 2),
        ("all_reduce", 2),
    ]
    assert "a3mega-x16-allgather.log: lists no GPUs; taken for the h100-sxm-80gb" in err
    nodes = ["--num-nodes", "2", "--num-nodes", "16"]
    found, _ = calibrate(run, tmp_path, *logs, *each[:4], *nodes)
    assert [curve.num_nodes for curve in found.curves] == [2, 16]


def test_logs_of_another_topology_than_the_runs_are_refused() -> None:
    runs = with_curves(None, "dgx-h100", ())
    with pytest.raises(InvalidInputError, match="'dgx-h100', the logs of 'dgx-a100'"):
        with_curves(runs, "dgx-a100", ())


def test_all_operations_have_a_binary() -> None:
    binaries = (
        "all_reduce all_gather reduce_scatter alltoall broadcast reduce gather scatter sendrecv"
    )
    found = {
        read_log(table(ROWS).replace("all_reduce", name).encode(), source="a.log").runs[0].op
        for name in binaries.split()
    }
    assert found == set(get_args(Collective))
