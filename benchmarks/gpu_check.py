"""Does this GPU do what the planner says? Predictions are written first, then it is timed.

    python -m benchmarks.gpu_check [--out gpu_check.json] [--device cuda|cpu]
    python -m benchmarks.gpu_check --table gemm.csv

Times products (bf16, fp8 where the GPU and torch have it), causal attention forward and backward,
element-wise work, an AdamW update, and one step of a small GPT with its peak of memory, and prints
predicted over measured. Everything predicted is in the file before anything runs. Made to end under
four minutes; without a GPU it says so and exits with 77, the status of a test that is skipped.

``--table`` times a grid of products instead and writes a table for ``benchmarks.kernel_tables``,
which takes some minutes more. ``--device cpu`` runs the same on one core, to try the tool itself.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

try:
    import torch
    from torch.nn import functional
except ModuleNotFoundError:
    sys.exit("gpu_check: needs torch; 'make tools' installs it")

from planner.constants import CONTEXT_BYTES
from planner.cost.memory import memory
from planner.cost.step import price
from planner.errors import UnknownNameError
from planner.hardware.devices import Device, device
from planner.hardware.gpus import gpu_model
from planner.hardware.kernels import attention_s, gemm_s, memory_bound_s
from planner.plan import Precision
from planner.reviewing import layout_problem
from planner.units import format_bytes, format_seconds

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import train_gpt  # an example, not a package: its folder has to be on the path first

SKIPPED: Final = 77
# Enough for clocks to settle, short enough for all cases in four minutes.
WARMUP_S: Final = 0.1
TIMED_S: Final = 0.4
MIN_CALLS: Final = 5
GPU_SIZES: Final = ((1024, 4096, 4096), (8192, 4096, 4096), (4096, 8192, 8192), (8192, 8192, 1024),
    (8192, 1024, 8192), (2048, 28672, 8192), (16384, 6144, 2304))  # fmt: skip
CPU_SIZES: Final = ((64, 256, 256), (512, 512, 512))


@dataclass(frozen=True)
class Case:
    """One kernel: what it is, what it is predicted to take, and how it is run.

    Attributes:
        kind: "gemm", "attention", "memory", "optimizer", "step" or "peak".
        name: With its sizes.
        predicted: Seconds, or bytes of memory.
        make: Returns the call to time; memory is allocated only when it is its turn.
    """

    kind: str
    name: str
    predicted: float
    make: Callable[[], Callable[[], object]]


@dataclass
class Result:
    """A case with what came out."""

    kind: str
    name: str
    predicted: float
    measured: float | None = None

    def row(self) -> str:
        """Return a line of the table."""
        if self.measured is None:
            return f"{self.kind:10} {self.name:44} {shown(self.kind, self.predicted):>10} not run"
        ratio = self.predicted / self.measured
        both = [shown(self.kind, value) for value in (self.predicted, self.measured)]
        return f"{self.kind:10} {self.name:44} {both[0]:>10} {both[1]:>10} {ratio:8.2f}"


def main() -> None:
    """Predict, write, run, write again, print."""
    options = parse_arguments()
    on = torch.device(options.device)
    if on.type == "cuda" and not torch.cuda.is_available():
        print("gpu_check: torch sees no GPU here; skipped (--device cpu tries the tool itself)")
        sys.exit(SKIPPED)
    hardware = bundled_device(on)
    started = time.perf_counter()
    if options.table:
        write_gemm_table(options.table, on, hardware)
        return
    step, peak = gpt_step(hardware, on)
    kernels = [*products(hardware, on), *attention(hardware, on), *memory_bound(hardware, on)]
    cases = [*kernels, step, peak]
    results = [Result(case.kind, case.name, case.predicted) for case in cases]
    header = {
        "gpu": name_of(on), "device": hardware.name, "basis": hardware.basis,
        "torch": torch.__version__, "written": "before anything was timed",
    }  # fmt: skip
    write(options.out, header, results)
    print(f"{header['gpu']} as {hardware.name} ({hardware.basis}); predictions in {options.out}")
    print(f"{'kind':10} {'case':44} {'predicted':>10} {'measured':>10} {'pred/meas':>9}")
    for case, result in zip(cases, results, strict=True):
        result.measured = (peak_bytes if case is peak else seconds_of)(case.make(), on)
        print(result.row(), flush=True)
    write(options.out, {**header, "written": "after timing"}, results)
    print(f"{time.perf_counter() - started:.0f} s; both columns are in {options.out}")


# ----------------------------------------------------------------------------------- the cases


def products(hardware: Device, on: torch.device) -> list[Case]:
    """Return products in the device's precisions."""
    if on.type == "cpu":
        return [product(hardware, on, "fp32", torch.float32, *size) for size in CPU_SIZES]
    found = [product(hardware, on, "bf16", torch.bfloat16, *size) for size in GPU_SIZES]
    if "fp8" in hardware.peak_flop_per_s and torch.cuda.get_device_capability(on) >= (8, 9):
        found += [fp8_product(hardware, on, *size) for size in GPU_SIZES]
    return found


def product(
    hardware: Device, on: torch.device, precision: Precision, dtype: torch.dtype, *size: int
) -> Case:
    """Return one product [m, k] x [k, n], weights stored as torch.nn.Linear has them."""
    m, n, k = size

    def make() -> Callable[[], object]:
        x, weight = (torch.randn(s, k, device=on, dtype=dtype) for s in (m, n))
        return lambda: functional.linear(x, weight)

    predicted = float(gemm_s(hardware, precision, m, n, k))
    return Case("gemm", f"{precision} m={m} n={n} k={k}", predicted, make)


def fp8_product(hardware: Device, on: torch.device, *size: int) -> Case:
    """Return one fp8 product with the cast of its left operand, scaled as a whole."""
    m, n, k = size

    def make() -> Callable[[], object]:
        x = torch.randn(m, k, device=on, dtype=torch.bfloat16)
        weight = torch.randn(n, k, device=on).to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=on)

        def run() -> object:
            scale = x.abs().amax().float() / 448
            cast = (x / scale).to(torch.float8_e4m3fn)
            return torch._scaled_mm(cast, weight, scale, one, out_dtype=torch.bfloat16)

        return run

    predicted = float(gemm_s(hardware, "fp8", m, n, k))
    return Case("gemm", f"fp8 with cast m={m} n={n} k={k}", predicted, make)


def attention(hardware: Device, on: torch.device) -> list[Case]:
    """Return causal attention, forward and backward."""
    shapes = ((1, 128, 2, 64),) if on.type == "cpu" else ((2, 4096, 32, 128), (1, 16384, 16, 128))
    return [
        case
        for shape in shapes
        for backward in (False, True)
        for case in [attention_case(hardware, on, shape, backward=backward)]
    ]


def attention_case(
    hardware: Device, on: torch.device, shape: tuple[int, int, int, int], *, backward: bool
) -> Case:
    """Return one call over ``shape``: sequences, their length, heads, head dimension."""
    batch, seq_len, heads, head_dim = shape
    precision: Precision = "fp32" if on.type == "cpu" else "bf16"
    dtype = torch.float32 if on.type == "cpu" else torch.bfloat16

    def make() -> Callable[[], object]:
        q, k, v = (
            torch.randn(
                batch, heads, seq_len, head_dim, device=on, dtype=dtype, requires_grad=backward
            )
            for _ in range(3)
        )
        if not backward:
            return lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        gradient = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

    flop = 2.0 * batch * heads * seq_len**2 * head_dim * (2.5 if backward else 1.0)
    predicted = attention_s(
        hardware, precision, flop, seq_len=seq_len, batch=batch, num_heads=heads,
        num_kv_heads=heads, head_dim=head_dim, backward=backward,
    )  # fmt: skip
    way = "backward" if backward else "forward"
    return Case("attention", f"{way} b={batch} s={seq_len} a={heads} d={head_dim}",
        float(predicted), make)  # fmt: skip


def memory_bound(hardware: Device, on: torch.device) -> list[Case]:
    """Return element-wise work and an update of AdamW."""
    elements = 1 << (18 if on.type == "cpu" else 28)
    dtype = torch.float32 if on.type == "cpu" else torch.bfloat16

    def add() -> Callable[[], object]:
        x, y, z = (torch.randn(elements, device=on).to(dtype) for _ in range(3))
        return lambda: torch.add(x, y, out=z)

    def update() -> Callable[[], object]:
        weight = torch.nn.Parameter(torch.randn(elements // 4, device=on))
        weight.grad = torch.randn_like(weight)
        optimizer = torch.optim.AdamW([weight], fused=True)
        return optimizer.step

    added = 3 * elements * dtype.itemsize
    # gradient, weight and both moments read, all but the gradient written: 7 times fp32
    updated = 28 * (elements // 4)
    return [
        Case("memory", f"add of {elements} elements", float(memory_bound_s(hardware, added)), add),
        Case("optimizer", f"AdamW of {elements // 4} fp32 weights",
            float(memory_bound_s(hardware, updated)), update),
    ]  # fmt: skip


# ---------------------------------------------------------------------------------- a GPT step


GPT = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128,
    "vocab_size": 32000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "attention_bias": False,
    "mlp_bias": False,
}  # fmt: skip
SMALL = {
    **GPT, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
    "max_position_embeddings": 128,
}  # fmt: skip
SEQUENCES: Final = 4


def gpt_step(hardware: Device, on: torch.device) -> tuple[Case, Case]:
    """Return one step of a small GPT, its seconds and the peak of what the allocator holds.

    bf16 by autocast over fp32 weights, torch's fused AdamW, nothing else fused: what the planner is
    told, too. The allocator does not see the context and the libraries' own memory.
    """
    config = SMALL if on.type == "cpu" else GPT
    seq_len = int(config["max_position_embeddings"])  # type: ignore[call-overload]
    training: dict[str, Any] = {"global_batch_size": SEQUENCES, "seq_len": seq_len}
    if on.type == "cpu":
        training["precision"] = "fp32"
    problem, candidate = layout_problem(
        model=config,
        layout={"micro_batch_size": SEQUENCES},
        topology="local-gloo" if on.type == "cpu" else None,
        nodes=None,
        device=None if on.type == "cpu" else name_of(on),
        training=training,
        framework="executor" if on.type == "cpu" else "megatron",
    )
    plain = {"master_weights": "only", "fused_kernels": False} if on.type == "cuda" else {}
    problem = replace(
        problem,
        device=hardware,
        fabric=replace(problem.fabric, num_gpus=1),
        training=problem.training.model_copy(update=plain),
    )
    seconds = float(price(problem, candidate).step_time_s()[0])
    parts = memory(problem, candidate)
    context = CONTEXT_BYTES[problem.fabric.library].value
    held = float(parts.total_bytes().max() - context)

    def make() -> Callable[[], object]:
        return training_step(config, on, seq_len)

    name = (
        f"{config['num_hidden_layers']} layers of {config['hidden_size']}, {SEQUENCES} x {seq_len}"
    )
    return Case("step", name, seconds, make), Case("peak", name, held, make)


def training_step(config: dict[str, Any], on: torch.device, seq_len: int) -> Callable[[], object]:
    """Return a call that does one step: forward, backward, update."""
    with on:  # positions are made where the model is
        names = {field.name for field in fields(train_gpt.GPTConfig)}
        model = train_gpt.GPT(
            train_gpt.GPTConfig(**{k: v for k, v in config.items() if k in names})
        )
        tokens = torch.randint(config["vocab_size"], (SEQUENCES, seq_len + 1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> object:
        with on, torch.autocast(on.type, torch.bfloat16, enabled=on.type == "cuda"):
            logits = model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


# --------------------------------------------------------------------------------- measuring


def seconds_of(call: Callable[[], object], on: torch.device) -> float:
    """Return the median seconds of a call, after warming up; a GPU is timed by its own events."""
    end = time.perf_counter() + WARMUP_S
    while time.perf_counter() < end:
        call()
        synchronize(on)
    times: list[float] = []
    end = time.perf_counter() + TIMED_S
    while len(times) < MIN_CALLS or time.perf_counter() < end:
        times.append(one_call(call, on))
    return float(np.median(times))


def one_call(call: Callable[[], object], on: torch.device) -> float:
    """Return the seconds of one call."""
    if on.type == "cpu":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    before.record()
    call()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) * 1e-3


def synchronize(on: torch.device) -> None:
    """Wait for all that was issued."""
    if on.type == "cuda":
        torch.cuda.synchronize(on)


def peak_bytes(call: Callable[[], object], on: torch.device) -> float | None:
    """Return the most the allocator held over three steps; None on a CPU, which keeps no count."""
    if on.type == "cpu":
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(on)
    for _ in range(3):
        call()
    synchronize(on)
    return float(torch.cuda.max_memory_reserved(on))


def write_gemm_table(path: Path, on: torch.device, hardware: Device) -> None:
    """Time a grid of products and write it as ``benchmarks.kernel_tables`` takes it."""
    is_cpu = on.type == "cpu"
    precision: Precision = "fp32" if is_cpu else "bf16"
    dtype = torch.float32 if is_cpu else torch.bfloat16
    widths = (64, 256) if is_cpu else (256, 512, 1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
    rows = (64, 256) if is_cpu else tuple(2**power for power in range(8, 16))
    with path.open("w", encoding="utf-8") as file:
        file.write("gpu,src,dtype,m,n,k,time_us\n")
        for m in rows:
            for n in widths:
                for k in widths:
                    case = product(hardware, on, precision, dtype, m, n, k)
                    time_us = 1e6 * seconds_of(case.make(), on)
                    word = "float32" if is_cpu else "bfloat16"
                    file.write(
                        f"{name_of(on)},torch/{torch.__version__},{word},{m},{n},{k},{time_us:.3f}\n"
                    )
    print(f"{path}: {len(rows) * len(widths) ** 2} products")


# ------------------------------------------------------------------------------------ reporting


def name_of(on: torch.device) -> str:
    """Return what the device calls itself."""
    return "cpu-core" if on.type == "cpu" else torch.cuda.get_device_name(on)


def bundled_device(on: torch.device) -> Device:
    """Return the device of the GPU in use; exits where none is bundled."""
    if on.type == "cpu":
        torch.set_num_threads(1)
        return device("cpu-core")
    try:
        gpu = gpu_model(name_of(on))
    except UnknownNameError as exc:
        sys.exit(f"gpu_check: {exc}; docs/devices.md says how to add a device")
    if gpu.device is None:
        sys.exit(f"gpu_check: {gpu.name} is no bundled device; docs/devices.md says how to add it")
    return device(gpu.device)


def shown(kind: str, value: float) -> str:
    """Return a figure with its unit."""
    return format_bytes(value) if kind == "peak" else format_seconds(value)


def write(path: Path, header: dict[str, Any], results: Sequence[Result]) -> None:
    """Write what is known so far."""
    path.write_text(
        json.dumps({**header, "results": [asdict(r) for r in results]}, indent=2) + "\n"
    )


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--table", type=Path, help="write a table of products instead")
    return parser.parse_args()


if __name__ == "__main__":
    main()
