"""What metrics and log say of a request that has ended."""

from __future__ import annotations

import structlog

from common.metrics import GatewayMetrics
from gateway.lifecycle import Outcome
from gateway.live import LiveRequest

_log = structlog.get_logger(__name__)


def show_ended(
    metrics: GatewayMetrics, live: LiveRequest, outcome: Outcome, num_output_tokens: int, *, now: float
) -> None:
    """Counts it and writes one line. `num_output_tokens`: of this run of it; `now`: monotonic seconds."""
    of_band = metrics.of_band(live.request.band)
    of_band.ended(live.lifecycle.state.value).inc()
    if outcome.error is not None:
        metrics.rejected.labels(outcome.error.reason.name).inc()
    of_band.prompt_tokens.inc(live.num_payable_prompt_tokens)
    of_band.cached_prompt_tokens.inc(live.cached_prompt_tokens)
    of_band.completion_tokens.inc(num_output_tokens)
    if live.first_token_at is not None and live.last_token_at is not None:
        of_band.ttft.observe(live.first_token_at - live.arrived)
        if num_output_tokens > 1:
            gap = (live.last_token_at - live.first_token_at) / (num_output_tokens - 1)
            of_band.tpot.observe(gap)
    _log.info(
        "request_ended",
        state=live.lifecycle.state.value,
        reason=outcome.error.reason.name if outcome.error is not None else None,
        prompt_tokens=len(live.request.prompt_token_ids),
        output_tokens=num_output_tokens,
        total_s=round(now - live.arrived, 4),
    )
