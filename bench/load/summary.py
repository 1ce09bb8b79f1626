"""The figures of a run: distributions of latency, throughput, goodput, and what was refused or failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil, sqrt

from bench.load.goodput import GoodputRule
from bench.load.record import INTERRUPTED, Record

PERCENTILES = (50, 90, 95, 99)


def percentile(ordered: Sequence[float], q: float) -> float:
    """The q-th percentile (0 to 100) of values in ascending order, linear between neighbours.

    Raises ValueError if there are none.
    """
    if not ordered:
        raise ValueError("no values, so no percentile")
    at = (len(ordered) - 1) * q / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Durations in seconds, in ascending order."""

    ordered: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Distribution:
        """The values that there are."""
        return cls(tuple(sorted(value for value in values if value is not None)))

    def ms(self, q: float) -> float | None:
        """A percentile in milliseconds; None without values."""
        return percentile(self.ordered, q) * 1e3 if self.ordered else None

    def to_json(self, name: str) -> dict[str, float | None]:
        """`mean_NAME_ms`, `median_NAME_ms`, `std_NAME_ms` (of the population) and `p50_NAME_ms` and so on."""
        keys = [f"mean_{name}_ms", f"median_{name}_ms", f"std_{name}_ms", *(f"p{q}_{name}_ms" for q in PERCENTILES)]
        if not self.ordered:
            return dict.fromkeys(keys)
        mean = sum(self.ordered) / len(self.ordered)
        deviation = sqrt(sum((value - mean) ** 2 for value in self.ordered) / len(self.ordered))
        values = [mean, percentile(self.ordered, 50), deviation, *(percentile(self.ordered, q) for q in PERCENTILES)]
        return {key: round(value * 1e3, 4) for key, value in zip(keys, values, strict=True)}


@dataclass(frozen=True, slots=True)
class Latencies:
    """The four metrics. Of completed requests only: what failed is counted, and has no latency worth a mean."""

    ttft: Distribution
    tpot: Distribution
    itl: Distribution
    e2el: Distribution

    @classmethod
    def of(cls, records: Iterable[Record]) -> Latencies:
        """Requests with one token have no TPOT; all gaps of all requests are one pool of ITL."""
        completed = [record for record in records if record.is_completed]
        return cls(
            Distribution.of(record.ttft_s for record in completed),
            Distribution.of(record.tpot_s for record in completed),
            Distribution.of(gap for record in completed for gap in record.itl_s),
            Distribution.of(record.e2e_s for record in completed),
        )

    def items(self) -> list[tuple[str, Distribution]]:
        """Name and distribution, in the order in which they are shown."""
        return [("ttft", self.ttft), ("tpot", self.tpot), ("itl", self.itl), ("e2el", self.e2el)]


def summarize(records: Sequence[Record], duration_s: float, rule: GoodputRule) -> dict[str, object]:
    """The figures under the keys of `vllm bench serve` where they mean the same.

    Requests that a stop interrupted are counted, and are in no rate or share.
    """
    completed = [record for record in records if record.is_completed]
    settled = [record for record in records if record.status != INTERRUPTED]
    refused = sum(record.is_refused for record in records)
    good = sum(rule.is_good(record) for record in records)
    prompt_tokens = sum(len(record.request.prompt) for record in completed)
    cached_tokens = sum(record.usage.cached_prompt_tokens for record in completed if record.usage)
    output_tokens = sum(record.num_output for record in completed)
    figures: dict[str, object] = {
        "duration": round(duration_s, 4),
        "num_prompts": len(records),
        "completed": len(completed),
        "failed": sum(record.is_failed for record in records),
        "refused": refused,
        "interrupted": len(records) - len(settled),
        "short_answers": sum(record.num_output < record.request.num_output for record in completed),
        "failures": dict(Counter(record.outcome for record in records if record.is_failed).most_common()),
        "rejection_rate": _share(refused, len(settled)),
        "goodput_rule": rule.to_json(),
        "slo_attainment": _share(good, len(settled)),
        "total_input_tokens": prompt_tokens,
        "total_cached_tokens": cached_tokens,
        "total_output_tokens": output_tokens,
        "request_throughput": _rate(len(completed), duration_s),
        "request_goodput": _rate(good, duration_s),
        "output_throughput": _rate(output_tokens, duration_s),
        "total_token_throughput": _rate(prompt_tokens + output_tokens, duration_s),
        "max_output_tokens_per_s": max(output_rate(records, duration_s), default=0),
        "max_concurrent_requests": _max_in_flight(records),
        "mean_concurrent_requests": _mean_in_flight(records, duration_s),
    }
    for name, distribution in Latencies.of(records).items():
        figures |= distribution.to_json(name)
    figures |= Distribution.of(record.queue_s for record in completed).to_json("queue")
    figures |= Distribution.of(record.lag_s for record in records if record.sent_s is not None).to_json("send_lag")
    return figures


def summarize_by(
    records: Iterable[Record], key: Callable[[Record], str], duration_s: float, rule: GoodputRule
) -> dict[str, dict[str, object]]:
    """The figures of each group of records, by the group's name."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    return {name: summarize(groups[name], duration_s, rule) for name in sorted(groups)}


GROUPINGS: dict[str, Callable[[Record], str]] = {
    "band": lambda record: record.request.origin.band_name,
    "tenant": lambda record: record.request.origin.sender.tenant_id,
    "kind": lambda record: record.request.kind,
}


def output_rate(records: Iterable[Record], duration_s: float) -> list[int]:
    """Output tokens received in each whole or begun second, failed and interrupted requests' too."""
    counts = [0] * ceil(duration_s)
    for record in records:
        for at, num_tokens in record.deliveries:
            if 0 <= at < len(counts):
                counts[int(at)] += num_tokens
    return counts


PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2
"""A token's share in the service that a tenant got; output costs more, for each of its tokens takes a step."""


def cumulative_service(records: Iterable[Record], times: Sequence[float]) -> dict[str, list[float]]:
    """The weighted tokens that each tenant got up to each of `times` (ascending).

    A prompt counts at its first token, as if it were served in that moment; outputs count as they come.
    """
    served: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        events = served.setdefault(record.request.origin.sender.tenant_id, [])
        if record.deliveries:
            events.append((record.deliveries[0][0], PROMPT_WEIGHT * len(record.request.prompt)))
        events.extend((at, OUTPUT_WEIGHT * num_tokens) for at, num_tokens in record.deliveries)
    curves = {}
    for tenant, events in sorted(served.items()):
        events.sort()
        total, position, curve = 0.0, 0, []
        for time in times:
            while position < len(events) and events[position][0] <= time:
                total += events[position][1]
                position += 1
            curve.append(total)
        curves[tenant] = curve
    return curves


def in_flight(records: Iterable[Record], times: Sequence[float]) -> list[int]:
    """Requests that were due and not ended at each of `times` (ascending)."""
    changes = _changes(records)
    count, position, counts = 0, 0, []
    for time in times:
        while position < len(changes) and changes[position][0] <= time:
            count += changes[position][1]
            position += 1
        counts.append(count)
    return counts


def _changes(records: Iterable[Record]) -> list[tuple[float, int]]:
    """Moments at which the number in flight grows or shrinks; an end comes before a begin of the same moment."""
    changes = []
    for record in records:
        changes.append((record.scheduled_s, 1))
        if record.end_s is not None:
            changes.append((record.end_s, -1))
    return sorted(changes)


def _max_in_flight(records: Iterable[Record]) -> int:
    count = highest = 0
    for _, change in _changes(records):
        count += change
        highest = max(highest, count)
    return highest


def _mean_in_flight(records: Iterable[Record], duration_s: float) -> float | None:
    """Over the whole run; a request without an end lasts until the run's."""
    spans = [(duration_s if each.end_s is None else each.end_s) - each.scheduled_s for each in records]
    return round(sum(spans) / duration_s, 4) if duration_s > 0 else None


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 6) if whole else None


def _rate(count: int, duration_s: float) -> float | None:
    return round(count / duration_s, 4) if duration_s > 0 else None
