"""`python -m bench doctor`: looks twice, and says what to change."""

from __future__ import annotations

import time
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.text import Text

from bench.doctor.diagnosis import Diagnosis, diagnose
from bench.doctor.facts import FactsError
from bench.doctor.snapshot import ReadError, read

EXIT_FAILED = 1
TICKS_PER_S = 4


def doctor(
    worker: Annotated[
        list[str], typer.Option(help="HOST:PORT of a worker's Prometheus endpoint; may be given more than once.")
    ],
    gateway: Annotated[
        list[str] | None, typer.Option(help="HOST:PORT of a gateway's; may be given more than once.")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.5, help="Seconds between the two looks.")] = 10.0,
) -> None:
    """Find what limits a live deployment: six questions, the figures that answer them, and the setting to change.

    Look while the load is on. Exit status: 0 diagnosed, 1 failed, 2 wrong usage.
    """
    console = Console()
    try:
        before = read(worker, gateway or (), time.monotonic())
        _pause(interval, console)
        after = read(worker, gateway or (), time.monotonic())
        diagnosis = diagnose(before, after)
    except (ReadError, FactsError) as error:
        Console(stderr=True).print(f"bench: {error}", style="red", markup=False, highlight=False)
        raise typer.Exit(EXIT_FAILED) from error
    console.print(describe(diagnosis))
    if not gateway:
        console.print("no gateway was looked at: its queue and limits are unknown", style="yellow")


def describe(diagnosis: Diagnosis) -> Text:
    """The six questions in order, and what to do."""
    text = Text()
    for number, answer in enumerate(diagnosis.answers, start=1):
        is_found = answer is diagnosis.found
        text.append(f"{number}. {answer.question} ", style="bold")
        text.append(
            "this is it" if is_found else "also" if answer.applies else "not this", "red" if is_found else "dim"
        )
        text.append(f"\n   {answer.figures}\n", style="" if is_found else "dim")
    text.append(f"\nDiagnosis: {diagnosis.found.cause.value}\n", style="bold")
    text.append(f"Change: {diagnosis.found.change}")
    return text


def _pause(interval_s: float, console: Console) -> None:
    ticks = max(1, round(interval_s * TICKS_PER_S))
    for _ in track(range(ticks), "looking", console=console, transient=True, disable=not console.is_terminal):
        time.sleep(interval_s / ticks)
