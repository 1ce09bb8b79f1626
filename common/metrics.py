"""Every Prometheus metric of both programs, named in this one place, and the HTTP endpoint that shows them.

Label values are enums of ours (band, reason, state, outcome) or the deployment's own workers and models; never tenants,
request ids or anything else a client chooses.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from itertools import accumulate
from types import TracebackType

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from common.types import Band, BlockUsage

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_S = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_WAIT_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_BLOCK_STATES = ("empty", "cached", "referenced", "swapping")
_BATCH = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_STEP_TOKENS = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class GatewayMetrics:
    """What a gateway counts. One instance for each registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tidegate_gateway_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"tidegate_gateway_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"tidegate_gateway_{name}", text, labels, buckets=buckets, registry=registry)

        self.requests = counter("requests_total", "Requests ended, by band and outcome", "band", "outcome")
        self.rejected = counter("rejected_total", "Requests refused or failed, by reason", "reason")
        self.live_streams = gauge("live_streams", "Requests that this gateway holds now")
        self.queue_depth = gauge("queue_depth", "Waiting requests of the whole fleet, by band", "band")
        self.queue_oldest_wait = gauge("queue_oldest_wait_seconds", "How long the head of a band has waited", "band")
        self.queue_wait = histogram("queue_wait_seconds", "From acceptance to the claim", _WAIT_S, "band")
        self.ttft = histogram("ttft_seconds", "From arrival to the first token", _TTFT_S, "band")
        self.tpot = histogram("tpot_seconds", "(last - first token) / (output tokens - 1)", _TOKEN_S, "band")
        self.itl = QuickHistogram(
            "tidegate_gateway_itl_seconds", "Gap between deliveries of a stream", _TOKEN_S, "band"
        )
        registry.register(self.itl)
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens of ended requests", "band")
        self.cached_prompt_tokens = counter("cached_prompt_tokens_total", "Of these, found in a prefix cache", "band")
        self.completion_tokens = counter("completion_tokens_total", "Output tokens of ended requests", "band")
        self.late_tokens = counter("late_tokens_total", "Tokens made for requests that had ended or were elsewhere")
        self.requeued = counter("requeued_total", "Claims undone, by cause", "cause")
        self.sessions = gauge("worker_sessions", "Sessions with workers, by state", "state")
        self.worker_blocks = gauge("worker_blocks", "KV blocks as the worker reports them", "worker", "state")
        self.worker_running = gauge("worker_running", "Running requests as the worker reports them", "worker")
        self.worker_waiting = gauge("worker_waiting", "Waiting requests as the worker reports them", "worker")
        self.store_up = gauge("store_up", "1 while the queue's store answers")
        self.admitted_without_store = counter(
            "admitted_without_store_total", "Requests that were admitted from this gateway's share of a tenant's limits"
        )
        self.store_errors = counter("store_errors_total", "Calls that did not reach the queue's store")
        self.dispatches = counter("dispatches_total", "Runs of the dispatch script")
        self.claims = counter("claims_total", "Claims received for own requests")
        self._of_band: dict[Band, BandMetrics] = {}
        self._of_worker: dict[str, _WorkerUsage] = {}

    def of_band(self, band: Band) -> BandMetrics:
        """What is counted for every request or token of a band."""
        found = self._of_band.get(band)
        if found is None:
            found = self._of_band[band] = BandMetrics(self, band.name.lower())
        return found

    def set_worker_usage(self, worker_id: str, usage: BlockUsage) -> None:
        """Shows a worker's latest numbers."""
        found = self._of_worker.get(worker_id)
        if found is None:
            self._of_worker[worker_id] = _WorkerUsage(self, worker_id, usage)
        else:
            found.usage = usage

    def forget_worker(self, worker_id: str) -> None:
        """Drops a worker's series, so that restarts under new names do not pile up."""
        self._of_worker.pop(worker_id, None)
        for state in _BLOCK_STATES:
            _remove(self.worker_blocks, worker_id, state)
        _remove(self.worker_running, worker_id)
        _remove(self.worker_waiting, worker_id)


class QuickHistogram(Collector):
    """A histogram with one label for what comes with every token: the library's own locks and walks its buckets.

    Observed in one thread; read in any.
    """

    def __init__(self, name: str, text: str, bounds: tuple[float, ...], label: str) -> None:
        """`bounds`: the largest value of each bucket, ascending; a last one takes what is larger."""
        self._name, self._text, self._label = name, text, label
        self._bounds = bounds
        self._series: dict[str, QuickSeries] = {}

    def labels(self, value: str) -> QuickSeries:
        """The series of a label's value."""
        return self._series.setdefault(value, QuickSeries(self._bounds))

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """The present numbers."""
        family = HistogramMetricFamily(self._name, self._text, labels=[self._label])
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for value, series in list(self._series.items()):
            family.add_metric([value], list(zip(names, accumulate(series.counts), strict=True)), series.total)
        return [family]


class QuickSeries:
    """One series of a QuickHistogram."""

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # by bucket
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class BandMetrics:
    """One band's series of some metrics, found once: looking one up costs more than counting."""

    def __init__(self, metrics: GatewayMetrics, band: str) -> None:
        self._requests = metrics.requests
        self._band = band
        self._ended: dict[str, Counter] = {}
        self.queue_wait = metrics.queue_wait.labels(band)
        self.ttft = metrics.ttft.labels(band)
        self.tpot = metrics.tpot.labels(band)
        self.itl = metrics.itl.labels(band)
        self.prompt_tokens = metrics.prompt_tokens.labels(band)
        self.cached_prompt_tokens = metrics.cached_prompt_tokens.labels(band)
        self.completion_tokens = metrics.completion_tokens.labels(band)

    def ended(self, outcome: str) -> Counter:
        """Requests that ended so."""
        found = self._ended.get(outcome)
        if found is None:
            found = self._ended[outcome] = self._requests.labels(self._band, outcome)
        return found


class _WorkerUsage:
    """One worker's series, which read its latest numbers when they are asked for."""

    def __init__(self, metrics: GatewayMetrics, worker_id: str, usage: BlockUsage) -> None:
        self.usage = usage
        for state in _BLOCK_STATES:
            metrics.worker_blocks.labels(worker_id, state).set_function(self._reader(state))
        metrics.worker_running.labels(worker_id).set_function(self._reader("running"))
        metrics.worker_waiting.labels(worker_id).set_function(self._reader("waiting"))

    def _reader(self, name: str) -> Callable[[], float]:
        return lambda: float(getattr(self.usage, name))


class WorkerMetrics:
    """What a worker counts. One instance for each registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tidegate_worker_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"tidegate_worker_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"tidegate_worker_{name}", text, buckets=buckets, registry=registry)

        self.running = gauge("running", "Requests that hold a slot")
        self.waiting = gauge("waiting", "Requests accepted and not running")
        self.sessions = gauge("sessions", "Gateways connected")
        self.blocks = gauge("blocks", "KV blocks by state", "state")
        self.promised_blocks = gauge("promised_blocks", "Of the free KV blocks, those promised to running requests")
        self.kv_utilization = gauge("kv_utilization", "Of the token slots in referenced KV blocks, those with a token")
        self.prompt_tokens = counter("prompt_tokens_total", "Prompt tokens of admitted requests")
        self.prefix_hit_tokens = counter("prefix_hit_tokens_total", "Found in the prefix cache at admissions")
        self.output_tokens = counter("output_tokens_total", "Tokens generated")
        self.preemptions = counter("preemptions_total", "Running requests set back to waiting")
        self.yielded = counter("yielded_total", "Of these, long requests that made way for a newcomer")
        self.overtakes = counter("overtakes_total", "Admissions before an earlier request that waits for memory")
        self.recomputed_tokens = counter("recomputed_tokens_total", "Tokens computed again after a preemption")
        self.swapped_tokens = counter(
            "swapped_tokens_total", "Tokens of preempted requests copied to host memory and back", "direction"
        )
        self.thrash_ratio = gauge("thrash_ratio", "Of the recently computed tokens, those lost to a preemption before")
        self.rows = counter("step_rows_total", "Requests in steps, by what was computed of them", "kind")
        self.first_chunk_wait = histogram("first_chunk_wait_seconds", "From arrival to the first chunk's step", _WAIT_S)
        self.finished = counter("finished_total", "Requests ended, by finish reason", "reason")
        self.abandoned = counter("abandoned_total", "Requests ended with the session of their gateway")
        self.rejected = counter("rejected_total", "Submissions not taken, by reason", "reason")
        self.step_time = histogram("step_seconds", "Duration of an engine step", _STEP_S)
        self.batch_size = histogram("batch_size", "Requests in a step", _BATCH)
        self.step_tokens = histogram("step_tokens", "Tokens computed in a step", _STEP_TOKENS)
        self.max_num_seqs = gauge("max_num_seqs", "Requests in a step at most")
        self.max_num_batched_tokens = gauge("max_num_batched_tokens", "Tokens in a step at most")
        self.step_budget = gauge("step_budget_seconds", "A step's length while prompts are computed, mode full")
        self.first_chunk = gauge("first_chunk_seconds", "A new request's wait until long ones make way, mode full")

    def set_bounds(
        self, *, max_num_seqs: int, max_num_batched_tokens: int, step_budget_s: float, first_chunk_s: float
    ) -> None:
        """Shows how the worker was started, so that the other numbers can be judged."""
        self.max_num_seqs.set(max_num_seqs)
        self.max_num_batched_tokens.set(max_num_batched_tokens)
        self.step_budget.set(step_budget_s)
        self.first_chunk.set(first_chunk_s)

    def set_usage(self, *, running: int, waiting: int, **blocks: int) -> None:
        """Shows the latest numbers of requests, and of KV blocks by state."""
        for state, count in blocks.items():
            self.blocks.labels(state).set(count)
        self.running.set(running)
        self.waiting.set(waiting)


def _remove(metric: Gauge, *labels: str) -> None:
    try:
        metric.remove(*labels)
    except KeyError:  # never set
        return


class MetricsServer:
    """Serves one registry at http://host:port/metrics from a thread of its own; a context manager that stops it."""

    def __init__(self, listen: str, registry: CollectorRegistry) -> None:
        """`listen` is host:port; port 0 picks a free one. Raises OSError if it is taken."""
        host, _, port = listen.rpartition(":")
        self._server, self._thread = start_http_server(int(port), host.strip("[]") or "0.0.0.0", registry)
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stops listening and ends the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
