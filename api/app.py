"""The application: ``create_app``, which uvicorn calls by the string ``api.app:create_app``."""

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI
from starlette.middleware import Middleware

from api.errors import install_error_handlers
from api.jobs import Jobs
from api.metrics import Metrics
from api.middleware import BodyLimit, Metered, TokenGuard
from api.pages import Pages
from api.routes import calibrations, health, models, page, plans, topologies
from api.schemas import ErrorAnswer
from api.settings import Settings, load_settings
from api.store import Store
from planner import __version__

__all__ = ["create_app"]

_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def create_app(settings: Settings | None = None) -> FastAPI:
    """Return the service; without ``settings``, as the environment says.

    Raises:
        InvalidInputError: A setting is malformed, the database cannot be opened, or the address
            is open to other machines without a token.
    """
    settings = settings or load_settings()
    logging.basicConfig(format=_LOG_FORMAT)
    logging.getLogger("api").setLevel(settings.log_level.upper())
    store, metrics, pages = Store(settings.resolved_database_url()), Metrics(), Pages()
    jobs = Jobs(settings, store, metrics)
    app = FastAPI(
        title="commplan",
        version=__version__,
        description="Which layout and which collectives for a training job, how fast, and why.",
        docs_url=None,  # FastAPI's page loads scripts from a CDN; a head node may reach none
        redoc_url=None,
        responses={"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}},
        middleware=_middleware(settings, metrics, pages),
        lifespan=_closing(jobs, store),
    )
    app.state.settings, app.state.store, app.state.metrics = settings, store, metrics
    app.state.pages, app.state.jobs = pages, jobs
    install_error_handlers(app)
    for module in (plans, topologies, models, calibrations, health, page):
        app.include_router(module.router)
    return app


def _middleware(settings: Settings, metrics: Metrics, pages: Pages) -> list[Middleware]:
    """Return what wraps a request, outermost first: a body is read only for who may send one."""
    layers = [Middleware(Metered, metrics=metrics)]
    if settings.token is not None:
        token = settings.token.get_secret_value()
        layers.append(Middleware(TokenGuard, token=token, pages=pages))
    return [*layers, Middleware(BodyLimit, max_body_bytes=settings.max_body_bytes)]


def _closing(jobs: Jobs, store: Store) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        jobs.close()
        store.close()

    return lifespan
