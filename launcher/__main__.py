"""`python -m launcher run` and `python -m launcher demo`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from client import ClientError, Sampling
from common.clock import SystemClock
from common.default_model import DefaultModelError
from common.local_redis import LocalRedisError
from launcher import screen
from launcher.chats import Chat, ask
from launcher.process import ChildDiedError
from launcher.stack import Stack, StackOptions, StartError

INTERRUPTED = 130

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Start a whole deployment on this machine: redis, a worker with a real model, and a gateway.",
)
StateDir = Annotated[Path, typer.Option(help="Folder for logs and the tenants file.")]

QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
)


@app.command()
def run(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the gateway on 127.0.0.1.")] = 50051,
    state_dir: StateDir = Path(".local"),
) -> None:
    """Start everything, show a first answer, and stay up until Ctrl-C."""
    sys.exit(_until_signal(_run(StackOptions(state_dir, port)), interrupted=0))


@app.command()
def demo(state_dir: StateDir = Path(".local")) -> None:
    """Let three tenants chat at once; exit with 0 only if every answer ended normally."""
    sys.exit(_until_signal(_demo(StackOptions(state_dir)), interrupted=INTERRUPTED))


async def _run(options: StackOptions) -> int:
    console = Console()
    async with _started(options, console) as stack:
        _print_addresses(stack, console)
        tenant = stack.tenants[0]
        chat = Chat(tenant.tenant_id, QUESTIONS[0], tenant.api_key, Sampling(temperature=0, max_tokens=64))
        console.print(f"\n{chat.question}", style="italic")
        printed = 0

        def show() -> None:
            nonlocal printed
            console.print(chat.text[printed:], end="", markup=False, highlight=False, soft_wrap=True)
            printed = len(chat.text)

        await stack.run(ask(chat, stack.gateway_address, SystemClock(), show))
        console.print("\n\nReady. Ctrl-C drains and stops everything.")
        await stack.run(asyncio.Event().wait())
    return 0


async def _demo(options: StackOptions) -> int:
    console = Console()
    clock = SystemClock()
    async with _started(options, console) as stack:
        sampling = Sampling(temperature=0.7, seed=7, max_tokens=160)
        chats = [
            Chat(f"{tenant.tenant_id}, {tenant.band} band", question, tenant.api_key, sampling)
            for tenant, question in zip(stack.tenants, QUESTIONS, strict=True)
        ]
        with screen.side_by_side(console, chats) as show:

            async def talk(chat: Chat) -> None:
                try:
                    await ask(chat, stack.gateway_address, clock, lambda: show(chat))
                except ClientError as error:
                    chat.error = str(error)

            async def talk_all() -> None:
                await asyncio.gather(*(talk(chat) for chat in chats))

            await stack.run(talk_all())
        console.print(screen.summary(chats))
    return 0 if all(chat.is_well_ended for chat in chats) else 1


@contextlib.asynccontextmanager
async def _started(options: StackOptions, console: Console) -> AsyncIterator[Stack]:
    """A running stack; a second interrupt while it drains ends it at once."""
    with screen.progress(console) as show_progress:
        stack = Stack(options, show_progress)
        await stack.__aenter__()
    try:
        yield stack
    finally:
        console.print("\nDraining ...")
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stack.kill)
        await stack.__aexit__(None, None, None)


def _print_addresses(stack: Stack, console: Console) -> None:
    def line(name: str, value: object) -> None:
        console.print(f"  {name:<18}{value}", markup=False, highlight=False, soft_wrap=True)

    console.print("\nTidegate is up")
    line("gateway", stack.gateway_address)
    line("gateway metrics", f"http://{stack.gateway_metrics}/metrics")
    line("worker", stack.worker_address)
    line("worker metrics", f"http://{stack.worker_metrics}/metrics")
    line("redis", stack.redis_url)
    line("logs", stack.log_dir)
    console.print("API keys, made anew at every start:")
    for tenant in stack.tenants:
        line(f"{tenant.tenant_id} ({tenant.band})", tenant.api_key)
    console.print("Try it in another terminal:")
    key = stack.tenants[0].api_key
    console.print(
        f"  .venv/bin/python -m client chat --address {stack.gateway_address} --api-key {key}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _until_signal(program: Coroutine[Any, Any, int], *, interrupted: int) -> int:
    """Runs a program that SIGINT or SIGTERM cancels; returns its status, or `interrupted`."""

    async def main() -> int:
        working = asyncio.ensure_future(program)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, working.cancel)
        try:
            return await working
        except asyncio.CancelledError:
            return interrupted

    try:
        return asyncio.run(main())
    except (ChildDiedError, StartError, ClientError, DefaultModelError, LocalRedisError) as error:
        print(f"launcher: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    app()
