"""What a deployment's Prometheus endpoints say at one moment."""

from __future__ import annotations

import http.client
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

TIMEOUT_S = 5.0
WORKER, GATEWAY = "tidegate_worker_", "tidegate_gateway_"


class ReadError(Exception):
    """An endpoint that cannot be read; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One endpoint's samples: by name, then by the values of its labels, sorted by the labels' names."""

    samples: Mapping[str, Mapping[tuple[str, ...], float]]

    @classmethod
    def parse(cls, text: str) -> Reading:
        """Raises ValueError if the text is not Prometheus'."""
        samples: dict[str, dict[tuple[str, ...], float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = tuple(value for _, value in sorted(sample.labels.items()))
                samples.setdefault(sample.name, {})[labels] = sample.value
        return cls(samples)

    def total(self, name: str) -> float:
        """The sum over all labels; 0 if nothing was counted yet."""
        return sum(self.samples.get(name, {}).values())

    def labelled(self, name: str, *labels: str) -> float:
        """One series; 0 if nothing was counted yet."""
        return self.samples.get(name, {}).get(labels, 0.0)

    def has(self, prefix: str) -> bool:
        """Whether any metric's name begins so."""
        return any(name.startswith(prefix) for name in self.samples)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All endpoints, read one after the other; the order of the endpoints is that of the options."""

    at_s: float  # by a clock that never goes back
    workers: Sequence[Reading]
    gateways: Sequence[Reading]

    def worker_total(self, name: str) -> float:
        """A worker's metric, summed over workers and labels."""
        return sum(reading.total(WORKER + name) for reading in self.workers)

    def worker_labelled(self, name: str, *labels: str) -> float:
        """One series of a worker's metric, summed over workers."""
        return sum(reading.labelled(WORKER + name, *labels) for reading in self.workers)

    def gateway_total(self, name: str) -> float:
        """A gateway's metric, summed over gateways and labels."""
        return sum(reading.total(GATEWAY + name) for reading in self.gateways)

    def gateway_labelled(self, name: str, *labels: str) -> float:
        """One series of a gateway's metric, summed over gateways."""
        return sum(reading.labelled(GATEWAY + name, *labels) for reading in self.gateways)

    @property
    def queued(self) -> float:
        """Requests in the fleet's queue, by the largest that a gateway says: they look at the same one."""
        return max((reading.total(f"{GATEWAY}queue_depth") for reading in self.gateways), default=0.0)


def read(workers: Sequence[str], gateways: Sequence[str], at_s: float) -> Snapshot:
    """Reads all endpoints, each host:port. Raises ReadError."""
    return Snapshot(
        at_s,
        tuple(_fetch(address, WORKER, "worker") for address in workers),
        tuple(_fetch(address, GATEWAY, "gateway") for address in gateways),
    )


def _fetch(address: str, prefix: str, kind: str) -> Reading:
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_S) as response:
            reading = Reading.parse(response.read().decode())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ReadError(f"the metrics of {kind} {address} cannot be read: {error}") from error
    if not reading.has(prefix):
        raise ReadError(f"{address} is not a {kind}'s endpoint: it has no metric {prefix}*")
    return reading
