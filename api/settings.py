"""Settings of the service: ``COMMPLAN_*`` variables, typed, read once at start."""

import ipaddress
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    AliasChoices,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, SettingsConfigDict
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from planner.documents import explain_errors
from planner.errors import InvalidInputError

__all__ = ["Settings", "is_loopback", "load_settings"]


class Settings(BaseSettings):
    """Everything an operator can set; each field is ``COMMPLAN_`` and its name in capitals.

    ``HOST`` and ``PORT`` are read too, after ``COMMPLAN_HOST`` and ``COMMPLAN_PORT``.
    """

    model_config = SettingsConfigDict(
        env_prefix="COMMPLAN_", frozen=True, extra="ignore", populate_by_name=True
    )

    host: str = Field(default="127.0.0.1", validation_alias=AliasChoices("COMMPLAN_HOST", "HOST"))
    port: int = Field(
        default=8000, ge=0, le=65535, validation_alias=AliasChoices("COMMPLAN_PORT", "PORT")
    )
    token: SecretStr | None = Field(default=None, description="bearer token; empty = none needed")
    allow_insecure: bool = Field(
        default=False, description="listen beyond this machine without a token"
    )
    data_dir: Path = Field(default=Path("data"), description="where the default database lies")
    database_url: str | None = Field(
        default=None, description="SQLAlchemy URL; null = SQLite in data_dir"
    )
    max_body_bytes: int = Field(default=16_000_000, ge=1_000)
    max_concurrent_plans: int = Field(default=2, ge=1, description="searches at the same time")
    max_waiting_plans: int = Field(default=32, ge=0, description="beyond it: 503, ask again")
    plan_time_limit_s: float = Field(
        default=300, gt=0, description="answer 503 after this long; the search goes on"
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    @field_validator("token", mode="before")
    @classmethod
    def _empty_token_is_none(cls, value: Any) -> Any:
        return value if value else None

    @field_validator("database_url")
    @classmethod
    def _database_outlives_the_process(cls, value: str | None) -> str | None:
        if not value:
            return None
        try:
            url = make_url(value)
        except ArgumentError as exc:
            raise ValueError("not a SQLAlchemy URL; try sqlite:////var/lib/commplan/db") from exc
        if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
            raise ValueError("an in-memory database forgets every plan; name a file")
        return value

    @model_validator(mode="after")
    def _open_only_with_token(self) -> "Settings":
        if not (self.token or self.allow_insecure or is_loopback(self.host)):
            raise ValueError(
                f"host {self.host} can be reached from other machines and no token is set; set "
                "COMMPLAN_TOKEN, or bind 127.0.0.1, or ask for it with --insecure "
                "(COMMPLAN_ALLOW_INSECURE=1)"
            )
        return self

    def resolved_database_url(self) -> URL:
        """Return the database URL, by default the SQLite file in ``data_dir``."""
        if self.database_url is not None:
            return make_url(self.database_url)
        return URL.create("sqlite", database=str(self.data_dir / "commplan.sqlite3"))


def load_settings() -> Settings:
    """Return the settings of the environment.

    Raises:
        InvalidInputError: A variable is malformed, or the address is open without a token.
    """
    try:
        return Settings()
    except ValidationError as exc:
        raise _explained(exc) from exc


def _explained(exc: ValidationError) -> InvalidInputError:
    """Return the error with variables in place of fields."""
    problems, values = exc.errors(include_url=False), {}
    for problem in problems:
        if problem["loc"]:
            field = str(problem["loc"][0])
            variable = field if field.isupper() else f"COMMPLAN_{field.upper()}"
            problem["loc"], values[variable] = (variable,), problem["input"]
    return explain_errors(problems, values)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``.

    >>> is_loopback("localhost"), is_loopback("127.0.0.53"), is_loopback("::1")
    (True, True, True)
    >>> is_loopback("0.0.0.0"), is_loopback("::"), is_loopback("head-node")
    (False, False, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
