"""Commands, options and exit codes of `python -m client`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from enum import StrEnum
from typing import Annotated, TypeVar

import typer

from client.admin_cli import admin
from client.client import Client
from client.connection import EXIT_FAILED, TLS_FILES, TlsFiles, connect, failures
from client.conversation import Conversation, talk
from client.jobs_cli import jobs
from client.terminal import note, note_finished, write_answer, write_models
from client.types import Chat, Delta, Finished, Message, Sampling, Text
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

_T = TypeVar("_T")


class BandName(StrEnum):
    """A band as the user names it."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


Address = Annotated[
    str, typer.Option("--address", "-a", envvar="TIDEGATE_ADDRESS", help="The gateway, HOST:PORT.", show_envvar=True)
]
ApiKey = Annotated[
    str, typer.Option("--api-key", "-k", envvar="TIDEGATE_API_KEY", help="The tenant's key.", show_default=False)
]
Tls = Annotated[bool, typer.Option("--tls", help="Connect with TLS, trusting the system's authorities.")]
TlsCa = Annotated[
    str, typer.Option(envvar="TIDEGATE_TLS_CA", help="Connect with TLS, trusting the authorities of this PEM file.")
]
TlsCert = Annotated[str, typer.Option(envvar="TIDEGATE_TLS_CERT", help="PEM file of a certificate to show (mTLS).")]
TlsKey = Annotated[str, typer.Option(envvar="TIDEGATE_TLS_KEY", help="PEM file of its private key.")]
TlsName = Annotated[
    str, typer.Option(envvar="TIDEGATE_TLS_NAME", help="Name in the server's certificate, if not the address's host.")
]
TimeoutS = Annotated[float | None, typer.Option("--timeout", min=0.001, help="Seconds for the whole call.")]
ModelName = Annotated[str, typer.Option("--model", "-m", help="The model; the deployment's default if left out.")]
BandOption = Annotated[
    BandName | None, typer.Option("--band", help="Be served below the tenant's band; never above it.")
]
System = Annotated[str, typer.Option("--system", "-s", help="The system message.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Tokens, times and finish reason after the answer.")]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy. [0, 100]")]
TopK = Annotated[int | None, typer.Option(help="Keep the k most probable tokens; 0 keeps all.")]
TopP = Annotated[float | None, typer.Option(help="Keep the smallest set of this total probability. [0, 1]")]
MinP = Annotated[float | None, typer.Option(help="Keep tokens this probable beside the best. [0, 1]")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Above 1 discourages tokens already seen. (0, 10]")]
PresencePenalty = Annotated[float | None, typer.Option(help="Discourages tokens already generated. [-2, 2]")]
FrequencyPenalty = Annotated[float | None, typer.Option(help="The same for each time. [-2, 2]")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", "-n", min=1, help="Most tokens of the answer.")]
Seed = Annotated[int | None, typer.Option(min=0, max=2**64 - 1, help="The same seed gives the same answer.")]
Stop = Annotated[list[str] | None, typer.Option(help="Ends the answer before this text; may be given up to 16 times.")]

Window = Annotated[
    int | None,
    typer.Option("--kv-window-tokens", min=1, help="Tokens that a token sees of its own sequence."),
]
Sinks = Annotated[
    int | None, typer.Option("--kv-sink-tokens", min=0, help="First tokens that stay visible besides the window.")
]

DEFAULT_ADDRESS = "127.0.0.1:50051"


@app.callback()
def _connection(
    tls_ca: TlsCa = "",
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_name: TlsName = "",
) -> None:
    TLS_FILES.set(TlsFiles(tls_ca, tls_cert, tls_key, tls_name))


@app.command()
def chat(
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="One turn instead of a conversation; - reads standard input.")
    ] = None,
    system: System = "",
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    model: ModelName = "",
    band: BandOption = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    presence_penalty: PresencePenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
    stop: Stop = None,
    kv_window_tokens: Window = None,
    kv_sink_tokens: Sinks = None,
    timeout: TimeoutS = None,
    tls: Tls = False,
    verbose: Verbose = False,
) -> None:
    """Hold a conversation, streamed as it is generated; or ask once with --prompt.

    In a conversation /reset forgets what was said, /quit or Ctrl-D leaves, and Ctrl-C ends a running answer only.
    """
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        max_tokens=max_tokens,
        seed=seed,
        stop=stop or (),
        kv_window_tokens=kv_window_tokens,
        kv_sink_tokens=kv_sink_tokens,
    )
    with failures(), asyncio.Runner() as runner:
        client = runner.run(connect(address, api_key, tls))
        conversation = Conversation(client, sampling, model, _band(band), timeout, system)
        try:
            if prompt is None:
                talk(conversation, runner, input)
                return
            finished = runner.run(conversation.answer(_argument(prompt)))
            if verbose and finished is not None:
                note_finished(finished)
        finally:
            runner.run(client.close())


@app.command()
def complete(
    text: Annotated[str, typer.Argument(help="Plain text to go on from; - reads standard input.")],
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    model: ModelName = "",
    band: BandOption = None,
    temperature: Temperature = None,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    presence_penalty: PresencePenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    max_tokens: MaxTokens = None,
    seed: Seed = None,
    stop: Stop = None,
    kv_window_tokens: Window = None,
    kv_sink_tokens: Sinks = None,
    timeout: TimeoutS = None,
    tls: Tls = False,
    verbose: Verbose = False,
) -> None:
    """Go on from plain text, without a chat template."""
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        max_tokens=max_tokens,
        seed=seed,
        stop=stop or (),
        kv_window_tokens=kv_window_tokens,
        kv_sink_tokens=kv_sink_tokens,
    )

    async def ask(client: Client) -> None:
        stream = client.generate(Text(_argument(text)), sampling, model=model, band=_band(band), timeout_s=timeout)
        async with aclosing(stream) as events:
            async for event in events:
                if isinstance(event, Delta):
                    write_answer(event.text)
                elif isinstance(event, Finished):
                    write_answer("\n")
                    if verbose:
                        note_finished(event)

    _run(address, api_key, tls, ask)


@app.command()
def count(
    text: Annotated[str, typer.Argument(help="The text; - reads standard input.")],
    as_chat: Annotated[bool, typer.Option("--chat", help="As a user's turn, chat template included.")] = False,
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    model: ModelName = "",
    timeout: TimeoutS = 60.0,
    tls: Tls = False,
) -> None:
    """Count the tokens that a prompt takes."""
    content = _argument(text)
    prompt = Chat([Message("user", content)]) if as_chat else Text(content)
    answer = _run(address, api_key, tls, lambda client: client.count_tokens(prompt, model=model, timeout_s=timeout))
    write_answer(f"{answer.num_tokens}\n")
    note(f"[the model takes {answer.context_length} tokens, answer included]")


@app.command()
def models(
    address: Address = DEFAULT_ADDRESS,
    api_key: ApiKey = "",
    timeout: TimeoutS = 10.0,
    tls: Tls = False,
    as_json: Annotated[bool, typer.Option("--json", help="For programs: one object for each line.")] = False,
) -> None:
    """List the models that can be asked for."""
    answer = _run(address, api_key, tls, lambda client: client.list_models(timeout_s=timeout))
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


@app.command()
def health(address: Address = DEFAULT_ADDRESS, timeout: TimeoutS = 5.0, tls: Tls = False) -> None:
    """Ask whether requests are served; exit status 0 if, and only if, they are. Needs no API key."""
    status = _run(address, "", tls, lambda client: client.health(timeout_s=timeout))
    write_answer(status + "\n")
    if status != "SERVING":
        raise typer.Exit(EXIT_FAILED)


def _argument(text: str) -> str:
    return sys.stdin.read() if text == "-" else text


def _band(name: BandName | None) -> Band | None:
    return None if name is None else Band[name.name]


def _run(address: str, api_key: str, tls: bool, call: Callable[[Client], Awaitable[_T]]) -> _T:
    async def run() -> _T:
        async with await connect(address, api_key, tls) as client:
            return await call(client)

    with failures():
        return asyncio.run(run())
