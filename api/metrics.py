"""Figures for Prometheus, in a registry of their own so that two apps never meet."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["Metrics"]


class Metrics:
    """Requests and searches of one application."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "commplan_requests_total",
            "Requests by method, route and status.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self._request_seconds = Histogram(
            "commplan_request_seconds", "Time to answer.", ["route"], registry=self.registry
        )
        self._plan_seconds = Histogram(
            "commplan_plan_seconds", "Time of one search.", registry=self.registry
        )
        self.searches_running = Gauge(
            "commplan_searches_running", "Searches running or waiting.", registry=self.registry
        )

    def observe_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        known = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
        method = method if method in known else "OTHER"
        self._requests.labels(method, route, str(status)).inc()
        self._request_seconds.labels(route).observe(seconds)

    def observe_plan(self, seconds: float) -> None:
        """Record how long a search took."""
        self._plan_seconds.observe(seconds)

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self.registry)
