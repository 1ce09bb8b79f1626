"""What the command line writes: answers to standard output, all else to standard error."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from client.errors import ClientError
from client.types import Finished, Model

# A model's text must not move the cursor or set the title of the user's terminal. Newline and tab may stay.
_CONTROLS = {code: "\ufffd" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}

notes = Console(stderr=True, highlight=False)


def write_answer(text: str) -> None:
    """Write a piece of an answer at once; on a terminal, without its control characters."""
    sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def note(text: str, style: str = "dim") -> None:
    """Write a line for the user, not for a program that reads the answer."""
    notes.print(Text(text.translate(_CONTROLS), style=style), soft_wrap=True)


def note_error(error: ClientError) -> None:
    """Say what failed, which fields or limits are concerned, and when to come back."""
    note(str(error), style="bold red")
    for field in error.fields:
        if field.description not in error.message:
            note(f"  {field.field}: {field.description}", style="red")
    for quota in error.quotas:
        note(f"  {quota.subject}: {quota.description}", style="red")
    if error.retry_after_s is not None:
        note(f"  try again in {error.retry_after_s:.1f} s", style="red")
    if error.status == "UNAUTHENTICATED":
        note("  name an API key with --api-key or TIDEGATE_API_KEY", style="red")
    if error.status == "UNAVAILABLE" and error.reason is None:
        note("  is the gateway running, and is --address (or TIDEGATE_ADDRESS) its address?", style="red")


def note_finished(finished: Finished) -> None:
    """One line about an answer: tokens, speed, why it ended."""
    usage, timing = finished.usage, finished.timing
    cached = f" ({usage.cached_prompt_tokens} cached)" if usage.cached_prompt_tokens else ""
    line = f"{usage.prompt_tokens} prompt tokens{cached}, {usage.completion_tokens} generated"
    decode_s = timing.total_s - timing.ttft_s
    if usage.completion_tokens > 1 and decode_s > 0:
        line += f", first after {timing.ttft_s:.2f} s, then {(usage.completion_tokens - 1) / decode_s:.0f} tokens/s"
    note(f"[{line}, {finished.reason.name.lower()}]")


def write_models(models: list[Model]) -> None:
    """A table of models."""
    table = Table("model", "context (tokens)", "vocabulary", "ready workers")
    for model in models:
        table.add_row(Text(model.name), str(model.context_length), str(model.vocab_size), str(model.num_workers))
    Console().print(table)
