"""What routes need, named once: a route's signature reads as its list of needs."""

from typing import Annotated

from fastapi import Depends, Request

from api.jobs import Jobs
from api.metrics import Metrics
from api.pages import Pages
from api.settings import Settings
from api.store import Store

__all__ = ["JobsDep", "MetricsDep", "PagesDep", "SettingsDep", "StoreDep"]


def _jobs(request: Request) -> Jobs:
    jobs = request.app.state.jobs
    assert isinstance(jobs, Jobs), "create_app sets it"
    return jobs


def _metrics(request: Request) -> Metrics:
    metrics = request.app.state.metrics
    assert isinstance(metrics, Metrics), "create_app sets it"
    return metrics


def _pages(request: Request) -> Pages:
    pages = request.app.state.pages
    assert isinstance(pages, Pages), "create_app sets it"
    return pages


def _settings(request: Request) -> Settings:
    settings = request.app.state.settings
    assert isinstance(settings, Settings), "create_app sets it"
    return settings


def _store(request: Request) -> Store:
    store = request.app.state.store
    assert isinstance(store, Store), "create_app sets it"
    return store


JobsDep = Annotated[Jobs, Depends(_jobs)]
MetricsDep = Annotated[Metrics, Depends(_metrics)]
PagesDep = Annotated[Pages, Depends(_pages)]
SettingsDep = Annotated[Settings, Depends(_settings)]
StoreDep = Annotated[Store, Depends(_store)]
