"""A deployment's own figures during a run, read from its Prometheus endpoints."""

from __future__ import annotations

import asyncio
import http.client
import urllib.request
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field

from prometheus_client.parser import text_string_to_metric_families

BLOCK_STATES = ("referenced", "cached", "swapping", "empty")
SCRAPE_TIMEOUT_S = 2.0

Values = dict[tuple[str, str], float]
"""By metric's name and the value of its label (empty without one), summed over all endpoints."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at all endpoints. Numbers are sums over workers, or over bands; counters count from their own start."""

    at_s: float  # since the run's start
    running: float
    waiting: float  # at workers
    queued: float  # at gateways, by the largest that any of them says: they look at one queue
    blocks: Mapping[str, float]  # KV blocks by state
    preemptions: float
    output_tokens: float
    prompt_tokens: float
    prefix_hit_tokens: float

    def to_json(self) -> dict[str, object]:
        """For the result's timeline."""
        return asdict(self) | {"at_s": round(self.at_s, 3)}


@dataclass(slots=True)
class Timeline:
    """Samples in order of time, and how often an endpoint could not be read."""

    samples: list[Sample] = field(default_factory=list)
    num_errors: int = 0
    last_error: str = ""


def parse(text: str) -> Values:
    """What one endpoint says. Metrics have at most one label that matters here; a worker's name does not.

    Raises ValueError if the text is not Prometheus'.
    """
    values: Values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            label = sample.labels.get("state") or sample.labels.get("band") or ""
            key = (sample.name, label)
            values[key] = values.get(key, 0.0) + sample.value
    return values


def combine(at_s: float, workers: Iterable[Values], gateways: Iterable[Values]) -> Sample:
    """One sample of what all endpoints said; what none of them has counts as 0."""
    workers = list(workers)

    def total(name: str, label: str = "") -> float:
        return sum(each.get((f"tidegate_worker_{name}", label), 0.0) for each in workers)

    depths = (sum(value for (name, _), value in each.items() if name.endswith("_queue_depth")) for each in gateways)
    return Sample(
        at_s,
        running=total("running"),
        waiting=total("waiting"),
        queued=max(depths, default=0.0),
        blocks={state: total("blocks", state) for state in BLOCK_STATES},
        preemptions=total("preemptions_total"),
        output_tokens=total("output_tokens_total"),
        prompt_tokens=total("prompt_tokens_total"),
        prefix_hit_tokens=total("prefix_hit_tokens_total"),
    )


@dataclass(frozen=True, slots=True)
class Endpoints:
    """host:port of the Prometheus endpoints to be read."""

    workers: tuple[str, ...] = ()
    gateways: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.workers or self.gateways)


def fetch(address: str) -> Values:
    """Reads one endpoint. Raises OSError, HTTPException or ValueError."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=SCRAPE_TIMEOUT_S) as response:
        return parse(response.read().decode())


async def watch(
    endpoints: Endpoints,
    timeline: Timeline,
    now: Callable[[], float],
    interval_s: float,
    sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
) -> None:
    """Adds a sample to the timeline every `interval_s`, until cancelled; a look that fails is counted and left out."""
    while endpoints:
        at_s = now()
        try:
            workers = [await asyncio.to_thread(fetch, address) for address in endpoints.workers]
            gateways = [await asyncio.to_thread(fetch, address) for address in endpoints.gateways]
        except (OSError, http.client.HTTPException, ValueError) as error:
            timeline.num_errors += 1
            timeline.last_error = str(error)
        else:
            timeline.samples.append(combine(at_s, workers, gateways))
        await sleep(interval_s)
