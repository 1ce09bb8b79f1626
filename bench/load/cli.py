"""`python -m bench load`: options, their checks, and exit codes."""

from __future__ import annotations

import asyncio
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.load.arrivals import Process
from bench.load.goodput import CapacitySearch, GoodputError, parse_rule
from bench.load.plan import PlanError, Point
from bench.load.report import MISSING_PICTURES, can_draw
from bench.load.scrape import Endpoints
from bench.load.session import Options, measure
from bench.load.shapes import WORKLOADS
from bench.load.tenants import Sender, TenantsError, load_senders, parse_bands, parse_sender
from bench.report import PAGE
from bench.traces import Trace, TraceError, load_trace, parse_range
from client import ClientError
from common.clock import SystemClock
from common.default_model import DefaultModelError
from common.local_redis import LocalRedisError
from launcher.process import ChildDiedError
from launcher.stack import StartError

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
LOCAL_SCALE = 0.1
"""Lengths of a local deployment's default model, which runs on a few processor cores."""


def load(
    workload: Annotated[
        str, typer.Argument(help="mixed, decode, burst, prefix, or a trace file (.csv, .jsonl).")
    ] = "mixed",
    rate: Annotated[
        str, typer.Option(help="Open loop: requests a second; several with commas are a sweep, as in 1,2,4.")
    ] = "",
    concurrency: Annotated[
        str, typer.Option(help="Closed loop: users who each wait for their answer; several with commas are a sweep.")
    ] = "",
    arrivals: Annotated[
        Process | None,
        typer.Option(help="How arrivals are spread; default: the trace's own times, groups for burst, else poisson."),
    ] = None,
    num_requests: Annotated[
        int | None,
        typer.Option("--num-requests", "-n", min=1, help="Requests of each run; default 100, or a whole trace."),
    ] = None,
    duration: Annotated[float | None, typer.Option(min=0.1, help="Seconds in which requests arrive.")] = None,
    scale: Annotated[
        float | None, typer.Option(min=0.0001, help=f"Multiplies all lengths; default 1, with --local {LOCAL_SCALE}.")
    ] = None,
    local: Annotated[bool, typer.Option("--local", help="Start a private deployment for this measurement.")] = False,
    address: Annotated[
        str, typer.Option("--address", "-a", envvar="TIDEGATE_ADDRESS", help="The gateway, HOST:PORT.")
    ] = "127.0.0.1:50051",
    api_key: Annotated[
        str,
        typer.Option("--api-key", "-k", envvar="TIDEGATE_API_KEY", help="The only tenant's key.", show_default=False),
    ] = "",
    tenant: Annotated[
        list[str] | None, typer.Option(help="A tenant, ID=KEY or ID:SHARE=KEY; may be given more than once.")
    ] = None,
    tenants_file: Annotated[
        Path | None,
        typer.Option(
            help='JSON: {"tenants": [{"id", "api_key", "share"?, "band"?}, ...]}; '
            "with --local without keys, and with weight? and limits?."
        ),
    ] = None,
    share: Annotated[
        list[str] | None, typer.Option(help="Share of a tenant, ID=SHARE; may be given more than once.")
    ] = None,
    bands: Annotated[
        str, typer.Option(help="Bands that requests ask for, by share, as in high=1,low=3; default: the tenant's own.")
    ] = "",
    goodput: Annotated[
        list[str] | None, typer.Option(help="Limit of a good request, ttft:MS, tpot:MS or e2el:MS; all must hold.")
    ] = None,
    find_capacity: Annotated[
        bool, typer.Option("--find-capacity", help="Search the highest rate that is served well; begins at --rate.")
    ] = False,
    attainment: Annotated[float, typer.Option(min=0.01, max=1.0, help="Share of good requests at capacity.")] = 0.9,
    max_points: Annotated[int, typer.Option(min=1, help="Rates that the search tries at most.")] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each point, each with arrivals of its own.")] = 1,
    max_in_flight: Annotated[
        int | None,
        typer.Option(min=1, help="Open loop: requests under way at most; waiting for a place counts as latency."),
    ] = None,
    burstiness: Annotated[
        float, typer.Option(min=0.01, help="Of gamma arrivals: 1 is Poisson, below it clumps, above it even gaps.")
    ] = 1.0,
    burst_size: Annotated[int, typer.Option(min=1, help="Requests of a group, for burst arrivals.")] = 16,
    rows: Annotated[str, typer.Option(help="Rows of the trace, START:END from 0, the end excluded.")] = ":",
    time_scale: Annotated[
        float, typer.Option(min=0.0001, help="Multiplies a trace's times: 0.5 is twice as fast.")
    ] = 1.0,
    max_prompt: Annotated[int | None, typer.Option(min=1, help="Longest prompt, in tokens.")] = None,
    max_output: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")] = None,
    drop_long: Annotated[
        bool, typer.Option("--drop-long", help="Leave out what is too long, instead of clipping.")
    ] = False,
    worker_metrics: Annotated[
        list[str] | None, typer.Option(help="HOST:PORT of a worker's Prometheus endpoint; may be given more than once.")
    ] = None,
    gateway_metrics: Annotated[
        list[str] | None,
        typer.Option(help="HOST:PORT of a gateway's Prometheus endpoint; may be given more than once."),
    ] = None,
    scrape_interval: Annotated[float, typer.Option(min=0.05, help="Seconds between looks at the metrics.")] = 0.5,
    num_warmups: Annotated[int, typer.Option(min=0, help="Short requests sent before, in no result.")] = 2,
    model: Annotated[str, typer.Option("--model", "-m", help="The model; the deployment's default if left out.")] = "",
    temperature: Annotated[float, typer.Option(min=0.0, max=100.0, help="Of sampling; 0 is greedy.")] = 0.0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for each answer.")] = 600.0,
    seed: Annotated[int, typer.Option(help="The same seed sends the same requests.")] = 0,
    label: Annotated[str, typer.Option(help="A name for the results.")] = "",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder of the results.")] = None,
    save_detailed: Annotated[bool, typer.Option("--save-detailed", help="Every gap between deliveries too.")] = False,
    no_plots: Annotated[bool, typer.Option("--no-plots", help="JSON only.")] = False,
    page: Annotated[bool, typer.Option("--page", help=f"Write the figures into {PAGE}.")] = False,
) -> None:
    """Put load on a gateway and draw what came of it.

    Latencies count from the scheduled arrival. Refused and failed requests are counted and shown. Ctrl-C writes what
    was measured. Exit status: 0 measured, 1 failed, 2 wrong usage, 130 stopped early.
    """
    if not no_plots and not can_draw():
        raise typer.BadParameter(MISSING_PICTURES)
    if page and not PAGE.is_file():
        raise typer.BadParameter(f"--page writes into {PAGE}, which is not here: run it in the project's folder")
    clock = SystemClock()
    try:
        the_workload: str | Trace = workload if workload in WORKLOADS else _trace(workload, rows, seed)
        process = arrivals or _default_process(the_workload, rate)
        if process is Process.TRACE and not (isinstance(the_workload, Trace) and the_workload.has_arrivals):
            raise PlanError("this workload has no arrivals of its own: give --rate or --concurrency")
        points = _points(rate, concurrency, process, repeats)
        search = None
        if find_capacity:
            if points[0].rate is None or len(points) > 1:
                raise PlanError("--find-capacity begins at one --rate, and is an open loop")
            search = CapacitySearch(points[0].rate, attainment, max_points)
        options = Options(
            the_workload,
            points,
            output or _default_output(the_workload, clock.time()),
            address,
            _senders(api_key, tenant or [], tenants_file, is_local=local),
            shares=dict(_share(text) for text in share or []),
            bands=parse_bands(bands) if bands else {},
            endpoints=Endpoints(tuple(worker_metrics or ()), tuple(gateway_metrics or ())),
            process=process,
            burstiness=burstiness,
            burst_size=burst_size,
            time_scale=time_scale,
            scale=scale or (LOCAL_SCALE if local else 1.0),
            max_prompt=max_prompt,
            max_output=max_output,
            is_dropping=drop_long,
            num_requests=num_requests,
            duration_s=duration,
            max_in_flight=max_in_flight,
            rule=parse_rule(goodput or []),
            search=search,
            num_warmups=num_warmups,
            model=model,
            temperature=temperature,
            timeout_s=timeout,
            seed=seed,
            scrape_interval_s=scrape_interval,
            label=label,
            is_local=local,
            is_detailed=save_detailed,
            has_pictures=not no_plots,
            command=shlex.join(["python", "-m", "bench", *sys.argv[1:]]) if page else "",
        )
    except (TraceError, TenantsError, GoodputError, PlanError) as error:
        raise typer.BadParameter(str(error)) from error
    _run(options, clock)


def _run(options: Options, clock: SystemClock) -> None:
    console = Console()
    try:
        is_whole = asyncio.run(measure(options, console, clock))
    except (TenantsError, PlanError) as error:
        raise typer.BadParameter(str(error)) from error
    except (ClientError, ChildDiedError, StartError, DefaultModelError, LocalRedisError, OSError) as error:
        Console(stderr=True).print(f"bench: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(EXIT_FAILED) from error
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if not is_whole:
        raise typer.Exit(EXIT_INTERRUPTED)


def _trace(name: str, rows: str, seed: int) -> Trace:
    path = Path(name)
    if not path.is_file():
        raise TraceError(f"{name!r} is neither a workload ({', '.join(WORKLOADS)}) nor a file")
    first_row, end_row = parse_range(rows)
    return load_trace(path, first_row=first_row, end_row=end_row, seed=seed)


def _default_process(workload: str | Trace, rate: str) -> Process:
    if isinstance(workload, Trace):
        return Process.TRACE if workload.has_arrivals and not rate else Process.POISSON
    return Process.BURST if workload == "burst" else Process.POISSON


def _points(rate: str, concurrency: str, process: Process, repeats: int) -> tuple[Point, ...]:
    if rate and concurrency:
        raise PlanError("--rate is an open loop and --concurrency a closed one: give one of them")
    if concurrency:
        points = [Point(concurrency=int(number)) for number in _numbers(concurrency, "--concurrency", is_whole=True)]
    elif rate or process is not Process.TRACE:
        points = [Point(rate=number) for number in _numbers(rate or "1", "--rate", is_whole=False)]
    else:
        points = [Point()]
    return tuple(Point(each.rate, each.concurrency, repeat) for each in points for repeat in range(repeats))


def _numbers(text: str, option: str, *, is_whole: bool) -> list[float]:
    numbers = []
    for part in text.split(","):
        try:
            number = float(part)
        except ValueError:
            number = 0.0
        if not 0 < number < float("inf") or (is_whole and number != int(number)):
            kind = "whole numbers" if is_whole else "numbers"
            raise PlanError(f"{option} {text!r}: give {kind} above 0, separated by commas")
        numbers.append(number)
    return numbers


def _share(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not name or number <= 0:
        raise TenantsError(f"--share {text!r}: give ID=SHARE with a share above 0")
    return name, number


def _senders(api_key: str, tenants: list[str], file: Path | None, *, is_local: bool) -> tuple[Sender, ...]:
    if is_local:
        if tenants:
            raise TenantsError(
                "--local makes its tenants: paying, regular and batch, to be given shares with --share; or those of a "
                "--tenants-file"
            )
        return load_senders(file, is_local=True) if file is not None else ()
    if file is not None:
        return load_senders(file) + tuple(parse_sender(text) for text in tenants)
    if tenants:
        return tuple(parse_sender(text) for text in tenants)
    if not api_key:
        raise TenantsError("who sends? give --api-key, --tenant or --tenants-file, or --local for a private deployment")
    return (Sender("tenant", api_key),)


def _default_output(workload: str | Trace, now: float) -> Path:
    name = workload.path.stem if isinstance(workload, Trace) else workload
    return Path(".local") / "bench" / f"load-{name}-{datetime.fromtimestamp(now, UTC):%Y%m%d-%H%M%S}"
