"""The whole loop on this machine: plan, train, calibrate, predict, train again.

    make demo

Starts a service of its own with an empty store, asks it for three plans of the same training
(``dp4``, ``tp2 x dp2``, ``pp2 x dp2``), runs the first, and calibrates on that one alone. Then it
asks again for the other two, writes down what the service now predicts, and only then runs them.
The last line is one JSON object: the mean relative error on the two layouts that were not
calibrated on, before and after.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from rich.console import Console
from rich.table import Table

from planner.plan import CalibrationRun

HERE = Path(__file__).parent

# What is held fixed, so that a plan before and a plan after calibration are the same run.
TRAINING: Final = {"global_batch_size": 16, "seq_len": 256, "precision": "fp32"}
FIXED: Final = {"micro_batch_size": 4, "recompute": "none", "zero_stage": 0}
LAYOUTS: Final[dict[str, dict[str, Any]]] = {
    "dp4": {"dp": 4},
    "tp2 x dp2": {"tp": 2, "dp": 2},
    "pp2 x dp2": {"pp": 2, "dp": 2, "schedule": "1f1b"},
}
CALIBRATED_ON: Final = "dp4"
RANKS: Final = 4

err = Console(stderr=True)


@dataclass(frozen=True)
class Outcome:
    """One layout: predictions and the step time of each repeat, in seconds."""

    before_s: float
    after_s: float
    repeats_s: list[float]

    @property
    def measured_s(self) -> float:
        """Median over the repeats."""
        return statistics.median(self.repeats_s)

    def error(self, predicted_s: float) -> float:
        """Return the relative error of a prediction, without sign."""
        return abs(predicted_s / self.measured_s - 1)


class Launches:
    """Counts launches and says how long the rest will take."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self.started = time.monotonic()
        err.print(f"{total} launches of {RANKS} ranks; about 5 minutes in all on two cores")

    def finished_one(self) -> str:
        """Count one more; return what is left to do, at the pace so far."""
        self.done += 1
        left = self.total - self.done
        left_s = (time.monotonic() - self.started) / self.done * left
        return f"{left} launches left, about {left_s:.0f} s"


def main() -> None:
    """Run the loop and print its table and last line."""
    options = parse_arguments()
    with tempfile.TemporaryDirectory() as folder, service(Path(folder)) as url:
        outcomes = run_loop(url, Path(folder), options)
    Console().print(table(outcomes))
    print(json.dumps(summary(outcomes)))


def run_loop(url: str, folder: Path, options: argparse.Namespace) -> dict[str, Outcome]:
    """Plan, train and calibrate on one layout, then predict and train the others."""
    before = {name: plan(url, name, calibration="none") for name in LAYOUTS}
    launches = Launches(len(LAYOUTS) * options.repeats)
    measured = {CALIBRATED_ON: train(before[CALIBRATED_ON], folder, options, launches)}
    for run in measured[CALIBRATED_ON]:
        ask(url, "POST", "/calibrations", run.model_dump(mode="json"))
    after = {name: plan(url, name, calibration="latest") for name in LAYOUTS}
    for name in LAYOUTS:
        err.print(
            f"{name}: predicted {step_time_s(before[name]):.3f} s with priors, "
            f"{step_time_s(after[name]):.3f} s calibrated on {CALIBRATED_ON}"
        )
    for name in LAYOUTS:
        if name != CALIBRATED_ON:
            measured[name] = train(after[name], folder, options, launches)
    return {
        name: Outcome(
            before_s=step_time_s(before[name]),
            after_s=step_time_s(after[name]),
            repeats_s=[step_of(run) for run in measured[name]],
        )
        for name in LAYOUTS
    }


def plan(url: str, name: str, *, calibration: str) -> dict[str, Any]:
    """Return the plan of one layout, with the address it can be fetched from."""
    request = {
        "topology": "local-gloo",
        "model": "example-gpt",
        "framework": "executor",
        "training": TRAINING,
        "constraints": {**FIXED, **LAYOUTS[name]},
        "calibration": calibration,
    }
    answer = ask(url, "POST", "/plan", request)
    return {**answer, "url": f"{url}/plans/{answer['id']}"}


def train(
    planned: dict[str, Any], folder: Path, options: argparse.Namespace, launches: Launches
) -> list[CalibrationRun]:
    """Launch the example ``options.repeats`` times and return what each launch measured."""
    runs = []
    for repeat in range(options.repeats):
        report = folder / f"{planned['id']}-{repeat}.json"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS),
            "--master-port", str(free_port()), str(HERE / "train_gpt.py"),
            "--plan", planned["url"], "--report", str(report),
            "--warmup", "2", "--repeats", str(options.steps),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"training failed:\n{done.stdout}{done.stderr}")
        runs.append(CalibrationRun.model_validate_json(report.read_text()))
        layout = {k: v for k, v in planned["layout"].items() if v > 1}
        step_s = step_of(runs[-1])
        left = launches.finished_one()
        err.print(f"{layout} repeat {repeat + 1}: {step_s:.3f} s per step; {left}")
    return runs


def step_of(run: CalibrationRun) -> float:
    """Return the median over steps of the slowest rank's step time, in seconds."""
    return statistics.median(map(max, zip(*(r.step_s for r in run.ranks), strict=True)))


def step_time_s(planned: dict[str, Any]) -> float:
    """Return the predicted step time of a plan."""
    return float(planned["prediction"]["step_time_s"])


def table(outcomes: dict[str, Outcome]) -> Table:
    """Return predicted and measured step times side by side."""
    shown = Table(title="seconds per step, before and after calibrating on *", box=None)
    for heading in ("layout", "measured", "spread", "before", "error", "after", "error"):
        shown.add_column(heading, justify="left" if heading == "layout" else "right", no_wrap=True)
    for name, outcome in outcomes.items():
        shown.add_row(
            f"{name} *" if name == CALIBRATED_ON else name,
            f"{outcome.measured_s:.3f}",
            f"{min(outcome.repeats_s):.3f} to {max(outcome.repeats_s):.3f}",
            f"{outcome.before_s:.3f}",
            f"{outcome.error(outcome.before_s):.1%}",
            f"{outcome.after_s:.3f}",
            f"{outcome.error(outcome.after_s):.1%}",
        )
    return shown


def summary(outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """Return the errors; means are over the layouts that were not calibrated on."""
    unseen = [outcome for name, outcome in outcomes.items() if name != CALIBRATED_ON]
    return {
        "before_error": statistics.mean(o.error(o.before_s) for o in unseen),
        "after_error": statistics.mean(o.error(o.after_s) for o in unseen),
        "per_layout": {
            name: {
                "predicted_before_s": o.before_s,
                "predicted_after_s": o.after_s,
                "measured_s": o.measured_s,
                "repeats_s": o.repeats_s,
                "calibrated_on": name == CALIBRATED_ON,
            }
            for name, o in outcomes.items()
        },
    }


# ------------------------------------------------------------------------- the service


@contextmanager
def service(folder: Path) -> Iterator[str]:
    """Run a service on a free port with its store in ``folder``; yield its address."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = {**os.environ, "COMMPLAN_DATABASE_URL": f"sqlite:///{folder / 'demo.sqlite3'}"}
    environment.pop("COMMPLAN_TOKEN", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "planner.cli", "serve", "--port", str(port)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until_healthy(url, process)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=30)


def wait_until_healthy(
    url: str, process: "subprocess.Popen[bytes]", *, timeout_s: float = 60
) -> None:
    """Return when the service answers; exit with a message if it never does."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        try:
            httpx.get(f"{url}/healthz", timeout=2).raise_for_status()
        except httpx.HTTPError:
            time.sleep(0.2)
        else:
            return
    sys.exit(f"the service at {url} did not come up within {timeout_s:.0f} s")


def ask(url: str, method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the service's answer, or exit with its error."""
    answer = httpx.request(method, url + path, json=body, timeout=120)
    if answer.is_error:
        sys.exit(f"{method} {path}: {answer.status_code} {answer.text}")
    return dict(answer.json())


def free_port() -> int:
    """Return a port nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="launches of each layout")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each launch")
    return parser.parse_args()


if __name__ == "__main__":
    main()
