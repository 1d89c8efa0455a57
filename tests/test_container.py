"""The Dockerfile's steps, followed without an engine, and compose.yaml against its schema.

``follow`` carries out the steps in a clean prefix: ``FROM python`` becomes an empty virtual
environment at ``<prefix>/usr/local``, the absolute paths that the Dockerfile makes are read as
paths below the prefix, and what comes after ``USER`` runs as that uid when the test runs as root
(otherwise as the current user, for whom ``chown`` does nothing). What this cannot show is the base
image itself: docs/decisions/0001. The compose schema is the one that check-jsonschema ships.
"""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
import yaml

from api.settings import Settings

REPO = Path(__file__).parent.parent
TOKEN = "a token for this test"
PACKAGES = ("planner", "executor", "api", "topologies")
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
REQUEST = {
    "topology": "dgx-h100",
    "nodes": 1,
    "model": "llama3-8b",
    "training": {"global_batch_size": 64, "seq_len": 8192},
}
IS_ROOT = os.geteuid() == 0


class DockerfileError(Exception):
    """The Dockerfile asks for something that is not there or that ``follow`` does not know."""


@dataclass
class Image:
    """What following a Dockerfile has built so far."""

    root: Path
    paths: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: int | None = None
    ports: list[str] = field(default_factory=list)
    volumes: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    healthcheck: list[str] = field(default_factory=list)

    def outside(self, text: str) -> str:
        """Return ``text`` with the image's own absolute paths as paths below the prefix."""
        if not self.paths:
            return text
        names = "|".join(re.escape(path) for path in self.paths)
        return re.sub(rf"(?<![\w.-])({names})(?![\w-])", rf"{self.root}\1", text)

    def start(
        self, command: list[str], env: dict[str, str], output: IO[str] | int
    ) -> subprocess.Popen[str]:
        """Start ``command`` inside: the image's user, directory and environment, and ``env``."""
        bin_path = f"{self.root}/usr/local/bin"
        found = shutil.which(command[0], path=f"{bin_path}:{SYSTEM_PATH}") or command[0]
        inside = {name: self.outside(value) for name, value in self.env.items()}
        who: dict[str, Any] = (
            {"user": self.user, "group": self.user, "extra_groups": []}
            if IS_ROOT and self.user is not None
            else {}
        )
        return subprocess.Popen(
            [found, *(self.outside(word) for word in command[1:])],
            cwd=f"{self.root}{self.workdir}",
            env={"PATH": f"{bin_path}:{SYSTEM_PATH}", "LANG": "C.UTF-8", **inside, **env},
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            **who,
        )

    def run(self, command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """Run ``command`` inside to its end; ten minutes at most."""
        process = self.start(command, env, subprocess.PIPE)
        output, _ = process.communicate(timeout=600)
        return subprocess.CompletedProcess(command, process.returncode, output)


# --------------------------------------------------------------------- reading


def steps(dockerfile: str) -> list[tuple[str, str]]:
    """Return (instruction, arguments) of each step; comments dropped, continued lines joined."""
    lines = [line for line in dockerfile.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    split = [line.strip().split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(word.upper(), "".join(rest)) for word, *rest in split]


def made_paths(dockerfile: str) -> tuple[str, ...]:
    """Return the absolute paths that the steps make, the longest first."""
    words = [
        word
        for name, arguments in steps(dockerfile)
        if name in {"WORKDIR", "VOLUME", "COPY"}
        for word in arguments.split()
    ]
    found = {word.rstrip("/") for word in words if re.fullmatch(r"/[\w./-]+", word)}
    return tuple(sorted(found, key=len, reverse=True))


def exec_form(arguments: str) -> list[str]:
    """Return the words of a JSON command; the shell form would hide which process gets signals."""
    if not arguments.startswith("["):
        raise DockerfileError(f"need the JSON form of a command, got {arguments!r}")
    return [str(word) for word in json.loads(arguments)]


def is_ignored(path: str, rules: list[str]) -> bool:
    """Return whether .dockerignore leaves ``path`` out: the last rule that matches decides."""
    ignored = False
    for rule in rules:
        pattern = re.escape(rule.removeprefix("!")).replace(r"\*\*/", "(.*/)?")
        if re.fullmatch(pattern.replace(r"\*", "[^/]*") + "(/.*)?", path):
            ignored = not rule.startswith("!")
    return ignored


def ignore_rules(context: Path) -> list[str]:
    """Return the rules of the context's .dockerignore; none without one."""
    file = context / ".dockerignore"
    lines = file.read_text().splitlines() if file.exists() else []
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


# ------------------------------------------------------------------- following


def follow(dockerfile: str, context: Path, root: Path) -> Image:
    """Carry out every step of ``dockerfile`` below ``root``.

    Raises:
        DockerfileError: A file to copy is missing or ignored, a command fails, or a step is
            written in a way that this follower does not know.
    """
    image = Image(root, made_paths(dockerfile))
    for name, arguments in steps(dockerfile):
        if arguments.startswith("--") and name != "HEALTHCHECK":
            raise DockerfileError(f"{name} {arguments}: options are not known here")
        match name:
            case "FROM":
                make_base(image, arguments)
            case "WORKDIR":
                image.workdir = arguments
                (root / arguments.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "COPY":
                copy(image, context, shlex.split(arguments))
            case "RUN":
                run_step(image, arguments)
            case "ENV":
                image.env |= dict(word.split("=", 1) for word in shlex.split(arguments))
            case "USER":
                image.user = numeric_user(arguments)
            case "VOLUME":
                image.volumes.append(arguments)
            case "EXPOSE":
                image.ports.append(arguments)
            case "HEALTHCHECK":
                image.healthcheck = exec_form(re.sub(r"^(--\S+\s+)*CMD\s+", "", arguments))
            case "ENTRYPOINT":
                image.entrypoint = exec_form(arguments)
            case _:
                raise DockerfileError(f"{name} {arguments}: this step is not known here")
    return image


def make_base(image: Image, name: str) -> None:
    """Make ``FROM python:3.x-slim``: a virtual environment with pip at /usr/local."""
    if not re.fullmatch(r"python:3\.\d+-slim(-\w+)?", name):
        raise DockerfileError(f"FROM {name}: only python:3.x-slim is known here")
    prefix = image.root / "usr/local"
    create = [common_python(), "-m", "venv", "--without-pip", str(prefix)]
    install = [sys.executable, "-m", "pip", "--quiet", "--python", str(prefix), "install", "pip"]
    for command in (create, install):
        subprocess.run(command, check=True, cwd=image.root, stdin=subprocess.DEVNULL)
    if not IS_ROOT:
        (prefix / "bin/chown").write_text("#!/bin/sh\n")
        (prefix / "bin/chown").chmod(0o755)


def common_python() -> str:
    """Return a Python 3.11+ that any user may run; root's own often lies in root's home."""
    on_path = [shutil.which(f"python3.{minor}", path=SYSTEM_PATH) for minor in range(11, 20)]
    who: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": []} if IS_ROOT else {}
    for python in filter(None, [os.path.realpath(sys.executable), *on_path]):
        try:
            subprocess.run([python, "-c", "import venv"], check=True, cwd="/", **who)
        except (OSError, subprocess.CalledProcessError):
            continue
        return python
    pytest.skip("no Python 3.11+ here that an ordinary user may run")


def copy(image: Image, context: Path, words: list[str]) -> None:
    """COPY files and folders' contents, as .dockerignore allows."""
    *sources, target = words
    rules = ignore_rules(context)
    into = image.root / os.path.join(image.workdir, target).lstrip("/")
    for source in sources:
        if not (context / source).exists() or is_ignored(source, rules):
            raise DockerfileError(f"COPY {source}: no such file in the build context")
        if (context / source).is_dir():
            shutil.copytree(context / source, into, ignore=ignore_in(context, rules))
        else:
            into.mkdir(parents=True, exist_ok=True)
            shutil.copy2(context / source, into)


def ignore_in(context: Path, rules: list[str]) -> Any:
    """Return the ``ignore`` argument of ``shutil.copytree`` that obeys ``rules``."""

    def ignored(folder: str, names: list[str]) -> list[str]:
        under = Path(folder).relative_to(context)
        return [name for name in names if is_ignored((under / name).as_posix(), rules)]

    return ignored


def run_step(image: Image, command: str) -> None:
    """RUN: a shell command, with pip's own configuration and cache as on this machine."""
    pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    home = {"HOME": os.environ.get("HOME", "/")}
    done = image.run(["/bin/sh", "-c", command], pip | home)
    if done.returncode != 0:
        raise DockerfileError(f"RUN {command}: exit {done.returncode}\n{done.stdout[-3000:]}")


def numeric_user(arguments: str) -> int:
    """Return the uid of ``USER uid[:gid]``; a name would need an account."""
    if not re.fullmatch(r"\d+(:\d+)?", arguments):
        raise DockerfileError(f"USER {arguments}: need a number, it works without an account")
    return int(arguments.split(":")[0])


# ------------------------------------------------------------------- the image


@pytest.fixture(scope="module")
def image() -> Iterator[Image]:
    with tempfile.TemporaryDirectory(prefix="commplan-image-") as folder:
        root = Path(folder)
        root.chmod(0o755)
        yield follow((REPO / "Dockerfile").read_text(), REPO, root)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def container(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Iterator["Container"]:
    env = {"COMMPLAN_TOKEN": TOKEN, "COMMPLAN_PORT": str(free_port())}
    log_file = tmp_path_factory.mktemp("container") / "log"
    with log_file.open("w") as log:
        process = image.start(image.entrypoint, env, log)
        try:
            yield Container(image, process, env, log_file)
        finally:
            process.terminate()
            process.wait(timeout=30)


@dataclass(frozen=True)
class Container:
    """A started entry point, as ``docker run -e ...`` would start it."""

    image: Image
    process: subprocess.Popen[str]
    env: dict[str, str]
    log: Path

    def is_healthy(self) -> bool:
        """Run the health check once."""
        return self.image.run(self.image.healthcheck, self.env).returncode == 0

    def wait_until_healthy(self, within_s: float = 60.0) -> bool:
        """Run the health check until it passes, the process ends or the time is up."""
        end_s = time.monotonic() + within_s
        while time.monotonic() < end_s and self.process.poll() is None:
            if self.is_healthy():
                return True
            time.sleep(0.3)
        return False


def test_health_check_passes_once_the_service_answers(container: Container) -> None:
    assert container.wait_until_healthy(), container.log.read_text()


def test_health_check_fails_when_nothing_listens(image: Image) -> None:
    assert image.run(image.healthcheck, {"COMMPLAN_PORT": str(free_port())}).returncode != 0


def test_service_is_an_ordinary_user(container: Container) -> None:
    pid = str(container.process.pid)
    asked = subprocess.run(["ps", "-o", "uid=", "-p", pid], capture_output=True, check=True)
    uid = int(asked.stdout)
    assert container.image.user not in (None, 0)
    assert uid == (container.image.user if IS_ROOT else os.geteuid())
    assert uid != 0


def test_everything_the_service_needs_is_in_the_image(container: Container) -> None:
    assert container.wait_until_healthy(), container.log.read_text()
    base_url = f"http://127.0.0.1:{container.env['COMMPLAN_PORT']}"
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(base_url=base_url, headers=headers, trust_env=False) as client:
        answers = {path: client.get(path) for path in ("/", "/topologies", "/models")}
        plan = client.post("/plan", json=REQUEST)
    assert {path: answer.status_code for path, answer in answers.items()} == dict.fromkeys(
        answers, 200
    )
    assert "dgx-h100" in answers["/topologies"].text
    assert "llama3-70b" in answers["/models"].text
    assert plan.status_code == 200, plan.text


def test_data_are_written_to_the_volume(container: Container) -> None:
    assert container.wait_until_healthy(), container.log.read_text()
    [volume] = container.image.volumes
    assert list(Path(f"{container.image.root}{volume}").glob("*.sqlite3"))


def test_service_refuses_to_start_without_a_token(image: Image) -> None:
    done = image.run(image.entrypoint, {"COMMPLAN_PORT": str(free_port())})
    assert done.returncode == 2, done.stdout
    assert "COMMPLAN_TOKEN" in done.stdout


def test_every_data_file_is_installed(image: Image) -> None:
    [installed] = image.root.glob("usr/local/lib/python3.*/site-packages")
    data = {
        path.relative_to(REPO)
        for package in PACKAGES
        for path in (REPO / package).rglob("*.*")
        if path.suffix not in {".py", ".pyc"} and path.is_file()
    }
    assert Path("planner/py.typed") in data
    assert {path for path in data if not (installed / path).exists()} == set()


def test_planner_comes_from_the_image_and_torch_is_not_in_it(image: Image) -> None:
    ask = "import importlib.util as u, planner; print(planner.__file__, u.find_spec('torch'))"
    done = image.run(["python", "-c", ask], {})
    file, torch = done.stdout.split()
    assert Path(file).is_relative_to(image.root)
    assert torch == "None"


# ---------------------------------------------------------------- the follower


@pytest.mark.parametrize(
    ("dockerfile", "complaint"),
    [
        ("COPY nonesuch /src", "COPY nonesuch: no such file"),
        ("COPY tests /src", "COPY tests: no such file"),  # there, but ignored
        ("ONBUILD RUN true", "ONBUILD RUN true: this step is not known"),
        ("COPY --from=build /a /b", "options are not known"),
        ("RUN exit 3", "exit 3"),
        ("USER nobody", "USER nobody: need a number"),
        ("ENTRYPOINT commplan serve", "need the JSON form"),
        ("FROM scratch", "only python:3.x-slim is known"),
    ],
)
def test_follower_refuses_what_it_cannot_do(
    dockerfile: str, complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(DockerfileError, match=re.escape(complaint)):
        follow(dockerfile, REPO, tmp_path)


def test_follower_keeps_to_its_prefix(tmp_path: Path) -> None:
    dockerfile = "WORKDIR /made\nENV WHERE=sqlite:////made/db\nRUN echo $WHERE >/made/said"
    image = follow(dockerfile, REPO, tmp_path)
    assert (tmp_path / "made/said").read_text() == f"sqlite:///{tmp_path}/made/db\n"
    assert image.outside("/made-up /made.txt") == f"/made-up {tmp_path}/made.txt"


@pytest.mark.parametrize(
    ("path", "ignored"),
    [
        ("planner", False),
        ("planner/plan.py", False),
        ("planner/cost/__pycache__/work.pyc", True),
        ("tests/test_container.py", True),
        (".git", True),
        ("README.md", False),
    ],
)
def test_build_context_holds_the_source_only(path: str, ignored: bool) -> None:
    assert is_ignored(path, ignore_rules(REPO)) is ignored


# --------------------------------------------------------------------- compose


def compose_complaints(file: Path) -> str:
    """Return what the compose specification's schema has against ``file``; empty if nothing."""
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run([*check, str(file)], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr if done.returncode else ""


def test_compose_file_obeys_the_compose_specification() -> None:
    assert compose_complaints(REPO / "compose.yaml") == ""


@pytest.mark.parametrize(
    ("good", "bad", "complaint"),
    [
        ("ports:", "prots:", "prots"),
        ("read_only: true", "read_only: [1]", "read_only"),
        ("volumes:\n  data:", "volumes:\n  - data", "volumes"),
    ],
)
def test_broken_compose_file_fails_the_schema(
    good: str, bad: str, complaint: str, tmp_path: Path
) -> None:
    text = (REPO / "compose.yaml").read_text()
    assert good in text
    broken = tmp_path / "compose.yaml"
    broken.write_text(text.replace(good, bad))
    assert complaint in compose_complaints(broken)


def test_compose_file_fits_the_image() -> None:
    dockerfile = dict(steps((REPO / "Dockerfile").read_text()))
    compose = yaml.safe_load((REPO / "compose.yaml").read_text())
    service = compose["services"]["commplan"]
    [(volume, target)] = [mount.split(":") for mount in service["volumes"]]
    assert volume in compose["volumes"]
    assert target == dockerfile["VOLUME"]
    assert service["ports"][0].rsplit(":", 1)[1] == dockerfile["EXPOSE"]


def test_every_variable_is_one_that_the_service_reads() -> None:
    dockerfile = dict(steps((REPO / "Dockerfile").read_text()))
    compose = yaml.safe_load((REPO / "compose.yaml").read_text())
    set_here = {word.split("=")[0] for word in shlex.split(dockerfile["ENV"])}
    set_here |= compose["services"]["commplan"]["environment"].keys()
    known = {f"COMMPLAN_{name.upper()}" for name in Settings.model_fields}
    assert {name for name in set_here if name.startswith("COMMPLAN_")} - known == set()
