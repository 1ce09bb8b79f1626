"""What a step's output means for the metrics."""

from __future__ import annotations

from common.metrics import WorkerMetrics
from worker.engine.events import StepOutput


def observe_step(metrics: WorkerMetrics, output: StepOutput, duration_s: float) -> None:
    """Counts one engine step."""
    stats = output.stats
    metrics.set_usage(
        running=stats.running,
        waiting=stats.waiting,
        empty=stats.empty_blocks,
        cached=stats.cached_blocks,
        referenced=stats.referenced_blocks,
        swapping=stats.swapping_blocks,
    )
    metrics.promised_blocks.set(stats.promised_blocks)
    metrics.kv_utilization.set(stats.num_held_tokens / max(1, stats.num_held_slots))
    metrics.prompt_tokens.inc(stats.num_prompt_tokens)
    metrics.prefix_hit_tokens.inc(stats.num_hit_tokens)
    metrics.preemptions.inc(stats.num_preemptions)
    metrics.yielded.inc(stats.num_yielded)
    metrics.overtakes.inc(stats.num_overtakes)
    metrics.recomputed_tokens.inc(stats.num_recomputed_tokens)
    metrics.swapped_tokens.labels("out").inc(stats.num_saved_tokens)
    metrics.swapped_tokens.labels("in").inc(stats.num_loaded_tokens)
    metrics.thrash_ratio.set(stats.thrash_ratio)
    metrics.output_tokens.inc(stats.num_sampled)
    metrics.abandoned.inc(stats.num_abandoned)
    if stats.num_rows:
        metrics.step_time.observe(duration_s)
        metrics.batch_size.observe(stats.num_rows)
        metrics.step_tokens.observe(stats.num_tokens)
        num_first = len(stats.first_chunk_waits_s)
        num_further = stats.num_rows - num_first - stats.num_decodes - stats.num_long_decodes
        for kind, count in (
            ("first_chunk", num_first),
            ("further_chunk", num_further),
            ("decode", stats.num_decodes),
            ("long_decode", stats.num_long_decodes),
        ):
            metrics.rows.labels(kind).inc(count)
        for wait_s in stats.first_chunk_waits_s:
            metrics.first_chunk_wait.observe(wait_s)
    for news in output.sessions.values():
        for each in news.outputs:
            if each.finish_reason is not None:
                metrics.finished.labels(each.finish_reason.name).inc()
        for rejected in news.rejected:
            metrics.rejected.labels(rejected.reason.name).inc()
