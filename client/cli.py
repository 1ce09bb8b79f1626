"""Commands, options and exit codes of `python -m client`."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import aclosing
from typing import Annotated

import typer

from client.admin_cli import admin
from client.client import Client
from client.connection import EXIT_FAILED, TLS_FILES, TlsFiles, connect, failures
from client.conversation import Conversation, talk
from client.jobs_cli import jobs
from client.options import AsJson, BandName, Gateway, SamplingOptions, TenantAccess, command
from client.terminal import note, note_finished, write_answer, write_models
from client.types import Chat, Delta, Finished, Message, Text
from common.types import Band

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,  # they hold the API key
    help="Talk to a Tidegate gateway from a terminal.",
    epilog="Answers go to standard output, all else to standard error. Exit status: 0 success, 1 the request failed, "
    "2 wrong usage, 3 nobody could serve it now (try again later), 130 interrupted.",
)
app.add_typer(admin, name="admin")
app.add_typer(jobs, name="jobs")

TlsCa = Annotated[
    str, typer.Option(envvar="TIDEGATE_TLS_CA", help="Connect with TLS, trusting the authorities of this PEM file.")
]
TlsCert = Annotated[str, typer.Option(envvar="TIDEGATE_TLS_CERT", help="PEM file of a certificate to show (mTLS).")]
TlsKey = Annotated[str, typer.Option(envvar="TIDEGATE_TLS_KEY", help="PEM file of its private key.")]
TlsName = Annotated[
    str, typer.Option(envvar="TIDEGATE_TLS_NAME", help="Name in the server's certificate, if not the address's host.")
]
ModelName = Annotated[str, typer.Option("--model", "-m", help="The model; the deployment's default if left out.")]
BandOption = Annotated[
    BandName | None, typer.Option("--band", help="Be served below the tenant's band; never above it.")
]
System = Annotated[str, typer.Option("--system", "-s", help="The system message.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Tokens, times and finish reason after the answer.")]


@app.callback()
def _connection(
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_name: TlsName = "",
) -> None:
    TLS_FILES.set(TlsFiles(tls_ca, tls_cert, tls_key, tls_name))


@command(app)
def chat(
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="One turn instead of a conversation; - reads standard input.")
    ] = None,
    system: System = "",
    model: ModelName = "",
    band: BandOption = None,
    sampling: SamplingOptions = SamplingOptions(),
    access: TenantAccess = TenantAccess(timeout=None),
    verbose: Verbose = False,
) -> None:
    """Hold a conversation, streamed as it is generated; or ask once with --prompt.

    In a conversation /reset forgets what was said, /quit or Ctrl-D leaves, and Ctrl-C ends a running answer only.
    """
    with failures(), asyncio.Runner() as runner:
        client = runner.run(connect(access.address, access.api_key, access.tls))
        conversation = Conversation(client, sampling.sampling(), model, _band(band), access.timeout, system)
        try:
            if prompt is None:
                talk(conversation, runner, input)
                return
            finished = runner.run(conversation.answer(_argument(prompt)))
            if verbose and finished is not None:
                note_finished(finished)
        finally:
            runner.run(client.close())


@command(app)
def complete(
    text: Annotated[str, typer.Argument(help="Plain text to go on from; - reads standard input.")],
    model: ModelName = "",
    band: BandOption = None,
    sampling: SamplingOptions = SamplingOptions(),
    access: TenantAccess = TenantAccess(timeout=None),
    verbose: Verbose = False,
) -> None:
    """Go on from plain text, without a chat template."""

    async def ask(client: Client) -> None:
        stream = client.generate(
            Text(_argument(text)), sampling.sampling(), model=model, band=_band(band), timeout_s=access.timeout
        )
        async with aclosing(stream) as events:
            async for event in events:
                if isinstance(event, Delta):
                    write_answer(event.text)
                elif isinstance(event, Finished):
                    write_answer("\n")
                    if verbose:
                        note_finished(event)

    access.call(ask)


@command(app)
def count(
    text: Annotated[str, typer.Argument(help="The text; - reads standard input.")],
    as_chat: Annotated[bool, typer.Option("--chat", help="As a user's turn, chat template included.")] = False,
    model: ModelName = "",
    access: TenantAccess = TenantAccess(timeout=60.0),
) -> None:
    """Count the tokens that a prompt takes."""
    content = _argument(text)
    prompt = Chat([Message("user", content)]) if as_chat else Text(content)
    answer = access.call(lambda client: client.count_tokens(prompt, model=model, timeout_s=access.timeout))
    write_answer(f"{answer.num_tokens}\n")
    note(f"[the model takes {answer.context_length} tokens, answer included]")


@command(app)
def models(
    access: TenantAccess = TenantAccess(),
    as_json: AsJson = False,
) -> None:
    """List the models that can be asked for."""
    answer = access.call(lambda client: client.list_models(timeout_s=access.timeout))
    if not as_json:
        write_models(answer)
        return
    for each in answer:
        fields = {
            "name": each.name,
            "context_length": each.context_length,
            "vocab_size": each.vocab_size,
            "num_workers": each.num_workers,
        }
        write_answer(json.dumps(fields) + "\n")


@command(app)
def health(gateway: Gateway = Gateway(timeout=5.0)) -> None:
    """Ask whether requests are served; exit status 0 if, and only if, they are. Needs no API key."""
    status = gateway.call(lambda client: client.health(timeout_s=gateway.timeout))
    write_answer(status + "\n")
    if status != "SERVING":
        raise typer.Exit(EXIT_FAILED)


def _argument(text: str) -> str:
    return sys.stdin.read() if text == "-" else text


def _band(name: BandName | None) -> Band | None:
    return None if name is None else Band[name.name]
