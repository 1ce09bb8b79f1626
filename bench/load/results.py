"""The JSON of a run and of a sweep; keys follow `vllm bench serve` where they mean the same."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from bench.load.campaign import Run
from bench.load.goodput import CapacitySearch, GoodputRule, Judged
from bench.load.record import Record
from bench.load.summary import GROUPINGS, cumulative_service, summarize_by
from bench.report import machine

BACKEND = "tidegate-grpc"
_PACKAGES = ("tidegate", "grpcio", "protobuf", "torch", "numba")
_SECRETS = {"TIDEGATE_FLEET_KEY", "TIDEGATE_REDIS_URL", "TIDEGATE_API_KEY"}
SERVICE_POINTS = 120
"""Moments at which the cumulative service of a run is stated."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a result says about where it came from."""

    model: str
    workload: Mapping[str, object]  # name, lengths, caps, trace: all that decides what was sent
    arrivals: Mapping[str, object]
    tenants: Sequence[Mapping[str, object]]
    rule: GoodputRule
    label: str = ""
    is_local: bool = False  # the deployment was started for this measurement, with this environment


def surroundings(is_local: bool) -> dict[str, object]:
    """Machine and versions; for a deployment of our own, what the environment told it (secrets left out)."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    found: dict[str, object] = {"load_generator": machine(), "versions": versions}
    if is_local:
        told = {name: value for name, value in os.environ.items() if name.startswith("TIDEGATE_")}
        found["environment"] = {name: value for name, value in sorted(told.items()) if name not in _SECRETS}
    return found


def run_document(run: Run, setup: Setup, *, is_detailed: bool) -> dict[str, object]:
    """Everything about one run. `is_detailed` adds the gaps between the deliveries of every request."""
    document: dict[str, object] = {
        "date": run.date,
        "backend": BACKEND,
        "label": setup.label or run.point.label,
        "model_id": setup.model,
        "request_rate": "inf" if run.point.rate is None else run.point.rate,
        "max_concurrency": run.point.concurrency,
        "is_whole": run.is_whole,
        "num_planned": run.num_planned,
    }
    document |= {key: value for key, value in setup.arrivals.items() if key not in document}
    document |= run.figures
    for name, key in GROUPINGS.items():
        document[f"by_{name}"] = summarize_by(run.records, key, run.duration_s, setup.rule)
    times = service_times(run)
    document["service_by_tenant"] = {"at_s": times, "weighted_tokens": cumulative_service(run.records, times)}
    document["timeline"] = [sample.to_json() for sample in run.timeline.samples]
    document["timeline_errors"] = {"count": run.timeline.num_errors, "last": run.timeline.last_error}
    document["workload"] = setup.workload
    document["tenants"] = setup.tenants
    document["surroundings"] = surroundings(setup.is_local)
    return document | _columns(run.records, is_detailed=is_detailed)


def _columns(records: Sequence[Record], *, is_detailed: bool) -> dict[str, object]:
    """One list for each property of the requests, all of one order; times in seconds from the start."""
    columns: dict[str, object] = {
        "input_lens": [len(record.request.prompt) for record in records],
        "output_lens": [record.num_output for record in records],
        "ttfts": [_rounded(record.ttft_s) for record in records],
        "latencies": [_rounded(record.e2e_s) for record in records],
        "scheduled": [_rounded(record.scheduled_s) for record in records],
        "sent": [_rounded(record.sent_s) for record in records],
        "statuses": [record.outcome for record in records],
        "errors": [record.outcome if record.is_failed else "" for record in records],
        "kinds": [record.request.kind for record in records],
        "tenant_ids": [record.request.origin.sender.tenant_id for record in records],
        "bands": [record.request.origin.band_name for record in records],
    }
    if is_detailed:
        columns["itls"] = [[_rounded(gap) for gap in record.itl_s] for record in records]
        columns["delivered_tokens"] = [[num_tokens for _, num_tokens in record.deliveries] for record in records]
    return columns


def service_times(run: Run) -> list[float]:
    """Evenly spread over the run, its end included."""
    return [round(run.duration_s * step / SERVICE_POINTS, 4) for step in range(SERVICE_POINTS + 1)]


def sweep_document(
    runs: Sequence[Run], setup: Setup, search: CapacitySearch | None, tried: Sequence[Judged]
) -> dict[str, object]:
    """The figures of all runs beside each other, and the capacity if it was searched for."""
    document: dict[str, object] = {
        "model_id": setup.model,
        "label": setup.label,
        "workload": setup.workload,
        "arrivals": setup.arrivals,
        "goodput_rule": setup.rule.to_json(),
        "runs": [{"point": run.point.label, "is_whole": run.is_whole} | run.figures for run in runs],
    }
    if search is not None:
        document["capacity"] = {
            "request_rate": search.capacity(tried),
            "target_attainment": search.target,
            "tried": [{"request_rate": each.rate, "slo_attainment": each.attainment} for each in tried],
        }
    return document


def file_name(index: int, run: Run) -> str:
    """`01-rate-2` and the like: safe on every file system, in order of the runs."""
    return f"{index + 1:02d}-{re.sub('[^a-z0-9.]+', '-', run.point.label.lower()).strip('-')}"


def write_json(path: Path, document: Mapping[str, object]) -> None:
    """Writes the document as a whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(document, indent=1, allow_nan=False), encoding="utf-8")
    temporary.replace(path)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
