"""commplan device, commplan validate kernels, and what a plan says of its kernels."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from planner.cli import app
from planner.hardware.devices import device_names
from planner.planning import make_plan
from planner.request import PlanRequest
from planner.resolving import resolve


def said(*arguments: str, code: int = 0) -> str:
    """Return what the command prints."""
    found = CliRunner().invoke(app, [*arguments], env={"COLUMNS": "200"})
    assert found.exit_code == code, found.output
    return found.output


def test_devices_are_listed_with_where_their_kernels_come_from() -> None:
    shown = said("device", "list")
    for name in device_names():
        assert name in shown
    assert {"measured", "borrowed", "roofline"} <= set(shown.split())
    assert json.loads(said("device", "list", "--json")) == list(device_names())


def test_a_device_is_shown_with_its_sources() -> None:
    shown = said("device", "show", "b200-180gb")
    for part in ("9.00 Pflop/s; kernels derived from fp8", "HGX B200", "aiconfigurator", "191 GB"):
        assert part in shown
    document = json.loads(said("device", "show", "b200-180gb", "--json"))
    assert document["basis"] == "measured"
    assert json.loads(said("device", "show", "NVIDIA B200", "--json")) == document
    assert json.loads(said("device", "show", "A40", "--json"))["basis"] == "borrowed"


def test_kernels_are_validated_and_predictions_written(tmp_path: Path) -> None:
    table, out = tmp_path / "k.csv", tmp_path / "o.csv"
    table.write_text(
        "gpu,dtype,m,n,k,time_us\nh100,bf16,4096,8000,8192,700\nquantum,bf16,4096,8000,8192,900\n"
    )
    shown = said("validate", "kernels", str(table), "--op", "gemm", "--predictions", str(out))
    assert "shapes that the bundled tables do not hold" in shown
    assert "no prediction for 1 row" in shown
    header, first, second = out.read_text().splitlines()
    assert header == "gpu,dtype,m,n,k,time_us,predicted_time_us,basis,skipped_reason"
    assert first.startswith("h100,bf16,4096,8000,8192,700,")
    assert ",measured," in first
    assert "is not known" in second
    document = json.loads(said("validate", "kernels", str(table), "--op", "gemm", "--json"))
    assert document["scores"][0]["num_rows"] == 1


@pytest.mark.parametrize(
    ("topology", "precision", "sentence"),
    [
        ("dgx-h100", "bf16", None),
        ("hgx-a800-8x200", "bf16", "kernels of a800-sxm-80gb are the kernels measured on A100"),
        ("mi300x-8x400-ib", "bf16", "no bf16 kernels of mi300x were measured: rooflines"),
        ("dgx-h100", "fp32", "no fp32 kernels of h100-sxm-80gb were measured"),
        ("dgx-b200", "nvfp4", "nvfp4 products use as much of their peak as measured fp8"),
    ],
)
def test_a_plan_says_what_its_kernels_rest_on(
    topology: str, precision: str, sentence: str | None
) -> None:
    request = {
        "topology": topology,
        "nodes": 1,
        "model": "llama3-8b",
        "training": {"global_batch_size": 16, "seq_len": 4096, "precision": precision},
    }
    plan = make_plan(resolve(PlanRequest.model_validate(request)))
    found = [one for one in plan.assumptions if "kernels" in one or "products use" in one]
    assert (found == []) if sentence is None else found[0].startswith(sentence)
