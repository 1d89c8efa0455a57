"""The check of a GPU: skipped without one, and its predictions written before anything runs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from planner.hardware.devices import device
from planner.validate.kernels import predict_kernels, read_kernels


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    """Run the command."""
    monkeypatch.setattr("sys.argv", ["gpu_check", *arguments])
    threads = torch.get_num_threads()
    try:
        gpu_check.main()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_is_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch)
    assert stopped.value.code == gpu_check.SKIPPED == 77
    assert "no GPU here; skipped" in capsys.readouterr().out


def test_every_prediction_is_written_before_the_first_kernel_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out, before = tmp_path / "found.json", []

    def timed(call: Callable[[], object], on: torch.device) -> float:
        before.append(json.loads(out.read_text()))
        call()
        return 2.0

    monkeypatch.setattr(gpu_check, "seconds_of", timed)
    run(monkeypatch, "--device", "cpu", "--out", str(out))
    after = json.loads(out.read_text())
    assert all(one["measured"] is None for one in before[0]["results"])
    assert before[0]["written"] == "before anything was timed"
    kept = [(one["name"], one["predicted"]) for one in after["results"]]
    assert kept == [(one["name"], one["predicted"]) for one in before[0]["results"]]
    kinds = {one["kind"] for one in after["results"] if one["measured"] == 2.0}
    assert kinds == {"gemm", "attention", "memory", "optimizer", "step"}
    assert all(one["predicted"] > 0 for one in after["results"])


def test_its_table_of_products_is_what_kernel_tables_are_made_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    table = tmp_path / "gemm.csv"
    monkeypatch.setattr(gpu_check, "seconds_of", lambda call, on: 1e-3)
    run(monkeypatch, "--device", "cpu", "--table", str(table))
    read = read_kernels(table.read_bytes(), op="gemm", source="gemm.csv")
    assert len(read.rows) == 8
    assert (read.time_s == 1e-3).all()
    assert all("dtype 'float32'" in one.skipped_reason for one in predict_kernels(read))


@pytest.mark.parametrize("name", ["h100-sxm-80gb", "b200-180gb", "a100-sxm-80gb"])
def test_cases_for_gpus_are_predicted_without_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(gpu_check, "name_of", lambda _: name)
    hardware = device(name)
    step, peak = gpu_check.gpt_step(hardware, on)
    products = gpu_check.products(hardware, on)
    assert any(case.name.startswith("fp8") for case in products) == (
        "fp8" in hardware.peak_flop_per_s
    )
    everything = [
        *products,
        *gpu_check.attention(hardware, on),
        *gpu_check.memory_bound(hardware, on),
    ]
    assert all(0 < case.predicted < 1 for case in (*everything, step))
    # 0.55 B weights: 18 bytes each, and 8,192 tokens' activations and logits
    assert 10e9 < peak.predicted < 30e9
