"""One measurement from its options to its files: connect, warm up, measure, write."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path

from rich.console import Console

from bench.load import shapes
from bench.load.arrivals import Process
from bench.load.campaign import Campaign, Conditions
from bench.load.display import Display, figures_table
from bench.load.goodput import CapacitySearch, GoodputRule, Judged
from bench.load.plan import DEFAULT_REQUESTS, Plan, Point, Source
from bench.load.report import capacity_line, markdown, warnings, write_all
from bench.load.results import Setup
from bench.load.scrape import Endpoints
from bench.load.shapes import Caps, Fitted, fit
from bench.load.target import Gateway
from bench.load.tenants import Sender, TenantsError, describe, local_tenants
from bench.report import PAGE, replace_block
from bench.traces import Trace
from client import Model
from common.clock import Clock
from common.types import Band
from launcher.stack import Stack, StackOptions


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for, checked and with defaults filled in."""

    workload: str | Trace
    points: tuple[Point, ...]
    output: Path
    address: str
    senders: tuple[Sender, ...]  # empty with `is_local`: the deployment's own
    shares: Mapping[str, float] = field(default_factory=dict)  # by tenant, instead of the senders' own
    bands: Mapping[Band, float] = field(default_factory=dict)
    endpoints: Endpoints = field(default_factory=Endpoints)
    process: Process = Process.POISSON
    burstiness: float = 1.0
    burst_size: int = 16
    time_scale: float = 1.0
    scale: float = 1.0
    max_prompt: int | None = None
    max_output: int | None = None
    is_dropping: bool = False
    num_requests: int | None = None
    duration_s: float | None = None
    max_in_flight: int | None = None
    rule: GoodputRule = field(default_factory=GoodputRule)
    search: CapacitySearch | None = None
    num_warmups: int = 2
    model: str = ""
    temperature: float = 0.0
    timeout_s: float = 600.0
    seed: int = 0
    scrape_interval_s: float = 0.5
    label: str = ""
    is_local: bool = False
    is_detailed: bool = False
    has_pictures: bool = True
    command: str = ""  # to be named on the performance page, where the figures then go; empty: nothing goes there


async def measure(options: Options, console: Console, clock: Clock) -> bool:
    """Measures and writes; returns whether it came to its end, rather than to a stop.

    Whatever was measured is written, also after Ctrl-C or when the deployment dies. Raises ClientError if the gateway
    cannot be asked, and the launcher's errors with `is_local`.
    """
    if not options.is_local:
        return await _measure(options, console, clock)
    console.print("Starting a private deployment")
    # Its logs stay beside the results.
    stack_options = StackOptions(options.output / "deployment", tenants=local_tenants(options.senders))
    async with Stack(stack_options, lambda text: console.print(f"... {text}", highlight=False, markup=False)) as stack:
        local = replace(
            options,
            address=stack.gateway_address,
            senders=options.senders
            or tuple(
                Sender(tenant.tenant_id, tenant.api_key, band=Band[tenant.band.upper()]) for tenant in stack.tenants
            ),
            endpoints=Endpoints((stack.worker_metrics,), (stack.gateway_metrics,)),
        )
        return await stack.run(_measure(local, console, clock))


async def _measure(options: Options, console: Console, clock: Clock) -> bool:
    senders = _with_shares(options.senders, options.shares)
    gateway = Gateway(
        options.address, senders, model=options.model, temperature=options.temperature, timeout_s=options.timeout_s
    )
    async with gateway:
        model = await gateway.describe()
        source = make_source(options, model)
        plan = _plan(options, source, senders, model)
        setup = _setup(options, source, senders, model)
        display = Display(console, clock)
        stop = asyncio.Event()
        conditions = Conditions(plan, options.rule, options.endpoints, options.scrape_interval_s)
        campaign = Campaign(conditions, gateway.send, clock, stop, on_start=display.start, on_end=display.end)
        tried: Sequence[Judged] = ()
        console.print(f"Load on {model.name} at {options.address}", highlight=False)
        try:
            with _stopped_by_signals(stop):
                for record in await campaign.warm_up(options.num_warmups):
                    if record.is_failed:
                        console.print(f"warm-up failed: {record.outcome}", style="yellow")
                async with display.shown():
                    if options.search is None:
                        await campaign.sweep(options.points)
                    else:
                        tried = await campaign.find_capacity(options.search)
        finally:
            _write(options, console, campaign, setup, tried)
    return not stop.is_set()


def _write(options: Options, console: Console, campaign: Campaign, setup: Setup, tried: Sequence[Judged]) -> None:
    if not campaign.runs:
        return
    first = write_all(
        options.output,
        campaign.runs,
        setup,
        search=options.search,
        tried=tried,
        is_detailed=options.is_detailed,
        has_pictures=options.has_pictures,
    )
    console.print(figures_table(campaign.runs))
    for line in warnings(campaign.runs):
        console.print(line, style="yellow", markup=False, highlight=False)
    if options.command and all(run.is_whole for run in campaign.runs):
        replace_block(PAGE, "load", markdown(campaign.runs, setup, options.search, tried, options.command))
    if options.search is not None:
        console.print(capacity_line(options.search, tried, setup), style="bold", highlight=False)
    console.print(f"Written: {first}", highlight=False, soft_wrap=True)


@contextmanager
def _stopped_by_signals(stop: asyncio.Event) -> Iterator[None]:
    """The first SIGINT or SIGTERM sets `stop`; a second one does what it always does."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def on_signal() -> None:
        stop.set()
        for number in numbers:
            loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def make_source(options: Options, model: Model) -> Source:
    """The workload's requests within what the model takes."""
    caps = Caps(model.context_length, options.max_prompt, options.max_output, options.is_dropping)
    workload = options.workload
    if isinstance(workload, Trace):
        from_trace = shapes.from_trace(workload, scale=options.scale)
        return lambda number: fit(from_trace[:number], caps)
    draw = shapes.WORKLOADS[workload]
    return lambda number: fit(draw(number or DEFAULT_REQUESTS, seed=options.seed, scale=options.scale), caps)


def _with_shares(senders: Sequence[Sender], shares: Mapping[str, float]) -> tuple[Sender, ...]:
    unknown = shares.keys() - {sender.tenant_id for sender in senders}
    if unknown:
        known = ", ".join(sender.tenant_id for sender in senders)
        raise TenantsError(f"no tenant {', '.join(sorted(unknown))} to give a share; there are: {known}")
    return tuple(replace(each, share=shares.get(each.tenant_id, each.share)) for each in senders)


def _plan(options: Options, source: Source, senders: tuple[Sender, ...], model: Model) -> Plan:
    return Plan(
        source,
        senders,
        model.vocab_size,
        bands=options.bands,
        process=options.process,
        burstiness=options.burstiness,
        burst_size=options.burst_size,
        time_scale=options.time_scale,
        num_requests=options.num_requests,
        duration_s=options.duration_s,
        max_in_flight=options.max_in_flight,
        seed=options.seed,
    )


def _setup(options: Options, source: Source, senders: Sequence[Sender], model: Model) -> Setup:
    """What the result states; caps are counted over the requests of the largest point."""
    wanted = options.num_requests
    if wanted is None and options.duration_s is not None:
        wanted = max((ceil(each.rate * options.duration_s) for each in options.points if each.rate), default=None)
    fitted: Fitted = source(wanted)
    workload: dict[str, object] = {
        "name": options.workload.path.name if isinstance(options.workload, Trace) else options.workload,
        "length_scale": options.scale,
        "context_length": model.context_length,
        "max_prompt": options.max_prompt,
        "max_output": options.max_output,
        "too_long": "dropped" if options.is_dropping else "clipped",
        "num_clipped": fitted.num_clipped,
        "num_dropped": fitted.num_dropped,
        "prompt_form": "token ids",
        "is_output_forced": True,  # every answer has exactly the asked length
        "temperature": options.temperature,
        "seed": options.seed,
        "num_warmups": options.num_warmups,
    }
    if isinstance(options.workload, Trace):
        workload["trace"] = options.workload.describe()
    arrivals: dict[str, object] = {
        "arrivals": options.process.value if options.points[0].concurrency is None else "closed"
    }
    if options.process is Process.GAMMA:
        arrivals["burstiness"] = options.burstiness
    elif options.process is Process.POISSON:
        arrivals["burstiness"] = 1.0
    elif options.process is Process.BURST:
        arrivals["burst_size"] = options.burst_size
    elif options.process is Process.TRACE:
        arrivals["time_scale"] = options.time_scale if options.points[0].rate is None else "to the rate"
    arrivals |= {"duration_limit_s": options.duration_s, "max_in_flight": options.max_in_flight}
    return Setup(
        model.name, workload, arrivals, describe(senders), options.rule, label=options.label, is_local=options.is_local
    )
