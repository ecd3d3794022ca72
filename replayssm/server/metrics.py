"""`/metrics` in Prometheus' text format: what requests took, and the engine's own counts at the time of asking."""

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from replayssm.engine.stats import EngineStats

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics")

# Name, fields of EngineStats whose sum it is, help.
COUNTERS = (
    ("replayssm_prompt_tokens", "prompt_tokens", "Tokens of prompts"),
    ("replayssm_prefix_cache_tokens", "cached_tokens", "Tokens of prompts that the prefix cache had"),
    ("replayssm_prefix_cache_hits", "cache_hits", "Requests whose prompt began with a cached prefix"),
    ("replayssm_generated_tokens", "generated_tokens", "New tokens"),
    ("replayssm_engine_steps", "steps", "Steps of the engine"),
    ("replayssm_preemptions", "preemptions", "Samples that made room for others and were computed again"),
    ("replayssm_cancelled_requests", "cancelled", "Requests that were cancelled"),
    ("replayssm_finished_requests", "finished", "Requests that came to their end"),
    ("replayssm_evictions", "evictions", "Prefixes that the cache gave up"),
    ("replayssm_drafted_tokens", "drafted", "Tokens drafted by speculation"),
    ("replayssm_accepted_tokens", "accepted", "Drafted tokens that were accepted"),
    ("replayssm_verify_windows", "windows", "Windows of drafts that were verified"),
)
GAUGES = (
    ("replayssm_requests_queued", "queued", "Samples that wait for a place in the batch"),
    ("replayssm_requests_running", "running", "Samples in the batch"),
    ("replayssm_batch_size", "batch", "Rows of the last decode step"),
    ("replayssm_pages", "pages_total", "Pages of keys and values"),
    ("replayssm_pages_free", "pages_free", "Pages that are free"),
    ("replayssm_slots", "slots_total", "Slots of recurrent state"),
    ("replayssm_slots_free", "slots_free", "Slots that are free"),
    ("replayssm_snapshots", "snapshots", "States that the prefix cache holds"),
)


class Metrics:
    """The registry of one server."""

    def __init__(self, stats: Callable[[], EngineStats], in_flight: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(stats, in_flight))
        self._requests = Counter(
            "replayssm_http_requests", "Requests by path and status", ("path", "status"), registry=self._registry
        )
        self._seconds = self._histogram("replayssm_request_seconds", "From a request's arrival to its last token")
        self._first = self._histogram("replayssm_time_to_first_token_seconds", "From a request's arrival")
        self._each = self._histogram(
            "replayssm_time_per_output_token_seconds", "Between a request's tokens, on average"
        )

    def observe(self, record: dict[str, Any]) -> None:
        """Count a request that has ended; `record` is its line of the log."""
        path = record["path"] if record["path"] in PATHS else "other"  # clients choose paths: not a label each
        self._requests.labels(path, str(record["status"])).inc()
        if record["status"] != 200 or "ttft_seconds" not in record:
            return
        seconds, first, tokens = record["seconds"], record["ttft_seconds"], record["completion_tokens"]
        self._seconds.observe(seconds)
        self._first.observe(first)
        samples = len(record["finish_reasons"])
        if tokens > samples:  # samples run side by side
            self._each.observe((seconds - first) * samples / (tokens - samples))

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def _histogram(self, name: str, told: str) -> Histogram:
        return Histogram(name, told, buckets=SECONDS, registry=self._registry)


class EngineCollector(Collector):
    """Reads the engine's statistics when it is asked."""

    def __init__(self, stats: Callable[[], EngineStats], in_flight: Callable[[], int]) -> None:
        self._stats, self._in_flight = stats, in_flight

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, field, told in COUNTERS:
            yield CounterMetricFamily(name, told, getattr(stats, field))
        for name, field, told in GAUGES:
            yield GaugeMetricFamily(name, told, getattr(stats, field))
        yield GaugeMetricFamily("replayssm_samples_in_flight", "Samples the server answers", self._in_flight())
        yield GaugeMetricFamily(
            "replayssm_acceptance_length",
            "Tokens that a verified window gave on average: accepted drafts and the token after them",
            (stats.accepted + stats.windows) / stats.windows if stats.windows else 0.0,
        )
        yield from _state_metrics(stats.counters)


def _state_metrics(counters: dict[str, int]) -> Iterator[Metric]:
    """What replay was worth: `counters` are those of :meth:`replayssm.ReplayPool.counters`."""
    written, stepwise = counters.get("state_bytes_written", 0), counters.get("state_bytes_written_stepwise", 0)
    flushes = counters.get("flushes", 0) + counters.get("folds", 0)
    yield CounterMetricFamily("replayssm_flushes", "Folds of a ring into its checkpoint", flushes)
    yield CounterMetricFamily("replayssm_state_bytes_written", "Recurrent state that was written", written)
    yield CounterMetricFamily(
        "replayssm_state_bytes_saved",
        "State that updating it at every token would have written besides",
        stepwise - written,
    )
