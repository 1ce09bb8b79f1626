"""Every metric is named in one module, and somebody keeps it."""

from __future__ import annotations

import re

import pytest
from prometheus_client import CollectorRegistry

from common.metrics import GatewayMetrics, WorkerMetrics
from tests.architecture.source_tree import ROOT


@pytest.mark.parametrize(("metrics", "package"), [(GatewayMetrics, "gateway"), (WorkerMetrics, "worker")])
def test_no_metric_stays_at_nothing(metrics: type[GatewayMetrics | WorkerMetrics], package: str) -> None:
    """An attribute that neither the program nor a method of the metrics themselves changes would always read 0."""
    sources = [*(ROOT / package).rglob("*.py"), ROOT / "common" / "metrics.py"]
    text = "\n".join(path.read_text() for path in sources)
    changed = set(re.findall(r"\._?(\w+)\.(?:labels|inc|dec|set|observe)\b", text))
    names = {name for name in vars(metrics(CollectorRegistry())) if not name.startswith("_")}
    assert names - changed == set()
