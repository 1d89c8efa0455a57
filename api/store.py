"""What the service remembers: plans, the requests that led to them, runs and calibrations.

Documents are stored as the text that was answered, so a repeat is the same bytes. SQLite by
default, any SQLAlchemy URL otherwise. Methods block; the service calls them from threads.
"""

import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError
from sqlalchemy import ForeignKey, String, Text, create_engine, event, func, select, text
from sqlalchemy.engine import URL, Engine
from sqlalchemy.exc import ArgumentError, IntegrityError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from planner.errors import InvalidInputError
from planner.plan import Calibration, CalibrationRun, Plan, canonical_json, document_hash

__all__ = [
    "Base",
    "CalibrationRecord",
    "CalibrationRow",
    "PlanRow",
    "RequestRow",
    "RunRow",
    "Store",
    "StoredPlan",
]

logger = logging.getLogger(__name__)

DocumentT = TypeVar("DocumentT", bound=BaseModel)

# SQLite waits this long for another writer (several replicas on one file).
_BUSY_TIMEOUT_MS: Final = 30_000
_CREATE_ATTEMPTS: Final = 10
_CREATE_PAUSE_S: Final = 0.02
# Ids are hexadecimal; what else may stand in a URL never reaches the database.
_ID: Final = re.compile("[0-9A-Za-z_-]{1,64}")


class Base(DeclarativeBase):
    """Tables of this service."""


class PlanRow(Base):
    """A plan as it was answered."""

    __tablename__ = "plans"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    topology_hash: Mapped[str] = mapped_column(String(64), index=True)
    document: Mapped[str] = mapped_column(Text)
    search_s: Mapped[float]
    created_at: Mapped[datetime] = mapped_column(default=lambda: _now())


class RequestRow(Base):
    """A request and the plan it led to.

    The document has the topology and the model in place of their names and the id of the
    calibration that was used, so that another version resolves it to the same.
    """

    __tablename__ = "requests"

    key: Mapped[str] = mapped_column(String(64), primary_key=True)
    plan_id: Mapped[str] = mapped_column(ForeignKey("plans.id"), index=True)
    document: Mapped[str] = mapped_column(Text)


class RunRow(Base):
    """A timed run of a stored plan."""

    __tablename__ = "runs"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    hash: Mapped[str] = mapped_column(String(64), unique=True)
    plan_id: Mapped[str] = mapped_column(ForeignKey("plans.id"), index=True)
    document: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(default=lambda: _now())


class CalibrationRow(Base):
    """Constants fitted on one topology; the highest number is the latest."""

    __tablename__ = "calibrations"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(String(64), unique=True)
    topology_hash: Mapped[str] = mapped_column(String(64), index=True)
    document: Mapped[str] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(default=lambda: _now())


@dataclass(frozen=True, slots=True)
class StoredPlan:
    """A plan's bytes, and how long the search took that found it."""

    id: str
    document: str
    search_s: float

    def read(self) -> Plan:
        """Return the plan.

        Raises:
            InvalidInputError: Another version stored it, and this one cannot read it.
        """
        plan = _read(Plan, self.document)
        if plan is None:
            raise InvalidInputError(
                f"plan {self.id} was stored by another version of commplan, and this one cannot "
                "read it; ask for the plan again",
                where="plan_id",
            )
        return plan


@dataclass(frozen=True, slots=True)
class CalibrationRecord:
    """A calibration and when it was fitted."""

    calibration: Calibration
    created_at: datetime


class Store:
    """The database behind one application."""

    def __init__(self, url: URL) -> None:
        self._engine = _engine(url)
        try:
            _create_tables(self._engine)
        except SQLAlchemyError as exc:
            raise InvalidInputError(
                f"database {url.render_as_string()} cannot be opened: {_reason(exc)}; check "
                "COMMPLAN_DATABASE_URL, or COMMPLAN_DATA_DIR and the rights on it",
                where="database_url",
            ) from exc

    def close(self) -> None:
        """Give back every connection."""
        self._engine.dispose()

    def is_reachable(self) -> bool:
        """Return whether the database answers."""
        try:
            with self._engine.connect() as connection:
                connection.execute(text("select 1"))
        except SQLAlchemyError as exc:
            logger.warning("database does not answer: %s", exc)
            return False
        return True

    # ------------------------------------------------------------------------------- plans

    def plan(self, plan_id: str) -> StoredPlan | None:
        """Return a plan by its id, or None; any text may be asked for."""
        if not _ID.fullmatch(plan_id):
            return None
        with Session(self._engine) as session:
            return _stored(session.get(PlanRow, plan_id))

    def plan_for_request(self, key: str) -> StoredPlan | None:
        """Return the plan that the request with this key led to."""
        query = select(PlanRow).join(RequestRow, RequestRow.plan_id == PlanRow.id)
        with Session(self._engine) as session:
            return _stored(session.scalars(query.where(RequestRow.key == key)).first())

    def add_plan(
        self, *, key: str, request: str, topology_hash: str, plan: Plan, search_s: float
    ) -> StoredPlan:
        """Store a plan and the request that led to it; return what is stored.

        If another process was quicker with the same request, its plan is returned.
        """
        row = PlanRow(
            id=plan.id,
            topology_hash=topology_hash,
            document=canonical_json(plan),
            search_s=search_s,
        )
        try:
            with Session(self._engine) as session, session.begin():
                known = session.get(PlanRow, plan.id)
                if known is None or known.document != row.document:
                    # Another document under the same id is of another build of this version.
                    session.merge(row)
                    session.flush()
                session.add(RequestRow(key=key, plan_id=plan.id, document=request))
        except IntegrityError:
            logger.info("plan %s was stored by another process meanwhile", plan.id)
        stored = self.plan(plan.id)
        assert stored is not None, "just stored, here or by another process"
        return stored

    def request_of_plan(self, plan_id: str) -> str:
        """Return the document of a request that led to a stored plan."""
        query = select(RequestRow.document).where(RequestRow.plan_id == plan_id)
        with Session(self._engine) as session:
            return session.scalars(query.order_by(RequestRow.key)).first() or "{}"

    def topology_hash_of_plan(self, plan_id: str) -> str:
        """Return the fingerprint of the topology document a stored plan is for."""
        with Session(self._engine) as session:
            return session.scalars(select(PlanRow.topology_hash).where(PlanRow.id == plan_id)).one()

    # ---------------------------------------------------------------- runs and calibrations

    def runs_on_topology(self, topology_hash: str) -> list[CalibrationRun]:
        """Return every stored run on a topology, oldest first."""
        query = select(RunRow.document).join(PlanRow, RunRow.plan_id == PlanRow.id)
        query = query.where(PlanRow.topology_hash == topology_hash).order_by(RunRow.number)
        with Session(self._engine) as session:
            runs = [_read(CalibrationRun, document) for document in session.scalars(query)]
        return [run for run in runs if run is not None]

    def add_calibration(
        self, *, topology_hash: str, run: CalibrationRun, calibration: Calibration
    ) -> None:
        """Store a run and the calibration fitted with it, each once, in one transaction."""
        with Session(self._engine) as session, session.begin():
            run_hash = document_hash(run)
            if (
                session.scalars(select(RunRow.number).where(RunRow.hash == run_hash)).first()
                is None
            ):
                row = RunRow(hash=run_hash, plan_id=run.plan_id, document=canonical_json(run))
                session.add(row)
            known = select(CalibrationRow.number).where(CalibrationRow.id == calibration.id)
            if session.scalars(known).first() is None:
                session.add(
                    CalibrationRow(
                        id=calibration.id,
                        topology_hash=topology_hash,
                        document=canonical_json(calibration),
                    )
                )

    def latest_calibration(self, topology_hash: str) -> Calibration | None:
        """Return the newest calibration of a topology that this version can read."""
        query = select(CalibrationRow.document).order_by(CalibrationRow.number.desc())
        query = query.where(CalibrationRow.topology_hash == topology_hash)
        with Session(self._engine) as session:
            for document in session.scalars(query):
                calibration = _read(Calibration, document)
                if calibration is not None:
                    return calibration
        return None

    def calibration(self, calibration_id: str) -> Calibration | None:
        """Return a calibration by its id, or None; any text may be asked for."""
        if not _ID.fullmatch(calibration_id):
            return None
        query = select(CalibrationRow.document).where(CalibrationRow.id == calibration_id)
        with Session(self._engine) as session:
            document = session.scalars(query).first()
        return None if document is None else _read(Calibration, document)

    def calibrations(self, limit: int) -> list[CalibrationRecord]:
        """Return the newest calibrations, newest first."""
        query = select(CalibrationRow).order_by(CalibrationRow.number.desc()).limit(limit)
        with Session(self._engine) as session:
            found = [
                (_read(Calibration, row.document), row.created_at) for row in session.scalars(query)
            ]
        return [CalibrationRecord(read, created_at) for read, created_at in found if read]

    def calibration_ids(self) -> Sequence[str]:
        """Return the ids of all calibrations."""
        with Session(self._engine) as session:
            return session.scalars(select(CalibrationRow.id)).all()

    def count_plans(self) -> int:
        """Return how many plans are stored."""
        with Session(self._engine) as session:
            return session.scalar(select(func.count()).select_from(PlanRow)) or 0


def _engine(url: URL) -> Engine:
    """Return an engine; for SQLite also the folder of its file, and write-ahead logging."""
    try:
        if url.get_backend_name() != "sqlite":
            return create_engine(url, pool_pre_ping=True)
        Path(url.database or "").parent.mkdir(parents=True, exist_ok=True)
        engine = create_engine(url)
    except (ArgumentError, NoSuchModuleError, ImportError, OSError) as exc:
        raise InvalidInputError(
            f"database {url.render_as_string()} cannot be used: {_reason(exc)}",
            where="database_url",
        ) from exc
    event.listen(engine, "connect", _configure_sqlite)
    return engine


def _create_tables(engine: Engine) -> None:
    """Create the tables that are not there yet, also while other replicas do the same.

    Looking and creating are two steps, and no database does both in one for every URL: whoever
    was overtaken looks again.
    """
    for attempt in range(_CREATE_ATTEMPTS):
        try:
            Base.metadata.create_all(engine)
        except SQLAlchemyError:
            if attempt == _CREATE_ATTEMPTS - 1:
                raise
            time.sleep(_CREATE_PAUSE_S)
        else:
            return


def _configure_sqlite(connection: Any, _record: Any) -> None:
    """Let readers and a writer work side by side, and check references."""
    for pragma in (
        f"busy_timeout={_BUSY_TIMEOUT_MS}",
        "journal_mode=wal",
        "synchronous=normal",
        "foreign_keys=on",
    ):
        connection.execute(f"pragma {pragma}")


def _stored(row: PlanRow | None) -> StoredPlan | None:
    return None if row is None else StoredPlan(row.id, row.document, row.search_s)


def _read(document: type[DocumentT], text: str) -> DocumentT | None:
    """Return a stored document, or None for one that another version wrote and this cannot read."""
    try:
        return document.model_validate_json(text)
    except ValidationError as exc:
        error = exc.errors()[0]
        place = ".".join(map(str, error["loc"]))
        logger.warning("a stored %s is left out: %s: %s", document.__name__, place, error["msg"])
        return None


def _now() -> datetime:
    return datetime.now(UTC).replace(tzinfo=None)


def _reason(exc: Exception) -> str:
    return str(exc).splitlines()[0]
