"""What a measurement of a gateway found, and how it is shown."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import median

from bench.report import machine, markdown_table


@dataclass(frozen=True, slots=True)
class Result:
    """One gateway, measured once."""

    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p99_ms: float
    crowd_ttft_p50_ms: float  # as the clients of all streams saw it
    crowd_ttft_p99_ms: float
    crowd_itl_p99_ms: float
    transit_p50_ms: float
    transit_p99_ms: float
    tokens_per_s: float
    cpu_us_per_token: float
    gateway_cpu: float  # cores, while it streamed
    worker_cpu: float
    redis_cpu: float
    clients_cpu: float
    shares: tuple[float, ...]  # of the gateway's cores, by process
    admissions_per_s: float
    admission_cpu_ms: float
    num_failed: int
    resident_mib: tuple[float, ...]  # of the gateway, in equal intervals
    redis_mib: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured."""

    num_streams: int
    rate: float
    batch: int
    seconds: float
    admission_s: float
    processes: int
    profile: str


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of the values do not exceed; 0 if there are none."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1).__int__()] if ordered else 0.0


def table(results: dict[str, list[Result]]) -> list[list[str]]:
    """Medians of the rounds of every gateway; with two of them, a column of ratios."""
    rows = [["", *results]]
    for name, label, digits in ROWS:
        values = [median(getattr(each, name) for each in rounds) for rounds in results.values()]
        rows.append([label, *(f"{value:.{digits}f}" for value in values)])
        if len(values) == 2:
            rows[-1].append(f"{values[1] / values[0]:.2f}" if values[0] else "-")
    if len(results) == 2:
        rows[0].append("ratio")
    return rows


ROWS = (
    ("ttft_p50_ms", "added TTFT P50 (ms)", 1),
    ("ttft_p99_ms", "added TTFT P99 (ms)", 1),
    ("itl_p99_ms", "added ITL P99 (ms)", 1),
    ("crowd_ttft_p50_ms", "TTFT P50 of the crowd (ms)", 1),
    ("crowd_ttft_p99_ms", "TTFT P99 of the crowd (ms)", 1),
    ("crowd_itl_p99_ms", "ITL P99 of the crowd (ms)", 1),
    ("transit_p50_ms", "token on its way P50 (ms)", 1),
    ("transit_p99_ms", "token on its way P99 (ms)", 1),
    ("tokens_per_s", "tokens/s delivered", 0),
    ("cpu_us_per_token", "gateway CPU per token (µs)", 1),
    ("gateway_cpu", "gateway CPU while streaming (cores)", 2),
    ("worker_cpu", "null workers' CPU while streaming (cores)", 2),
    ("redis_cpu", "Redis's CPU while streaming (cores)", 2),
    ("clients_cpu", "clients' CPU while streaming (cores)", 2),
    ("admissions_per_s", "admissions/s at saturation", 0),
    ("admission_cpu_ms", "gateway CPU per admission (ms)", 2),
    ("num_failed", "failed requests", 0),
)


def describe(plan: Plan, results: dict[str, list[Result]], busy: float) -> str:
    """The block of the document."""
    ours = results[list(results)[-1]][-1]
    now = datetime.now(UTC).strftime("%Y-%m-%d")
    shares = ", ".join(f"{100 * share:.0f} %" for share in ours.shares)
    processes = "one process" if plan.processes == 1 else f"{plan.processes} processes"
    return "\n".join(
        [
            f"{now}, {machine()}. Just before, other work took {busy:.1f} of its cores, with a load average of "
            f"{os.getloadavg()[2]:.0f}: what that work takes away is in every figure but CPU per token and admission.",
            f"{plan.num_streams} streams at {plan.rate:g} tokens/s each for {plan.seconds:g} s, {processes}, "
            f"null workers of {plan.batch} requests; medians of {len(results[list(results)[-1]])} round(s).",
            "",
            markdown_table(table(results)),
            "",
            f"Resident memory over that time, in MiB: gateway {_course(ours.resident_mib)}; "
            f"Redis {_course(ours.redis_mib)}.",
            *([f"Of the gateway's processor time, by process: {shares}."] if plan.processes > 1 else []),
        ]
    )


def _course(values: Sequence[float]) -> str:
    """About ten of the values, the first and the last among them."""
    step = max(1, round((len(values) - 1) / 10))
    return " → ".join(f"{value:.1f}" for value in [*values[:-1:step], values[-1]])
