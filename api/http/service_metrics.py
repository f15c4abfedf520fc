"""Prometheus metrics: counts of the service, and the runs at the time of the scrape.

Names follow vLLM's style: "rhyme:" and a noun. Invariant: labels have few values, so only active runs have their own.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from sqlalchemy import func, select

from rhyme_openrlhf.api.store.database import Database
from rhyme_openrlhf.api.store.models import Run
from rhyme_openrlhf.api.store.status import ACTIVE, RUN_STATUSES
from rhyme_openrlhf.telemetry.metrics import FIGURES

# From a page's query (milliseconds) to the start of a large export.
REQUEST_BUCKETS = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
# Gauges of a run: metric name -> column of `runs` and description.
RUN_GAUGES = {
    "rhyme:run_step": ("step", "Newest training step of an active run."),
    "rhyme:run_steps_planned": ("steps_total", "Planned training steps, if known."),
    "rhyme:run_reward": ("reward", "Mean reward of the last epoch with rewards."),
    **{
        f"rhyme:run_{name}": (name, f"{FIGURES[name].sentence}.")
        for name in ("tokens_per_second", "speculation_rate", "bubble_fraction")
    },
    "rhyme:run_dropped_events": ("dropped_events", "Events of the run that never arrived."),
    "rhyme:run_last_event_timestamp_seconds": ("last_event_at", "Time of the newest event, unix seconds."),
}


class ServiceMetrics:
    """The metrics of one service, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "rhyme:http_requests", "Responses by method, route and status.", ["method", "route", "status"],
            registry=self.registry,
        )  # fmt: skip
        self._request_seconds = Histogram(
            "rhyme:http_request_seconds", "Seconds until a response begins.", ["route"], buckets=REQUEST_BUCKETS,
            registry=self.registry,
        )  # fmt: skip
        self.batches = Counter(
            "rhyme:ingest_batches", "Batches of events by outcome.", ["outcome"], registry=self.registry
        )
        self.events = Counter("rhyme:ingest_events", "Ingested events.", registry=self.registry)
        self.duplicates = Counter("rhyme:ingest_duplicates", "Events that had arrived before.", registry=self.registry)
        self.batch_seconds = Histogram(
            "rhyme:ingest_batch_seconds", "Seconds to ingest one batch.", buckets=REQUEST_BUCKETS,
            registry=self.registry,
        )  # fmt: skip
        self.batches_in_flight = Gauge(
            "rhyme:ingest_batches_in_flight", "Batches being ingested now.", registry=self.registry
        )
        self.streams = Gauge("rhyme:streams_open", "Live streams open now.", registry=self.registry)

    def observe_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one response."""
        self._requests.labels(method, route, str(status)).inc()
        self._request_seconds.labels(route).observe(seconds)

    def watch(self, database: Database) -> None:
        """Report the runs of this store from now on."""
        self.registry.register(_Runs(database))

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format. Raises database errors."""
        return generate_latest(self.registry)


class _Runs(Collector):
    """A collector that queries the store at every scrape."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def describe(self) -> Iterable[GaugeMetricFamily]:
        # Registering must not query the database.
        return [GaugeMetricFamily("rhyme:runs", "", labels=["status"])]

    def collect(self) -> Iterable[GaugeMetricFamily]:
        with self._database.reading() as session:
            counts = {status: n for status, n in session.execute(select(Run.status, func.count()).group_by(Run.status))}
            active = session.scalars(select(Run).where(Run.status.in_(ACTIVE))).all()
        by_status = GaugeMetricFamily("rhyme:runs", "Runs by status.", labels=["status"])
        for status in RUN_STATUSES:
            by_status.add_metric([status], counts.get(status, 0))
        yield by_status
        for metric, (column, text) in RUN_GAUGES.items():
            family = GaugeMetricFamily(metric, text, labels=["run", "name"])
            for run in active:
                if (value := getattr(run, column)) is not None:
                    family.add_metric([run.uid, run.name], value)
            yield family
