"""What a step's output means for the metrics."""

from __future__ import annotations

from common.metrics import WorkerMetrics
from worker.engine.events import StepOutput


def observe_step(metrics: WorkerMetrics, output: StepOutput, duration_s: float) -> None:
    """Counts one engine step."""
    stats = output.stats
    metrics.running.set(stats.running)
    metrics.waiting.set(stats.waiting)
    metrics.blocks.labels("empty").set(stats.empty_blocks)
    metrics.blocks.labels("cached").set(stats.cached_blocks)
    metrics.blocks.labels("referenced").set(stats.referenced_blocks)
    metrics.blocks.labels("swapping").set(stats.swapping_blocks)
    metrics.prefix_hit_tokens.inc(stats.num_hit_tokens)
    metrics.preemptions.inc(stats.num_preemptions)
    metrics.output_tokens.inc(stats.num_sampled)
    if stats.num_rows:
        metrics.step_time.observe(duration_s)
        metrics.batch_size.observe(stats.num_rows)
        metrics.step_tokens.observe(stats.num_tokens)
    for news in output.sessions.values():
        for each in news.outputs:
            if each.finish_reason is not None:
                metrics.finished.labels(each.finish_reason.name).inc()
        for rejected in news.rejected:
            metrics.rejected.labels(rejected.reason.name).inc()
