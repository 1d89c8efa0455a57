"""Planning and fitting, away from the event loop: few at a time, the same search only once."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import planner
import topologies
from api.errors import BusyError, NotStoredError
from api.metrics import Metrics
from api.settings import Settings
from api.store import Store, StoredPlan
from planner import __version__
from planner.calibrate.fit import fit_calibration
from planner.calibrate.runs import Measured, check_calibration, check_run
from planner.documents import parse_json, validated
from planner.errors import PlannerError, UnknownNameError
from planner.plan import Calibration, CalibrationRun, Plan, canonical_json, document_hash
from planner.planning import make_plan
from planner.request import PlanRequest
from planner.resolving import (
    ResolvedRequest,
    build_problem,
    planned_nodes,
    resolve,
    topology_fingerprint,
)
from planner.topology.document import TopologyDocument

__all__ = ["Jobs", "build_fingerprint"]

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

_RETRY_AFTER_S: Final = 10


@dataclass(frozen=True, slots=True)
class _Search:
    """One search to do: everything ``make_plan`` needs, and the key of its request."""

    key: str
    resolved: ResolvedRequest
    calibration: Calibration | None


class Jobs:
    """Runs the planner for one application."""

    def __init__(self, settings: Settings, store: Store, metrics: Metrics) -> None:
        self._settings = settings
        self._store = store
        self._metrics = metrics
        self._build = build_fingerprint()
        self._searches: dict[str, asyncio.Task[StoredPlan]] = {}
        self._search_threads = ThreadPoolExecutor(settings.max_concurrent_plans, "search")
        self._fit_thread = ThreadPoolExecutor(1, "fit")

    def close(self) -> None:
        """Start nothing new; a search that runs is left to end."""
        self._search_threads.shutdown(wait=False, cancel_futures=True)
        self._fit_thread.shutdown(wait=False, cancel_futures=True)

    async def plan(self, request: PlanRequest) -> StoredPlan:
        """Return the plan for ``request``: the stored one if there is, else a new one.

        Raises:
            UnknownNameError, InvalidInputError, InfeasiblePlanError: As ``make_plan``.
            BusyError: Too many searches wait, or this one takes longer than the limit; it goes
                on, so that the same request finds its plan later.
        """
        prepared = await asyncio.to_thread(self._prepare, request)
        if isinstance(prepared, StoredPlan):
            return prepared
        task = self._searches.get(prepared.key) or self._start(prepared)
        limit_s = self._settings.plan_time_limit_s
        try:
            return await asyncio.wait_for(asyncio.shield(task), limit_s)
        except TimeoutError:
            raise BusyError(
                f"the search takes longer than {limit_s:g} s and goes on; send the same request "
                "again in a while, or narrow it with constraints",
                retry_after_s=_RETRY_AFTER_S,
            ) from None

    async def calibrate(self, run: CalibrationRun) -> Calibration:
        """Store ``run`` and return the calibration refitted from all runs on its topology.

        Raises:
            NotStoredError: The run is of a plan that is not stored here.
            InvalidInputError: The run is of another version of the plan, or cannot be fitted.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._fit_thread, self._calibrate, run)

    def _prepare(self, request: PlanRequest) -> StoredPlan | _Search:
        resolved = resolve(request)
        calibration = self._calibration(request.calibration, resolved.topology)
        chosen = "none" if calibration is None else calibration.id
        request = request.model_copy(update={"calibration": chosen})
        key = document_hash({"request": request.model_dump(mode="json"), "build": self._build})
        stored = self._store.plan_for_request(key)
        return stored or _Search(key, replace(resolved, request=request), calibration)

    def _calibration(self, wanted: str, topology: TopologyDocument) -> Calibration | None:
        if wanted == "none":
            return None
        if wanted == "latest":
            return self._store.latest_calibration(topology_fingerprint(topology))
        calibration = self._store.calibration(wanted)
        if calibration is None:
            known = ["latest", "none", *self._store.calibration_ids()]
            raise UnknownNameError("calibration", wanted, known)
        check_calibration(calibration, topology.name)
        return calibration

    def _start(self, search: _Search) -> asyncio.Task[StoredPlan]:
        if len(self._searches) >= (
            self._settings.max_concurrent_plans + self._settings.max_waiting_plans
        ):
            raise BusyError(
                f"{len(self._searches)} searches are running or waiting; ask again in a while",
                retry_after_s=_RETRY_AFTER_S,
            )
        task = asyncio.create_task(self._run(search))
        self._searches[search.key] = task
        task.add_done_callback(partial(self._finished, search.key))
        return task

    def _finished(self, key: str, task: asyncio.Task[StoredPlan]) -> None:
        self._searches.pop(key, None)
        if not task.cancelled():
            task.exception()  # read, or asyncio reports it as lost when every client has left

    async def _run(self, search: _Search) -> StoredPlan:
        with self._metrics.searches_running.track_inprogress():
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._search_threads, self._search, search)

    def _search(self, search: _Search) -> StoredPlan:
        finished_meanwhile = self._store.plan_for_request(search.key)
        if finished_meanwhile is not None:
            return finished_meanwhile
        plan, search_s = _timed(partial(make_plan, search.resolved, search.calibration))
        self._metrics.observe_plan(search_s)
        logger.info(
            "plan %s: %r on %r: %s of %d candidates, %.3g s a step, found in %.2f s",
            plan.id,
            plan.model.name,
            plan.topology,
            plan.layout,
            plan.num_candidates,
            plan.prediction.step_time_s,
            search_s,
        )
        return self._store.add_plan(
            key=search.key,
            request=canonical_json(_with_documents(search.resolved)),
            topology_hash=topology_fingerprint(search.resolved.topology),
            plan=plan,
            search_s=search_s,
        )

    def _calibrate(self, run: CalibrationRun) -> Calibration:
        check_run(self._measured(run))
        topology_hash = self._store.topology_hash_of_plan(run.plan_id)
        runs = [*self._usable_runs(topology_hash, run), run]
        calibration = fit_calibration([self._measured(one) for one in runs])
        self._store.add_calibration(topology_hash=topology_hash, run=run, calibration=calibration)
        logger.info(
            "calibration %s of %r from %d runs", calibration.id, calibration.topology, len(runs)
        )
        return calibration

    def _usable_runs(self, topology_hash: str, new: CalibrationRun) -> Iterator[CalibrationRun]:
        """Yield the stored runs on a topology but ``new``, if this version can still read them."""
        for run in self._store.runs_on_topology(topology_hash):
            if run == new:
                continue
            try:
                check_run(self._measured(run))
            except PlannerError as exc:
                logger.warning("run of plan %s is left out: %s", run.plan_id, exc)
            else:
                yield run

    def _measured(self, run: CalibrationRun) -> Measured:
        plan = self._stored_plan(run.plan_id)
        document = parse_json(self._store.request_of_plan(plan.id), source="stored request")
        request = validated(PlanRequest, document, source="stored request")
        resolved = resolve(request)
        return Measured(build_problem(resolved, nodes=planned_nodes(resolved, plan)), plan, run)

    def _stored_plan(self, plan_id: str) -> Plan:
        stored = self._store.plan(plan_id)
        if stored is None:
            raise NotStoredError("plan", plan_id, "POST /plan makes one")
        return stored.read()


def _with_documents(resolved: ResolvedRequest) -> PlanRequest:
    """Return the request with the topology and the model in place of their names."""
    documents = {"topology": resolved.topology, "model": resolved.model}
    return resolved.request.model_copy(update=documents)


def build_fingerprint() -> str:
    """Return a hash of version and source of the planner: another build, another plan.

    The version alone would serve stale plans to whoever changes the cost model.
    """
    digest = hashlib.sha256(__version__.encode())
    for package in (planner, topologies):
        for path in sorted(Path(package.__path__[0]).rglob("*")):
            if path.suffix in (".py", ".json", ".csv"):
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _timed(work: Callable[[], ResultT]) -> tuple[ResultT, float]:
    """Return the result of ``work`` and the seconds it took."""
    started = time.perf_counter()
    return work(), time.perf_counter() - started
