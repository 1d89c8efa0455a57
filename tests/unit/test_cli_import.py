"""``commplan topology import``: the document on stdout, what was guessed on stderr."""

import io
import json
import sys
from pathlib import Path

import pytest

from planner.topology.document import parse_topology
from planner.topology.importers.cluster import ImportOptions, import_topology
from tests.unit.conftest import Run
from tests.unit.imported_samples import SAMPLES
from tests.unit.test_cli import PLAN

H200 = SAMPLES / "nvidia-smi-topo" / "h200-x8-8nic.txt"
TREE = SAMPLES / "slurm" / "tree-topograph-oci.conf"


def test_the_document_is_on_stdout_and_every_guess_on_stderr(run: Run) -> None:
    status, out, err = run("topology", "import", "--node", str(H200), "--gpu", "H200")
    document = parse_topology(json.loads(out))
    expected = import_topology(
        H200.read_bytes(),
        node_source=H200.name,
        gpu="H200",
        options=ImportOptions(name=H200.stem),
    )
    assert (status, document) == (0, expected.document)
    assert err.splitlines() == [f"commplan: assumed: {text}" for text in document.assumptions]


def test_remarks_are_said_with_their_line(run: Run) -> None:
    node = SAMPLES / "nvidia-smi-topo" / "pcie-x8-pix-phb-1nic.txt"
    status, _, err = run("topology", "import", "--node", str(node), "--gpu", "RTX 4090")
    assert status == 0
    assert f"commplan: {node.name}, line 3: no row for NIC0" in err


def test_an_imported_file_is_shown_and_planned_on(run: Run, tmp_path: Path) -> None:
    file = str(tmp_path / "mine.json")
    # fmt: off
    status, out, err = run(
        "topology", "import", "--node", str(H200), "--gpu", "H100", "--fabric", str(TREE),
        "--nic-gbps", "400", "--nodes", "2", "--oversubscription", "2", "--kind", "infiniband",
        "--gpudirect", "pxb", "--layout", "rail", "--nics", "mlx5_0, mlx5_1", "--name", "ours",
        "--output", file,
    )
    # fmt: on
    assert (status, out) == (0, "")
    size = "96 nodes of 8 x h100-sxm-80gb (2 of them unless --nodes or --nodelist)"
    assert (
        err.splitlines()[-1]
        == f"commplan: topology ours, {size}, is in {file}; plan with --topology {file}"
    )
    status, out, _ = run("topology", "show", file)
    assert (status, "ours: 2 nodes, 16 ranks" in out) == (0, True)
    assert "(the default; -n 96 shows all)" in out
    assert "shows all" not in run("topology", "show", file, "-n", "96")[1]
    assert parse_topology(json.loads(Path(file).read_text())).node.count("nic") == 2
    plan = [{"local-gloo": file, "fp32": "bf16"}.get(word, word) for word in PLAN]
    assert run(*plan, "--nodes", "1", "--json")[0] == 0


def test_the_node_may_come_by_stdin(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(H200.read_bytes()))
    monkeypatch.setattr(sys, "stdin", stdin)
    status, out, _ = run("topology", "import", "--node", "-", "--gpu", "H200")
    assert (status, json.loads(out)["name"]) == (0, "imported")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--node", "nowhere.txt"], "nowhere.txt: cannot be read"),
        (["--node", str(H200)], "name the GPU, for example --gpu H100"),
        (["--node", str(H200), "--gpu", "H2"], "no GPU model is called 'H2'"),
        (["--node", str(TREE), "--gpu", "H100"], "give it with --fabric"),
        (["--node", str(H200), "--gpu", "H200", "--layout", "ring"], "layout must be 'rail' or"),
        (["--node", str(H200), "--gpu", "H200", "--nodes", "0"], "nodes must be"),
        (["--node", str(H200), "--gpu", "H200", "--nodes", "4"], "--nic-gbps 400"),
        (["--node", "-", "--fabric", "-"], "cannot both be stdin"),
    ],
)
def test_what_cannot_be_imported_ends_with_2_and_a_message(
    run: Run,
    arguments: list[str],
    told: str,
) -> None:
    status, out, err = run("topology", "import", *arguments)
    assert (status, out) == (2, "")
    assert told in err
