"""What the launcher shows: progress while it starts, answers side by side as they stream, a closing table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from launcher.chats import Chat

REFRESHES_PER_S = 12


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str], None]]:
    """A function that shows what takes long: a spinner on a terminal, lines elsewhere."""
    if not console.is_terminal:
        yield lambda text: console.print(f"... {text}", highlight=False, markup=False)
        return
    with console.status("starting") as status:
        yield lambda text: status.update(Text(text))


@contextmanager
def side_by_side(console: Console, chats: Sequence[Chat]) -> Iterator[Callable[[Chat], None]]:
    """A function to be called whenever a chat has more text: columns on a terminal, marked lines elsewhere."""
    if not console.is_terminal:
        yield _line_printer(console)
        return
    with Live(_columns(console, chats), console=console, refresh_per_second=REFRESHES_PER_S) as live:
        yield lambda chat: live.update(_columns(console, chats))
        live.update(_columns(console, chats), refresh=True)


def _columns(console: Console, chats: Sequence[Chat]) -> Columns:
    width = max(20, console.width // max(1, len(chats)) - 1)
    height = max(6, min(24, console.height - 6))
    return Columns([_panel(chat, width, height) for chat in chats], width=width, padding=(0, 0))


def _panel(chat: Chat, width: int, height: int) -> Panel:
    text = Text(chat.text)
    lines = text.wrap(Console(width=width - 4), width - 4)
    body = Text("\n").join(lines[-(height - 4) :])
    question = Text(f"{chat.question}\n", style="italic dim")
    state = "red" if chat.error else "green" if chat.reason else "yellow"
    return Panel(question + body, title=chat.title, border_style=state, width=width, height=height)


def _line_printer(console: Console) -> Callable[[Chat], None]:
    shown: dict[int, int] = {}

    def show(chat: Chat) -> None:
        """Prints whole pieces only: up to the last space, or all of it at the end."""
        start = shown.get(id(chat), 0)
        end = len(chat.text) if chat.reason or chat.error else chat.text.rfind(" ") + 1
        if end - start >= 60 or (chat.reason and end > start):
            piece = " ".join(chat.text[start:end].split())
            console.print(f"[{chat.title}] {piece}", highlight=False, markup=False, soft_wrap=True)
            shown[id(chat)] = end

    return show


def summary(chats: Sequence[Chat]) -> Table:
    """TTFT, TPOT and tokens of every chat."""
    table = Table(title="Answers", title_justify="left")
    table.add_column("tenant")
    for name in ("TTFT ms", "TPOT ms", "prompt", "cached", "output tokens"):
        table.add_column(name, justify="right")
    table.add_column("ended")
    for chat in chats:
        usage = chat.usage
        counts = (usage.prompt_tokens, usage.cached_prompt_tokens, usage.completion_tokens) if usage else ("-",) * 3
        end = chat.reason.name if chat.reason else chat.error or "-"
        table.add_row(chat.title, _ms(chat.ttft_s), _ms(chat.tpot_s), *map(str, counts), Text(end))
    return table


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.1f}"
