"""Labs that tests share, and what tells that one is gone."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from benchmarks.lab import Lab, lab_topology, why_not


@pytest.fixture(scope="session")
def possible() -> None:
    """Skip where the lab cannot run."""
    if (reason := why_not()) is not None:
        pytest.skip(f"SKIPPED: {reason}")


@pytest.fixture(scope="package")
def lab(possible: None) -> Iterator[Lab]:
    """Return a lab of four hosts behind trunks, two ranks each, one after the other on the hosts.

    A test may not end it: the others of all modules use it too.
    """
    with Lab(lab_topology("lab-4x2"), order="interleaved") as running:
        yield running


@pytest.fixture
def traces(possible: None, monkeypatch: pytest.MonkeyPatch) -> "Traces":
    """Return what finds the processes that this test has started."""
    mark = uuid4().hex
    monkeypatch.setenv("LAB_TEST", mark)
    return Traces(mark)


class Traces:
    """What a lab could leave behind: processes, and so namespaces; interfaces; mounts."""

    def __init__(self, mark: str) -> None:
        self._mark = f"LAB_TEST={mark}".encode()
        self._outside = self._interfaces_and_mounts()

    def processes(self) -> list[int]:
        """Return the processes that were started with this test's mark."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdecimal() and self._mark in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue  # it ended meanwhile
        return found

    def wait_until_gone(self, *, at_most_s: float) -> list[int]:
        """Return the processes that are left when none is, or after that time."""
        end = time.monotonic() + at_most_s
        while self.processes() and time.monotonic() < end:
            time.sleep(0.01)
        return self.processes()

    def outside_is_untouched(self) -> bool:
        """Return whether this machine has the interfaces and mounts that it had."""
        return self._outside == self._interfaces_and_mounts()

    @staticmethod
    def _interfaces_and_mounts() -> tuple[list[str], str]:
        return sorted(os.listdir("/sys/class/net")), Path("/proc/self/mounts").read_text()
