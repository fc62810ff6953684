"""What /metrics shows, in the Prometheus text format: a registry for each server, none for the process."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mosaic.runtime.serve.tally import Tally

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


@dataclass(frozen=True)
class Sample:
    """The engine at this moment; counts since it was loaded."""

    active: int
    waiting: int
    cached_states: int
    cached_state_bytes: int
    expert_hits: int
    expert_misses: int
    disk_bytes: int
    device_expert_hits: int
    device_bytes: int


class Metrics:
    """Counters of the server; `sample` tells of the engine, None while there is none."""

    def __init__(self, sample: Callable[[], Sample | None]) -> None:
        registry = self._registry = CollectorRegistry()
        self._requests = Counter(
            "mosaic_requests", "Requests by route and HTTP status.", ["route", "status"], registry=registry
        )
        self._prompt = Counter("mosaic_prompt_tokens", "Tokens of prompts.", registry=registry)
        self._reused = Counter("mosaic_reused_prompt_tokens", "Of these, known from earlier.", registry=registry)
        self._generated = Counter("mosaic_generated_tokens", "Tokens of answers.", registry=registry)
        self._first = Histogram(
            "mosaic_time_to_first_token_seconds", "From the request to its first token.",
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self._token = Histogram(
            "mosaic_time_per_token_seconds", "Between two tokens of an answer.",
            buckets=TOKEN_SECONDS, registry=registry,
        )  # fmt: skip
        registry.register(_EngineCollector(sample))

    def served(self, route: str, status: int, tally: Tally) -> None:
        """A request is over."""
        self._requests.labels(route, str(status)).inc()
        self._prompt.inc(tally.prompt)
        self._reused.inc(tally.cached)
        self._generated.inc(tally.completion)

    def pace(self) -> "Pace":
        """Begins to time an answer."""
        return Pace(self._first, self._token)

    def text(self) -> bytes:
        """The exposition."""
        return generate_latest(self._registry)


class Pace:
    """The times of one answer."""

    def __init__(self, first: Histogram, token: Histogram) -> None:
        self._first = first
        self._token = token
        self._last = time.perf_counter()
        self._begun = False

    def arrived(self, tokens: int) -> None:
        """So many tokens came together."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        if not self._begun:
            self._begun = True
            self._first.observe(seconds)
            return
        for _ in range(tokens):
            self._token.observe(seconds / tokens)


class _EngineCollector(Collector):
    """Asks the engine when it is asked."""

    def __init__(self, sample: Callable[[], Sample | None]) -> None:
        self._sample = sample

    def collect(self) -> Iterable[Metric]:
        """The engine's own figures."""
        now = self._sample()
        if now is None:
            return
        yield GaugeMetricFamily("mosaic_active_requests", "Sequences in work.", now.active)
        yield GaugeMetricFamily("mosaic_waiting_requests", "Sequences that wait for a place.", now.waiting)
        yield GaugeMetricFamily("mosaic_cached_states", "States kept for later prompts.", now.cached_states)
        yield GaugeMetricFamily("mosaic_cached_state_bytes", "Their size.", now.cached_state_bytes)
        yield CounterMetricFamily("mosaic_expert_hits", "Experts found in memory.", now.expert_hits)
        yield CounterMetricFamily("mosaic_expert_misses", "Experts not found in memory.", now.expert_misses)
        yield CounterMetricFamily("mosaic_disk_bytes", "Bytes of experts read from the disk.", now.disk_bytes)
        hits = now.device_expert_hits
        yield CounterMetricFamily("mosaic_device_expert_hits", "Experts found on the device.", hits)
        yield CounterMetricFamily("mosaic_device_bytes", "Bytes of experts copied to the device.", now.device_bytes)
