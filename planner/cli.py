"""``commplan``: plan, look at topologies and models, calibrate, serve.

Documents go to stdout (``--json``), tables for people too; messages go to stderr. Exit status 0,
1 when nothing fits, 2 for bad input. The only file under ``planner/`` that reads files a user
names, reads the environment and prints.
"""

import contextlib
import json
import logging
import os
import re
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn, TypeVar, cast, get_args

import numpy as np
import typer
from pydantic import BaseModel
from rich.console import Console
from rich.text import Text

from planner import __version__
from planner.calibrate.apply import calibrated_fabric
from planner.cost.comparison import (
    SIZES_BYTES,
    check_algorithms,
    compare_methods,
    comparison_document,
)
from planner.cost.compression import (
    BASIS,
    compare,
    default_schemes,
    parse_scheme,
    ranks_group,
    why_not,
)
from planner.cost.defaults import library_methods
from planner.cost.expert_load import parse_counts
from planner.cost.expert_strategies import (
    break_even,
    compare_strategies,
    dispatch_exits,
    expert_row,
)
from planner.cost.problem import Problem
from planner.documents import parse_json, validated
from planner.errors import InfeasiblePlanError, InvalidInputError, PlannerError, UnknownNameError
from planner.hardware.devices import device as bundled_device
from planner.hardware.devices import device_names, device_of
from planner.hardware.gpus import gpu_model
from planner.hardware.kernel_tables import KernelOp
from planner.hardware.protocols import protocols_by_key
from planner.model.bundled import load_model, model_names
from planner.model.huggingface import model_from_config
from planner.model.spec import ModelSpec
from planner.plan import (
    Calibration,
    CalibrationRun,
    Collective,
    Framework,
    MeasuredCurve,
    Plan,
    TrainingSpec,
    document_hash,
)
from planner.planning import make_plan
from planner.request import Constraints, PlanRequest
from planner.resolving import build_problem, resolve, slowest_device
from planner.reviewing import LAYOUT_FIELDS, layout_problem, layout_title
from planner.run_tables import show_run_scores
from planner.search.nearby import memory_report
from planner.tables import (
    show_collectives,
    show_compression,
    show_degraded,
    show_device,
    show_devices,
    show_experts,
    show_fabric,
    show_kernel_scores,
    show_memory,
    show_memory_scores,
    show_model,
    show_models,
    show_plan,
    show_scores,
    show_topologies,
)
from planner.topology.bundled import load_topology, topology_names
from planner.topology.compile import compile_fabric, first_nodes, live_nodes
from planner.topology.document import TopologyDocument
from planner.topology.drawing.cluster import draw_svg
from planner.topology.impair import degraded, parse_impairments
from planner.units import counted, format_bytes, parse_bytes
from planner.validate.collectives import predict, predictions_csv
from planner.validate.kernels import (
    kernel_predictions_csv,
    predict_kernels,
    read_kernels,
    score_kernels,
)
from planner.validate.memory import memory_csv, predict_memory, score_memory
from planner.validate.published import read_runs, run_of
from planner.validate.rows import read_rows, without_outcomes
from planner.validate.run_scores import score_runs
from planner.validate.runs import predict_runs, runs_csv
from planner.validate.scores import score

__all__ = ["app", "main"]

EXIT_INFEASIBLE: Final = 1
EXIT_BAD_INPUT: Final = 2
# Open requests get this long when the service is told to end.
_GRACE_S: Final = 5

DocumentT = TypeVar("DocumentT", bound=BaseModel)
ValueT = TypeVar("ValueT")

# Control characters but tab and newline, and what turns the direction of writing.
_STEERING: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

# As ``parse_bytes`` reads them.
_SIZE_FORMS: Final = "as 1048576, 1M or 1MB"
_PER_LOG: Final = "once for all logs, or for each in their order"
# Width of tables where no terminal says its own.
_PIPE_WIDTH: Final = 140
# The runs of thousands of ranks have tens of megabytes; a device such as /dev/zero never ends.
_MAX_FILE_BYTES: Final = 256_000_000

app = typer.Typer(
    name="commplan",
    help="Which layout and which collectives for a training job, how fast, and why not the others.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
topology_app = typer.Typer(help="Clusters that come with commplan.", no_args_is_help=True)
model_app = typer.Typer(help="Models that come with commplan.", no_args_is_help=True)
app.add_typer(topology_app, name="topology")
app.add_typer(model_app, name="model")
validate_app = typer.Typer(help="Predictions against published measurements.", no_args_is_help=True)
app.add_typer(validate_app, name="validate")
device_app = typer.Typer(help="Devices whose kernels are known.", no_args_is_help=True)
app.add_typer(device_app, name="device")

TrainingFields = Annotated[
    list[str] | None,
    typer.Option(
        "--training",
        "-T",
        help="A field of the training, as launch=cuda_graph or offload=optimizer+activations; "
        f"repeatable. Fields: {', '.join(TrainingSpec.model_fields)}.",
    ),
]
JsonFlag = Annotated[bool, typer.Option("--json", help="The document, and nothing else.")]
Topology = Annotated[
    str | None, typer.Option("--topology", "-t", help="Bundled name, or a JSON file.")
]
Nodes = Annotated[int | None, typer.Option("--nodes", "-n", help="Default: the topology's own.")]
Model = Annotated[
    str | None, typer.Option("--model", "-m", help="Bundled name, or a JSON file (config.json).")
]
RequestFile = Annotated[
    str | None,
    typer.Option("--request", "-r", help="File with the body of POST /plan; - is stdin."),
]
ExpertCounts = Annotated[
    str | None,
    typer.Option(help="CSV or JSON file with the tokens that each expert received."),
]
ExpertZipf = Annotated[
    float | None, typer.Option(help="The i-th popular expert receives 1/i**this; 0 is even.")
]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the document here.")]


def main() -> NoReturn:
    """Run the command line; the one place where errors become messages and exit codes."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # started with the stream closed
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # for the whole run
    try:
        app()
    except InfeasiblePlanError as exc:
        _complain(exc)
        sys.exit(EXIT_INFEASIBLE)
    except PlannerError as exc:
        _complain(exc)
        sys.exit(EXIT_BAD_INPUT)
    except OSError as exc:  # a full disk, a closed stream
        _say(f"cannot write: {exc.strerror or exc}")
        os._exit(EXIT_BAD_INPUT)  # the interpreter would try to flush once more, and complain
    sys.exit(0)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"commplan {__version__}")
        raise typer.Exit


@app.callback()
def common(
    show_version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Show and leave."),
    ] = False,
) -> None:
    """Plan the communication of distributed training."""
    logging.basicConfig(stream=sys.stderr, format="commplan: %(message)s")


# ------------------------------------------------------------------------------------- plan


@app.command()
def plan(
    *,
    topology: Topology = None,
    nodes: Nodes = None,
    model: Model = None,
    global_batch: Annotated[
        int | None, typer.Option("--global-batch", "-b", help="Sequences per step.")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", "-s", help="Tokens per sequence.")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="bf16, fp16, fp8, mxfp8, nvfp4, fp32 or fp64; default bf16.")
    ] = None,
    optimizer: Annotated[str | None, typer.Option(help="adamw or sgd; default adamw.")] = None,
    framework: Annotated[
        str | None, typer.Option(help="What will run it: megatron or executor; default megatron.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Runners-up to list; default 5.")] = None,
    constraint: Annotated[
        list[str] | None,
        typer.Option(
            "--constraint",
            "-c",
            help="Hold a field fixed, as tp=8; repeatable. Fields: "
            f"{', '.join(Constraints.model_fields)}.",
        ),
    ] = None,
    calibration: Annotated[
        str, typer.Option(help="File that 'commplan calibrate' wrote, or none.")
    ] = "none",
    nodelist: Annotated[
        str | None,
        typer.Option(help='Nodes to plan for, as Slurm lists them: "$SLURM_JOB_NODELIST".'),
    ] = None,
    expert_counts: ExpertCounts = None,
    expert_zipf: ExpertZipf = None,
    packing: Annotated[
        str | None,
        typer.Option(help='JSON file with the documents in a sequence: {"lengths", "counts"}.'),
    ] = None,
    training: TrainingFields = None,
    request: RequestFile = None,
    as_json: JsonFlag = False,
    output: Output = None,
) -> None:
    """Find the best plan. What is given here overrides the file given with --request."""
    fields = _request_fields(
        request,
        topology=topology,
        nodes=nodes,
        model=model,
        allocation=None if nodelist is None else _hosts(nodelist),
        framework=framework,
        top_k=top_k,
        training={
            "global_batch_size": global_batch,
            "seq_len": seq_len,
            "precision": precision,
            "optimizer": optimizer,
            "expert_load": _expert_load(expert_counts, expert_zipf),
            "packing": None if packing is None else _read_json(packing),
            **_training_fields(training),
        },
        constraints=_distinct(map(_constraint, constraint or []), "--constraint"),
    )
    if nodelist is not None and nodes is None:
        fields.pop("nodes", None)  # of the file: as many as the list names
    elif nodes is not None and nodelist is None:
        fields.pop("allocation", None)
    constants = None if calibration == "none" else _read(Calibration, calibration)
    fields["calibration"] = constants.id if constants else "none"
    resolved = resolve(validated(PlanRequest, fields))
    if constants is not None:
        from planner.calibrate.runs import check_calibration  # scipy doubles the start

        check_calibration(constants, resolved.topology.name)
    found = make_plan(resolved, constants)
    _write(output, found.model_dump_json(indent=2))
    if as_json:
        _print(found.model_dump_json(indent=2))
    else:
        show_plan(_console(), found, str(output or "plan.json"))


def _request_fields(request: str | None, **given: Any) -> dict[str, Any]:
    """Return the fields of a PlanRequest: those of the file, overridden by what is given."""
    fields = {} if request is None else _read_json(request)
    if not isinstance(fields, dict):
        raise InvalidInputError(f"{request}: need a JSON object, the body of POST /plan")
    for name, value in given.items():
        if isinstance(value, dict):
            below = fields.get(name) or {}
            known = {key: item for key, item in value.items() if item is not None}
            if known and isinstance(below, dict):
                fields[name] = {**below, **known}
            fields.setdefault(name, {})
        elif value is not None:
            fields[name] = value
    for name, read in (("topology", _topology_field), ("model", _model_field)):
        if isinstance(fields.get(name), str):
            fields[name] = read(fields[name])
    return fields


def _expert_load(counts: str | None, zipf: float | None) -> dict[str, Any] | None:
    given: dict[str, Any] = {} if zipf is None else {"zipf": zipf}
    if counts is not None:
        given["counts"] = parse_counts(_read_bytes(counts), source=counts)
    return given or None


def _hosts(nodelist: str) -> list[str]:
    from planner.topology.importers.hostlist import expand  # only those who have a list need it

    return expand(nodelist, source="--nodelist")


def _topology_field(name: str) -> Any:
    """Return the document in a file, or a bundled name as it is."""
    return _read_json(name) if _is_file_name(name) else name


def _model_field(name: str) -> Any:
    """Return the spec or the Hugging Face config in a file, or a bundled name as it is."""
    if not _is_file_name(name):
        return name
    document = _read_json(name)
    if isinstance(document, dict) and "attention" not in document:
        path = Path(name).absolute()
        is_in_repository = path.name == "config.json"
        return {
            "huggingface": document,
            "name": path.parent.name if is_in_repository else path.stem,
        }
    return document


def _constraint(text: str) -> tuple[str, Any]:
    """Return ``tp=8`` as ("tp", 8)."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals:
        raise InvalidInputError(
            f"--constraint {text!r}: need FIELD=VALUE, for example tp=8", where="constraints"
        )
    if name not in Constraints.model_fields:
        raise InvalidInputError(
            f"constraints.{name} is not a known field; there are "
            f"{', '.join(Constraints.model_fields)}",
            where=f"constraints.{name}",
        )
    return name, _value(value)


def _assignment(text: str, option: str, known: Iterable[str]) -> tuple[str, Any]:
    """Return ``tp=8`` as ("tp", 8), where ``option`` knows a field of that name."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or name not in known:
        raise InvalidInputError(
            f"{option} {text!r}: need FIELD=VALUE with a FIELD of {', '.join(known)}", where=option
        )
    return name, _value(value)


def _training_fields(given: list[str] | None) -> dict[str, Any]:
    """Return fields of the training; of those that list words, one word is the only one."""
    known = TrainingSpec.model_fields
    fields = _distinct((_assignment(t, "--training", known) for t in given or []), "--training")
    listed = ("offload", "no_overlap")
    return {
        name: [value] if name in listed and isinstance(value, str) else value
        for name, value in fields.items()
    }


def _distinct(given: Iterable[tuple[str, Any]], option: str) -> dict[str, Any]:
    """Return the fields, none of which may be given twice."""
    fields: dict[str, Any] = {}
    for name, value in given:
        if name in fields:
            raise InvalidInputError(
                f"{option}: {name} is given twice, {fields[name]} and {value}; keep one",
                where=option,
            )
        fields[name] = value
    return fields


def _value(text: str) -> Any:
    """Return the number or word, or the words that ``+`` joins."""
    try:
        return json.loads(text)
    except ValueError:
        return text.split("+") if "+" in text else text


@app.command()
def moe(
    model: Annotated[str, typer.Argument(help="Bundled name, or a JSON file (config.json).")],
    topology: Annotated[str, typer.Argument(help="Bundled name, or a JSON file.")],
    *,
    ep: Annotated[int, typer.Option(min=1, help="Expert-parallel ranks, consecutive ones.")],
    tokens: Annotated[int, typer.Option(help="Of a micro-batch on one rank.")] = 4096,
    counts: ExpertCounts = None,
    zipf: ExpertZipf = None,
    precision: Annotated[str, typer.Option(help="As of plan.")] = "bf16",
    as_json: JsonFlag = False,
) -> None:
    """Compare what can be done about uneven experts: one layer, forward and backward."""
    field = _topology_field(topology)
    document = (
        load_topology(field) if isinstance(field, str) else validated(TopologyDocument, field)
    )
    fields = {
        "topology": document.model_dump(mode="json"),
        "nodes": min(-(-ep // document.gpus_per_node), document.max_nodes),
        "model": _model_field(model),
        "training": {
            "global_batch_size": ep,
            "seq_len": tokens,
            "precision": precision,
            "expert_load": _expert_load(counts, zipf),
        },
    }
    problem = build_problem(resolve(validated(PlanRequest, fields)))
    row = expert_row(problem, ep)
    found, pays = compare_strategies(problem, row), break_even(problem, row)
    dispatch = dispatch_exits(problem, row)
    if as_json:
        document_of = {
            "strategies": [{**asdict(one), "total_s": one.total_s} for one in found],
            "dispatch": [
                {
                    "level": one.level,
                    "out_bytes": one.out_bytes.tolist(),
                    "into_bytes": one.into_bytes.tolist(),
                    "bound_s": one.seconds,
                }
                for one in dispatch
            ],
            "break_even": None if pays is None else asdict(pays),
        }
        _print(json.dumps(document_of, indent=2))
    else:
        title = f"one layer of {problem.model.name}, {tokens:,} tokens on each of {ep} ranks of "
        title += f"{document.name}, forward and backward"
        show_experts(_console(), title, found, dispatch, pays)


@app.command()
def compress(
    topology: Annotated[str, typer.Argument(help="Bundled name, or a JSON file.")],
    *,
    size: Annotated[str, typer.Option(help=f"Bytes of the buffer on one rank, {_SIZE_FORMS}.")],
    ranks: Annotated[int | None, typer.Option(min=2, help="Who reduces; default: all.")] = None,
    stride: Annotated[int, typer.Option(min=1, help="From one to the next, as tp does.")] = 1,
    nodes: Nodes = None,
    precision: Annotated[str, typer.Option(help="Of the buffer: fp32 or bf16.")] = "fp32",
    scheme: Annotated[
        list[str] | None,
        typer.Option(help="As bf16, int8, top_k=0.01, power_sgd=4; repeatable; default: all."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare an exact all_reduce with lossy ones. Modelled, not validated; plans have none."""
    field = _topology_field(topology)
    document = (
        load_topology(field) if isinstance(field, str) else validated(TopologyDocument, field)
    )
    if nodes is None and ranks is not None:
        nodes = -(-ranks * stride // document.gpus_per_node)
    fabric, size_bytes = compile_fabric(document, nodes), _bytes(size)
    ranks = fabric.num_gpus // stride if ranks is None else ranks
    lossy = default_schemes(precision) if scheme is None else [parse_scheme(one) for one in scheme]
    found = compare(
        fabric,
        slowest_device(document, first_nodes(document, nodes)),
        ranks_group(fabric, ranks, stride),
        np.array([size_bytes]),
        lossy,
        precision=precision,
    )
    levels = [level.name for level in fabric.levels]
    if as_json:
        rows = [
            {
                "scheme": str(one.scheme),
                "form": one.form,
                "seconds": float(one.seconds[0]),
                "kernel_s": float(one.kernel_s[0]),
                "sent_bytes": dict(zip(levels, np.ravel(one.sent_bytes).tolist(), strict=True)),
                "gain": float(one.gain[0]),
                "why_not": why_not(found, one),
            }
            for one in found
        ]
        _print(json.dumps({"basis": BASIS, "schemes": rows}, indent=2))
    else:
        title = f"all_reduce of {format_bytes(size_bytes)} of {precision} on {ranks:,} ranks of "
        title += f"{document.name}" + (f", {stride} apart" if stride > 1 else "")
        show_compression(_console(), title, levels, found)


@app.command()
def collectives(
    topology: Annotated[str, typer.Argument(help="Bundled name, or a JSON file.")],
    *,
    nodes: Nodes = None,
    op: Annotated[str | None, typer.Option(help="As all_reduce; default: all.")] = None,
    ranks: Annotated[int | None, typer.Option(help="Of the group; default: all.")] = None,
    stride: Annotated[int, typer.Option(help="From one rank to the next.")] = 1,
    size: Annotated[
        list[str] | None,
        typer.Option(help=f"Bytes as nccl-tests counts them, {_SIZE_FORMS}; repeatable."),
    ] = None,
    algorithm: Annotated[list[str] | None, typer.Option(help="To list; repeatable.")] = None,
    framework: Annotated[
        str | None,
        typer.Option(
            help="Whose calls: megatron, the library's own; executor, ours too. Default: the "
            "library's, but ours too on gloo."
        ),
    ] = None,
    calibration: Annotated[
        str, typer.Option(help="File that 'commplan calibrate' wrote, or none.")
    ] = "none",
    as_json: JsonFlag = False,
) -> None:
    """Compare every way to run collectives on one group, and say why not the others."""
    field = _topology_field(topology)
    document = (
        load_topology(field) if isinstance(field, str) else validated(TopologyDocument, field)
    )
    if op is not None and op not in get_args(Collective):
        raise UnknownNameError("operation", op, get_args(Collective))
    if framework is None:
        framework = "executor" if document.library == "gloo" else "megatron"
    if framework not in get_args(Framework):
        raise UnknownNameError("framework", framework, get_args(Framework))
    if nodes is None and ranks is not None:
        asked = max(1, -(-ranks * stride // document.gpus_per_node))
        nodes = min(asked, document.max_nodes)
    fabric = compile_fabric(document, nodes)
    if calibration != "none":
        from planner.calibrate.runs import check_calibration  # scipy doubles the start

        constants = _read(Calibration, calibration)
        check_calibration(constants, document.name)
        fabric = calibrated_fabric(fabric, constants)
    group = ranks_group(
        fabric, fabric.num_gpus // max(stride, 1) if ranks is None else ranks, stride
    )
    sizes = [_bytes(one) for one in size or ()] or SIZES_BYTES
    run = [one for one in get_args(Collective) if library_methods(fabric, one)]
    asked_for, holder = [cast("Collective", op)] if op else run, cast("Framework", framework)
    check_algorithms(fabric, asked_for, algorithm or ())
    found = [
        compare_methods(one, fabric, group, sizes, algorithm or (), holder) for one in asked_for
    ]
    if as_json:
        _print(json.dumps(comparison_document(fabric, group, found), indent=2))
    else:
        show_collectives(_console(), fabric, group, found)


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as exc:
        raise InvalidInputError(f"--size {exc}", where="size") from exc


# ---------------------------------------------------------------------- topologies and models


@device_app.command("list")
def list_devices(*, as_json: JsonFlag = False) -> None:
    """List the bundled devices, and where their kernels' times come from."""
    if as_json:
        _print(json.dumps(device_names()))
    else:
        show_devices(_console(), [bundled_device(name) for name in device_names()])


@device_app.command("show")
def show_one_device(
    name: Annotated[str, typer.Argument(help="Bundled name, or a GPU by any name.")],
    *,
    as_json: JsonFlag = False,
) -> None:
    """Show a device's peaks, the figures of its rooflines, and their sources."""
    found = bundled_device(name) if name in device_names() else device_of(gpu_model(name))
    if as_json:
        _print(json.dumps(asdict(found), indent=2))
    else:
        show_device(_console(), found)


@topology_app.command("list")
def list_topologies(*, as_json: JsonFlag = False) -> None:
    """List the bundled topologies."""
    if as_json:
        _print(json.dumps(topology_names()))
    else:
        show_topologies(_console(), [load_topology(name) for name in topology_names()])


@topology_app.command("show")
def show_topology(
    name: Annotated[str, typer.Argument(help="Bundled name, or a JSON file.")],
    *,
    nodes: Nodes = None,
    svg: Annotated[
        Path | None, typer.Option(help="Write a drawing here instead; - = stdout.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Show a topology, its parts and as the collectives see it; --json gives the document."""
    document = _read(TopologyDocument, name) if _is_file_name(name) else load_topology(name)
    fabric = compile_fabric(document, nodes)
    if svg is not None and as_json:
        raise InvalidInputError("--svg and --json both say what to print; give one", where="svg")
    if as_json:
        _print(document.model_dump_json(indent=2))
    elif svg is not None:
        drawing = draw_svg(document, nodes).rstrip()
        if str(svg) == "-":
            _print(drawing)
        else:
            _write(svg, drawing)
    else:
        show_fabric(_console(), document, fabric, nodes)


@topology_app.command("degrade")
def degrade_topology(
    name: Annotated[str, typer.Argument(help="Bundled name, or a JSON file.")],
    *,
    link: Annotated[
        list[str] | None,
        typer.Option(
            help="A:B=FACTOR: what is left of a link, as n7/nic0:rail0/rail0=0.5; or down."
        ),
    ] = None,
    node: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=FACTOR: a host or GPU that computes slower, a NIC or switch that carries "
            "less, as n7=0.8; or down."
        ),
    ] = None,
    output: Output = None,
) -> None:
    """Write the topology with weak or broken parts; plan on it as on any other.

    Shows the levels of all its nodes that are up, before and after, on stderr.
    """
    before = _read(TopologyDocument, name) if _is_file_name(name) else load_topology(name)
    after = degraded(before, parse_impairments(link or (), node or ()))
    told = _Output(stderr=True, width=_PIPE_WIDTH)
    show_degraded(told, *(compile_fabric(d, live_nodes(d)) for d in (before, after)))
    if output is None:
        _print(after.model_dump_json(indent=2))
    else:
        _write(output, after.model_dump_json(indent=2))


@topology_app.command("import")
def import_from_tools(
    *,
    node: Annotated[
        str,
        typer.Option(
            help="Output of nvidia-smi topo -m, rocm-smi --showtopo or amd-smi topology, NCCL's "
            "topology XML, or lstopo's; - is stdin."
        ),
    ],
    gpu: Annotated[
        str | None, typer.Option(help="Its GPUs, as H100, where the text is silent.")
    ] = None,
    fabric: Annotated[
        str | None,
        typer.Option(help="Slurm's topology.conf or .yaml, or output of ibnetdiscover."),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes", "-n", help="How many there are; with --fabric, how many to plan for."
        ),
    ] = None,
    nic_gbps: Annotated[float | None, typer.Option(help="Rate of one NIC, Gbit/s.")] = None,
    nics: Annotated[
        str | None,
        typer.Option(help="NICs that carry training, as mlx5_0,mlx5_3; else the fastest."),
    ] = None,
    layout: Annotated[str | None, typer.Option(help="rail or tree.")] = None,
    leaf_nodes: Annotated[int | None, typer.Option(help="Nodes under one leaf switch.")] = None,
    oversubscription: Annotated[
        float | None, typer.Option(help="What enters a leaf over what goes up from it.")
    ] = None,
    kind: Annotated[str | None, typer.Option(help="infiniband or ethernet.")] = None,
    gpudirect: Annotated[
        str | None, typer.Option(help="How far NICs read GPU memory: off, pxb or phb.")
    ] = None,
    domain_nodes: Annotated[
        int | None, typer.Option(help="Nodes on the same NVSwitches; 18 in an NVL72.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the topology; default: the file's.")] = None,
    output: Output = None,
) -> None:
    """Write a topology from what the tools of a cluster print.

    What was repaired and what was assumed is said on stderr.
    """
    from planner.topology.importers.cluster import ImportOptions, import_topology  # XML and YAML

    given = {
        "name": name or (Path(node).stem[:120] if node != "-" else None),
        "nodes": nodes,
        "nic_gbps": nic_gbps,
        "nics": [nic.strip() for nic in nics.split(",")] if nics else None,
        "layout": layout,
        "leaf_nodes": leaf_nodes,
        "oversubscription": oversubscription,
        "kind": kind,
        "gpudirect": gpudirect,
        "domain_nodes": domain_nodes,
    }
    if node == fabric == "-":
        raise InvalidInputError("--node and --fabric cannot both be stdin", where="fabric")
    found = import_topology(
        _read_bytes(node),
        node_source="stdin" if node == "-" else Path(node).name,
        gpu=gpu,
        fabric_text=None if fabric is None else _read_bytes(fabric),
        fabric_source="stdin" if fabric in ("-", None) else Path(str(fabric)).name,
        options=validated(
            ImportOptions, {key: value for key, value in given.items() if value is not None}
        ),
    )
    for remark in found.remarks:
        _say(remark)
    for assumption in found.document.assumptions:
        _say(f"assumed: {assumption}")
    document = found.document.model_dump_json(indent=2)
    if output is None:
        _print(document)
    else:
        _write(output, document)
        _say(f"{_counted(found.document)} is in {output}; plan with --topology {output}")


def _counted(document: TopologyDocument) -> str:
    """Return how large a topology is, and how much of it is planned for unless asked."""
    nodes = counted(document.max_nodes, "node")
    size = f"{nodes} of {document.gpus_per_node} x {document.device_name}"
    if document.default_nodes < document.max_nodes:
        size += f" ({document.default_nodes} of them unless --nodes or --nodelist)"
    return f"topology {document.name}, {size},"


@model_app.command("list")
def list_models(*, as_json: JsonFlag = False) -> None:
    """List the bundled models."""
    if as_json:
        _print(json.dumps(model_names()))
    else:
        show_models(_console(), {name: load_model(name) for name in model_names()})


@model_app.command("show")
def show_one_model(
    name: Annotated[str, typer.Argument(help="Bundled name, or a JSON file (config.json).")],
    *,
    as_json: JsonFlag = False,
) -> None:
    """Show a model; --json gives its spec."""
    field = _model_field(name)
    if isinstance(field, str):
        spec = load_model(field)
    elif isinstance(field, dict) and "huggingface" in field:
        spec = model_from_config(field["huggingface"], field["name"])
    else:
        spec = validated(ModelSpec, field, source=name)
    if as_json:
        _print(spec.model_dump_json(indent=2))
    else:
        show_model(_console(), spec)


# -------------------------------------------------------------------------- calibrate and serve


@app.command()
def calibrate(
    runs: Annotated[
        list[str] | None, typer.Argument(help="Files with the timed runs of the plan.")
    ] = None,
    *,
    plan_files: Annotated[
        list[str] | None,
        typer.Option("--plan", "-p", help="The plan that was run; again for another."),
    ] = None,
    nccl_tests: Annotated[
        list[str] | None,
        typer.Option(help="Log or JSON of nccl-tests or rccl-tests; again for another."),
    ] = None,
    op: Annotated[
        list[str] | None,
        typer.Option(help=f"Operation of logs that do not say it, as all_gather; {_PER_LOG}."),
    ] = None,
    ranks: Annotated[
        list[int] | None,
        typer.Option(min=2, help=f"Ranks of logs that do not list them; {_PER_LOG}."),
    ] = None,
    num_nodes: Annotated[
        list[int] | None,
        typer.Option(min=1, help=f"Nodes of logs that do not list ranks; {_PER_LOG}."),
    ] = None,
    topology: Topology = None,
    model: Model = None,
    output: Output = None,
) -> None:
    """Refit the planner's constants from timed runs of plans, or take curves from nccl-tests.

    Plans on a topology or model of your own need its file again.
    """
    from planner.calibrate.measured import with_curves  # scipy doubles the start of others

    runs, logs = runs or [], nccl_tests or []
    _check_sources(runs, plan_files or [], logs, topology)
    result = _fit_runs(runs, plan_files or [], topology, model) if runs else None
    if logs:
        name = topology or str(result and result.topology)
        document = _read(TopologyDocument, name) if _is_file_name(name) else load_topology(name)
        given = [
            _per_log(option, values or [], len(logs))
            for option, values in (("--op", op), ("--ranks", ranks), ("--num-nodes", num_nodes))
        ]
        curves = _read_curves(logs, document, zip(*given, strict=True))
        result = with_curves(result, document.name, curves)
    assert result is not None, "there are runs or logs: _check_sources saw to it"
    text = result.model_dump_json(indent=2)
    if output is None:
        _print(text)
        return
    _write(output, text)
    parts = [counted(len(runs), "run")] if runs else []
    if logs:
        parts.append(f"{counted(len(logs), 'log')} ({counted(len(result.curves), 'curve')})")
    sources = " and ".join(parts)
    _say(f"calibration {result.id} of {result.topology} from {sources} is in {output}")


def _check_sources(
    runs: list[str], plan_files: list[str], logs: list[str], topology: str | None
) -> None:
    """Refuse what cannot be calibrated on."""
    if not runs and not logs and not plan_files:
        raise InvalidInputError(
            "nothing to calibrate on: give files of timed runs and --plan, or --nccl-tests LOG and "
            "--topology",
            where="runs",
        )
    if bool(runs) != bool(plan_files):
        raise InvalidInputError(
            "timed runs need the plan that was run: add --plan FILE"
            if runs
            else "--plan without a timed run of it: add the run's file, or leave --plan out",
            where="plan",
        )
    if not runs and topology is None:
        raise InvalidInputError(
            "--nccl-tests needs the cluster that was measured: add --topology NAME",
            where="topology",
        )


def _fit_runs(
    runs: list[str], plan_files: list[str], topology: str | None, model: str | None
) -> Calibration:
    from planner.calibrate.fit import fit_calibration
    from planner.calibrate.runs import Measured, check_run

    plans = {document_hash(plan): plan for plan in (_read(Plan, name) for name in plan_files)}
    first = next(iter(plans.values()))
    problems = {key: _problem_of(plan, topology, model) for key, plan in plans.items()}
    measured = []
    for name in runs:
        run = _read(CalibrationRun, name)
        key = run.plan_hash if run.plan_hash in plans else document_hash(first)
        measured.append(Measured(problems[key], plans[key], run))
    for one in measured:
        check_run(one)
    return fit_calibration(measured)


def _per_log(option: str, values: Sequence[ValueT], num_logs: int) -> list[ValueT | None]:
    """Return what an option says of each log: nothing, one value for all, or one for each.

    Raises:
        InvalidInputError: There are others.
    """
    if len(values) not in (0, 1, num_logs):
        raise InvalidInputError(
            f"{option} is given {len(values)} times for {counted(num_logs, 'log')}; give it once "
            "for all, or once for each, in the order of the logs",
            where=option.lstrip("-"),
        )
    if len(values) == num_logs:
        return [*values]
    return [values[0] if values else None] * num_logs


def _read_curves(
    logs: list[str], document: TopologyDocument, given: Iterable[tuple[Any, ...]]
) -> tuple[MeasuredCurve, ...]:
    """Return the curves of logs; what was left out of them and what cannot be goes to stderr.

    Args:
        logs: Names of files.
        document: The cluster that was measured.
        given: Operation, ranks and nodes of each log, None where it is not said.
    """
    from planner.calibrate.measured import (
        Given,
        broken_laws,
        check_groups,
        check_machine,
        curves_of,
    )
    from planner.calibrate.nccl_tests import read_log

    beside = [Given(*of_log) for of_log in given]
    for one in beside:
        if one.op is not None and one.op not in get_args(Collective):
            raise InvalidInputError(
                f"--op {one.op!r}: need one of {', '.join(get_args(Collective))}", where="op"
            )
    read = [
        read_log(_read_bytes(name), source="stdin" if name == "-" else Path(name).name)
        for name in logs
    ]
    remarks = [check_machine(log, document) for log in read]
    curves = curves_of(read, beside)
    check_groups(curves, document)
    for log, remark in zip(read, remarks, strict=True):
        for said in (remark, *log.complaints()):
            if said:
                _say(said)
    for curve in curves:
        for sentence in broken_laws(curve, document):
            _say(sentence)
    return curves


def _problem_of(timed: Plan, topology: str | None, model: str | None) -> Problem:
    """Return the uncalibrated problem of a plan that was run."""
    ranks, per_node = timed.layout.world_size, timed.ranks.ranks_per_node
    fields = {
        "topology": _topology_field(topology or timed.topology),
        "nodes": -(-ranks // per_node),
        "allocation": timed.ranks.hosts,
        "model": _model_field(model or timed.model.name),
        "training": timed.training.model_dump(),
        "framework": timed.framework,
        "calibration": "none",
    }
    return build_problem(resolve(validated(PlanRequest, fields)))


@validate_app.command("collectives")
def validate_collectives(
    table: Annotated[
        str, typer.Argument(help="CSV with columns as benchmarks/data/collectives.csv; - is stdin.")
    ],
    *,
    predictions: Annotated[
        Path | None,
        typer.Option(help="Write each row's prediction here, or why not."),
    ] = None,
    refit: Annotated[
        bool,
        typer.Option("--refit", help="Predict each machine by a fit on the others: minutes."),
    ] = False,
    with_curves: Annotated[
        bool,
        typer.Option("--with-curves", help="Use the measured curves of known boards, as plans do."),
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """Predict measured collectives from what is known of their machines alone, and score it."""
    rows = read_rows(_read_bytes(table), source=table)
    if refit and with_curves:
        raise InvalidInputError(
            "--refit with --with-curves: a machine that was left out would be predicted by its own "
            "curves; give one of them",
            where="--refit",
        )
    if refit:
        from planner.validate.fit import leave_one_out  # scipy doubles the start

        found = leave_one_out(rows, protocols_by_key())
    else:
        questions = [without_outcomes(row) for row in rows]
        found = predict(questions, with_curves=with_curves)
    _write(predictions, predictions_csv(found).rstrip("\n"))
    scores = score(rows, found)
    if as_json:
        listed = [asdict(prediction) for prediction in found]
        _print(json.dumps({**asdict(scores), "predictions": listed}, indent=2))
    else:
        show_scores(_console(), scores)


@validate_app.command("kernels")
def validate_kernels(
    table: Annotated[
        str,
        typer.Argument(help="CSV, plain or gzipped, with columns as docs/devices.md; - is stdin."),
    ],
    *,
    op: Annotated[KernelOp, typer.Option(help="What was timed.")],
    predictions: Annotated[
        Path | None,
        typer.Option(help="Write the table here with each row's prediction, or why not."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Predict measured kernels from their shapes alone, and score it."""
    kernels = read_kernels(_read_bytes(table), op=op, source="stdin" if table == "-" else table)
    found = predict_kernels(kernels)
    _write(predictions, kernel_predictions_csv(kernels, found).rstrip("\n"))
    scores = score_kernels(kernels, found)
    if as_json:
        skipped = Counter(one.skipped_reason for one in found if one.time_s is None)
        _print(
            json.dumps({"scores": [asdict(one) for one in scores], "skipped": skipped}, indent=2)
        )
    else:
        show_kernel_scores(_console(), kernels, found, scores)


@validate_app.command("memory")
def validate_memory(
    table: Annotated[
        str,
        typer.Argument(
            help="CSV of training runs: model shape, GPU, layout, memory_gb_per_gpu; - is stdin."
        ),
    ],
    *,
    predictions: Annotated[
        Path | None, typer.Option(help="Write each row's prediction here, or why not.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Predict the memory of published training runs from their configurations, and score it."""
    rows = read_runs(_read_bytes(table), source=table)
    found = predict_memory(map(run_of, rows))
    _write(predictions, memory_csv(found).rstrip("\n"))
    scores = score_memory(rows, found)
    if as_json:
        listed = [asdict(prediction) for prediction in found]
        _print(json.dumps({**asdict(scores), "predictions": listed}, indent=2))
    else:
        show_memory_scores(_console(), scores)


@validate_app.command("runs")
def validate_runs(
    table: Annotated[
        str,
        typer.Argument(
            help="CSV of training runs, with columns as benchmarks/data/training_runs.csv or "
            "vtrain_multi_node.csv there; - is stdin."
        ),
    ],
    *,
    predictions: Annotated[
        Path | None, typer.Option(help="Write each row's prediction here, or why not.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Predict step time and memory of published runs from their configurations, and score it."""
    rows = read_runs(_read_bytes(table), source=table)
    found = predict_runs(_watched([run_of(row) for row in rows]))
    _write(predictions, runs_csv(found).rstrip("\n"))
    scores = score_runs(rows, found)
    if as_json:
        listed = [asdict(prediction) for prediction in found]
        _print(json.dumps({**asdict(scores), "predictions": listed}, indent=2))
    else:
        show_run_scores(_console(), scores)


@app.command()
def memory(
    model: Annotated[str, typer.Argument(help="Bundled name, or a JSON file (config.json).")],
    *,
    layout: Annotated[
        str,
        typer.Option(
            "--layout",
            "-l",
            help="Degrees and choices, as tp=8,pp=8,micro_batch_size=1,recompute=full. Fields: "
            f"{', '.join(LAYOUT_FIELDS)}.",
        ),
    ] = "",
    topology: Topology = None,
    nodes: Nodes = None,
    device: Annotated[
        str | None,
        typer.Option(help="GPU by any of its names, in place of a topology: nodes of eight."),
    ] = None,
    global_batch: Annotated[
        int | None,
        typer.Option("--global-batch", "-b", help="Sequences per step; default 4 dp pp."),
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", "-s", help="Tokens per sequence; default 4096.")
    ] = None,
    training: Annotated[
        list[str] | None,
        typer.Option(
            "--training",
            "-T",
            help="A field of the training, as precision=fp8 or offload=optimizer; repeatable. "
            f"Fields: {', '.join(TrainingSpec.model_fields)}.",
        ),
    ] = None,
    framework: Annotated[str, typer.Option(help="megatron or executor.")] = "megatron",
    as_json: JsonFlag = False,
) -> None:
    """Show the memory of one layout by part and stage, and the smallest change that fits it."""
    degrees = [_assignment(text, "--layout", LAYOUT_FIELDS) for text in layout.split(",") if text]
    fields = [_assignment(t, "--training", TrainingSpec.model_fields) for t in training or []]
    options = {"seq_len": seq_len, "global_batch_size": global_batch}
    fields += [(name, value) for name, value in options.items() if value is not None]
    problem, one = layout_problem(
        model=_model_field(model),
        layout=_distinct(degrees, "--layout"),
        topology=None if topology is None else _topology_field(topology),
        nodes=nodes,
        device=device,
        training={"seq_len": 4096} | _distinct(fields, "--training"),
        framework=framework,
    )
    report = memory_report(problem, one)
    if as_json:
        stages = [stage.model_dump(mode="json") for stage in report.stages]
        whole = {**asdict(replace(report, layout=None, stages=()))}  # type: ignore[arg-type]
        whole |= {"layout": report.layout.model_dump(mode="json"), "stages": stages}
        _print(json.dumps(whole, indent=2))
    else:
        show_memory(_console(), layout_title(problem, one), report)


@app.command()
def serve(
    *,
    host: Annotated[
        str, typer.Option(envvar=["COMMPLAN_HOST", "HOST"], help="Address to listen on.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(envvar=["COMMPLAN_PORT", "PORT"], min=1, max=65535)] = 8000,
    data_dir: Annotated[
        Path, typer.Option(envvar="COMMPLAN_DATA_DIR", help="Where the SQLite file lies.")
    ] = Path("data"),
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", envvar="COMMPLAN_ALLOW_INSECURE", help="Open to others without a token."
        ),
    ] = False,
) -> None:
    """Start the service. COMMPLAN_TOKEN sets the token that clients must send."""
    import uvicorn  # only here: the other commands start faster without it

    os.environ.update(
        COMMPLAN_HOST=host,
        COMMPLAN_PORT=str(port),
        COMMPLAN_DATA_DIR=str(data_dir),
        COMMPLAN_ALLOW_INSECURE=str(int(insecure)),
    )
    config = uvicorn.Config(
        "api.app:create_app",
        factory=True,
        host=host,
        port=port,
        server_header=False,
        timeout_graceful_shutdown=_GRACE_S,
    )
    config.load()  # refuses bad settings before anything is promised
    with _listening(host, port) as listener:
        _say(_welcome(host, port, has_token=bool(os.environ.get("COMMPLAN_TOKEN"))))
        with contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])
    os._exit(0)  # a search that still runs is not waited for; what is stored is stored


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens there.

    Raises:
        InvalidInputError: The port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        other = port + 1 if port < 65535 else port - 1
        raise InvalidInputError(
            f"cannot listen on port {port} of {host}: {reason}; try another port: --port {other}, "
            f"or make run PORT={other}",
            where="port",
        ) from exc


def _welcome(host: str, port: int, *, has_token: bool) -> str:
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    token = '-H "Authorization: Bearer $COMMPLAN_TOKEN" ' if has_token else ""
    body = {
        "topology": "dgx-h100",
        "nodes": 16,
        "model": "llama3-70b",
        "training": {"global_batch_size": 1024, "seq_len": 8192},
    }
    return (
        f"the page is at {address}/ and the API at {address}/docs; or try\n"
        f"  curl -s {address}/plan {token}-H 'Content-Type: application/json' "
        f"-d '{json.dumps(body)}'"
    )


# --------------------------------------------------------------------------- files and printing


def _is_file_name(text: str) -> bool:
    """Return whether a name means a file: ``-``, with a folder, ending in .json, or there."""
    return text == "-" or "/" in text or text.endswith(".json") or os.path.isfile(text)


def _read_json(name: str) -> Any:
    """Return the JSON in a file, or on stdin for ``-``.

    Raises:
        InvalidInputError: The file cannot be read, is absurdly large, or holds no JSON.
    """
    return parse_json(_read_bytes(name), source=name)


def _read_bytes(name: str) -> bytes:
    if not name:
        raise InvalidInputError(
            "a file name is empty, as where a shell variable is not set; give a file, or leave the "
            "option out"
        )
    try:
        with contextlib.ExitStack() as stack:
            file = sys.stdin.buffer if name == "-" else stack.enter_context(Path(name).open("rb"))
            text = file.read(_MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise InvalidInputError(f"{name}: cannot be read: {reason}", where=name) from exc
    if len(text) > _MAX_FILE_BYTES:
        raise InvalidInputError(f"{name}: larger than {_MAX_FILE_BYTES} bytes", where=name)
    return text


def _read(document: type[DocumentT], name: str) -> DocumentT:
    return validated(document, _read_json(name), source=name)


def _write(path: Path | None, document: str) -> None:
    if path is None:
        return
    try:
        path.write_text(document + "\n", encoding="utf-8")
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise InvalidInputError(f"{path}: cannot be written: {reason}", where=str(path)) from exc


class _Output(Console):
    """A console on which names of strangers are text: no escapes for the terminal, no emoji."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Return ``text`` as it is shown."""
        return super().render_str(_visible(text), **options)

    def on_broken_pipe(self) -> None:
        _leave_closed_pipe()


def _console() -> Console:
    return _Output(width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def _watched(rows: Sequence[ValueT]) -> Iterable[ValueT]:
    """Return ``rows``, with a bar on stderr as they are taken, if that is a terminal."""
    from rich.progress import track  # only long tables need it

    stderr = Console(stderr=True)
    return track(rows, "rows", console=stderr, transient=True, disable=not stderr.is_terminal)


def _print(document: str) -> None:
    try:
        typer.echo(document)
    except BrokenPipeError:
        _leave_closed_pipe()


def _leave_closed_pipe() -> NoReturn:
    """Leave in peace: who reads, ``head`` for one, has seen enough."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise typer.Exit


def _say(message: str) -> None:
    typer.echo(f"commplan: {_visible(message)}", err=True)


def _visible(text: str) -> str:
    r"""Return text with what steers a terminal written out.

    >>> _visible("a\x1b[31m")
    'a\\x1b[31m'
    """
    return _STEERING.sub(lambda match: repr(match[0])[1:-1], text)


def _complain(error: PlannerError) -> None:
    _say(str(error))
    if isinstance(error, InfeasiblePlanError):
        for reason, count in error.most_rejected():
            typer.echo(f"  {count:,} layouts: {reason}", err=True)
        if error.suggestion:
            typer.echo(f"  this would fit: {json.dumps(error.suggestion)}", err=True)


if __name__ == "__main__":
    main()
