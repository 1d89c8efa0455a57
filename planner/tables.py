"""Plans, topologies and models as tables for people; ``rich`` lays them out."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from planner.cost.comparison import Comparison
from planner.cost.compression import BASIS, NEEDS, Compared, why_not
from planner.cost.expert_strategies import BreakEven, Strategy
from planner.cost.expert_traffic import Exits
from planner.hardware.devices import Device
from planner.hardware.roofline import DERIVED
from planner.layout.groups import Group
from planner.model.blocks import (
    BlockKind,
    block_flop_per_token,
    block_parameters,
    mtp_parameter_count,
    num_blocks,
    parameter_count,
)
from planner.model.spec import ModelSpec
from planner.plan import CollectiveChoice, Method, Plan, StageMemory
from planner.search.nearby import MemoryReport
from planner.summary import (
    Part,
    basis,
    closeness,
    headline,
    launch_command,
    launch_notes,
    layout_rows,
    memory_parts,
    ordered,
    peak_stage,
    some_of,
    time_parts,
    traffic,
    waiting,
)
from planner.topology.bounds import node_bounds
from planner.topology.document import TopologyDocument
from planner.topology.drawing.outline import Line, outline, runs
from planner.topology.fabric import Fabric, Level
from planner.units import counted, format_bytes, format_count, format_rate, format_seconds
from planner.validate.kernels import KernelPrediction, KernelScore, KernelTable
from planner.validate.memory import FIT_BAR, MEDIAN_BAR, P90_BAR, MemoryScores
from planner.validate.scores import Scores

__all__ = [
    "new_table",
    "percent",
    "show_collectives",
    "show_compression",
    "show_degraded",
    "show_device",
    "show_devices",
    "show_experts",
    "show_fabric",
    "show_kernel_scores",
    "show_memory",
    "show_memory_scores",
    "show_model",
    "show_models",
    "show_plan",
    "show_scores",
    "show_skipped",
    "show_table",
    "show_topologies",
]

_BAR_WIDTH: Final = 36
# Below this width the reasons of the runners-up stand under their table.
_WIDE: Final = 110
_SIZES_A_TABLE: Final = 9
_MAX_VALUE_LENGTH: Final = 100
_SHOWN_SEQ_LEN: Final = 4096
# Those that would be empty for every level are left out.
_LEVEL_COLUMNS: Final[dict[str, Callable[[Level], str]]] = {
    "level": lambda level: escape(level.name),
    "kind|": lambda level: level.kind,
    "GPUs of a unit>": lambda level: (
        runs(level.unit_sizes) if level.unit_sizes else f"{level.unit_size:,}"
    ),
    "per GPU>": lambda level: format_rate(level.bytes_per_s, "B/s"),
    "each for itself>": lambda level: (
        format_rate(level.bytes_per_s * level.direct_share, "B/s")
        if level.direct_share != 1
        else ""
    ),
    "latency>": lambda level: format_seconds(level.alpha_s),
    "path|": lambda level: "" if level.path == "peer" else level.path,
    "oversubscribed>": lambda level: (
        f"{level.oversubscription:g}:1" if level.oversubscription > 1 else ""
    ),
    "multicast|": lambda level: "yes" if level.multicast else "",
    "source": lambda level: escape(level.source),
}
_WORDS: Final = ("kind|", "path|", "source")


def show_plan(out: Console, plan: Plan, plan_source: str) -> None:
    """Print a plan: the answer, where time and memory go, why not the others, how to run it.

    Args:
        out: Where to.
        plan: What.
        plan_source: File or URL that the launch line names.
    """
    out.print(headline(plan), style="bold", markup=False)
    out.print(basis(plan), markup=False)
    layout = new_table("what", "how")
    for what, how in layout_rows(plan):
        layout.add_row(what, escape(how))
    show_table(out, "layout", layout)
    show_table(out, "one step", _time_table(plan))
    _show_memory_of(out, plan)
    _show_collectives(out, plan)
    _show_crossings(out, plan)
    _show_placements(out, plan)
    _show_runners_up(out, plan)
    rejected = new_table("layouts>", "reason")
    for item in plan.rejected:
        rejected.add_row(f"{item.count:,}", escape(item.reason))
    show_table(out, f"rejected of {plan.num_candidates:,} layouts", rejected)
    _show_assumptions(out, plan.assumptions)
    _show_launch(out, plan, plan_source)
    out.print(
        f"\nplan {plan.id}; --json or --output {plan_source} gives the document", markup=False
    )


def show_topologies(out: Console, documents: Iterable[TopologyDocument]) -> None:
    """Print one line for each topology."""
    table = new_table("name", "device", "GPUs a node>", "nodes>", "description")
    for document in documents:
        table.add_row(
            escape(document.name),
            escape(document.device_name),
            str(document.gpus_per_node),
            f"1 to {document.max_nodes:,}",
            escape(document.description),
        )
    out.print(table)


def show_fabric(
    out: Console, document: TopologyDocument, fabric: Fabric, nodes: int | None = None
) -> None:
    """Print what a topology is made of, then its levels as the collectives see them.

    Args:
        out: Where to.
        document: Which topology.
        fabric: Compiled from it.
        nodes: How many of its nodes are asked for; None shows the parts of all.
    """
    out.print(_tree(outline(document, nodes)))
    out.print()
    cells = {
        name: [column(level) for level in fabric.levels] for name, column in _LEVEL_COLUMNS.items()
    }
    columns = {name: words for name, words in cells.items() if any(words)}
    # Where there is no room for columns of words, they stand below.
    below = {} if out.width >= _WIDE else {name: columns.pop(name, None) for name in _WORDS}
    table = new_table(*columns, is_wide=out.width >= _WIDE)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    num_nodes = fabric.num_gpus // fabric.gpus_per_node
    size = f"{counted(num_nodes, 'node')}, {fabric.num_gpus:,} ranks on {document.device_name}"
    title = f"{document.name}: {size}"
    if nodes is None and num_nodes < document.max_nodes:
        title += f" (the default; -n {document.max_nodes} shows all)"
    out.print(f"{title}; bandwidths one way", style="bold", markup=False)
    out.print(table)
    for number, level in enumerate(fabric.levels if below else ()):
        words = (cells[number] for cells in below.values() if cells)
        out.print(f"{escape(level.name)}: {'; '.join(filter(None, words))}")
    if found := node_bounds(document):
        limits = (
            f"{op} {format_rate(1 / bound.seconds_per_byte, 'B/s')}" for op, bound in found.items()
        )
        out.print(f"among all GPUs of a node, algbw is at most: {', '.join(limits)}")
    _show_assumptions(out, document.assumptions)


def show_degraded(out: Console, before: Fabric, after: Fabric) -> None:
    """Print what weak and broken parts leave of each level."""
    table = new_table("level", "GPUs of a unit>", "per GPU before>", "after>", "left>")
    old = {level.name: level for level in before.levels}
    for level in after.levels:
        was = old.get(level.name)
        table.add_row(
            escape(level.name),
            f"{level.unit_size:,}",
            "-" if was is None else format_rate(was.bytes_per_s, "B/s"),
            format_rate(level.bytes_per_s, "B/s"),
            "-" if was is None else f"{100 * level.bytes_per_s / was.bytes_per_s:.1f} %",
        )
    title = f"{after.topology}: {before.num_gpus:,} GPUs, {after.num_gpus:,} of them up"
    if after.slowest_share < 1:
        title += f", the slowest at {100 * after.slowest_share:g} % of its speed"
    out.print(title, style="bold", markup=False)
    out.print(table)


def show_models(out: Console, specs: Mapping[str, ModelSpec]) -> None:
    """Print one line for each model."""
    table = new_table(
        "name", "parameters>", "active>", "layers>", "hidden size>", "experts>", "blocks"
    )
    for name, spec in specs.items():
        table.add_row(
            escape(name),
            format_count(parameter_count(spec)),
            format_count(parameter_count(spec, active=True)),
            str(spec.num_layers),
            str(spec.hidden_size),
            "" if spec.experts is None else f"{spec.experts.top_k} of {spec.experts.num_experts}",
            ", ".join(f"{number} {kind}" for kind, number in _layers(spec)),
        )
    out.print(table)


def _layers(spec: ModelSpec) -> list[tuple[BlockKind, int]]:
    """Return how many blocks there are of each kind, but for the two ends."""
    return [(k, n) for k, n in num_blocks(spec).items() if k not in ("embedding", "head")]


def show_model(out: Console, spec: ModelSpec) -> None:
    """Print the blocks and the fields of a model."""
    title = f"{spec.name}: {format_count(parameter_count(spec))} parameters"
    if spec.experts is not None:
        title += f", {format_count(parameter_count(spec, active=True))} active"
    if spec.num_mtp_modules:
        title += f"; {format_count(mtp_parameter_count(spec))} more for multi-token prediction"
    out.print(title, style="bold", markup=False)
    table = new_table("block", "number>", "parameters of one>", "forward GFLOP per token>")
    for kind, number in num_blocks(spec).items():
        flop = block_flop_per_token(spec, kind, _SHOWN_SEQ_LEN)
        parameters = format_count(block_parameters(spec, kind).total())
        table.add_row(kind, str(number), parameters, f"{flop / 1e9:,.3g}")
    out.print(table)
    out.print(f"flop with sequences of {_SHOWN_SEQ_LEN:,} tokens", markup=False)
    table = new_table("field", "value")
    for field, value in spec.model_dump(mode="json", exclude={"name", "assumptions"}).items():
        text = json.dumps(value)
        is_long = len(text) > _MAX_VALUE_LENGTH
        table.add_row(field, escape(text[: _MAX_VALUE_LENGTH - 3] + "..." if is_long else text))
    out.print(table)
    _show_assumptions(out, spec.assumptions)


def show_scores(out: Console, scores: Scores) -> None:
    """Print how far predictions are from what was measured, by machine and over machines."""
    table = new_table("machine", "nodes|", "size|", "rows>", "median error>", "mean>", "pred/meas>")
    for one in scores.machines:
        table.add_row(
            escape(one.machine),
            one.nodes,
            one.size,
            f"{one.num_rows:,}",
            percent(one.median_error),
            percent(one.mean_error),
            f"{one.median_ratio:.2f}",
        )
    out.print(table)
    table = new_table("nodes|", "size|", "machines>", "rows>", "median error>", "bar>", "")
    for group in scores.classes:
        bar, verdict = group.bar, {None: "too few machines to judge", True: "kept", False: "missed"}
        table.add_row(
            group.nodes,
            group.size,
            f"{group.num_machines:,}",
            f"{group.num_rows:,}",
            percent(group.median_error),
            "none" if bar is None else percent(bar),
            "" if bar is None else verdict[group.is_kept],
        )
    show_table(out, "median over machines", table)
    rank = scores.ranking
    if rank.num_pairs:
        told = f"of {counted(rank.num_pairs, 'pair')} of forced methods the faster is predicted in "
        told += f"{rank.num_right:,}"
        if rank.num_right < rank.num_pairs:
            told += f"; the others take {percent(rank.median_loss)} longer than the faster "
            told += f"(median; {percent(rank.worst_loss)} at worst), "
            told += f"{format_seconds(rank.lost_s)} together"
        out.print(f"\n{told}", markup=False)
    show_skipped(out, scores.skipped)
    out.print(
        f"\n{counted(scores.num_rows, 'row')}: {scores.num_scored:,} scored, "
        f"{scores.num_excluded:,} marked EXCLUDE, {scores.num_unmeasured:,} predicted but without "
        "a measured time",
        markup=False,
    )


def show_devices(out: Console, devices: Sequence[Device]) -> None:
    """Print what is known of devices, one a line."""
    table = new_table(
        "device", "kernels", "memory>", "bandwidth>", "16 bits>", "8 bits>", "4 bits>"
    )
    for one in devices:
        peaks = one.peak_flop_per_s
        half = peaks.get("bf16", peaks.get("fp16"))
        shown = [_peak(half), _peak(peaks.get("fp8")), _peak(peaks.get("nvfp4"))]
        bandwidth = format_rate(one.memory_bytes_per_s, "B/s")
        table.add_row(one.name, one.basis, format_bytes(one.memory_bytes), bandwidth, *shown)
    out.print(table)


def show_device(out: Console, one: Device) -> None:
    """Print a device with its figures and their sources."""
    table = new_table("what", "figure")
    table.add_row("memory", f"{format_bytes(one.memory_bytes)}, of which a rank can allocate "
                  f"{format_bytes(one.capacity_bytes)}")  # fmt: skip
    table.add_row("bandwidth", format_rate(one.memory_bytes_per_s, "B/s"))
    for precision, peak in one.peak_flop_per_s.items():
        derived = "; kernels derived from fp8" if precision in DERIVED and one.tables else ""
        table.add_row(f"peak {precision}", f"{_peak(peak)}{derived}")
    for name, value in asdict(one.figures).items():
        if name != "source":
            table.add_row(name, f"{value:g}")
    out.print(table)
    for title, source in (
        ("peaks", one.source),
        (f"kernels ({one.basis})", one.kernel_source),
        ("figures of the rooflines", one.figures.source),
    ):
        out.print(f"\n{title}: {source}", markup=False)


def _peak(flop_per_s: float | None) -> str:
    return "" if flop_per_s is None else format_rate(flop_per_s, "flop/s")


def show_kernel_scores(
    out: Console,
    table: KernelTable,
    predictions: Sequence[KernelPrediction],
    scores: Sequence[KernelScore],
) -> None:
    """Print how far kernel times are from what was measured, by device and kind."""
    for is_known, title in (
        (False, "shapes that the bundled tables do not hold"),
        (True, "shapes of the bundled tables themselves: no test, for they were read"),
    ):
        chosen = [one for one in scores if one.is_known == is_known]
        if chosen:
            rows = new_table(
                "device", "kind", "rows>", "median error>", "90th percentile>", "bias>"
            )
            for one in chosen:
                rows.add_row(
                    one.device,
                    escape(one.kind),
                    f"{one.num_rows:,}",
                    percent(one.median_error),
                    percent(one.ninetieth_error),
                    percent(one.bias),
                )
            show_table(out, title, rows)
    show_skipped(out, Counter(p.skipped_reason for p in predictions if p.time_s is None))
    timed = sum(1 for time_s in table.time_s.tolist() if time_s == time_s)
    only = ", scored from m = 1,024 on" if table.op == "gemm" else ""
    out.print(
        f"\n{counted(len(predictions), 'row')}: {timed:,} with a measured time{only}", markup=False
    )


def show_skipped(out: Console, skipped: Mapping[str, int]) -> None:
    """Print how many rows have no prediction for which reason."""
    if skipped:
        table = new_table("rows>", "skipped because")
        for reason, count in skipped.items():
            table.add_row(f"{count:,}", escape(reason))
        show_table(out, f"no prediction for {counted(sum(skipped.values()), 'row')}", table)


def percent(part: float) -> str:
    """Return a fraction as per cent."""
    return f"{100 * part:.1f} %"


def show_memory_scores(out: Console, scores: MemoryScores) -> None:
    """Print errors of predicted memory by source, the worst rows, and runs that would not fit."""
    table = new_table("source|", "rows>", "median error>", "90th percentile>", "bias>")
    for one in scores.sources:
        table.add_row(
            escape(one.source),
            f"{one.num_rows:,}",
            percent(one.median_error),
            percent(one.p90_error),
            f"{100 * one.bias:+.1f} %",
        )
    show_table(out, "memory against what the sources print", table)
    if scores.is_kept is not None:
        verdict = "kept" if scores.is_kept else "missed"
        bars = f"median {percent(MEDIAN_BAR)}, 90th percentile {percent(P90_BAR)}"
        out.print(f"bars on all rows ({bars}): {verdict}", markup=False)
    if scores.worst:
        table = new_table("row|", "source|", "predicted>", "printed>", "error>", "assumed")
        for row in scores.worst:
            table.add_row(
                *(escape(row.id), escape(row.source)),
                *(f"{row.predicted_gib:.1f} GiB", f"{row.printed_gib:.1f} GiB"),
                *(f"{100 * row.error:+.0f} %", escape("; ".join(row.assumptions))),
            )
        show_table(out, "the worst rows", table)
    if scores.not_fitting:
        table = new_table("row|", "source|", "needed>", "has>", "beyond>", "assumed")
        for row in scores.not_fitting:
            table.add_row(
                *(escape(row.id), escape(row.source)),
                *(f"{row.predicted_gib:.1f} GiB", f"{row.printed_gib:.1f} GiB"),
                *(f"{100 * row.error:.1f} %", escape("; ".join(row.assumptions))),
            )
        show_table(out, "ran, and would not fit", table)
    out.print(
        f"\nof {counted(scores.num_ran, 'run')} {scores.num_beyond:,} would not fit by more than "
        f"{percent(FIT_BAR)}; of {scores.num_chosen:,} recompute is not printed, and the least "
        "that fits was taken",
        markup=False,
    )
    for reason, count in scores.skipped.items():
        out.print(f"skipped {counted(count, 'row')}: {reason}", markup=False)


def show_memory(out: Console, title: str, report: MemoryReport) -> None:
    """Print the memory of one layout: parts of every stage, what is left, what would make it fit.

    Args:
        out: Where to.
        title: Model, layout and device, in words.
        report: Of the layout.
    """
    out.print(title, style="bold", markup=False)
    out.print(_stages_table(report.stages))
    has = f"{format_bytes(report.capacity_bytes)} a GPU"
    left = format_bytes(abs(report.headroom_bytes))
    fits = report.headroom_bytes >= 0
    out.print(f"\nfits: {left} of {has} left" if fits else f"\ndoes not fit: {left} over {has}")
    if (host := report.host) is not None:
        out.print(
            f"offload: {format_bytes(host.bytes_per_step)} a step between GPU and host; hidden by "
            f"a link of {format_rate(host.needed_bytes_per_s, 'B/s')}, this one has "
            f"{format_rate(host.link_bytes_per_s, 'B/s')}: "
            f"{format_seconds(host.exposed_s)} exposed",
            markup=False,
        )
    if not fits:
        _show_changes(out, report)
    for note in report.notes:
        out.print(f"- {note}", markup=False)


def _show_changes(out: Console, report: MemoryReport) -> None:
    if not report.changes:
        out.print("neither one change nor two that were tried make it fit; try more GPUs")
        return
    table = new_table("change", "peak>", "saves>", "sends>", "step>")
    for change in report.changes:
        sign = "-" if change.sent_bytes < 0 else "+"
        table.add_row(
            escape(change.what),
            format_bytes(change.peak_bytes),
            format_bytes(change.saved_bytes),
            f"{sign}{format_bytes(abs(change.sent_bytes))}",
            "?" if change.slower_by is None else f"{100 * change.slower_by:+.1f} %",
        )
    show_table(out, "changes that make it fit, the smallest first", table)


def show_experts(
    out: Console,
    title: str,
    strategies: Iterable[Strategy],
    dispatch: Iterable[Exits],
    pays: BreakEven | None,
) -> None:
    """Print what each way to live with an expert load costs, where its bytes go, when copies pay.

    Args:
        out: Where to.
        title: Of which layer and ranks.
        strategies: What to compare.
        dispatch: Of one micro-batch, forward, per level.
        pays: Rows from which on a copy of an expert pays; None for one rank.
    """
    is_wide = out.width >= _WIDE
    columns = ["what|", "time>", "exchanges>", "experts>", "through the hottest link>"]
    table = new_table(*columns, "hottest : mean>", "dropped>", "basis", is_wide=is_wide)
    for one in strategies:
        table.add_row(
            one.name,
            format_seconds(one.total_s),
            format_seconds(one.exchange_s),
            format_seconds(one.compute_s),
            format_bytes(one.exchange_bytes),
            f"{one.skew:.2f}",
            f"{100 * one.dropped:.1f} %" if one.dropped else "",
            one.basis,
        )
    show_table(out, title, table)
    levels = new_table("level", "into the busiest unit>", "into the mean>", "at least>")
    for one_level in dispatch:
        busiest, mean = one_level.into_bytes.max(), one_level.into_bytes.mean()
        sizes = (format_bytes(float(size)) for size in (busiest, mean))
        levels.add_row(escape(one_level.level), *sizes, format_seconds(one_level.seconds))
    show_table(out, "one dispatch by all_to_all, over each level", levels)
    if pays is not None:
        out.print(
            f"\nthe hottest rank receives {pays.hottest_rows:,.0f} rows from others; a copy of an "
            f"expert moves fewer bytes from {pays.bytes_rows:,.0f} on, and travels faster than "
            f"they are computed from {pays.compute_rows:,.0f} on"
        )


def show_compression(
    out: Console, title: str, levels: Sequence[str], found: Sequence[Compared]
) -> None:
    """Print what lossy all_reduces take beside the exact one, why not, and what would run them.

    Args:
        out: Where to.
        title: Of which buffer and ranks.
        levels: Names, as bytes are listed.
        found: Of one size, the exact one first.
    """
    is_wide = out.width >= _WIDE
    columns = ["scheme|", "form|", "time>", "kernels>", *(f"{escape(name)}>" for name in levels)]
    columns += ["gain>", *(("why not",) if is_wide else ())]
    table = new_table(*columns, is_wide=is_wide)
    for one in found:
        row = (
            str(one.scheme),
            one.form,
            format_seconds(float(one.seconds[0])),
            format_seconds(float(one.kernel_s[0])),
            *(format_bytes(float(sent[0])) for sent in one.sent_bytes),
            f"{one.gain[0]:.2f}",
            why_not(found, one),
        )
        table.add_row(*row[: len(columns)])
    show_table(out, title, table)
    for one in () if is_wide else found:
        if reason := why_not(found, one):
            out.print(f"{one.scheme} {one.form}: {reason}", markup=False)
    out.print(
        f"\n{BASIS}; bytes are what a rank sends over each level. Every scheme but exact changes "
        "the gradients, and no plan holds one. What would run them:"
    )
    kinds = dict.fromkeys(one.scheme.kind for one in found)
    for kind in (kind for kind in kinds if kind in NEEDS):
        out.print(f"  {kind}: {NEEDS[kind]}", markup=False)


def show_collectives(
    out: Console, fabric: Fabric, group: Group, comparisons: Iterable[Comparison]
) -> None:
    """Print what every way to run each operation takes by size, and why others cannot run.

    Args:
        out: Where to.
        fabric: Levels and library.
        group: Who takes part, one row.
        comparisons: Of the operations.
    """
    library, stride = fabric.library.upper(), int(group.stride[0])
    levels = ", ".join(
        f"{level.name} {members[0]:,}" + (f" ({level.path})" if level.path != "peer" else "")
        for level, members in zip(fabric.levels, group.members, strict=True)
    )
    out.print(
        f"{int(group.degree[0]):,} ranks of {fabric.topology}"
        + (f", {stride:,} apart" if stride > 1 else "")
        + f"; ranks of the group in a unit of each level: {levels}",
        style="bold",
        markup=False,
    )
    listed = [one for one in comparisons if one.ways]
    for one in listed:
        if not one.sizes[0].prices:
            out.print(f"\n{one.op}", style="bold", markup=False)
        else:
            for at in range(0, len(one.sizes), _SIZES_A_TABLE):
                show_table(out, one.op, _comparison_table(one, at, library))
        _show_words(out, one, library)
    if any(one.sizes[0].prices for one in listed):
        calls = f"{library}'s calls and those of our executor"
        if listed[0].framework != "executor":
            calls = f"{library}'s own calls; --framework executor adds those of our executor"
        out.print(f"\n* the cheapest of what a plan can hold: {calls}", markup=False)


def _comparison_table(one: Comparison, start: int, library: str) -> Table:
    """Return the table of some sizes, from the one numbered ``start`` on."""
    some = slice(start, start + _SIZES_A_TABLE)
    sizes, titles = one.sizes[some], _told_apart([at.size_bytes for at in one.sizes])[some]
    table = new_table("method|", *(f"{title}>" for title in titles), "basis")
    by_method = zip(*(at.prices for at in sizes), strict=True)
    run_by = {way.method: way.run_by for way in one.ways}
    for prices in by_method:
        name = prices[0].method
        cells = (
            format_seconds(price.seconds) + ("*" if at.cheapest == name else "")
            for at, price in zip(sizes, prices, strict=True)
        )
        is_told = run_by[name] == "library" or (run_by[name] == "executor" and ")" in name)
        by = "" if is_told else f" [{run_by[name]}]"
        bases = dict.fromkeys(price.basis for price in prices)
        table.add_row(escape(name + by), *cells, ", ".join(bases))
    bounds = (f"{100 * at.bound_s / at.cheapest_s:.0f} %" for at in sizes)
    rows = {
        "next takes longer by": [_slower(at.margin) for at in sizes],
        f"{library} takes": [at.library_default or "" for at in sizes],
        "which takes longer by": [_slower(at.default_loses) for at in sizes],
        "cheapest, of bound": list(bounds),
    }
    for title, values in rows.items():
        if any(values):
            table.add_row(title, *values, "")
    return table


def _told_apart(sizes: Sequence[int]) -> list[str]:
    """Return sizes for people; those that round alike byte by byte.

    >>> _told_apart([1024, 2**30 - 1, 2**30])
    ['1.02 kB', '1,073,741,823 B', '1,073,741,824 B']
    """
    rounded = [format_bytes(size) for size in sizes]
    return [
        f"{size:,} B" if rounded.count(title) > 1 else title
        for size, title in zip(sizes, rounded, strict=True)
    ]


def _show_words(out: Console, one: Comparison, library: str) -> None:
    """Print what a table of seconds cannot say: thresholds, conditions, reasons."""
    priced = [price.method for price in one.sizes[0].prices]
    steps = [
        f"{Method(step.algorithm, step.path)} "
        + ("above" if step.up_to_bytes is None else f"to {format_bytes(step.up_to_bytes)}")
        for step in one.thresholds
    ]
    if priced and (len(steps) > 1 or one.sizes[0].cheapest not in priced):
        out.print(f"cheapest: {', '.join(steps)}", markup=False)
    for way in one.ways:
        if not way.why_not and way.since:
            out.print(f"{way.method}: {library} {way.since} and later", markup=False)
    others = [way for way in one.ways if not way.why_not and way.run_by == "others"]
    for why in dict.fromkeys(way.why for way in others):
        methods = ", ".join(way.method for way in others if way.why == why)
        out.print(
            f"{methods} [others]: in no plan, and their own limits in size and ranks are not "
            f"checked: {why}",
            markup=False,
        )
    for reason in dict.fromkeys(way.why_not for way in one.ways if way.why_not):
        methods = ", ".join(way.method for way in one.ways if way.why_not == reason)
        out.print(f"not {methods}: {reason}", markup=False)


def _slower(share: float | None) -> str:
    """Return how much longer, as ``+18 %``; empty where that is not known."""
    return "" if share is None else f"{100 * share:+.0f} %".replace("+0 %", "0 %")


def _time_table(plan: Plan) -> Table:
    table = new_table("part", "time>", "share>", "")
    for part in time_parts(plan):
        share = f"{100 * part.share:.1f} %"
        table.add_row(part.label, format_seconds(part.amount), share, _bar(part))
    return table


def _show_memory_of(out: Console, plan: Plan) -> None:
    """Print what fills a rank, of a pipeline that of every stage, and what is left."""
    stage = peak_stage(plan)
    if len(plan.memory) == 1:
        show_table(out, "memory of a rank", _memory_table(stage))
    else:
        show_table(out, "memory of a rank, by stage", _stages_table(plan.memory))
    left = stage.capacity_bytes - stage.total_bytes
    out.print(f"{format_bytes(left)} of {format_bytes(stage.capacity_bytes)} left", markup=False)


def _stages_table(stages: Sequence[StageMemory]) -> Table:
    """Return parts by pipeline stage, the fullest marked."""
    fullest = max(stages, key=lambda stage: stage.total_bytes)
    table = new_table("part|", *(f"stage {stage.pp_rank}>" for stage in stages))
    for name in type(fullest.parts).model_fields:
        sizes = [getattr(stage.parts, name) for stage in stages]
        if any(sizes):
            label = name.removesuffix("_bytes").replace("_", " ")
            table.add_row(label, *(format_bytes(size) if size else "" for size in sizes))
    table.add_row("total", *(format_bytes(stage.total_bytes) for stage in stages))
    if len(stages) > 1:
        table.add_row("", *("fullest" if stage is fullest else "" for stage in stages))
    return table


def _memory_table(stage: StageMemory) -> Table:
    table = new_table("part", "size>", "")
    for part in memory_parts(stage):
        table.add_row(part.label, format_bytes(part.amount), _bar(part))
    total = f"{format_bytes(stage.total_bytes)} of {format_bytes(stage.capacity_bytes)}"
    table.add_row("total", total, "")
    return table


def _bar(part: Part) -> str:
    return "#" * round(_BAR_WIDTH * part.share)


def _show_collectives(out: Console, plan: Plan) -> None:
    """Print the calls; where there is no room for runners-up and remarks, those below them."""
    is_wide = out.width >= _WIDE
    show_table(out, "collectives, each alone", _collectives_table(plan, is_wide=is_wide))
    for choice in () if is_wide else plan.collectives:
        next_best = "" if choice.runner_up is None else f"runner-up {_runner_up(choice)}"
        if words := ", ".join(filter(None, (next_best, _remarks(choice)))):
            out.print(f"{choice.axis} {choice.op}: {words}", markup=False)


def _collectives_table(plan: Plan, *, is_wide: bool) -> Table:
    columns = [
        *("axis|", "operation|", "ranks>", "size>", "algorithm|", "time>", "of bound>"),
        *(("runner-up|", "") if is_wide else ()),
    ]
    table = new_table(*columns, is_wide=is_wide)
    for choice in plan.collectives:
        row = (
            choice.axis,
            choice.op,
            str(choice.group_size),
            format_bytes(choice.size_bytes),
            str(Method(choice.algorithm, choice.path)),
            format_seconds(choice.predicted_s),
            closeness(choice),
            _runner_up(choice),
            _remarks(choice),
        )
        table.add_row(*row[: len(columns)])
    return table


def _remarks(choice: CollectiveChoice) -> str:
    """Return what the library would take and lose by itself, and what the time rests on."""
    found = []
    default, its_s = choice.library_default, choice.library_default_s
    if default and its_s and (choice.algorithm, choice.path) != Method(default):
        found.append(f"library takes {default}: {_slower(its_s / choice.predicted_s - 1)}")
    if choice.basis != "modelled":
        found.append(choice.basis)
    return ", ".join(found)


def _runner_up(choice: CollectiveChoice) -> str:
    if choice.runner_up is None or choice.runner_up_s is None:
        return "none"
    method = Method(choice.runner_up, choice.runner_up_path)
    return f"{method} ({format_seconds(choice.runner_up_s)})"


def _show_crossings(out: Console, plan: Plan) -> None:
    """Print which axis crosses which level: one row an axis, one column a level."""
    sent = traffic(plan)
    table = new_table("axis|", *(f"{escape(level)}>" for level in sent.levels))
    for axis, sizes in sent.axes.items():
        table.add_row(axis, *("" if size is None else format_bytes(size) for size in sizes))
    if sent.levels:
        show_table(out, "sent by a rank in a step, over each level", table)


def _show_placements(out: Console, plan: Plan) -> None:
    """Print what could be done about weak nodes, and what waiting would gain."""
    is_wide = out.width >= _WIDE
    hosts = ("left out|", "in their place|") if is_wide else ("left out", "in their place")
    table = new_table("nodes|", "count>", *hosts, "step>", "", is_wide=is_wide)
    for option in plan.placements:
        table.add_row(
            option.choice,
            f"{option.num_nodes:,}",
            escape(some_of(option.left_out)),
            escape(some_of(option.added)),
            "no layout" if option.step_time_s is None else format_seconds(option.step_time_s),
            "chosen" if option.is_chosen else "",
        )
    if plan.placements:
        show_table(out, "which nodes: keep those asked for, drop some, or move", table)
    if plan.waiting is not None:
        out.print(f"\n{waiting(plan.waiting)}", markup=False)


def _show_runners_up(out: Console, plan: Plan) -> None:
    """Print the runners-up; where there is no room for a column of reasons, those below them."""
    is_wide = out.width >= _WIDE
    columns = [
        *("layout|" if is_wide else "layout", "micro-batch>", "recompute|"),
        *("ZeRO>", "step>", "slower>", "memory>"),
        *(("why",) if is_wide else ()),
    ]
    table = new_table(*columns, is_wide=is_wide)
    for other in plan.runners_up:
        row = (
            ordered(other.layout, other.order),
            str(other.micro_batch_size),
            other.recompute_label(),
            str(other.zero_stage),
            format_seconds(other.step_time_s),
            f"{100 * other.slower_by:.1f} %",
            format_bytes(other.peak_memory_bytes),
            escape(other.why),
        )
        table.add_row(*row[: len(columns)])
    show_table(out, "runners-up", table)
    if not is_wide:
        for other in plan.runners_up:
            out.print(f"{ordered(other.layout, other.order)}: {other.why}", markup=False)


def show_table(out: Console, title: str, table: Table) -> None:
    """Print a table under its title."""
    out.print(f"\n{title}", style="bold", markup=False)
    out.print(table)


def _show_launch(out: Console, plan: Plan, plan_source: str) -> None:
    """Print the launch line so that it can be copied: it breaks at arguments, with a backslash."""
    out.print("\nrun it", style="bold", markup=False)
    lines: list[str] = []
    for word in _arguments(launch_command(plan, plan_source)):
        if lines and len(lines[-1]) + len(word) + 3 <= out.width:
            lines[-1] += f" {word}"
        else:
            lines.append(f"  {word}" if lines else word)
    out.print(" \\\n".join(lines), markup=False, soft_wrap=True)
    for note in launch_notes(plan):
        out.print(f"# {note}", markup=False, soft_wrap=True)


def _arguments(command: str) -> list[str]:
    """Return a command in pieces that stay on one line: an option and its values."""
    return re.split(r" (?=--)", command)


def _tree(line: Line) -> Tree:
    tree = Tree(escape(line.text))
    for below in line.below:
        tree.children.append(_tree(below))
    return tree


def _show_assumptions(out: Console, assumptions: Iterable[str]) -> None:
    for assumption in assumptions:
        out.print(f"assumed: {assumption}", markup=False)


def new_table(*columns: str, is_wide: bool = True) -> Table:
    """Return an empty table, its columns closer to each other where there is little room.

    A name that ends in ``>`` heads numbers, aligned right, one that ends in ``|`` names; neither
    is broken over lines.
    """
    table = Table(box=None, pad_edge=False, collapse_padding=not is_wide)
    for column in columns:
        table.add_column(
            column.rstrip(">|"),
            justify="right" if column.endswith(">") else "left",
            no_wrap=column.endswith((">", "|")),
            overflow="fold",
        )
    return table
