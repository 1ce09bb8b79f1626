"""`python -m bench modes`: options, their checks, and what is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.load.report import MISSING_PICTURES, can_draw
from bench.load.results import surroundings, write_json
from bench.modes.campaign import Campaign
from bench.modes.progress import Display
from bench.modes.report import LEGEND, document, gain_line, markdown, table
from bench.modes.summary import WorkloadFigures, summarize
from bench.modes.trial import Setting, TrialError
from bench.modes.workloads import MIXES, Workload, mix, replayed
from bench.report import PAGE, machine, replace_block
from bench.traces import TraceError, load_trace, parse_range
from common.types import ModelLimits
from worker.engine.modes import MODES

EXIT_FAILED, EXIT_INTERRUPTED = 1, 130
PAGE_BLOCK = "modes"
MAX_BATCHED_TOKENS = Setting("", 1).max_num_batched_tokens
"""A step's tokens in every mode; there cannot be more slots."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured."""

    num_requests: int
    batch_sizes: tuple[int, ...]
    scale: float  # of the mixes' lengths
    kv_cache_mib: int  # little enough for memory to be short


FULL = Extent(24, (8, 16), 1.0, 96)
QUICK = Extent(10, (4,), 0.5, 20)
TRACE = Path(__file__).with_name("azure_conversations.csv")
"""Rows 60 to 119 of AzureLLMInferenceTrace_conv (Azure Public Dataset, CC-BY-4.0; Patel et al., Splitwise:
Efficient Generative LLM Inference Using Phase Splitting, ISCA 2024)."""


def modes(
    trace: Annotated[Path, typer.Option(help="A trace to be served too (.csv, .jsonl); default: some chats.")] = TRACE,
    rows: Annotated[str, typer.Option(help="Rows of the trace, START:END from 0; default: as many as a mix has.")] = "",
    trace_scale: Annotated[float, typer.Option(min=0.001, help="Multiplies the trace's lengths.")] = 0.3,
    quick: Annotated[bool, typer.Option("--quick", help="Minutes, not ten: less of everything.")] = False,
    num_requests: Annotated[
        int | None, typer.Option("--num-requests", "-n", min=4, help="Requests of a mix; default 24, quick 10.")
    ] = None,
    batch_sizes: Annotated[str, typer.Option(help="max_num_seqs that are tried; default 8,16, quick 4.")] = "",
    kv_cache_mib: Annotated[
        int | None, typer.Option(min=8, help="Memory of the KV cache, the same for all modes; default 96, quick 20.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="GGUF file or Hugging Face folder; else the default one.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="Compute threads.")] = 2,
    seed: Annotated[int, typer.Option(help="The same seed makes the same requests.")] = 0,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder of the results.")] = None,
    no_plots: Annotated[bool, typer.Option("--no-plots", help="No picture.")] = False,
    page: Annotated[bool, typer.Option("--page", help=f"Write the tables into {PAGE}.")] = False,
) -> None:
    """Serve the same requests in each of the five batching modes, in this process, and compare.

    Ctrl-C keeps what was measured. Exit status: 0 measured, 1 failed, 2 wrong usage, 130 stopped early.
    """
    if not no_plots and not can_draw():
        raise typer.BadParameter(MISSING_PICTURES)
    if page and not PAGE.is_file():
        raise typer.BadParameter(f"--page writes into {PAGE}, which is not here: run it in the project's folder")
    extent = QUICK if quick else FULL
    sizes = _sizes(batch_sizes) if batch_sizes else extent.batch_sizes
    memory_mib = kv_cache_mib or extent.kv_cache_mib
    extent = Extent(num_requests or extent.num_requests, sizes, extent.scale, memory_mib)
    if dtype not in ("auto", "bfloat16", "float32"):
        raise typer.BadParameter(f"--dtype {dtype!r}: allowed are auto, bfloat16 and float32")
    console = Console()
    from bench.modes.session import OpenError, open_model  # here, because loading torch takes seconds

    try:
        opened = open_model(model, dtype, memory_mib, max(sizes), threads, console)
        workloads = _workloads(extent, trace, rows, trace_scale, seed, opened.limits)
    except TraceError as error:
        raise typer.BadParameter(str(error)) from error
    except OpenError as error:
        raise _failed(error) from error
    campaign = Campaign(lambda: opened.machine, opened.limits, tuple(MODES), sizes)
    is_whole = _measure(campaign, workloads, console)
    figures = [summarize(each, campaign.trials, campaign.modes) for each in workloads]
    figures = [each for each in figures if each.modes]
    facts = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **opened.facts,
        "seed": seed,
        "surroundings": surroundings(is_local=False),
    }
    folder = output or Path(".local") / "bench" / f"modes-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    _write(folder, figures, facts, is_whole=is_whole, has_picture=not no_plots)
    _show(console, figures)
    console.print(f"written to {folder}", highlight=False)
    if not is_whole:
        raise typer.Exit(EXIT_INTERRUPTED)
    if page:
        command = "make bench-modes" + (" ARGS='--quick'" if quick else "")
        versions = surroundings(is_local=False)["versions"]
        lines = [
            f"`{command}`, {datetime.now(UTC):%Y-%m-%d}: {machine()}",
            f"{facts['model_id']}, {facts['dtype']}, {memory_mib} MiB of KV cache, {threads} threads; {versions}",
        ]
        replace_block(PAGE, PAGE_BLOCK, markdown(figures, lines))


def _measure(campaign: Campaign, workloads: Sequence[Workload], console: Console) -> bool:
    """Returns whether it came to its end, rather than to a stop."""
    with Display(console, campaign.trials_per_workload * len(workloads)) as display:
        campaign.watcher = display
        try:
            for workload in workloads:
                campaign.run(workload)
        except KeyboardInterrupt:
            console.print("stopped; what was measured follows", style="yellow")
            return False
        except TrialError as error:
            raise _failed(error) from error
    return True


def _show(console: Console, workloads: Sequence[WorkloadFigures]) -> None:
    for figures in workloads:
        console.print()
        console.print(table(figures), highlight=False)
        if line := gain_line(figures):
            console.print(line, highlight=False, markup=False, style="bold")
    console.print()
    console.print(LEGEND, style="dim", highlight=False, markup=False)


def _write(
    folder: Path,
    workloads: Sequence[WorkloadFigures],
    facts: dict[str, object],
    *,
    is_whole: bool,
    has_picture: bool,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "modes.json", document(workloads, facts, is_whole=is_whole))
    if has_picture and workloads:
        from bench.load.plots import save
        from bench.modes.plots import overview  # here, because matplotlib is an extra

        save(overview(workloads), folder / "modes.png")


def _workloads(
    extent: Extent, trace: Path, rows: str, trace_scale: float, seed: int, limits: ModelLimits
) -> list[Workload]:
    """The mixes and the trace. Raises TraceError."""
    made = [
        mix(name, extent.num_requests, seed=seed, vocab_size=limits.vocab_size, scale=extent.scale) for name in MIXES
    ]
    first, end = parse_range(rows or f":{extent.num_requests}")
    loaded = load_trace(trace, first_row=first, end_row=end, seed=seed)
    longest = min(limits.context_length, limits.num_blocks * limits.block_size // 4)
    made.append(replayed(loaded, scale=trace_scale, max_tokens=longest, seed=seed, vocab_size=limits.vocab_size))
    return made


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        sizes = [0]
    limit = MAX_BATCHED_TOKENS
    if not 1 <= sizes[0] <= sizes[-1] <= limit:
        raise typer.BadParameter(f"--batch-sizes {text!r}: give numbers from 1 to {limit}, separated by commas")
    return tuple(sizes)


def _failed(error: Exception) -> typer.Exit:
    Console(stderr=True).print(f"bench: {error}", style="red", markup=False, highlight=False)
    return typer.Exit(EXIT_FAILED)
